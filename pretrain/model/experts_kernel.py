"""The way back from a mixture's experts to its tokens, in BF16 on a GPU: each token's weighted sum of its choices' rows, in FP32
and rounded once, and the gradients of both. A program has a token: sums have one order, and no choice is written out twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _combine(
    rows, place, weights, y, choices: tl.constexpr, width: tl.constexpr, step: tl.constexpr
):
    token, j = tl.program_id(0).to(tl.int64), tl.arange(0, step)
    total = tl.zeros([step], tl.float32)
    for n in tl.range(0, choices):
        at = tl.load(place + token * choices + n) * width + j
        values = tl.load(rows + at, mask=j < width, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + token * choices + n).to(tl.float32)
        total += values
    tl.store(y + token * width + j, total.to(tl.bfloat16), mask=j < width)


@triton.jit
def _combine_backward(
    dy,  # BF16 [tokens, width]
    rows,  # BF16 [rows, width]
    place,  # int64 [tokens x choices]
    weights,  # [tokens, choices]
    d_rows,  # as rows
    d_weights,  # FP32 [tokens, choices]
    choices: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,  # the least power of two that holds a row
):
    token, j = tl.program_id(0).to(tl.int64), tl.arange(0, step)
    gradient = tl.load(dy + token * width + j, mask=j < width, other=0.0).to(tl.float32)
    for n in tl.range(0, choices):
        choice = token * choices + n
        at = tl.load(place + choice) * width + j
        values = tl.load(rows + at, mask=j < width, other=0.0).to(tl.float32)
        tl.store(d_weights + choice, tl.sum(values * gradient, axis=0))
        scaled = gradient * tl.load(weights + choice).to(tl.float32)
        tl.store(d_rows + at, scaled.to(tl.bfloat16), mask=j < width)


def combine(rows: Tensor, place: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    """The sum [tokens, width] of each token's `rows` [rows, width], at `place` [tokens x choices], times their `weights`
    [tokens, choices], where there are any. BF16, contiguous; weights of any dtype."""
    width = rows.shape[1]
    y = rows.new_empty(tokens, width)
    arguments = (
        rows,
        place,
        weights,
        y,
        len(place) // tokens,
        width,
        triton.next_power_of_2(width),
    )
    _combine[(tokens,)](*arguments, enable_fp_fusion=False)
    return y


def combine_backward(
    dy: Tensor, rows: Tensor, place: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `rows`, which holds anything where no choice is, and of `weights`, FP32."""
    (tokens, width), d_rows = dy.shape, torch.empty_like(rows)
    d_weights = torch.empty_like(weights, dtype=torch.float32)
    arguments = (
        dy,
        rows,
        place,
        weights,
        d_rows,
        d_weights,
        weights.shape[1],
        width,
        triton.next_power_of_2(width),
    )
    _combine_backward[(tokens,)](*arguments, enable_fp_fusion=False)
    return d_rows, d_weights
