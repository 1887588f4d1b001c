"""Queries and keys made ready for attention: the heads' norms, where a model has them, and the rotation by position.

    n = x / sqrt(mean(x^2) + eps) * weight          (transformers' Qwen3RMSNorm, of each head)
    y = n * cos + rotate_half(n) * sin              (transformers' apply_rotary_pos_emb)

`cos` and `sin` hold every angle twice, once for each half of a head, and only the first half is read. With x1, x2 for the halves
of a head, y1 = x1 cos - x2 sin and y2 = x2 cos + x1 sin. The scaling that YaRN puts on attention is part of `cos` and `sin`, so
backward is the transposed rotation and not the inverse one.

Both directions are functions without a graph. They compute in FP32 (FP64 for FP64) and round once, at the end, where the unfused
model rounds four times. A GPU runs one Triton kernel a direction; all else runs the formulas as torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.model.fused.stacked import HeadNorms, Heads

KERNEL_DIMS = (32, 64, 128)


def has_kernel(rows: Tensor, heads: Heads) -> bool:
    """Whether rows like these are the kernel's to rotate; other heads (80 values in Phi-2) would leave lanes of a tile idle."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and heads.dim in KERNEL_DIMS


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
    """Split the rows of `qkv` [T, heads.width], contiguous, normalise and rotate: queries [T, query, dim], keys and values
    [T, kv, dim], contiguous and in qkv's dtype. `cos`, `sin`: [T, dim], their halves equal, any float dtype."""
    if cos.shape != (len(qkv), heads.dim) or sin.shape != cos.shape:  # as of a model that rotates a part of each head
        raise ValueError(f"cos and sin are [{len(qkv)}, {heads.dim}], not {list(cos.shape)} and {list(sin.shape)}")
    if has_kernel(qkv, heads):
        from pretrain.model.fused import rotary_kernel

        return rotary_kernel.rotate(qkv, cos, sin, heads, norms)
    q, k, v = heads.split(qkv)
    cos, sin = _angles(cos, sin, heads, qkv)
    q = _rotated(q if norms is None else _normalised(q, norms.query, norms.eps)[0], cos, sin)
    k = _rotated(k if norms is None else _normalised(k, norms.key, norms.eps)[0], cos, sin)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.contiguous()


def rotate_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `qkv`, in dq's dtype, and of the norms' weights [dim], FP32 (FP64 where dq is), query's first.

    `dq`, `dk`, `dv`: of the shapes and dtype that `rotate` returned, any strides; `dk` and `dv` may come in parts [T, kv, parts,
    dim], which are summed in FP32. `qkv`: what `rotate` was given. Without norms it is not read and may be None, and the weights'
    gradients are None. These are sums in an order that shapes alone decide, so that a run can be repeated bit for bit.
    """
    if has_kernel(dq, heads):
        from pretrain.model.fused import rotary_kernel

        return rotary_kernel.rotate_backward(dq, dk, dv, qkv, cos, sin, heads, norms)
    cos, sin = _angles(cos, sin, heads, dq)
    dqkv = dq.new_empty(len(dq), heads.width)
    into_q, into_k, into_v = heads.split(dqkv)
    dk, dv = (each.sum(dim=2, dtype=cos.dtype) if each.dim() == 4 else each for each in (dk, dv))
    into_v.copy_(dv)
    dq, dk = _rotated(dq, cos, -sin), _rotated(dk, cos, -sin)
    query_norm = key_norm = None
    if norms is not None:
        q, k, _ = heads.split(qkv)
        dq, query_norm = _normalised_backward(dq, q, norms.query, norms.eps)
        dk, key_norm = _normalised_backward(dk, k, norms.key, norms.eps)
    into_q.copy_(dq)
    into_k.copy_(dk)
    return dqkv, query_norm, key_norm


def _angles(cos: Tensor, sin: Tensor, heads: Heads, values: Tensor) -> tuple[Tensor, Tensor]:
    """The first halves, [T, 1, dim / 2], to stand beside all heads of a token, in the dtype that `values` are computed in."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return tuple(angle[:, None, : heads.dim // 2].to(dtype) for angle in (cos, sin))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, dim] turned by `cos` and `sin`, in their dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x over its root mean square, times the weight; x over its root mean square alone; and the factor that made it so."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    normal = x * factor
    return normal * weight.to(x.dtype), normal, factor


def _normalised_backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, from that of `_normalised(x)[0]`."""
    _, normal, factor = _normalised(x, weight, eps)
    weighted = gradient * weight.to(gradient.dtype)
    along = (weighted * normal).mean(dim=-1, keepdim=True)
    return factor * (weighted - normal * along), (gradient * normal).sum(dim=(0, 1))
