"""Test emulated GEMMs on CUDA: compiled quantization equals the CPU's bits, sums are in FP32."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from pretrain.precision.emulation import EmulationEngine, Operand, multiply
from pretrain.precision.formats.definition import Along, Role
from tests.pretrain.conftest import active_in

# Turn off stochastic rounding and the Hadamard transform, whose sums may come in another order.
PRECISE = {"nvfp4": {"disable_stochastic_rounding": True, "disable_rht": True}}


def engine(name: str, device: str) -> EmulationEngine:
    return EmulationEngine(active_in(name, **PRECISE.get(name, {})), torch.device(device))


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_compiled_quantization_gives_the_cpus_operands_bit_for_bit(name: str) -> None:
    """The values' magnitudes vary over 17 binades, and one value in ten is zero."""
    torch.manual_seed(0)
    x = torch.randn(1024, 768) * torch.exp2(torch.randint(-8, 9, (1024, 768)).float())
    x = x.masked_fill(torch.rand(x.shape) < 0.1, 0).bfloat16()
    scale = torch.tensor(1.7)
    on_cpu = engine(name, "cpu")
    on_gpu = engine(name, "cuda")
    for role, along in itertools.product(get_args(Role), get_args(Along)):
        *fields, expected_amax = on_cpu.preparation(role, along)(x, scale)
        expected = Operand(*fields)
        *fields, amax = on_gpu.preparation(role, along)(x.cuda(), scale.cuda())
        operand = Operand(*fields)
        assert operand.values.dtype == on_gpu.operand_dtype
        assert torch.equal(operand.values.float().cpu(), expected.values), (role, along)
        for actual, reference in ((operand.scale, expected.scale), (amax, expected_amax)):
            assert (actual is None) == (reference is None)
            assert actual is None or torch.equal(actual.cpu(), reference)


def test_a_gemm_is_summed_in_fp32_and_rounded_once() -> None:
    """BF16 cannot represent the scale or the sum exactly."""
    emulation = engine("current", "cuda")
    x = torch.full((64, 4096), 7.0, device="cuda").bfloat16()
    x[:, 0] = 5.0
    *fields, _ = emulation.preparation("input", "features")(x, None)
    operand = Operand(*fields)
    exact = operand.values.double() @ operand.values.double().t() * operand.scale.double() ** 2
    assert torch.equal(multiply(operand, operand, torch.bfloat16), exact.bfloat16())
    torch.testing.assert_close(
        multiply(operand, operand, torch.float32).double(), exact, rtol=2**-22, atol=0
    )
    bias = torch.randn(64, device="cuda").bfloat16()
    biased = multiply(operand, operand, torch.bfloat16, bias)
    torch.testing.assert_close(biased.double(), exact + bias.double(), rtol=2**-8, atol=0)
