"""Formats with a scale for each block of values: FP8 in blocks of 128, the MX formats, NVFP4; and the transform before FP4.

A compiler finds one loop here, from reading a block over its amax to writing its operand. Joining the blocks before the last
step, or splitting the last dimension of a transposed tensor, would break it in two, and can double the time that a GPU takes.
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
SMALLEST, LARGEST = 0, 254  # E8M0 bytes: 2^-127 and 2^127; 255 is not a number
# bits of 2^-127, which FP32 holds only as a subnormal
HALF_OF_SMALLEST_NORMAL = 1 << (FP32_MANTISSA_BITS - 1)
NVFP4_MAXIMUM = E2M1.maximum * E4M3.maximum  # the largest code times the largest block scale
# Transformer Engine's signs of the transform, bit i for value i of a block: + + + - + - - - - - - + - + - -
NEGATIVE = 0b1101_0111_1110_1000


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` values along the last dimension, or squares over the last two, in tensors [..., m, n] of one shape.

    Split, these are [..., m, n / size, size], or [..., m / size, size, n / size, size] for squares. Tensors that lie in memory
    as the transpose of a contiguous one (`transposed`) are split as that: [..., n / size, size, m].
    """

    size: int
    two_dimensional: bool
    transposed: bool

    @classmethod
    def of(cls, x: Tensor, size: int, *, two_dimensional: bool) -> Blocks:
        return cls(size, two_dimensional, transposed=x.dim() > 1 and x.stride(-1) != 1)

    @property
    def within(self) -> tuple[int, ...]:
        """The dimensions of a split tensor that lie inside a block; to reduce over, keeping them to broadcast the result."""
        if self.two_dimensional:
            return -3, -1
        return (-2,) if self.transposed else (-1,)

    def split(self, x: Tensor) -> Tensor:
        """A view of x. Raises RuntimeError where `size` does not divide."""
        rows = x.mT if self.transposed else x
        if self.two_dimensional:
            return rows.unflatten(-1, (-1, self.size)).unflatten(-3, (-1, self.size))
        return rows.unflatten(self.within[0], (-1, self.size))

    def join(self, split: Tensor) -> Tensor:
        """The inverse of `split`."""
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
        """Quantizes split values that are `scaled` to the grid, with the scales of their blocks that undo it; both FP32. To
        nearest even, or stochastically by `uniform`, FP32 in [0, 1) and of the unsplit shape."""
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
    """A quantized tensor that can still be had block by block."""

    blocks: Blocks
    split_codes: Tensor
    split_scale: Tensor  # broadcasts against them

    @property
    def scales(self) -> Tensor:
        """[rows, blocks along the last dimension] of a quantized matrix, or [rows / size, ...] for squares; a view."""
        one_a_block = self.split_scale.squeeze(self.blocks.within)
        return one_a_block.mT if self.blocks.transposed else one_a_block

    def operand_in(self, dtype: torch.dtype) -> Tensor:
        """`operand` in another dtype, rounded before the blocks are joined."""
        return self.blocks.join((self.split_codes * self.split_scale).to(dtype))


def quantize_fp8(x: Tensor, grid: Grid, *, two_dimensional: bool) -> BlockQuantized:
    """FP8: x [rows, columns] of any float dtype and stride, in blocks of 1 x 128 along the last dimension, or of 128 x 128.

    This is Transformer Engine's block scaling, and the layout of DeepSeek-V3's training (arXiv:2412.19437, section 3.3). Each
    block's scale is that of current scaling, from the block's own amax, rounded down to a power of two. A block of values so
    tiny that its scale would overflow takes the largest value of x's own dtype for it (compute_scale_from_types in TE's
    common/recipe/recipe_common.cuh). Raises RuntimeError where 128 does not divide a blocked dimension.
    """
    blocks = Blocks.of(x, FP8_BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    amax, overflow = absolute_maximum(split, blocks.within, keepdim=True), torch.finfo(x.dtype).max
    scale = scale_from_amax(amax, grid.maximum, power_of_two=True, overflow=overflow)
    return blocks.quantized(split.float() * scale, decode_scale(scale), grid)


def quantize_mx(x: Tensor, grid: Grid, *, uniform: Tensor | None = None) -> BlockQuantized:
    """Codes of any grid under one power of two for every 32 values (OCP Microscaling Formats v1.0, section 5.2).

    x [..., n], any float dtype and strides, in blocks of 32 along the last dimension. Codes are rounded to nearest even, or
    stochastically by `uniform`, FP32 in [0, 1) and of x's shape. Raises RuntimeError where 32 does not divide that dimension.
    `operand` is exact in BF16 except where a block's amax is below 2^-100 or rounds up to 2^128.

    A block's scale is an E8M0 byte, a biased exponent from 2^-127 to 2^127: by Transformer Engine's rule the smallest power of
    two that brings the block's amax within the grid. (The exponent of amax less that of the grid's maximum, which the OCP
    specification suggests, saturates some, and can make training diverge: Mishra et al., arXiv:2506.08027.) Zeros get the
    smallest scale, an infinity gets 2^127 and an infinite operand; a NaN stays NaN and does not count for its block's scale.
    """
    blocks = Blocks.of(x, MX_BLOCK, two_dimensional=False)
    split = blocks.split(x)
    amax = absolute_maximum(split, blocks.within, keepdim=True)
    # as `float_to_e8m0` in Transformer Engine's common/util/ptx.cuh
    bits = (amax * (1.0 / grid.maximum)).view(torch.int32)
    exponent, mantissa = bits >> FP32_MANTISSA_BITS, bits & ((1 << FP32_MANTISSA_BITS) - 1)
    # how much of a mantissa the exponent alone stands for
    exact = torch.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, 0)
    exponent = (exponent + (mantissa > exact).int()).clamp(max=LARGEST)
    return blocks.quantized(
        split.float() * _power_of_two(LARGEST - exponent), _power_of_two(exponent), grid, uniform
    )


