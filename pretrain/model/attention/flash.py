"""Packed attention by FlashAttention-4, the package `flash-attn-4`, whose kernels are compiled where they run.

`flash_forward` and `flash_backward_in_parts` are for autograd functions that do more than attend; `flash_attention` is both as
one differentiable operator. Notes on the kernels:

* A head shape and dtype are compiled once, for some ten seconds, whatever the numbers of tokens and documents. What was compiled
  is kept in `$XDG_CACHE_HOME/pretrain/flash_attn_4` unless FLASH_ATTENTION_CUTE_DSL_CACHE_DIR says another folder.
* Blocks of keys add to dQ as they finish, so its last bits may differ from run to run. `deterministic: true` asks for the fixed
  order, which takes a tenth longer. On Blackwell heads of 256 have a backward of their own, which repeats its bits in any case.
* Offsets may end in empty slots.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from pretrain.model.attention.operator import differentiable, room_for_log_sums
from pretrain.precision import transformer_engine

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "flash_attn_4"
# Both are read when the package is imported, and Transformer Engine imports it too: so they are set before either can be.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_CACHE))

# Tokens of a mean document, times the heads of a group: beyond, products take so long that memory does not count. Empty slots are
# documents here, since only the device knows how many there are: 4 packs of one document each have 15 slots.
LONG = 8192
WIDE = 4  # query heads of a group: each is a call of its own, and wider groups have not been measured
GENERATIONS = (9, 10)  # Hopper and data-centre Blackwell: the kernels are written for these, and measured on the first


def flash_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each document: q [T, H, D], k and v [T, KV, D], BF16 or FP16 -> output [T, H, D], and for backward
    the logarithms of the softmax's sums [H, T], FP32. The other arguments are as in `cudnn_forward`."""
    options = _documents(cu_seqlens, max_seqlen) | {"softmax_scale": scale, "causal": True, "return_lse": True}
    output, log_sums, *_ = _kernels()._flash_attn_fwd(q, k, v, **options)
    return output, log_sums


def flash_backward_in_parts(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, H, D], dk and dv [T, KV, D], contiguous, of what `flash_forward` computed and kept; or dk and dv as
    [T, KV, H / KV, D]: one part for each query head, which the caller adds up.

    The kernel would have the query heads of a group add to FP32 sums in memory, which must be cleared before and rounded
    afterwards. So it is given heads that share nothing: the first of each group, then the second, and each writes its gradient
    once. On an H200 that takes 911 us for 1,299 with 16 heads in groups of two and documents of 180 tokens, and longer than the
    kernel's own way with groups of four and documents of 4,096 (benchmarks/results/h200_kernels_in_parts.json).
    """
    options = _documents(cu_seqlens, max_seqlen) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    backward, heads, group = _kernels()._flash_attn_bwd, k.shape[1], q.shape[1] // k.shape[1]
    apart = 1 < group <= WIDE and group * len(q) <= LONG * (len(cu_seqlens) - 1)
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
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_backward_in_parts`, its parts added up in FP32 and rounded once."""
    dq, *parts = flash_backward_in_parts(d_output, q, k, v, output, log_sums, cu_seqlens, max_seqlen, scale)
    dk, dv = (part.sum(2) if part.dim() == 4 else part for part in parts)
    return dq, dk, dv


def flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`flash_forward`'s output, differentiable in q, k and v; one operator to torch.compile, whatever the number of slots."""
    return _attend(q, k, v, cu_seqlens, max_seqlen, scale)[0]


def obstacle(dim: int) -> str | None:
    """Why the kernels cannot attend with heads of `dim` on this CUDA device, worded to follow "fa4"; None if they can.
    Imports the package, which takes seconds, where nothing else stands in the way."""
    generation = torch.cuda.get_device_capability()[0]
    if generation not in GENERATIONS:
        return f"needs an sm_90 or sm_100 GPU, this is {torch.cuda.get_device_name()}"
    if generation == 10 and 128 < dim < 256:
        return f"has no kernel for heads of {dim} on Blackwell, where it takes up to 128, and 256"
    try:
        _kernels()
    except (ImportError, OSError, AttributeError) as error:
        return f"needs the package flash-attn-4, which cannot be imported: {error}"
    return None


@cache
def installed() -> bool:
    """Whether there is a `flash_attn.cute`, which version 2's package does not have."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # no `flash_attn` at all
        return False


@cache
def _kernels() -> ModuleType:
    # Transformer Engine goes first: once FlashAttention-4's libraries are loaded, it takes parts of another cuDNN and cannot be.
    transformer_engine.missing()
    from flash_attn.cute import interface

    return interface


def _documents(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Tensor | int]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
    }


_attend = differentiable("flash_attention", flash_forward, flash_backward, lambda q: (room_for_log_sums(q),))
