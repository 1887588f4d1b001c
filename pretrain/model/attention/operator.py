"""What all kernels of packed attention have in common: how heads lie in rows, and how a kernel becomes one operator, which is
differentiable in q, k and v and which torch.compile leaves whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


@dataclass(frozen=True)
class Heads:
    """A row of the stacked query, key and value product holds `query` heads, then `kv` key heads, then `kv` value heads, of `dim`
    values each."""

    query: int
    kv: int
    dim: int

    @property
    def rotated(self) -> int:
        """Heads that carry a position: the queries' and the keys'."""
        return self.query + self.kv

    @property
    def count(self) -> int:
        return self.query + 2 * self.kv

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.count * self.dim

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of `rows` [T, width]: queries [T, query, dim], keys and values [T, kv, dim]."""
        queries, keys, values = rows.unflatten(1, (self.count, self.dim)).split((self.query, self.kv, self.kv), dim=1)
        return queries, keys, values


@dataclass(frozen=True)
class HeadNorms:
    """The root-mean-square norms that Qwen3 puts on every query and key head: their weights [dim], any float dtype."""

    query: Tensor
    key: Tensor
    eps: float


def room_for_log_sums(q: Tensor) -> Tensor:
    """Memory for the logarithms of the softmax's sums of q [T, H, D]: [H, T] FP32."""
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def differentiable(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], statistics: Callable[[Tensor], tuple[Tensor, ...]]
) -> CustomOpDef:
    """`pretrain::name`: `forward`(q, k, v, cu_seqlens, *numbers), with q [T, H, D] and k, v [T, KV, D], gives an output shaped as
    q and the statistics that backward needs.

    `backward`(d_output, q, k, v, *forward's results, cu_seqlens, *numbers) gives dq, dk and dv. `statistics`: of q, empty tensors
    of the statistics' shapes and dtypes, for torch.compile.
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
