"""Checks that need two sections of a recipe, the devices, the model's sizes or the packs.

Each check raises InputError, which names the keys that contradict each other and a value that
works. `prepare_job` calls each function once, the cheapest first. A matrix calls `check_launch` for
each cell. No function imports torch.
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

TOKEN_BYTES = 4  # bytes of a token in packs


def steps_of(train: TrainSettings, tokens_per_step: int, packs: int, length: int) -> int:
    """Return the steps of the run, its horizon.

    Tokens and epochs are rounded up to whole steps: 4 epochs of 22,206 packs at 32 a step are 2,776
    steps. Epochs count as the decimal number in the recipe. As a binary number, 1.1 epochs of 10
    packs would be 11.000000000000002 packs.
    """
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return math.ceil(Fraction(train.tokens) / tokens_per_step)
    return math.ceil(Fraction(str(train.epochs)) * packs * length / tokens_per_step)


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
    """Check a recipe without the device, the model and the data of its launch.

    recipe: with a precision.
    world_size: number of devices, or None if only the launch itself finds it out.
    """
    names = [name for _, name in phases_of(recipe.precision)]
    check_settings(recipe, names[0], world_size)
    for name in names:
        settings = recipe.fp8_config.resolved(name)
        # A fallback trains in a precision that only the device decides.
        if settings.on_unsupported != "fallback":
            check_fit(ActivePrecision(name, precision_called(name), "emulation", settings), recipe)


def check_settings(recipe: Recipe, precision: str, world_size: int | None) -> None:
    """Check what follows from the recipe alone.

    precision: name of the first phase's precision.
    world_size: number of devices, or None if it is not known.
    """
    data = recipe.data
    batch = recipe.batch
    _require(
        recipe.weights == "fp32" or precision_called(precision).compute_dtype != "float32",
        f"`weights: {recipe.weights}` and `precision: {precision}` contradict each other: BF16 "
        "weights compute in BF16; set `precision: bf16`, or `weights: fp32`",
    )
    _require_multiple(
        "batch.tokens", batch.tokens, data.length, "the tokens of a pack (`data.length`)"
    )
    packs = batch.tokens // data.length
    _require(
        world_size is None or packs >= world_size,
        f"`batch.tokens: {batch.tokens}` are {packs} packs of `data.length: {data.length}`, too "
        f"few for {world_size} processes; set it to {data.length * (world_size or 1)} at least, or "
        f"start {packs} processes at most",
    )
    _require(
        not (batch.microbatch_is_searched and recipe.deterministic),
        "`batch.microbatch: auto` fills the free memory, but `deterministic: true` needs the same "
        "microbatches in all runs; set a number. `--plan deterministic=false` estimates what fits",
    )
    _require(
        recipe.loss.kind == "chunked"
        or not (recipe.loss.penalty or recipe.deterministic or recipe.fp8_config.scope != "linear"),
        "`loss.kind: cce` keeps its logits to itself, in BF16, and sums gradients in no fixed "
        "order: it does not work with `loss.penalty`, `deterministic: true` and `fp8_config.scope: "
        "linear+head`; set it to chunked",
    )
    if recipe.train.epochs is None:  # otherwise the number of packs decides the number of steps
        steps = steps_of(recipe.train, batch.tokens, 0, data.length)
        schedule.check(recipe.schedule, steps)
        last_steps([until for until, _ in phases_of(recipe.precision)], steps)
    stream = data.stream
    if stream:
        _require(
            recipe.train.epochs is None,
            f"`train.epochs: {recipe.train.epochs}` counts packs, but the number of packs of "
            "`data.streaming` is not known; set `train.steps` or `train.tokens`",
        )
        # The part that is read, the one before, the next one, and the first one, which stays.
        needed = TOKEN_BYTES * (4 * stream.window + batch.tokens) / 1e9
        _require(
            needed <= stream.disk_gb,
            f"`data.streaming.disk_gb: {stream.disk_gb:g}` does not hold a step and four parts of "
            f"`data.streaming.window: {stream.window}` tokens; set it to {needed * 1.1:.2g} or "
            "more, or a smaller window",
        )
    if data.prepares and not data.held_out and data.validation is None:
        check_held_out(recipe, 0)


def check_gap(recipe: Recipe, *, replicas: int) -> None:
    """Check that the gap to BF16 can be measured, and is measured if the run shall react to it.

    replicas: number of sharded copies of the model.
    """
    _require(
        recipe.log.gap or recipe.health.on_gap == "warn",
        f"`health.on_gap: {recipe.health.on_gap}` needs what `log.gap` measures; set that too, to "
        "100",
    )
    _require(
        not (recipe.log.gap and replicas > 1),
        f"`log.gap: {recipe.log.gap}` cannot separate a microbatch's gradients from the step's in "
        "replicas of shards (HSDP); remove it, or shard over all devices",
    )


def check_held_out(recipe: Recipe, held_out_packs: int) -> None:
    """Check that a recipe that evaluates has held-out packs."""
    every = recipe.evaluate.every
    _require(
        not recipe.checkpoint.best or (every and held_out_packs),
        "`checkpoint.best: true` needs the held-out loss; set `evaluate.every` and `data.held_out`",
    )
    _require(
        not every or held_out_packs,
        f"`evaluate.every: {every}` needs held-out packs and there are none; set `data.held_out` "
        "(such as 0.01, or more if there are few packs), or remove `evaluate.every`",
    )


def check_sizes(recipe: Recipe, model: PretrainedConfig) -> None:
    """Check that the model reads text alone, has layers, and has a position for each token."""
    _require(
        hasattr(model, "vocab_size") and not hasattr(model, "vision_config"),
        f"`model`: {type(model).__name__} reads more than text; name a model of text alone",
    )
    config = model.get_text_config()
    length = recipe.data.length
    positions = getattr(config, "max_position_embeddings", None) or -1  # -1 in XLNet: no limit
    _require(
        positions < 0 or length <= positions,
        f"`data.length: {length}` is beyond the model's {positions} positions; prepare packs of at "
        f"most {positions} tokens",
    )
    _require(
        getattr(config, "num_hidden_layers", None) != 0,
        "`model.config`: `num_hidden_layers: 0` is no model; set it to 1 or more",
    )


def check_fit(active: ActivePrecision, recipe: Recipe, layers: int | None = None) -> None:
    """Check that a quantized precision can take the packs, and has layers to compute.

    A single linear that does not fit stays in BF16. This check finds what would leave no linear.

    layers: number of decoder layers, or None if it is not known.
    """
    if not active.precision.quantized:
        return
    name = active.precision.name
    _require_multiple(
        "data.length",
        recipe.data.length,
        active.precision.multiple_of,
        f"in which `precision: {name}` takes tokens",
    )
    if layers is None:
        return
    first, last = active.kept_layers(layers)
    _require(
        first + last < layers,
        f"`fp8_config.keep_bf16_layers`: the first {first} and the last {last} of {layers} layers "
        f"are all of them; keep fewer for `precision: {name}`, or set `precision: bf16`",
    )
