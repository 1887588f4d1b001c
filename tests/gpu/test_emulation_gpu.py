"""Emulated products on CUDA: compiled quantization against the CPU's, bit for bit, and sums in FP32."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from pretrain.precision.emulation import EmulationEngine, multiply
from pretrain.precision.formats.definition import Along, Role
from tests.pretrain.conftest import active_in

# without chance, nor sums of transforms
PRECISE = {"nvfp4": {"disable_stochastic_rounding": True, "disable_rht": True}}


def engine(name: str, device: str) -> EmulationEngine:
    return EmulationEngine(active_in(name, **PRECISE.get(name, {})), torch.device(device))


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_compiled_quantization_gives_the_cpus_operands_bit_for_bit(name: str) -> None:
    """Of magnitudes that differ from block to block, zeros among them."""
    torch.manual_seed(0)
    x = torch.randn(1024, 768) * torch.exp2(torch.randint(-8, 9, (1024, 768)).float())
    x = x.masked_fill(torch.rand(x.shape) < 0.1, 0).bfloat16()
    scale = torch.tensor(1.7)
    on_cpu, on_gpu = engine(name, "cpu"), engine(name, "cuda")
    for role, along in itertools.product(get_args(Role), get_args(Along)):
        expected, expected_amax = on_cpu.prepare(role, x, along, scale)
        ours, amax = on_gpu.prepare(role, x.cuda(), along, scale.cuda())
        assert ours.values.dtype == on_gpu.operand_dtype
        assert torch.equal(ours.values.float().cpu(), expected.values), (role, along)
        for one, other in ((ours.scale, expected.scale), (amax, expected_amax)):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.cpu(), other)


def test_a_product_is_summed_in_fp32_and_rounded_once() -> None:
    """A scale that BF16 does not hold, and a sum that BF16 would lose."""
    emulation = engine("current", "cuda")
    x = torch.full((64, 4096), 7.0, device="cuda").bfloat16()
    x[:, 0] = 5.0
    operand, _ = emulation.prepare("input", x, "features")
    exact = operand.values.double() @ operand.values.double().t() * operand.scale.double() ** 2
    assert torch.equal(multiply(operand, operand, torch.bfloat16), exact.bfloat16())
    torch.testing.assert_close(
        multiply(operand, operand, torch.float32).double(), exact, rtol=2**-22, atol=0
    )
    bias = torch.randn(64, device="cuda").bfloat16()
    biased = multiply(operand, operand, torch.bfloat16, bias)
    torch.testing.assert_close(biased.double(), exact + bias.double(), rtol=2**-8, atol=0)
