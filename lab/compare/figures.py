"""Loss plot of a run as PNG, and functions for smoothed curves and ranges of axes.

The HTML page of the report uses these functions too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foundation.errors import require_package
from foundation.units import count
from pretrain.metrics.run_record import RunRecord

# Window of the moving mean, as a share of the run's steps.
SMOOTHED_SHARE = 1 / 50
# Colours of the training loss and of the held-out loss: blue and orange.
COLOUR = "#1F77B4"
HELD_OUT_COLOUR = "#D55E00"
# Share of a run's steps that is ignored when the range of the vertical axis is computed. These are
# the first steps, in which the loss falls steeply.
FALL_SHARE = 1 / 30
# Largest factor by which the first values of a curve may stretch the vertical axis.
MOST_STRETCH = 2


def window_of(steps: int) -> int:
    """Return the window of the moving mean for a run with `steps` steps, in steps.

    The window is odd, so that it has as many steps before its centre as after it.
    """
    return round(steps * SMOOTHED_SHARE) // 2 * 2 + 1


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Replace each value by the mean of the finite values in a window around it.

    At both ends of the curve, the window has fewer values. The mean is NaN if the window has no
    finite value.

    Args:
        values: Values of a curve, at least one, float64 [step].
        window: Number of values in the window, odd. The value itself is in the centre.
    """
    finite = np.isfinite(values)
    centre = slice(window // 2, window // 2 + len(values))
    ones = np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), ones)[centre]
    counts = np.convolve(finite, ones)[centre]
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)


def range_after_the_fall(
    curves: Sequence[np.ndarray], points: Sequence[np.ndarray] = ()
) -> tuple[float, float] | None:
    """Return the lower and upper end of a plot's vertical axis, or None if no value is finite.

    The first values of a loss curve fall steeply. If the axis included these values, the rest of
    the curve would look flat, so they are ignored. They are included if they make the axis less
    than MOST_STRETCH times as long, as in short runs.

    Args:
        curves: Curves of the plot, each [step]. The first FALL_SHARE of each curve is ignored.
        points: Other values of the plot, for example held-out losses [evaluation]. None of these
            values is ignored.
    """
    tails = [curve[int(len(curve) * FALL_SHARE) :] for curve in curves]
    values = np.concatenate([*tails, *points, []])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    lowest, highest = np.quantile(values, [0.0, 0.995])
    peak = np.nanmax(np.concatenate([*curves, *points]))
    highest = peak if peak - lowest < MOST_STRETCH * (highest - lowest) else highest
    margin = 0.06 * (highest - lowest) or 0.1
    return float(lowest - margin), float(highest + margin)


def picture_of_run(run: RunRecord) -> bytes:
    """Return a PNG that plots the training loss and the held-out loss of a run over the steps.

    Raises InputError if matplotlib is not installed.
    """
    require_package("matplotlib", "report", "the picture of the losses")
    # The import takes half a second, so it is not at the top of the file. Figure is used instead of
    # pyplot, because pyplot needs a display and keeps global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150)
    # Set the margins, because matplotlib takes longer to compute margins than to draw.
    axes = figure.add_axes((0.08, 0.1, 0.905, 0.79))
    steps, losses = run.curve("loss")
    window = window_of(len(run.steps))
    axes.plot(steps, losses, color=COLOUR, alpha=0.22, linewidth=0.6)
    label = "training loss" + (f", mean of {window} steps" if window > 1 else "")
    axes.plot(steps, moving_mean(losses, window), color=COLOUR, label=label)
    evaluated, held_out = run.curve("held_out_loss")
    if len(held_out):
        label = f"held-out loss {held_out[-1]:.4f}{run.when_evaluated}"
        axes.plot(evaluated, held_out, "o-", color=HELD_OUT_COLOUR, linewidth=1, label=label)
    axes.set_ylim(range_after_the_fall([losses], [held_out]))
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(
        f"{run.name}\n{model_name(run)} · {run.precision}, weights {run.config.get('weights')} · "
        f"{count(run.summary['tokens'])} tokens",
        loc="left",
        parse_math=False,
    )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def model_name(run: RunRecord) -> str:
    """Return a short name of the run's model.

    The name is the last part of `model.source`. If `model.source` is the `final` folder of another
    run, the name of that run is returned. If `model.source` is not set, the model type is returned.
    """
    model = run.config["model"]
    source = Path(model["source"] or model["config"]["model_type"])
    return source.parent.name if source.name == "final" else source.name
