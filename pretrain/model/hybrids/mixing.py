"""Compute the convolutions and states of a hybrid model for each document alone.

On a CPU, the functions call transformers' function once for each document. This is exact, but slow.
On a GPU, the kernels of the package fla-core compute all documents at once
(`pretrain.model.hybrids.kernels`).

Each function has the arguments of transformers' function, and two more in front of them:

* `plain`: transformers' function.
* `cu_seqlens`: the offsets of the documents, as in packed attention (`pretrain.model.attention`).

T is the number of tokens of a microbatch. Tensors have the shape [1, T, ...]. The input and the
output of a convolution have the shape [1, channels, T].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.hybrids import kernels


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    """Return the lengths of the documents. Skip unused entries, which repeat the last offset."""
    return [length for length in cu_seqlens.diff().tolist() if length]


def convolution(
    plain: Callable[..., Tensor],
    cu_seqlens: Tensor,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Return the causal convolution of each channel, [1, channels, T].

    weight: [channels, width]. The kernel covers a token and the `width` - 1 tokens before it.
    """
    if hidden_states.is_cuda:
        return kernels.convolution(cu_seqlens, hidden_states, weight, bias, activation)
    parts = hidden_states.split(lengths_of(cu_seqlens), -1)
    return torch.cat([plain(part, weight, bias, activation) for part in parts], -1)


def gated_delta_rule(
    plain: Callable[..., tuple[Tensor, None]],
    cu_seqlens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output of the gated delta rule [1, T, heads, D], and None.

    None takes the place of the last state, which only generation needs. The function normalizes
    queries and keys.

    query, key, value: [1, T, heads, D]. The D of values may differ from the D of queries and keys.
    g: logarithms of the decay of the state, [1, T, heads].
    beta: factors of the corrections, [1, T, heads].
    """
    tensors = (query, key, value, g, beta)
    if query.is_cuda:
        return kernels.gated_delta_rule(cu_seqlens, *tensors), None
    lengths = lengths_of(cu_seqlens)
    documents = zip(*(tensor.split(lengths, 1) for tensor in tensors), strict=True)
    outputs = [plain(*document, use_qk_l2norm_in_kernel=True)[0] for document in documents]
    return torch.cat(outputs, 1), None


def scan(
    plain: Callable[..., Tensor],
    cu_seqlens: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    """Return the output of Mamba-2's scan, [1, T, heads, D].

    hidden_states: [1, T, heads, D].
    dt: time steps before their bias and softplus, [1, T, heads].
    A, D: the decay and the residual of each head, [heads].
    B, C: [1, T, groups, state].
    """
    if hidden_states.is_cuda:
        steps = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
        return kernels.scan(cu_seqlens, hidden_states, steps, A, B, C, D)
    lengths = lengths_of(cu_seqlens)
    parts = (tensor.split(lengths, 1) for tensor in (hidden_states, dt, B, C))
    outputs = [
        plain(
            *(x, steps, A, b, c, chunk_size, D, dt_bias),
            dt_softplus=True,
            dt_limit=dt_limit,
        )
        for x, steps, b, c in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, 1)


def not_fused(*_: Any, **__: Any) -> None:
    """Return None, so that a Mamba-2 layer computes its convolution, scan and output separately.

    The fused kernel would compute the output projection in BF16, even if it is a low-precision
    linear.
    """


# Map the names of transformers' functions to the functions that separate documents.
MIXING: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "mamba2_chunk_scan": scan,
    "mamba2_split_conv1d_scan_combined": not_fused,
}
