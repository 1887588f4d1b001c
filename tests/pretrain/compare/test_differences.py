"""Statistics of differences: Student's t, intervals along a run and over seeds, verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.compare.differences import (
    BETTER,
    BEYOND_MARGIN,
    CANNOT_TELL,
    EQUIVALENCE,
    EQUIVALENT,
    WITHIN_MARGIN,
    WORSE,
    Gap,
    SeedDifference,
    t_probability,
    t_quantile,
)
from pretrain.compare.verdicts import Protocol
from pretrain.metrics.run_record import at_the_end


def difference(values: list[float], level: float = 2.0) -> SeedDifference:
    return SeedDifference.of(
        {seed: level + value for seed, value in enumerate(values)},
        dict.fromkeys(range(len(values)), level),
    )


# ── Student's t ───────────────────────────────────────────────────────────────────────────────────


def test_quantiles_equal_published_tables():
    """For example NIST's handbook, section 1.3.6.7.2."""
    arguments = ((1, 0.95), (4, 0.90), (9, 0.99), (100, 0.95))
    quantiles = [t_quantile(freedom, confidence) for freedom, confidence in arguments]
    assert quantiles == pytest.approx([12.706, 2.132, 3.250, 1.984], abs=6e-4)
    confidences = [
        t_probability(quantile, freedom)
        for quantile, (freedom, _) in zip(quantiles, arguments, strict=True)
    ]
    assert confidences == pytest.approx([0.95, 0.90, 0.99, 0.95], abs=1e-12)
    # With 1 degree of freedom, the probability is 2 / pi * atan(t).
    assert 1 - t_probability(1e8, 1) == pytest.approx(2 / math.pi / 1e8, rel=1e-6)
    assert t_probability(math.inf, 3) == 1


# ── Along one run ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("steps", [64, 200, 1000])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_an_interval_covers_the_true_mean_for_any_correlation(steps: int, correlation: float):
    """Simulates 500 stationary AR(1) processes."""
    rng = np.random.default_rng(0)
    runs = 500
    values = rng.normal(size=(runs, steps))
    values[:, 0] /= math.sqrt(1 - correlation**2)
    for step in range(1, steps):
        values[:, step] += correlation * values[:, step - 1]
    gaps = [Gap(differences) for differences in values]
    assert np.mean([abs(gap.mean) <= gap.half_width() for gap in gaps]) >= 0.94
    half_width = np.median([gap.half_width() for gap in gaps])
    deviation = math.sqrt(np.mean([gap.mean**2 for gap in gaps]))
    most = 3.0 if correlation <= 0.5 or steps == 1000 else 40.0
    assert half_width / deviation <= most, "the interval is not wider than necessary"


def test_many_comparisons_without_a_difference_have_no_verdict():
    """Without the Bonferroni correction, five of 100 would lie beyond a 95 % interval."""
    rng = np.random.default_rng(1)
    gaps = [Gap(rng.normal(0.0, 1.0, 80)) for _ in range(300)]
    seeds = [
        difference(rng.normal(0.0, 0.01, 5).tolist()).verdict(0.0, comparisons=100)
        for _ in range(300)
    ]
    assert sum(gap.verdict(0.0, comparisons=100) != CANNOT_TELL for gap in gaps) <= 2
    assert sum(verdict != CANNOT_TELL for verdict in seeds) <= 2


@given(st.integers(1, 1000), st.integers(0, 999))
def test_the_end_is_the_last_fifth_or_64_steps(steps: int, before: int):
    # The run is a branch that starts after another run's step `before`.
    numbers = np.arange(1, steps + 1)[min(before, steps - 1) :]
    gap = Gap(numbers[at_the_end(numbers)].astype(float))
    assert len(gap.by_step) == min(len(numbers), max(64, math.ceil(steps / 5)))
    assert at_the_end(numbers)[-1]
    assert (gap.half_width() is not None) == (len(numbers) >= 64)


# ── Differences over seeds ────────────────────────────────────────────────────────────────────────


def test_verdicts_over_seeds():
    # The margin is 0.006 nats.
    for mean, verdict in (
        (-0.001, EQUIVALENT),
        (-0.004, BETTER + WITHIN_MARGIN),
        (0.004, WORSE + WITHIN_MARGIN),
        (0.0055, WORSE),
        (-0.0055, BETTER),
        (0.009, WORSE + BEYOND_MARGIN),
    ):
        values = [mean + deviation for deviation in (-0.001, 0.0, 0.001)]
        assert difference(values).verdict(0.003) == verdict
    assert difference([-0.001, 0.0, 0.001]).half_width(EQUIVALENCE) == pytest.approx(
        2.920 * 0.001 / math.sqrt(3), abs=1e-5
    )
    assert difference([0.02, -0.02, 0.001]).verdict() == CANNOT_TELL
    two_seeds = difference([0.01, 0.01])
    assert two_seeds.half_width() is None and two_seeds.verdict() == CANNOT_TELL
    assert difference([0.001] * 3).verdict() == WORSE + WITHIN_MARGIN, "no deviation"
    assert difference([0.1] * 3).verdict() == WORSE + BEYOND_MARGIN


def test_the_candidates_of_a_comparison_share_the_error() -> None:
    """Simulates candidates as good as the baseline, whose verdicts are read after each seed."""
    candidates, seeds, series, margin, level = 8, 10, 60, 0.003, 2.0

    def family_wise_error(error: float) -> float:
        """Return the share of series in which any candidate is ever called better or worse."""
        rng = np.random.default_rng(0)
        wrong = 0
        for _ in range(series):
            losses = level + rng.normal(0, margin * level, (candidates + 1, seeds))
            wrong += any(
                SeedDifference.of(dict(enumerate(losses[candidate, :count])), baseline)
                .anytime_verdict(margin, error)
                .startswith(("better", "worse"))
                for count in range(2, seeds + 1)
                for baseline in [dict(enumerate(losses[0, :count]))]
                for candidate in range(1, candidates + 1)
            )
        return wrong / series

    protocol = Protocol(None, margin, [], dict.fromkeys(range(candidates + 1), 1.0), 0.0, 5, 9, 0)
    assert protocol.error == pytest.approx(0.05 / candidates)
    assert family_wise_error(protocol.error) <= 0.05 < family_wise_error(0.05)
