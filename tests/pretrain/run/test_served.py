"""Weights that a layout cannot hold exactly."""

from __future__ import annotations

import pytest
import torch

from pretrain.precision.quantizers import E4M3
from pretrain.precision.quantizers.blocks import quantize_mx, quantize_nvfp4
from pretrain.run.served import LAYOUTS


def test_the_reciprocal_of_nvfp4_moves_values_by_one_unit_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(512, 1024, generator=generator) * 0.12).bfloat16()
    quantized = quantize_nvfp4(weight, two_dimensional=True)
    tensors = LAYOUTS["NVFP4"].tensors(quantized)
    scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    served = (quantized.codes * scale.repeat_interleave(16, 1)).bfloat16()
    trained = quantized.dequantize().bfloat16()
    distance = (served.view(torch.int16).int() - trained.view(torch.int16).int()).abs()
    assert 0 < int(distance.count_nonzero()) < 0.06 * weight.numel()
    assert int(distance.max()) == 1


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_a_row_has_a_scale_for_each_of_its_blocks(two_dimensional: bool) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    quantized = quantize_nvfp4(weight, two_dimensional=two_dimensional)
    scales = LAYOUTS["NVFP4"].tensors(quantized)["weight_scale"]
    assert torch.equal(scales.float().repeat_interleave(16, 1), quantized.block_scale)
    quantized = quantize_mx(weight, E4M3, two_dimensional=two_dimensional)
    exponents = LAYOUTS["MXFP8"].tensors(quantized)["weight_scale"].int() - 127
    assert torch.equal(
        torch.exp2(exponents.float()).repeat_interleave(32, 1), quantized.block_scale
    )
