"""Statistics of the difference between two losses, in nats per token: intervals and verdicts.

Along one run, the sample consists of the differences of its steps, and neighbouring steps are
correlated. Over seeds, the sample consists of the differences of pairs of runs. A seed changes the
initialization and the order of the data. That effect drops out of the difference between two runs
with the same seed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pretrain.metrics.run_record import FEWEST_STEPS

# Confidence of every interval that is reported.
CONFIDENCE = 0.95
# Minimum number of seeds for an interval. An interval of two seeds is nearly four times as wide as
# one of three.
FEWEST_SEEDS = 3
# Default margin: differences up to this share of the baseline's loss count as none.
MARGIN = 0.003
# Confidence of the interval that is equivalent to two one-sided tests at 5 %.
EQUIVALENCE = 0.90
# Variance of the means over which the sequential test mixes, in squared standard deviations. This
# value makes the intervals narrowest at five to eight seeds.
MIXED_OVER = 10.0
# Resolution of quantiles.
_STEP = 2.0**-40
# Verdicts over seeds, and endings of "worse" and "better".
EQUIVALENT = "equivalent"
WORSE = "worse"
BETTER = "better"
CANNOT_TELL = "cannot tell"
WITHIN_MARGIN = ", within the margin"
BEYOND_MARGIN = " by more than the margin"


def t_probability(t: float, freedom: int) -> float:
    """Return the probability that a Student's t variable lies within ±`t`.

    `freedom` is the number of degrees of freedom, at least 1. For whole numbers the probability is
    a finite sum (Abramowitz and Stegun 26.7.3-4).
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    if freedom % 2 == 0:
        probability = 0.0
        term = math.sin(angle)
    else:
        probability = 2 / math.pi * angle
        term = 2 / math.pi * math.sin(angle) * cosine
    for place in range(2 + freedom % 2, freedom + 1, 2):
        probability += term
        term *= cosine**2 * (place - 1) / place
    return probability


def t_quantile(freedom: int, confidence: float) -> float:
    """Return the bound that |t| does not exceed with probability `confidence`, below 1.

    The quantile for 4 degrees of freedom and 0.95 is 2.776.
    """
    steps = bisect_left(
        range(2**62), confidence, key=lambda steps: t_probability(_STEP * steps, freedom)
    )
    return _STEP * steps


def half_width(values: np.ndarray, confidence: float = CONFIDENCE) -> float:
    """Return half of the interval of the mean of correlated `values`.

    There must be at least FEWEST_STEPS values. A trend makes the interval wide, as it should.

    Neighbouring steps share their past, so n values contain less information than n independent
    ones. The values are cut into batches of n^(1/3) consecutive ones. The N batch means are
    modelled as a first-order autoregression. The correlation r of neighbours is estimated too low,
    by (1 + 3r) / N (Kendall 1954). It is raised by that and by its standard error, because an
    estimate that is too low makes the interval too narrow. The variance of the mean is then that of
    N / k independent values with k = (1 + r) / (1 - r) - 2r (1 - r^N) / (N (1 - r)^2). Student's t
    has N / k - 1 degrees of freedom. Tests simulate how often the interval covers the true mean.
    """
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


@dataclass(frozen=True)
class Gap:
    """Mean of the step-by-step differences between two losses, in nats per token."""

    mean: float
    # Half of the interval at CONFIDENCE. None below FEWEST_STEPS.
    half_width: float | None
    # Half of the interval that holds for all comparisons together (Bonferroni). 0 below
    # FEWEST_STEPS.
    cautious: float
    steps: int

    @classmethod
    def over(cls, differences: np.ndarray, comparisons: int = 1) -> Gap:
        """Summarise per-step loss differences. There must be at least one.

        `comparisons` is the number of comparisons that are made together, for the Bonferroni
        correction.
        """
        steps = len(differences)
        mean = float(differences.mean())
        if steps < FEWEST_STEPS:
            return cls(mean, None, 0.0, steps)
        cautious = half_width(differences, 1 - (1 - CONFIDENCE) / comparisons)
        return cls(mean, half_width(differences), cautious, steps)

    @property
    def upper(self) -> float:
        """Return the upper end of the interval, or the mean if there is no interval."""
        return self.mean + (self.half_width or 0.0)

    def verdict(self, tolerance: float) -> str:
        """Return the position of the interval relative to ± `tolerance`.

        "within": the interval lies within ± `tolerance`. "above" or "below": the interval that
        holds for all comparisons together lies beyond it. Otherwise "cannot tell".
        """
        distance = abs(self.mean)
        if distance + (self.half_width or 0.0) <= tolerance:
            return "within"
        if distance - self.cautious <= tolerance:
            return "cannot tell"
        return "above" if self.mean > 0 else "below"


