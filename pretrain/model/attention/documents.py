"""Packed attention on a CPU: torch's flash kernel for CPUs, called once a document.

With a mask that kernel computes whole packs, what lies between documents included. A document alone is causal attention and no
more: the work grows with the squares of the documents' lengths, not with that of the pack's. Everything is computed in one order,
so bits repeat with the same number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from pretrain.model.attention.operator import differentiable, room_for_log_sums

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention within each document: q, k, v [T, H, D] on a CPU, FP32 or BF16 -> [T, H, D], differentiable in all three.
    `cu_seqlens`: 0, the documents' ends, then T as often as may be."""
    return _attend(q, k, v, cu_seqlens, scale)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output [T, H, D] and, for backward, the logarithms of the softmax's sums [H, T], FP32."""
    output, log_sums = torch.empty_like(q, memory_format=torch.contiguous_format), room_for_log_sums(q)
    for *states, into, sums in _by_document(cu_seqlens, q, k, v, output, log_sums=log_sums):
        result = _KERNEL(*states, 0.0, True, scale=scale)
        into.copy_(result[0])
        sums.copy_(result[1])
    return output, log_sums


def _backward(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv [T, H, D], contiguous."""
    gradients = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    for *states, dq, dk, dv, sums in _by_document(cu_seqlens, d_output, q, k, v, output, *gradients, log_sums=log_sums):
        result = _KERNEL_BACKWARD(*states, sums.contiguous(), 0.0, True, scale=scale)
        for into, part in zip((dq, dk, dv), result, strict=True):
            into.copy_(part)
    return gradients


def _by_document(cu_seqlens: Tensor, *states: Tensor, log_sums: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each document, views: [1, H, tokens, D] of every [T, H, D], and [1, H, tokens] of `log_sums` [H, T]."""
    lengths = [end - begin for begin, end in pairwise(cu_seqlens.tolist()) if end > begin]
    batches = (each.transpose(0, 1)[None].split_with_sizes(lengths, 2) for each in states)
    return zip(*batches, log_sums[None].split_with_sizes(lengths, 2), strict=True)


_attend = differentiable("attend_by_document", _forward, _backward, lambda q: (room_for_log_sums(q),))
