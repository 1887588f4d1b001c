"""What a run will be, worked out and checked before anything costs time or memory: shapes and counts, no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from packing.batch import BatchStream
from packing.mixture import MixedPacks
from packing.packer import check_preparing
from packing.parts import training_parts, unprepared
from packing.settings import DataSettings
from packing.store import with_own_held_out
from packing.stream import StreamedPacks, order_of
from pretrain.metrics.flops import ModelFlops, Shape
from pretrain.metrics.run_folder import check_ours
from pretrain.metrics.run_record import read_run
from pretrain.metrics.trackers import check_login, resolve
from pretrain.metrics.waited import Waited
from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.attention.operator import Heads
from pretrain.model.distributed import device_of, gathers_once_a_step, replicas_of
from pretrain.model.export import check_export
from pretrain.optimizer import schedule
from pretrain.plan.checks import check_experts, check_fit, check_pack_counts, check_settings, check_sizes, steps_of
from pretrain.plan.data import Data, check_labels, check_positions, check_tokens, most_positions, open_data
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import ActivePhase, Plan
from pretrain.plan.spare import KEPT_FREE, spend_spare_memory
from pretrain.plan.tokenizer import (
    check_tokenizer,
    encoded_prompt,
    fingerprint_of,
    has_other_tokens,
    known_tokenizer,
    load_tokenizer,
    with_tokens_of,
    without_absent_tokenizer,
)
from pretrain.precision.advice import against_overflow
from pretrain.precision.formats.definition import Precision
from pretrain.precision.schedule import PrecisionPhase, last_steps, phases_of
from pretrain.precision.scope import LINEARS, check_kept, check_shapes, low_precision_linears
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import WEIGHT_DTYPES, ActivePrecision
from pretrain.settings import config
from pretrain.settings.recipe import Recipe

WELL_FILLED = 8192  # tokens at once, with which an H200 computes at full speed
# What a job is for: a run here, for which missing packs are made; a plan of one, which comes before packs and checks what names
# and settings say of them; or a plan for other machines, which have text and devices of their own.
Purpose = Literal["run", "plan", "elsewhere"]


@dataclass(frozen=True)
class Job:
    """A recipe that was checked, and what it stands for on this machine."""

    plan: Plan
    run_dir: Path
    model_config: PretrainedConfig
    shapes: PreTrainedModel  # the model on the meta device: its modules, without memory for weights
    data: Data | None  # None only for a plan that is made before the packs are prepared
    tokenizer: PreTrainedTokenizerBase | None
    attention: attention.Choice
    notices: tuple[str, ...] = ()  # what was left out, or has no effect, for the user
    source_config: Mapping[str, Any] = field(default_factory=dict)  # as `model.source` said when the run began, for its identity

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

    @property
    def precision_remedy(self) -> str | None:
        """What to change in the precision where values overflow; None where nothing is quantized."""
        return against_overflow(self.active)

    def in_precision(self, active: ActivePrecision) -> Job:
        """The job while it computes in `active`, one of the plan's."""
        return replace(self, plan=replace(self.plan, active=active))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued, in the precision that the run really computes in."""
        effective = {"precision": self.precision.name, "fp8_config": self.active.settings}
        if phases := self.plan.phases:
            setting = tuple(PrecisionPhase(until=phase.until, use=phase.active.precision.name) for phase in phases)
            effective = {"precision": setting, "fp8_config": self.recipe.fp8_config}
        packs = self.data.train
        # The fingerprint has them, too; these say what has changed.
        weights = packs.weights if isinstance(packs, (MixedPacks, StreamedPacks)) else {}
        shares = {f"data.sources.{name}.weight": weight for name, weight in weights.items()}
        return config.identity_of(self.recipe.model_copy(update=effective), packs.fingerprint) | shares | self.source_config

    def with_microbatch(self, microbatch: int) -> Job:
        """The job when `batch.microbatch: auto` has found its microbatch (packs at once)."""
        return replace(self, plan=self.plan.with_microbatch(microbatch))

    def with_chunk(self, chunk: int) -> Job:
        """The job when it is known which `loss.chunk` a run takes for `auto`."""
        return replace(self, plan=self.plan.with_chunk(chunk))

    def after(self, done: int, ran: Mapping[int, str], tokens: int | None = None) -> Job:
        """The job of a run that goes on after `done` steps: `Plan.after`."""
        return replace(self, plan=self.plan.after(done, ran, tokens))

    def batches(self, accelerator: Accelerator, shift: int = 0) -> BatchStream:
        """This rank's training batches, step by step: a pure function of the recipe, the packs, and the packs by which a run is
        further on in them than its steps say."""
        packs = self.data.train
        order = order_of(packs, self.plan.packs_per_step, self.recipe.seed, shift)
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


def prepare_job(
    recipe: Recipe,
    accelerator: Accelerator,
    tokens_per_second: float | None = None,
    *,
    purpose: Purpose = "run",
    waited: Waited | None = None,
) -> Job:
    """Check everything that can be checked, in the order of what it costs.

    `tokens_per_second`: from which the plan computes hours; None: what the run folder has measured so far. `waited`: the
    clock whose `packs` gets the time that packs take. Raises InputError.
    """
    # What settings say by themselves.
    run_dir, device_type = _check_surroundings(recipe, accelerator), accelerator.device.type
    precisions = _choose_precisions(recipe, device_type)
    world_size = None if purpose == "elsewhere" else accelerator.num_processes
    check_settings(recipe, precisions.first.precision.name, world_size)

    # A plan comes before packs, and before a tokenizer that is still to be trained.
    settings = recipe.data  # as it was asked for: from the recipe an absent tokenizer is left out
    to_come = {} if purpose == "run" else unprepared(settings)
    unchecked = check_preparing(settings, elsewhere=purpose == "elsewhere") if to_come else []
    recipe, absent = without_absent_tokenizer(recipe) if to_come else (recipe, None)

    # Packs that exist are opened now, as they may know the tokenizer. Others are prepared last, which may take hours.
    opening = partial(open_data, settings, is_main_process=accelerator.is_main_process, to_come=to_come)
    data = None if settings.prepares else opening()
    recipe, vocabulary = _with_vocabulary(recipe, data)
    laid_out = _lay_out(recipe, precisions, device_type)
    tokenizer = _usable_tokenizer(recipe, data, laid_out.config)
    if recipe.checkpoint.at_end:
        check_export(laid_out.shapes, tokenizer)
    if settings.prepares:
        clock = waited or Waited(shown=False)
        before = clock.go_on_to("packs")
        data = opening()
        clock.go_on_to(before)
    _check_packs(recipe, data, laid_out.config)

    names = {active.precision.name for active in precisions.each_once}
    here = (accelerator.num_processes, device_of(accelerator)[0])
    speed = tokens_per_second or measured_speed(run_dir, names, here)
    plan = _plan_of(recipe, accelerator, precisions, laid_out, data, absent or vocabulary, speed)
    plan = spend_spare_memory(_with_gathering(plan, accelerator))
    _check_horizon(plan)
    without_effect = _held_out_without_effect(settings) if data else []
    notices = tuple(filter(None, [model.dropout_notice(recipe.model), *without_effect, *unchecked]))
    source = model.source_config(recipe.model)
    return Job(plan, run_dir, laid_out.config, laid_out.shapes, data, tokenizer, laid_out.attention, notices, source)


def _check_surroundings(recipe: Recipe, accelerator: Accelerator) -> Path:
    """Returns the run folder. Raises InputError where it is not this run's to use, and where its beginning or a tracker is not to
    be had."""
    run_dir = config.run_dir_of(recipe)
    if run_dir.resolve() == recipe.data.packs.resolve():
        raise InputError(f"`run_dir` and `data.packs` are both {run_dir}: a run and packs want a folder each; change one of them")
    config.begin_of(recipe)
    check_ours(run_dir)
    resolve(recipe.log, run_dir=run_dir, main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        check_login(recipe.log.trackers)
    return run_dir


@dataclass(frozen=True)
class _Precisions:
    """What the run computes in, phase by phase, each with its `until`."""

    phases: Sequence[tuple[float | int | None, ActivePrecision]]

    @property
    def each_once(self) -> list[ActivePrecision]:
        return list({active.precision.name: active for _, active in self.phases}.values())

    @property
    def first(self) -> ActivePrecision:
        return self.each_once[0]


def _choose_precisions(recipe: Recipe, device_type: str) -> _Precisions:
    """Neighbouring phases that fall back to the same precision are one."""
    missing, chosen = missing_on(device_type), []
    for until, use in phases_of(recipe.precision):
        active = select_precision(use, recipe.fp8_config, missing)
        if chosen and chosen[-1][1].precision is active.precision:
            chosen[-1] = (until, chosen[-1][1])
        else:
            chosen.append((until, active))
    return _Precisions(chosen)


def _with_vocabulary(recipe: Recipe, data: Data | None) -> tuple[Recipe, str | None]:
    """The recipe, completed by the ids of the packs' tokenizer where the model takes them; and a line to say so."""
    known = known_tokenizer(recipe.data, data)
    if recipe.model.source is not None and not has_other_tokens(known, recipe.model):
        return recipe, None
    completed, vocabulary = with_tokens_of(known, recipe.model)
    return recipe.model_copy(update={"model": completed}), vocabulary


