"""Runs as PNGs: the loss of one run, several comparable runs and what each differs by from the baseline, differences over seeds.

A run's colour is its precision's, as in every picture.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.files import WRITTEN_BY, save_file
from foundation.units import count
from pretrain.compare.appearance import colour_of
from pretrain.compare.columns import GAP_DIGITS, signed
from pretrain.compare.comparison import RunComparison, Standing, moving_mean, window_of
from pretrain.compare.fairness import last_steps
from pretrain.compare.seed_groups import SeedComparison
from pretrain.compare.seeds import CONFIDENCE
from pretrain.metrics.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#666666"
FALL_SHARE = 1 / 30  # of a run's steps, the first, whose steep fall does not set the scale
ROW_INCHES = 0.36  # of a group of seeds
LEGEND_INCHES = 0.2  # of a run in the legend beside the curves


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # half a second, which only drawing should cost; and no pyplot: no display, no state

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the PNG at `path`, and its folder; InputError where it cannot be written."""
    save_file(path, _png(figure))


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


def range_after_the_fall(curves: Sequence[np.ndarray], others: Sequence[np.ndarray] = ()) -> tuple[float, float] | None:
    """The range of the curves after their first fall, which would flatten all the rest, and of all of the `others`."""
    values = np.concatenate([*(curve[int(len(curve) * FALL_SHARE) :] for curve in curves), *others])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    lowest, highest = np.quantile(values, [0.0, 0.995])
    margin = 0.06 * (highest - lowest) or 0.1
    return float(lowest - margin), float(highest + margin)


