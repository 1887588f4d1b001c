"""Softmax cross-entropy and its gradient on a GPU: one program a token, which goes over its row of logits twice.

A row of 151,936 BF16 logits is more than a multiprocessor holds. So it is read once for its largest score and its sum of
exponentials, and once more to be overwritten with the gradient. What the compiler makes of the formula takes 1.8 times as long.

Where FP8 products follow, the gradient is written as codes at once, by rows and transposed. Their scales are known after the
first pass: a token's largest gradient is the one at its label, as all others sum to as much. Values are rounded to BF16 first,
so the codes are those of a gradient that was written in BF16 and then quantized.

Each row has a scale of its own, so that its label's entry is exact. docs/log.md (21 November 2026) has what one scale for all
rows costs. The transpose must have one, as its product sums over tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.fused.fp8_tile import (
    TYPES,
    exponential,
    fp8_codes,
    load_rows,
    reciprocal,
    record_amax,
    scale_from_amax,
    store_columns,
    store_rows,
    tensor_scale,
)

# logits that a program takes at once, and by how many warps: the fastest of those measured on an
# H200
BLOCK, WARPS = 4096, 8
# tokens and words of a tile that is transposed, by FP8_WARPS: the fastest of those measured on an
# H200
FP8_TILE = (32, 128)
FP8_WARPS = 4


@triton.jit
def score_gradient(score, maximum, of_total, is_target):
    """softmax - one_hot, FP32; `of_total`: the reciprocal of the row's sum. Relative to the maximum, as a log-sum-exp of large
    scores has too few digits left to subtract. Compiled without fused multiply-adds, it has the same bits in every kernel."""
    return tl.exp(score - maximum) * of_total - is_target


@triton.jit
def _softmax_loss(
    logits,  # [n, vocabulary]
    labels,  # int64 [n]
    losses,  # FP32 [n]
    maxima,  # FP32 [n]: largest scores; as the four below None where no codes follow
    reciprocals,  # FP32 [n]: of the sums of exponentials
    scales,  # FP32 [n]: what bring the labels' entries to the largest value of `fp8`
    scales_inv,  # FP32 [n]
    amax,  # FP32 [1]: raised to the gradient's largest magnitude
    ignore: tl.constexpr,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
    with_gradient: tl.constexpr,  # written over the logits
    fp8: tl.constexpr,
):
    token = tl.program_id(0)
    # 64 bits: a chunk may have more than 2**31 logits
    row = logits + tl.cast(token, tl.int64) * vocabulary
    label = tl.load(labels + token)
    # Before the sums, whose barriers keep every store of the second pass behind this load.
    # A label that is no token's gives NaN, and with it a loss that stops the run, not whatever lies in memory there.
    target = tl.load(row + label, mask=(label >= 0) & (label < vocabulary), other=float("nan")).to(
        tl.float32
    )
    # The largest score, and the sum of exp(score - largest), in one pass (Milakov and Gimelshein, 2018).
    maximum = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, block):
        column = start + tl.arange(0, block)
        scores = tl.load(row + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(scores))
        # inf - inf, where all so far are -inf, would be NaN
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * exponential(maximum - reference) + tl.sum(exponential(scores - reference))
        maximum = higher
    tl.store(losses + token, tl.where(label == ignore, 0.0, tl.log(total) + (maximum - target)))
    of_total = 1.0 / total
    if maxima is not None:
        magnitude = tl.abs(
            score_gradient(target, maximum, of_total, 1.0)
            .to(logits.dtype.element_ty)
            .to(tl.float32)
        )
        magnitude = tl.where(label == ignore, 0.0, magnitude)
        record_amax(amax, magnitude + tl.zeros((1,), tl.float32))
        scale = scale_from_amax(magnitude, fp8)
        tl.store(scales + token, scale)
        tl.store(scales_inv + token, reciprocal(scale))
        tl.store(maxima + token, maximum)
        tl.store(reciprocals + token, of_total)
    if with_gradient:
        for start in range(0, vocabulary, block):
            column = start + tl.arange(0, block)
            inside = column < vocabulary
            scores = tl.load(row + column, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = score_gradient(
                scores, maximum, of_total, tl.where(column == label, 1.0, 0.0)
            )
            gradient = tl.where(label == ignore, 0.0, gradient)
            tl.store(row + column, gradient.to(row.dtype.element_ty), mask=inside)


def softmax_loss(
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    *statistics: Tensor,
    with_gradient: bool = False,
    fp8: tl.dtype | None = None,
) -> Tensor:
    """The losses [n], FP32, of logits [n, vocabulary], FP32 or BF16, contiguous; `with_gradient` overwrites these with
    softmax - one_hot(label). labels [n] int64; both results are zero where they are `ignore`. `statistics`, `fp8`: what codes of
    the gradient need, as `_softmax_loss` has it."""
    n, vocabulary = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _softmax_loss[(n,)](
        *(logits, labels.contiguous(), losses, *(statistics or [None] * 5)),
        *(ignore, vocabulary, block, with_gradient, fp8),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return losses


class QuantizedGradient(NamedTuple):
    """Codes by rows [n, vocabulary] and transposed [vocabulary, n], uint8, and what to multiply them by: FP32 [n], one for each
    row, and FP32 [1] for all columns."""

    rows: Tensor
    columns: Tensor
    rows_scale_inv: Tensor
    scale_inv: Tensor


@triton.jit
def _softmax_quantized_gradient(
    logits,
    labels,
    maxima,
    reciprocals,
    rows_scale,
    amax,  # FP32 [1]; the columns' scale is made from it where there is none
    scale,  # FP32 scalar or None
    rows,  # uint8 [n, vocabulary]
    columns,  # uint8 [vocabulary, n]
    scale_inv,  # FP32 [1]
    n,
    vocabulary,
    ignore: tl.constexpr,
    fp8: tl.constexpr,
    tokens_of_tile: tl.constexpr,
    words_of_tile: tl.constexpr,
):
    token = tl.program_id(0) * tokens_of_tile + tl.arange(0, tokens_of_tile)
    word = tl.program_id(1) * words_of_tile + tl.arange(0, words_of_tile)
    used = tensor_scale(scale, amax, None, scale_inv, fp8)
    label = tl.load(labels + token)[:, None]
    scores = load_rows(logits, token, word, vocabulary)
    maximum, of_total = tl.load(maxima + token)[:, None], tl.load(reciprocals + token)[:, None]
    gradient = score_gradient(scores, maximum, of_total, tl.where(word[None, :] == label, 1.0, 0.0))
    gradient = tl.where(label == ignore, 0.0, gradient).to(logits.dtype.element_ty).to(tl.float32)
    store_rows(
        fp8_codes(gradient, tl.load(rows_scale + token)[:, None], fp8),
        rows,
        token,
        word,
        vocabulary,
    )
    store_columns(fp8_codes(gradient, used, fp8), columns, token, word, n)


def quantized_softmax_gradient(
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    fp8: torch.dtype,
    amax: Tensor,
    scale: Tensor | None,
) -> tuple[Tensor, QuantizedGradient]:
    """Losses [n] FP32 and the quantized gradient of logits [n, vocabulary] BF16, which stay as they are.

    `fp8`: torch.float8_e4m3fn or float8_e5m2. `amax` FP32 [1] is raised to the gradient's largest magnitude. `scale`, one FP32
    value, is what to multiply columns by, as delayed scaling has it; None takes it from `amax`, which then must come as zero.
    labels [n] int64; where they are `ignore`, losses and gradient are zero.
    """
    n, vocabulary = logits.shape
    labels = labels.contiguous()
    maxima, reciprocals, rows_scale, rows_scale_inv = torch.empty(
        4, n, dtype=torch.float32, device=logits.device
    )
    rows, columns = (
        torch.empty(shape, dtype=torch.uint8, device=logits.device)
        for shape in ((n, vocabulary), (vocabulary, n))
    )
    scale_inv = torch.empty(1, dtype=torch.float32, device=logits.device)
    # Tiles must lie inside. Sizes that FP8 products take are multiples of 16, and those in use of 64 at least.
    tile = math.gcd(n, FP8_TILE[0]), math.gcd(vocabulary, FP8_TILE[1])
    losses = softmax_loss(
        logits,
        labels,
        ignore,
        maxima,
        reciprocals,
        rows_scale,
        rows_scale_inv,
        amax,
        fp8=TYPES[fp8],
    )
    _softmax_quantized_gradient[(n // tile[0], vocabulary // tile[1])](
        *(
            logits,
            labels,
            maxima,
            reciprocals,
            rows_scale,
            amax,
            scale,
            rows,
            columns,
            scale_inv,
            n,
            vocabulary,
        ),
        *(ignore, TYPES[fp8], *tile),
        num_warps=FP8_WARPS,
        enable_fp_fusion=False,
    )
    return losses, QuantizedGradient(rows, columns, rows_scale_inv, scale_inv)
