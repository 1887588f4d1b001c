"""FP8 with one scale for every 128 values of a row, or for every square of 128 x 128: Transformer Engine's block scaling, and the
layout of DeepSeek-V3's training (arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision.quantizers.blocks import Blocks
from pretrain.precision.quantizers.grid import Grid, Quantized
from pretrain.precision.quantizers.tensor import absolute_maximum, decode_scale, scale_from_amax

BLOCK = 128


def quantize(x: Tensor, grid: Grid, *, two_dimensional: bool) -> Quantized:
    """x [rows, columns] of any float dtype and stride, in blocks of 1 x 128 along the last dimension, or of 128 x 128.

    Each block's scale is that of current scaling, from the block's own amax, rounded down to a power of two. At edges that 128
    does not divide, a block has the values that are left. A block of values so tiny that its scale would overflow takes the
    largest value of x's own dtype for it (compute_scale_from_types in TE's common/recipe/recipe_common.cuh).
    """
    missing = (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % (BLOCK if two_dimensional else 1))
    padded = F.pad(x, missing) if any(missing) else x  # with zeros, which no amax sees
    blocks = Blocks.of(padded, BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(padded)
    amax, overflow = absolute_maximum(split, blocks.within, keepdim=True), torch.finfo(x.dtype).max
    scale = scale_from_amax(amax, grid.maximum, power_of_two=True, overflow=overflow)
    quantized = blocks.quantized(split.float() * scale, decode_scale(scale), grid)
    if padded is x:
        return quantized
    inside = tuple(slice(size) for size in x.shape)
    return Quantized(quantized.codes[inside], quantized.block_scale[inside], quantized.tensor_scale, grid)
