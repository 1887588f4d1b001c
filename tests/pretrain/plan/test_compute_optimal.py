"""The published fits against what their papers say follows from them, and against minima found by looking."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.plan.compute_optimal import BESIROGLU, FITS, HOFFMANN, Fit, beyond_the_fits

# Hoffmann et al. 2022, table A3, approach 3: parameters, FLOP, tokens.
TABLE_A3 = [(400e6, 2.21e19, 9.2e9), (1e9, 1.62e20, 27.1e9), (10e9, 2.46e22, 410.1e9), (67e9, 1.71e24, 4.1e12)]


@pytest.mark.parametrize(("parameters", "flops", "tokens"), TABLE_A3)
def test_the_first_fit_divides_compute_as_its_papers_own_table(parameters, flops, tokens):
    assert HOFFMANN.best_for_compute(flops) == pytest.approx((parameters, tokens), rel=0.06)
    assert HOFFMANN.best_tokens(parameters) == pytest.approx(tokens, rel=0.11)


def test_the_refit_divides_compute_as_its_paper_says():
    """Besiroglu et al. 2024: N grows with the power 0.512 of compute; at Chinchilla's, about 20 tokens a parameter."""
    (small, _), (large, _) = (BESIROGLU.best_for_compute(flops) for flops in (1e20, 1e22))
    assert np.log10(large / small) / 2 == pytest.approx(0.512, abs=0.001)
    parameters, tokens = BESIROGLU.best_for_compute(5.76e23)
    assert tokens / parameters == pytest.approx(20, rel=0.1)


@given(st.sampled_from(FITS), st.floats(1e15, 1e27))
def test_no_other_division_of_a_budget_has_a_lower_loss(fit: Fit, flops: float):
    parameters, tokens = fit.best_for_compute(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    others = parameters * np.geomspace(0.1, 10, 200)
    assert fit.loss(parameters, tokens) <= fit.loss(others, flops / 6 / others).min()
    assert fit.best_tokens(parameters) == pytest.approx(tokens)


def test_what_lies_outside_the_fitted_runs_is_named():
    assert list(beyond_the_fits(1e9, 20e9)) == []
    assert [text.partition(" the")[0] for text in beyond_the_fits(4e6, 1e12)] == ["parameters below", "tokens above"]
