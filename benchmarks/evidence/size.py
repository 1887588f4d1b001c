"""Fit the cost of delayed scaling over the size of the model, and predict it for larger models.

    python -m benchmarks.evidence.size

Writes the table of predictions in docs/evidence.md.

The differences of single seeds, in percent of BF16's loss, are fitted by least squares in two ways:
as a constant, and as a linear function of the logarithm of the number of parameters. The interval
of a prediction is for the mean over a large number of seeds, by Student's t. It is valid if the
cost follows the fitted function, and if the spread between seeds does not depend on the size.

In the scaling law of arXiv:2411.04330, low precision acts like a smaller number of parameters. The
cost in nats is then proportional to a power of the size. This function is fitted to the logarithms
of the costs in training loss. The other costs are not all positive, so they have no logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.evidence.t_interval import t_quantile
from benchmarks.evidence.tables import (
    ANSWER,
    Measure,
    Scale,
    served_loss,
    trained_loss,
    training_loss,
)
from benchmarks.machine import with_tables
from foundation.files import replace_file
from foundation.units import markdown
from pretrain.compare.differences import CONFIDENCE

CELL = "delayed_branch"
# Scales whose data is seen less than twice. Repeated data raises the cost in training loss.
FITTED = ("14m", "35m_once", "111m")
# Sizes of the predictions, in parameters, with their labels.
PREDICTED = {1.7e9: "1.7 billion", 8e9: "8 billion"}
ENDPOINTS: Mapping[str, Measure] = {
    "served in BF16": served_loss,
    "as trained": trained_loss,
    "training loss": training_loss,
}


def predictions(
    parameters: np.ndarray, costs: np.ndarray, *, grows: bool
) -> list[tuple[float, float]]:
    """Return the predicted cost and the half-width of its interval, for each size in PREDICTED.

    parameters: number of parameters of the model of each run.
    costs: cost of each run, in percent.
    grows: fit a linear function of the logarithm of the size instead of a constant.
    """
    columns = 2 if grows else 1

    def features(sizes: np.ndarray) -> np.ndarray:
        return np.stack([np.ones(len(sizes)), np.log(sizes)], axis=1)[:, :columns]

    known = features(parameters)
    coefficients = np.linalg.lstsq(known, costs)[0]
    freedom = len(costs) - columns
    variance = np.square(costs - known @ coefficients).sum() / freedom
    covariance = variance * np.linalg.inv(known.T @ known)
    quantile = t_quantile(freedom, CONFIDENCE)
    return [
        (float(row @ coefficients), quantile * math.sqrt(row @ covariance @ row))
        for row in features(np.array(list(PREDICTED)))
    ]


def costs_of_runs(
    scales: Sequence[Scale], measure: Measure, *, in_percent: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of parameters and the cost of each run.

    The costs are in percent of BF16's loss, or in nats.
    """
    parameters = []
    costs = []
    for scale in scales:
        unit = scale.level(measure) / 100 if in_percent else 1.0
        for above in scale.above_baseline(CELL, measure).values():
            parameters.append(scale.sessions[1]["parameters"])
            costs.append(above / unit)
    return np.array(parameters), np.array(costs)


def power_law(scales: Sequence[Scale]) -> list[str]:
    """Return the costs in training loss, in nats, that a power of the size predicts.

    Each cost has its interval in parentheses.
    """
    parameters, costs = costs_of_runs(scales, training_loss, in_percent=False)
    return [
        f"{math.exp(cost):+.4f} ({math.exp(cost - half):.4f} to {math.exp(cost + half):.4f})"
        for cost, half in predictions(parameters, np.log(costs), grows=True)
    ]


def size_table() -> str:
    """Return the table of predictions."""
    scales = [Scale.read(name) for name in FITTED]
    rows = []
    for endpoint, measure in ENDPOINTS.items():
        parameters, costs = costs_of_runs(scales, measure, in_percent=True)
        for grows in (False, True):
            form = "linear in the logarithm of the size" if grows else "constant"
            predicted = predictions(parameters, costs, grows=grows)
            cells = [f"{cost:+.2f} ± {half:.2f} %" for cost, half in predicted]
            rows.append([endpoint, form, *cells])
    rows.append(["training loss, in nats", "power of the size", *power_law(scales)])
    return markdown(["cost of delayed scaling", "fit", *PREDICTED.values()], rows)


if __name__ == "__main__":
    replace_file(ANSWER, with_tables(ANSWER, "size", size_table()).encode())
