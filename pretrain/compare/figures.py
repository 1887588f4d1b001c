"""Runs as pictures: the loss of one run, or several comparable runs and what each differs by from the baseline.

A run's colour is its precision's, as in every picture. A few runs share one column of panels and differ in their lines too; more
get a column for each kind of weights, and a line style for each variant of a precision (its scope, say).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.files import WRITTEN_BY, save_file
from foundation.units import count, memory
from pretrain.compare.appearance import DASHES, colour_of, looks_of
from pretrain.compare.comparison import signed
from pretrain.compare.fairness import Gap, Variants, at_the_end, last_steps, loss_differences, why_no_end, why_not_paired
from pretrain.compare.smoothing import moving_mean, window_of
from pretrain.metrics.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

GREY = "#666666"
FALL_SHARE = 1 / 30  # of a run's steps, the first, whose steep fall does not set the scale
MOST_IN_A_COLUMN = 7  # runs, beyond which kinds of weights stand side by side
MOST_BANDS = 3  # in a panel; more cover each other
FROZEN_MATTERS = 1e-3  # a share of frozen updates below which there is nothing to see
LABEL_GAP = 0.042  # of a panel's height, between two labels at its right edge
BAR_INCHES = 0.2


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # half a second, which only drawing should cost; and no pyplot: no display, no state

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the PNG at `path`, and its folder; InputError where it cannot be written."""
    save_file(path, _png(figure), asked_for=True)


