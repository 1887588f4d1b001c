"""Codes of any grid under one power of two for every 32 values (OCP Microscaling Formats v1.0, section 5.2).

A block's scale is an E8M0 byte: a biased exponent and nothing else, from 2^-127 to 2^127. Transformer Engine's rule chooses it:
the smallest power of two that brings the block's amax within the grid, so that nothing saturates. What counts is the FP32 product
of amax with the rounded reciprocal of the grid's maximum, not their quotient. (The exponent of amax less that of the grid's
maximum, which the OCP specification suggests, saturates an amax whose mantissa is above the maximum's. That can make training
diverge: Mishra et al., arXiv:2506.08027.)

At the limits too this is Transformer Engine's conversion: zeros get the smallest scale and stay zeros, an infinity gets 2^127 and
saturates there to an operand that is infinite again; a NaN stays NaN and does not count for its block's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.precision.quantizers.blocks import BlockQuantized, Blocks
from pretrain.precision.quantizers.grid import Grid
from pretrain.precision.quantizers.rounding import FP32_MANTISSA_BITS
from pretrain.precision.quantizers.tensor import absolute_maximum

BLOCK = 32
SMALLEST, LARGEST = 0, 254  # E8M0 bytes: 2^-127 and 2^127; 255 is not a number
HALF_OF_SMALLEST_NORMAL = 1 << (FP32_MANTISSA_BITS - 1)  # bits of 2^-127, which FP32 holds only as a subnormal


def quantize(x: Tensor, grid: Grid, *, uniform: Tensor | None = None) -> BlockQuantized:
    """x [..., n], any float dtype and strides, in blocks of 32 along the last dimension.

    Codes are rounded to nearest even, or stochastically by `uniform`, FP32 in [0, 1) and of x's
    shape. Raises RuntimeError where that dimension is no multiple of 32. `operand` is exact in FP32 and BF16 except where a
    block's amax is below 2^-100 or rounds up to 2^128: there a code times its scale leaves the exponents that BF16 has.
    """
    blocks = Blocks.of(x, BLOCK, two_dimensional=False)
    split = blocks.split(x)
    amax = absolute_maximum(split, blocks.within, keepdim=True)
    exponent = rceil_exponent(amax, grid)
    return blocks.quantized(split.float() * _power_of_two(LARGEST - exponent), _power_of_two(exponent), grid, uniform)


def rceil_exponent(amax: Tensor, grid: Grid) -> Tensor:
    """FP32 amax >= 0 to E8M0, int32, by Transformer Engine's rule (`float_to_e8m0` in its common/util/ptx.cuh)."""
    bits = (amax * (1.0 / grid.maximum)).view(torch.int32)
    exponent, mantissa = bits >> FP32_MANTISSA_BITS, bits & ((1 << FP32_MANTISSA_BITS) - 1)
    exact = torch.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, 0)  # how much of a mantissa the exponent alone stands for
    return (exponent + (mantissa > exact).int()).clamp(max=LARGEST)


def _power_of_two(biased: Tensor) -> Tensor:
    """2 ** (biased - 127), biased exponents 0..254 to FP32.

    Put together from bits: exp2 flushes 2^-127 to zero on GPUs, and a block scale of zero would lose the block.
    """
    bits = torch.where(biased == SMALLEST, HALF_OF_SMALLEST_NORMAL, biased << FP32_MANTISSA_BITS)
    return bits.view(torch.float32)
