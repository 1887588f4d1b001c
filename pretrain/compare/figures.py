"""Loss plot of a run as PNG, and the smoothing and ranges that the report's page uses too."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foundation.units import count
from pretrain.compare.output_files import WRITTEN_BY
from pretrain.metrics.run_record import RunRecord

# Share of a run's steps in each mean of a smoothed curve.
SMOOTHED_SHARE = 1 / 50
COLOUR = "#1F77B4"
# Share of a run's first steps that do not count for the range, because the loss falls steeply.
FALL_SHARE = 1 / 30


def window_of(steps: int) -> int:
    """Return the number of steps in each mean of a smoothed curve.

    The number is odd, so that a mean has equally many steps before and after its own.
    """
    return round(steps * SMOOTHED_SHARE) // 2 * 2 + 1


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the finite values in the `window` around each value.

    `window` is odd and is cut off at both ends. The mean is NaN if no value is finite.
    """
    if not len(values):
        return values
    finite = np.isfinite(values)
    centre = slice(window // 2, window // 2 + len(values))
    ones = np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), ones)[centre]
    counts = np.convolve(finite, ones)[centre]
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)


def range_after_the_fall(
    curves: Sequence[np.ndarray], points: Sequence[np.ndarray] = ()
) -> tuple[float, float] | None:
    """Return the range of the vertical axis, or None if no value is finite.

    The range covers all `points`, and `curves` without their steep first fall, which would flatten
    the rest.
    """
    tails = [curve[int(len(curve) * FALL_SHARE) :] for curve in curves]
    values = np.concatenate([*tails, *points, []])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    lowest, highest = np.quantile(values, [0.0, 0.995])
    margin = 0.06 * (highest - lowest) or 0.1
    return float(lowest - margin), float(highest + margin)


def picture_of_run(run: RunRecord) -> bytes:
    """Return a PNG with the loss and the held-out loss of a run by step."""
    # Imported late: it takes half a second. Figure instead of pyplot, which needs a display and
    # keeps state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150)
    # Fixed margins, because computing them takes longer than drawing.
    axes = figure.add_axes((0.08, 0.1, 0.905, 0.79))
    steps, losses = run.curve("loss")
    window = window_of(len(run.steps))
    axes.plot(steps, losses, color=COLOUR, alpha=0.22, linewidth=0.6)
    label = "training loss" + (f", mean of {window} steps" if window > 1 else "")
    axes.plot(steps, moving_mean(losses, window), color=COLOUR, label=label)
    evaluated, held_out = run.curve("held_out_loss")
    if len(held_out):
        label = f"held-out loss {held_out[-1]:.4f}{run.when_evaluated}"
        axes.plot(evaluated, held_out, "o", color=COLOUR, label=label)
    axes.set_ylim(range_after_the_fall([losses], [held_out]))
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(_title_of(run), loc="left", parse_math=False)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": WRITTEN_BY})
    return picture.getvalue()


def _title_of(run: RunRecord) -> str:
    """Return two lines: the name of the run, and its model, precision and tokens."""
    precision = f"{run.precision}, weights {run.config.get('weights')}"
    if run.emulated:
        precision += " (emulated)"
    tokens = f"{count(run.summary['tokens'])} tokens, {count(run.tokens_per_step)} per step"
    name = f"{run.name} {run.broke_off}".strip()
    return f"{name}\n{model_name(run)} · {precision} · {tokens}"


def model_name(run: RunRecord) -> str:
    """Return the last part of `model.source`, or the architecture if there is no source.

    If the source is the `final` folder of a run, return the name of that run.
    """
    model = run.config.get("model") or {}
    model_type = (model.get("config") or {}).get("model_type", "model")
    source = Path(str(model.get("source") or model_type))
    return source.parent.name if source.name == "final" else source.name
