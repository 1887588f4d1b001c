"""Several linears as one matrix: what is read from it, what its gradient is split into, and where that adds up."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pretrain.model.fused.arithmetic import Arithmetic, StackedLinear
from pretrain.model.gradients import attach_main_gradients
from pretrain.precision.product import PrecisionContext

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def stacks(
    draw: st.DrawFn,
    dtypes: st.SearchStrategy[torch.dtype] = DTYPES,
    compute_dtype: torch.dtype = torch.float32,
) -> StackedLinear:
    """One linear to four of widths of their own, with or without biases."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    columns, dtype, bias = draw(st.integers(1, 9)), draw(dtypes), draw(st.booleans())
    linears = [
        nn.Linear(columns, rows, bias=bias)
        for rows in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ]
    named = {str(index): linear.to(dtype) for index, linear in enumerate(linears)}
    return StackedLinear("all", named, Arithmetic(PrecisionContext(None, compute_dtype)))


@given(DTYPES.flatmap(lambda dtype: stacks(compute_dtype=dtype)))
def test_the_matrix_holds_the_rows_of_each_linear_in_order_wherever_they_lie(
    stack: StackedLinear,
) -> None:
    dtype, stored = stack.context.compute_dtype, stack.weights[0].dtype
    parameters = [*stack.weights, *stack.biases]
    expected, before = (
        torch.cat([weight.detach() for weight in stack.weights]),
        [p.detach().clone() for p in parameters],
    )
    apart = stack.matrix()
    stack.lay_together()
    for matrix in (apart, stack.matrix()):
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
def test_products_write_through_to_main_gradients_that_lie_as_the_weights_do(
    stack: StackedLinear, main: torch.dtype, microbatches: list[int]
) -> None:
    stack.lay_together()
    before, columns = nn.Linear(3, 3), stack.linears[0].in_features
    attach_main_gradients(
        nn.ModuleList([before, *stack.linears]), main, [[before.weight], stack.weights]
    )
    assert stack.main_gradient.data_ptr() == stack.weights[0].main_grad.data_ptr()
    expected = torch.zeros(stack.main_gradient.shape)
    for tokens in microbatches:
        x, dy = torch.randn(tokens, columns), torch.randn(tokens, len(expected))
        assert stack.start(x).weight_gradients(dy, x) == [None] * len(stack.weights)
        expected += dy.t() @ x
    close = {"rtol": 1e-5, "atol": 1e-5} if main == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    for weight, wanted in zip(stack.weights, split(stack, expected), strict=True):
        torch.testing.assert_close(weight.main_grad.float(), wanted, **close)


@given(stacks(st.just(torch.float32)), st.booleans())
def test_gradients_that_do_not_lie_together_are_returned_to_autograd(
    stack: StackedLinear, attached: bool
) -> None:
    """As over several processes, and where nobody said which parameters are stacked."""
    if attached:
        attach_main_gradients(nn.ModuleList(stack.linears), torch.float32)
    x, dy = (
        torch.randn(2, stack.linears[0].in_features),
        torch.randn(2, sum(map(len, stack.weights))),
    )
    returned, wanted = stack.start(x).weight_gradients(dy, x), split(stack, dy.t() @ x)
    for weight, gradient, expected in zip(stack.weights, returned, wanted, strict=True):
        assert attached or gradient is not None
        torch.testing.assert_close(weight.main_grad if gradient is None else gradient, expected)
