"""Print the plans of a recipe for devices that this machine does not have: `pretrain plan`."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from foundation import units
from foundation.errors import InputError
from foundation.units import UNKNOWN, bytes_text, or_dash, table, with_bar, wrap
from lab.speed.speed import Prediction, predict
from lab.speed.targets import devices_called, obstacle, plan_on
from packing.store import unprepared
from pretrain.launch.environment import with_precision
from pretrain.metrics.cards import card_called
from pretrain.plan.plan import KEPT_FREE, SAVE_MEMORY, Plan, Training
from pretrain.plan.rendering import (
    flops_line,
    horizon_lines,
    in_subjects,
    model_lines,
    width,
)
from pretrain.precision.settings import BF16, QUANTIZED
from pretrain.run.data import open_data
from pretrain.run.job import training_elsewhere
from pretrain.settings.commands import USUAL_DEVICES
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

# The quantized precisions that some GPU computes.
ON_GPUS = [name for name, precision in QUANTIZED.items() if precision.hardware.capability]
COLUMNS = ("precision", "tokens/s", "gain", "packs", "needs", "time", "dollars")
NOTES = {
    "tokens/s": "predicted, ± its error, with the packages of requirements-cuda.txt",
    "gain": "speed divided by the speed in BF16 with the same microbatch and configuration",
    "packs": "microbatches of a device in a step x packs in a microbatch; the recipe sets them, or "
    f"they are the most that leave {100 * KEPT_FREE:.0f} % of the memory free",
    "time": "all training steps, without evaluations, measurements of `log` and starts",
}
WITHOUT_PACKS = (
    "each pack is counted as one document, which is an upper limit of FLOPs and time, because no "
    "packs are prepared here"
)


def main(options: argparse.Namespace) -> int:
    """Print the plans of a recipe in several precisions for the devices in --on, and return 0.

    Raises InputError if the recipe cannot be planned.
    """
    targets = [devices_called(text) for text in options.on or USUAL_DEVICES]
    prices = {card_called(name, "--price").name: dollars for name, dollars in options.price}
    if options.config and all(devices.count == 1 for devices in targets):
        raise InputError(f"--config {options.config}: set several devices, such as --on 8xH100")
    recipe = load_recipe(options.recipe, options.overrides)
    trainings, unsuitable = _trainings_in_precisions(recipe, options.overrides)
    # The first training is in the precision of the recipe.
    training, _ = next(iter(trainings.values()))

    print(f"{training.recipe.name}: {training.recipe.weights} weights\n{'─' * width()}")
    subjects = {
        "model": model_lines(training),
        "horizon": horizon_lines(training),
        "FLOPs": [flops_line(training)],
    }
    print(in_subjects(subjects), end="\n\n")
    printed: set[str] = set()
    for devices in targets:
        on_devices = {
            precision: plan_on(devices, *training_and_shapes, options.config)
            for precision, training_and_shapes in trainings.items()
        }
        text, titles = device_table(on_devices, prices.get(devices.name))
        print(text, end="\n\n")
        printed |= titles
    per_parameter = units.count(training.total_tokens / training.flops.parameters)
    notes = [f"{title}: {note}" for title, note in NOTES.items() if title in printed]
    if not training.packs:
        notes.append(WITHOUT_PACKS)
    notes.append(
        f"losses: docs/evidence.md, by model and tokens per parameter (here {per_parameter})"
    )
    notes += unsuitable
    if training.flops.uncounted:
        notes.append(training.flops.uncounted_warning)
    print("\n".join(wrap(f"* {text}") for text in [*notes, *training.notices]))
    return 0


def _trainings_in_precisions(
    loaded: Recipe, overrides: Sequence[str]
) -> tuple[dict[str, tuple[Training, PreTrainedModel]], list[str]]:
    """Check a recipe in its precision, in BF16, and in the quantized precisions of GPUs.

    If the user has set the precision of the recipe, only this precision and BF16 are checked.

    Return two values. The first maps precisions to results of `training_elsewhere`, and begins with
    the precision of the recipe. The second lists why other precisions do not suit the recipe.
    """
    with_default = loaded.model_copy(update={"precision": loaded.precision or BF16.name})
    recipe = with_precision(with_default, os.environ)
    # Open the packs once for all precisions.
    data = None if unprepared(recipe.data) else open_data(recipe.data, is_main_process=True)
    training, shapes = training_elsewhere(recipe, overrides, data)
    # A label is a precision, which "+head" follows if the head is quantized too.
    recipe_label = training.schedule.label
    suffix = recipe.fp8_config.scope.removeprefix("linear")
    # Without a quantized phase, the scope has no meaning.
    if training.schedule.quantizes:
        recipe_label += suffix
    trainings = {recipe_label: (training, shapes)}
    labels = [BF16.name]
    if loaded.precision is None:
        labels += [*(name + suffix for name in ON_GPUS), f"{ON_GPUS[0]}+head"]
    unsuitable = []
    for label in dict.fromkeys(labels):
        if label in trainings:
            continue
        name, head, _ = label.partition("+head")
        settings = recipe.fp8_config.model_copy(update={"scope": f"linear{head}"})
        candidate = recipe.model_copy(update={"precision": name, "fp8_config": settings})
        try:
            trainings[label] = training_elsewhere(candidate, overrides, data)
        except InputError as error:
            unsuitable.append(f"{label}: {error}")
    return trainings, unsuitable


def fits(plan: Plan) -> bool:
    """Return True if a plan fits into the memory of its devices."""
    # `devices.memory` is the part of the memory that a plan should use.
    return plan.needed_memory(plan.expected_microbatch) <= plan.devices.memory / (1 - KEPT_FREE)


def device_table(plans: Mapping[str, Plan], price: float | None) -> tuple[str, set[str]]:
    """Return a text and the titles of its columns.

    The text is a heading, a table of the precisions, the fastest first, and remarks.

    plans: maps each precision to the plan in it. The plans are for the same devices.
    price: dollars for an hour of one device, or None.
    """
    devices = next(iter(plans.values())).devices
    rows = []
    remarks = defaultdict(list)
    for label, plan in plans.items():
        missing = obstacle(plan)
        if missing:
            remarks[missing].append(label)
            continue
        prediction = predict(plan)
        rows.append(_row(label, plan, prediction, price))
        reason = prediction.reason if fits(plan) else f"does not fit; {SAVE_MEMORY}"
        for remark in filter(None, [*plan.expert_warnings, reason]):
            remarks[remark].append(label)
    card = card_called(devices.name, "--on")
    major, minor = card.capability
    memory = units.memory(card.memory)
    lines = [f"{devices}, {memory}, compute capability {major}.{minor}"]
    titles = set()
    if rows:
        rows.sort(key=lambda row: row[0], reverse=True)
        columns = zip(COLUMNS, *(cells for _, cells in rows), strict=True)
        # Omit columns without a value. For example, the dollars are unknown without a price.
        shown = [column for column in columns if {*column[1:]} != {UNKNOWN}]
        titles = {title for title, *_ in shown}
        if "gain" in titles:
            lines[0] += f", speed by steps of {card.source}"
        lines.append(table(shown))
    lines += [wrap(f"{', '.join(labels)}: {remark}") for remark, labels in remarks.items()]
    return "\n".join(lines), titles


def _row(
    label: str, plan: Plan, prediction: Prediction, price: float | None
) -> tuple[float, list[str]]:
    """Return the sort key of a plan's row, and the cells of the row.

    The sort key is the speed. If the speed is not known, the key is the gain.
    """
    devices = plan.devices
    size = plan.expected_microbatch
    needed = bytes_text(plan.needed_memory(size))
    if plan.host_memory:
        needed += f" + {bytes_text(plan.host_memory)} host"
    if fits(plan):
        speed = prediction.tokens_per_second
        speed_text = with_bar(speed, prediction.error, ",.0f")
    else:
        speed = None
        speed_text = "does not fit"
    packs = f"{-(-plan.packs_per_rank // size)} x {size}"
    if devices.count > 1:
        packs += f", {devices.topology}"
    seconds = plan.total_tokens / speed if speed else None
    dollars = price * devices.count * seconds / 3600 if price and seconds else None
    gain_error = prediction.gain_error if plan.schedule.quantizes else None
    cells = [
        label,
        speed_text,
        with_bar(prediction.gain, gain_error, ".2f"),
        packs,
        needed,
        or_dash(seconds, units.duration),
        or_dash(dollars, "{:,.2f}".format),
    ]
    return speed or prediction.gain or 0.0, cells
