"""A kernel of packed attention as one operator: differentiable in q, k and v, and left whole by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def room_for_log_sums(q: Tensor) -> Tensor:
    """Allocates, for q [T, H, D], memory for the logarithms of the softmax's sums [H, T], FP32."""
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def differentiable(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], statistics: Callable[[Tensor], tuple[Tensor, ...]]
) -> CustomOpDef:
    """`pretrain::name`, which computes `forward`(q, k, v, cu_seqlens, *numbers), q [T, H, D], k and v [T, KV, D]: an output
    shaped as q, and what backward needs beside it.

    `backward`(d_output, q, k, v, *forward's results, cu_seqlens, *numbers) gives dq, dk and dv. `statistics`: of q, empty tensors
    of the shapes and dtypes of what backward needs, which is all that torch.compile is told.
    """
    attend = torch.library.custom_op(f"pretrain::{name}", forward, mutates_args=())
    attend_backward = torch.library.custom_op(f"pretrain::{name}_backward", backward, mutates_args=())

    @attend.register_fake
    def _(q: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return q.new_empty(q.shape), *statistics(q)

    @attend_backward.register_fake
    def _(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, cu_seqlens, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens)
        ctx.set_materialize_grads(False)  # nothing flows into the statistics

    def differentiate(ctx: Any, d_output: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (1 + len(ctx.numbers))
        if d_output is None:
            return (None, None, None, *nothing)
        return *attend_backward(d_output, *ctx.saved_tensors, *ctx.numbers), *nothing

    attend.register_autograd(differentiate, setup_context=save)
    return attend
