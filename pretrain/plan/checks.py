"""Checks that need two sections of a recipe, the devices, the model's sizes or the packs.

Each check raises an InputError if it fails. The message contains the keys that contradict each
other, and a value that works. A run calls the fastest checks first. A matrix of runs calls
`check_launch` for each of its runs. No function imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.errors import InputError
from foundation.settings import last_steps
from pretrain.optimizer import schedule
from pretrain.precision.settings import (
    PRECISIONS,
    ActivePrecision,
    configured,
    phases_of,
)
from pretrain.settings.recipe import Recipe, TrainSettings

if TYPE_CHECKING:  # slow to import
    from transformers import PretrainedConfig

TOKEN_BYTES = 4  # bytes of a token in packs


def steps_of(train: TrainSettings, tokens_per_step: int, packs: int, length: int) -> int:
    """Return the number of steps of the run, also called its horizon.

    packs: number of training packs.
    length: number of tokens in a pack.

    Tokens and epochs are rounded up to whole steps: 4 epochs of 22,206 packs with 32 packs per step
    are 2,776 steps. The number of epochs is computed exactly, as a decimal fraction. With binary
    floating-point numbers, 1.1 epochs of 10 packs would be 11.000000000000002 packs.
    """
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return math.ceil(Fraction(train.tokens) / tokens_per_step)
    return math.ceil(Fraction(str(train.epochs)) * packs * length / tokens_per_step)


def _require(condition: object, message: str) -> None:
    """Raise InputError with `message` if `condition` is false."""
    if not condition:
        raise InputError(message)


def _require_multiple(key: str, value: int, unit: int, what: str) -> None:
    """Raise InputError if `value` is not a multiple of `unit`.

    key: key of the setting that has the value.
    what: a description of `unit` or of the requirement, for the message.
    """
    below = value // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    _require(
        value % unit == 0,
        f"`{key}: {value}` is not a multiple of {unit}, {what}; set it to {nearest}",
    )


def check_launch(recipe: Recipe, world_size: int | None, overrides: Sequence[str]) -> None:
    """Check a recipe before its launch, when the device, the model and the data are not known.

    Checks that depend on the device, the model or the data are omitted.

    recipe: a recipe that sets `precision`.
    world_size: number of devices, or None if the number is not known before the launch.
    overrides: key=value overrides on the command line of the launch.
    """
    names = [name for _, name in phases_of(recipe.precision)]
    check_settings(recipe, names[0], world_size, overrides)
    for name in names:
        # With `on_unsupported: fallback`, the precision that is used depends on the device.
        if recipe.fp8_config.on_unsupported != "fallback":
            check_fit(
                ActivePrecision(name, configured(name, recipe.fp8_config), "emulation"), recipe
            )


def check_settings(
    recipe: Recipe, precision: str, world_size: int | None, overrides: Sequence[str]
) -> None:
    """Check the recipe for contradictions between its sections.

    precision: name of the precision of the first phase.
    world_size: number of devices, or None if the number is not known.
    overrides: key=value overrides on the command line. If they set the length of the run, a
        schedule that is too long is no error, because the training shortens it.
    """
    data = recipe.data
    batch = recipe.batch
    _require(
        recipe.weights in ("auto", "fp32") or PRECISIONS[precision].compute_dtype != "float32",
        f"`weights: {recipe.weights}` and `precision: {precision}` contradict each other, because "
        "BF16 weights cannot compute in FP32; set either `precision: bf16` or `weights: fp32` (if "
        "the recipe sets no precision, the Accelerate configuration does: cpu.yaml sets fp32)",
    )
    _require_multiple(
        "batch.tokens", batch.tokens, data.length, "the number of tokens in a pack (`data.length`)"
    )
    packs = batch.tokens // data.length
    _require(
        world_size is None or packs >= world_size,
        f"`batch.tokens: {batch.tokens}` are {packs} packs of `data.length: {data.length}` tokens, "
        f"which are too few for {world_size} processes; either set `batch.tokens` to at least "
        f"{data.length * (world_size or 1)}, or start at most {packs} processes",
    )
    _require(
        not (batch.microbatch == "auto" and recipe.deterministic),
        "`batch.microbatch: auto` chooses a size by the free memory, but `deterministic: true` "
        "needs the same microbatches in all runs; set `batch.microbatch` to a number. `--plan "
        "deterministic=false` estimates the largest number that fits",
    )
    _require(
        recipe.loss.kind == "chunked"
        or not (recipe.loss.penalty or recipe.deterministic or recipe.fp8_config.scope != "linear"),
        "`loss.kind: cce` does not return its logits, computes them in BF16, and sums gradients in "
        "no fixed order, so it does not support `loss.penalty`, `deterministic: true` and "
        "`fp8_config.scope: linear+head`; set `loss.kind: chunked`",
    )
    # With `train.epochs`, the number of steps depends on the number of packs, which is not known.
    if recipe.train.epochs is None:
        steps = steps_of(recipe.train, batch.tokens, 0, data.length)
        fitted, _ = schedule.fit_to_command_line(recipe, overrides, steps)
        schedule.check(fitted.schedule, steps)
        last_steps("precision", [until for until, _ in phases_of(recipe.precision)], steps)
        _check_merge(recipe, steps)
    if stream := data.stream:
        _require(
            recipe.train.epochs is None,
            f"`train.epochs: {recipe.train.epochs}` needs the number of packs, which is not known "
            "with `data.streaming`; set `train.steps` or `train.tokens`",
        )
        # The disk must hold four parts: the part that is read, the parts before and after it, and
        # the first part of the stream, which is never deleted.
        needed = TOKEN_BYTES * (4 * stream.window + batch.tokens) / 1e9
        _require(
            needed <= stream.disk_gb,
            f"`data.streaming.disk_gb: {stream.disk_gb:g}` does not suffice for a step and four "
            f"parts of `data.streaming.window: {stream.window}` tokens; either set "
            f"`data.streaming.disk_gb` to at least {needed * 1.1:.2g}, or choose a smaller "
            "`data.streaming.window`",
        )
    if data.prepares and not data.held_out and data.validation is None:
        check_held_out(recipe, 0)
    if served := recipe.evaluate.served:
        check_fit(ActivePrecision(served, PRECISIONS[served], "emulation"), recipe)


def _check_merge(recipe: Recipe, steps: int) -> None:
    """Check that the run saves and keeps the checkpoints that `evaluate.merge` averages.

    steps: number of steps of the run.
    """
    merge = recipe.evaluate.merge
    if merge == 1:
        return
    every = recipe.checkpoint.every or steps
    # A branch saves only checkpoints after the step in the name of the checkpoint to branch from.
    # A link to a checkpoint may have another name, and then this number of checkpoints is too high.
    branch_step = Path(recipe.train.begin_with or "").name.removeprefix("step-")
    first = int(branch_step) if branch_step.isdecimal() else 0
    # The multiples of `every` after `first` and before the last step, and the last step.
    saved = (steps - 1) // every - first // every + 1
    available = min(recipe.checkpoint.keep, saved)
    _require(
        recipe.evaluate.served is not None,
        f"`evaluate.merge: {merge}` has no effect without `evaluate.served`; set it to a "
        "precision, such as bf16",
    )
    _require(
        merge <= available,
        f"`evaluate.merge: {merge}` averages more checkpoints than this run saves and keeps, "
        f"which are {available}; either set it to {available} or less, or set a smaller "
        "`checkpoint.every` and a larger `checkpoint.keep`",
    )


def check_step(recipe: Recipe, packs: int | None) -> None:
    """Check that a training step does not read a pack twice.

    packs: number of training packs in an epoch, or None if it is not known.
    """
    batch = recipe.batch
    most = math.inf if packs is None else packs * recipe.data.length
    _require(
        batch.tokens <= most,
        f"`batch.tokens: {batch.tokens}` is more than the {most} tokens of all training packs, so "
        f"each step would train on the same tokens twice; set `batch.tokens` to at most {most}, or "
        "add documents",
    )


def check_held_out(recipe: Recipe, held_out_packs: int) -> None:
    """Check that there are held-out packs if the recipe evaluates on them."""
    every = recipe.evaluate.every
    _require(
        not recipe.checkpoint.best or (every and held_out_packs),
        "`checkpoint.best: true` needs the held-out loss; set `evaluate.every` and `data.held_out`",
    )
    _require(
        not every or held_out_packs,
        f"`evaluate.every: {every}` needs held-out packs and there are none; either set "
        "`data.held_out` (for example to 0.01, or to more if there are few packs), or remove "
        "`evaluate.every`",
    )
    _require(
        not recipe.evaluate.served or held_out_packs,
        f"`evaluate.served: {recipe.evaluate.served}` needs held-out packs and there are none; set "
        "`data.held_out` or `data.validation`",
    )


def check_sizes(recipe: Recipe, model: PretrainedConfig) -> None:
    """Check that the model reads only text, and has enough positions for a pack.

    model: the configuration of the model.
    """
    _require(
        hasattr(model, "vocab_size") and not hasattr(model, "vision_config"),
        f"`model`: {type(model).__name__} reads more than text; choose a model of text only",
    )
    config = model.get_text_config()
    length = recipe.data.length
    # -1 means that there is no limit. XLNet's configuration has the value -1.
    positions = getattr(config, "max_position_embeddings", None) or -1
    _require(
        positions < 0 or length <= positions,
        f"`data.length: {length}` is larger than the model's {positions} positions; either set "
        f"`data.length` to at most {positions} and prepare packs of this length, or raise "
        "`model.config.max_position_embeddings`",
    )


def check_fit(active: ActivePrecision, recipe: Recipe, layers: int | None = None) -> None:
    """Check that a quantized precision supports the pack length, and that it quantizes some layer.

    Raise InputError if the pack length is not a multiple of the number that the precision requires,
    because then no linear layer could be quantized. Also raise InputError if
    `fp8_config.keep_bf16_layers` keeps all layers in BF16. It is not an error if a single linear
    layer has an unsuitable shape: that layer stays in BF16.

    layers: number of decoder layers, or None if the number is not known.
    """
    if not active.precision.quantized:
        return
    name = active.name
    _require_multiple(
        "data.length",
        recipe.data.length,
        active.precision.multiple_of,
        f"as the precision {name} requires",
    )
    if layers is None:
        return
    first, last = active.kept_layers(layers)
    _require(
        first + last < layers,
        f"`fp8_config.keep_bf16_layers`: the first {first} and the last {last} of {layers} layers "
        f"are all layers, so none would compute in {name}; either keep fewer layers in BF16, or "
        "set `precision: bf16`",
    )
