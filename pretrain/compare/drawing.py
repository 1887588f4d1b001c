"""What all our pictures of runs share: colours, the look of a panel, smoothing, and a file that is replaced whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.errors import InputError
from foundation.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which readers of every kind of sight tell apart; their yellow is too light for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
SMOOTHED_SHARE = 1 / 50  # of a run's steps in each mean
FALL_SHARE = 1 / 30  # of a run's steps, the first, whose steep fall does not set the scale


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure  # half a second, which only drawing should cost; and no pyplot: no display, no state

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the PNG at `path`, its folder made, at no moment half; InputError where the disk refuses."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}; name another file") from None


def plain_style(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(x=0.01)


def title(panel: Axes, text: str, subtitle: str) -> None:
    panel.set_title(f"{text}\n", loc="left", weight="bold")
    panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize="small", color=GREY)


def window_of(steps: int) -> int:
    """How many of a run's steps go into each smoothed value."""
    return max(1, round(steps * SMOOTHED_SHARE))


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


def draw_smoothed(panel: Axes, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """The moving mean as a line."""
    panel.plot(steps, moving_mean(values, window_of(len(steps))), **{"linewidth": 1.6} | style)


def scale_after_the_fall(panel: Axes, curves: list[np.ndarray], others: list[np.ndarray]) -> None:
    """End the axis where the losses are after their first fall; one that began at ln(vocabulary) would flatten all the rest.

    curves: values of every step; others: values, such as held-out losses, that count from the first.
    """
    values = np.concatenate([*(curve[int(len(curve) * FALL_SHARE) :] for curve in curves), *others])
    values = values[np.isfinite(values)]
    if len(values):
        lowest, highest = np.quantile(values, [0.0, 0.995])
        margin = 0.06 * (highest - lowest) or 0.1
        panel.set_ylim(lowest - margin, highest + margin)
