"""A quantized tensor, in the one form that every recipe's quantizer returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pretrain.precision.quantizers.grid import Grid


@dataclass(frozen=True)
class Quantized:
    """x ~= codes * block_scale * tensor_scale, all FP32.

    Scales are those that decode, the reciprocals of what x was multiplied by. A matrix product can take the tensor scale out of
    its sum and must apply block scales inside it, so the two are kept apart.
    """

    codes: Tensor  # values of `grid`, the shape of x
    block_scale: Tensor  # of each value's block, broadcastable to x; the scalar 1 where one scale serves the whole tensor
    tensor_scale: Tensor  # scalar; 1 where only blocks are scaled
    grid: Grid

    @property
    def operand(self) -> Tensor:
        """What a product multiplies, FP32 of x's shape; as exact in BF16 where block scales are powers of two or on a grid."""
        return self.codes * self.block_scale

    def dequantize(self) -> Tensor:
        """The values that the codes stand for, FP32 of x's shape."""
        return self.operand * self.tensor_scale
