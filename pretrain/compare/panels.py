"""Several comparable runs in one picture: losses, what each differs by from the baseline, frozen updates, speed and memory.

A few runs share one column of panels, a colour each. More than there are colours are told apart by what they are: a column for
each kind of weights, a colour for each precision, a line style for each variant of it (its scope, say).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.units import count, memory
from pretrain.compare.drawing import (
    COLOURS,
    GREY,
    draw_smoothed,
    moving_mean,
    new_figure,
    plain_style,
    save,
    scale_after_the_fall,
    title,
    window_of,
)
from pretrain.compare.fairness import Paired, difference, late
from pretrain.compare.variants import Variants
from pretrain.metrics.run_record import RunRecord
from pretrain.precision.registry import PRECISIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

STYLES = ("-", "--", ":", "-.")
LABEL_GAP = 0.042  # of a panel's height, between two labels at its right edge
BAR_INCHES = 0.2


@dataclass(frozen=True)
class Line:
    """A run, and how it is drawn wherever it appears."""

    run: RunRecord
    label: str
    colour: str
    style: str = "-"


def plot_comparison(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw the runs into a PNG at `path`, replaced whole; differences are to the first. InputError where it cannot be written."""
    columns = arrange(runs)
    lines = [line for column in columns.values() for line in column]
    curves, bars = [3.6, 3.6, 1.2], 0.5 + BAR_INCHES * len(lines)
    margin = 0.065 * max(len(line.label) + 8 for line in lines)  # inches, for the names at the right of each column
    figure = new_figure(max(9.0, (3.6 + margin) * len(columns)), 1.6 + sum(curves) + bars)
    above, below = figure.subfigures(2, 1, height_ratios=[1.4 + sum(curves), bars], hspace=0)
    panels = above.subplots(3, len(columns), sharex=True, sharey="row", height_ratios=curves, squeeze=False)
    differences = {line.run.path: difference(runs[0], line.run) for line in lines}
    for index, (name, column) in enumerate(columns.items()):
        for panel in panels[:, index]:
            plain_style(panel)
        _draw_losses(panels[0, index], column, runs[0], legend=len(columns) == 1)
        _draw_differences(panels[1, index], column, runs[0], differences)
        _draw_frozen(panels[2, index], column)
        panels[2, index].set_xlabel("step")
        heading = f"{len(runs)} runs over the same data in the same order" if len(columns) == 1 else f"weights {name}"
        title(panels[0, index], heading, _subtitle(runs[0], column))
    scale_after_the_fall(panels[0, 0], [run.curve("loss")[1] for run in runs], [run.held_out_curve()[1] for run in runs])
    _scale_differences(panels[1], [values for _, values in differences.values()])
    for index, column in enumerate(columns.values()):  # only now that the scale is known
        _label_differences(panels[1, index], column, runs[0], differences)
    panels[0, 0].set_ylabel("loss, nats per token")
    panels[1, 0].set_ylabel(f"loss minus that of\n{runs[0].name}")
    panels[2, 0].set_ylabel("frozen\nupdates")
    above.align_ylabels(panels[:, 0])
    _draw_bars(below, lines)
    save(figure, path)


def _subtitle(baseline: RunRecord, column: Sequence[Line]) -> str:
    tokens = f"{count(baseline.summary['tokens'])} tokens, {count(baseline.tokens_per_step)} a step"
    return tokens if _holds(column, baseline) else f"{tokens}; grey: {baseline.name}"


def _holds(column: Sequence[Line], run: RunRecord) -> bool:
    return any(line.run.path == run.path for line in column)


def arrange(runs: Sequence[RunRecord]) -> dict[str, list[Line]]:
    """The picture's columns by name, each with its lines."""
    if len(runs) <= len(COLOURS):
        return {"": [Line(run, run.name, colour) for run, colour in zip(runs, COLOURS, strict=False)]}
    variants = Variants(runs)
    precisions = sorted({run.precision or "" for run in runs}, key=[*PRECISIONS].index if _all_known(runs) else None)
    columns: dict[str, list[Line]] = {}
    for run in runs:
        variant = variants.name(run)
        colour = COLOURS[precisions.index(run.precision or "") % len(COLOURS)]
        style = STYLES[(variants.found.index(variant) if variants.is_quantized(run) else 0) % len(STYLES)]
        label = " ".join(filter(None, [run.precision, variants.values(run)])) or run.name
        columns.setdefault(str(run.config.get("weights")), []).append(Line(run, label, colour, style))
    return columns


def _all_known(runs: Sequence[RunRecord]) -> bool:
    return all(run.precision in PRECISIONS for run in runs)


def _draw_losses(panel: Axes, column: Sequence[Line], baseline: RunRecord, *, legend: bool) -> None:
    for line in column:
        evaluated, held_out = line.run.held_out_curve()
        # Runs over the same data have the same noise; drawn several times over, it would hide the lines that it is about.
        label = line.label + (f", held-out loss {held_out[-1]:.4f}" if len(held_out) else "")
        draw_smoothed(panel, *line.run.curve("loss"), color=line.colour, linestyle=line.style, label=label, linewidth=1.4)
        style = {"markersize": 4, "markerfacecolor": "white", "markeredgecolor": line.colour, "zorder": 3}
        panel.plot(evaluated, held_out, "o", **style)
    if not _holds(column, baseline):
        draw_smoothed(panel, *baseline.curve("loss"), color=GREY, linewidth=0.9)
    if legend:
        panel.legend(frameon=False, loc="best", fontsize="small")


