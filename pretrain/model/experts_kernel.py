"""Triton kernels that sum the outputs of each token's experts in BF16, and compute the gradients.

The result of a token is the weighted sum of the rows that its chosen experts have computed. The sum
is computed in FP32 and rounded once. Each Triton program computes one token, so the order of sums
is fixed and no intermediate copy is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _combine(
    rows,  # BF16 [rows, width]
    row_of_choice,  # int64 [tokens x choices]: index of the row of each choice
    weights,  # [tokens, choices], or None for a plain sum
    y,  # BF16 [tokens, width], written
    choices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Write the weighted sum of one token. `block` is `width` rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for n in tl.range(0, choices):
        index = tl.load(row_of_choice + token * choices + n) * width + column
        values = tl.load(rows + index, mask=column < width, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + token * choices + n).to(tl.float32)
        total += values
    # A store rounds to the dtype of the memory.
    tl.store(y + token * width + column, total, mask=column < width)


@triton.jit
def _combine_backward(
    dy,  # BF16 [tokens, width]
    rows,  # BF16 [rows, width]
    row_of_choice,  # int64 [tokens x choices]
    weights,  # [tokens, choices]
    d_rows,  # BF16 [rows, width], written
    d_weights,  # FP32 [tokens, choices], written
    choices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Write the gradients of the rows and weights of one token.

    `block` is `width` rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    gradient = tl.load(dy + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    for n in tl.range(0, choices):
        choice = token * choices + n
        index = tl.load(row_of_choice + choice) * width + column
        values = tl.load(rows + index, mask=column < width, other=0.0).to(tl.float32)
        tl.store(d_weights + choice, tl.sum(values * gradient, axis=0))
        scaled = gradient * tl.load(weights + choice).to(tl.float32)
        tl.store(d_rows + index, scaled, mask=column < width)


def combine(rows: Tensor, row_of_choice: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    """Return the weighted sum of each token's rows, BF16 [tokens, width].

    Args:
        rows: Outputs of the experts, BF16 [rows, width], contiguous.
        row_of_choice: For each choice of each token, the index of its row in `rows`, int64
            [tokens x choices].
        weights: Factor of each choice [tokens, choices] in any dtype, or None for a plain sum.
        tokens: Number of tokens.
    """
    width = rows.shape[1]
    y = rows.new_empty(tokens, width)
    choices = len(row_of_choice) // tokens
    _combine[(tokens,)](
        rows=rows,
        row_of_choice=row_of_choice,
        weights=weights,
        y=y,
        choices=choices,
        width=width,
        block=triton.next_power_of_2(width),
        enable_fp_fusion=False,
    )
    return y


def combine_backward(
    dy: Tensor, rows: Tensor, row_of_choice: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `rows` in BF16, and the gradient of `weights` in FP32.

    `dy` is the gradient of the result of `combine`, BF16 [tokens, width]. The other arguments are
    the arguments of `combine`. In rows that belong to no token, the gradient of `rows` is
    uninitialized.
    """
    tokens, width = dy.shape
    d_rows = torch.empty_like(rows)
    d_weights = torch.empty_like(weights, dtype=torch.float32)
    _combine_backward[(tokens,)](
        dy=dy,
        rows=rows,
        row_of_choice=row_of_choice,
        weights=weights,
        d_rows=d_rows,
        d_weights=d_weights,
        choices=weights.shape[1],
        width=width,
        block=triton.next_power_of_2(width),
        enable_fp_fusion=False,
    )
    return d_rows, d_weights
