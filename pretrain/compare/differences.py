"""What a difference between two losses comes to, in nats a token: how large it is, how sure, and whether it matters.

Along one run the sample are the differences of its steps, which resemble their neighbours. Over seeds it are those of pairs: a
seed changes a run's initialization and the order of its text, and drops out of the difference of two runs of one seed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pretrain.metrics.run_record import FEWEST_STEPS

CONFIDENCE = 0.95  # of every interval that is shown
FEWEST_SEEDS = 3  # for an interval: that of two is nearly four times as wide as that of three
MARGIN = 0.003  # of the baseline's loss, within which a difference counts as none
EQUIVALENCE = 0.90  # the interval of two one-sided tests at 5 % each
# variance of means, in squared spreads, over which a sequential test mixes: narrowest at five to
# eight seeds
MIXED_OVER = 10.0
_STEP = 2.0**-40  # of quantiles, which are found to it
EQUIVALENT, WORSE, BETTER, CANNOT_TELL = "equivalent", "worse", "better", "cannot tell"
WITHIN_MARGIN, BEYOND_MARGIN = ", within the margin", " by more than the margin"  # after "worse"


def within(t: float, freedom: int) -> float:
    """The probability that a variable with `freedom` degrees, 1 or more, lies within ±`t`: for whole degrees of freedom a finite
    sum (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (1.0, 1.0) if freedom % 2 == 0 else (cosine, cosine if freedom > 1 else 0.0)
    for place in range(2 + freedom % 2, freedom - 1, 2):
        term *= cosine**2 * (place - 1) / place
        total += term
    return sine * total if freedom % 2 == 0 else 2 / math.pi * (angle + sine * total)


def t_quantile(freedom: int, confidence: float) -> float:
    """What a variable with `freedom` degrees stays within with the probability `confidence`, below 1: 2.776 for 4 and 0.95."""
    return _STEP * bisect_left(
        range(2**62), confidence, key=lambda steps: within(_STEP * steps, freedom)
    )


def half_width(values: np.ndarray, confidence: float = CONFIDENCE) -> float:
    """Half of the interval of the mean of correlated `values`, FEWEST_STEPS or more. A trend makes it wide, as it should.

    Neighbouring steps share their past, so n values say less than n independent ones. They are cut into batches of the cube root
    of n consecutive ones, whose N means are taken for an autoregression of first order. The correlation r of neighbours is
    estimated too low, by (1 + 3r) / N (Kendall 1954). It is raised by that and by its standard error, as too low a one makes an
    interval too narrow. The mean's variance is then that of N / k independent values, k = (1 + r) / (1 - r) - 2r (1 - r^N) /
    (N (1 - r)^2), and Student's t has N / k - 1 degrees of freedom. Tests simulate how often it holds the true mean.
    """
    size = round(len(values) ** (1 / 3))
    means = values[len(values) % size :].reshape(-1, size).mean(axis=1)
    number, away = len(means), means - means.mean()
    squares = float(away @ away) or math.inf
    r = float(away[1:] @ away[:-1]) / squares
    r += (1 + 3 * r) / number
    r = min(max(r + math.sqrt(max(1 - r * r, 1 / number) / number), 0.0), 1 - 1 / number)
    k = (1 + r) / (1 - r) - 2 * r * (1 - r**number) / (number * (1 - r) ** 2)
    error = math.sqrt(float(away @ away) * k / (number * (number - k)))
    return t_quantile(max(int(number / k) - 1, 1), confidence) * error


@dataclass(frozen=True)
class Gap:
    """Step-by-step differences of two losses, in nats a token."""

    mean: float
    half_width: float | None  # of its interval at CONFIDENCE; None below FEWEST_STEPS
    # half of the interval that holds for all comparisons together (Bonferroni); 0 below
    # FEWEST_STEPS
    cautious: float
    steps: int

    @classmethod
    def over(cls, differences: np.ndarray, comparisons: int = 1) -> Gap:
        """What `differences` of one step or more come to, in one of so many `comparisons`."""
        steps, half, cautious = len(differences), None, 0.0
        if steps >= FEWEST_STEPS:
            half, cautious = (
                half_width(differences, 1 - (1 - CONFIDENCE) / each) for each in (1, comparisons)
            )
        return cls(float(differences.mean()), half, cautious, steps)

    @property
    def upper(self) -> float:
        """The upper end of its interval; the mean where it has none."""
        return self.mean + (self.half_width or 0.0)

    def place(self, tolerance: float) -> str:
        """ "within": the whole interval lies in ± `tolerance`; "above", "below": all of it beyond, even one at CONFIDENCE over
        all comparisons that are made together (Bonferroni); else "cannot tell"."""
        if abs(self.mean) + (self.half_width or 0.0) <= tolerance:
            return "within"
        beyond = abs(self.mean) - self.cautious > tolerance
        return "cannot tell" if not beyond else "above" if self.mean > 0 else "below"


@dataclass(frozen=True)
class SeedDifference:
    """Losses minus the baseline's of the same seeds. `baseline`: the mean of the baseline's losses of these seeds."""

    by_seed: dict[int, float]
    baseline: float

    @classmethod
    def of(
        cls, losses: Mapping[int, float], baseline: Mapping[int, float]
    ) -> SeedDifference | None:
        """Returns the difference over the seeds that both have; None where there are none. All losses are finite."""
        seeds = sorted(losses.keys() & baseline.keys())
        if not seeds:
            return None
        level = math.fsum(baseline[seed] for seed in seeds) / len(seeds)
        return cls({seed: losses[seed] - baseline[seed] for seed in seeds}, level)

    @property
    def mean(self) -> float:
        return math.fsum(self.by_seed.values()) / len(self.by_seed)

    def half_width(self, confidence: float = CONFIDENCE) -> float | None:
        """Returns half of the mean's interval over seeds, by Student's t; None for fewer than FEWEST_SEEDS."""
        number = len(self.by_seed)
        if number < FEWEST_SEEDS:
            return None
        variance = math.fsum((value - self.mean) ** 2 for value in self.by_seed.values()) / (
            number - 1
        )
        return t_quantile(number - 1, confidence) * math.sqrt(variance / number)

    def verdict(self, margin: float = MARGIN, comparisons: int = 1) -> str | None:
        """Return the verdict of one look: None for fewer than FEWEST_SEEDS.

        Against the margin, a share of the baseline's loss, the interval at EQUIVALENCE is used.
        Against zero it is the interval at CONFIDENCE over all `comparisons` (Bonferroni).
        """
        half, whole = (
            self.half_width(EQUIVALENCE),
            self.half_width(1 - (1 - CONFIDENCE) / comparisons),
        )
        return None if half is None or whole is None else self._word(half, whole, margin)

    def anytime_half_width(self, error: float) -> float | None:
        """Returns half of an interval that holds the mean after every number of seeds at once, but for a probability `error`: one
        may look after each seed, and stop when it tells enough. None where it is boundless yet, and for fewer than FEWEST_SEEDS.

        The test against a mean m is a martingale for normal differences of any spread, as it mixes the likelihood of the t
        statistic over alternatives N(0, MIXED_OVER · spread²) (Lai 1976, Annals of Statistics 4(2); Wang and Ramdas 2025,
        Sequential Analysis 44(1)): (1 + nv)^(-1/2) ((S + n d²) / (S + n d² / (1 + nv)))^(n/2), d the mean minus m and S the sum
        of squares about the mean. That it ever exceeds 1 / error has a probability of at most `error` (Ville). The interval
        are all m of which it has not.
        """
        number = len(self.by_seed)
        if number < FEWEST_SEEDS:
            return None
        squares = math.fsum((value - self.mean) ** 2 for value in self.by_seed.values())
        spread = 1 + number * MIXED_OVER
        bound = (math.sqrt(spread) / error) ** (2 / number)
        return (
            math.sqrt(squares * (bound - 1) / (number * (1 - bound / spread)))
            if bound < spread
            else None
        )

    def anytime_verdict(self, margin: float, error: float) -> str:
        """Return the verdict by `anytime_half_width`, which holds after every number of seeds.

        Equivalence is two one-sided tests at `error` each, so their interval is the one at twice
        `error`. The verdict is "cannot tell" until the interval at `error` is finite.
        """
        half, whole = self.anytime_half_width(2 * error), self.anytime_half_width(error)
        return CANNOT_TELL if half is None or whole is None else self._word(half, whole, margin)

    def _word(self, half: float, whole: float, margin: float) -> str:
        """Return the verdict of two intervals of the mean, by their half-widths.

        The interval `half` is tested for lying within the margin, and `whole` for excluding zero
        or the margin. Both tests count: a difference can be "worse, within the margin".
        """
        distance, tolerance = abs(self.mean), margin * abs(self.baseline)
        direction = WORSE if self.mean > 0 else BETTER
        if distance + half < tolerance:
            return EQUIVALENT if distance <= whole else direction + WITHIN_MARGIN
        if distance - whole > tolerance:
            return direction + BEYOND_MARGIN
        return CANNOT_TELL if distance <= whole else direction


def fewest_seeds(error: float) -> int:
    """Return the least number of seeds for which `anytime_half_width` at `error` is finite."""
    seeds = FEWEST_SEEDS
    while SeedDifference(dict.fromkeys(range(seeds), 0.0), 1.0).anytime_half_width(error) is None:
        seeds += 1
    return seeds
