"""Softmax cross-entropy and its gradient on a GPU: one program a token, which goes over its row of logits twice.

A row of 151,936 BF16 logits is 300 KB, more than a multiprocessor holds, so it is read once for its largest score and its sum of
exponentials, and once more to be overwritten with the gradient. That is three passes over memory, no copy of the logits, and
nothing to compile but these few lines. A kernel that the compiler makes of the same formula takes 1.8 times as long.

A vocabulary that is no multiple of 8 leaves most rows at odd addresses; they are read value by value, slower and no less right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class SoftmaxTiling:
    """How rows are read; `python -m benchmarks.fused_kernels --only softmax_tilings` measures some ways.

    `block`: logits that a program takes at once, by `warps` warps. `programs`: how many there are, each with rows of its own; so
    few rows at once that their second pass finds them in the L2 cache. None: a program a row.
    """

    block: int = 4096
    warps: int = 8
    programs: int | None = None

    def block_of(self, vocabulary: int) -> int:
        """A small vocabulary takes a block no larger than itself, rounded up to a power of two."""
        return min(self.block, triton.next_power_of_2(vocabulary))


FASTEST = SoftmaxTiling()  # of those measured on an H200


@triton.jit
def row_sums(row, vocabulary: tl.constexpr, block: tl.constexpr):
    """The largest of a row's scores, and the sum of exp(score - largest), in one pass (Milakov and Gimelshein, 2018)."""
    maximum = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, block):
        column = start + tl.arange(0, block)
        scores = tl.load(row + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(scores))
        reference = tl.where(higher == -float("inf"), 0.0, higher)  # inf - inf, where all so far are -inf, would be NaN
        total = total * tl.exp(maximum - reference) + tl.sum(tl.exp(scores - reference))
        maximum = higher
    return maximum, total


@triton.jit
def target_score(row, label, vocabulary: tl.constexpr):
    """A label that is no token's gives NaN, and with it a loss that stops the run, not whatever lies in memory there."""
    return tl.load(row + label, mask=(label >= 0) & (label < vocabulary), other=float("nan")).to(tl.float32)


@triton.jit
def score_gradient(score, maximum, reciprocal, is_target):
    """softmax - one_hot, FP32; `reciprocal`: of the row's sum. Relative to the maximum, as a log-sum-exp of large scores has
    too few digits left to subtract. Compiled without fused multiply-adds, it has the same bits in every kernel."""
    return tl.exp(score - maximum) * reciprocal - is_target


@triton.jit
def _softmax_loss(
    logits,  # [n, vocabulary]
    labels,  # int64 [n]
    losses,  # FP32 [n]
    n,
    ignore: tl.constexpr,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
    with_gradient: tl.constexpr,
):
    for token in range(tl.program_id(0), n, tl.num_programs(0)):
        row = logits + tl.cast(token, tl.int64) * vocabulary  # 64 bits: a chunk may have more than 2**31 logits
        label = tl.load(labels + token)
        # Before the sums, whose barriers keep every store of the second pass behind this load.
        target = target_score(row, label, vocabulary)
        maximum, total = row_sums(row, vocabulary, block)
        tl.store(losses + token, tl.where(label == ignore, 0.0, tl.log(total) + (maximum - target)))
        if with_gradient:
            _overwrite_with_gradient(row, label, maximum, 1.0 / total, ignore, vocabulary, block)


@triton.jit
def _overwrite_with_gradient(
    row, label, maximum, reciprocal, ignore: tl.constexpr, vocabulary: tl.constexpr, block: tl.constexpr
):
    for start in range(0, vocabulary, block):
        column = start + tl.arange(0, block)
        inside = column < vocabulary
        scores = tl.load(row + column, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = score_gradient(scores, maximum, reciprocal, tl.where(column == label, 1.0, 0.0))
        gradient = tl.where(label == ignore, 0.0, gradient)
        tl.store(row + column, gradient.to(row.dtype.element_ty), mask=inside)


def softmax_gradient_(logits: Tensor, labels: Tensor, ignore: int, tiling: SoftmaxTiling = FASTEST) -> Tensor:
    """Overwrite logits [n, vocabulary], FP32 or BF16, with softmax - one_hot(label); return the losses [n], FP32.

    labels [n] int64; both results are zero where they are `ignore`. ValueError for logits whose rows do not follow each other.
    """
    return _run(logits, labels, ignore, tiling, with_gradient=True)


def token_losses(logits: Tensor, labels: Tensor, ignore: int, tiling: SoftmaxTiling = FASTEST) -> Tensor:
    """The losses alone, [n] FP32, the same bits as those of `softmax_gradient_`; logits stay as they are."""
    return _run(logits, labels, ignore, tiling, with_gradient=False)


def _run(logits: Tensor, labels: Tensor, ignore: int, tiling: SoftmaxTiling, *, with_gradient: bool) -> Tensor:
    check_rows(logits)
    n, vocabulary = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    programs = min(n, tiling.programs or n)
    with torch.cuda.device_of(logits):
        _softmax_loss[(programs,)](
            *(logits, labels.contiguous(), losses, n, ignore, vocabulary, tiling.block_of(vocabulary), with_gradient),
            num_warps=tiling.warps,
            enable_fp_fusion=False,
        )
    return losses


def check_rows(logits: Tensor) -> None:
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits of shape {list(logits.shape)} and strides {logits.stride()} are not rows one after the other")
