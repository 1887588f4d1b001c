"""Several linears as one matrix: what is read from it, what its gradient is split into, and where that adds up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.stacked import StackedProduct, StackedWeight
from pretrain.model.gradients import attach_main_gradients
from pretrain.precision.product import PrecisionContext

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def stacks(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = DTYPES) -> StackedWeight:
    """One linear to four of widths of their own, with or without biases."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    columns, dtype = draw(st.integers(1, 9)), draw(dtypes)
    bias = draw(st.booleans())
    linears = [nn.Linear(columns, rows, bias=bias) for rows in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))]
    return StackedWeight([linear.to(dtype) for linear in linears])


def rows_of(stack: StackedWeight) -> Tensor:
    """The matrix, written out."""
    return torch.cat([weight.detach() for weight in stack.weights])


def address(tensors: Sequence[Tensor]) -> list[int]:
    """How far each begins after the first, in values."""
    return [(tensor.data_ptr() - tensors[0].data_ptr()) // tensors[0].element_size() for tensor in tensors]


@given(stacks(), DTYPES)
def test_the_matrix_holds_the_rows_of_each_linear_in_order_wherever_they_lie(stack: StackedWeight, dtype: torch.dtype) -> None:
    expected, parameters, before = rows_of(stack), stack.parameters, [p.detach().clone() for p in stack.parameters]
    apart = stack.matrix(dtype)
    stack.lay_together()
    assert (stack.out_features, stack.in_features) == tuple(expected.shape)
    for matrix in (apart, stack.matrix(dtype)):
        assert matrix.dtype == dtype and matrix.is_contiguous() and not matrix.requires_grad
        assert torch.equal(matrix, expected.to(dtype))
    if stack.biases:
        assert torch.equal(stack.bias(dtype), torch.cat([bias.detach() for bias in stack.biases]).to(dtype))
    else:
        assert stack.bias(dtype) is None
    for parameter, same, value in zip(stack.parameters, parameters, before, strict=True):
        assert parameter is same and torch.equal(parameter, value)


@given(stacks(), DTYPES, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_products_write_through_to_main_gradients_that_lie_as_the_weights_do(
    stack: StackedWeight, main: torch.dtype, microbatches: list[int]
) -> None:
    stack.lay_together()
    before = nn.Linear(3, 3)
    attach_main_gradients(nn.ModuleList([before, *stack.linears]), main, [[before.weight], stack.weights])
    gradients = [weight.main_grad for weight in stack.weights]
    assert address(gradients) == address(stack.weights)
    assert stack.main_gradient.data_ptr() == gradients[0].data_ptr()
    arithmetic = Arithmetic(PrecisionContext(None, torch.float32))
    product = StackedProduct("all", ("a linear",), stack, arithmetic)
    expected = torch.zeros(stack.out_features, stack.in_features)
    for tokens in microbatches:
        x, dy = torch.randn(tokens, stack.in_features), torch.randn(tokens, stack.out_features)
        assert product.weight_gradients(dy, x) == [None] * len(stack.weights)
        expected += dy.t() @ x
    close = {"rtol": 1e-5, "atol": 1e-5} if main == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    for gradient, wanted in zip(gradients, stack.weight_gradients(expected), strict=True):
        torch.testing.assert_close(gradient.float(), wanted, **close)


@given(stacks(st.just(torch.float32)), st.booleans())
def test_gradients_that_do_not_lie_together_are_returned_to_autograd(stack: StackedWeight, attached: bool) -> None:
    """As over several processes, and where nobody said which parameters are stacked."""
    if attached:
        attach_main_gradients(nn.ModuleList(stack.linears), torch.float32)
    product = StackedProduct("all", ("a linear",), stack, Arithmetic(PrecisionContext(None, torch.float32)))
    x, dy = torch.randn(2, stack.in_features), torch.randn(2, stack.out_features)
    returned, wanted = product.weight_gradients(dy, x), stack.weight_gradients(dy.t() @ x)
    for weight, gradient, expected in zip(stack.weights, returned, wanted, strict=True):
        assert attached or gradient is not None
        torch.testing.assert_close(weight.main_grad if gradient is None else gradient, expected)
