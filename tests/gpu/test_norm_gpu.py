"""Compare RMSNorm's kernels with the formula in FP64, for several widths and token counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.model.fused.norm_kernel import rms_norm, rms_norm_backward
from tests.gpu.conftest import DEVICE, INTERPRETED, ROUNDED

EPS = 1e-6
TOKENS = 150 if INTERPRETED else 3000


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@pytest.mark.parametrize(("tokens", "width"), [(5, 96), (64, 128), (9, 2048), (3, 5120)])
def test_norm_and_gradient_are_those_of_the_formula(tokens: int, width: int) -> None:
    x = normal(tokens, width, seed=1)
    dy = normal(tokens, width, seed=2)
    weight = 1 + normal(width, seed=3) / 4
    residual = normal(tokens, width, seed=4)
    exact = x.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    expected = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * exact_weight
    expected.backward(dy.double())
    y, rstd = rms_norm(x, weight, EPS)
    dx, weight_gradient = rms_norm_backward(dy, x, rstd, weight, residual)
    assert (y.double() - expected).abs().le(ROUNDED * expected.abs() + 1e-9).all()
    expected_dx = exact.grad + residual.double()
    assert (dx.double() - expected_dx).abs().le(ROUNDED * expected_dx.abs() + 1e-5).all()
    assert (weight_gradient.double() - exact_weight.grad).norm() < 1e-5 * exact_weight.grad.norm()


def test_backward_repeats_its_bits() -> None:
    x = normal(TOKENS, 64, seed=1)
    dy = normal(TOKENS, 64, seed=2)
    weight = normal(64, seed=3)
    _, rstd = rms_norm(x, weight, EPS)
    first, second = (rms_norm_backward(dy, x, rstd, weight, x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
