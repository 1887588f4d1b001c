"""Student's t intervals for a number of seeds that was fixed before the first result.

The studies of this folder planned their seeds. `python -m pretrain which` adds seeds one by one, so
its intervals are wider (pretrain/compare/differences.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache

import mpmath

from pretrain.compare.differences import CONFIDENCE, FEWEST_SEEDS, Sample

# Resolution of the quantiles of Student's t.
STEP = 2.0**-40


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
        range(2**62), confidence, key=lambda steps: t_probability(STEP * steps, freedom)
    )
    return STEP * steps


def t_half_width(sample: Sample) -> float | None:
    """Return the half-width of the mean's interval, or None for fewer than FEWEST_SEEDS seeds."""
    number = len(sample.by_seed)
    if number < FEWEST_SEEDS:
        return None
    return t_quantile(number - 1, CONFIDENCE) * math.sqrt(sample.variance / number)
