"""The evidence as a picture: what each precision costs in loss against what it gains in speed, a row of panels a scale.

What has no speed on the machine stands apart at the left; what was emulated is hollow.
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

WIDTH = 8.0  # inches; at 800 pixels an inch has 100
ROW_INCHES = 3.1
BAND = "#E8E8E8"
NEAR = 0.1  # in speed over the baseline's, in which two names have no room beside each other
LINEAR = 1.0  # per cent of the baseline's loss, up to which the scale is linear


@dataclass(frozen=True)
class EvidencePoint:
    """A cell's mean difference and half of its interval, in per cent of the baseline's loss."""

    cell: str
    colour: str
    emulated: bool
    speedup: float | None  # None: emulated, or not measured
    mean: float
    half: float  # 0 without an interval


def draw(scales: Sequence[Scale], speeds: Speeds, picture: Path) -> None:
    """InputError where `picture` cannot be written."""
    found = [points(scale, speeds) for scale in scales]
    apart = list(dict.fromkeys(each.cell for drawn in found for each in drawn if each.speedup is None))
    figure = new_figure(WIDTH, ROW_INCHES * len(scales) + 0.9)
    widths = [max(len(apart), 1) * 0.55, 5.0]
    panels = figure.subplots(len(scales), 2, squeeze=False, width_ratios=widths, sharey=True, sharex="col")
    for (left, right), scale, drawn in zip(panels, scales, found, strict=True):
        draw_scale(left, right, scale, drawn, apart)
    reach(panels[0, 0], [end for drawn in found for each in drawn for end in (each.mean - each.half, each.mean + each.half)])
    left, right = panels[-1]
    labels = [label(cell, [each.cell for drawn in found for each in drawn]) for cell in apart]
    left.set_xticks(range(len(apart)), labels, rotation=40, ha="right", rotation_mode="anchor", fontsize="small")
    left.set_xlim(-0.7, max(len(apart), 1) - 0.3)
    left.set_xlabel("no speed\nhere")
    fastest = max((each.speedup for drawn in found for each in drawn if each.speedup), default=1.0)
    right.set_xlim(0.96, max(fastest, 1.05) + 0.08)  # for the name of the last
    right.set_xlabel(f"speed over BF16: {speeds.model} on an {speeds.device}")
    said = f"bars: {whole_percent(CONFIDENCE)} interval over seeds; grey: ± {100 * MARGIN:g} %, equivalent"
    floors = [floor_of(scale, drawn) for scale, drawn in zip(scales, found, strict=True)]
    said += f"; dotted: {BASELINE} repeated" if any(floor is not None for floor in floors) else ""
    said += "; hollow: emulated" if any(each.emulated for drawn in found for each in drawn) else ""
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
            drawn.append(EvidencePoint(cell, colour_of(record.precision), record.emulated, *figures))
    return drawn


def label(cell: str, drawn: Sequence[str]) -> str:
    """What a cell is called: a branch as its precision, where nothing else that is drawn is called so."""
    precision = cell.removesuffix(BRANCH)
    return cell if precision in drawn else precision


def floor_of(scale: Scale, drawn: Sequence[EvidencePoint]) -> float | None:
    """How far repeated baselines end apart, as those that are drawn were begun."""
    return scale.floor(BRANCH_REPEAT if all(each.cell.endswith(BRANCH) for each in drawn) else REPEAT)


def draw_scale(left: Axes, right: Axes, scale: Scale, drawn: Sequence[EvidencePoint], apart: Sequence[str]) -> None:
    """Both panels of a scale: what is emulated, and what has a speed."""
    margin = 100 * MARGIN
    level, floor = scale.mean(BASELINE, final_loss), floor_of(scale, drawn)
    for panel in (left, right):
        style_panel(panel)
        panel.axhspan(-margin, margin, color=BAND, zorder=0)
        panel.axhline(0, color=GREY, linewidth=0.8)
        for height in () if floor is None or not level else (-floor, floor):
            panel.axhline(100 * height / level, color=GREY, linewidth=0.9, linestyle=":")
    for each in drawn:
        panel, x = (left, apart.index(each.cell)) if each.speedup is None else (right, each.speedup)
        fill = "white" if each.emulated else each.colour
        bar = {"yerr": each.half} if each.half else {}
        panel.errorbar(x, each.mean, **bar, fmt="o", markersize=7, capsize=4, color=each.colour, markerfacecolor=fill)
    if apart and all(each.speedup for each in drawn):
        left.text(0.5, 0.5, "not trained", transform=left.transAxes, ha="center", va="center", fontsize="small", color=GREY)
    base = EvidencePoint(BASELINE, colour_of(BASELINE), False, 1.0, 0.0, 0.0)
    right.plot(base.speedup, base.mean, "o", markersize=7, color=base.colour)
    name(right, [base, *(each for each in drawn if each.speedup is not None)])
    left.set_ylabel(f"loss minus that of {BASELINE}, %")
    content, seeds = scale.content, len(scale.values(BASELINE, final_loss))
    fewer = "up to " if any(len(scale.difference(each.cell).by_seed) < seeds for each in drawn) else ""
    said = f"{count(content['parameters'])} parameters, {count(content['tokens'])} tokens, {fewer}{plural(seeds, 'seed')}"
    said += f", gone on from {BASELINE}" if drawn and all(each.cell.endswith(BRANCH) for each in drawn) else ""
    # Over both panels: a title of the left one would be given its width, and push the right one away.
    at = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    title = left.annotate(f"{content['scale']}: {said}", **at, fontsize="medium", weight="bold")
    title.set_in_layout(False)
    right.set_title(" ", fontsize="medium")  # its height


def name(panel: Axes, drawn: Sequence[EvidencePoint]) -> None:
    """Names over the bars, a line higher where the name before would be in the way."""
    cells = [each.cell for each in drawn]
    ordered = sorted(drawn, key=lambda each: each.speedup or 0.0)
    raised = False
    for before, each in zip([None, *ordered], ordered, strict=False):
        near = before is not None and each.speedup - before.speedup < NEAR
        top = max(point.mean + point.half for point in ((before, each) if near else (each,)))
        raised = near and not raised
        at = {"xy": (each.speedup, top), "xytext": (0, 17 if raised else 5), "textcoords": "offset points"}
        panel.annotate(label(each.cell, cells), **at, ha="center", va="bottom", fontsize="small")


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
