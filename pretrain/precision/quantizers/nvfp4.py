"""NVFP4: E2M1 codes under an E4M3 scale for every 16 values, under one FP32 scale for the tensor.

Four bits hold 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. The tensor scale brings the largest block scale to E4M3's maximum,
so that block scales have all of E4M3's range to follow the blocks' amaxes; a code is then relative to its block scale as that was
rounded, not as it was wanted.

The steps and their order are those of Transformer Engine (its NVFP4QuantizerRef and core_nvfp4.cuh by default: no 4-over-6, no
powers of two, no fast math). Order matters: algebraically equal formulas pick another code for a visible share of the values.
A NaN or an infinity makes the tensor scale NaN or infinite, and with it the product: so in the reference, while the kernels would
turn a NaN into the code 6 and hide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.precision.quantizers.blocks import BlockQuantized, Blocks
from pretrain.precision.quantizers.grid import E2M1, E4M3
from pretrain.precision.quantizers.rounding import round_to_grid
from pretrain.precision.quantizers.tensor import FP32_MAX, decode_scale, scale_from_amax

BLOCK = 16
MAXIMUM = E2M1.maximum * E4M3.maximum  # the largest code times the largest block scale


def quantize(x: Tensor, *, two_dimensional: bool, uniform: Tensor | None = None, amax: Tensor | None = None) -> BlockQuantized:
    """x [..., n], any float dtype and strides, in blocks of 16 along the last dimension, or of 16x16 over the last two.

    Rounds to nearest even, or stochastically by `uniform`, FP32 in [0, 1) and of x's shape. `amax` is the tensor's largest
    magnitude, a scalar, where it is known already. Raises RuntimeError where a blocked dimension is no multiple of 16.

    The operand has at most 6 significant bits, exact in BF16. The tensor scale is amax / 2688; that of a product in Transformer
    Engine is (amax * amax) / 2688^2, which may differ from the product of two such by an ulp or two of FP32.
    """
    amax = (x.abs().amax() if amax is None else amax).float()
    blocks = Blocks.of(x, BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    block_amax = split.abs().amax(dim=blocks.within, keepdim=True).float()
    block_scale, encode_scale = block_scales(block_amax, amax)

    scaled = split.float() * encode_scale
    scaled = torch.where(scaled == 0, 0.0, scaled)  # -0.0 becomes 0.0, while what rounds to zero keeps its sign
    return blocks.quantized(scaled, block_scale, E2M1, uniform, tensor_scale=(amax.double() / MAXIMUM).float())


def block_scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """From the amaxes of blocks and of their tensor, FP32: E4M3 scales that decode, and the whole factor that encodes, both FP32.

    A block far below the tensor's amax gets the scale zero, and whatever codes it has are worth nothing. Its factor is FP32's
    largest number instead of infinity, so that at least zeros are encoded to zeros.
    """
    tensor_encode = scale_from_amax(amax, MAXIMUM)
    wanted = (block_amax * (tensor_encode * (1.0 / E2M1.maximum))).clamp(max=FP32_MAX)
    block_scale = round_to_grid(wanted, E4M3)
    encode_scale = decode_scale(block_scale * decode_scale(tensor_encode)).clamp(max=FP32_MAX)
    return block_scale, encode_scale
