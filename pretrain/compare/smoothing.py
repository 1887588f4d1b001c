"""A curve without the noise of single steps: the mean of the steps around each."""

from __future__ import annotations

import numpy as np

SMOOTHED_SHARE = 1 / 50  # of a run's steps in each mean


def window_of(steps: int) -> int:
    """Returns how many of a run's steps go into each smoothed value: an odd number, so that as many lie before a step as after
    it."""
    return round(steps * SMOOTHED_SHARE) // 2 * 2 + 1


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite `values` in the `window` (odd) centred on each; NaN where none is finite. At the ends it is cut off."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    middle = slice(window // 2, window // 2 + len(values))
    sums, counts = (np.convolve(each, np.ones(window))[middle] for each in (np.where(finite, values, 0.0), finite))
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)
