"""Triton kernels for softmax cross-entropy and its gradient.

Each program computes one token in two passes, because a row of 151,936 BF16 logits does not fit on
a multiprocessor. The first pass computes the maximum and the sum of exponentials of the row. The
second pass overwrites the row with the gradient. Few programs run at the same time, so that a row
of 50,000 logits is still in the L2 cache when the second pass reads it.

If the head computes in FP8, the gradient is written as FP8 codes, by rows and transposed. The
scales are known after the first pass: the entry of largest magnitude in a token's gradient is the
entry at its label, because all other entries are positive and sum to the same magnitude. If logits
are capped, another entry may be larger, so an additional pass computes the largest magnitude.
Values are rounded to BF16 before they are quantized, as if the gradient had been written in BF16.

If the model changes its logits (`pretrain.model.loss.logit_change`), the kernels change logits
after they load them, and multiply the gradient by the derivative of the change.

In the codes by rows, each row has a scale, so that the entry at the label is exact
(docs/developers/extending.md). The transposed codes must have one scale for all tokens, because
they are an operand of the weight gradient, which sums over tokens.
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
    program_tile,
    reciprocal,
    record_amax,
    scale_from_amax,
    store_columns,
    store_rows,
    tensor_scale,
)
from pretrain.model.loss.logit_change import UNCHANGED, LogitChange

# Number of logits that a program loads at a time, and its number of warps. These values were the
# fastest on an H100 for the loss with its gradient. Only two programs of 32 warps run on a
# multiprocessor at the same time.
BLOCK = 8192
WARPS = 32
# Number of neighbouring logits that share a maximum, if the vocabulary is a multiple of GROUP.
# A thread loads this many BF16 logits at once.
GROUP = 8
# Number of tokens and words of a tile of FP8 codes, and its number of warps. These values were the
# fastest on an H200.
FP8_TILE = (32, 128)
FP8_WARPS = 4


@triton.jit
def probability(score, maximum, inverse_total):
    """Return the probabilities of the softmax for the scores, FP32.

    `maximum` is the largest score of the row, and `inverse_total` is the reciprocal of the row's
    sum of exp(score - maximum). The maximum is subtracted, because subtracting the log-sum-exp from
    large scores would lose too many digits. The function is compiled without fused multiply-adds,
    so the result has the same bits in every kernel.
    """
    return exponential(score - maximum) * inverse_total


@triton.jit
def _changed(logits, factor: tl.constexpr, cap: tl.constexpr):
    """Return the changed logits: factor * logits, or cap * tanh(factor * logits / cap)."""
    if factor != 1.0:
        logits *= factor
    if cap != 0.0:
        logits = cap - 2 * cap / (exponential(logits * (2.0 / cap)) + 1.0)
    return logits


@triton.jit
def _gradient_of_logits(gradient, scores, factor: tl.constexpr, cap: tl.constexpr):
    """Return the gradient of the logits from the gradient of `scores`, the changed logits."""
    if factor != 1.0:
        gradient *= factor
    if cap != 0.0:
        share = scores * (1.0 / cap)
        gradient *= 1.0 - share * share
    return gradient


@triton.jit
def _softmax_loss(
    logits,  # [n, vocabulary]; overwritten with the gradient if `with_gradient`
    labels,  # int64 [n]
    losses,  # FP32 [n], written
    # The next five are None if the gradient is not written as FP8 codes.
    maxima,  # FP32 [n], written: largest score of each token
    reciprocals,  # FP32 [n], written: reciprocals of the sums of exponentials
    scales,  # FP32 [n], written: scale that maps the entry at the label to the maximum of `fp8`
    scales_inv,  # FP32 [n], written: 1 / scales
    amax,  # FP32 [1], updated: raised to the gradient's largest magnitude if it is smaller
    ignore: tl.constexpr,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    with_gradient: tl.constexpr,
    fp8: tl.constexpr,
    factor: tl.constexpr,
    cap: tl.constexpr,
):
    """Compute the loss of one token.

    With `with_gradient`, also overwrite the logits with the gradient. If `maxima` is given, also
    write the statistics that `_softmax_quantized_gradient` needs.
    """
    token = tl.program_id(0)
    # Use 64 bits, because a chunk may have more than 2**31 logits.
    row = logits + tl.cast(token, tl.int64) * vocabulary
    label = tl.load(labels + token)
    # Load the score of the label before the sums. All threads of a sum wait for each other, so this
    # load precedes the stores of the second pass. For a label that is out of range, the score is
    # NaN, and the NaN loss stops the run.
    has_target = (label != ignore) & (label >= 0) & (label < vocabulary)
    target = tl.load(row + label, mask=has_target, other=float("nan")).to(tl.float32)
    target = _changed(target, factor, cap)
    maximum, total = _maximum_and_total(row, vocabulary, block, group, factor, cap)
    tl.store(losses + token, tl.where(label == ignore, 0.0, tl.log(total) + (maximum - target)))
    inverse_total = 1.0 / total
    at_label = probability(target, maximum, inverse_total) - 1.0
    at_label = _gradient_of_logits(at_label, target, factor, cap).to(row.dtype.element_ty)
    if maxima is not None:
        magnitude = tl.abs(at_label.to(tl.float32))
        if cap != 0.0:
            # The derivative of the cap may make the entry at the label smaller than another entry.
            for start in range(0, vocabulary, block):
                column = start + _columns(block, group)
                scores = _load_scores(row, column, vocabulary, factor, cap)
                gradient = probability(scores, maximum, inverse_total)
                gradient = _gradient_of_logits(gradient, scores, factor, cap)
                gradient = tl.where((column < vocabulary) & (column != label), gradient, 0.0)
                largest = tl.max(tl.max(gradient, axis=1)).to(row.dtype.element_ty)
                magnitude = tl.maximum(magnitude, largest.to(tl.float32))
        magnitude = tl.where(label == ignore, 0.0, magnitude)
        record_amax(amax, magnitude + tl.zeros((1,), tl.float32))
        scale = scale_from_amax(magnitude, fp8)
        tl.store(scales + token, scale)
        tl.store(scales_inv + token, reciprocal(scale))
        tl.store(maxima + token, maximum)
        tl.store(reciprocals + token, inverse_total)
    if with_gradient:
        for start in range(0, vocabulary, block):
            column = start + _columns(block, group)
            scores = _load_scores(row, column, vocabulary, factor, cap)
            gradient = probability(scores, maximum, inverse_total)
            gradient = _gradient_of_logits(gradient, scores, factor, cap)
            gradient = tl.where(label == ignore, 0.0, gradient)
            tl.store(row + column, gradient, mask=column < vocabulary)
        # Subtract 1 at the label after all threads have written their probabilities.
        tl.debug_barrier()
        tl.store(row + label, at_label, mask=has_target)


@triton.jit
def _maximum_and_total(
    row,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    factor: tl.constexpr,
    cap: tl.constexpr,
):
    """Return the maximum of a row of scores, and its sum of exp(score - maximum), in one pass.

    The algorithm is that of Milakov and Gimelshein (2018). Each group of neighbouring columns has a
    maximum and a sum of its own, so that threads need not wait for each other before the row ends.
    """
    maximum = tl.full([block // group], -float("inf"), tl.float32)
    total = tl.zeros([block // group], tl.float32)
    for start in range(0, vocabulary, block):
        column = start + _columns(block, group)
        scores = _load_scores(row, column, vocabulary, factor, cap)
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        reference = _finite(higher)
        total *= exponential(maximum - reference)
        total += tl.sum(exponential(scores - reference[:, None]), axis=1)
        maximum = higher
    highest = tl.max(maximum)
    return highest, tl.sum(total * exponential(maximum - _finite(highest)))


@triton.jit
def _load_scores(row, column, vocabulary: tl.constexpr, factor: tl.constexpr, cap: tl.constexpr):
    """Return changed logits of a row in FP32. They are -inf after the end of the row."""
    inside = column < vocabulary
    logits = tl.load(row + column, mask=inside, other=-float("inf")).to(tl.float32)
    scores = _changed(logits, factor, cap)
    if cap != 0.0:
        scores = tl.where(inside, scores, -float("inf"))
    return scores


@triton.jit
def _columns(block: tl.constexpr, group: tl.constexpr):
    """Return the numbers from 0 to block - 1, as rows of `group` numbers."""
    first = tl.arange(0, block // group) * group
    return first[:, None] + tl.arange(0, group)[None, :]


@triton.jit
def _finite(maximum):
    """Return `maximum`, or 0 where all scores are -inf, because inf - inf would be NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


