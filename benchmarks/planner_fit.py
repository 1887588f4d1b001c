"""Fit the constants of `lab.speed.speed` to planner_rows.csv, and print their errors.

    python -m benchmarks.planner_fit

The fit finds three shares of the dense peak: of BF16, FP8 and block scaling. Errors are predicted
speed divided by measured speed, minus 1.

A row of planner_rows.csv is one measured step. To add a row, append a line with the sizes of the
model, the settings of the run, the mean over tokens of the length of the token's document, the
speed in tokens/s of all GPUs together, and the result file in benchmarks/results, or the source of
a published speed. Then run this command, and change the shares in pretrain/precision/formats and
the factors in pretrain/metrics/cards.yaml. tests/lab/speed/test_speed.py compares all of them
with the fit. The status of a row:

* `fit`: a step of this trainer on one GPU. The shares are fitted to these rows.
* `multi`, `not fused`, `experts`, `tiny`, `special`: a step of this trainer on several GPUs with
  NVLink, or another step that the fit leaves out. The column `note` gives the reason.
* `published`: a step of another trainer. The column `file` names the source, and `commit` its
  version. Steps of llmq's README that offload were left out, because they are older than its
  files on single cards: by these, such steps on RTX 4090s became 1.3 to 2.5 times as fast. The
  formula would predict the old ones on L40S and RTX 5090 up to 1.8 times too fast.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.planner_rows import Row, read_rows
from lab.speed.speed import COSTS, step_seconds
from lab.speed.work import Work
from pretrain.metrics.cards import CARDS, Card
from pretrain.precision.formats.definition import StepCosts

# Trainers with published steps on an H100. The factor of a card is that of the last one with the
# card. `NeMo` is the last one, because only its steps in BF16 are on an H100 and on a B200.
TRAINERS = ("llmq", "Megatron Bridge", "NeMo")
# Share of the layers that stay in BF16 in published steps in NVFP4: 4 of 32.
KEPT_IN_NVFP4 = 0.125
# The fitted shares. Each is named after a precision, and is the share of all listed precisions.
FITTED = {"bf16": ("bf16",), "delayed": ("delayed", "current"), "block": ("block",)}
BY_NAME = {card.name: card for card in CARDS}
# Recomputation of other trainers: 1 if the forward GEMM of queries, keys and values is recomputed,
# 1 if that of gate and up is, and the recomputed shares of the time of passes and of attention.
OF_OTHERS = {
    "none": (0, 0, 0.0, 0.0),
    "swiglu": (0, 0, 0.2, 0.0),
    "ffn": (0, 1, 0.2, 0.0),
    "block": (1, 1, 0.25, 0.25),
}
# Bytes of a parameter that another trainer sends in a step, and the share of the link's rate.
SENT_BY_OTHERS = 4
LINK_OF_OTHERS = 0.8
# Cards whose factor is that of another card, at the same TFLOP/s per watt, and power limits.
BY_WATTS = {
    "H100 PCIe": "H100",
    "H100 NVL": "H100",
    "H200 NVL": "H200",
    "RTX 6000 Ada": "L40S",
    "RTX PRO 6000 Max-Q": "RTX PRO 6000 Server",
}
WATTS = {
    "H100": 700,
    "H200": 700,
    "H100 PCIe": 350,
    "H100 NVL": 400,
    "H200 NVL": 600,
    "L40S": 350,
    "RTX 6000 Ada": 300,
    "RTX PRO 6000 Server": 600,
    "RTX PRO 6000 Max-Q": 300,
}
# Columns that are equal for steps of one study in several precisions.
STUDY = ("trainer", "model", "card", "gpus", "tokens_per_step", "file")
# A robust loss: errors above this value count less than their square.
ROBUST = 0.05

# Map precisions to the shares of the dense peak that their GEMMs sustain.
Shares = Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """A row of planner_rows.csv with its card."""

    row: Row
    card: Card
    work: Work

    @classmethod
    def of(cls, row: Row) -> Point:
        """Convert a row."""
        work = row.work if row.values["trainer"] == "ours" else _of_others(row)
        return cls(row, BY_NAME[row.values["card"]], work)

    def predicted(self, shares: Shares, factor: float | None = None) -> float:
        """Return the predicted tokens/s.

        factor: the factor of the card. None: the factor in its table.
        """
        card = self.card if factor is None else replace(self.card, factor=factor)
        work = self.work
        seconds = step_seconds(card, work, costs_with(shares))
        if self.row.values["trainer"] != "ours":
            gpus = work.devices.count
            sent = SENT_BY_OTHERS * work.flops.parameters * (gpus - 1) / gpus
            link = LINK_OF_OTHERS * (card.nvlink or card.pcie) * 1e9
            seconds["communication"] = sent / link
        return work.tokens * work.devices.count / sum(seconds.values())

    def error(self, shares: Shares, factor: float | None = None) -> float:
        """Return the predicted speed divided by the measured speed, minus 1."""
        return self.predicted(shares, factor) / self.row.speed - 1


def _of_others(row: Row) -> Work:
    """Return the work of another trainer, which recomputes and offloads other parts than ours."""
    values = row.values
    shape = row.work.flops.shape
    qkv, gate_up, passes, attention = OF_OTHERS[values["recompute"]]
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * qkv
    width += 2 * shape.feed_forward * gate_up
    in_layers = row.work.flops.attention_weights + row.work.flops.mlp_weights
    # The share is relative to three GEMMs of each weight: one in forward, and two in backward.
    gemms = shape.layers * shape.hidden * width / (3 * in_layers)
    # Bytes that a GPU copies for each parameter of the model. The optimizer is sharded.
    offloaded = 0.0 if values["offload"] == "none" else float(values["offload"])
    return replace(
        row.work,
        recomputed_shares=(gemms, passes, attention),
        offloaded_bytes=offloaded * row.work.devices.count,
        devices=replace(row.work.devices, sharded=True, gathered_once=True),
        bf16_share=KEPT_IN_NVFP4 if row.work.precision == "nvfp4" else 0.0,
    )


def points(*statuses: str) -> list[Point]:
    """Return the rows with one of these statuses."""
    return [Point.of(row) for row in read_rows(*statuses)]


def costs_with(shares: Shares) -> dict[str, StepCosts]:
    """Return the costs of all precisions with other shares."""
    costs = dict(COSTS)
    for first, share in shares.items():
        names = FITTED.get(first, (first,))
        costs |= {name: replace(COSTS[name], share=share) for name in names}
    return costs


def shipped() -> dict[str, float]:
    """Return the shares that the precisions have."""
    return {first: COSTS[first].share for first in FITTED}


def fit(points: Sequence[Point]) -> dict[str, float]:
    """Return the shares that fit the steps best.

    The sum of squared logarithms of predicted over measured speed is minimized by Gauss-Newton. All
    steps of a model on a card have the same weight together, and large errors count less.
    """
    models = [(point.row.values["model"], point.card.name) for point in points]
    weights = np.array([1 / models.count(model) for model in models])

    def errors(logs: np.ndarray) -> np.ndarray:
        shares = dict(zip(FITTED, np.exp(logs), strict=True))
        return np.array([math.log(1 + point.error(shares)) for point in points])

    logs = np.log(list(shipped().values()))
    for _ in range(20):
        error = errors(logs)
        slopes = [(errors(logs + 1e-4 * axis) - error) / 1e-4 for axis in np.eye(len(logs))]
        root = np.sqrt(weights / np.sqrt(1 + weights * (error / ROBUST) ** 2))
        step = np.linalg.lstsq(np.stack(slopes, axis=1) * root[:, None], -error * root)[0]
        logs = logs + step
        if abs(step).max() < 1e-6:
            break
    return dict(zip(FITTED, map(float, np.exp(logs)), strict=True))


def cross_validated(points: Sequence[Point]) -> list[tuple[Point, Shares]]:
    """Return each step with the shares that fit the steps of all other models.

    Steps with block scaling are skipped, because only one model has them.
    """
    result: list[tuple[Point, Shares]] = []
    for model in sorted({point.row.values["model"] for point in points}):
        is_left_out = [point.row.values["model"] == model for point in points]
        shares = fit([point for point, out in zip(points, is_left_out, strict=True) if not out])
        result += [
            (point, shares)
            for point, out in zip(points, is_left_out, strict=True)
            if out and point.work.precision != "block"
        ]
    return result


def published(trainer: str) -> dict[str, list[Point]]:
    """Map each card to the published steps of a trainer."""
    result = defaultdict(list)
    for point in points("published"):
        if point.row.values["trainer"] == trainer:
            result[point.card.name].append(point)
    return result


def factor_of(points: Sequence[Point], shares: Shares, precision: str = "bf16") -> float:
    """Return the factor of a card with which the mean logarithm of the errors is 0.

    It is fitted to the steps in `precision` on one GPU, or on several GPUs if there are none.
    """
    fitted = [point for point in points if point.work.precision == precision]
    fitted = [point for point in fitted if point.work.devices.count == 1] or fitted
    low, high = 0.3, 3.0
    while high / low > 1.0001:
        factor = math.sqrt(low * high)
        if sum(math.log(1 + point.error(shares, factor)) for point in fitted) > 0:
            high = factor
        else:
            low = factor
    return high


def relative_factor(points: Sequence[Point], others: Sequence[Point], shares: Shares) -> float:
    """Return the factor of the card of `points`, divided by the factor of the card of `others`.

    It is that of the steps in BF16, or in FP8 if one of the cards has no steps in BF16.
    """
    has_bf16 = [
        any(point.work.precision == "bf16" for point in steps) for steps in (points, others)
    ]
    precision = "bf16" if all(has_bf16) else "current"
    return factor_of(points, shares, precision) / factor_of(others, shares, precision)


def all_factors(shares: Shares) -> dict[str, float]:
    """Return the factor of each card with measured or published steps, or of a similar card.

    The factor of a published card is relative to the H100 of the same trainer. MLPerf has no steps
    on an H100, so the factor of a B300 is relative to a B200. The A100s of llm-foundry, whose
    layers are not fused, need no H100, because the formula predicts them. Cards without any steps
    have the factor of a similar card, as pretrain/metrics/cards.yaml explains.
    """
    factors = {"H100": 1.0, "H200": 1.0}
    for trainer in TRAINERS:
        by_card = published(trainer)
        factors |= {
            card: relative_factor(steps, by_card["H100"], shares)
            for card, steps in by_card.items()
            if card != "H100"
        }
    mlperf = published("MLPerf")
    factors["B300"] = factors["B200"] * relative_factor(mlperf["B300"], mlperf["B200"], shares)
    ampere = published("llm-foundry")
    factors["A100"] = factor_of([*ampere["A100"], *ampere["A100 40GB"]], shares)
    factors["A100 40GB"] = factors["A100"]
    for name, similar in BY_WATTS.items():
        watts = WATTS[name] / WATTS[similar]
        factors[name] = factors[similar] * watts * BY_NAME[similar].bf16 / BY_NAME[name].bf16
    factors["RTX PRO 6000 Workstation"] = factors["RTX PRO 6000 Server"]
    factors["RTX 3090"] = math.sqrt(factors["RTX 4090"] * factors["RTX 5090"])
    return factors


def share_of(precision: str, shares: Shares) -> float:
    """Return the share of the peak with which `precision` is as fast as in published steps.

    Its speed is compared with FP8 with a scale per tensor, in the same study on the same card. The
    median of the errors is 0.
    """
    pairs = [
        (point, other)
        for point in points("published")
        for other in points("published")
        if point.work.precision == precision
        # MLPerf's steps in NVFP4 have attention in FP8.
        and point.row.values["trainer"] != "MLPerf"
        and other.work.precision in ("delayed", "current")
        and all(point.row.values[name] == other.row.values[name] for name in STUDY)
    ]
    low, high = 0.3, 3.0
    while high / low > 1.0001:
        share = math.sqrt(low * high)
        errors = [gain_error(*pair, {**shares, precision: share}) for pair in pairs]
        low, high = (low, share) if statistics.median(errors) > 0 else (share, high)
    return high


def gains(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return pairs of a step in low precision and the same step in BF16."""
    names = ("trainer", "file", "model", "card", "gpus", "topology", "attention")
    names += ("tokens_per_step", "mean_squared_length", "weights")
    keys = [tuple(point.row.values[name] for name in names) for point in points]
    plain = {
        key: point
        for key, point in zip(keys, points, strict=True)
        if point.row.values["precision"] == "bf16"
    }
    return [
        (point, plain[key])
        for key, point in zip(keys, points, strict=True)
        if key in plain and point.row.values["precision"] != "bf16"
    ]


