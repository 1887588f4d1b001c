"""Compare Muon's Newton-Schulz steps on a GPU with steps in FP64.

The tests also run on a CPU, under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pretrain.optimizer.muon import COEFFICIENTS, MatrixWeight, orthogonalize
from pretrain.optimizer.muon_kernel import newton_schulz
from tests.gpu.conftest import DEVICE, relative_error


def in_fp64(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("shape", [(2, 320, 256), (1, 512, 512)])
def test_two_steps_at_once_are_more_accurate_than_bf16(
    shape: tuple[int, ...], columns_first: bool
) -> None:
    """Singular values fall like 1 / n, and a step of BF16 has an error of 1 to 2 %."""
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    matrices = left * torch.arange(1, shape[-1] + 1) ** -1.0 @ right
    x = (matrices / matrices.norm(dim=(-2, -1), keepdim=True)).half().to(DEVICE)
    if columns_first:
        x = x.mT.contiguous().mT
    result = newton_schulz(x, COEFFICIENTS)
    assert result.stride() == x.stride()
    assert relative_error(result, in_fp64(x.double())) < 0.005


@pytest.mark.parametrize("parameters", [1, 2])
def test_stacked_matrices_of_gpt2_are_orthogonalized(
    parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of one parameter has interleaved matrices."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    item = MatrixWeight(nn.Parameter(torch.empty(768, 2304)), -2, stacked=3)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(parameters, 768, 2304, generator=generator).bfloat16().to(DEVICE)
    matrices = item.split(directions)
    result = orthogonalize(matrices)
    exact = matrices.double()
    exact /= exact.norm(dim=(-2, -1), keepdim=True)
    assert relative_error(result, in_fp64(exact.mT).mT) < 0.02
