"""The page's table: which columns a comparison has, what each means, and what stands in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundation.tables import UNKNOWN
from foundation.units import duration, memory, percent, three_digits
from pretrain.compare.comparison import RunComparison, Standing, signed, with_error
from pretrain.compare.fairness import FEWEST_STEPS
from pretrain.compare.page_data import reserved
from pretrain.metrics.run_record import LAST_STEPS, LOSS_KEY

_MFU = {
    "mfu_bf16_peak": ("MFU", "the model's floating-point operations over the device's BF16 peak"),
    "mfu_nanogpt": ("MFU, nanoGPT's", "the same by nanoGPT's count of operations: docs/planning.md has every definition"),
    "mfu_recipe_peak": (
        "MFU, recipe's peak",
        "the share of a step that its products would take, each at the peak of its own precision",
    ),
}


@dataclass(frozen=True)
class TableCell:
    shown: str
    value: float | str | None = None  # that it is sorted by; None, which stands last, for what is not known
    beside: str = ""


@dataclass(frozen=True)
class TableColumn:
    name: str
    meaning: str
    cell: Callable[[Standing], TableCell]
    words: bool = False  # to the left, and sorted upwards first


def _words(value_of: Callable[[Standing], Any]) -> Callable[[Standing], TableCell]:
    def cell(each: Standing) -> TableCell:
        value = value_of(each)
        return TableCell(UNKNOWN) if value is None else TableCell(str(value), str(value))

    return cell


def _figure(value_of: Callable[[Standing], float | None], form: Callable[[float], str]) -> Callable[[Standing], TableCell]:
    def cell(each: Standing) -> TableCell:
        value = value_of(each)
        return TableCell(UNKNOWN) if value is None or not math.isfinite(value) else TableCell(form(value), value)

    return cell


def _key(key: str, form: Callable[[float], str]) -> Callable[[Standing], TableCell]:
    return _figure(lambda each: each.run.summary.get(key), form)


def _held_out(each: Standing) -> TableCell:
    cell = _key("held_out_loss", "{:.4f}".format)(each)
    return cell if cell.value is None else replace(cell, beside=each.run.when_evaluated.strip())


def _of_hardware(key: str, form: Callable[[float], str]) -> Callable[[Standing], TableCell]:
    """A figure of hardware that computes the precision itself, and that the run had for itself."""
    return _figure(lambda each: None if each.speed is None else each.run.summary.get(key), form)


def _mfu(key: str) -> tuple[str, str]:
    return _MFU.get(key, (f"MFU, {key.removeprefix('mfu_').replace('_', ' ')}", f"`{key}` of the metrics"))


def _other_differences(each: Standing) -> str | None:
    return ", ".join(part for part in each.look.kind.split(", ") if part and not part.startswith("weights ")) or None


def _speed(each: Standing) -> TableCell:
    speed = each.shown_speed
    return TableCell(UNKNOWN) if speed is None else TableCell(f"{speed:,.0f}", speed, "emulated" if each.run.emulated else "")


def _as_duration(hours: float) -> str:
    return duration(hours * 3600)


def _nothing(_: Standing) -> TableCell:
    return TableCell(UNKNOWN)


def _gap(each: Standing) -> TableCell:
    if each.is_baseline:
        return TableCell("baseline", 0.0)
    if each.not_paired:
        return TableCell("not paired")
    gap = each.gap
    if not math.isfinite(gap.mean):
        return TableCell(UNKNOWN)
    if not gap.has_interval:
        return TableCell(signed(gap.mean), gap.mean, "too few for ±")
    mean, half = with_error(gap.mean, gap.half_width)
    return TableCell(mean, gap.mean, f"± {half}")


def _held_out_gap(each: Standing) -> TableCell:
    """Returns the cell of the held-out gap; none for runs that are not paired, as another seed's would pass for a precision's."""
    if each.not_paired:
        return TableCell(UNKNOWN, beside="not paired")
    return _figure(lambda standing: standing.held_out_gap, signed)(each)


_RUN = (
    TableColumn("run", "folder of the run; ★: on the Pareto front", _words(lambda each: each.look.label), words=True),
    TableColumn("precision", "what products are computed in", _words(lambda each: each.run.precision), words=True),
    TableColumn("weights", "how weights are stored", _words(lambda each: each.run.config.get("weights")), words=True),
    TableColumn("differs in", "what else this run differs in from the others", _words(_other_differences), words=True),
    TableColumn("steps", "updates so far", _figure(lambda each: each.run.summary["steps"], "{:,}".format)),
)
_SPEED = (
    TableColumn("tokens/s", "median of all steps but the first two, padding included", _speed),
    TableColumn(
        "× baseline",
        "tokens/s over the baseline's, of hardware that computes the precision itself",
        _figure(lambda each: each.speedup, "{:.2f}".format),
    ),
)
_MEMORY = (
    TableColumn(
        "memory", "the most that torch had allocated on a GPU; on a CPU what the process held", _key("memory_gib", memory)
    ),
    TableColumn("reserved", "the most that torch had reserved", _figure(lambda each: reserved(each.run), memory)),
)
_HEALTH = (
    TableColumn(
        "frozen updates",
        "share of parameters whose update was lost in rounding to the stored weight",
        _key("frozen_updates", lambda share: f"{share * 100:.2g} %"),
    ),
    TableColumn(
        "waiting for data",
        "share of the steps' time",
        _figure(lambda each: None if each.run.side_by_side else each.run.summary.get("data_wait_share"), percent),
    ),
)


def _losses(comparison: RunComparison) -> list[TableColumn]:
    steps = max((each.gap.steps for each in comparison.paired), default=0)
    return [
        TableColumn(
            f"loss − baseline, last {steps}",
            "paired by step; ± half of the 95 % interval, by Student's t over means of batches of steps; "
            f"of fewer than {FEWEST_STEPS} steps there is none",
            _gap if comparison.paired else _nothing,
        ),
        TableColumn("held-out loss", "of packs that are not trained on, nats a token", _held_out),
        TableColumn(
            "held-out − baseline",
            "of the last step in which both were evaluated, on the same packs",
            _held_out_gap,
        ),
        TableColumn(
            f"loss, last {LAST_STEPS}", "training loss, mean of the last steps, nats a token", _key(LOSS_KEY, "{:.4f}".format)
        ),
    ]


def _use_of_hardware(comparison: RunComparison) -> list[TableColumn]:
    found = dict.fromkeys(key for each in comparison.standings for key in each.run.summary if key.startswith("mfu_"))
    return [
        *(TableColumn(*_mfu(key), _of_hardware(key, percent)) for key in found),
        TableColumn(
            "tokens/J",
            "tokens a joule, by the GPUs' own counters of energy, over all steps but the first two; no host, no cooling",
            _of_hardware("tokens_per_joule", three_digits),
        ),
    ]


def _hours(comparison: RunComparison) -> list[TableColumn]:
    matched = f"{comparison.matched_loss:.3f}" if comparison.matched_loss else "in common"
    return [
        TableColumn("hours to the horizon", "of the whole recipe at this speed", _figure(lambda each: each.hours, _as_duration)),
        TableColumn(
            f"hours to loss {matched}",
            "speed at matched loss: time in steps until the mean loss was at the lowest that all of them reached",
            _figure(lambda each: each.hours_to_match, _as_duration),
        ),
    ]


def columns_of(comparison: RunComparison) -> list[TableColumn]:
    """All that some run knows something about."""
    columns = [*_RUN, *_SPEED, *_losses(comparison), *_MEMORY, *_use_of_hardware(comparison), *_hours(comparison), *_HEALTH]
    always = ("run", "precision", "weights")
    return [c for c in columns if c.name in always or any(c.cell(each).value is not None for each in comparison.standings)]


def rows_of(comparison: RunComparison, columns: Sequence[TableColumn]) -> list[list[TableCell]]:
    return [[column.cell(each) for column in columns] for each in comparison.standings]
