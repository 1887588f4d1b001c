"""What a run will be, worked out and checked before anything costs time or memory: shapes and counts, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from packing.batch import BatchStream
from packing.order import MixedPacks, order_of
from packing.store import unprepared
from packing.stream import StreamedPacks
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.run_folder import check_ours
from pretrain.metrics.trackers import check_trackers
from pretrain.model import attention
from pretrain.model import huggingface as model
from pretrain.model.distributed import device_of, gathers_once_a_step, replicas_of
from pretrain.optimizer import schedule
from pretrain.plan.checks import check_fit, check_gap, check_held_out, check_settings, check_sizes
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import Plan, spend_spare_memory
from pretrain.plan.tokenizer import encoded_prompt, fingerprint_at, load_tokenizer, with_tokens
from pretrain.precision.formats.definition import Precision
from pretrain.precision.scope import check_scope
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import UNQUANTIZED, WEIGHT_DTYPES, ActivePrecision, phases_of
from pretrain.run.data import Data, check_labels, check_tokens, most_positions, open_data
from pretrain.settings import config
from pretrain.settings.recipe import Recipe

# `run`: trains here, and makes missing packs. `plan`: says what that would do. `elsewhere`: plans for other machines, which may
# have packs that are missing here.
Purpose = Literal["run", "plan", "elsewhere"]


@dataclass(frozen=True)
class Job:
    """A recipe that was checked, and what it stands for on this machine."""

    plan: Plan
    run_dir: Path
    model_config: PretrainedConfig
    shapes: PreTrainedModel  # the model on the meta device: its modules, without memory for weights
    data: Data | None  # None only for a plan for other machines
    tokenizer: PreTrainedTokenizerBase | None
    attention: attention.Choice
    # as `model.source` said when the run began, for its identity
    source_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def active(self) -> ActivePrecision:
        return self.plan.active

    @property
    def precision(self) -> Precision:
        """What the run really computes in on this device."""
        return self.active.precision

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.precision.compute_dtype)

    @property
    def weight_dtype(self) -> torch.dtype:
        return getattr(torch, WEIGHT_DTYPES[self.recipe.weights])

    def with_plan(self, **values: Any) -> Job:
        """The job with other values of its plan: `active`, the precision that it computes in for now, or what was `done`."""
        return replace(self, plan=replace(self.plan, **values))

    def with_settings(self, section: str, **values: Any) -> Job:
        """The job when what `auto` stands for in a section of its recipe has been found."""
        changed = getattr(self.recipe, section).model_copy(update=values)
        return self.with_plan(recipe=self.recipe.model_copy(update={section: changed}))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued, in the precision that the run really computes in."""
        effective = {"precision": self.precision.name, "fp8_config": self.active.settings}
        if not isinstance(phases := self.recipe.precision, str):
            ran = [active.precision.use for _, active in self.plan.phases]
            setting = tuple(
                phase.model_copy(update={"use": use})
                for phase, use in zip(phases, ran, strict=True)
            )
            effective = {"precision": setting, "fp8_config": self.recipe.fp8_config}
        packs = self.data.train
        # The fingerprint has them, too; these say what has changed.
        weights = packs.weights if isinstance(packs, (MixedPacks, StreamedPacks)) else {}
        shares = {f"data.sources.{name}.weight": weight for name, weight in weights.items()}
        return (
            config.identity_of(self.recipe.model_copy(update=effective), packs.fingerprint)
            | shares
            | self.source_config
        )

    def batches(self, accelerator: Accelerator, shift: int = 0) -> BatchStream:
        """This rank's training batches, step by step: a pure function of the recipe, the packs, and the packs by which a run is
        further on in them than its steps say."""
        packs, settings = self.data.train, (self.plan.packs_per_step, self.recipe.seed, shift)
        order = (
            packs.order(*settings)
            if isinstance(packs, StreamedPacks)
            else order_of(packs, *settings)
        )
        return BatchStream(packs, order, **self.batching(accelerator))

    def batching(self, accelerator: Accelerator) -> dict[str, Any]:
        """Returns how packs become batches on this rank, in training and in evaluation."""
        return {
            "microbatch": self.plan.microbatch,
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "mask_boundaries": self.recipe.data.mask_boundaries,
            "pin_memory": accelerator.device.type == "cuda",
            "vocab_size": self.model_config.vocab_size,
            "positions": most_positions(self.model_config),
        }


