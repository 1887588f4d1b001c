"""What several seeds say of a difference: Student's t, intervals, equivalence, and losses as tokens."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pretrain.compare.seeds import (
    BETTER,
    CANNOT_TELL,
    EQUIVALENCE,
    EQUIVALENT,
    FEWEST_SEEDS,
    WORSE,
    SeedDifference,
    TokenSlope,
    t_quantile,
    within,
)

LOSSES = st.lists(st.floats(1.0, 12.0), min_size=FEWEST_SEEDS, max_size=12)
# Hours of sleep gained by ten patients with one drug over another: W. S. Gosset (Student), The probable error of a mean, 1908.
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def difference(values: list[float], level: float = 2.0) -> SeedDifference:
    return SeedDifference.of({seed: level + value for seed, value in enumerate(values)}, dict.fromkeys(range(len(values)), level))


# ── Student's t ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.floats(0.0, 200.0), st.integers(1, 400))
def test_the_distribution_is_the_incomplete_beta_function_that_defines_it(t: float, freedom: int):
    with mpmath.workdps(50):
        inside = 1 - mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + mpmath.mpf(t) ** 2), regularized=True)
    assert within(t, freedom) == pytest.approx(float(inside), abs=1e-12)


# Two-sided quantiles of published tables: for example NIST's handbook, section 1.3.6.7.2.
@pytest.mark.parametrize(
    ("freedom", "confidence", "quantile"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (4, 0.95, 2.776),
        (4, 0.90, 2.132),
        (9, 0.90, 1.833),
        (9, 0.99, 3.250),
        (100, 0.95, 1.984),
    ],
)
def test_quantiles_are_those_of_published_tables(freedom: int, confidence: float, quantile: float):
    assert t_quantile(freedom, confidence) == pytest.approx(quantile, abs=6e-4)


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


@given(LOSSES, LOSSES, st.floats(-5.0, 5.0), st.randoms())
def test_what_moves_both_and_how_seeds_are_called_changes_no_difference(ours, base, moved, random):
    seeds = list(range(min(len(ours), len(base))))
    called = random.sample(range(1000), len(seeds))
    first = SeedDifference.of(dict(zip(seeds, ours, strict=False)), dict(zip(seeds, base, strict=False)))
    pairs = list(zip(called, ours, base, strict=False))
    random.shuffle(pairs)
    again = SeedDifference.of({s: x + moved for s, x, _ in pairs}, {s: y + moved for s, _, y in pairs})
    assert again.mean == pytest.approx(first.mean, abs=1e-9)
    assert again.half_width() == pytest.approx(first.half_width(), rel=1e-6, abs=1e-9)
    assert again.baseline == pytest.approx(first.baseline + moved)


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (0.0, EQUIVALENT),
        (0.004, EQUIVALENT),
        (-0.004, EQUIVALENT),
        (0.0055, WORSE),
        (-0.0055, BETTER),
        (0.1, WORSE),
        (-0.1, BETTER),
    ],
)
def test_a_verdict_is_by_the_interval_of_two_one_sided_tests(mean: float, verdict: str):
    found = difference([mean + each for each in (-0.001, 0.0, 0.001)], level=2.0)
    assert found.half_width(EQUIVALENCE) == pytest.approx(2.920 * 0.001 / math.sqrt(3), abs=1e-5), "t of 2 degrees at 90 %"
    assert found.verdict(0.003) == verdict, "the margin is 0.006 nats"


def test_seeds_that_lie_far_apart_tell_nothing_and_two_have_no_interval():
    assert difference([0.02, -0.02, 0.001]).verdict() == CANNOT_TELL
    assert difference([0.01, 0.01]).half_width() is None and difference([0.01, 0.01]).verdict() is None
    assert difference([0.001] * 3).verdict() == EQUIVALENT and difference([0.1] * 3).verdict() == WORSE, "no spread at all"


def test_only_seeds_that_both_have_are_paired():
    found = SeedDifference.of({1: 3.0, 2: 3.5, 9: 7.0}, {2: 3.0, 1: 2.0, 5: 1.0})
    assert (
        found.by_seed == {1: 1.0, 2: 0.5} and found.baseline == 2.5 and found.root_mean_square == pytest.approx(math.sqrt(0.625))
    )
    assert SeedDifference.of({1: 3.0}, {2: 3.0}) is None


def test_an_interval_over_seeds_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    samples = [difference((0.01 + rng.normal(0, 0.004, 5)).tolist()) for _ in range(600)]
    assert 0.93 <= np.mean([abs(each.mean - 0.01) <= each.half_width() for each in samples]) <= 0.97


def test_what_differs_by_the_margin_is_called_equivalent_in_one_case_of_twenty():
    rng = np.random.default_rng(4)
    called = [difference((0.006 + rng.normal(0, 0.001, 5)).tolist()).verdict(0.003) == EQUIVALENT for _ in range(600)]
    assert 0.03 <= np.mean(called) <= 0.07


# ── Tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def curve(slope: float, level: float = 3.0, noise: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.arange(1, 11) * 1e6
    return tokens, level + slope * np.log(tokens) + np.random.default_rng(seed).normal(0, noise, 10)


@given(st.floats(-2.0, -0.01), st.floats(-3.0, 3.0))
def test_the_slope_is_that_of_the_losses_whatever_their_levels(slope: float, apart: float):
    found = TokenSlope.before(8e6, [curve(slope), curve(slope, 3.0 + apart)])
    assert found.nats == pytest.approx(slope, rel=1e-6) and (found.first, found.last) == (4e6, 8e6)


def test_what_comes_after_the_decay_begins_and_what_is_early_is_left_out():
    tokens, losses = curve(-0.3)
    losses[tokens > 8e6] -= 1.0
    losses[tokens < 4e6] += 5.0
    assert TokenSlope.before(8e6, [(tokens, losses)]).nats == pytest.approx(-0.3)
    losses[tokens < 6e6] += 5.0  # while the rate still rose
    found = TokenSlope.before(8e6, [(tokens, losses)], warm=6e6)
    assert found.nats == pytest.approx(-0.3) and found.first == 6e6


def test_too_few_evaluations_and_a_loss_that_does_not_fall_have_no_slope():
    tokens, losses = curve(-0.3)
    assert TokenSlope.before(8e6, [(tokens[:5], losses[:5])]) is None and TokenSlope.before(8e6, []) is None
    assert TokenSlope.before(8e6, [curve(0.1)]) is None
    losses[5] = math.nan
    assert TokenSlope.before(8e6, [(tokens, losses)]).nats == pytest.approx(-0.3)


@given(st.floats(-2.0, -0.01), st.floats(0.01, 20.0), st.floats(0.2, 5.0))
def test_a_loss_as_tokens_and_a_speed_as_loss_are_what_the_curve_says(slope: float, tokens: float, speedup: float):
    found = TokenSlope(slope, 4e6, 8e6)
    higher = slope * math.log(tokens)  # nats above the end of the whole curve, after `tokens` as many
    assert 1 + found.tokens(higher) == pytest.approx(tokens)
    assert found.at_equal_time(0.01, speedup) == pytest.approx(0.01 + slope * math.log(speedup))
    assert found.at_equal_time(-slope * math.log(speedup), speedup) == pytest.approx(0.0, abs=1e-12), "what speed just pays for"
