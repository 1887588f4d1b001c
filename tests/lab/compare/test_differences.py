"""Statistics of differences over seeds: intervals and verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.compare.differences import (
    BETTER,
    BEYOND_MARGIN,
    CANNOT_TELL,
    EQUIVALENT,
    WITHIN_MARGIN,
    WORSE,
    LossDifference,
    error_of,
)
from lab.experiments.protocol import Protocol
from pretrain.metrics.run_record import end_begins


def difference(values: list[float], level: float = 2.0) -> LossDifference:
    return LossDifference(dict(enumerate(values)), level)


def test_many_comparisons_without_a_difference_have_no_verdict():
    """Without the Bonferroni correction, five of 100 would lie beyond a 95 % interval."""
    rng = np.random.default_rng(1)
    verdicts = [
        difference(rng.normal(0.0, 0.01, 7).tolist()).verdict(0.0, error_of(100))
        for _ in range(300)
    ]
    assert sum(verdict != CANNOT_TELL for verdict in verdicts) <= 2


@given(st.integers(1, 1000), st.integers(0, 999))
def test_the_end_is_the_last_fifth_or_64_steps(steps: int, before: int):
    # The run is a branch that starts after another run's step `before`.
    numbers = np.arange(1, steps + 1)[min(before, steps - 1) :]
    end = numbers >= end_begins(int(numbers[-1]))
    assert end.sum() == min(len(numbers), max(64, math.ceil(steps / 5))) and end[-1]


# ── Differences over seeds ────────────────────────────────────────────────────────────────────────


def test_verdicts_over_seeds():
    # The margin is 0.006 nats.
    for mean, verdict in (
        (-0.0005, EQUIVALENT),
        (-0.004, BETTER + WITHIN_MARGIN),
        (0.004, WORSE + WITHIN_MARGIN),
        (0.0055, WORSE),
        (-0.0055, BETTER),
        (0.009, WORSE + BEYOND_MARGIN),
    ):
        values = [mean + deviation for deviation in (-0.0004, -0.0002, 0.0, 0.0002, 0.0004)]
        assert difference(values).verdict(0.003, 0.05) == verdict
    assert difference([0.02, -0.02, 0.001]).verdict(0.003, 0.05) == CANNOT_TELL
    assert difference([0.001] * 3).verdict(0.003, 0.05) == WORSE + WITHIN_MARGIN, "no deviation"
    assert difference([0.1] * 3).verdict(0.003, 0.05) == WORSE + BEYOND_MARGIN


@pytest.mark.parametrize("values", [[0.01], [0.01, 0.01]])
def test_fewer_than_three_seeds_have_no_interval_and_no_verdict(values: list[float]):
    few = difference(values)
    assert few.half_width(0.05) is None and few.interval(0.05) is None
    assert few.verdict(0.003, 0.05) == CANNOT_TELL


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
                difference((losses[candidate, :count] - losses[0, :count]).tolist(), level)
                .verdict(margin, error)
                .startswith(("better", "worse"))
                for count in range(2, seeds + 1)
                for candidate in range(1, candidates + 1)
            )
        return wrong / series

    protocol = Protocol(None, margin, [], dict.fromkeys(range(candidates + 1), 1.0), 0.0, 5, 9, 0)
    assert protocol.error == pytest.approx(0.05 / candidates)
    assert family_wise_error(protocol.error) <= 0.05 < family_wise_error(0.05)