@dataclass(frozen=True)
class SeedDifference:
    """Losses minus the baseline's losses of the same seeds."""

    by_seed: dict[int, float]
    # Mean of the baseline's losses of these seeds.
    baseline: float

    @classmethod
    def of(
        cls, losses: Mapping[int, float], baseline: Mapping[int, float]
    ) -> SeedDifference | None:
        """Return the difference over the seeds that both have, or None without a common seed.

        `losses` and `baseline` have finite losses by seed.
        """
        seeds = sorted(losses.keys() & baseline.keys())
        if not seeds:
            return None
        level = statistics.fmean(baseline[seed] for seed in seeds)
        return cls({seed: losses[seed] - baseline[seed] for seed in seeds}, level)

    @property
    def mean(self) -> float:
        """Return the mean difference over seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def sum_of_squares(self) -> float:
        """Return the sum of squared deviations from the mean."""
        return math.fsum((value - self.mean) ** 2 for value in self.by_seed.values())

    def half_width(self, confidence: float = CONFIDENCE) -> float | None:
        """Return half of the interval of the mean by Student's t.

        Return None for fewer than FEWEST_SEEDS.
        """
        number = len(self.by_seed)
        if number < FEWEST_SEEDS:
            return None
        error = math.sqrt(self.sum_of_squares / (number - 1) / number)
        return t_quantile(number - 1, confidence) * error

    def verdict(self, margin: float = MARGIN, comparisons: int = 1) -> str:
        """Return the verdict of a single look.

        The interval at EQUIVALENCE is compared with the margin, a share of the baseline's loss.
        The interval at CONFIDENCE for all `comparisons` together (Bonferroni) is compared with
        zero.
        """
        zero_half = self.half_width(1 - (1 - CONFIDENCE) / comparisons)
        return self._verdict_of(self.half_width(EQUIVALENCE), zero_half, margin)

    def anytime_half_width(self, error: float) -> float | None:
        """Return half of an interval that holds after every number of seeds at once.

        The interval misses the mean after any number of seeds with probability `error` at most. So
        one may look after each seed and stop when the interval is narrow enough. Return None while
        the interval is unbounded, and for fewer than FEWEST_SEEDS.

        The test against a mean m is a martingale for normal differences of any standard deviation,
        because it mixes the likelihood of the t statistic over alternatives N(0, MIXED_OVER · sd²)
        (Lai 1976, Annals of Statistics 4(2); Wang and Ramdas 2025, Sequential Analysis 44(1)):
        (1 + nv)^(-1/2) ((S + n d²) / (S + n d² / (1 + nv)))^(n/2), where d is the mean minus m, v
        is MIXED_OVER, and S is the sum of squares about the mean. The probability that it ever
        exceeds 1 / error is at most `error` (Ville). The interval consists of all m whose test has
        not exceeded it.
        """
        number = len(self.by_seed)
        if number < FEWEST_SEEDS:
            return None
        spread = 1 + number * MIXED_OVER
        bound = (math.sqrt(spread) / error) ** (2 / number)
        if bound >= spread:
            return None
        return math.sqrt(self.sum_of_squares * (bound - 1) / (number * (1 - bound / spread)))

    def anytime_verdict(self, margin: float, error: float) -> str:
        """Return the verdict by `anytime_half_width`, which holds after every number of seeds.

        Equivalence is two one-sided tests at `error` each, so their interval is the one at twice
        `error`. The verdict is "cannot tell" until the interval at `error` is finite.
        """
        equivalence_half = self.anytime_half_width(2 * error)
        return self._verdict_of(equivalence_half, self.anytime_half_width(error), margin)

    def _verdict_of(
        self, equivalence_half: float | None, zero_half: float | None, margin: float
    ) -> str:
        """Return the verdict from two half-widths of the mean's interval.

        The interval of `equivalence_half` may lie within the margin. The interval of `zero_half`
        may exclude zero or the margin. Both can be true: "worse, within the margin". Without an
        interval the verdict is "cannot tell".
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


def fewest_seeds(error: float) -> int:
    """Return the smallest number of seeds with a finite `anytime_half_width` at `error`."""
    seeds = FEWEST_SEEDS
    while SeedDifference(dict.fromkeys(range(seeds), 0.0), 1.0).anytime_half_width(error) is None:
        seeds += 1
    return seeds
