"""Compare the kernel that sums the choices of a token, and its gradients, with torch in FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.model.experts_kernel import combine, combine_backward
from tests.gpu.conftest import DEVICE, ROUNDED


def problem(tokens: int, choices: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return BF16 rows, each choice's row, the choices' FP32 weights and the sum's gradient.

    16 of the rows belong to no token.
    """
    generator = torch.Generator().manual_seed(0)
    place = torch.randperm(tokens * choices + 16, generator=generator)[: tokens * choices]
    rows, dy = (
        torch.randn(n, width, generator=generator).bfloat16()
        for n in (tokens * choices + 16, tokens)
    )
    weights = torch.rand(tokens, choices, generator=generator)
    return tuple(tensor.to(DEVICE) for tensor in (rows, place, weights, dy))


@pytest.mark.parametrize(("tokens", "choices", "width"), [(5, 1, 96), (17, 2, 128), (9, 8, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_choices_and_their_gradients_equal_torchs(
    dtype: torch.dtype, tokens: int, choices: int, width: int
) -> None:
    rows, place, weights, dy = problem(tokens, choices, width)
    weights = weights.to(dtype)
    exact = rows.double().requires_grad_()
    exact_weights = weights.double().requires_grad_()
    expected = (exact[place].view(tokens, choices, width) * exact_weights[..., None]).sum(1)
    expected.backward(dy.double())
    y = combine(rows, place, weights, tokens)
    d_rows, d_weights = combine_backward(dy, rows, place, weights)
    assert (y.double() - expected).abs().le(ROUNDED * expected.abs() + 1e-5).all()
    expected_rows = exact.grad[place]
    row_errors = (d_rows[place].double() - expected_rows).abs()
    assert row_errors.le(ROUNDED * expected_rows.abs() + 1e-9).all()
    torch.testing.assert_close(d_weights.double(), exact_weights.grad, rtol=1e-4, atol=1e-4)
    unweighted = combine(rows, place, None, tokens)
    expected_sum = rows.double()[place].view(tokens, choices, width).sum(1)
    assert (unweighted.double() - expected_sum).abs().le(ROUNDED * 8).all()
