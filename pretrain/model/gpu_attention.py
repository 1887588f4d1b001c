"""Packed attention's two fastest kernels on a GPU: FlashAttention-4 (package `flash-attn-4`) and cuDNN's, through the functions
below Transformer Engine's DotProductAttention, which would choose among backends in every call and cut compiled layers in pieces.

All are functions without a graph: fused layers do more than attend, and pretrain.model.attention makes operators of them.
Arguments: q and the output are [T, H, D], k and v [T, KV, D], BF16 or FP16. `ends`: [slots + 1] int32, 0, the documents' ends,
then T repeated. No document is longer than `longest`. `scale`: what q k^T is multiplied by. Attention is causal in each document.

FlashAttention-4 compiles a head shape once, for some ten seconds, whatever the numbers of tokens and documents, and keeps that in
`$XDG_CACHE_HOME/pretrain/flash_attn_4` unless FLASH_ATTENTION_CUTE_DSL_CACHE_DIR names another folder. cuDNN rounds the number of
slots up to a power of two (32 to 512, then to multiples of 512), plans once for each, and takes pointers without strides.

In both backwards, blocks of keys add to dQ as they finish, so its last bits may differ from run to run; all else repeats bit for
bit. `deterministic: true` asks for a fixed order: FlashAttention-4's takes a tenth longer, cuDNN's takes a workspace on Hopper
that grows with the square of the tokens.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pretrain.precision import transformer_engine

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "flash_attn_4"
# Both are read when the package is imported, and Transformer Engine imports it too: so they are set before either can be.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_CACHE))

MOST_CUDNN_DIM = 128  # of a head: on an H200 cuDNN's dq was a third off with heads of 256, without an error
# Tokens of a mean document, times the heads of a group: beyond, products take so long that memory does not count. Empty slots are
# documents here, since only the device knows how many there are: 4 packs of one document each have 15 slots.
LONG = 8192
WIDE = 4  # query heads of a group: each is a call of its own, and wider groups have not been measured


# ── FlashAttention-4 ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def flash_forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and for backward the logarithms of the softmax's sums [H, T], FP32."""
    options = _documents(ends, longest) | {"softmax_scale": scale, "causal": True, "return_lse": True}
    output, log_sums, *_ = _flash()._flash_attn_fwd(q, k, v, **options)
    return output, log_sums


def flash_backward_in_parts(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous; dk and dv may be [T, KV, H / KV, D], one part for each query head, which the caller adds up.

    The kernel would have the query heads of a group add to FP32 sums in memory, which must be cleared before and rounded
    afterwards. So it is given heads that share nothing: the first of each group, then the second, and each writes its gradient
    once. On an H200 that takes 911 us for 1,299 with 16 heads in groups of two and documents of 180 tokens, and longer than the
    kernel's own way with groups of four and documents of 4,096 (benchmarks/results/h200_kernels_in_parts.json).
    """
    options = _documents(ends, longest) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    backward, heads, group = _flash()._flash_attn_bwd, k.shape[1], q.shape[1] // k.shape[1]
    apart = 1 < group <= WIDE and group * len(q) <= LONG * (len(ends) - 1)
    if not apart:
        dq, dk, dv, *_ = backward(q, k, v, output, d_output, log_sums, scale, True, **options)
        return dq, dk, dv
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (each.new_empty(len(each), heads, group, each.shape[2]) for each in (k, v))
    grouped = [each.unflatten(1, (heads, group)) for each in (q, output, d_output, dq)]
    for member in range(group):
        of_q, of_output, of_d_output, of_dq = (each[:, :, member] for each in grouped)
        of_sums = log_sums.unflatten(0, (heads, group))[:, member]
        into = {"dq": of_dq, "dk": dk[:, :, member], "dv": dv[:, :, member]}
        backward(of_q, k, v, of_output, of_d_output, of_sums, scale, True, **into, **options)
    return dq, dk, dv


def flash_backward(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_backward_in_parts`, its parts added up in FP32 and rounded once."""
    dq, *parts = flash_backward_in_parts(d_output, q, k, v, output, log_sums, ends, longest, scale)
    dk, dv = (part.sum(2) if part.dim() == 4 else part for part in parts)
    return dq, dk, dv


def flash_obstacle(dim: int) -> str | None:
    """Why FlashAttention-4 cannot attend with heads of `dim` on this Hopper or Blackwell GPU, worded to follow its name; None if
    it can. Imports the package, which takes seconds, where nothing else stands in the way."""
    if torch.cuda.get_device_capability()[0] == 10 and 128 < dim < 256:
        return f"has no kernel for heads of {dim} on Blackwell, where it takes up to 128, and 256"
    try:
        _flash()
    except (ImportError, OSError, AttributeError) as error:
        return f"needs the package flash-attn-4 (pip install -r requirements-cuda.txt): {error}"
    return None


@cache
def _flash() -> ModuleType:
    # Transformer Engine goes first: once FlashAttention-4's libraries are loaded, it takes parts of another cuDNN and cannot be.
    transformer_engine.missing()
    from flash_attn.cute import interface

    return interface


def _documents(ends: Tensor, longest: int) -> dict[str, Tensor | int]:
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}


# ── cuDNN ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for backward softmax statistics [T, H, 1] FP32 and the state of the random numbers [2] int64 (unused)."""
    kernels = _cudnn()
    output, (statistics, rng_state) = kernels.fused_attn_fwd(
        True,  # keep the statistics, in evaluation too: 64 bytes a token
        *(longest, longest, ends, ends),
        *(q.contiguous(), k.contiguous(), v.contiguous(), q.dtype),
        kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
        **_side_by_side(ends, scale),
    )
    return output, statistics, rng_state


def cudnn_backward(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    statistics: Tensor,
    rng_state: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous."""
    kernels = _cudnn()
    dq, dk, dv, *_ = kernels.fused_attn_bwd(
        *(longest, longest, ends, ends),
        *(q.contiguous(), k.contiguous(), v.contiguous(), output, d_output.contiguous(), q.dtype, [statistics, rng_state]),
        kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_side_by_side(ends, scale),
    )
    return dq, dk, dv


def cudnn_obstacle(dim: int) -> str | None:
    """Why cuDNN cannot attend with heads of `dim` on this Hopper or Blackwell GPU, worded to follow its name; None if it can."""
    if dim > MOST_CUDNN_DIM:
        return f"computes wrong gradients with heads of {dim}; up to {MOST_CUDNN_DIM} are right"
    if torch.cuda.get_device_capability()[0] == 9 and torch.are_deterministic_algorithms_enabled():
        return "has no deterministic backward on sm_90 whose workspace would fit: set deterministic: false"
    missing = transformer_engine.missing()
    return f"needs {missing}" if missing else None


def _cudnn() -> ModuleType:
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn


def _side_by_side(ends: Tensor, scale: float) -> dict[str, Any]:
    """Documents side by side, each beginning where the last one ended. `thd`: tokens, heads, head dimension."""
    options = {"qkv_layout": "thd_thd_thd", "o_format": "thd", "attn_mask_type": "padding_causal", "window_size": (-1, 0)}
    options |= {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends, "attn_scale": scale}
    return options | {"cuda_graph": torch.cuda.is_current_stream_capturing()}