def softmax_loss(
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    *statistics: Tensor,
    change: LogitChange = UNCHANGED,
    with_gradient: bool = False,
    fp8: tl.dtype | None = None,
) -> Tensor:
    """Return the cross-entropy of each token, FP32 [n].

    Args:
        logits: Logits of each token, [n, vocabulary], FP32 or BF16, contiguous.
        labels: Target of each token, [n] int64.
        ignore: Label of tokens whose loss and gradient are zero.
        statistics: Five buffers for the outputs `maxima` to `amax` of `_softmax_loss`.
            `quantized_softmax_gradient` computes FP8 codes from them. Omit them otherwise.
        change: Change of the logits before softmax.
        with_gradient: True to overwrite the logits with their gradient. Without a change, this is
            softmax - one_hot(label).
        fp8: Format of the FP8 codes. Required if `statistics` are given.
    """
    n, vocabulary = logits.shape
    losses = logits.new_empty(n, dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    # If the vocabulary were no multiple of the group, a group would be loaded by several threads.
    group = math.gcd(vocabulary, GROUP)
    maxima, reciprocals, scales, scales_inv, amax = statistics or [None] * 5
    _softmax_loss[(n,)](
        logits=logits,
        labels=labels.contiguous(),
        losses=losses,
        maxima=maxima,
        reciprocals=reciprocals,
        scales=scales,
        scales_inv=scales_inv,
        amax=amax,
        ignore=ignore,
        vocabulary=vocabulary,
        block=block,
        group=group,
        with_gradient=with_gradient,
        fp8=fp8,
        **change._asdict(),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return losses


class QuantizedGradient(NamedTuple):
    """FP8 codes of a gradient by rows and transposed, and the factors that dequantize the codes."""

    rows: Tensor  # uint8 [n, vocabulary]
    columns: Tensor  # uint8 [vocabulary, n]
    rows_scale_inv: Tensor  # FP32 [n]: one factor for each row of `rows`
    scale_inv: Tensor  # FP32 [1]: factor for `columns`


@triton.jit
def _softmax_quantized_gradient(
    logits,  # BF16 [n, vocabulary]
    labels,  # int64 [n]
    maxima,  # FP32 [n]
    reciprocals,  # FP32 [n]
    rows_scale,  # FP32 [n]
    amax,  # FP32 [1]: amax of the gradient, from which the scale of `columns` is computed
    scale,  # FP32 scalar: scale of `columns`, or None to compute it from `amax`
    rows,  # uint8 [n, vocabulary], written
    columns,  # uint8 [vocabulary, n], written
    scale_inv,  # FP32 [1], written
    n,
    vocabulary,
    ignore: tl.constexpr,
    fp8: tl.constexpr,
    tokens_of_tile: tl.constexpr,
    words_of_tile: tl.constexpr,
    factor: tl.constexpr,
    cap: tl.constexpr,
):
    """Write the codes of one tile of the gradient, by rows and transposed."""
    token, word = program_tile(tokens_of_tile, words_of_tile)
    columns_scale = tensor_scale(scale, amax, None, scale_inv, fp8)
    label = tl.load(labels + token)[:, None]
    scores = _changed(load_rows(logits, token, word, vocabulary), factor, cap)
    maximum = tl.load(maxima + token)[:, None]
    inverse_total = tl.load(reciprocals + token)[:, None]
    gradient = probability(scores, maximum, inverse_total)
    gradient -= tl.where(word[None, :] == label, 1.0, 0.0)
    gradient = _gradient_of_logits(gradient, scores, factor, cap)
    gradient = tl.where(label == ignore, 0.0, gradient).to(logits.dtype.element_ty).to(tl.float32)
    row_codes = fp8_codes(gradient, tl.load(rows_scale + token)[:, None], fp8)
    store_rows(row_codes, rows, token, word, vocabulary)
    store_columns(fp8_codes(gradient, columns_scale, fp8), columns, token, word, n)


def quantized_softmax_gradient(
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    fp8: torch.dtype,
    amax: Tensor,
    scale: Tensor | None,
    change: LogitChange = UNCHANGED,
) -> tuple[Tensor, QuantizedGradient]:
    """Return the cross-entropy of each token, FP32 [n], and the gradient of the logits in FP8.

    Args:
        logits: Logits of each token, [n, vocabulary] BF16, not changed.
        labels: Target of each token, [n] int64.
        ignore: Label of tokens whose loss and gradient are zero.
        fp8: torch.float8_e4m3fn or float8_e5m2.
        amax: FP32 [1]. If the largest magnitude of the gradient exceeds `amax`, `amax` is set to
            this magnitude.
        scale: Scale of the transposed codes under delayed scaling, one FP32 value. If it is None,
            the scale is computed from the largest magnitude of the gradient, and `amax` must be
            zero before the call.
        change: Change of the logits before softmax.
    """
    n, vocabulary = logits.shape
    labels = labels.contiguous()
    maxima, reciprocals, rows_scale, rows_scale_inv = logits.new_empty(4, n, dtype=torch.float32)
    rows = logits.new_empty(n, vocabulary, dtype=torch.uint8)
    columns = logits.new_empty(vocabulary, n, dtype=torch.uint8)
    scale_inv = logits.new_empty(1, dtype=torch.float32)
    # Tiles must be completely inside of the gradient. FP8 products require sizes that are multiples
    # of 16, and usual sizes are multiples of 64.
    tile_tokens = math.gcd(n, FP8_TILE[0])
    tile_words = math.gcd(vocabulary, FP8_TILE[1])
    statistics = (maxima, reciprocals, rows_scale, rows_scale_inv, amax)
    losses = softmax_loss(logits, labels, ignore, *statistics, change=change, fp8=TYPES[fp8])
    _softmax_quantized_gradient[(n // tile_tokens, vocabulary // tile_words)](
        logits=logits,
        labels=labels,
        maxima=maxima,
        reciprocals=reciprocals,
        rows_scale=rows_scale,
        amax=amax,
        scale=scale,
        rows=rows,
        columns=columns,
        scale_inv=scale_inv,
        n=n,
        vocabulary=vocabulary,
        ignore=ignore,
        fp8=TYPES[fp8],
        **change._asdict(),
        tokens_of_tile=tile_tokens,
        words_of_tile=tile_words,
        num_warps=FP8_WARPS,
        enable_fp_fusion=False,
    )
    return losses, QuantizedGradient(rows, columns, rows_scale_inv, scale_inv)
