"""What a difference between two losses comes to, in nats a token: how large it is, how sure, and whether it matters.

Along one run the sample are the differences of its steps, which resemble their neighbours. Over seeds it are those of pairs: a
seed changes a run's initialization and the order of its text, and drops out of the difference of two runs of one seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pretrain.metrics.run_record import FEWEST_STEPS

CONFIDENCE = 0.95  # of every interval that is shown
FEWEST_SEEDS = 3  # for an interval: that of two is nearly four times as wide as that of three
MARGIN = 0.003  # of the baseline's loss, within which a difference counts as none
EQUIVALENCE = 0.90  # the interval of two one-sided tests at 5 % each
_HALVINGS = 64  # of an interval of quantiles: as far as a float goes
EQUIVALENT, WORSE, BETTER, CANNOT_TELL = "equivalent", "worse", "better", "cannot tell"


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
    low, high = 0.0, 1.0
    while within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return high


# ── Along one run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch_means_error(values: np.ndarray) -> float:
    """Standard error of the mean of correlated `values`, by non-overlapping batch means.

    Neighbouring steps share their past, so sd / sqrt(n) would be too small. The n values are cut into batches of
    b = floor(sqrt(n)) consecutive ones, the first n mod b left out: SE² = Var(batch means) · b / n (Flegal and Jones 2010, Annals
    of Statistics 38(2)). A trend makes it too large, a correlation longer than a batch too small, and of a few batches it is a
    matter of luck.
    """
    n = len(values)
    size = math.isqrt(n)
    batches = values[n % size :].reshape(-1, size).mean(axis=1)
    return float(math.sqrt(batches.var(ddof=1) * size / n))


@dataclass(frozen=True)
class Gap:
    """Step-by-step differences of two losses, in nats a token."""

    mean: float
    half_width: float | None  # of its interval at CONFIDENCE, by Student's t over the means of batches; None below FEWEST_STEPS
    steps: int

    @classmethod
    def over(cls, differences: np.ndarray) -> Gap:
        """Returns what `differences` of one step or more come to."""
        steps, half_width = len(differences), None
        if steps >= FEWEST_STEPS:
            half_width = t_quantile(steps // math.isqrt(steps) - 1, CONFIDENCE) * batch_means_error(differences)
        return cls(float(differences.mean()), half_width, steps)

    @property
    def ends(self) -> tuple[float, float]:
        """The two ends of its interval; both are the mean where it has none."""
        half = self.half_width or 0.0
        return self.mean - half, self.mean + half

    def place(self, tolerance: float) -> str:
        """Where the whole interval lies: within ± `tolerance`, above or below that; "cannot tell" where it lies across an end."""
        low, high = self.ends
        if -tolerance <= low and high <= tolerance:
            return "within"
        return "above" if low > tolerance else "below" if high < -tolerance else "cannot tell"


# ── Over seeds ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SeedDifference:
    """Losses minus the baseline's of the same seeds. `baseline`: the mean of the baseline's losses of these seeds."""

    by_seed: dict[int, float]
    baseline: float

    @classmethod
    def of(cls, losses: Mapping[int, float], baseline: Mapping[int, float]) -> SeedDifference | None:
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
        variance = math.fsum((value - self.mean) ** 2 for value in self.by_seed.values()) / (number - 1)
        return t_quantile(number - 1, confidence) * math.sqrt(variance / number)

    def verdict(self, margin: float = MARGIN) -> str | None:
        """ "equivalent" where the interval at EQUIVALENCE lies within ± `margin` of the baseline's loss; else "worse" or "better"
        where that at CONFIDENCE, which is shown, lies on one side of zero, or "cannot tell". None for fewer than FEWEST_SEEDS."""
        half, whole, within = self.half_width(EQUIVALENCE), self.half_width(), margin * abs(self.baseline)
        if half is None or whole is None:
            return None
        if abs(self.mean) + half < within:
            return EQUIVALENT
        return CANNOT_TELL if abs(self.mean) <= whole else WORSE if self.mean > 0 else BETTER
