"""Compare norms' kernels with the formulas in FP64, for several widths and token counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.model.fused.norm_kernel import norm, norm_backward
from tests.gpu.conftest import DEVICE, INTERPRETED, ROUNDED

EPS = 1e-6
TOKENS = 150 if INTERPRETED else 3000


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(5, 96), (64, 128), (27, 768), (9, 2048), (3, 5120)])
def test_norm_and_gradient_are_those_of_the_formula(
    tokens: int, width: int, centered: bool
) -> None:
    x = normal(tokens, width, seed=1) + centered
    dy = normal(tokens, width, seed=2)
    weight = 1 + normal(width, seed=3) / 4
    residual = normal(tokens, width, seed=4)
    bias = normal(width, seed=5) if centered else None
    exact = x.double().requires_grad_()
    parameters = [weight.double().requires_grad_()]
    if bias is not None:
        parameters.append(bias.double().requires_grad_())
        expected = torch.nn.functional.layer_norm(exact, (width,), *parameters, EPS)
    else:
        expected = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * parameters[0]
    expected.backward(dy.double())
    y, rstd, mean = norm(x, weight, bias, EPS)
    dx, sums = norm_backward(dy, x, rstd, mean, weight, residual, summed=True)
    assert (y.double() - expected).abs().le(ROUNDED * expected.abs() + 1e-6).all()
    expected_dx = exact.grad + residual.double()
    assert (dx.double() - expected_dx).abs().le(ROUNDED * expected_dx.abs() + 1e-5).all()
    expected_sums = [parameter.grad for parameter in parameters]
    expected_sums += [expected_dx.sum(0), residual.double().sum(0)] if centered else []
    assert sums.dtype == torch.float32
    for total, reference in zip(sums, expected_sums, strict=True):
        assert (total.double() - reference).norm() < 1e-5 * reference.norm()
    unsummed = norm_backward(dy, x, rstd, mean, weight, residual, summed=False)
    assert torch.equal(unsummed[0], dx)
    assert torch.equal(unsummed[1], sums[: len(parameters)])


@pytest.mark.parametrize("centered", [False, True])
def test_backward_repeats_its_bits(centered: bool) -> None:
    x = normal(TOKENS, 64, seed=1)
    dy = normal(TOKENS, 64, seed=2)
    weight = normal(64, seed=3)
    _, rstd, mean = norm(x, weight, weight if centered else None, EPS)
    first, second = (norm_backward(dy, x, rstd, mean, weight, x, summed=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
