"""What several seeds say of a difference between two losses: how large it is, how sure, whether it matters, and in tokens.

A seed changes a run's initialization and the order of its text. Runs of one seed are a pair, so that what the seed does to both
drops out; the pairs' differences are the sample. Nothing here knows of runs: losses come by seed, in nats a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95  # of every interval that is shown
FEWEST_SEEDS = 3  # for an interval: that of two is nearly four times as wide as that of three
MARGIN = 0.003  # of the baseline's loss, within which a difference counts as none
EQUIVALENCE = 0.90  # the interval of two one-sided tests at 5 % each
FEWEST_EVALUATIONS = 3  # of a run, for a slope
SLOPE_SHARE = 0.5  # of the tokens before the decay, the last ones, over which the slope is taken
_MOST_EXPONENT = 700.0  # of e, that a float holds
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

    @property
    def root_mean_square(self) -> float:
        """The root mean square of the single differences: of a repeated baseline, the floor below which nothing is seen."""
        return math.sqrt(math.fsum(value**2 for value in self.by_seed.values()) / len(self.by_seed))

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


@dataclass(frozen=True)
class TokenSlope:
    """Says how fast the baseline's held-out loss fell before its rate decayed: d loss / d ln tokens in nats, below zero.

    It comes from least squares of the loss on the logarithm of the tokens, one slope for all seeds and a level for each. It is
    taken as it is: intervals of what is computed with it leave out how well it is known itself.
    """

    nats: float
    first: float  # tokens of the earliest evaluation that it is taken from
    last: float

    @classmethod
    def before(
        cls, decay: float, curves: Sequence[tuple[Sequence[float], Sequence[float]]], warm: float = 0.0
    ) -> TokenSlope | None:
        """Returns the slope of `curves` of (tokens, losses), one a seed, from SLOPE_SHARE of the tokens `decay` up to these, but
        not before `warm`, the tokens of the warm-up. None where no curve has FEWEST_EVALUATIONS there, or the loss did not
        fall."""
        at, losses, used, begin = [], [], [], max(SLOPE_SHARE * decay, warm)
        for tokens, values in (map(np.asarray, curve) for curve in curves):
            chosen = (tokens >= begin) & (tokens <= decay) & np.isfinite(values.astype(float))
            if chosen.sum() >= FEWEST_EVALUATIONS:
                logarithms, fitted = np.log(tokens[chosen]), values[chosen].astype(float)
                at.append(logarithms - logarithms.mean())
                losses.append(fitted - fitted.mean())
                used += tokens[chosen].tolist()
        if not at:
            return None
        x, y = np.concatenate(at), np.concatenate(losses)
        nats = float(x @ y / (x @ x))
        return cls(nats, min(used), max(used)) if nats < 0 else None

    def tokens(self, difference: float) -> float:
        """The tokens that the baseline would have needed to end `difference` nats higher, over those that it had, minus 1: −0.05
        says 5 % fewer."""
        exponent = difference / self.nats
        return math.expm1(exponent) if exponent < _MOST_EXPONENT else math.inf

    def at_equal_time(self, difference: float, speedup: float) -> float:
        """The difference in nats after equal time: one `speedup` times as fast as the baseline sees as many more tokens."""
        return difference + self.nats * math.log(speedup)
