"""Intervals and verdicts for values that were measured once per seed.

A seed determines the initialization and the order of the data. A loss difference is measured on two
runs with the same seed, so the effect of the seed cancels out. The intervals and verdicts stay
valid if seeds are added one by one. A single seed has no interval and no verdict.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from pretrain.settings.commands import MARGIN_PERCENT

# Probability that all intervals of a table contain the true values.
CONFIDENCE = 0.95
# Default margin, as a share of the baseline's loss. A smaller difference counts as equivalent.
MARGIN = MARGIN_PERCENT / 100
# Parameter v of the sequential test in `half_width`. The test averages over a normal distribution
# of possible true means. v is the variance of this distribution, divided by the variance of the
# values. The value 10 makes the intervals narrowest for five to eight seeds.
MIXED_OVER = 10.0
# Verdicts over seeds. The last two texts may be appended to "worse" and "better".
EQUIVALENT = "equivalent"
WORSE = "worse"
BETTER = "better"
CANNOT_TELL = "cannot tell"
WITHIN_MARGIN = ", within the margin"
BEYOND_MARGIN = " by more than the margin"
# Verdicts that need more seeds. After "worse" without a suffix, it is not known whether the
# difference lies within the margin or beyond it.
OPEN_VERDICTS = (CANNOT_TELL, WORSE)


def error_of(comparisons: int) -> float:
    """Return the allowed probability that the interval of one comparison misses the true value.

    `comparisons` is the number of comparisons with the same baseline. The total probability of a
    miss, 1 - CONFIDENCE, is divided by this number. So with probability CONFIDENCE, the intervals
    of all comparisons contain the true values (Bonferroni).
    """
    return (1 - CONFIDENCE) / comparisons


def half_width(seeds: int, variance: float, error: float) -> float | None:
    """Return the half-width of a mean's interval that stays valid if seeds are added one by one.

    There is one interval after each seed. With a probability of at least 1 - `error`, all these
    intervals contain the true mean. So it is valid to look at the interval after each seed, and to
    train no more seeds once the interval is narrow enough. Return None if the interval is
    unbounded. With one or two seeds, it always is.

    The interval after n seeds consists of all means m for which the statistic

        (1 + nv)^(-1/2) ((S + n d²) / (S + n d² / (1 + nv)))^(n/2)

    is at most 1 / error. Here d is the observed mean minus m, v is MIXED_OVER, and S is the sum of
    the squared deviations from the observed mean. The statistic averages the likelihood ratio of
    the t statistic over assumed true means with the distribution N(m, v · sd²). If m is the true
    mean and the values are normal with any standard deviation, the statistic is a martingale (Lai
    1976, Annals of Statistics 4(2); Wang and Ramdas 2025, Sequential Analysis 44(1)). By Ville's
    inequality, the probability that such a statistic exceeds 1 / error after any number of seeds is
    at most `error`.

    Args:
        seeds: Number of seeds, n.
        variance: Variance of the values, S / (n - 1). Any value for a single seed.
        error: Error probability, at most 0.1.
    """
    # 1 + nv in the formula of the statistic.
    spread = 1 + seeds * MIXED_OVER
    # Largest value of (S + n d²) / (S + n d² / (1 + nv)) for which the statistic is at most
    # 1 / error.
    bound = (math.sqrt(spread) / error) ** (2 / seeds)
    if bound >= spread:
        return None
    sum_of_squares = (seeds - 1) * variance
    return math.sqrt(sum_of_squares * (bound - 1) / (seeds * (1 - bound / spread)))


def fewest_seeds(error: float) -> int:
    """Return the smallest number of seeds with a finite `half_width` for `error`."""
    return next(seeds for seeds in itertools.count(1) if half_width(seeds, 0.0, error) is not None)


@dataclass(frozen=True)
class Sample:
    """Values of a quantity, one for each seed."""

    # Map each seed to its value.
    by_seed: dict[int, float]

    @property
    def mean(self) -> float:
        """Return the mean over all seeds."""
        return statistics.fmean(self.by_seed.values())

    @cached_property
    def variance(self) -> float:
        """Return the variance over seeds, or NaN for a single seed."""
        return statistics.variance(self.by_seed.values()) if len(self.by_seed) > 1 else math.nan

    def half_width(self, error: float) -> float | None:
        """Return the half-width of the mean's interval, or None if there is no interval.

        `error` is the probability that the intervals after all numbers of seeds miss the true mean.
        """
        return half_width(len(self.by_seed), self.variance, error)

    def interval(self, error: float) -> tuple[float, float]:
        """Return the lower and upper end of the mean's interval. They are infinite if unbounded."""
        half = self.half_width(error)
        if half is None:
            half = math.inf
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class LossDifference(Sample):
    """Losses of several runs, minus the losses of the baseline's runs with the same seeds.

    Losses are in nats per token.
    """

    # Mean loss of the baseline's runs with the seeds in `by_seed`.
    baseline: float

    def verdict(self, margin: float, error: float) -> str:
        """Return the verdict, which stays valid if seeds are added one by one.

        The verdict depends on two intervals of the mean. The zero interval has the error
        probability `error`. The equivalence interval has the error probability 2 * `error`, because
        equivalence consists of two one-sided tests, each with the error probability `error`. The
        verdict is

        * "equivalent" if the equivalence interval lies within the margin and the zero interval
          includes zero,
        * "worse" or "better", with the suffix ", within the margin", if the equivalence interval
          lies within the margin and the zero interval excludes zero,
        * "worse" or "better", with the suffix " by more than the margin", if the whole zero
          interval lies beyond the margin,
        * "worse" or "better" without a suffix in all other cases in which the zero interval
          excludes zero, and
        * "cannot tell" otherwise, and if one of the two intervals is unbounded.

        Args:
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
            error: Error probability, between 0 and 1.
        """
        return verdict_from(
            self.mean,
            self.half_width(error),
            self.half_width(2 * error),
            margin * abs(self.baseline),
        )


def verdict_from(
    mean: float, zero_half: float | None, equivalence_half: float | None, tolerance: float
) -> str:
    """Return the verdict of `LossDifference.verdict` for a mean and its two intervals.

    Args:
        mean: Mean difference.
        zero_half: Half-width of the zero interval, or None if it is unbounded.
        equivalence_half: Half-width of the equivalence interval, or None if it is unbounded.
        tolerance: Largest difference that counts as equivalent.
    """
    if equivalence_half is None or zero_half is None:
        return CANNOT_TELL
    distance = abs(mean)
    direction = WORSE if mean > 0 else BETTER
    includes_zero = distance <= zero_half
    if distance + equivalence_half < tolerance:
        return EQUIVALENT if includes_zero else direction + WITHIN_MARGIN
    if distance - zero_half > tolerance:
        return direction + BEYOND_MARGIN
    return CANNOT_TELL if includes_zero else direction
