"""Quantizers with a scale a block: FP8 in blocks of 128, the MX formats and NVFP4.

Also the Hadamard transform, which FP4 formats apply before they quantize.

torch.compile makes one loop of a quantizer, from reading a block over its amax to writing the
operand. Joining the blocks before the last step, or splitting the last dimension of a transposed
tensor, would make two loops, which can double the time on a GPU.
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

FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK = 128, 32, 16  # values that share a scale
HADAMARD_BLOCK = 16  # values that one transform mixes
SMALLEST, LARGEST = 0, 254  # E8M0 bytes: 2^-127 and 2^127; 255 is NaN
# Bits of 2^-127, a subnormal of FP32.
HALF_OF_SMALLEST_NORMAL = 1 << (FP32_MANTISSA_BITS - 1)
NVFP4_MAXIMUM = E2M1.maximum * E4M3.maximum  # the largest code times the largest block scale
# Transformer Engine's signs of the transform, bit i for value i of a block:
# + + + - + - - - - - - + - + - -
NEGATIVE = 0b1101_0111_1110_1000


@dataclass(frozen=True)
class Blocks:
    """Blocks of tensors [..., m, n]: `size` values along the last dimension, or squares.

    A split tensor is [..., m, n / size, size], or [..., m / size, size, n / size, size] for
    squares. A tensor that is the transpose of a contiguous one (`transposed`) is split as
    [..., n / size, size, m].
    """

    size: int
    two_dimensional: bool
    transposed: bool

    @classmethod
    def of(cls, x: Tensor, size: int, *, two_dimensional: bool) -> Blocks:
        return cls(size, two_dimensional, transposed=x.dim() > 1 and x.stride(-1) != 1)

    @property
    def within(self) -> tuple[int, ...]:
        """The dimensions of a split tensor inside of a block. Reduce over them with keepdim."""
        if self.two_dimensional:
            return -3, -1
        return (-2,) if self.transposed else (-1,)

    def split(self, x: Tensor) -> Tensor:
        """Return a view of x, split into blocks. Raise RuntimeError if `size` does not divide."""
        rows = x.mT if self.transposed else x
        if self.two_dimensional:
            return rows.unflatten(-1, (-1, self.size)).unflatten(-3, (-1, self.size))
        return rows.unflatten(self.within[0], (-1, self.size))

    def join(self, split: Tensor) -> Tensor:
        """Undo `split`."""
        if self.two_dimensional:
            split = split.flatten(-2).flatten(-3, -2)
        else:
            split = split.flatten(-3, -2) if self.transposed else split.flatten(-2)
        return split.mT if self.transposed else split

    def quantized(
        self,
        scaled: Tensor,
        scale: Tensor,
        grid: Grid,
        uniform: Tensor | None = None,
        tensor_scale: Tensor | None = None,
    ) -> BlockQuantized:
        """Round split values that are `scaled` to the grid. `scale` decodes a block; both FP32.

        Round to nearest even, or stochastically by `uniform`, FP32 in [0, 1), of the unsplit shape.
        """
        codes = (
            round_to_grid(scaled, grid)
            if uniform is None
            else round_stochastically(scaled, grid, self.split(uniform))
        )
        if tensor_scale is None:
            tensor_scale = torch.ones((), device=codes.device)
        return BlockQuantized(
            self.join(codes),
            self.join(scale.expand_as(codes)),
            tensor_scale,
            grid,
            self,
            codes,
            scale,
        )


@dataclass(frozen=True)
class BlockQuantized(Quantized):
    """A quantized tensor that keeps its blocks."""

    blocks: Blocks
    split_codes: Tensor
    split_scale: Tensor  # broadcastable to `split_codes`

    @property
    def scales(self) -> Tensor:
        """A view of a matrix's scales: [rows, blocks], or [rows / size, blocks] for squares."""
        one_a_block = self.split_scale.squeeze(self.blocks.within)
        return one_a_block.mT if self.blocks.transposed else one_a_block

    def operand_in(self, dtype: torch.dtype) -> Tensor:
        """Return `operand` in `dtype`, rounded before the blocks are joined."""
        return self.blocks.join((self.split_codes * self.split_scale).to(dtype))


