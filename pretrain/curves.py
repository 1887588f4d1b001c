"""Loss curves as a picture: every step faint, its moving mean on top, held-out points, and the learning rate below."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packing.durable import replace_file
from pretrain.metrics.units import count
from pretrain.run_files import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which readers of every kind of sight tell apart; their yellow is too light for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
SMOOTHED_SHARE = 1 / 50  # of a run's steps in each mean
FALL_SHARE = 1 / 30  # of a run's steps, the first, whose steep fall does not set the scale


def plot_losses(runs: Sequence[Run], path: Path) -> None:
    """Draw the runs' losses into a PNG at `path`, replaced whole.

    Several runs get a panel with the paired difference of each to the first. That is for comparable runs only, which
    `pretrain.report` sees to.
    """
    from matplotlib.figure import Figure  # half a second, which only drawing should cost; and no pyplot: no display, no state

    alone = len(runs) == 1
    heights = [4, 0.9] if alone else [4, 1.3, 0.9]
    figure = Figure(figsize=(9, 1.6 + sum(heights)), dpi=150, layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for panel in panels:
        _plain_style(panel)
    for index, run in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        _draw_loss(panels[0], run, colour, alone=alone)
        _draw_learning_rate(panels[-1], run, colour)
        if index > 0:
            _draw_difference(panels[1], runs[0], run, colour)
    _scale_to_what_matters(panels[0], runs)
    panels[-1].set_ylim(bottom=0)  # after the last run: a limit set by hand would no longer grow for a higher rate
    _label(panels, runs)
    figure.align_ylabels(panels)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, picture.getvalue())


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite `values` in the `window` around each, at the ends in what there is of it; NaN where none is finite."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    here = np.arange(len(values))
    begin = np.maximum(here - (window - 1) // 2, 0)
    end = np.minimum(here + window // 2 + 1, len(values))
    total = counts[end] - counts[begin]
    return np.where(total > 0, (sums[end] - sums[begin]) / np.maximum(total, 1), np.nan)


def difference(first: Run, second: Run) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, second's loss minus first's float64) over the steps where both are finite numbers."""
    (ours, our_losses), (theirs, their_losses) = first.curve("loss"), second.curve("loss")
    steps, here, there = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    differences = their_losses[there] - our_losses[here]
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


def _draw_loss(panel: Axes, run: Run, colour: str, *, alone: bool) -> None:
    evaluated, held_out = run.held_out_curve()
    last = f", held-out loss {held_out[-1]:.4f}" if len(held_out) else ""
    steps, losses = run.curve("loss")
    window = _window(len(steps))
    training = f"training loss, mean of {window} steps" if window > 1 else "training loss"
    # Runs over the same data have the same noise; drawn several times over, it would hide the lines that it is about.
    _draw_smoothed(panel, steps, losses, colour, label=training if alone else run.name + last, every_step=alone)
    if len(evaluated):
        edge, label = (COLOURS[1], last.removeprefix(", ") + " at the end") if alone else (colour, None)
        panel.plot(evaluated, held_out, "o", label=label, markersize=4.5, markerfacecolor="white", markeredgecolor=edge, zorder=3)


def _draw_difference(panel: Axes, first: Run, run: Run, colour: str) -> None:
    _draw_smoothed(panel, *difference(first, run), colour)
    panel.axhline(0, color=GREY, linewidth=0.8)


def _draw_smoothed(
    panel: Axes, steps: np.ndarray, values: np.ndarray, colour: str, *, label: str | None = None, every_step: bool = True
) -> None:
    window = _window(len(steps))
    if window > 1 and every_step:
        panel.plot(steps, values, color=colour, alpha=0.22, linewidth=0.6)
    panel.plot(steps, moving_mean(values, window), color=colour, linewidth=1.6, label=label)


def _draw_learning_rate(panel: Axes, run: Run, colour: str) -> None:
    panel.plot(*run.curve("learning_rate"), color=colour, linewidth=1.2)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)


def _scale_to_what_matters(panel: Axes, runs: Sequence[Run]) -> None:
    """End the axis where the loss is after its first fall; a scale that began at ln(vocabulary) would flatten all the rest."""
    fallen = [losses[int(len(losses) * FALL_SHARE) :] for _, losses in (run.curve("loss") for run in runs)]
    held_out = [losses for _, losses in (run.held_out_curve() for run in runs)]
    values = np.concatenate([*fallen, *held_out])
    values = values[np.isfinite(values)]
    if len(values):
        lowest, highest = np.quantile(values, [0.0, 0.995])
        margin = 0.06 * (highest - lowest) or 0.1
        panel.set_ylim(lowest - margin, highest + margin)


def _label(panels: Sequence[Axes], runs: Sequence[Run]) -> None:
    first, model = runs[0], runs[0].config.get("model", {})
    steps = f"{count(first.summary['tokens'])} tokens, {count(first.tokens_per_step)} a step"
    if len(runs) == 1:
        title = str(first.config.get("name", first.name))
        name = model.get("source") or model.get("config", {}).get("model_type", "model")
        subtitle = f"{name} · {steps} · weights {first.config.get('weights')}"
    else:
        title, subtitle = f"{len(runs)} runs over the same data in the same order", steps
        panels[1].set_ylabel("loss minus\nthe first run's")
    panels[0].set_title(f"{title}\n", loc="left", weight="bold")
    panels[0].text(0, 1.02, subtitle, transform=panels[0].transAxes, fontsize="small", color=GREY)
    panels[0].legend(frameon=False, loc="upper right")
    panels[0].set_ylabel("loss, nats per token")
    panels[-1].set_ylabel("learning\nrate")
    panels[-1].set_xlabel("step")


def _plain_style(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(x=0.01)


def _window(steps: int) -> int:
    return max(1, round(steps * SMOOTHED_SHARE))
