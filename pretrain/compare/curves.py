"""A run's loss as a picture: every step faint, its moving mean on top, held-out points, and the learning rate below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.units import count
from pretrain.compare.drawing import (
    COLOURS,
    draw_smoothed,
    new_figure,
    plain_style,
    save,
    scale_after_the_fall,
    title,
    window_of,
)
from pretrain.compare.panels import plot_comparison
from pretrain.metrics.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_losses(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw a run, or the comparison of several with the first, into a PNG at `path`, replaced whole.

    Several must be comparable runs, which `pretrain.compare.report` sees to. Raises InputError where the file cannot be written.
    """
    if len(runs) > 1:
        plot_comparison(runs, path)
    else:
        _plot_alone(runs[0], path)


def _plot_alone(run: RunRecord, path: Path) -> None:
    heights = [4, 0.9]
    figure = new_figure(9, 1.6 + sum(heights))
    losses, rates = panels = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for panel in panels:
        plain_style(panel)
    _draw_loss(losses, run)
    rates.plot(*run.curve("learning_rate"), color=COLOURS[0], linewidth=1.2)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rates.set_ylim(bottom=0)
    rates.set_ylabel("learning\nrate")
    rates.set_xlabel("step")
    figure.align_ylabels(panels)
    save(figure, path)


def _draw_loss(panel: Axes, run: RunRecord) -> None:
    steps, losses = run.curve("loss")
    evaluated, held_out = run.held_out_curve()
    if (window := window_of(len(steps))) > 1:
        panel.plot(steps, losses, color=COLOURS[0], alpha=0.22, linewidth=0.6)
    label = f"training loss, mean of {window} steps" if window > 1 else "training loss"
    draw_smoothed(panel, steps, losses, color=COLOURS[0], label=label)
    if len(evaluated):
        label = f"held-out loss {held_out[-1]:.4f} at the end"
        style = {"markersize": 4.5, "markerfacecolor": "white", "markeredgecolor": COLOURS[1], "zorder": 3}
        panel.plot(evaluated, held_out, "o", label=label, **style)
    scale_after_the_fall(panel, [losses], [held_out])
    model = run.config.get("model", {})
    name = model.get("source") or (model.get("config") or {}).get("model_type", "model")
    tokens = f"{count(run.summary['tokens'])} tokens, {count(run.tokens_per_step)} a step"
    title(panel, str(run.config.get("name", run.name)), f"{name} · {tokens} · weights {run.config.get('weights')}")
    panel.legend(frameon=False, loc="upper right")
    panel.set_ylabel("loss, nats per token")
