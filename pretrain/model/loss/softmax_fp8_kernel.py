"""The softmax gradient as FP8 products take it: quantized with one scale, by rows and transposed, straight from the logits.

In BF16 it would be written, read for its largest value, and read again to be quantized and transposed: each time a gigabyte a
chunk. Here the first pass over the logits, which the softmax needs anyway, also finds the largest value, since a token's largest
gradient is the one at its label: the others sum to as much, so none of them is larger. The second pass writes FP8 twice.

Values are rounded to the logits' BF16 before they are quantized. One rounding would do, but so the operands have the very bits
that the gradient has when it is written in BF16 and quantized apart, and one path can be held against the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.loss.softmax_kernel import FASTEST, check_rows, row_sums, score_gradient, target_score
from pretrain.precision.fp8_tile import FP32_MAX, record_amax, scale_from_amax, store_tensor_scaled
from pretrain.precision.fp8_tile import reciprocal as inverse

TILE = (64, 64)  # tokens and words of a tile that is transposed, by WARPS: the fastest of those measured on an H200
WARPS = 4
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


class QuantizedGradient(NamedTuple):
    """Codes [n, vocabulary] and their transpose [vocabulary, n], uint8, and what to multiply them by, FP32 [1]."""

    rows: Tensor
    columns: Tensor
    scale_inv: Tensor


@triton.jit
def _softmax_statistics(
    logits,  # [n, vocabulary]
    labels,  # int64 [n]
    losses,  # FP32 [n]
    maxima,  # FP32 [n]: largest scores
    reciprocals,  # FP32 [n]: of the sums of exponentials
    amax,  # FP32 [1]: raised to the gradient's largest magnitude
    ignore: tl.constexpr,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary
    label = tl.load(labels + token)
    target = target_score(row, label, vocabulary)
    maximum, total = row_sums(row, vocabulary, block)
    reciprocal = 1.0 / total
    largest = score_gradient(target, maximum, reciprocal, 1.0).to(logits.dtype.element_ty).to(tl.float32)
    record_amax(amax, tl.where(label == ignore, 0.0, largest) + tl.zeros((1,), tl.float32))
    tl.store(losses + token, tl.where(label == ignore, 0.0, tl.log(total) + (maximum - target)))
    tl.store(maxima + token, maximum)
    tl.store(reciprocals + token, reciprocal)


@triton.jit
def _softmax_quantized_gradient(
    logits,
    labels,
    maxima,
    reciprocals,
    amax,  # FP32 [1]; the scale is made from it where there is none
    scale,  # FP32 scalar or None
    rows,  # uint8 [n, vocabulary]
    columns,  # uint8 [vocabulary, n]
    scale_inv,  # FP32 [1]
    n,
    vocabulary,
    ignore: tl.constexpr,
    fp8: tl.constexpr,
    power_of_two: tl.constexpr,
    tokens_of_tile: tl.constexpr,
    words_of_tile: tl.constexpr,
):
    token = tl.program_id(0) * tokens_of_tile + tl.arange(0, tokens_of_tile)
    word = tl.program_id(1) * words_of_tile + tl.arange(0, words_of_tile)
    used = scale_from_amax(tl.load(amax), 0.0, FP32_MAX, power_of_two, fp8) if scale is None else tl.load(scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, inverse(used, False))
    label = tl.load(labels + token)[:, None]
    scores = tl.load(logits + token.to(tl.int64)[:, None] * vocabulary + word[None, :]).to(tl.float32)
    maximum, reciprocal = tl.load(maxima + token)[:, None], tl.load(reciprocals + token)[:, None]
    gradient = score_gradient(scores, maximum, reciprocal, tl.where(word[None, :] == label, 1.0, 0.0))
    gradient = tl.where(label == ignore, 0.0, gradient).to(logits.dtype.element_ty).to(tl.float32)
    store_tensor_scaled(gradient, used, rows, columns, token, word, n, vocabulary, fp8)


def quantized_softmax_gradient(
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    fp8: torch.dtype,
    amax: Tensor,
    scale: Tensor | None,
    *,
    power_of_two: bool = False,
    tile: tuple[int, int] = TILE,
    warps: int = WARPS,
) -> tuple[Tensor, QuantizedGradient]:
    """Losses [n] FP32 and the quantized gradient of logits [n, vocabulary] BF16, which stay as they are.

    `fp8`: torch.float8_e4m3fn or float8_e5m2. `amax` FP32 [1] is raised to the gradient's largest magnitude. `scale`, one FP32
    value, is what to multiply by, as delayed scaling has it; None takes the scale from `amax`, which then must come as zero,
    rounded down to a power of two if asked. labels [n] int64; where they are `ignore`, losses and gradient are zero.
    """
    check_rows(logits)
    n, vocabulary = logits.shape
    labels = labels.contiguous()
    losses, maxima, reciprocals = torch.empty(3, n, dtype=torch.float32, device=logits.device)
    rows, columns = (torch.empty(shape, dtype=torch.uint8, device=logits.device) for shape in ((n, vocabulary), (vocabulary, n)))
    gradient = QuantizedGradient(rows, columns, torch.empty(1, dtype=torch.float32, device=logits.device))
    # Tiles must lie inside. Sizes that FP8 products take are multiples of 16, and those in use of 64 at least.
    tile = math.gcd(n, tile[0]), math.gcd(vocabulary, tile[1])
    with torch.cuda.device_of(logits):
        _softmax_statistics[(n,)](
            *(logits, labels, losses, maxima, reciprocals, amax),
            *(ignore, vocabulary, FASTEST.block_of(vocabulary)),
            num_warps=FASTEST.warps,
            enable_fp_fusion=False,
        )
        _softmax_quantized_gradient[(n // tile[0], vocabulary // tile[1])](
            *(logits, labels, maxima, reciprocals, amax, scale, *gradient, n, vocabulary),
            *(ignore, _FORMATS[fp8], power_of_two, *tile),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return losses, gradient
