"""Student's t, exactly: its distribution is a finite sum for whole degrees of freedom, so that no library is needed for it."""

from __future__ import annotations

import math

_HALVINGS = 64  # of an interval of quantiles: as far as a float goes


def within(t: float, freedom: int) -> float:
    """The probability that a variable with `freedom` degrees, 1 or more, lies within ±`t` (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (1.0, 1.0) if freedom % 2 == 0 else (cosine, cosine if freedom > 1 else 0.0)
    for place in range(2 + freedom % 2, freedom - 1, 2):
        term *= cosine**2 * (place - 1) / place
        total += term
    return sine * total if freedom % 2 == 0 else 2 / math.pi * (angle + sine * total)


def t_quantile(freedom: int, confidence: float) -> float:
    """Returns what a variable with `freedom` degrees stays within with the probability `confidence`, below 1: 2.776 for 4 and
    0.95."""
    low, high = 0.0, 1.0
    while within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return high
