"""NVFP4: E2M1 codes under an E4M3 scale for every 16 values, under one FP32 scale for the tensor.

The tensor scale brings the largest block scale to E4M3's maximum; a code is relative to its block scale as that was rounded.

The steps and their order are those of Transformer Engine's NVFP4QuantizerRef: algebraically equal formulas pick another code for
a visible share of the values. A NaN or an infinity makes the tensor scale, and with it the product, NaN or infinite.
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

    The operand has at most 6 significant bits, exact in BF16. The tensor scale is amax / 2688.
    """
    amax = (x.abs().amax() if amax is None else amax).float()
    blocks = Blocks.of(x, BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    block_amax = split.abs().amax(dim=blocks.within, keepdim=True).float()

    tensor_encode = scale_from_amax(amax, MAXIMUM)
    wanted = (block_amax * (tensor_encode * (1.0 / E2M1.maximum))).clamp(max=FP32_MAX)
    block_scale = round_to_grid(wanted, E4M3)  # zero for a block far below the tensor's amax, whose codes are worth nothing
    # At most FP32's largest number instead of infinity, so that at least zeros are encoded to zeros.
    encode_scale = decode_scale(block_scale * decode_scale(tensor_encode)).clamp(max=FP32_MAX)

    scaled = split.float() * encode_scale
    scaled = torch.where(scaled == 0, 0.0, scaled)  # -0.0 becomes 0.0, while what rounds to zero keeps its sign
    return blocks.quantized(scaled, block_scale, E2M1, uniform, tensor_scale=(amax.double() / MAXIMUM).float())
