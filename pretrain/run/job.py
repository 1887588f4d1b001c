"""Check a recipe against this machine, its packs and its model, before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from foundation.units import GIB, memory
from packing.batch import BatchStream
from packing.order import MixedPacks
from packing.store import unprepared
from packing.stream import order_of
from pretrain.checkpoint.checkpoint import free_memory
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.run_folder import check_ours
from pretrain.metrics.trackers import check_trackers
from pretrain.model import attention, graphs
from pretrain.model.distributed import (
    device_of,
    gathers_once_a_step,
    processes_on_host,
    refused_together,
    replicas_of,
)
from pretrain.model.huggingface import (
    build_on_meta,
    check_architecture,
    decoder_layers,
    load_config,
    source_config,
)
from pretrain.optimizer import schedule
from pretrain.plan.checks import (
    check_fit,
    check_gap,
    check_held_out,
    check_settings,
    check_sizes,
    steps_of,
)
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import KEPT_FREE, Plan, spend_spare_memory
from pretrain.precision.formats.definition import Precision
from pretrain.precision.schedule import Phase, PrecisionSchedule
from pretrain.precision.scope import check_scope
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import UNQUANTIZED, WEIGHT_DTYPES, ActivePrecision, phases_of
from pretrain.run.data import Data, check_labels, check_tokens, document_limit, open_data
from pretrain.run.tokenizer import encoded_prompt, fingerprint_at, load_tokenizer, with_tokens
from pretrain.settings.config import branch_checkpoint, identity_of, run_dir_of
from pretrain.settings.recipe import Recipe

# The purpose of a job. `run`: train on this machine, and prepare missing packs. `plan`: print the
# plan of a run on this machine; missing packs are an error. `elsewhere`: print a plan for other
# machines; the packs may be missing.
Purpose = Literal["run", "plan", "elsewhere"]


@dataclass(frozen=True)
class Job:
    """A checked recipe, with its plan, the shapes of its model, and its packs on this machine."""

    plan: Plan
    run_dir: Path
    model_config: PretrainedConfig
    # The model on the meta device, with modules but without weights.
    shapes: PreTrainedModel
    # The packs. The value is None only in a plan for other machines without prepared packs. Such a
    # plan does not use this attribute.
    data: Data
    tokenizer: PreTrainedTokenizerBase | None
    attention: attention.Choice
    # The values in the config.json of `model.source`, by dotted key. They are part of the identity.
    source_config: dict[str, Any]
    # Lines about a shortened schedule.
    notices: list[str]

    @property
    def recipe(self) -> Recipe:
        """Return the recipe. An `auto` is replaced by its result as soon as the result is known."""
        return self.plan.recipe

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of activations, which is the same in all precisions of a run."""
        return getattr(torch, self.plan.schedule.at(1).precision.compute_dtype)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Return the dtype of the stored weights."""
        return getattr(torch, WEIGHT_DTYPES[self.recipe.weights])

    def with_settings(self, section: str, **values: Any) -> Job:
        """Return a copy of the job with changed values in one section of its recipe."""
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
        effective: dict[str, Any] = {}
        if isinstance(setting, str):
            effective["precision"] = available[0].precision.name
            effective["fp8_config"] = available[0].settings
        else:
            effective["precision"] = tuple(
                phase.model_copy(update={"use": active.precision.name})
                for phase, active in zip(setting, available, strict=True)
            )
        packs = self.data.readable
        # The fingerprint already depends on the weights of sources. The keys below are added so
        # that a message can name the weight that has changed.
        weights = packs.weights if isinstance(packs, MixedPacks) else {}
        shares = {f"data.sources.{name}.weight": weight for name, weight in weights.items()}
        return (
            identity_of(self.recipe.model_copy(update=effective), self.data.train.fingerprint)
            | shares
            | self.source_config
        )

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
            "microbatch": self.plan.microbatch,
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "mask_boundaries": self.recipe.data.mask_boundaries,
            "pin_memory": accelerator.device.type == "cuda",
            "vocab_size": self.model_config.vocab_size,
            "positions": document_limit(self.model_config),
        }


def prepare_job(
    recipe: Recipe,
    accelerator: Accelerator,
    overrides: Sequence[str],
    *,
    purpose: Purpose = "run",
) -> Job:
    """Check the recipe and return its job. Fast checks run before slow ones.

    overrides: the key=value overrides on the command line. If they set the length of the training,
        the schedule is shortened to this length.

    Raises InputError if the recipe, the model, the packs and the machine do not fit together.
    """
    is_elsewhere = purpose == "elsewhere"
    run_dir = run_dir_of(recipe)
    branch_checkpoint(recipe)
    check_ours(run_dir)
    check_trackers(recipe.log)
    recipe, notices = schedule.fit_to_command_line(recipe, overrides)
    phases, unquantized = resolve_precisions(recipe, accelerator.device.type)
    first = phases[0][1].precision
    check_settings(recipe, first.name, None if is_elsewhere else accelerator.num_processes)
    check_gap(recipe, replicas=replicas_of(accelerator))
    if recipe.model.source:
        # Load the configuration before the tokenizer, so that a missing network is reported early.
        # Without a network, each request to the hub fails only after half a minute.
        load_config(recipe.model)

    # Open existing packs before the other checks, because the packs may record the tokenizer.
    # Prepare missing packs after all other checks, because this may take hours.
    opens_last = purpose == "run" and recipe.data.prepares
    data = None if opens_last else _open_existing(recipe, accelerator, purpose)
    recipe = recipe.model_copy(
        update={"model": with_tokens(recipe.model, recipe.data, data, needed=not is_elsewhere)}
    )
    model_config = load_config(recipe.model)
    check_sizes(recipe, model_config)
    shapes = build_on_meta(model_config)
    flops = _check_model(recipe, shapes, phases)
    # Before packs are prepared, report an attention that cannot run here. The lengths of documents
    # do not matter for this.
    _choose_attention(recipe, accelerator, flops, first, mean_length=0, is_elsewhere=is_elsewhere)
    tokenizer = None if is_elsewhere else _load_tokenizer(recipe, data, model_config)
    if opens_last:
        data = open_data(recipe.data, is_main_process=accelerator.is_main_process)
    if data is not None:
        _check_data(recipe, data, model_config)
    elif recipe.train.epochs is not None:
        raise InputError(
            f"`train.epochs` needs the number of packs, but {recipe.data.packs} has none yet; to "
            "plan without packs, set train.steps=N or train.tokens=N instead"
        )

    packs = len(data.train) if data and not data.stream else None
    steps = steps_of(recipe.train, recipe.batch.tokens, packs or 0, recipe.data.length)
    # If the length is not given in epochs, `check_settings` has already checked the schedule.
    if recipe.train.epochs is not None:
        recipe, notices = schedule.fit_to_command_line(recipe, overrides, steps)
        schedule.check(recipe.schedule, steps)
    plan = Plan(
        recipe,
        PrecisionSchedule(phases, steps, unquantized),
        _devices_of(accelerator, phases),
        flops,
        # Without packs, assume that every pack contains one document.
        data.mean_squared if data else float(recipe.data.length),
        packs=packs,
        mixture=data.train.mixture if data and isinstance(data.train, MixedPacks) else None,
    )
    chosen = _choose_attention(
        recipe, accelerator, flops, first, plan.mean_squared, is_elsewhere=is_elsewhere
    )
    layers = {
        active.precision.name: layers_of(
            shapes,
            flops,
            recipe,
            active,
            accelerator.device.type,
            chosen.name,
            plan.devices.capability,
        )
        for active in plan.precisions
    }
    plan = spend_spare_memory(replace(plan, layers=layers))
    if not is_elsewhere:
        _check_hardware(plan, shapes, accelerator)
    return Job(
        plan,
        run_dir,
        model_config,
        shapes,
        cast(Data, data),
        tokenizer,
        chosen,
        source_config(recipe.model),
        notices,
    )


def resolve_precisions(
    recipe: Recipe, device_type: str
) -> tuple[list[Phase], ActivePrecision | None]:
    """Replace the precisions of the recipe that the machine does not support.

    Returns two values: the phases of the recipe with supported precisions, and the unquantized
    precision of the run. `log.gap` compares low precision with the unquantized precision, and the
    health check may switch to it. The second value is None if no phase is quantized.

    Raises InputError if the machine lacks a precision and the recipe does not allow a replacement.
    """
    missing = missing_on(device_type)
    phases = [
        (until, select_precision(use, recipe.fp8_config, missing))
        for until, use in phases_of(recipe.precision)
    ]
    if not any(active.precision.quantized for _, active in phases):
        return phases, None
    _, first = phases[0]
    return phases, select_precision(
        UNQUANTIZED[first.precision.compute_dtype].name, recipe.fp8_config, missing
    )


def _choose_attention(
    recipe: Recipe,
    accelerator: Accelerator,
    flops: ModelFlops,
    precision: Precision,
    mean_length: float,
    *,
    is_elsewhere: bool,
) -> attention.Choice:
    """Return the attention of the run, see `attention.choose`.

    If the run is planned for other devices (`is_elsewhere`), it may request an attention that this
    device cannot run.
    """
    return attention.choose(
        "auto" if is_elsewhere else recipe.model.attention,
        accelerator.device.type,
        flops.shape.head_dim,
        getattr(torch, precision.compute_dtype),
        mean_length,
    )


def _open_existing(recipe: Recipe, accelerator: Accelerator, purpose: Purpose) -> Data | None:
    """Open the packs of the recipe.

    If the packs are missing, return None if `purpose` is "elsewhere", and raise InputError if
    `purpose` is "plan".
    """
    missing = unprepared(recipe.data)
    if missing and purpose == "plan" and recipe.data.prepares:
        raise InputError(
            f"`data.packs`: {missing[0]} is not prepared; either run `python -m pretrain prepare`, "
            "or use `python -m pretrain plan`, which needs no packs"
        )
    if missing and purpose == "elsewhere":
        return None
    return open_data(recipe.data, is_main_process=accelerator.is_main_process)


def _check_model(recipe: Recipe, shapes: PreTrainedModel, phases: Sequence[Phase]) -> ModelFlops:
    """Raise InputError if the model cannot be trained in one of the phases. Return its FLOPs.

    shapes: the model on the meta device.
    """
    check_architecture(shapes, recipe.data.length, recipe.loss)
    flops = ModelFlops.of(shapes)
    for _, active in phases:
        check_precision(active, recipe, shapes)
    return flops


def check_precision(active: ActivePrecision, recipe: Recipe, shapes: PreTrainedModel) -> None:
    """Raise InputError if a quantized precision does not suit the pack length or the model.

    shapes: the model on the meta device.
    """
    layers = list(decoder_layers(shapes).values())
    check_fit(active, recipe, len(layers))
    if active.precision.quantized:
        check_scope(shapes, layers, active)


def _load_tokenizer(
    recipe: Recipe, data: Data | None, model_config: PretrainedConfig
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer. Return None if there is no tokenizer and the recipe needs none.

    The recipe needs a tokenizer if it has prompts (`evaluate.samples`). Raises InputError if a
    needed tokenizer is missing, and if a prompt leaves no position for new tokens.
    """
    samples = recipe.evaluate.samples
    tokenizer: Any = load_tokenizer(recipe.data, recipe.model, data, needed=bool(samples))
    for prompt in samples:
        encoded_prompt(tokenizer, prompt, model_config)
    return tokenizer


