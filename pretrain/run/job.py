"""Check a recipe against this machine, its packs and its model, before weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from foundation.units import bytes_text
from packing.batch import BatchStream
from packing.order import MixedPacks
from packing.store import notes_of
from packing.stream import order_of
from pretrain.checkpoint.checkpoint import free_memory
from pretrain.checkpoint.state import stored
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.trackers import check_trackers
from pretrain.model import attention_backends, attention_support, graphs
from pretrain.model.configuration import load_config, source_config
from pretrain.model.distributed import (
    device_of,
    gathers_once_a_step,
    processes_on_host,
    raise_on_all_ranks,
    replicas_of,
)
from pretrain.model.huggingface import build_on_meta, check_architecture, decoder_layers
from pretrain.model.hybrids import kernels
from pretrain.model.hybrids.families import mixing_functions
from pretrain.optimizer import schedule
from pretrain.optimizer.muon import find_matrix_weights
from pretrain.plan.checks import (
    check_fit,
    check_held_out,
    check_settings,
    check_sizes,
    steps_of,
)
from pretrain.plan.memory import Devices
from pretrain.plan.plan import KEPT_FREE, Plan, Training, plan_for
from pretrain.precision.schedule import Phase, PrecisionSchedule
from pretrain.precision.scope import check_scope
from pretrain.precision.selection import SupportCheck, select_precision, support_check_on
from pretrain.precision.settings import WEIGHT_DTYPES, ActivePrecision, phases_of
from pretrain.run.data import (
    Data,
    check_labels,
    check_tokens,
    open_data,
)
from pretrain.run.tokenizer import fingerprint_at, tokenizer_for, with_tokens
from pretrain.settings.config import branch_checkpoint, identity_of, run_dir_of, usual_weights
from pretrain.settings.recipe import Recipe

# Product of the tokens in a microbatch and the hidden size below which a CPU uses one thread.
# Threads wait for each other after every operation. If other programs use the cores, as on most
# laptops, waiting takes longer than the operations of such a small model.
FEW_VALUES = 2**19


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe whose settings fit together, with the precisions that this machine has."""

    recipe: Recipe
    # The phases with supported precisions.
    phases: list[Phase]


