"""Statistics of differences over seeds: intervals and verdicts, one simulation for each."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from lab.compare.differences import (
    BETTER,
    BEYOND_MARGIN,
    CANNOT_TELL,
    EQUIVALENT,
    OPEN_VERDICTS,
    WITHIN_MARGIN,
    WORSE,
    LossDifference,
    error_of,
    fewest_seeds,
)
from tests.conftest import ROOT

MARGIN = 0.003
SEEDS = 20


def difference(values: list[float], level: float = 2.0) -> LossDifference:
    return LossDifference(dict(enumerate(values)), level)


def looks(values: np.ndarray) -> list[LossDifference]:
    """Return the differences after each seed from the third on, with a baseline's loss of 1."""
    return [difference(values[:seeds].tolist(), 1.0) for seeds in range(3, len(values) + 1)]


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_intervals_that_are_read_after_each_seed_miss_as_stated(distribution: str) -> None:
    """For lognormal values, they miss as often as recorded, which `which` prints."""
    file = ROOT / "benchmarks/results/loss/which_miss_rates.json"
    recorded = json.loads(file.read_text())["intervals"]["the product's"]["error 0.05"]["misses"]
    draw = np.random.default_rng(1)
    trials = 300
    missed = {0.05: 0, 0.0125: 0}
    true_mean = 0.002 if distribution == "normal" else np.exp(0.5)
    for _ in range(trials):
        normal = distribution == "normal"
        values = draw.normal(true_mean, 0.001, SEEDS) if normal else draw.lognormal(size=SEEDS)
        for error in missed:
            missed[error] += any(
                (half := look.half_width(error)) is not None and abs(look.mean - true_mean) > half
                for look in looks(values)
            )
    if distribution == "normal":
        assert all(count / trials < error for error, count in missed.items())
    else:
        assert missed[0.05] / trials == pytest.approx(recorded["lognormal"], abs=0.06)


def test_verdicts_that_are_read_after_each_seed_err_as_stated() -> None:
    """A cost of the margin is rarely equivalent, and half a margin ends within the margin."""
    draw = np.random.default_rng(0)
    trials = 200
    error = 0.05
    equivalent = 0
    closing: Counter[str] = Counter()
    for _ in range(trials):
        costly = draw.normal(MARGIN, 0.001, SEEDS)
        words = [look.verdict(MARGIN, error) for look in looks(costly)]
        equivalent += any(word == EQUIVALENT or WITHIN_MARGIN in word for word in words)
        # A verdict "worse" closes no candidate. It comes first in a fifth of these series.
        cheap = draw.normal(MARGIN / 2, 0.25 * MARGIN, SEEDS)
        words = [look.verdict(MARGIN, error) for look in looks(cheap)]
        closing[next(word for word in words if word not in OPEN_VERDICTS)] += 1
    assert equivalent / trials < error
    expected = {EQUIVALENT, WORSE + WITHIN_MARGIN}
    assert sum(closing[word] for word in closing.keys() - expected) <= error * trials
    assert expected <= closing.keys()


SPREAD = (-0.0004, -0.0002, 0.0, 0.0002, 0.0004)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        # The margin is 0.006 nats.
        ([-0.0005 + x for x in SPREAD], EQUIVALENT),
        ([-0.004 + x for x in SPREAD], BETTER + WITHIN_MARGIN),
        ([0.004 + x for x in SPREAD], WORSE + WITHIN_MARGIN),
        ([0.0055 + x for x in SPREAD], WORSE),
        ([-0.0055 + x for x in SPREAD], BETTER),
        ([0.009 + x for x in SPREAD], WORSE + BEYOND_MARGIN),
        ([0.02, -0.02, 0.001], CANNOT_TELL),
        ([0.001] * 3, WORSE + WITHIN_MARGIN),
        ([0.1] * 3, WORSE + BEYOND_MARGIN),
        ([0.01], CANNOT_TELL),
        ([0.01, 0.01], CANNOT_TELL),
    ],
)
def test_verdicts_over_seeds(values: list[float], verdict: str):
    assert difference(values).verdict(MARGIN, 0.05) == verdict
    assert math.isinf(difference(values).interval(0.05)[1]) == (len(values) < 3)


@pytest.mark.parametrize(("candidates", "seeds"), [(1, 3), (2, 4), (4, 4), (40, 5)])
def test_fewest_seeds_are_the_first_with_a_finite_interval(candidates: int, seeds: int) -> None:
    """The candidates of a comparison share the error (Bonferroni's correction)."""
    error = error_of(candidates)
    assert fewest_seeds(error) == seeds
    halves = [difference([*range(count)]).half_width(error) for count in (seeds - 1, seeds)]
    assert halves[0] is None and halves[1] is not None
