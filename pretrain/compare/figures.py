"""What a run looks like: its loss as a PNG, which its training draws, and what the report's page draws curves by."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foundation.units import count
from pretrain.compare.output_files import WRITTEN_BY
from pretrain.metrics.run_record import RunRecord

SMOOTHED_SHARE = 1 / 50  # of a run's steps in each mean of a smoothed curve
COLOUR = "#1F77B4"
FALL_SHARE = 1 / 30  # of a run's steps, the first, whose steep fall does not set the scale


def window_of(steps: int) -> int:
    """How many of a run's steps go into each smoothed value: an odd number, so that as many lie before a step as after it."""
    return round(steps * SMOOTHED_SHARE) // 2 * 2 + 1


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite `values` in the `window` (odd) centred on each; NaN where none is finite. At the ends it is cut off."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    middle = slice(window // 2, window // 2 + len(values))
    sums, counts = (
        np.convolve(each, np.ones(window))[middle]
        for each in (np.where(finite, values, 0.0), finite)
    )
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)


def range_after_the_fall(
    curves: Sequence[np.ndarray], others: Sequence[np.ndarray] = ()
) -> tuple[float, float] | None:
    """The range of the curves after their first fall, which would flatten all the rest, and of all of the `others`."""
    values = np.concatenate([*(curve[int(len(curve) * FALL_SHARE) :] for curve in curves), *others])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    lowest, highest = np.quantile(values, [0.0, 0.995])
    margin = 0.06 * (highest - lowest) or 0.1
    return float(lowest - margin), float(highest + margin)


def picture_of_run(run: RunRecord) -> bytes:
    """PNG of a run: its loss and held-out loss by step."""
    # half a second, which only drawing should cost; and no pyplot: no display, no state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150)
    # given, as to find its margins takes longer than to draw
    losses = figure.add_axes((0.08, 0.1, 0.905, 0.79))
    (steps, values), (evaluated, held_out), window = (
        run.curve("loss"),
        run.curve("held_out_loss"),
        window_of(len(run.steps)),
    )
    losses.plot(steps, values, color=COLOUR, alpha=0.22, linewidth=0.6)
    label = "training loss" + (f", mean of {window} steps" if window > 1 else "")
    losses.plot(steps, moving_mean(values, window), color=COLOUR, label=label)
    if len(held_out):
        losses.plot(
            evaluated,
            held_out,
            "o",
            color=COLOUR,
            label=f"held-out loss {held_out[-1]:.4f}{run.when_evaluated}",
        )
    losses.set_ylim(range_after_the_fall([values], [held_out]))
    losses.legend(frameon=False, loc="upper right")
    precision = f"{run.precision}, weights {run.config.get('weights')}" + (
        " (emulated)" if run.emulated else ""
    )
    tokens = f"{count(run.summary['tokens'])} tokens, {count(run.tokens_per_step)} a step"
    about = f"{model_name(run)} · {precision} · {tokens}"
    losses.set_title(
        f"{run.name} {run.broke_off}".strip() + f"\n{about}", loc="left", parse_math=False
    )
    losses.set(xlabel="step", ylabel="loss, nats per token")
    losses.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": WRITTEN_BY})
    return picture.getvalue()


def model_name(run: RunRecord) -> str:
    """The last name of what was trained on (a run's, where it is its `final`), or an architecture."""
    model = run.config.get("model") or {}
    source = Path(
        str(model.get("source") or (model.get("config") or {}).get("model_type", "model"))
    )
    return source.parent.name if source.name == "final" else source.name
