"""Every check that needs two sections of a recipe, the number of devices, the model's sizes or the number of packs.

Each raises InputError, which names the keys that contradict each other and says what would go together. `prepare_job` calls each
of them once, in the order of what it costs to find out, and a matrix calls `check_launch` for each cell. No function here imports
torch.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from foundation.errors import InputError
from pretrain.optimizer import schedule
from pretrain.precision.settings import ActivePrecision, last_steps, phases_of, precision_called
from pretrain.settings.recipe import Recipe, TrainSettings

if TYPE_CHECKING:  # slow to import
    from transformers import PretrainedConfig

TOKEN_BYTES = 4  # of a token in packs


def steps_of(train: TrainSettings, tokens_per_step: int, packs: int, length: int) -> int:
    """Steps of the horizon. Tokens and epochs round up to whole steps: 22,206 packs at 32 a step in 4 epochs are 2,776.

    Epochs count as the decimal number that was written: in binary, 1.1 epochs of 10 packs would be 11.000000000000002.
    """
    if train.steps is not None:
        return train.steps
    tokens = (
        train.tokens if train.tokens is not None else Fraction(str(train.epochs)) * packs * length
    )
    return math.ceil(Fraction(tokens) / tokens_per_step)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)


def _require_multiple(key: str, value: int, unit: int, what: str) -> None:
    below = value // unit * unit
    nearest = f"are {below} and {below + unit}" if below else f"is {unit}"
    _require(
        value % unit == 0,
        f"`{key}: {value}` is not a multiple of {unit}, {what}; the nearest {nearest}",
    )


def check_launch(recipe: Recipe, world_size: int | None) -> None:
    """Runs those checks of a launch that need neither its device nor its model nor its data; `recipe`: with its precision
    decided. `world_size`: None where only the launch itself will find it out."""
    uses = [use for _, use in phases_of(recipe.precision)]
    check_settings(recipe, uses[0], world_size)
    for use in uses:
        settings = recipe.fp8_config.resolved(use)
        if settings.on_unsupported != "fallback":  # to what the device has
            check_fit(ActivePrecision(use, precision_called(use), "emulation", settings), recipe)


def check_settings(recipe: Recipe, precision: str, world_size: int | None) -> None:
    """Checks what needs nothing but the recipe, the effective `precision` and `world_size`: how many devices a launch has; None
    where that is not known."""
    data, batch, train = recipe.data, recipe.batch, recipe.train
    _require(
        recipe.weights == "fp32" or precision_called(precision).compute_dtype != "float32",
        f"`weights: {recipe.weights}` and `precision: {precision}` contradict each other: BF16 weights compute in BF16; set "
        "`precision: bf16`, or `weights: fp32`",
    )
    _require_multiple(
        "batch.tokens", batch.tokens, data.length, "the tokens of packs (`data.length`)"
    )
    if world_size is not None:
        packs = batch.tokens // data.length
        _require(
            packs >= world_size,
            f"`batch.tokens: {batch.tokens}` are {packs} packs of `data.length: {data.length}`, too few for {world_size} "
            f"processes; set it to {data.length * world_size} at least, or start {packs} processes at most",
        )
    _require(
        not (batch.microbatch_is_searched and recipe.deterministic),
        "`batch.microbatch: auto` takes what fits into the memory that is free, and `deterministic: true` needs one cut for all "
        "runs; set a number. `--plan deterministic=false` says what is expected to fit",
    )
    _require(
        recipe.loss.kind == "chunked"
        or not (recipe.loss.penalty or recipe.deterministic or recipe.fp8_config.scope != "linear"),
        "`loss.kind: cce` keeps its logits to itself, in BF16, and adds gradients up in no fixed order: without `loss.penalty`, "
        "`deterministic: true` and `fp8_config.scope: linear+head`; set it to chunked",
    )
    if train.epochs is None:  # otherwise the number of packs decides how many steps there are
        steps = steps_of(train, batch.tokens, 0, data.length)
        schedule.check(recipe.schedule, steps)
        last_steps([until for until, _ in phases_of(recipe.precision)], steps)
    if stream := data.stream:
        _require(
            train.epochs is None,
            f"`train.epochs: {train.epochs}` counts packs, and of `data.streaming` nobody knows how many there are; set "
            "`train.steps` or `train.tokens`",
        )
        # a part is read, one was, one comes, and the first stays
        needed = TOKEN_BYTES * (4 * stream.window + batch.tokens) / 1e9
        _require(
            needed <= stream.disk_gb,
            f"`data.streaming.disk_gb: {stream.disk_gb:g}` does not hold a step and four parts of `data.streaming.window: "
            f"{stream.window}` tokens; set it to {needed * 1.1:.2g} or more, or a smaller window",
        )
    if data.prepares and not data.held_out and data.validation is None:
        check_held_out(recipe, 0)


def check_gap(recipe: Recipe, *, replicas: int) -> None:
    """InputError where the gap to BF16 cannot be measured, or is to be acted on and is not measured. `replicas`: of shards."""
    _require(
        recipe.log.gap or recipe.health.on_gap == "warn",
        f"`health.on_gap: {recipe.health.on_gap}` goes by what `log.gap` measures; set that too, to 100",
    )
    _require(
        not (recipe.log.gap and replicas > 1),
        f"`log.gap: {recipe.log.gap}` cannot tell a microbatch's gradients from the step's in replicas of shards (HSDP); leave "
        "it out, or shard over all devices",
    )


def check_held_out(recipe: Recipe, held_out_packs: int) -> None:
    """InputError where something goes by held-out packs, and there are none."""
    every = recipe.evaluate.every
    _require(
        not recipe.checkpoint.best or (every and held_out_packs),
        "`checkpoint.best: true` goes by the held-out loss; set `evaluate.every`, and `data.held_out`",
    )
    _require(
        not every or held_out_packs,
        f"`evaluate.every: {every}` needs held-out packs and there are none; set `data.held_out` (0.01, say, or more where packs "
        "are few), or leave `evaluate.every` out",
    )


def check_sizes(recipe: Recipe, model: PretrainedConfig) -> None:
    """InputError for a model of more than text or without layers, and for too long packs."""
    _require(
        hasattr(model, "vocab_size") and not hasattr(model, "vision_config"),
        f"`model`: {type(model).__name__} is of more than text; name a model of text alone",
    )
    config = model.get_text_config()
    length = recipe.data.length
    positions = getattr(config, "max_position_embeddings", None) or -1  # XLNet says -1: no limit
    _require(
        positions < 0 or length <= positions,
        f"`data.length: {length}` is beyond the model's {positions} positions; prepare packs of at most {positions} tokens",
    )
    _require(
        getattr(config, "num_hidden_layers", None) != 0,
        "`model.config`: `num_hidden_layers: 0` is no model; set it to 1 or more",
    )


def check_fit(active: ActivePrecision, recipe: Recipe, layers: int | None = None) -> None:
    """Raises InputError where a quantized precision cannot take the recipe's packs, or a model of so many decoder `layers`, where
    they are known. A single linear that does not fit stays in BF16; what is refused here would leave none."""
    if not active.precision.quantized:
        return
    name, unit = active.precision.name, active.precision.multiple_of
    _require_multiple(
        "data.length", recipe.data.length, unit, f"in which `precision: {name}` takes tokens"
    )
    if layers is None:
        return
    first, last = active.kept_layers(layers)
    _require(
        first + last < layers,
        f"`fp8_config.keep_bf16_layers`: the first {first} and the last {last} of {layers} layers are all of them; "
        f"keep fewer for `precision: {name}`, or set `precision: bf16`",
    )
