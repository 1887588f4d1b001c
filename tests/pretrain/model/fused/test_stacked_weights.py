"""Several linears stacked as one matrix: its rows, its gradients and their sums."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pretrain.model.fused.arithmetic import StackedLinear, StackedPass
from pretrain.model.gradients import attach_main_gradients
from pretrain.precision.product import PrecisionContext

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def stacks(
    draw: st.DrawFn,
    dtypes: st.SearchStrategy[torch.dtype] = DTYPES,
    compute_dtype: torch.dtype = torch.float32,
) -> StackedLinear:
    """Draw one to four linears of different widths, with or without biases."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    columns = draw(st.integers(1, 9))
    dtype = draw(dtypes)
    bias = draw(st.booleans())
    linears = [
        nn.Linear(columns, rows, bias=bias)
        for rows in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ]
    named = {str(index): linear.to(dtype) for index, linear in enumerate(linears)}
    return StackedLinear("all", named, PrecisionContext(compute_dtype))


@given(DTYPES.flatmap(lambda dtype: stacks(compute_dtype=dtype)))
def test_the_matrix_has_the_rows_of_all_linears_in_order(
    stack: StackedLinear,
) -> None:
    dtype = stack.context.compute_dtype
    stored = stack.weights[0].dtype
    parameters = [*stack.weights, *stack.biases]
    expected = torch.cat([weight.detach() for weight in stack.weights])
    before = [p.detach().clone() for p in parameters]
    separate = stack.matrix()
    stack.lay_together()
    for matrix in (separate, stack.matrix()):
        assert matrix.dtype == dtype and matrix.is_contiguous() and not matrix.requires_grad
        assert torch.equal(matrix, expected.to(dtype))
    assert (stack.matrix().data_ptr() == stack.weights[0].data_ptr()) == (dtype == stored)
    for parameter, same, value in zip(
        [*stack.weights, *stack.biases], parameters, before, strict=True
    ):
        assert parameter is same and torch.equal(parameter, value)


def split(stack: StackedLinear, matrix: Tensor) -> list[Tensor]:
    return list(matrix.split([len(weight) for weight in stack.weights]))


@given(stacks(), DTYPES, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_products_add_to_main_gradients_that_are_stacked(
    stack: StackedLinear, main: torch.dtype, microbatches: list[int]
) -> None:
    stack.lay_together()
    before = nn.Linear(3, 3)
    columns = stack.linears[0].in_features
    attach_main_gradients(
        nn.ModuleList([before, *stack.linears]), main, [[before.weight], stack.weights]
    )
    assert stack.main_gradient.data_ptr() == stack.weights[0].main_grad.data_ptr()
    expected = torch.zeros(stack.main_gradient.shape)
    for tokens in microbatches:
        x = torch.randn(tokens, columns)
        dy = torch.randn(tokens, len(expected))
        StackedPass(stack, x, differentiable=True).add_weight_gradient(dy, x)
        expected += dy.t() @ x
    tolerances = (
        {"rtol": 1e-5, "atol": 1e-5} if main == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    )
    for weight, reference in zip(stack.weights, split(stack, expected), strict=True):
        torch.testing.assert_close(weight.main_grad.float(), reference, **tolerances)
