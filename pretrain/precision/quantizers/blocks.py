"""Quantizers with one scale per block: FP8 in blocks of 128, the MX formats and NVFP4.

This file also contains the Hadamard transform, which FP4 formats apply before they quantize.

torch.compile compiles a quantizer to a single loop, which reads a block, computes its amax, and
writes the operand. Two loops could take twice the time on a GPU. A single loop requires two things.
First, a tensor that is split into blocks must keep the dimensions of the blocks until the last
operation, which reshapes it. Second, the last dimension of a transposed tensor must not be split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.precision.quantizers import E2M1, E4M3, Grid, Quantized
from pretrain.precision.quantizers.tensor import (
    FP32_MANTISSA_BITS,
    FP32_MAX,
    absolute_maximum,
    decode_scale,
    round_stochastically,
    round_to_grid,
    scale_from_amax,
)

# The number of values along the contraction dimension that share a scale.
FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK = 128, 32, 16
# The number of values that one Hadamard transform mixes.
HADAMARD_BLOCK = 16
# The E8M0 bytes of the scales 2^-127 and 2^127. The byte 255 is NaN.
SMALLEST, LARGEST = 0, 254
# The bits of 2^-127 in FP32. It is a subnormal, half of the smallest normal value.
HALF_OF_SMALLEST_NORMAL = 1 << (FP32_MANTISSA_BITS - 1)
# Transformer Engine multiplies a block of values by these signs before the Hadamard transform. Bit
# i is set if the sign of value i is negative: + + + - + - - - - - - + - + - -
NEGATIVE = 0b1101_0111_1110_1000


@dataclass(frozen=True)
class Blocks:
    """The division of a tensor [..., m, n] into blocks.

    size: the number of values of a block along the last dimension, n.
    two_dimensional: True if blocks are squares, which also have `size` values along m.
    transposed: True if the tensor is the transpose of a contiguous tensor.

    A split tensor is [..., m, n / size, size]. It is [..., n / size, size, m] if `transposed`, and
    [..., m / size, size, n / size, size] if `two_dimensional`. If both are set, the transpose of
    the tensor is split into squares.
    """

    size: int
    two_dimensional: bool
    transposed: bool

    @classmethod
    def of(cls, x: Tensor, size: int, *, two_dimensional: bool) -> Blocks:
        """Return the blocks of x. If its last dimension is strided, x counts as transposed."""
        return cls(size, two_dimensional, transposed=x.dim() > 1 and x.stride(-1) != 1)

    @property
    def within(self) -> tuple[int, ...]:
        """The dimensions of a split tensor that lie inside of a block.

        A reduction over them with keepdim returns one value per block.
        """
        if self.two_dimensional:
            return -3, -1
        return (-2,) if self.transposed else (-1,)

    def split(self, x: Tensor) -> Tensor:
        """Return a view of x that is split into blocks.

        Raise RuntimeError if a dimension to be split is not a multiple of `size`.
        """
        rows = x.mT if self.transposed else x
        if self.two_dimensional:
            return rows.unflatten(-1, (-1, self.size)).unflatten(-3, (-1, self.size))
        return rows.unflatten(self.within[0], (-1, self.size))

    def join(self, split: Tensor) -> Tensor:
        """Return the tensor [..., m, n] for a tensor that `split` has split into blocks."""
        if self.two_dimensional:
            rows = split.flatten(-2).flatten(-3, -2)  # [m / size, size, n / size, size] -> [m, n]
        elif self.transposed:
            rows = split.flatten(-3, -2)  # [n / size, size, m] -> [n, m]
        else:
            rows = split.flatten(-2)  # [m, n / size, size] -> [m, n]
        return rows.mT if self.transposed else rows

    def quantized(
        self,
        scaled: Tensor,
        scale: Tensor,
        grid: Grid,
        uniform: Tensor | None = None,
        tensor_scale: Tensor | None = None,
    ) -> BlockQuantized:
        """Round values to `grid` and return the quantized tensor.

        scaled: the values to round, split into blocks, FP32. They are already divided by the scale
            of their block and by the tensor scale.
        scale: the scale of each block, FP32, broadcastable to `scaled`.
        uniform: random numbers in [0, 1) for stochastic rounding, FP32, not split into blocks. If
            None, round to the nearest value, ties to even.
        tensor_scale: a scalar, by default 1.
        """
        codes = (
            round_to_grid(scaled, grid)
            if uniform is None
            else round_stochastically(scaled, grid, self.split(uniform))
        )
        if tensor_scale is None:
            tensor_scale = torch.ones((), device=codes.device)
        return BlockQuantized(
            codes=self.join(codes),
            block_scale=self.join(scale.expand_as(codes)),
            tensor_scale=tensor_scale,
            grid=grid,
            blocks=self,
            split_codes=codes,
            split_scale=scale,
        )


@dataclass(frozen=True)
class BlockQuantized(Quantized):
    """A quantized tensor that also stores its codes and scales split into blocks."""

    blocks: Blocks
    split_codes: Tensor
    # One scale for each block, broadcastable to `split_codes`.
    split_scale: Tensor

    def operand_in(self, dtype: torch.dtype) -> Tensor:
        """Return `operand` in `dtype`. The cast comes before the blocks are joined.

        In this order, torch.compile compiles a single loop.
        """
        return self.blocks.join((self.split_codes * self.split_scale).to(dtype))


def quantize_fp8(x: Tensor, grid: Grid, *, two_dimensional: bool) -> BlockQuantized:
    """Quantize x [rows, columns] to FP8 with one scale per block.

    A block has 1 row and 128 columns, or 128 rows and 128 columns if `two_dimensional`. x has any
    float dtype and strides. Raise RuntimeError if a dimension that is split into blocks is not a
    multiple of 128.

    This is Transformer Engine's block scaling. DeepSeek-V3 was trained with the same blocks
    (arXiv:2412.19437, section 3.3). The values of a block are multiplied by a factor that maps the
    amax of the block to the maximum of `grid`, and that is rounded down to a power of two. If a
    tiny amax would make the factor overflow, the factor is the largest value of x's dtype
    (compute_scale_from_types in TE's common/recipe/recipe_common.cuh). The block scale of the
    result is the reciprocal of the factor.
    """
    blocks = Blocks.of(x, FP8_BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    amax = absolute_maximum(split, blocks.within, keepdim=True)
    overflow = torch.finfo(x.dtype).max
    scale = scale_from_amax(amax, grid.maximum, power_of_two=True, overflow=overflow)
    return blocks.quantized(split.float() * scale, decode_scale(scale), grid)


def quantize_mx(x: Tensor, grid: Grid, *, uniform: Tensor | None = None) -> BlockQuantized:
    """Quantize x [..., n] to an MX format: one power-of-two scale for every 32 values along n.

    x: any float dtype and strides.
    grid: the number format of the codes.
    uniform: random numbers in [0, 1) for stochastic rounding, FP32, in the shape of x. If None,
        codes are rounded to the nearest value, ties to even.

    Raise RuntimeError if n is not a multiple of 32. See OCP Microscaling Formats v1.0, section 5.2.

    A scale is stored as an E8M0 byte, the biased exponent of a power of two from 2^-127 to 2^127.
    As in Transformer Engine, the scale is the smallest power of two for which the values of the
    block, divided by the scale, do not exceed the maximum of the grid. The OCP specification
    proposes a smaller scale. Its exponent is the exponent of the block's amax minus the exponent of
    the grid's maximum. With this scale, some values saturate, and training can diverge (Mishra et
    al., arXiv:2506.08027).

    The scale of a block of zeros is 2^-127. The scale of a block with an infinity is 2^127. The
    infinity itself gets the largest code. This code times 2^127 exceeds FP32, so `operand` contains
    an infinity too. NaN stays NaN and does not influence the scale.

    BF16 can represent `operand` exactly, with two exceptions. In a block with an amax below 2^-100,
    codes times the scale may be too small for BF16. In a block with an amax just below 2^128, the
    largest value may be rounded up to 2^128, which exceeds the range of BF16 and FP32.
    """
    blocks = Blocks.of(x, MX_BLOCK, two_dimensional=False)
    split = blocks.split(x)
    amax = absolute_maximum(split, blocks.within, keepdim=True)
    # This is `float_to_e8m0` in Transformer Engine's common/util/ptx.cuh.
    bits = (amax * (1.0 / grid.maximum)).view(torch.int32)
    exponent, mantissa = bits >> FP32_MANTISSA_BITS, bits & ((1 << FP32_MANTISSA_BITS) - 1)
    # Round up to the next power of two: increment the exponent if the mantissa is larger than the
    # limit `exact`. For normal numbers the limit is 0. For subnormals, whose exponent bits are 0,
    # the limit is the mantissa of 2^-127, because the byte 0 encodes the scale 2^-127.
    exact = torch.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, 0)
    exponent = (exponent + (mantissa > exact).int()).clamp(max=LARGEST)
    scale = _power_of_two(exponent)
    reciprocal = _power_of_two(LARGEST - exponent)
    return blocks.quantized(split.float() * reciprocal, scale, grid, uniform)


def _power_of_two(biased: Tensor) -> Tensor:
    """Return 2 ** (biased - 127) in FP32, for int32 biased exponents from 0 to 254.

    The result is built from bits, because exp2 returns zero instead of 2^-127 on GPUs. With a scale
    of zero, all values of the block would become zero.
    """
    bits = torch.where(biased == SMALLEST, HALF_OF_SMALLEST_NORMAL, biased << FP32_MANTISSA_BITS)
    return bits.view(torch.float32)


def quantize_nvfp4(
    x: Tensor, *, two_dimensional: bool, uniform: Tensor | None = None, amax: Tensor | None = None
) -> BlockQuantized:
    """Quantize x [..., n] to NVFP4: E2M1 codes, one E4M3 scale per block, one FP32 tensor scale.

    x: any float dtype and strides.
    two_dimensional: a block has 16 x 16 values of the last two dimensions. If False, a block has 16
        values of the last dimension.
    uniform: random numbers in [0, 1) for stochastic rounding, FP32, in the shape of x. If None,
        codes are rounded to the nearest value, ties to even.
    amax: the largest absolute value of x, a scalar. If None, it is computed.

    Raise RuntimeError if a dimension that is split into blocks is not a multiple of 16.

    The tensor scale is amax / (6 * 448), so that the largest block scale is 448, the maximum of
    E4M3. Block scales are rounded to E4M3 before values are divided by them. The steps have the
    same order as in Transformer Engine's NVFP4QuantizerRef, because the same formulas in another
    order would result in other codes. The operand has at most 6 significant bits, so BF16
    represents it exactly. If x contains NaN or an infinity, the tensor scale is not finite.
    """
    amax = (x.abs().amax() if amax is None else amax).float()
    blocks = Blocks.of(x, NVFP4_BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    block_amax = split.abs().amax(dim=blocks.within, keepdim=True).float()
    # Values are multiplied by factors before they are rounded. Scales are reciprocals of factors.
    maximum = E2M1.maximum * E4M3.maximum
    tensor_factor = scale_from_amax(amax, maximum)
    # The factor of the tensor makes the largest of these scales the maximum of E4M3.
    exact_scale = (block_amax * (tensor_factor * (1.0 / E2M1.maximum))).clamp(max=FP32_MAX)
    # The scale of a block is rounded to zero if its values are far below the amax of the tensor.
    # All values of the block then become zero.
    block_scale = round_to_grid(exact_scale, E4M3)
    # Clamp an infinite factor to the largest FP32 number, because zero times infinity would be NaN.
    factor = decode_scale(block_scale * decode_scale(tensor_factor)).clamp(max=FP32_MAX)
    scaled = split.float() * factor
    # Replace -0.0 by 0.0. Small values that are rounded to zero later keep their sign.
    scaled = torch.where(scaled == 0, 0.0, scaled)
    tensor_scale = (amax.double() / maximum).float()
    return blocks.quantized(scaled, block_scale, E2M1, uniform, tensor_scale)


def hadamard(x: Tensor) -> Tensor:
    """Multiply each block of 16 values along the last dimension of x by `hadamard_matrix`.

    The result has the shape and dtype of x. The transform spreads an outlier over the 16 values of
    its block. Without the transform, the outlier would determine the scale of 15 small values. The
    transform is orthogonal, so the product of two transformed operands is the same as before, up to
    rounding. BF16 products are summed in FP32 and rounded once, as in Transformer Engine's
    reference and kernels. Raise RuntimeError if the last dimension is not a multiple of 16.
    """
    orthogonal = hadamard_matrix(x.dtype, x.device)
    # If x is a transposed view, multiply the underlying tensor from the left, which needs no copy.
    if x.dim() > 1 and x.stride(-1) != 1:
        return (orthogonal.t() @ x.mT.unflatten(-2, (-1, HADAMARD_BLOCK))).reshape(x.mT.shape).mT
    return (x.unflatten(-1, (-1, HADAMARD_BLOCK)) @ orthogonal).reshape(x.shape)


def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix [16, 16] of the Hadamard transform. It is exact in any dtype.

    It is the product of a diagonal matrix of signs (NEGATIVE), Sylvester's Hadamard matrix, and
    1/4. The entry (i, j) of Sylvester's matrix is -1 if the bitwise AND of i and j has an odd
    number of ones, and 1 otherwise. The matrix is computed on the device, because a compiled
    function would copy a constant to the device in each call.
    """
    index = torch.arange(HADAMARD_BLOCK, device=device)
    row = index[:, None]
    # XOR the four bits of `row & index` into the lowest bit: 1 if the number of ones is odd.
    parity = row & index
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    is_negative = ((parity ^ (NEGATIVE >> row)) & 1) == 1
    return torch.where(is_negative, -0.25, 0.25).to(dtype)
