"""The evidence as a picture: what each precision costs in loss against what it gains in speed, a marker a scale.

What has no speed on the machine stands apart at the left; what was emulated is hollow. Scales of a cell stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evidence_read import BASELINE, BRANCH, BRANCH_REPEAT, REPEAT, Scale, Speeds, final_loss
from foundation.units import count, plural
from pretrain.compare.appearance import colour_of
from pretrain.compare.fairness import CONFIDENCE
from pretrain.compare.figures import GREY, new_figure, save, style_panel
from pretrain.compare.seed_groups import whole_percent
from pretrain.compare.seeds import MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 8.0, 4.6  # inches; at 800 pixels an inch has 100
MARKERS = "osD^vP*X"  # of the scales, in their order
APART, SPEED_APART = 0.16, 0.014  # of two scales of a precision, at the left and in speed
BAND = "#E8E8E8"
NEAR = 0.1  # in speed over the baseline's, in which two names have no room beside each other
LINEAR = 1.0  # per cent of the baseline's loss, up to which the scale is linear


@dataclass(frozen=True)
class EvidencePoint:
    """A cell's mean difference and half of its interval, in per cent of the baseline's loss."""

    name: str  # as it is written in the picture
    colour: str
    emulated: bool
    speedup: float | None  # None: emulated, or not measured
    mean: float
    half: float  # 0 without an interval


def draw(scales: Sequence[Scale], speeds: Speeds, picture: Path) -> None:
    """InputError where `picture` cannot be written."""
    found = [points(scale, speeds) for scale in scales]
    every = [each for drawn in found for each in drawn]
    apart = list(dict.fromkeys(each.name for each in every if each.speedup is None))
    figure = new_figure(WIDTH, HEIGHT)
    left, right = figure.subplots(1, 2, width_ratios=[max(len(apart), 1) * 0.55, 5.0], sharey=True)
    floor, of = next(filter(None, map(floor_of, scales)), (None, ""))
    for panel in (left, right):
        style_panel(panel)
        panel.axhspan(-100 * MARGIN, 100 * MARGIN, color=BAND, zorder=0)
        panel.axhline(0, color=GREY, linewidth=0.8)
        for height in () if floor is None else (-floor, floor):
            panel.axhline(height, color=GREY, linewidth=0.9, linestyle=":")
    for number, (scale, drawn) in enumerate(zip(scales, found, strict=True)):
        marker = MARKERS[number % len(MARKERS)]
        for each in drawn:
            beside = [one for one, others in enumerate(found) if any(other.name == each.name for other in others)]
            place = beside.index(number) - (len(beside) - 1) / 2
            panel, x, step = (left, apart.index(each.name), APART) if each.speedup is None else (right, each.speedup, SPEED_APART)
            x += place * step
            bar = {"yerr": each.half} if each.half else {}
            fill = "white" if each.emulated else each.colour
            panel.errorbar(x, each.mean, **bar, fmt=marker, markersize=6, capsize=3, color=each.colour, markerfacecolor=fill)
        right.plot([], [], marker, markersize=6, color=GREY, label=said_of(scale))
    base = EvidencePoint(BASELINE, colour_of(BASELINE), False, 1.0, 0.0, 0.0)
    right.plot(base.speedup, base.mean, "o", markersize=7, color=base.colour)
    write_names(right, [base, *(each for each in every if each.speedup is not None)])
    reach(left, [end for each in every for end in (each.mean - each.half, each.mean + each.half)])
    left.set_xticks(range(len(apart)), apart, rotation=40, ha="right", rotation_mode="anchor", fontsize="small")
    left.set_xlim(-0.7, max(len(apart), 1) - 0.3)
    left.set_xlabel("no speed\nhere")
    left.set_ylabel(f"held-out loss in BF16 minus {BASELINE}'s, %")
    fastest = max((each.speedup for each in every if each.speedup), default=1.0)
    right.set_xlim(0.96, max(fastest, 1.05) + 0.08)  # for the name of the last
    right.set_xlabel(f"speed over BF16: {speeds.model} on an {speeds.device}")
    right.legend(loc="upper right", fontsize="small", frameon=False)
    said = f"bars: {whole_percent(CONFIDENCE)} interval, from three seeds on; grey: ± {100 * MARGIN:g} %"
    said += f"; dotted: {BASELINE} repeated{f', {of}' if scales[1:] else ''}" if floor is not None else ""
    said += "; hollow: emulated" if any(each.emulated for each in every) else ""
    said += "; scales of a cell side by side" if scales[1:] else ""
    said += f"; logarithmic beyond {LINEAR:g} %" if left.get_yscale() == "symlog" else ""
    figure.suptitle(said, x=0.01, ha="left", fontsize="small", color=GREY)
    save(figure, picture)


def points(scale: Scale, speeds: Speeds) -> list[EvidencePoint]:
    """The precisions that have a difference to the baseline."""
    drawn = []
    for cell in scale.precisions:
        if difference := scale.difference(cell):
            per_cent, half = 100 / difference.baseline, difference.half_width() or 0.0
            record, speedup = scale.record(cell), speeds.over_baseline(scale, cell)
            figures = speedup, difference.mean * per_cent, half * per_cent
            # A branch is called as its precision, where nothing else of its scale is called so.
            precision = cell.removesuffix(BRANCH)
            called = cell if precision in scale.precisions else precision
            drawn.append(EvidencePoint(called, colour_of(record.precision), record.emulated, *figures))
    return drawn


def floor_of(scale: Scale) -> tuple[float, str] | None:
    """Return how far repeated baselines end apart, as the cells were begun, in per cent; and the scale's name."""
    level = scale.mean(BASELINE, final_loss)
    floor = scale.floor(BRANCH_REPEAT if all(cell.endswith(BRANCH) for cell in scale.precisions) else REPEAT)
    return None if floor is None or not level else (100 * floor / level, scale.content["scale"])