def _draw_differences(panel: Axes, column: Sequence[Line], baseline: RunRecord, differences: dict[Path, Any]) -> None:
    """The moving mean of each, in a band of the sd of single steps around it."""
    panel.axhline(0, color=GREY, linewidth=0.8)
    for line in column:
        if line.run.path == baseline.path:
            continue
        steps, values = differences[line.run.path]
        window = window_of(len(steps))
        mean = moving_mean(values, window)
        wide = max(window, 10)  # a spread takes a few values to tell
        spread = np.sqrt(np.maximum(moving_mean(values**2, wide) - moving_mean(values, wide) ** 2, 0.0))
        panel.fill_between(steps, mean - spread, mean + spread, color=line.colour, alpha=0.13, linewidth=0)
        panel.plot(steps, mean, color=line.colour, linestyle=line.style, linewidth=1.4)


def _scale_differences(panels: Sequence[Axes], differences: Sequence[np.ndarray]) -> None:
    """One scale for all columns; linear around zero only where some runs are off by tens of times what others are."""
    ends = [late(values) for values in differences if len(values) > 1 and np.any(values)]
    if not ends:
        return
    means, noise = np.abs([end.mean() for end in ends]), min(end.std() for end in ends)
    lowest, highest = np.quantile(np.concatenate([values[len(values) // 10 :] for values in differences]), [0.005, 0.995])
    if means.max() > 20 * means.min() and noise > 0:
        threshold = 10.0 ** np.ceil(np.log10(noise))  # what is noise in the quietest run is drawn as it is
        panels[0].set_yscale("symlog", linthresh=threshold)
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
        panels[0].set_ylim(min(1.3 * lowest, -threshold), max(1.3 * highest, threshold))
    else:
        margin = 0.08 * (max(highest, 0) - min(lowest, 0)) or 0.01
        panels[0].set_ylim(min(lowest, 0) - margin, max(highest, 0) + margin)


def _label_differences(panel: Axes, column: Sequence[Line], baseline: RunRecord, differences: dict[Path, Any]) -> None:
    """Each line's name and late mean at its right end, pushed apart where lines end close to each other."""
    to_axes = (panel.transScale + panel.transLimits).transform
    ends = []
    for line in column:
        steps, values = differences[line.run.path]
        if not len(steps):
            continue
        mean = 0.0 if line.run.path == baseline.path else Paired.of(late(values)).mean
        text = f"{line.label}, baseline" if line.run.path == baseline.path else f"{line.label} {mean:+.4f}"
        ends.append((float(np.clip(to_axes((steps[-1], mean))[1], 0.0, 1.0)), text, line.colour))
    ends.sort(key=lambda end: end[0])
    for height, (_, text, colour) in zip(_apart([end[0] for end in ends]), ends, strict=True):
        panel.text(1.01, height, text, transform=panel.transAxes, color=colour, fontsize="x-small", va="center")


def _apart(heights: Sequence[float]) -> list[float]:
    """Ascending `heights` with LABEL_GAP between them at least, moved upwards first, then down again from the top."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + LABEL_GAP) if moved else height)
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - LABEL_GAP
    return moved


def _draw_frozen(panel: Axes, column: Sequence[Line]) -> None:
    for line in column:
        draw_smoothed(panel, *line.run.curve("frozen_updates"), color=line.colour, linestyle=line.style, linewidth=1.2)
    panel.set_yscale("symlog", linthresh=1e-5)
    panel.set_ylim(0, 1.3)
    panel.set_yticks([0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1], ["0", "", "0.01 %", "", "1 %", "", "100 %"], fontsize="x-small")


def _draw_bars(figure: SubFigure, lines: Sequence[Line]) -> None:
    """Speed and memory. A speed that is not the hardware's is hollow and says so; one that was shared is not shown."""
    places = np.arange(len(lines))[::-1]
    any_speed = not all(line.run.side_by_side for line in lines)
    keys = ["tokens_per_second", "memory_gib"] if any_speed else ["memory_gib"]
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for panel, key in zip(panels, keys, strict=True):
        figures = [line.run.summary.get(key, np.nan) for line in lines]
        speeds = key == "tokens_per_second"
        for place, line, figure in zip(places, lines, figures, strict=True):
            hidden, hollow = speeds and line.run.side_by_side, speeds and line.run.emulated
            if hidden or not np.isfinite(figure):
                panel.text(0, place, " shared its machine" if hidden else " –", va="center", fontsize="x-small", color=GREY)
                continue
            panel.barh(place, figure, height=0.7, color="white" if hollow else line.colour, edgecolor=line.colour, alpha=0.85)
            text = (count(figure) if speeds else memory(figure)) + (", emulated" if hollow else "")
            panel.text(figure, place, f" {text}", va="center", fontsize="x-small")
        panel.spines[["top", "right", "bottom"]].set_visible(False)
        panel.set_xticks([])
        panel.set_title("tokens/s, median" if speeds else "memory, peak of a device", loc="left", fontsize="small")
        panel.margins(x=0.2)
    panels[0].set_yticks(places, [line.run.name for line in lines], fontsize="x-small")
