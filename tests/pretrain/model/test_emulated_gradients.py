"""Emulated weight gradients of microbatches add up in FP32 main gradients, as in hardware."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pretrain.model.gradients import attach_main_gradients
from pretrain.model.wrapping import casting_parameters
from pretrain.precision.emulation import BothWays, EmulatedGemm, Operand
from pretrain.precision.product import LowPrecisionLinear
from tests.pretrain.conftest import QUANTIZED, context_of, emulation_of, to_nearest

TOKENS, IN, OUT, MICROBATCHES = 128, 128, 256, 8


@pytest.fixture
def wgrads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that collects the weight gradients of the actual operands, in FP64."""
    exact: list[Tensor] = []
    original = EmulatedGemm.factors

    def record(gemm: EmulatedGemm, kind: str, *operands: BothWays) -> list[Operand]:
        left, right = original(gemm, kind, *operands)
        if kind == "wgrad":
            scale = 1.0 if left.scale is None else left.scale.double() * right.scale.double()
            exact.append(left.values.double() @ right.values.double().t() * scale)
        return [left, right]

    monkeypatch.setattr(EmulatedGemm, "factors", record)
    return exact


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
# A square sum would accept a transposed product without an error.
@pytest.mark.parametrize("out", [OUT, IN])
def test_many_microbatches_add_up_to_one_sum_in_fp64(
    precision: str, weights: torch.dtype, kind: type[nn.Module], out: int, wgrads: list[Tensor]
) -> None:
    context = context_of(emulation_of(precision, **to_nearest(precision)))
    linear = (nn.Linear(IN, out, bias=False) if kind is nn.Linear else Conv1D(out, IN)).to(weights)
    low = LowPrecisionLinear(linear, "l", context)
    low.state.add(IN, out)
    layer = nn.Sequential(low)
    attach_main_gradients(layer, torch.float32)
    forward = (
        layer
        if weights == torch.bfloat16
        else casting_parameters(layer, layer.forward, torch.bfloat16)
    )
    torch.manual_seed(0)
    for index in range(MICROBATCHES):
        context.first_microbatch = index == 0
        with context.forward(training=True):
            y = forward(torch.randn(TOKENS, IN).bfloat16())
        y.backward(torch.randn_like(y) + 0.5)
    assert len(wgrads) == MICROBATCHES
    expected = torch.stack(wgrads).sum(0)
    total = linear.weight.main_grad if kind is nn.Linear else linear.weight.main_grad.t()
    # If every sum were rounded to BF16, the error would be 2e-3.
    assert (total.double() - expected).norm() < 1e-6 * expected.norm()
    assert linear.weight.grad is None
