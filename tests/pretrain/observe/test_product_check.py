"""The comparison of products accepts correct stochastic rounding, and finds wrong errors."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.model.loss.fp8_head import HeadPass
from pretrain.observe.history_check import delayed_scaling
from pretrain.observe.product_check import DRAWS, ROWS, SIGMAS, ProductCheck, judge_product
from pretrain.precision.emulation import EmulationEngine
from pretrain.precision.product import LinearPass
from pretrain.precision.quantizers.tensor import quantize_by_amax, update_scale
from tests.pretrain.conftest import active_in, context_of

FEATURES = 64
SEEDS = 60


@cache
def errors_of_draws(precision: str, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return an exact product [128, 32], and the errors of 1 + DRAWS draws.

    The norms of the gradient's rows are lognormal. With a spread of 3, a few rows have almost the
    complete norm. The weights have rank 2, so each row of an error has few independent values.
    """
    torch.manual_seed(seed)
    quantized = active_in(precision).quantized_precision
    gradient = torch.randn(128, FEATURES) * (spread * torch.randn(128, 1)).exp()
    weight = torch.randn(32, 2) @ torch.randn(2, FEATURES)
    rounded_weight = quantized.along_features("weight")(weight, None, None).dequantize()
    quantize = quantized.along_features("grad_output")
    exact = gradient @ weight.t()
    draws = [quantize(gradient, None, None).dequantize() for _ in range(1 + DRAWS)]
    return exact, torch.stack([draw @ rounded_weight.t() - exact for draw in draws])


def small_errors_of_draws(precision: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return an exact product and the errors of draws, as `errors_of_draws`.

    All summands of a product have the same sign, so that errors are less than 1 % of the product.
    """
    torch.manual_seed(seed)
    quantize = active_in(precision).quantized_precision.along_features("grad_output")
    gradient = (1 + 0.3 * torch.randn(128, 1024)) * (3 * torch.randn(128, 1)).exp()
    weight = 1 + 0.3 * torch.randn(32, 1024)
    exact = gradient @ weight.t()
    draws = [quantize(gradient, None, gradient.max()).dequantize() for _ in range(1 + DRAWS)]
    return exact, torch.stack([draw @ weight.t() - exact for draw in draws])


def excess(exact: Tensor, errors: Tensor) -> float:
    """Return the excess of the first error."""
    error, *plain = errors
    return judge_product("product", exact, error, plain, torch.zeros(())).excess


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_correct_errors_in_few_rows_pass(precision: str, spread: float) -> None:
    """The norms of two correct errors differ by more than 20 %, if a few rows are large."""
    drawn = [errors_of_draws(precision, spread, seed) for seed in range(SEEDS)]
    assert max(excess(exact, errors) for exact, errors in drawn) < 0.5
    if spread == 3.0:
        norms = torch.stack([errors.square().sum((1, 2)).sqrt() for _, errors in drawn])
        assert (norms[:, 0] > 1.2 * norms[:, 1:].amax(1)).any()


@pytest.mark.parametrize(
    "change",
    [
        lambda error: 1.4 * error,
        lambda error: error / 1.4,
        lambda error: -error,
        lambda error: error.roll(1, 1),
    ],
    ids=["too large", "too small", "wrong direction", "wrong columns"],
)
@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_wrong_errors_in_few_rows_are_found(precision, change):
    for seed in range(SEEDS // 3):
        exact, errors = errors_of_draws(precision, 3.0, seed)
        assert excess(exact, torch.stack([change(errors[0]), *errors[1:]])) > 1


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_small_errors_in_few_rows_pass_unless_they_are_too_large(precision: str) -> None:
    for seed in range(SEEDS // 3):
        exact, errors = small_errors_of_draws(precision, seed)
        assert excess(exact, errors) < 0.5
        assert excess(exact, torch.stack([8 * errors[0], *errors[1:]])) > 1


def test_an_error_that_is_not_a_number_is_found() -> None:
    exact, errors = errors_of_draws("nvfp4", 0.0, 0)
    assert excess(exact, torch.stack([errors[0] * torch.nan, *errors[1:]])) == torch.inf


def test_correct_rounding_rarely_deviates_by_more_than_the_limit() -> None:
    """In the most skewed rows, one of the draws has another value than all others."""
    share = 1 / (1 + DRAWS)
    for rows in range(1, ROWS + 1):
        spread = math.sqrt(rows * share * (1 - share))
        least = math.floor(rows * share + SIGMAS * spread) + 1
        probability = sum(
            math.comb(rows, count) * share**count * (1 - share) ** (rows - count)
            for count in range(least, rows + 1)
        )
        assert probability < 1e-7
        assert bool(probability) == (rows > 12)


AMAX = st.sampled_from([0.0, 1e-45, 1e-30, 3e38]) | st.floats(2.0**-60, 2.0**60, width=32)


@given(
    st.lists(st.tuples(AMAX, AMAX), max_size=5),
    st.tuples(*[AMAX.filter(bool)] * 2),
    st.integers(0, 3),
    st.sampled_from(["max", "most_recent"]),
)
def test_the_expected_state_of_delayed_scaling_equals_the_update(past, newest, margin, algorithm):
    active = active_in("delayed", amax_compute_algo=algorithm, margin=margin)
    scale = torch.tensor([3.0, 5.0])
    before, after = (torch.tensor([row, *past]) for row in ((0.0, 0.0), newest))
    history, following = delayed_scaling(before, after[0], scale, 448.0, active.settings)
    expected = update_scale(after, scale, 448.0, margin, algorithm)
    assert torch.equal(history, expected[0])
    torch.testing.assert_close(following, expected[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("pass_of_head", [HeadPass, LinearPass])
def test_a_head_that_is_sure_of_many_tokens_passes_with_row_scales(
    pass_of_head: type[LinearPass],
) -> None:
    """In rows of sure tokens, the gradient is small. One scale for all rows would round more."""
    torch.manual_seed(0)
    logits = 4 * torch.randn(512, 4096)
    probabilities = logits.softmax(-1)
    gradient = probabilities.clone()
    gradient.scatter_add_(1, probabilities.multinomial(1), -torch.ones(512, 1))
    weight = 0.02 * torch.randn(4096, 256)

    active = active_in("current")
    precision = active.quantized_precision
    engine = EmulationEngine(active, torch.device("cpu"))
    context = context_of(engine)
    check = ProductCheck(context, active)
    head = pass_of_head(engine.gemm("lm_head", 256, 4096), context, differentiable=True)
    check.operand("lm_head", "weight", lambda: weight, head)
    check.operand("lm_head", "grad_output", lambda: gradient, head)
    rows = [quantize_by_amax(row, None, precision.grid("grad_output")) for row in gradient.split(1)]
    codes = precision.along_features("weight")(weight, None, weight.abs().max())
    result = torch.cat([row.dequantize() for row in rows]) @ codes.dequantize()
    check.result("lm_head", "dgrad", result, None, head)
    (compared,) = check.compared()
    assert (compared.excess < 1) == (pass_of_head is HeadPass)
