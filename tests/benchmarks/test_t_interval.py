"""Student's t intervals of the studies in benchmarks/evidence."""

from __future__ import annotations

import math

import pytest

from benchmarks.evidence.t_interval import t_half_width, t_probability, t_quantile
from pretrain.compare.differences import Sample


def test_quantiles_equal_published_tables():
    """For example NIST's handbook, section 1.3.6.7.2."""
    arguments = ((1, 0.95), (4, 0.90), (9, 0.99), (100, 0.95))
    quantiles = [t_quantile(freedom, confidence) for freedom, confidence in arguments]
    assert quantiles == pytest.approx([12.706, 2.132, 3.250, 1.984], abs=6e-4)
    confidences = [
        t_probability(quantile, freedom)
        for quantile, (freedom, _) in zip(quantiles, arguments, strict=True)
    ]
    assert confidences == pytest.approx([0.95, 0.90, 0.99, 0.95], abs=1e-12)
    # With 1 degree of freedom, the probability is 2 / pi * atan(t).
    assert 1 - t_probability(1e8, 1) == pytest.approx(2 / math.pi / 1e8, rel=1e-6)
    assert t_probability(math.inf, 3) == 1


def test_the_interval_of_three_seeds():
    half = t_half_width(Sample({1: -0.001, 2: 0.0, 3: 0.001}))
    assert half == pytest.approx(4.303 * 0.001 / math.sqrt(3), abs=1e-6)
    assert t_half_width(Sample({1: 0.01, 2: 0.01})) is None