@dataclass(frozen=True)
class _LaidOut:
    """The model as it will run here, without memory for its weights."""

    config: PretrainedConfig
    shapes: PreTrainedModel
    low_linears: tuple[int, int] | None  # how many, and of how many; None: nothing is quantized
    attention: attention.Choice


def _lay_out(recipe: Recipe, precisions: _Precisions, device_type: str) -> _LaidOut:
    """InputError where the model cannot be built, is none that is trained here, or has no attention on this device."""
    model_config = model.load_config(recipe.model)
    check_sizes(recipe, model_config)
    shapes = model.build_on_meta(model_config)
    check_experts(recipe, shapes)
    _check_model(shapes, recipe, precisions.each_once, device_type)
    low_linears = _count_low_linears(shapes, precisions.each_once)
    shape, compute_dtype = Shape.of(shapes), getattr(torch, precisions.first.precision.compute_dtype)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    backend = attention.choose(recipe.model.attention, device_type, heads, compute_dtype)
    return _LaidOut(model_config, shapes, low_linears, backend)


def _check_model(shapes: PreTrainedModel, recipe: Recipe, actives: Sequence[ActivePrecision], device_type: str) -> None:
    """InputError where the model is none that is trained here, or does not fit one of the run's precisions."""
    model.check_architecture(shapes, recipe.data.length, recipe.loss, device_type)
    decoder = list(model.decoder_layers(shapes).values())
    for active in actives:
        check_fit(active, recipe, Shape.of(shapes).layers)
        check_shapes(shapes, active)
        check_kept(shapes, decoder, active)


