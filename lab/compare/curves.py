"""Smoothed curves, ranges of axes and names of models for the HTML page of the report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pretrain.metrics.run_record import RunRecord

# Window of the moving mean, as a share of the steps of the shortest run.
SMOOTHED_SHARE = 1 / 50
# Share of a run's steps that is ignored when the range of the vertical axis is computed. These are
# the first steps, in which the loss falls steeply.
FALL_SHARE = 1 / 30


def window_of(steps: int) -> int:
    """Return the window of the moving mean for a run with `steps` steps, in steps.

    The window is odd, so that it has the same number of steps before and after its centre.
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


def range_after_the_fall(curves: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Return the lower and upper end of a plot's vertical axis, or None if no value is finite.

    The first values of a loss curve fall steeply. If the axis included these values, the rest of
    the curve would look flat, so they are ignored.

    `curves` are the curves of the plot, each [step]. The first FALL_SHARE of each is ignored.
    """
    tails = [curve[int(len(curve) * FALL_SHARE) :] for curve in curves]
    values = np.concatenate(tails)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    # A spike of the loss must not flatten the curve either.
    lowest, highest = np.quantile(values, [0.0, 0.995])
    margin = 0.06 * (highest - lowest) or 0.1
    return float(lowest - margin), float(highest + margin)


def model_name(run: RunRecord) -> str:
    """Return a short name of the run's model.

    The name is `model.source`, or the model type if `model.source` is not set.
    """
    model = run.config["model"]
    return model["source"] or model["config"]["model_type"]
