"""Intervals and verdicts for the difference between two losses, in nats per token.

There are two kinds of samples:

* `Gap` compares a single pair of runs. The sample has one loss difference per step, and the
  differences of neighbouring steps are correlated.
* `SeedDifference` compares several pairs of runs. The sample has one loss difference per seed. A
  seed determines the initialization and the order of the data. Both runs of a pair have the same
  seed, so the effect of the seed cancels out of their difference.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import mpmath
import numpy as np

from pretrain.metrics.run_record import FEWEST_STEPS
from pretrain.settings.commands import MARGIN_PERCENT

# Confidence of every reported interval.
CONFIDENCE = 0.95
# Minimum number of seeds for an interval. With two seeds, an interval would be nearly four times as
# wide as with three seeds.
FEWEST_SEEDS = 3
# Default margin, as a share of the baseline's loss. A smaller difference counts as equivalent.
MARGIN = MARGIN_PERCENT / 100
# Confidence of the interval for the verdict "equivalent". If this interval lies within the margin,
# two one-sided tests at 5 % each show that the difference is smaller than the margin.
EQUIVALENCE = 0.90
# Parameter v of the sequential test in `anytime_half_width`. The test averages over a normal
# distribution of possible true means. v is the variance of this distribution, divided by the
# variance of the differences. The value 10 makes the intervals narrowest for five to eight seeds.
MIXED_OVER = 10.0
# Probability that the number of seeds that `seeds_for_verdict` estimates is enough for a final
# verdict, and the largest number that it estimates.
PROBABLY_ENOUGH = 0.80
MOST_ESTIMATED_SEEDS = 200
# Resolution of the quantiles of Student's t.
_STEP = 2.0**-40
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
# Verdict on a single run whose difference has no interval.
TOO_FEW_STEPS = "too few steps to say"


def t_probability(t: float, freedom: int) -> float:
    """Return the probability that a Student's t variable lies within ±`t`.

    `freedom` is the number of degrees of freedom, at least 1.
    """
    share = freedom / (freedom + t * t)
    return 1 - float(mpmath.betainc(freedom / 2, 0.5, 0, share, regularized=True))


@cache
def t_quantile(freedom: int, confidence: float) -> float:
    """Return the bound b such that a Student's t variable lies within ±b with a given probability.

    `freedom` is the number of degrees of freedom. `confidence` is the probability, and must be
    below 1. For 4 degrees of freedom and a probability of 0.95, the bound is 2.776.
    """
    steps = bisect_left(
        range(2**62), confidence, key=lambda steps: t_probability(_STEP * steps, freedom)
    )
    return _STEP * steps


@dataclass(frozen=True)
class Gap:
    """Step-by-step differences between the losses of two runs, in nats per token."""

    # Differences of at least one step, [step].
    by_step: np.ndarray

    @property
    def mean(self) -> float:
        """Return the mean of the differences over all steps."""
        return float(self.by_step.mean())

    def half_width(self, confidence: float = CONFIDENCE) -> float | None:
        """Return the half-width of the mean's confidence interval.

        Return None for fewer than FEWEST_STEPS steps. If the differences rise or fall over the
        steps, the interval is wide, because their mean depends on the length of the run.

        The differences of neighbouring steps are correlated, so n differences contain less
        information than n independent values. The interval is computed in these steps:

        1. Cut the n differences into N batches of about n^(1/3) consecutive differences, and
           compute the mean of each batch. The batch means are modelled as a first-order
           autoregression.
        2. Estimate the correlation r of neighbouring batch means. The estimate is too low by
           (1 + 3r) / N on average (Kendall 1954), which would make the interval too narrow. So add
           (1 + 3r) / N and the standard error of the estimate to r.
        3. The mean is as uncertain as the mean of N / k independent batch means, where
           k = (1 + r) / (1 - r) - 2r (1 - r^N) / (N (1 - r)^2). Compute the interval by Student's t
           with N / k - 1 degrees of freedom.

        Tests simulate how often the interval contains the true mean.
        """
        values = self.by_step
        if len(values) < FEWEST_STEPS:
            return None
        size = round(len(values) ** (1 / 3))
        means = values[len(values) % size :].reshape(-1, size).mean(axis=1)
        number = len(means)
        deviations = means - means.mean()
        sum_of_squares = float(deviations @ deviations)
        r = float(deviations[1:] @ deviations[:-1]) / (sum_of_squares or math.inf)
        r += (1 + 3 * r) / number
        standard_error = math.sqrt(max(1 - r * r, 1 / number) / number)
        r = min(max(r + standard_error, 0.0), 1 - 1 / number)
        k = (1 + r) / (1 - r) - 2 * r * (1 - r**number) / (number * (1 - r) ** 2)
        error = math.sqrt(sum_of_squares * k / (number * (number - k)))
        freedom = max(int(number / k) - 1, 1)
        return t_quantile(freedom, confidence) * error

    def verdict(self, tolerance: float, comparisons: int = 1) -> str:
        """Return the position of the mean's interval relative to ± `tolerance`.

        Return "within" if the interval at CONFIDENCE lies within ± `tolerance`. Return "above" or
        "below" if the interval that is corrected for the number of comparisons lies completely
        above `tolerance` or completely below -`tolerance`. Return "cannot tell" otherwise. Without
        an interval, return TOO_FEW_STEPS.

        Args:
            tolerance: Loss difference within which a run counts as equal, in nats per token.
            comparisons: Number of runs that are compared with the same baseline, for the Bonferroni
                correction.
        """
        half = self.half_width()
        widened_half = self.half_width(1 - (1 - CONFIDENCE) / comparisons)
        if half is None or widened_half is None:
            return TOO_FEW_STEPS
        distance = abs(self.mean)
        if distance + half <= tolerance:
            return "within"
        if distance - widened_half <= tolerance:
            return CANNOT_TELL
        return "above" if self.mean > 0 else "below"


@dataclass(frozen=True)
class SeedDifference:
    """Losses of several runs, minus the losses of the baseline's runs with the same seeds."""

    # Map each seed to the loss of its run minus the loss of the baseline's run.
    by_seed: dict[int, float]
    # Mean loss of the baseline's runs with the seeds in `by_seed`.
    baseline: float

    @classmethod
    def of(
        cls, losses: Mapping[int, float], baseline: Mapping[int, float]
    ) -> SeedDifference | None:
        """Compare the losses of a group of runs with the losses of the baseline's runs.

        `losses` and `baseline` map each seed to the finite loss of its run. Only seeds that both
        mappings contain are included. Return None if there is no such seed.
        """
        seeds = sorted(losses.keys() & baseline.keys())
        if not seeds:
            return None
        baseline_mean = statistics.fmean(baseline[seed] for seed in seeds)
        return cls({seed: losses[seed] - baseline[seed] for seed in seeds}, baseline_mean)

    @property
    def mean(self) -> float:
        """Return the mean of the differences over all seeds."""
        return statistics.fmean(self.by_seed.values())

    @cached_property
    def variance(self) -> float:
        """Return the variance of the differences. Requires two seeds or more."""
        return statistics.variance(self.by_seed.values())

    def half_width(self, confidence: float = CONFIDENCE) -> float | None:
        """Return the half-width of the mean's confidence interval by Student's t.

        Return None for fewer than FEWEST_SEEDS seeds.
        """
        number = len(self.by_seed)
        if number < FEWEST_SEEDS:
            return None
        error = statistics.stdev(self.by_seed.values()) / math.sqrt(number)
        return t_quantile(number - 1, confidence) * error

    def verdict(self, margin: float = MARGIN, comparisons: int = 1) -> str:
        """Return the verdict.

        The verdict is valid only if the number of seeds was fixed before the first result.

        The verdict depends on two confidence intervals of the mean. The interval with confidence
        EQUIVALENCE is compared with the margin. The interval with confidence CONFIDENCE, which has
        a Bonferroni correction for the number of comparisons, is compared with zero and with the
        margin. `_verdict_of` lists the verdicts.

        Args:
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
            comparisons: Number of groups of runs that are compared with the same baseline.
        """
        return self._verdict_of(
            equivalence_half=self.half_width(EQUIVALENCE),
            zero_half=self.half_width(1 - (1 - CONFIDENCE) / comparisons),
            margin=margin,
        )

    def anytime_half_width(self, error: float) -> float | None:
        """Return the half-width of an interval that stays valid if seeds are added one by one.

        There is one interval after each seed. With a probability of at least 1 - `error`, all these
        intervals contain the true mean. So it is valid to look at the interval after each seed, and
        to train no more seeds once the interval is narrow enough. Return None if the interval is
        unbounded, or if there are fewer than FEWEST_SEEDS seeds.

        The interval after n seeds consists of all means m for which the statistic

            (1 + nv)^(-1/2) ((S + n d²) / (S + n d² / (1 + nv)))^(n/2)

        is at most 1 / error. Here d is the observed mean minus m, v is MIXED_OVER, and S is the sum
        of the squared deviations from the observed mean. The statistic averages the likelihood
        ratio of the t statistic over assumed true means with the distribution N(m, v · sd²). If m
        is the true mean and the differences are normal with any standard deviation, the statistic
        is a martingale (Lai 1976, Annals of Statistics 4(2); Wang and Ramdas 2025, Sequential
        Analysis 44(1)). By Ville's inequality, the probability that such a statistic exceeds
        1 / error after any number of seeds is at most `error`.
        """
        number = len(self.by_seed)
        if number < FEWEST_SEEDS:
            return None
        return _anytime_half_width(number, (number - 1) * self.variance, error)

    def anytime_verdict(self, margin: float, error: float) -> str:
        """Return a verdict that stays valid if seeds are added one by one.

        The verdict is computed from two intervals of `anytime_half_width`. The interval that is
        compared with zero has the error probability `error`. The interval for equivalence has the
        error probability 2 * `error`, because equivalence consists of two one-sided tests, each
        with the error probability `error`. The verdict is "cannot tell" if one of the intervals is
        unbounded.

        Args:
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
            error: Error probability, between 0 and 1.
        """
        return self._verdict_of(
            equivalence_half=self.anytime_half_width(2 * error),
            zero_half=self.anytime_half_width(error),
            margin=margin,
        )

    def seeds_for_verdict(self, margin: float, error: float) -> int | None:
        """Return a number of seeds that is enough for a final verdict in most cases.

        A verdict is final if it is not in OPEN_VERDICTS. The estimate assumes that the mean of the
        differences stays the same. Their variance over few seeds is too small by chance about as
        often as it is too large. So it is multiplied by (n + 1) / (n - 2) for n seeds, which is
        close to the upper end of its one-sided 75 % interval. The first differences of a simulated
        series were followed by a final verdict within the returned number of seeds in about
        PROBABLY_ENOUGH of the series, or more (benchmarks/which_estimates.py).

        The number includes the seeds so far, which must be FEWEST_SEEDS or more. Return None if
        the number is larger than MOST_ESTIMATED_SEEDS.

        Args:
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
            error: Error probability, between 0 and 1.
        """
        number = len(self.by_seed)
        variance = self.variance * (number + 1) / (number - 2)
        for seeds in range(number + 1, MOST_ESTIMATED_SEEDS + 1):
            sum_of_squares = (seeds - 1) * variance
            verdict = self._verdict_of(
                equivalence_half=_anytime_half_width(seeds, sum_of_squares, 2 * error),
                zero_half=_anytime_half_width(seeds, sum_of_squares, error),
                margin=margin,
            )
            if verdict not in OPEN_VERDICTS:
                return seeds
        return None

    def _verdict_of(
        self, equivalence_half: float | None, zero_half: float | None, margin: float
    ) -> str:
        """Return the verdict from the half-widths of two intervals of the mean.

        The equivalence interval is compared with the margin. The zero interval is compared with
        zero and with the margin. The verdict is

        * "equivalent" if the equivalence interval lies within the margin and the zero interval
          includes zero,
        * "worse" or "better", with the suffix ", within the margin", if the equivalence interval
          lies within the margin and the zero interval excludes zero,
        * "worse" or "better", with the suffix " by more than the margin", if the whole zero
          interval lies beyond the margin,
        * "worse" or "better" without a suffix in all other cases in which the zero interval
          excludes zero, and
        * "cannot tell" otherwise, and if a half-width is None.

        Args:
            equivalence_half: Half-width of the equivalence interval, or None.
            zero_half: Half-width of the zero interval, or None.
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
        """
        if equivalence_half is None or zero_half is None:
            return CANNOT_TELL
        distance = abs(self.mean)
        tolerance = margin * abs(self.baseline)
        direction = WORSE if self.mean > 0 else BETTER
        includes_zero = distance <= zero_half
        if distance + equivalence_half < tolerance:
            return EQUIVALENT if includes_zero else direction + WITHIN_MARGIN
        if distance - zero_half > tolerance:
            return direction + BEYOND_MARGIN
        return CANNOT_TELL if includes_zero else direction


def _anytime_half_width(number: int, sum_of_squares: float, error: float) -> float | None:
    """Return the half-width of `SeedDifference.anytime_half_width`, or None if it is unbounded.

    Args:
        number: Number of seeds, at least FEWEST_SEEDS.
        sum_of_squares: S in the formula of the statistic.
        error: Error probability, between 0 and 1.
    """
    # 1 + nv in the formula of the statistic.
    spread = 1 + number * MIXED_OVER
    # Largest value of (S + n d²) / (S + n d² / (1 + nv)) for which the statistic is at most
    # 1 / error.
    bound = (math.sqrt(spread) / error) ** (2 / number)
    if bound >= spread:
        return None
    return math.sqrt(sum_of_squares * (bound - 1) / (number * (1 - bound / spread)))


def fewest_seeds(error: float) -> int:
    """Return the smallest number of seeds that makes `anytime_half_width` with `error` finite."""
    seeds = FEWEST_SEEDS
    while SeedDifference(dict.fromkeys(range(seeds), 0.0), 1.0).anytime_half_width(error) is None:
        seeds += 1
    return seeds
