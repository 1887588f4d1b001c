"""Packed attention on a CPU: torch's flash kernel for CPUs, called once a document.

With a mask that kernel computes whole packs, what lies between documents included. A document alone is causal attention and no
more: the work grows with the squares of the documents' lengths, not with that of the pack's. What a call costs beside its work is
small against that, for short documents too.

Everything is computed in one order, so bits repeat with the same number of threads.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pretrain.model.attention.operator import differentiable, room_for_log_sums

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention within each document: q, k, v [T, H, D] on a CPU, FP32 or BF16 -> [T, H, D], differentiable in all three.

    `cu_seqlens`: 0, the documents' ends, then T as often as may be. One operator to torch.compile, whatever the number of slots.
    """
    return _attend(q, k, v, cu_seqlens, scale)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, D] and, for backward, the logarithms of the softmax's sums [H, T], FP32."""
    output, log_sums = torch.empty_like(q, memory_format=torch.contiguous_format), room_for_log_sums(q)
    for document in _documents(cu_seqlens):
        states = (_as_batch(each, document) for each in (q, k, v))
        found, sums = _KERNEL(*states, 0.0, True, scale=scale)
        output[document] = found[0].transpose(0, 1)
        log_sums[:, document] = sums[0]
    return output, log_sums


def _backward(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv [T, H, D], contiguous."""
    gradients = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    for document in _documents(cu_seqlens):
        tensors = (_as_batch(each, document) for each in (d_output, q, k, v, output))
        found = _KERNEL_BACKWARD(*tensors, log_sums[None, :, document].contiguous(), 0.0, True, scale=scale)
        for whole, part in zip(gradients, found, strict=True):
            whole[document] = part[0].transpose(0, 1)
    return gradients


def _documents(cu_seqlens: Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise(cu_seqlens.tolist()) if end > begin]


def _as_batch(states: Tensor, document: slice) -> Tensor:
    """[T, H, D] -> the document's [1, H, tokens, D], a view."""
    return states[document].transpose(0, 1)[None]


_attend = differentiable("attend_by_document", _forward, _backward, lambda q: (room_for_log_sums(q),))
