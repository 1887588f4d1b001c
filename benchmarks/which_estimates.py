"""Simulate two estimates of `which`: the number of seeds that are enough, and the extra tokens.

    python -m benchmarks.which_estimates --out benchmarks/results/loss/which_estimates.json

`seeds`: Normal differences of a candidate are drawn with a true cost and a spread (standard
deviation over seeds), both in margins. A series is open after n seeds if none of its n first
verdicts is final. For open series, the number of seeds that `LossDifference.seeds_for_verdict`
names is compared with the number of seeds after which the verdict becomes final. `enough` is the
share of series in which the named seeds were enough, by the number n of seeds before the estimate.
Series without a named number, because it would be larger than MOST_ESTIMATED_SEEDS, are excluded
from this share.

`tokens`: The training loss of a baseline is E + A t^-a + floor * rate(t) with noise. rate is the
learning rate as a share of its peak. The last term is the loss that the decay removes. The extra
tokens for equal loss that `which` estimates for a candidate are divided by the true extra tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import measured_on
from foundation.files import write_json
from lab.compare.differences import (
    FEWEST_SEEDS,
    MIXED_OVER,
    MOST_ESTIMATED_SEEDS,
    LossDifference,
)
from lab.experiments.protocol import MOST_SEEDS, Protocol
from lab.experiments.verdicts import loss_slope, tokens_for
from pretrain.metrics.run_record import RunRecord
from pretrain.optimizer.schedule import learning_rate
from pretrain.settings.config import load_recipe

CANDIDATES = (1, 4)
# True costs and standard deviations over seeds, in margins.
COSTS = (0.0, 0.5, 2.0)
SPREADS = (0.3, 0.5, 1.0)
SEEDS_BEFORE = (4, 5, 6, 7, 8)
# With fewer open series, no share is computed.
FEWEST_SERIES = 50
# The baseline's loss at the last step without noise, its slope in nats per unit of ln(tokens), the
# standard deviation of a step's loss, the candidate's cost in nats, and the number of seeds.
LOSS = 2.5
SLOPE = 0.18
NOISE = 0.03
COST = 0.0075
SEEDS = 5
EXPONENTS = (0.1, 0.28, 0.4)
FLOORS = (0.0, 0.1, 0.3)
SCHEDULES = {
    "constant": ["schedule.kind=constant"],
    "wsd, decay 0.2": ["schedule.kind=wsd", "schedule.decay=0.2"],
    "wsd, decay 0.8": ["schedule.kind=wsd", "schedule.decay=0.8"],
    "cosine": ["schedule.kind=cosine"],
    "linear": ["schedule.kind=linear"],
}
RECIPE = "benchmarks/tiny.yaml"


def half_widths(values: np.ndarray, error: float) -> np.ndarray:
    """Return `anytime_half_width` after each seed of each series, as infinity if it is None."""
    seeds = np.arange(1, values.shape[1] + 1)
    mean = np.cumsum(values, axis=1) / seeds
    squares = np.maximum(np.cumsum(values**2, axis=1) - seeds * mean**2, 0.0)
    spread = 1 + seeds * MIXED_OVER
    with np.errstate(over="ignore"):
        bound = (np.sqrt(spread) / error) ** (2 / seeds)
    is_finite = (bound < spread) & (seeds >= FEWEST_SEEDS)
    bound = np.where(is_finite, bound, 1.0)
    half = np.sqrt(squares * (bound - 1) / (seeds * (1 - bound / spread)))
    return np.where(is_finite, half, np.inf)


def seeds_until_final(values: np.ndarray, error: float) -> np.ndarray:
    """Return the number of seeds after which each series with a margin of 1 has a final verdict.

    Return infinity for a series that stays open. `values` are differences, [series, seed].
    """
    means = np.cumsum(values, axis=1) / np.arange(1, values.shape[1] + 1)
    half = half_widths(values, error)
    is_equal = np.isfinite(half) & (abs(means) + half_widths(values, 2 * error) < 1)
    is_final = is_equal | (abs(means) - half > 1) | (means + half < 0)
    return np.where(is_final.any(axis=1), is_final.argmax(axis=1) + 1, np.inf)


def seeds_enough(
    cost: float, spread: float, candidates: int, series: int, before: tuple[int, ...] = SEEDS_BEFORE
) -> dict[str, Any]:
    """Return the figures of `seeds` for one cost, spread and number of candidates.

    `series` is the number of open series for each of the numbers of seeds in `before`.
    """
    error = 0.05 / candidates
    draw = np.random.default_rng(1)
    values = draw.normal(cost, spread, (50 * series, MOST_ESTIMATED_SEEDS))
    final = seeds_until_final(values, error)
    enough = {}
    named: list[float] = []
    needed: list[float] = []
    for seeds in before:
        is_open = np.flatnonzero(final > seeds)[:series]
        if len(is_open) < FEWEST_SERIES:
            continue
        estimates = [
            # The baseline's loss and the margin are 1.
            LossDifference(dict(enumerate(values[row, :seeds].tolist())), 1.0).seeds_for_verdict(
                1.0, error
            )
            or np.inf
            for row in is_open
        ]
        named += estimates
        needed += final[is_open].tolist()
        is_named = np.isfinite(estimates)
        is_enough = (final[is_open] <= np.array(estimates))[is_named]
        enough[str(seeds)] = round(float(is_enough.mean()), 3)
    estimates = np.array(named)
    is_trained = estimates <= MOST_SEEDS
    is_enough = (np.array(needed) <= estimates)[is_trained]
    return {
        "enough": enough,
        "enough_if_most_seeds_or_fewer": round(float(is_enough.mean()), 3),
        "median_of_named": float(np.quantile(estimates, 0.5, method="lower")),
        "share_beyond_most_seeds": round(float((estimates > MOST_SEEDS).mean()), 3),
        "share_without_a_number": round(float(np.isinf(estimates).mean()), 3),
    }


def share_of_extra_tokens(
    overrides: list[str], exponent: float, floor: float, steps: int, answers: int
) -> float:
    """Return the mean estimate of the extra tokens of `answers` answers, divided by the truth.

    Args:
        overrides: Settings of the schedule, as key=value.
        exponent: a in the formula of the loss.
        floor: Loss in nats that a complete decay of the learning rate removes.
        steps: Number of steps.
        answers: Number of answers, each over SEEDS seeds.
    """
    draw = np.random.default_rng(0)
    recipe = load_recipe(RECIPE, [*overrides, "schedule.warmup=0", f"train.steps={steps}"])
    numbers = np.arange(1, steps + 1)
    peak = recipe.optimizer.learning_rate
    rates = [learning_rate(step, recipe.schedule, peak, steps) for step in range(steps)]
    power_law = SLOPE / exponent * ((numbers / steps) ** -exponent - 1)
    losses = LOSS + power_law + floor * np.array(rates) / peak
    protocol = Protocol(None, 0.003, ["bf16"], {"bf16": 1.0}, 0.0, 5, steps, steps // 5)

    def slope() -> float:
        noisy = losses + draw.normal(0, NOISE, steps)
        pairs = zip(numbers.tolist(), noisy.tolist(), strict=True)
        metrics = [{"step": step, "loss": loss} for step, loss in pairs]
        return loss_slope(RunRecord(Path(), recipe.model_dump(), {}, metrics, {}))

    extra_tokens = [
        tokens_for(protocol, COST, np.mean([slope() for _ in range(SEEDS)])) - 1
        for _ in range(answers)
    ]
    true_extra_tokens = (1 - exponent * COST / SLOPE) ** (-1 / exponent) - 1
    return float(np.mean(extra_tokens) / true_extra_tokens)


def token_shares(answers: int) -> dict[str, Any]:
    """Return the figures of `tokens` for all schedules, lengths and floors, by exponent."""
    share = partial(share_of_extra_tokens, answers=answers)

    def by_exponent(schedule: str, floor: float, steps: int) -> Mapping[str, float]:
        return {
            f"{exponent:g}": round(share(SCHEDULES[schedule], exponent, floor, steps), 2)
            for exponent in EXPONENTS
        }

    return {
        "by_floor": {
            schedule: {f"{floor:g}": by_exponent(schedule, floor, 2000) for floor in FLOORS}
            for schedule in SCHEDULES
        },
        "by_steps": {
            str(steps): by_exponent("wsd, decay 0.2", 0.1, steps) for steps in (150, 400, 2000)
        },
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--series", type=int, default=400, help="number of open series of each share"
    )
    parser.add_argument("--answers", type=int, default=10, help="number of answers of each mean")
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    options = parser.parse_args()
    figures = {
        "seeds": [
            {"candidates": candidates, "cost": cost, "spread": spread}
            | seeds_enough(cost, spread, candidates, options.series)
            for candidates in CANDIDATES
            for cost in COSTS
            for spread in SPREADS
        ],
        "tokens": token_shares(options.answers),
    }
    what = "Estimates of `which`: seeds that are enough, and extra tokens divided by the truth."
    write_json(options.out, {"what": what, **measured_on(), **figures})
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