def quantize_fp8(x: Tensor, grid: Grid, *, two_dimensional: bool) -> BlockQuantized:
    """Quantize x [rows, columns] to FP8 in blocks of 1 x 128 along its columns, or of 128 x 128.

    x has any float dtype and strides. This is Transformer Engine's block scaling, and the layout of
    DeepSeek-V3's training (arXiv:2412.19437, section 3.3). A block's scale is the one of current
    scaling, from the block's amax, rounded down to a power of two. If the scale would overflow,
    because all values are tiny, it is the largest value of x's dtype (compute_scale_from_types in
    TE's common/recipe/recipe_common.cuh). Raise RuntimeError if 128 does not divide a blocked
    dimension.
    """
    blocks = Blocks.of(x, FP8_BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    amax, overflow = absolute_maximum(split, blocks.within, keepdim=True), torch.finfo(x.dtype).max
    scale = scale_from_amax(amax, grid.maximum, power_of_two=True, overflow=overflow)
    return blocks.quantized(split.float() * scale, decode_scale(scale), grid)


def quantize_mx(x: Tensor, grid: Grid, *, uniform: Tensor | None = None) -> BlockQuantized:
    """Quantize x [..., n] to `grid` with a power of two for every 32 values of the last dimension.

    See OCP Microscaling Formats v1.0, section 5.2. x has any float dtype and strides. Codes are
    rounded to nearest even, or stochastically by `uniform`, FP32 in [0, 1), of x's shape. Raise
    RuntimeError if 32 does not divide n. `operand` is exact in BF16 unless a block's amax is below
    2^-100 or rounds up to 2^128.

    A block's scale is an E8M0 byte, a biased exponent from 2^-127 to 2^127. By Transformer Engine's
    rule it is the smallest power of two that brings the block's amax within the grid. The OCP
    specification suggests the exponent of amax less the exponent of the grid's maximum. That
    saturates some values, and training can diverge (Mishra et al., arXiv:2506.08027). A block of
    zeros gets the smallest scale. An infinity gets 2^127 and an infinite operand. A NaN stays NaN
    and does not count for the scale.
    """
    blocks = Blocks.of(x, MX_BLOCK, two_dimensional=False)
    split = blocks.split(x)
    amax = absolute_maximum(split, blocks.within, keepdim=True)
    # as `float_to_e8m0` in Transformer Engine's common/util/ptx.cuh
    bits = (amax * (1.0 / grid.maximum)).view(torch.int32)
    exponent, mantissa = bits >> FP32_MANTISSA_BITS, bits & ((1 << FP32_MANTISSA_BITS) - 1)
    # The mantissa up to which the exponent alone is the exact scale.
    exact = torch.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, 0)
    exponent = (exponent + (mantissa > exact).int()).clamp(max=LARGEST)
    return blocks.quantized(
        split.float() * _power_of_two(LARGEST - exponent), _power_of_two(exponent), grid, uniform
    )


def _power_of_two(biased: Tensor) -> Tensor:
    """Return 2 ** (biased - 127) in FP32, for biased exponents from 0 to 254.

    It is made from bits, because exp2 flushes 2^-127 to zero on GPUs. A block with a scale of zero
    would be lost.
    """
    bits = torch.where(biased == SMALLEST, HALF_OF_SMALLEST_NORMAL, biased << FP32_MANTISSA_BITS)
    return bits.view(torch.float32)


def quantize_nvfp4(
    x: Tensor, *, two_dimensional: bool, uniform: Tensor | None = None, amax: Tensor | None = None
) -> BlockQuantized:
    """Quantize x [..., n] to NVFP4: E2M1 codes, an E4M3 scale for 16 values, one FP32 scale.

    x has any float dtype and strides. Blocks are 16 values along the last dimension, or 16x16 over
    the last two. Rounds to nearest even, or stochastically by `uniform`, FP32 in [0, 1), of x's
    shape. `amax`: the tensor's largest magnitude, a scalar, if already computed. Raise RuntimeError
    if a blocked dimension is no multiple of 16.

    The tensor scale, amax / 2688, brings the largest block scale to E4M3's maximum. Codes are
    relative to the rounded block scale. The order of steps is the one of Transformer Engine's
    NVFP4QuantizerRef: the same formulas in another order give other codes. The operand has at most
    6 significant bits, so it is exact in BF16. A NaN or an infinity appears in the tensor scale.
    """
    amax = (x.abs().amax() if amax is None else amax).float()
    blocks = Blocks.of(x, NVFP4_BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    block_amax = split.abs().amax(dim=blocks.within, keepdim=True).float()

    tensor_encode = scale_from_amax(amax, NVFP4_MAXIMUM)
    exact_scale = (block_amax * (tensor_encode * (1.0 / E2M1.maximum))).clamp(max=FP32_MAX)
    # Zero for a block far below the tensor's amax. Its values are lost, whatever the codes.
    block_scale = round_to_grid(exact_scale, E4M3)
    # Not infinity, but the largest FP32 number, so that zeros are encoded as zeros.
    encode_scale = decode_scale(block_scale * decode_scale(tensor_encode)).clamp(max=FP32_MAX)

    scaled = split.float() * encode_scale
    # -0.0 becomes 0.0. A value that rounds to zero keeps its sign.
    scaled = torch.where(scaled == 0, 0.0, scaled)
    return blocks.quantized(
        scaled, block_scale, E2M1, uniform, tensor_scale=(amax.double() / NVFP4_MAXIMUM).float()
    )


def hadamard(x: Tensor) -> Tensor:
    """Multiply each block of 16 values along the last dimension of x by `hadamard_matrix`.

    Shape and dtype stay. An outlier is spread over its block, so it no longer sets the scale for 15
    small neighbours. The transform is orthogonal: if both operands are transformed, their product
    stays the same up to rounding. BF16 is summed in FP32 and rounded once, as in Transformer
    Engine's reference and kernels. Raise RuntimeError if n is no multiple of 16.
    """
    orthogonal = hadamard_matrix(x.dtype, x.device)
    # A transposed x, such as x.t(), is multiplied from the left, which needs no copy.
    if x.dim() > 1 and x.stride(-1) != 1:
        return (orthogonal.t() @ x.mT.unflatten(-2, (-1, HADAMARD_BLOCK))).reshape(x.mT.shape).mT
    return (x.unflatten(-1, (-1, HADAMARD_BLOCK)) @ orthogonal).reshape(x.shape)


def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the transform's matrix [16, 16], exact in any dtype.

    It is a diagonal of signs, times Sylvester's Hadamard matrix, times 1/4. Entry (i, j) of
    Sylvester's matrix is -1 if i and j share an odd number of bits. The matrix is computed on the
    device, because a compiled function would copy a constant there at each call.
    """
    index = torch.arange(HADAMARD_BLOCK, device=device)
    odd = index[:, None] & index
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1) ^ (NEGATIVE >> index[:, None])
    return torch.where((odd & 1) == 1, -0.25, 0.25).to(dtype)
