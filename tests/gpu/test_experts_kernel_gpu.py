"""The sum of a token's choices, and its gradients, by the kernel and by torch in FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.model.experts_kernel import combine, combine_backward
from tests.gpu.conftest import DEVICE, ROUNDED


def problem(tokens: int, choices: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, of which some are nobody's, where a token's lie, their weights in FP32, and the sum's gradient."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randperm(tokens * choices + 16, generator=generator)[: tokens * choices]
    rows, dy = (
        torch.randn(n, width, generator=generator).bfloat16()
        for n in (tokens * choices + 16, tokens)
    )
    weights = torch.rand(tokens, choices, generator=generator)
    return tuple(each.to(DEVICE) for each in (rows, place, weights, dy))


@pytest.mark.parametrize(("tokens", "choices", "width"), [(5, 1, 96), (17, 2, 128), (9, 8, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_choices_and_their_gradients_are_torch_s(
    dtype: torch.dtype, tokens: int, choices: int, width: int
) -> None:
    rows, place, weights, dy = problem(tokens, choices, width)
    weights = weights.to(dtype)
    exact, exact_weights = rows.double().requires_grad_(), weights.double().requires_grad_()
    expected = (exact[place].view(tokens, choices, width) * exact_weights[..., None]).sum(1)
    expected.backward(dy.double())
    y = combine(rows, place, weights, tokens)
    d_rows, d_weights = combine_backward(dy, rows, place, weights)
    assert (y.double() - expected).abs().le(ROUNDED * expected.abs() + 1e-5).all()
    assert (
        (d_rows[place].double() - exact.grad[place])
        .abs()
        .le(ROUNDED * exact.grad[place].abs() + 1e-9)
        .all()
    )
    torch.testing.assert_close(d_weights.double(), exact_weights.grad, rtol=1e-4, atol=1e-4)
    alone = combine(rows, place, None, tokens)
    assert (
        (alone.double() - rows.double()[place].view(tokens, choices, width).sum(1))
        .abs()
        .le(ROUNDED * 8)
        .all()
    )