def _check_data(recipe: Recipe, data: Data, model_config: PretrainedConfig) -> None:
    """Raise InputError if the packs do not fit the model or the recipe."""
    has_fingerprint = bool(data.tokenizer.get("fingerprint"))
    fingerprint = fingerprint_at(recipe.model.weights_source) if has_fingerprint else None
    check_tokens(data, model_config.vocab_size, fingerprint, document_limit(model_config))
    check_held_out(recipe, len(data.held_out or ()))
    check_labels(data, recipe.data, recipe.evaluate.packs)


def _check_hardware(plan: Plan, shapes: PreTrainedModel, accelerator: Accelerator) -> None:
    """Check the settings that depend on this machine's hardware.

    All ranks must call this function. Raises InputError if the host has too little free memory for
    the state of all its processes, or if `model.cuda_graphs: on` is impossible.
    """
    cuda_graphs(plan, shapes, accelerator.device.type)
    if plan.recipe.optimizer.offload != "none" and accelerator.device.type == "cuda":
        refused_together(lambda: check_host_memory(plan, processes_on_host(), free_memory()))


def cuda_graphs(plan: Plan, shapes: PreTrainedModel, device_type: str) -> str:
    """Return the setting `model.cuda_graphs`, or "off" with a reason if graphs are impossible.

    shapes: the model on the meta device.

    Raises InputError if `model.cuda_graphs: on` is impossible.
    """
    model = plan.recipe.model
    # Map each reason to a value that is true if the reason applies.
    reasons = {
        "the recipe turns them off": model.cuda_graphs == "off",
        "they need a GPU": device_type != "cuda",
        "they need a run with one process": plan.devices.count > 1 or plan.devices.sharded,
        "they are not tested in every precision of this run": not all(
            active.precision.in_graphs for active in plan.precisions
        ),
        "they need fused layers": any(
            not layer.fused for layers in plan.layers.values() for layer in layers
        ),
        "they do not support dropout": any(
            isinstance(part, nn.Dropout) and part.p for part in shapes.modules()
        ),
        "they do not support `model.gradient_checkpointing`": (
            model.gradient_checkpointing != "none"
        ),
        "they do not support `loss.kind: cce`": plan.recipe.loss.kind == "cce",
        "they do not support rotations that depend on the longest document": (
            attention.longest_rotated(shapes.config) is not None
        ),
    }
    obstacle = next((reason for reason, applies in reasons.items() if applies), None)
    if obstacle and model.cuda_graphs == "on":
        raise graphs.impossible(obstacle)
    return f"off: {obstacle}" if obstacle else model.cuda_graphs


def check_host_memory(plan: Plan, processes: int, free: int) -> None:
    """Raise InputError if the host has too little memory for `optimizer.offload`.

    processes: number of processes on this host.
    free: number of free bytes of the host. A small share of them must stay free.
    """
    needed = processes * plan.host_memory / (1 - KEPT_FREE)
    if needed > free:
        raise InputError(
            f"`optimizer.offload: {plan.recipe.optimizer.offload}` needs "
            f"{memory(needed / GIB)} of free memory for the processes on this host, and "
            f"{memory(free / GIB)} are free; either free host memory, or set "
            "`optimizer.moments: bf16` or `optimizer.offload: none`"
        )


def _devices_of(accelerator: Accelerator, phases: Sequence[Phase]) -> Devices:
    """Return the properties of this launch's devices that the plan uses."""
    uses_hardware = any(active.engine == "transformer_engine" for _, active in phases)
    return Devices(
        accelerator.num_processes,
        accelerator.is_fsdp2,
        *device_of(accelerator),
        gathered=gathers_once_a_step(accelerator),
        replicas=replicas_of(accelerator),
        # The capability is needed only for products of Transformer Engine, because emulation needs
        # the same memory on every device.
        capability=torch.cuda.get_device_capability() if uses_hardware else None,
    )
