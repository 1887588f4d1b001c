"""How a tensor divides into the blocks that share a scale, and how it is put together again.

Both are arranged for a compiler to find one loop, from reading a block over its amax to writing its operand. Two things would
break it in two, and can double the time that a GPU takes: joining the blocks before the last step, and splitting the last
dimension of a transposed tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.precision.quantizers.grid import Grid, Quantized
from pretrain.precision.quantizers.rounding import round_stochastically, round_to_grid


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
        self, scaled: Tensor, scale: Tensor, grid: Grid, uniform: Tensor | None = None, tensor_scale: Tensor | None = None
    ) -> BlockQuantized:
        """Quantizes split values that are `scaled` to the grid, with the scales of their blocks that undo it; both FP32.

        Rounds to nearest even, or stochastically by `uniform`, FP32 in [0, 1) and of the unsplit shape. Without a tensor scale it
        is 1.
        """
        codes = round_to_grid(scaled, grid) if uniform is None else round_stochastically(scaled, grid, self.split(uniform))
        if tensor_scale is None:
            tensor_scale = torch.ones((), device=codes.device)
        return BlockQuantized(self.join(codes), self.join(scale.expand_as(codes)), tensor_scale, grid, self, codes, scale)


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
