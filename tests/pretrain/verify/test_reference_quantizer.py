"""Parity's NumPy quantizers, which share no code with the formats, compute the same codes."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.observe.product_check import ProductCheck, token_rows
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import PRECISIONS
from pretrain.verify.reference_quantizer import compare_codes, differing_share
from tests.pretrain.conftest import active_in, call_of

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, precision in PRECISIONS.items() if precision.quantized),
    ("nvfp4", {"disable_rht": True}),
]


@st.composite
def operands(draw: st.DrawFn) -> torch.Tensor:
    """Draw BF16 [128, 256] with ties, zeros, outliers and blocks of very different magnitudes."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 2.0, 8.0]))
    values = random.standard_normal((128, 256)) * np.exp2(spread * random.standard_normal((128, 1)))
    values[random.random(values.shape) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    values *= 2.0 ** draw(st.integers(-40, 40))
    return torch.from_numpy(values).to(torch.bfloat16)


@pytest.mark.parametrize(("name", "options"), CASES)
@given(operands(), st.sampled_from(get_args(Role)), st.sampled_from(get_args(Along)))
def test_codes_of_a_format_equal_those_of_the_reference(name, options, x, role, along):
    active = active_in(name, "emulation", **options)
    scale = None
    if active.precision.keeps_history:
        scale = active.precision.grid(role).maximum / x.abs().amax().float() / 3
    assert differing_share(active, role, along, x, scale) == 0


def test_operands_that_are_not_finite_do_not_match() -> None:
    x = torch.full((128, 128), float("nan"))
    assert np.isnan(differing_share(active_in("mxfp8", "emulation"), "input", "features", x, None))


def test_a_gradient_is_sampled_although_its_last_tokens_have_no_label() -> None:
    gradient = torch.zeros(512, 128, dtype=torch.bfloat16)
    gradient[64:96] = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    assert (gradient[token_rows(gradient)] != 0).any(dim=1).sum() == 32


def test_one_operand_of_each_role_and_size_is_compared() -> None:
    active = active_in("mxfp8")
    check = ProductCheck(PrecisionContext(torch.bfloat16), active)
    for scale in (0.0, 1.0, 2.0):
        operand = scale * torch.randn(128, 128, dtype=torch.bfloat16)
        name = f"linear {scale}"
        check.operand(name, "input", lambda operand=operand: operand, call_of(name))
    compared = compare_codes(check, active)
    assert [comparison.excess for comparison in compared] == [0, 0]
    assert {comparison.name for comparison in compared} == {
        "linear 1.0 input along features",
        "linear 1.0 input along rows",
    }