@dataclass(frozen=True)
class Job:
    """A plan for this machine, with the shapes of the model and the packs."""

    plan: Plan
    run_dir: Path
    # The model on the meta device, with modules but without weights.
    shapes: PreTrainedModel
    data: Data
    tokenizer: PreTrainedTokenizerBase | None
    # The values in the config.json of `model.source`, by dotted key. They are part of the identity.
    source_config: dict[str, Any]

    @property
    def recipe(self) -> Recipe:
        """Return the recipe. An `auto` is replaced by its result as soon as the result is known."""
        return self.plan.recipe

    @property
    def weight_dtype(self) -> torch.dtype:
        """Return the dtype of the stored weights."""
        return getattr(torch, WEIGHT_DTYPES[self.recipe.weights])

    def with_settings(self, section: str, **values: Any) -> Job:
        """Return a copy of the job with changed values in one section of its recipe.

        The values are not validated. The choices that `plan_for` has made for the earlier values
        stay: `Plan.attention`, `layers`, `loss_chunk` and `keeps_rotated`.
        """
        changed = getattr(self.recipe, section).model_copy(update=values)
        recipe = self.recipe.model_copy(update={section: changed})
        return replace(self, plan=replace(self.plan, recipe=recipe))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the identity: the settings that are equal if two runs are the same training.

        The identity maps dotted keys to values. When a run resumes, its identity is compared with
        the identity in the checkpoint. If the machine lacks a precision of the recipe, the identity
        has the replacement of this precision.
        """
        available = [active for _, active in self.plan.schedule.phases]
        setting: Any = self.recipe.precision
        if isinstance(setting, str):
            (active,) = available
            effective = {"precision": active.precision.name, "fp8_config": active.settings}
        else:
            phases = [
                phase.model_copy(update={"use": active.precision.name})
                for phase, active in zip(setting, available, strict=True)
            ]
            effective = {"precision": tuple(phases)}
        recipe = self.recipe.model_copy(update=effective)
        identity = identity_of(recipe, self.data.train.fingerprint) | self.source_config
        packs = self.data.readable
        if isinstance(packs, MixedPacks):
            # The fingerprint already depends on the weights of sources. These keys are added so
            # that a message can name the weight that has changed.
            for name, weight in packs.weights.items():
                identity[f"data.sources.{name}.weight"] = weight
        return stored(identity)

    def batches(self, accelerator: Accelerator) -> BatchStream:
        """Return the training batches of this rank. Any step can be read.

        The batches depend only on the recipe, the packs, and the launch's ranks.
        """
        packs = self.data.train
        return BatchStream(
            packs=packs,
            order=order_of(packs, self.recipe.seed),
            packs_per_step=self.plan.packs_per_step,
            **self.batching(accelerator),
        )

    def batching(self, accelerator: Accelerator) -> dict[str, Any]:
        """Return the keyword arguments of `Batching`, for training and evaluation on this rank."""
        return {
            "microbatch": self.plan.expected_microbatch,
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "mask_boundaries": self.recipe.data.mask_boundaries,
            "pin_memory": accelerator.device.type == "cuda",
            "vocab_size": self.shapes.config.vocab_size,
        }


def prepare_job(
    recipe: Recipe,
    accelerator: Accelerator,
    overrides: Sequence[str],
    data: Data | None = None,
) -> Job:
    """Check the recipe and return its job on this machine. Fast checks run before slow ones.

    overrides: the key=value overrides on the command line. If they set the length of the training,
        the schedule is shortened to this length.
    data: the packs of the recipe. If None, `open_data` opens them, and prepares missing packs.

    Raises InputError if the recipe, the model, the packs and the machine do not fit together.
    """
    checked = check_recipe(
        recipe,
        overrides,
        support_check_on(accelerator.device.type),
        accelerator.num_processes,
    )
    open_packs = partial(open_data, recipe.data, is_main_process=accelerator.is_main_process)
    # Open packs that exist before the model is checked, because they may record their tokenizer.
    # Packs with a source may have to be prepared, which may take hours. Their tokenizer is
    # `data.tokenizer`, so open them after the checks of the model.
    if data is None and not recipe.data.prepares:
        data = open_packs()
    checked, shapes, flops = check_model(checked, data, needs_tokenizer=True)
    _check_attention(checked, flops, accelerator.device.type)
    _check_kernels(shapes, accelerator)
    tokenizer = tokenizer_for(checked.recipe, data, shapes.config)
    data = data or open_packs()
    _check_data(checked.recipe, data, shapes.config)
    training = _training_of(checked, flops, data, overrides)
    plan = plan_for(training, shapes, _devices_of(accelerator, checked.phases))
    if plan.devices.type == "cpu":
        use_one_thread(plan)
    # Raise InputError now if the recipe requires CUDA graphs and they are impossible.
    cuda_graphs(plan, shapes)
    if plan.recipe.optimizer.offload != "none" and plan.devices.type == "cuda":
        raise_on_all_ranks(lambda: check_host_memory(plan, processes_on_host(), free_memory()))
    return Job(plan, run_dir_of(recipe), shapes, data, tokenizer, source_config(recipe.model))


def training_elsewhere(
    recipe: Recipe, overrides: Sequence[str], data: Data | None
) -> tuple[Training, PreTrainedModel]:
    """Check a recipe that other machines will train.

    data: the packs, or None if they are missing on this machine.

    Every precision counts as supported. `lab.speed.targets.obstacle` checks the devices. The
    machines have GPUs, so `weights: auto` is their default on a GPU.

    Returns the training, and the model on the meta device. See `prepare_job` for the other
    arguments and the errors.
    """
    if recipe.weights == "auto":
        recipe = recipe.model_copy(update={"weights": usual_weights(recipe, on_gpu=True)})
    checked = check_recipe(recipe, overrides, lambda precision: None)
    checked, shapes, flops = check_model(checked, data, needs_tokenizer=False)
    if data is not None:
        _check_data(checked.recipe, data, shapes.config)
    elif recipe.train.epochs is not None:
        raise InputError(
            f"`train.epochs` needs the number of packs, but {recipe.data.packs} has none yet; to "
            "plan without packs, set train.steps=N or train.tokens=N instead"
        )
    return _training_of(checked, flops, data, overrides), shapes


# ── 1: the recipe ─────────────────────────────────────────────────────────────────────────────────


def check_recipe(
    recipe: Recipe,
    overrides: Sequence[str],
    unsupported_because: SupportCheck,
    processes: int | None = None,
) -> CheckedRecipe:
    """Check what needs neither the model nor the packs: the settings, files and precisions.

    The schedule is checked too, unless the length is given in epochs.

    unsupported_because: function that checks a precision against the devices that will train.
    processes: the number of processes that will train, or None if it is not known.
    """
    # Raise InputError for an unknown name in braces, in `train.begin_with` or in `run_dir`.
    branch_checkpoint(recipe)
    run_dir_of(recipe)
    check_trackers(recipe.log)
    phases = [
        (until, select_precision(name, recipe.fp8_config, unsupported_because))
        for until, name in phases_of(recipe.precision)
    ]
    _, first = phases[0]
    check_settings(recipe, first.precision.name, processes, overrides)
    if recipe.model.source:
        # Load the configuration before the tokenizer, so that a missing network is reported early.
        # Without a network, each request to the hub fails only after half a minute.
        load_config(recipe.model)
    return CheckedRecipe(recipe, phases)


# ── 2: the model and the packs ────────────────────────────────────────────────────────────────────


def check_model(
    checked: CheckedRecipe, data: Data | None, *, needs_tokenizer: bool
) -> tuple[CheckedRecipe, PreTrainedModel, ModelFlops]:
    """Raise InputError if the model cannot be trained in one of the phases.

    data: the open packs, or None.
    needs_tokenizer: True to load and check the tokenizer even if the model does not need it.

    Returns three values: `checked` with the vocabulary of the tokenizer, the model on the meta
    device, with modules but without weights, and the FLOPs of the model.
    """
    recipe = checked.recipe
    settings = with_tokens(recipe.model, recipe.data, data, needed=needs_tokenizer)
    recipe = recipe.model_copy(update={"model": settings})
    config = load_config(settings)
    check_sizes(recipe, config)
    shapes = build_on_meta(config)
    check_architecture(shapes, recipe.data.length, recipe.loss)
    by_muon = find_matrix_weights(shapes) if recipe.optimizer.name == "muon" else []
    muon_weights = sum(weight.parameter.numel() for weight in by_muon)
    flops = replace(ModelFlops.of(shapes), muon_weights=muon_weights)
    for _, active in checked.phases:
        check_precision(active, recipe, shapes)
    return replace(checked, recipe=recipe), shapes, flops


def check_precision(active: ActivePrecision, recipe: Recipe, shapes: PreTrainedModel) -> None:
    """Raise InputError if a quantized precision does not suit the pack length or the model.

    shapes: the model on the meta device.
    """
    layers = list(decoder_layers(shapes).values())
    check_fit(active, recipe, len(layers))
    if active.precision.quantized:
        check_scope(shapes, layers, active)


def _check_attention(checked: CheckedRecipe, flops: ModelFlops, device_type: str) -> None:
    """Raise InputError if the model cannot use the setting `model.attention` on this device."""
    # All precisions of a run have the same compute dtype.
    _, first = checked.phases[0]
    case = attention_backends.Case(
        device_type,
        flops.shape.head_dim,
        getattr(torch, first.precision.compute_dtype),
        changed_scores=flops.changed_scores,
    )
    if refusal := attention_backends.refusal_of(checked.recipe.model.attention, case):
        raise InputError(refusal)


def _check_kernels(shapes: PreTrainedModel, accelerator: Accelerator) -> None:
    """Raise InputError if a hybrid model needs fla-core's kernels on a GPU, and they do not work.

    shapes: the model on the meta device.
    """
    functions = mixing_functions(shapes)
    if accelerator.device.type != "cuda" or not functions:
        return
    accelerator.print("model: trying fla-core's kernels; compiling them takes minutes once")
    if reason := kernels.unavailable_because(functions):
        raise InputError(f"`model`: {type(shapes).__name__} {reason}")


def _check_data(recipe: Recipe, data: Data, model: PretrainedConfig) -> None:
    """Raise InputError if the packs do not fit the recipe or the configuration of the model."""
    check_held_out(recipe, len(data.held_out or ()))
    has_fingerprint = bool(data.tokenizer.get("fingerprint"))
    fingerprint = fingerprint_at(recipe.model.weights_source) if has_fingerprint else None
    check_tokens(data, model.vocab_size, fingerprint)
    check_labels(data, recipe.data, recipe.evaluate.packs)


# ── 3: the plan ───────────────────────────────────────────────────────────────────────────────────


def _training_of(
    checked: CheckedRecipe, flops: ModelFlops, data: Data | None, overrides: Sequence[str]
) -> Training:
    """Return the facts of the run that do not depend on its devices.

    data: the packs, or None if they do not exist.
    overrides: the key=value overrides on the command line.
    """
    recipe = checked.recipe
    length = recipe.data.length
    packs = mixture = None
    # If a stream continues after its first part, the number of its packs is not known.
    if data and not (data.stream and data.stream.continues):
        packs = len(data.readable)
    steps = steps_of(recipe.train, recipe.batch.tokens, packs or 0, length)
    recipe, notices = schedule.fit_to_command_line(recipe, overrides, steps)
    schedule.check(recipe.schedule, steps)
    # Without packs, assume that every pack contains one document.
    squared_length_per_token = float(length)
    if data:
        squared_length_per_token = data.squared_length_per_token
        notices = [*notices, *notes_of(data.train)]
        if isinstance(data.train, MixedPacks):
            mixture = data.train.mixture
    precisions = PrecisionSchedule(checked.phases, steps)
    return Training(recipe, precisions, flops, squared_length_per_token, packs, mixture, notices)


def use_one_thread(plan: Plan) -> None:
    """Let torch use one thread if the model is small.

    The choice depends only on the recipe, because the number of threads changes the order of sums.
    A number in OMP_NUM_THREADS is not changed.
    """
    tokens = plan.expected_microbatch * plan.recipe.data.length
    if tokens * plan.flops.shape.hidden < FEW_VALUES and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def cuda_graphs(plan: Plan, shapes: PreTrainedModel) -> str:
    """Return the setting `model.cuda_graphs`, or "off" with a reason if graphs are impossible.

    shapes: the model on the meta device.

    Raises InputError if `model.cuda_graphs: on` is impossible.
    """
    setting = plan.recipe.model.cuda_graphs
    obstacle = _obstacle_of_devices(plan) or _obstacle_of_model(plan, shapes)
    if obstacle and setting == "on":
        raise graphs.impossible(obstacle)
    if obstacle:
        return f"off: {obstacle}"
    # On several machines, graphs are possible, but `auto` does not use them.
    if setting == "auto" and processes_on_host() < plan.devices.count:
        return (
            "off: they are not tested on several machines, and LOCAL_WORLD_SIZE is below WORLD_SIZE"
        )
    return setting


def _obstacle_of_devices(plan: Plan) -> str | None:
    """Return the reason why the recipe or the devices exclude CUDA graphs, or None."""
    devices = plan.devices
    if plan.recipe.model.cuda_graphs == "off":
        return "the recipe turns them off"
    if devices.type != "cuda":
        return "they need a GPU"
    if not devices.sharded:
        return None
    if not devices.gathered_once:
        return "FSDP2 reduces gradients in each microbatch"
    if len({active.precision.quantized for active in plan.precisions}) > 1:
        return "FSDP2 frees weights in only some precisions of this run"
    if plan.microbatch is not None and plan.packs_per_rank <= 2 * plan.microbatch:
        return "every microbatch of a step gathers weights or reduces gradients"
    return None


def _obstacle_of_model(plan: Plan, shapes: PreTrainedModel) -> str | None:
    """Return the reason why the precisions or the model exclude CUDA graphs, or None."""
    if not all(active.precision.in_graphs for active in plan.precisions):
        return "they are not tested in every precision of this run"
    if not all(layer.fused for layers in plan.layers.values() for layer in layers):
        return "they need fused layers"
    if any(isinstance(part, nn.Dropout) and part.p for part in shapes.modules()):
        return "they do not support dropout"
    if plan.recipe.model.gradient_checkpointing != "none":
        return "they do not support `model.gradient_checkpointing`"
    if plan.recipe.loss.kind == "cce":
        return "they do not support `loss.kind: cce`"
    if attention_support.longest_rotated(shapes.config) is not None:
        return "they do not support rotations that depend on the longest document"
    return None


def check_host_memory(plan: Plan, processes: int, free: int) -> None:
    """Raise InputError if the host has too little memory for `optimizer.offload`.

    processes: number of processes on this host.
    free: number of free bytes of the host. A small share of them must stay free.
    """
    needed = processes * plan.host_memory / (1 - KEPT_FREE)
    if needed > free:
        raise InputError(
            f"`optimizer.offload: {plan.recipe.optimizer.offload}` needs "
            f"{bytes_text(needed)} of free memory for the processes on this host, and "
            f"{bytes_text(free)} are free; either free host memory, or set "
            "`optimizer.moments: bf16` or `optimizer.offload: none`"
        )


def _devices_of(accelerator: Accelerator, phases: Sequence[Phase]) -> Devices:
    """Return the properties of this launch's devices that the plan uses."""
    uses_hardware = any(active.engine == "transformer_engine" for _, active in phases)
    name, device_bytes = device_of(accelerator)
    return Devices(
        accelerator.num_processes,
        sharded=accelerator.is_fsdp2,
        name=name,
        memory=device_bytes,
        gathered_once=gathers_once_a_step(accelerator),
        replicas=replicas_of(accelerator),
        # The capability is needed only for products of Transformer Engine, because emulation needs
        # the same memory on every device.
        capability=torch.cuda.get_device_capability() if uses_hardware else None,
    )