def prepare_job(recipe: Recipe, accelerator: Accelerator, *, purpose: Purpose = "run") -> Job:
    """Check everything that can be checked, in the order of what it costs. Raises InputError."""
    # What settings say by themselves, and whether the run folder, its beginning and its trackers are there to be used.
    run_dir, device_type, elsewhere = (
        config.run_dir_of(recipe),
        accelerator.device.type,
        purpose == "elsewhere",
    )
    config.begin_of(recipe)
    check_ours(run_dir)
    check_trackers(recipe.log)
    missing_here = missing_on(device_type)
    phases = [
        (until, select_precision(use, recipe.fp8_config, missing_here))
        for until, use in phases_of(recipe.precision)
    ]
    first, unquantized = phases[0][1], None
    check_settings(recipe, first.precision.name, None if elsewhere else accelerator.num_processes)
    check_gap(recipe, replicas=replicas_of(accelerator))
    if any(active.precision.quantized for _, active in phases):
        unquantized = select_precision(
            UNQUANTIZED[first.precision.compute_dtype].name, recipe.fp8_config, missing_here
        )

    # first: without a network the hub answers each question after half a minute
    if recipe.model.source:
        model.load_config(recipe.model)

    # Packs that exist are opened now, as they may know the tokenizer. Others are prepared last, which may take hours.
    missing, opening = (
        unprepared(recipe.data),
        partial(open_data, recipe.data, is_main_process=accelerator.is_main_process),
    )
    if missing and purpose == "plan" and recipe.data.prepares:
        raise InputError(
            f"`data.packs`: {missing[0]} is not prepared; run `python -m packing prepare`, or `python -m pretrain plan` without"
        )
    last = purpose == "run" and recipe.data.prepares
    data = None if last or (elsewhere and missing) else opening()
    recipe = recipe.model_copy(
        update={"model": with_tokens(recipe.model, recipe.data, data, needed=not elsewhere)}
    )
    model_config = model.load_config(recipe.model)
    check_sizes(recipe, model_config)
    shapes = model.build_on_meta(model_config)
    model.check_architecture(shapes, recipe.data.length, recipe.loss)
    flops, decoder = ModelFlops.of(shapes), list(model.decoder_layers(shapes).values())
    for _, active in phases:
        check_fit(active, recipe, flops.shape.layers)
        if active.precision.quantized:
            check_scope(shapes, decoder, active)
    compute_dtype = getattr(torch, first.precision.compute_dtype)
    chosen = attention.choose(
        recipe.model.attention, device_type, flops.shape.head_dim, compute_dtype
    )
    tokenizer = (
        None
        if elsewhere
        else load_tokenizer(recipe.data, recipe.model, data, needed=bool(recipe.evaluate.samples))
    )
    # now, and not at the first evaluation
    for prompt in recipe.evaluate.samples if tokenizer else ():
        encoded_prompt(tokenizer, prompt, model_config)
    if last:
        data = opening()
    if data is not None:
        own = (
            fingerprint_at(recipe.model.weights_source)
            if data.tokenizer.get("fingerprint")
            else None
        )
        check_tokens(data, model_config.vocab_size, own, most_positions(model_config))
        check_held_out(recipe, len(data.held_out or ()))
        check_labels(data, recipe.data, recipe.evaluate.packs)
    elif recipe.train.epochs is not None:
        raise InputError(
            f"`train.epochs` counts packs, and {recipe.data.packs} has none yet; train.steps=N or train.tokens=N plans without"
        )

    # In figures.
    count, (device, memory) = accelerator.num_processes, device_of(accelerator)
    on_hardware = any(active.backend == "transformer_engine" for _, active in phases)
    # emulation takes the same on every device
    capability = torch.cuda.get_device_capability() if on_hardware else None
    plan = Plan(
        recipe,
        first,
        Devices(
            count,
            accelerator.is_fsdp2,
            device,
            memory,
            replicas=replicas_of(accelerator),
            capability=capability,
        ),
        flops,
        # without packs, as if each were one document
        data.mean_squared if data else float(recipe.data.length),
        phases=phases,
        unquantized=unquantized,
        packs=len(data.train) if data and not data.stream else None,
        mixture=data.train.mixture() if data and isinstance(data.train, MixedPacks) else None,
    )
    # steps and tokens were held against the schedule with the settings
    if recipe.train.epochs is not None:
        schedule.check(recipe.schedule, plan.steps)
    layers = {
        each.precision.name: layers_of(
            shapes, flops, recipe, each, device_type, chosen.name, capability
        )
        for each in plan.actives
    }
    plan = spend_spare_memory(replace(plan, layers=layers), gathers_once_a_step(accelerator))
    return Job(
        plan,
        run_dir,
        model_config,
        shapes,
        data,
        tokenizer,
        chosen,
        model.source_config(recipe.model),
    )
