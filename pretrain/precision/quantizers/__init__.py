"""Arithmetic of low-precision formats: the grid of values of a format, and quantized tensors.

`tensor` rounds to a grid and scales whole tensors. `blocks` scales blocks. This file does not
import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """A binary format with subnormals: its sign, mantissa bits and range of exponents."""

    name: str
    mantissa_bits: int
    min_exponent: int  # of the smallest normal value
    maximum: float  # the largest finite value


# FP8 without infinities (OCP FP8, torch's float8_e4m3fn)
E4M3 = Grid("E4M3", mantissa_bits=3, min_exponent=-6, maximum=448.0)
E5M2 = Grid("E5M2", mantissa_bits=2, min_exponent=-14, maximum=57344.0)
# FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
E2M1 = Grid("E2M1", mantissa_bits=1, min_exponent=0, maximum=6.0)


@dataclass(frozen=True)
class Quantized:
    """x ~= codes * block_scale * tensor_scale, all FP32.

    The scales decode. A matrix product can take the tensor scale out of its sum. It must apply
    block scales inside of the sum.
    """

    codes: Tensor  # values of `grid`, the shape of x
    # The scale of each value's block, broadcastable to x. The scalar 1 without blocks.
    block_scale: Tensor
    tensor_scale: Tensor  # scalar; 1 if only blocks are scaled
    grid: Grid

    @property
    def operand(self) -> Tensor:
        """The factor of a product, FP32, of x's shape.

        It is exact in BF16 too, if block scales are powers of two or lie on a grid.
        """
        return self.codes * self.block_scale

    def dequantize(self) -> Tensor:
        """Return the decoded values, FP32, of x's shape."""
        return self.operand * self.tensor_scale

    def t(self) -> Quantized:
        """Return the quantized x^T. The scales must serve x^T too."""
        blocks = self.block_scale
        return Quantized(
            self.codes.t(), blocks.t() if blocks.dim() else blocks, self.tensor_scale, self.grid
        )
