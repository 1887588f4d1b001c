"""Arithmetic of low-precision formats: the grid of values of a format, and quantized tensors.

`tensor` rounds values to a grid and quantizes with one scale per tensor. `blocks` quantizes with
one scale per block. This file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype


@dataclass(frozen=True)
class Grid:
    """The set of values of a binary floating-point format, with a sign and subnormals."""

    name: str
    mantissa_bits: int
    min_exponent: int  # the exponent of the smallest normal value
    maximum: float  # the largest finite value


# FP8 without infinities (OCP FP8, torch's float8_e4m3fn)
E4M3 = Grid("E4M3", mantissa_bits=3, min_exponent=-6, maximum=448.0)
E5M2 = Grid("E5M2", mantissa_bits=2, min_exponent=-14, maximum=57344.0)
# FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
E2M1 = Grid("E2M1", mantissa_bits=1, min_exponent=0, maximum=6.0)


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor x. x is approximately codes * block_scale * tensor_scale, all in FP32.

    A matrix product can multiply its result by the tensor scale. It must multiply by block scales
    before it sums, because block scales vary along the contraction dimension.
    """

    # Values of `grid`, in the shape of x.
    codes: Tensor
    # For each value, the scale of its block, broadcastable to x. The scalar 1 if the format has no
    # blocks.
    block_scale: Tensor
    # A scalar. 1 if the format has only scales of blocks.
    tensor_scale: Tensor
    grid: Grid

    @property
    def operand(self) -> Tensor:
        """The codes, multiplied by the scales of their blocks, FP32, in the shape of x.

        The values can be represented in BF16 exactly if block scales are powers of two or E4M3
        values.
        """
        return self.codes * self.block_scale

    def operand_in(self, dtype: dtype) -> Tensor:
        """Return `operand` in `dtype`."""
        return self.operand.to(dtype)

    def dequantize(self) -> Tensor:
        """Return the values that the quantized tensor represents, FP32, in the shape of x."""
        return self.operand * self.tensor_scale

    def t(self) -> Quantized:
        """Return the transpose with the same codes and scales.

        It is a valid quantization of x^T only if the format has one scale per tensor or square
        blocks.
        """
        # For a scalar block scale, `t` returns the scalar.
        return Quantized(self.codes.t(), self.block_scale.t(), self.tensor_scale, self.grid)
