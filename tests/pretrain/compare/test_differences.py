"""What a difference of two losses comes to: Student's t, the error along a run, intervals over seeds, equivalence."""

from __future__ import annotations

import math
import statistics

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pretrain.compare.differences import (
    BETTER,
    CANNOT_TELL,
    EQUIVALENCE,
    EQUIVALENT,
    FEWEST_SEEDS,
    WORSE,
    Gap,
    SeedDifference,
    batch_means_error,
    t_quantile,
    within,
)
from pretrain.metrics.run_record import at_the_end

LOSSES = st.lists(st.floats(1.0, 12.0), min_size=FEWEST_SEEDS, max_size=12)


def difference(values: list[float], level: float = 2.0) -> SeedDifference:
    return SeedDifference.of({seed: level + value for seed, value in enumerate(values)}, dict.fromkeys(range(len(values)), level))


# ── Student's t ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.floats(0.0, 200.0), st.integers(1, 400))
def test_the_distribution_is_the_incomplete_beta_function_that_defines_it(t: float, freedom: int):
    with mpmath.workdps(50):
        inside = 1 - mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + mpmath.mpf(t) ** 2), regularized=True)
    assert within(t, freedom) == pytest.approx(float(inside), abs=1e-12)


def test_quantiles_are_those_of_published_tables():
    """For example NIST's handbook, section 1.3.6.7.2."""
    quantiles = [t_quantile(*each) for each in ((1, 0.95), (4, 0.90), (9, 0.99), (100, 0.95))]
    assert quantiles == pytest.approx([12.706, 2.132, 3.250, 1.984], abs=6e-4)


# ── Along one run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.floats(-10, 10), min_size=64, max_size=200))
def test_the_standard_error_is_that_of_batch_means_computed_plainly(values: list[float]):
    size = math.floor(math.sqrt(len(values)))
    rest = values[len(values) % size :]
    means = [statistics.fmean(rest[i : i + size]) for i in range(0, len(rest), size)]
    expected = math.sqrt(statistics.variance(means) * size / len(values))
    assert batch_means_error(np.array(values)) == pytest.approx(expected, abs=1e-9)
    gap = Gap.over(np.array(values))
    assert gap.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert gap.half_width == pytest.approx(t_quantile(len(means) - 1, 0.95) * expected, abs=1e-9)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_the_standard_error_allows_for_correlated_steps(correlation: float):
    """Of an AR(1) process of unit innovations the mean's is 1 / ((1 - correlation) sqrt(n)), in closed form for long series."""
    rng, n, errors = np.random.default_rng(0), 2000, []
    for _ in range(40):
        values, noise = np.zeros(n), rng.normal(size=n)
        for i in range(1, n):
            values[i] = correlation * values[i - 1] + noise[i]
        errors.append(batch_means_error(values))
    assert np.mean(errors) == pytest.approx(1 / ((1 - correlation) * math.sqrt(n)), rel=0.12)


def test_an_interval_covers_the_true_difference_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        gap = Gap.over(at_the_end(rng.normal(0.5, 1.0, 400)))
        covered += abs(gap.mean - 0.5) <= gap.half_width
    assert 0.92 <= covered / 400 <= 0.98


@given(st.integers(1, 1000))
def test_the_end_is_the_last_fifth_or_64_steps_and_below_these_there_is_no_interval(steps: int):
    differences = np.arange(float(steps))
    gap = Gap.over(at_the_end(differences))
    assert gap.steps == min(steps, max(64, math.ceil(steps / 5))) and at_the_end(differences)[-1] == steps - 1
    assert (gap.half_width is not None) == (steps >= 64)


# ── Differences over seeds ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(LOSSES, st.integers(0, 2**31))
def test_mean_interval_and_equivalence_are_those_of_scipy(losses: list[float], seed: int):
    stats = pytest.importorskip("scipy.stats")
    ours = np.array(losses)
    base = ours + np.random.default_rng(seed).normal(0.002, 0.004, len(ours))
    assume(np.std(ours - base) > 1e-9)
    found = SeedDifference.of(dict(enumerate(ours.tolist())), dict(enumerate(base.tolist())))
    interval = stats.ttest_rel(ours, base).confidence_interval(0.95)
    assert (found.mean - found.half_width(), found.mean + found.half_width()) == pytest.approx(tuple(interval), abs=1e-9)
    margin = 0.003 * base.mean()
    above = stats.ttest_1samp(ours - base, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(ours - base, margin, alternative="less").pvalue
    assume(abs(max(above, below) - 0.05) > 1e-9)
    assert (found.verdict(0.003) == EQUIVALENT) == (max(above, below) < 0.05)


def test_a_verdict_takes_three_seeds_that_lie_together():
    for mean, verdict in ((-0.004, EQUIVALENT), (0.0055, WORSE), (-0.0055, BETTER)):  # the margin is 0.006 nats
        assert difference([mean + each for each in (-0.001, 0.0, 0.001)]).verdict(0.003) == verdict
    assert difference([-0.001, 0.0, 0.001]).half_width(EQUIVALENCE) == pytest.approx(2.920 * 0.001 / math.sqrt(3), abs=1e-5)
    assert difference([0.02, -0.02, 0.001]).verdict() == CANNOT_TELL
    assert difference([0.01, 0.01]).half_width() is None and difference([0.01, 0.01]).verdict() is None
    assert difference([0.001] * 3).verdict() == EQUIVALENT and difference([0.1] * 3).verdict() == WORSE, "no spread at all"


def test_only_seeds_that_both_have_are_paired():
    found = SeedDifference.of({1: 3.0, 2: 3.5, 9: 7.0}, {2: 3.0, 1: 2.0, 5: 1.0})
    assert found.by_seed == {1: 1.0, 2: 0.5} and found.baseline == 2.5
    assert SeedDifference.of({1: 3.0}, {2: 3.0}) is None