def _power_of_two(biased: Tensor) -> Tensor:
    """2 ** (biased - 127), biased exponents 0..254 to FP32.

    Put together from bits: exp2 flushes 2^-127 to zero on GPUs, and a block scale of zero would lose the block.
    """
    bits = torch.where(biased == SMALLEST, HALF_OF_SMALLEST_NORMAL, biased << FP32_MANTISSA_BITS)
    return bits.view(torch.float32)


def quantize_nvfp4(
    x: Tensor, *, two_dimensional: bool, uniform: Tensor | None = None, amax: Tensor | None = None
) -> BlockQuantized:
    """NVFP4: E2M1 codes under an E4M3 scale for every 16 values, under one FP32 scale for the tensor.

    x [..., n], any float dtype and strides, in blocks of 16 along the last dimension, or of 16x16 over the last two. Rounds to
    nearest even, or stochastically by `uniform`, FP32 in [0, 1) and of x's shape. `amax` is the tensor's largest magnitude, a
    scalar, where it is known already. Raises RuntimeError where a blocked dimension is no multiple of 16.

    The tensor scale, amax / 2688, brings the largest block scale to E4M3's maximum; a code is relative to its block scale as that
    was rounded. The order of steps is that of Transformer Engine's NVFP4QuantizerRef: equal formulas in another order pick other
    codes. The operand has at most 6 significant bits, exact in BF16. A NaN or an infinity shows in the tensor scale.
    """
    amax = (x.abs().amax() if amax is None else amax).float()
    blocks = Blocks.of(x, NVFP4_BLOCK, two_dimensional=two_dimensional)
    split = blocks.split(x)
    block_amax = split.abs().amax(dim=blocks.within, keepdim=True).float()

    tensor_encode = scale_from_amax(amax, NVFP4_MAXIMUM)
    wanted = (block_amax * (tensor_encode * (1.0 / E2M1.maximum))).clamp(max=FP32_MAX)
    # zero for a block far below the tensor's amax, whose codes are worth nothing
    block_scale = round_to_grid(wanted, E4M3)
    # At most FP32's largest number instead of infinity, so that at least zeros are encoded to zeros.
    encode_scale = decode_scale(block_scale * decode_scale(tensor_encode)).clamp(max=FP32_MAX)

    scaled = split.float() * encode_scale
    # -0.0 becomes 0.0, while what rounds to zero keeps its sign
    scaled = torch.where(scaled == 0, 0.0, scaled)
    return blocks.quantized(
        scaled, block_scale, E2M1, uniform, tensor_scale=(amax.double() / NVFP4_MAXIMUM).float()
    )


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] to the same shape and dtype, each block of 16 along the last dimension multiplied by `hadamard_matrix`.

    An outlier is spread over its block and no longer sets the scale for 15 small neighbours. The transform is orthogonal, so with
    both operands transformed their product is what it was, but for the rounding. BF16 is summed in FP32 and rounded once, as in
    Transformer Engine's reference and kernels. Raises RuntimeError where n is no multiple of 16.
    """
    orthogonal = hadamard_matrix(x.dtype, x.device)
    # as x.t() has it: multiplied from the left, x needs no copy in the other order
    if x.dim() > 1 and x.stride(-1) != 1:
        return (orthogonal.t() @ x.mT.unflatten(-2, (-1, HADAMARD_BLOCK))).reshape(x.mT.shape).mT
    return (x.unflatten(-1, (-1, HADAMARD_BLOCK)) @ orthogonal).reshape(x.shape)


def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The transform's matrix [16, 16]: the signs on a diagonal, times Sylvester's Hadamard matrix, times 1/4; exact in any dtype.
    Entry (i, j) of Sylvester's is -1 where i and j share an odd number of bits. It is computed on the device: a constant would be
    copied there at each call of a compiled function."""
    index = torch.arange(HADAMARD_BLOCK, device=device)
    odd = index[:, None] & index
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1) ^ (NEGATIVE >> index[:, None])
    return torch.where((odd & 1) == 1, -0.25, 0.25).to(dtype)