def said_of(scale: Scale) -> str:
    """Say which size a scale has, and how many seeds."""
    content, seeds = scale.content, len(scale.values(BASELINE, final_loss))
    differences = filter(None, map(scale.difference, scale.precisions))
    fewer = "up to " if any(len(each.by_seed) < seeds for each in differences) else ""
    said = f"{content['scale']}: {count(content['parameters'])} parameters, {count(content['tokens'])} tokens"
    return f"{said}, {fewer}{plural(seeds, 'seed')}"


def write_names(panel: Axes, drawn: Sequence[EvidencePoint]) -> None:
    """A name over the bars of each cell, a line higher where the name before would be in the way."""
    tops = {each.name: max(point.mean + point.half for point in drawn if point.name == each.name) for each in drawn}
    speeds = sorted({each.name: each.speedup for each in drawn}.items(), key=lambda item: item[1])
    raised, before = False, None
    for name, speedup in speeds:
        near = before is not None and speedup - before[1] < NEAR
        top = max(tops[each] for each in ((before[0], name) if near else (name,)))
        raised = near and not raised
        at = {"xy": (speedup, top), "xytext": (0, 17 if raised else 5), "textcoords": "offset points"}
        panel.annotate(name, **at, ha="center", va="bottom", fontsize="small")
        before = name, speedup


def reach(panel: Axes, ends: Sequence[float]) -> None:
    """Room for all `ends` and the margin, in per cent; logarithmic beyond LINEAR where some lie far beyond it."""
    margin = 100 * MARGIN
    low, high = min([*ends, -margin]), max([*ends, margin])
    if max(-low, high) > 4 * LINEAR:
        panel.set_yscale("symlog", linthresh=LINEAR, linscale=2.0)
        panel.set_yticks(
            [tick for tick in (-10, -5, -2, -1, -margin, 0, margin, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
        )
        panel.set_yticks([], minor=True)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", "−") if abs(value) > 1e-9 else "0")
    panel.set_ylim(min(1.3 * low, low - 0.15), max(1.3 * high, high + 0.15))