def _png(figure: Figure) -> bytes:
    """The PNG. `$` in a name begins no formula, and a character that the font lacks is drawn as a box."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if "$" in text.get_text():  # until it is drawn no number on an axis has one
            text.set_parse_math(False)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(picture, format="png", metadata={"Software": WRITTEN_BY})
    return picture.getvalue()


def style_panel(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(x=0.01)


def title(panel: Axes, text: str, subtitle: str) -> None:
    panel.set_title(f"{text}\n", loc="left", weight="bold")
    panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize="small", color=GREY)


def draw_smoothed(panel: Axes, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    panel.plot(steps, moving_mean(values, window_of(len(steps))), **style)


def draw_held_out(panel: Axes, run: RunRecord, colour: str, **style: Any) -> None:
    panel.plot(*run.held_out_curve(), "o", markersize=4, markerfacecolor="white", markeredgecolor=colour, zorder=3, **style)


def scale_after_the_fall(panel: Axes, curves: list[np.ndarray], others: list[np.ndarray]) -> None:
    """Fit the axis to the curves after their first fall, which would flatten all the rest, and to all of the `others`."""
    values = np.concatenate([*(curve[int(len(curve) * FALL_SHARE) :] for curve in curves), *others])
    values = values[np.isfinite(values)]
    if len(values):
        lowest, highest = np.quantile(values, [0.0, 0.995])
        margin = 0.06 * (highest - lowest) or 0.1
        panel.set_ylim(lowest - margin, highest + margin)


def plot_losses(runs: Sequence[RunRecord], path: Path, *, asked_for: bool = False) -> None:
    """Draw a run, or the comparison of several comparable ones with the first, into a PNG at `path`. `asked_for` and InputError
    as `save_file`."""
    save_file(path, picture_of_losses(runs), asked_for=asked_for)


def picture_of_losses(runs: Sequence[RunRecord]) -> bytes:
    """Returns the PNG that `plot_losses` writes, for who writes it together with other files."""
    return _png(_figure_of_one(runs[0]) if len(runs) == 1 else _figure_of_several(runs))


def _figure_of_one(run: RunRecord) -> Figure:
    figure, colour = new_figure(9, 6.5), colour_of(run.precision)
    panel, norms, rates = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1.1, 0.8])
    for each in (panel, norms, rates):
        style_panel(each)
    (steps, losses), (_, held_out) = run.curve("loss"), run.held_out_curve()
    if (window := window_of(len(steps))) > 1:
        panel.plot(steps, losses, color=colour, alpha=0.22, linewidth=0.6)
    label = f"training loss, mean of {window} steps" if window > 1 else "training loss"
    draw_smoothed(panel, steps, losses, color=colour, linewidth=1.6, label=label)
    if len(held_out):
        when = run.when_evaluated or (f" (step {run.summary['steps']:,})" if run.broken_off else " at the end")
        draw_held_out(panel, run, colour, label=f"held-out loss {held_out[-1]:.4f}{when}")
    scale_after_the_fall(panel, [losses], [held_out])
    precision = f"{run.precision}, weights {run.config.get('weights')}" + (" (emulated)" if run.emulated else "")
    tokens = f"{count(run.summary['tokens'])} tokens, {count(run.tokens_per_step)} a step"
    title(panel, " ".join(filter(None, [run.name, run.broke_off])), f"{model_name(run)} · {precision} · {tokens}")
    panel.legend(frameon=False, loc="upper right")
    panel.set_ylabel("loss, nats per token")
    norm_steps, gradient_norms = run.curve("gradient_norm")
    if np.any(gradient_norms > 0):
        draw_smoothed(norms, norm_steps, gradient_norms, color=colour, linewidth=1.2)
        norms.set_yscale("log")
        for set_formatter in (norms.yaxis.set_major_formatter, norms.yaxis.set_minor_formatter):
            set_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "125" else "")
        norms.tick_params(axis="y", which="both", labelsize="small")
    norms.set_ylabel("gradient\nnorm")
    rates.plot(*run.curve("learning_rate"), color=colour, linewidth=1.2)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rates.set_ylim(bottom=0)
    rates.set_ylabel("learning\nrate")
    rates.set_xlabel("step")
    _tokens_along(rates, run)
    figure.align_ylabels([panel, norms, rates])
    return figure


def model_name(run: RunRecord) -> str:
    """The hub's name of what was trained, or a folder's last one (a run's, where it is its `final`), or its architecture."""
    model = run.config.get("model") or {}
    if not model.get("source"):
        return str((model.get("config") or {}).get("model_type", "model"))
    source = Path(str(model["source"]))
    local = source.is_absolute() or len(source.parts) > 2 or source.exists()
    return (source.parent.name if source.name == "final" else source.name) if local else str(source)


def _tokens_along(panel: Axes, run: RunRecord) -> None:
    """Tokens under the steps: a second scale below the panel, where every step has as many."""
    per_step = run.summary["tokens"] / run.summary["steps"]
    if per_step > 0:
        tokens = panel.secondary_xaxis(-0.72, functions=(lambda steps: steps * per_step, lambda tokens: tokens / per_step))
        tokens.xaxis.set_major_formatter(lambda value, _: count(value) if value > 0 else "0")
        tokens.set_xlabel("tokens")


@dataclass(frozen=True)
class DrawnRun:
    run: RunRecord
    label: str
    colour: str
    style: str
    is_baseline: bool
    steps: np.ndarray  # that it has in common with the baseline
    differences: np.ndarray  # its losses minus the baseline's in these steps
    gap: Gap | None  # of their ends; None of the baseline, and where there is none

    @property
    def ends(self) -> str:
        """What stands at the right end of its difference: its name, and where it ends or that it came to no end."""
        if self.run.broken_off:
            return f"{self.label} {self.run.broke_off}"
        if self.is_baseline:
            return f"{self.label}, baseline"
        return f"{self.label} {signed(self.gap.mean)}" if self.gap else self.label


NO_DIFFERENCES = (np.array([], dtype=np.int64), np.array([]))


def _figure_of_several(runs: Sequence[RunRecord]) -> Figure:
    baseline, columns = runs[0], _arrange(runs)
    lines = [line for column in columns.values() for line in column]
    freezes = any(np.any(line.run.curve("frozen_updates")[1] >= FROZEN_MATTERS) for line in lines)
    rows, bars = [3.6, 3.6] + [1.2] * freezes, 0.5 + BAR_INCHES * len(lines)  # inches high
    margin = 0.065 * max(len(line.ends) for line in lines)  # inches, for the names at the right of each column
    figure = new_figure(max(9.0, (3.6 + margin) * len(columns)), 1.6 + sum(rows) + bars)
    above, below = figure.subfigures(2, 1, height_ratios=[1.4 + sum(rows), bars], hspace=0)
    panels = above.subplots(len(rows), len(columns), sharex=True, sharey="row", height_ratios=rows, squeeze=False)
    for panel in panels.flat:
        style_panel(panel)
    for panel, (name, column) in zip(panels[0], columns.items(), strict=True):
        _draw_losses(panel, column, legend=len(columns) == 1)
        _title_losses(panel, f"weights {name}" if name else f"{len(runs)} runs", column, baseline)
    scale_after_the_fall(panels[0, 0], [run.curve("loss")[1] for run in runs], [run.held_out_curve()[1] for run in runs])
    panels[0, 0].set_ylabel("loss, nats per token")
    for panel, column in zip(panels[1], columns.values(), strict=True):
        _draw_differences(panel, column)
    threshold = _scale_differences(panels[1, 0], lines)
    for panel, column in zip(panels[1], columns.values(), strict=True):  # only now that the scale is known
        _label_differences(panel, column)
        _explain_differences(panel, column, threshold)
    panels[1, 0].set_ylabel(f"loss minus that of\n{baseline.name}")
    if freezes:
        for panel, column in zip(panels[2], columns.values(), strict=True):
            _draw_frozen(panel, column)
        panels[2, 0].set_ylabel("frozen\nupdates")
    for panel in panels[-1]:
        panel.set_xlabel("step")
    above.align_ylabels(panels[:, 0])
    _draw_bars(below, lines)
    return figure


def _arrange(runs: Sequence[RunRecord]) -> dict[str, list[DrawnRun]]:
    """The picture's columns by the weights of their runs, or one column without a name."""
    variants, in_columns, looks = Variants(runs), len(runs) > MOST_IN_A_COLUMN, looks_of(runs)
    columns: dict[str, list[DrawnRun]] = {}
    for run, look in zip(runs, looks, strict=True):
        label, style, column = look.label, look.line, ""
        if in_columns:
            label = " ".join(filter(None, [run.precision, variants.name(run, keys=False)])) or run.name
            variant = variants.names.index(variants.name(run)) if variants.is_quantized(run) else 0
            style, column = DASHES[variant % len(DASHES)][1], str(run.config.get("weights"))
        paired = loss_differences(runs[0], run) if run is runs[0] or not why_not_paired(runs[0], run) else NO_DIFFERENCES
        has_end = run is not runs[0] and len(paired[1]) and not why_no_end(runs[0], run)
        gap = Gap.of(paired[1]) if has_end else None
        columns.setdefault(column, []).append(DrawnRun(run, label, look.colour, style, run is runs[0], *paired, gap))
    return columns


def _draw_losses(panel: Axes, column: Sequence[DrawnRun], *, legend: bool) -> None:
    """Means alone: runs over the same data have the same noise, which would hide the lines if it were drawn for each of them."""
    for line in column:
        held_out = line.run.held_out_curve()[1]
        label = " ".join(filter(None, [line.label, line.run.broke_off]))
        label += f", held-out loss {held_out[-1]:.4f}{line.run.when_evaluated}" if len(held_out) else ""
        draw_smoothed(panel, *line.run.curve("loss"), color=line.colour, linestyle=line.style, label=label, linewidth=1.4)
        draw_held_out(panel, line.run, line.colour)
    if legend:
        panel.legend(frameon=False, loc="best", fontsize="small")


def _title_losses(panel: Axes, text: str, column: Sequence[DrawnRun], baseline: RunRecord) -> None:
    """The column's title; where the baseline stands in another column, its curve in grey."""
    subtitle = f"{count(baseline.summary['tokens'])} tokens, {count(baseline.tokens_per_step)} a step"
    if any(len(line.run.held_out_curve()[0]) for line in column):
        subtitle += "; circles: held-out"
    if not any(line.is_baseline for line in column):
        draw_smoothed(panel, *baseline.curve("loss"), color=GREY, linewidth=0.9)
        subtitle += f"; grey: {baseline.name}"
    title(panel, text, subtitle)


def _draw_differences(panel: Axes, column: Sequence[DrawnRun]) -> None:
    """The moving mean of each and, of a few, a band of one standard deviation of single steps to either side."""
    panel.axhline(0, color=GREY, linewidth=0.8)
    for line in column:
        if line.is_baseline or not len(line.steps):
            continue
        steps, values = line.steps, line.differences
        window = window_of(len(steps))
        mean = moving_mean(values, window)
        wide = max(window, 11)  # a spread takes a few values to tell
        spread = np.sqrt(np.maximum(moving_mean(values**2, wide) - moving_mean(values, wide) ** 2, 0.0))
        if len(column) <= MOST_BANDS:
            panel.fill_between(steps, mean - spread, mean + spread, color=line.colour, alpha=0.13, linewidth=0)
        panel.plot(steps, mean, color=line.colour, linestyle=line.style, linewidth=1.4)


def _scale_differences(panel: Axes, lines: Sequence[DrawnRun]) -> float | None:
    """Linear, or logarithmic outside the noise around zero where some runs differ by tens of times what others do: from where.
    What was broken off sets no scale: its last losses may be a thousand times those of the others."""
    ended = [line for line in lines if line.gap and len(line.differences) > 1 and np.any(line.differences)]
    if not ended:
        panel.autoscale_view()  # now, as labels are placed by the scale
        return None
    means, noise = np.abs([line.gap.mean for line in ended]), min(at_the_end(line.differences).std() for line in ended)
    values = [line.differences[len(line.differences) // 10 :] for line in lines if line.gap or line.is_baseline]
    lowest, highest = np.quantile(np.concatenate(values), [0.005, 0.995])
    if means.max() > 20 * means.min() and noise > 0:
        threshold = 10.0 ** np.ceil(np.log10(noise))  # what is noise in the quietest run is drawn as it is
        panel.set_yscale("symlog", linthresh=threshold)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0")
        panel.set_ylim(min(1.3 * lowest, -threshold), max(1.3 * highest, threshold))
        return float(threshold)
    margin = 0.08 * (max(highest, 0) - min(lowest, 0)) or 0.01
    panel.set_ylim(min(lowest, 0) - margin, max(highest, 0) + margin)
    return None


def _label_differences(panel: Axes, column: Sequence[DrawnRun]) -> None:
    """Each line's name and its gap at its right end, moved apart where lines end close to each other."""
    to_axes = (panel.transScale + panel.transLimits).transform
    ends = []
    for line in column:
        if len(line.steps):
            drawn = at_the_end(line.differences).mean()  # of the baseline itself: zero
            ends.append((float(np.clip(to_axes((line.steps[-1], drawn))[1], 0.0, 1.0)), line.ends, line.colour))
    ends.sort(key=lambda end: end[0])
    places = LABEL_GAP * np.arange(len(ends))
    # Moved upwards where one is too close to that below it, then all that the top pushes down.
    heights = np.minimum(np.maximum.accumulate([end[0] for end in ends] - places), 1 - places[-1:]) + places
    for height, (_, text, colour) in zip(heights, ends, strict=True):
        panel.text(1.01, height, text, transform=panel.transAxes, color=colour, fontsize="x-small", va="center")


def _explain_differences(panel: Axes, column: Sequence[DrawnRun], threshold: float | None) -> None:
    banded = any(not line.is_baseline for line in column) and len(column) <= MOST_BANDS
    gaps = [line.gap for line in column if line.gap]
    said = ["band: ± one sd of single steps"] * banded
    said += [] if threshold is None else [f"linear up to ±{threshold:g}, logarithmic beyond"]
    of_ends = f"at the right: mean of the {last_steps(gaps)}" if gaps else ""
    text = "\n".join(filter(None, [of_ends, "; ".join(said)]))
    panel.text(0, 1.01, text, transform=panel.transAxes, fontsize="x-small", color=GREY)


def _draw_frozen(panel: Axes, column: Sequence[DrawnRun]) -> None:
    """The share of updates that left their stored weight as it was."""
    for line in column:
        draw_smoothed(panel, *line.run.curve("frozen_updates"), color=line.colour, linestyle=line.style, linewidth=1.2)
    panel.set_yscale("symlog", linthresh=1e-5)
    panel.set_ylim(0, 1.3)
    panel.set_yticks([0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1], ["0", "", "0.01 %", "", "1 %", "", "100 %"], fontsize="x-small")


def _draw_bars(figure: SubFigure, lines: Sequence[DrawnRun]) -> None:
    """Speed and memory. The bar of an emulated speed is hollow; a run that shared its machine has none."""
    places = np.arange(len(lines))[::-1]
    any_speed = not all(line.run.side_by_side for line in lines)
    keys = ["tokens_per_second", "memory_gib"] if any_speed else ["memory_gib"]
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for panel, key in zip(panels, keys, strict=True):
        values = [line.run.summary.get(key, np.nan) for line in lines]
        speeds = key == "tokens_per_second"
        for place, line, value in zip(places, lines, values, strict=True):
            hidden, hollow = speeds and line.run.side_by_side, speeds and line.run.emulated
            if hidden or not np.isfinite(value):
                panel.text(0, place, " shared its machine" if hidden else " –", va="center", fontsize="x-small", color=GREY)
                continue
            panel.barh(place, value, height=0.7, color="white" if hollow else line.colour, edgecolor=line.colour, alpha=0.85)
            text = (count(value) if speeds else memory(value)) + (", emulated" if hollow else "")
            panel.text(value, place, f" {text}", va="center", fontsize="x-small")
        panel.spines[["top", "right", "bottom"]].set_visible(False)
        panel.set_xticks([])
        panel.set_title("tokens/s, median" if speeds else "memory, peak of a device", loc="left", fontsize="small")
        panel.margins(x=0.2)
    panels[0].set_yticks(places, [line.run.name for line in lines], fontsize="x-small")