def plot_losses(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw a run, or the comparison of several comparable ones with the first, into a PNG at `path`."""
    save_file(path, picture_of_losses(runs))


def picture_of_losses(runs: Sequence[RunRecord]) -> bytes:
    """The PNG that `plot_losses` writes, for who writes it together with other files."""
    return _png(_figure_of_one(runs[0]) if len(runs) == 1 else _figure_of_several(RunComparison.over(runs)))


def _figure_of_one(run: RunRecord) -> Figure:
    figure, colour = new_figure(9, 6.5), colour_of(run.precision)
    panel, norms, rates = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1.1, 0.8])
    for each in (panel, norms, rates):
        style_panel(each)
    (steps, losses), (_, held_out) = run.curve("loss"), run.held_out_curve()
    window = window_of(len(steps))
    if window > 1:
        panel.plot(steps, losses, color=colour, alpha=0.22, linewidth=0.6)
    label = f"training loss, mean of {window} steps" if window > 1 else "training loss"
    draw_smoothed(panel, steps, losses, color=colour, linewidth=1.6, label=label)
    if len(held_out):
        draw_held_out(panel, run, colour, label=f"held-out loss {held_out[-1]:.4f}{run.when_evaluated}")
    panel.set_ylim(range_after_the_fall([losses], [held_out]))
    precision = f"{run.precision}, weights {run.config.get('weights')}" + (" (emulated)" if run.emulated else "")
    tokens = f"{count(run.summary['tokens'])} tokens, {count(run.tokens_per_step)} a step"
    title(panel, f"{run.name} {run.broke_off}".strip(), f"{model_name(run)} · {precision} · {tokens}")
    panel.legend(frameon=False, loc="upper right")
    panel.set_ylabel("loss, nats per token")
    norm_steps, gradient_norms = run.curve("gradient_norm")
    if np.any(gradient_norms > 0):
        draw_smoothed(norms, norm_steps, gradient_norms, color=colour, linewidth=1.2)
        norms.set_yscale("log")
    norms.set_ylabel("gradient\nnorm")
    rates.plot(*run.curve("learning_rate"), color=colour, linewidth=1.2)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rates.set_ylim(bottom=0)
    rates.set_ylabel("learning\nrate")
    rates.set_xlabel("step")
    figure.align_ylabels([panel, norms, rates])
    return figure


def model_name(run: RunRecord) -> str:
    """The last name of what was trained on (a run's, where it is its `final`), or an architecture."""
    model = run.config.get("model") or {}
    source = Path(str(model.get("source") or (model.get("config") or {}).get("model_type", "model")))
    return source.parent.name if source.name == "final" else source.name


def _figure_of_several(comparison: RunComparison) -> Figure:
    """The losses' moving means, and below them each run's loss minus the baseline's, which a band of one standard deviation of
    single steps would hide where there are more than a few."""
    base, standings = comparison.baseline, comparison.standings
    figure = new_figure(11, max(7.5, 3 + LEGEND_INCHES * len(standings)))
    losses, minus = figure.subplots(2, 1, sharex=True)
    for panel in (losses, minus):
        style_panel(panel)
    for each in standings:
        style = {"color": each.look.colour, "linestyle": each.look.line, "linewidth": 1.4}
        draw_smoothed(losses, *each.run.curve("loss"), **style)
        draw_held_out(losses, each.run, each.look.colour)
        steps, differences = each.differences or (np.array([]), np.array([]))
        draw_smoothed(minus, steps, differences, label=label_of_end(each), **style)
    curves = [(run.curve("loss")[1], run.held_out_curve()[1]) for run in comparison.runs]
    losses.set_ylim(range_after_the_fall(*zip(*curves, strict=True)))
    ended = [moving_mean(each.differences[1], window_of(len(each.differences[1]))) for each in comparison.paired]
    if limits := range_after_the_fall(ended, [np.zeros(1)]) if ended else None:  # what was broken off sets no scale
        minus.set_ylim(limits)
    run = base.run
    title(
        losses,
        f"{len(standings)} runs",
        f"{count(run.summary['tokens'])} tokens, {count(run.tokens_per_step)} a step; circles: held-out",
    )
    ends = f"; at the names: mean of the {last_steps(each.gap for each in comparison.paired)}" if comparison.paired else ""
    minus.text(0, 1.02, f"paired by step{ends}", transform=minus.transAxes, fontsize="small", color=GREY)
    losses.set_ylabel("loss, nats per token")
    minus.set_ylabel(f"loss minus that of\n{base.look.label}")
    minus.set_xlabel("step")
    figure.legend(loc="outside right center", frameon=False, fontsize="x-small")
    figure.align_ylabels([losses, minus])
    return figure


def label_of_end(each: Standing) -> str:
    """A run's name, and where it ends: "delayed +0.00420", "nvfp4 was halted at step 3"."""
    end = signed(each.gap.mean, GAP_DIGITS) if each.gap else f"({each.verdict})"
    return f"{each.look.label} {each.run.broke_off or end}"


def plot_seeds(seeds: SeedComparison, path: Path) -> None:
    """Draw the groups into a PNG at `path`, in per cent of the baseline's loss: a row a group, its single seeds, their mean with
    its interval, and the margin. InputError as `save`."""
    results = [each for each in seeds.results if each.difference]
    figure = new_figure(9, 1.6 + ROW_INCHES * max(len(results), 2))
    panel = figure.subplots()
    style_panel(panel)
    panel.grid(visible=False, axis="y")
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    panel.axvspan(-100 * seeds.margin, 100 * seeds.margin, color="#EEEEEE", zorder=0)
    panel.axvline(0, color=GREY, linewidth=0.8)
    for place, each in enumerate(results):
        difference, run = each.difference, next(iter(each.group.runs.values()))
        per_cent, colour, half = 100 / difference.baseline, colour_of(run.precision), difference.half_width()
        values = [value * per_cent for value in difference.by_seed.values()]
        panel.plot(values, [place] * len(values), "|", color=colour, markersize=9, alpha=0.6)
        spread, fill = None if half is None else half * per_cent, "white" if run.emulated else colour
        style = {"fmt": "o", "color": colour, "markerfacecolor": fill, "capsize": 3}
        panel.errorbar(difference.mean * per_cent, place, xerr=spread, **style)
    panel.set_yticks(range(len(results)), [each.group.name for each in results])
    panel.set_ylim(max(len(results), 2) - 0.5, -0.5)
    panel.margins(x=0.08)
    panel.set_xlabel(f"loss minus that of {seeds.baseline.group.name}, % of it")
    marks = f"ticks: single seeds; bars: {100 * CONFIDENCE:.0f} % interval over seeds; grey: ± {100 * seeds.margin:g} %"
    title(panel, f"{len(seeds.baseline.losses)} seeds", f"{marks}; hollow: emulated")
    save(figure, path)