def gain_error(low: Point, plain: Point, shares: Shares, factor: float | None = None) -> float:
    """Return the predicted gain divided by the measured gain, minus 1."""
    return (1 + low.error(shares, factor)) / (1 + plain.error(shares, factor)) - 1


def text(errors: Sequence[float]) -> str:
    """Return the median, the 95th percentile, the maximum and the sign of errors."""
    sizes = sorted(map(abs, errors))
    high = sizes[math.ceil(0.95 * len(sizes)) - 1]
    return (
        f"median {statistics.median(sizes):.1%}, 95 % within {high:.1%}, worst {sizes[-1]:.1%}, "
        f"bias {statistics.median(errors):+.1%}, n={len(sizes)}"
    )


def main() -> int:
    """Print the fitted shares and factors, and the errors of all classes of steps."""
    fitted = points("fit")
    shares = fit(fitted)
    print("shares:", {name: round(share, 4) for name, share in shares.items()})
    print("fitted steps:", text([point.error(shares) for point in fitted]))
    without = cross_validated(fitted)
    print("a model left out:", text([point.error(other) for point, other in without]))
    shares_of = {id(point): other for point, other in without}
    pairs = [pair for pair in gains(fitted) if id(pair[0]) in shares_of]
    print("its gain:", text([gain_error(*pair, shares_of[id(pair[0])]) for pair in pairs]))
    for card in ("H100", "H200"):
        others = fit([point for point in fitted if point.card.name != card])
        errors = [point.error(others) for point in fitted if point.card.name == card]
        print(f"{card} from the other card:", text(errors))
    for status in ("multi", "not fused", "experts", "tiny", "special"):
        print(f"{status}:", text([point.error(shares) for point in points(status)]))
    for trainer in TRAINERS:
        for card, steps in published(trainer).items():
            factor = factor_of(steps, shares)
            print(f"{trainer}, {card}, as shipped:", text([point.error(shares) for point in steps]))
            errors = [point.error(shares, factor) for point in steps]
            print(f"  with its factor of {factor:.3f}:", text(errors))
            if pairs := gains(steps):
                print("  gain:", text([gain_error(*pair, shares, factor) for pair in pairs]))
    print("factors:", {name: round(factor, 3) for name, factor in all_factors(shares).items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
