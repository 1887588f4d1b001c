"""Packed attention by cuDNN's variable-length kernels, called through Transformer Engine's two functions below its
DotProductAttention, which would choose among backends in every call and cut each compiled layer in pieces.

`cudnn_forward` and `cudnn_backward` are for autograd functions that do more than attend; `cudnn_attention` is both as one
differentiable operator. Notes on the kernels:

* Offsets may end in empty slots. Their number is rounded up to a power of two (32 to 512, then to multiples of 512), and each of
  these numbers is planned for once.
* Pointers are handed over without strides. What is not contiguous among q, k, v and d_output is copied first.
* On Hopper, blocks of keys add to dQ in FP32 as they finish, so its last bits may differ from run to run; output, dK and dV
  repeat bit for bit. cuDNN's fixed order (`deterministic: true` asks for it) takes a workspace there that grows with the square
  of the tokens; `fa4` and `varlen` have a deterministic backward.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.operator import differentiable
from pretrain.precision import transformer_engine

GENERATIONS = (9, 10)  # Hopper and data-centre Blackwell; others have no variable-length kernel, or statistics of the old kind
# Documents side by side, causal in each. `thd`: tokens, heads, head dimension.
_PACKED: dict[str, Any] = {
    "qkv_layout": "thd_thd_thd",
    "o_format": "thd",
    "attn_mask_type": "padding_causal",
    "window_size": (-1, 0),
}


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention within each document: q [T, H, D], k and v [T, KV, D], BF16 or FP16 -> output [T, H, D], and for backward
    softmax statistics [T, H, 1] FP32 and the state of the random numbers [2] int64 (unused without dropout).

    `cu_seqlens`: [slots + 1] int32, 0, the documents' ends, then T repeated. `max_seqlen`: no document is longer.
    `scale`: what q k^T is multiplied by.
    """
    kernels = _kernels()
    output, (statistics, rng_state) = kernels.fused_attn_fwd(
        True,  # keep the statistics, in evaluation too: 64 bytes a token
        *(max_seqlen, max_seqlen, cu_seqlens, cu_seqlens),
        *(q.contiguous(), k.contiguous(), v.contiguous(), q.dtype),
        kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
        cu_seqlens_q_padded=cu_seqlens,  # where documents begin: where the last one ended
        cu_seqlens_kv_padded=cu_seqlens,
        attn_scale=scale,
        cuda_graph=torch.cuda.is_current_stream_capturing(),
        **_PACKED,
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
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, H, D], dk and dv [T, KV, D], contiguous, of what `cudnn_forward` computed and kept; arguments as there."""
    kernels = _kernels()
    dq, dk, dv, *_ = kernels.fused_attn_bwd(
        *(max_seqlen, max_seqlen, cu_seqlens, cu_seqlens),
        *(q.contiguous(), k.contiguous(), v.contiguous(), output, d_output.contiguous(), q.dtype, [statistics, rng_state]),
        kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        attn_scale=scale,
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        deterministic=torch.are_deterministic_algorithms_enabled(),
        cuda_graph=torch.cuda.is_current_stream_capturing(),
        **_PACKED,
    )
    return dq, dk, dv


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`cudnn_forward`'s output, differentiable in q, k and v; one operator to torch.compile, whatever the number of slots."""
    return _attend(q, k, v, cu_seqlens, max_seqlen, scale)[0]


def obstacle() -> str | None:
    """Why the kernels cannot run on this CUDA device, worded to follow "cudnn"; None if they can. Which heads they refuse shows
    when they are tried (pretrain.model.attention.trial). Imports Transformer Engine where nothing else stands in the way."""
    generation = torch.cuda.get_device_capability()[0]
    if generation not in GENERATIONS:
        return f"needs an sm_90 or sm_100 GPU, this is {torch.cuda.get_device_name()}"
    if generation == 9 and torch.are_deterministic_algorithms_enabled():
        return "has no deterministic backward on sm_90 whose workspace would fit: set deterministic: false"
    missing = transformer_engine.missing()
    return f"needs {missing}" if missing else None


def _kernels() -> ModuleType:
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn


def _statistics(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], 1), dtype=torch.float32), q.new_empty(2, dtype=torch.int64)


_attend = differentiable("cudnn_attention", cudnn_forward, cudnn_backward, _statistics)
