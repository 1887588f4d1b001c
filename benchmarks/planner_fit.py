"""Fit the constants of `pretrain.plan.speed` to pretrain/plan/rows.csv, and print their errors.

    python -m benchmarks.planner_fit

The fit finds three shares of the dense peak: of BF16, FP8 and block scaling. Errors are predicted
speed divided by measured speed, minus 1.

A row of rows.csv is one measured step. To add a row, append a line with the sizes of the model,
the settings of the run, the mean over tokens of the length of the token's document, the speed in
tokens/s of all GPUs together, and the result file in benchmarks/results, or the source of a
published speed. Then run this command, and change the shares in pretrain/plan/speed.py and the
factors in pretrain/metrics/cards.py. tests/pretrain/plan/test_speed.py compares them with the fit.
The status of a row:

* `fit`: a step of this trainer on one GPU, as the trainer is today. The shares are fitted to these
  rows, and a plan quotes them.
* `multi`: the same on several GPUs with NVLink. A plan quotes it.
* `repeat`, `special`, `whole documents`, `experts`, `not fused`, `old code`, `tiny`: steps of this
  trainer that are compared with the fit. The column `note` gives the reason.
* `outside`: a published step of another trainer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pretrain.metrics.cards import CARDS, Card
from pretrain.plan.rows import read_rows, work_in
from pretrain.plan.speed import COSTS, Costs, rates_of, step_seconds
from pretrain.plan.work import Work

# Shares that are fitted together, by their first precision.
FITTED = {"bf16": ("bf16",), "delayed": ("delayed", "current"), "block": ("block",)}
BY_NAME = {card.name: card for card in CARDS}
# Forward GEMMs that another trainer recomputes (those of queries, keys and values, and those of
# gate and up), and shares of the time of passes and of attention.
OF_OTHERS = {
    "none": (0, 0, 0.0, 0.0),
    "swiglu": (0, 0, 0.2, 0.0),
    "ffn": (0, 1, 0.2, 0.0),
    "block": (1, 1, 0.25, 0.25),
}
# Bytes of a parameter that another trainer sends in a step, and the share of the link's rate.
SENT_BY_OTHERS = 4
LINK_OF_OTHERS = 0.8
# A robust loss: errors above this value count less than their square.
ROBUST = 0.05

Shares = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """A row of rows.csv."""

    values: Mapping[str, str]
    card: Card
    work: Work
    measured: float

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Row:
        """Convert a line of rows.csv."""
        work = work_in(values)
        if values["trainer"] != "ours":
            work = _of_others(values, work)
        measured = float(values["tokens_per_second"])
        return cls(values, BY_NAME[values["card"]], work, measured)

    @property
    def is_ours(self) -> bool:
        """Return True for a step of this trainer."""
        return self.values["trainer"] == "ours"

    def predicted(self, shares: Shares, factor: float | None = None) -> float:
        """Return the predicted tokens/s.

        factor: the factor of the card. None: the factor in its table.
        """
        card = self.card if factor is None else replace(self.card, factor=factor)
        seconds = step_seconds(card, self.work, rates_of(card, costs_with(shares)))
        if not self.is_ours and self.work.gpus > 1:
            share = (self.work.gpus - 1) / self.work.gpus
            link = LINK_OF_OTHERS * (card.nvlink or card.pcie) * 1e9
            seconds["communication"] = SENT_BY_OTHERS * self.work.parameters * share / link
        return self.work.tokens * self.work.gpus / sum(seconds.values())

    def error(self, shares: Shares, factor: float | None = None) -> float:
        """Return the predicted speed divided by the measured speed, minus 1."""
        return self.predicted(shares, factor) / self.measured - 1


def _of_others(values: Mapping[str, str], work: Work) -> Work:
    """Return the work of another trainer, which recomputes and offloads other parts than ours."""
    qkv, gate_up, passes, attention = OF_OTHERS[values["recompute"]]
    width = (work.heads + 2 * work.kv_heads) * work.head_dim * qkv
    width += 2 * work.feed_forward * gate_up
    gemms = work.layers * work.hidden * width / (3 * work.layer_weights)
    # Bytes of a parameter of the model. The optimizer is sharded over all GPUs.
    offloaded = 0.0 if values["offload"] == "none" else float(values["offload"]) * work.gpus
    return replace(
        work,
        recomputed=(gemms, passes, attention),
        offloaded=offloaded,
        topology="zero",
        precision="current" if work.precision == "mxfp8" else work.precision,
    )


def rows_with(*statuses: str) -> list[Row]:
    """Return the rows of rows.csv with one of these statuses."""
    return [Row.of(values) for values in read_rows() if values["status"] in statuses]


def costs_with(shares: Shares) -> dict[str, Costs]:
    """Return the costs of all precisions with other shares."""
    costs = dict(COSTS)
    for first, names in FITTED.items():
        costs |= {name: replace(COSTS[name], share=shares[first]) for name in names}
    return costs


def shipped() -> dict[str, float]:
    """Return the shares of `pretrain.plan.speed`."""
    return {first: COSTS[first].share for first in FITTED}


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Return the shares that fit `rows` best.

    The sum of squared logarithms of errors is minimized by Gauss-Newton. All rows of a model on a
    card have the same weight together, and large errors count less.
    """
    counts = Counter((row.values["model"], row.card.name) for row in rows)
    weights = np.array([1 / counts[row.values["model"], row.card.name] for row in rows])
    logs = np.log(list(shipped().values()))

    def errors(logs: np.ndarray) -> np.ndarray:
        shares = dict(zip(FITTED, np.exp(logs), strict=True))
        return np.array([math.log(row.predicted(shares) / row.measured) for row in rows])

    for _ in range(20):
        error = errors(logs)
        slopes = [(errors(logs + 1e-4 * axis) - error) / 1e-4 for axis in np.eye(len(logs))]
        robust = weights / np.sqrt(1 + weights * (error / ROBUST) ** 2)
        slope = np.stack(slopes, axis=1) * np.sqrt(robust)[:, None]
        step = np.linalg.lstsq(slope, -error * np.sqrt(robust), rcond=None)[0]
        logs = logs + step
        if abs(step).max() < 1e-6:
            break
    return dict(zip(FITTED, map(float, np.exp(logs)), strict=True))