def _count_low_linears(shapes: PreTrainedModel, actives: Sequence[ActivePrecision]) -> tuple[int, int] | None:
    """Returns how many linears compute in the first quantized precision, and of how many; None where nothing is quantized."""
    active = next((each for each in actives if each.precision.quantized), None)
    if active is None:
        return None
    low = low_precision_linears(shapes, list(model.decoder_layers(shapes).values()), active)
    return len(low), sum(isinstance(each, LINEARS) for each in shapes.modules())


def _usable_tokenizer(recipe: Recipe, data: Data | None, model_config: PretrainedConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer that samples and the exported folder take, held against the model. InputError now where it cannot read a
    prompt, and not at the first evaluation."""
    check_tokenizer(recipe.data, recipe.model, model_config.vocab_size)
    tokenizer = load_tokenizer(recipe.data, recipe.model, data, needed=bool(recipe.evaluate.samples))
    for prompt in recipe.evaluate.samples:
        try:
            encoded_prompt(tokenizer, prompt, model_config)
        except InputError as error:
            raise InputError(f"`evaluate.samples`: {error}") from None
    return tokenizer


def _check_packs(recipe: Recipe, data: Data | None, config: PretrainedConfig) -> None:
    """InputError where packs do not suit the model or are too few, and where `train.epochs` counts packs that nobody has yet."""
    if data is not None:
        check_tokens(data, config.vocab_size, fingerprint_of(recipe.model) if data.tokenizer.get("fingerprint") else None)
        check_positions(data, config)
        check_pack_counts(recipe, len(data.train), data.held_out_packs)
        check_labels(data, recipe.data, recipe.evaluate.packs)
    elif recipe.train.epochs is not None:
        raise InputError(
            f"`data.packs`: {recipe.data.packs} is not prepared yet, and `train.epochs` counts its packs; "
            "`python -m packing prepare RECIPE` prepares it, and so does starting the run; train.tokens=N or train.steps=N on "
            "the command line plans without it"
        )


def _held_out_without_effect(settings: DataSettings) -> list[str]:
    """A line for each folder of packs from which `data.held_out` takes no share, or whose own `data.validation` replaces."""
    own = with_own_held_out(settings)
    if settings.validation is not None:
        return [f"the held-out packs of {packs} are not evaluated on: `data.validation` takes their place" for packs in own]
    said = f"`data.held_out: {settings.held_out:g}` has no effect"
    if len(own) < len(training_parts(settings) or [settings]):  # others need it
        return [f"{said} on {packs}, which has held-out packs of its own" for packs in own]
    return [f"{said}: {packs} has held-out packs of its own; leave it out" for packs in own]


def _plan_of(
    recipe: Recipe,
    accelerator: Accelerator,
    precisions: _Precisions,
    laid_out: _LaidOut,
    data: Data | None,
    vocabulary: str | None,
    tokens_per_second: float | None,
) -> Plan:
    """Returns what was found, in figures; memory is not yet spent on anything that the recipe leaves open."""
    device_type, backend = accelerator.device.type, laid_out.attention.name
    on_hardware = any(active.backend == "transformer_engine" for active in precisions.each_once)
    capability = torch.cuda.get_device_capability() if on_hardware else None  # emulation takes the same on every device
    count, sharded, replicas = accelerator.num_processes, accelerator.is_fsdp2, replicas_of(accelerator)
    layers = {
        each.precision.name: layers_of(laid_out.shapes, recipe, each, device_type, backend, capability)
        for each in precisions.each_once
    }
    phases = [ActivePhase(until, active, layers[active.precision.name]) for until, active in precisions.phases]
    return Plan(
        recipe,
        precisions.first,
        Devices(count, sharded, *device_of(accelerator), replicas=replicas, capability=capability),
        laid_out.config.model_type,
        ModelFlops.of(laid_out.shapes),
        data.mean_squared if data else float(recipe.data.length),  # without packs, as if each were one document
        layers=layers[precisions.first.precision.name],
        phases=phases if len(phases) > 1 else [],
        low_linears=laid_out.low_linears,
        packs=len(data.train) if data and not data.stream else None,
        held_out_to_come=data.held_out_to_come if data else (),
        trained_share=data.trained_share(mask_boundaries=recipe.data.mask_boundaries) if data else None,
        mixture=data.train.mixture() if data and isinstance(data.train, MixedPacks) else None,
        vocabulary=vocabulary,
        tokens_per_second=tokens_per_second,
        weight_spread=getattr(laid_out.config.get_text_config(), "initializer_range", None),
    )


def _with_gathering(plan: Plan, accelerator: Accelerator) -> Plan:
    """The plan when it is known whether shards are gathered once a step: as the topology asks, or where memory allows it."""
    asked = gathers_once_a_step(accelerator)
    return replace(plan, devices=replace(plan.devices, gathered=fits_gathered(plan) if asked is None else asked))


def _check_horizon(plan: Plan) -> None:
    """InputError where the schedule does not fit into epochs; into steps and tokens it was fitted with the settings."""
    if plan.recipe.train.epochs is not None:
        schedule.check(plan.recipe.schedule, plan.steps)
        last_steps([phase.until for phase in plan.phases], plan.steps)


def fits_gathered(plan: Plan) -> bool:
    """Returns what `fsdp_reshard_after_forward: auto` means: whether a device has the memory to gather its shards once a step,
    with the recipe's microbatch; where that is `auto`, with what fits when they are gathered for each use, or what fills a device
    well."""
    kept = replace(plan, devices=replace(plan.devices, gathered=True))
    enough = max(1, WELL_FILLED // plan.recipe.data.length)
    wanted = plan.microbatch or min(plan.expected_microbatch, enough)
    return plan.devices.memory is None or kept.memory.total(wanted) <= (1 - KEPT_FREE) * plan.devices.memory


def planned_steps(recipe: Recipe, accelerator: Accelerator) -> int:
    """Steps of the horizon, where nothing else is asked for; packs are needed only where `train.epochs` counts them."""
    if recipe.train.epochs is None:
        return steps_of(recipe.train, recipe.batch.tokens, 0, recipe.data.length)
    return prepare_job(recipe, accelerator, purpose="plan").plan.steps


def measured_speed(run_dir: Path, precisions: set[str], devices: tuple[int, str]) -> float | None:
    """Median tokens/s over all devices of the steps that the run has done so far; None before it has done any, where they
    computed in none of these `precisions`, and where some were on others than `devices`, their number and the name of each."""
    try:
        run = read_run(run_dir)
    except InputError:  # no file yet, or a damaged one, which resuming mends: no reason to refuse that
        return None
    ran = set(run.phases.values()) or {run.audit.get("effective")}
    return run.summary.get("tokens_per_second") if ran & precisions and run.devices == devices else None
