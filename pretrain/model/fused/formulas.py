"""Norms, SwiGLU and the rotation of queries and keys in plain torch, with their gradients.

A fused layer calls these functions between its matrix products if no kernel is used, for example on
a CPU. Tests compare the Triton kernels with them.

The functions are called inside of an autograd.Function, where autograd records nothing. Therefore
each computation has a second function for its gradient. Computations are in FP32, except for the
rotation of FP64 inputs, which is in FP64. Results are rounded once, at the end. `rms_norm` also
rounds the normalized values before it multiplies them by the weight, as transformers does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.fused.heads import HeadNorms, Heads


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x [tokens, width] in the dtype of x, and 1 / RMS, FP32 [tokens, 1]."""
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    normed = (x_fp32 * rstd).to(x.dtype)
    return (normed * weight.float()).to(x.dtype), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x plus `residual`, and the gradient of `weight` in FP32.

    `dy` is the gradient of the norm's output, and `rstd` is the second result of `rms_norm`.
    `residual` is the gradient of x from the residual branch.
    """
    dy = dy.float()
    normed = x.float() * rstd
    d_weight = (dy * normed).sum(0)
    dy = dy * weight.float()
    dx = (dy - normed * (dy * normed).mean(-1, keepdim=True)) * rstd
    return (dx + residual).to(x.dtype), d_weight


def swiglu(hidden: Tensor) -> Tensor:
    """Return silu(gate) * up [tokens, width] for `hidden` [tokens, 2 width].

    The gate is the first half of each row of `hidden`, and up is the second half.
    """
    gate, up = hidden.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(hidden.dtype)


def swiglu_backward(d_activated: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `hidden` [tokens, 2 width], and the recomputed result of `swiglu`.

    `d_activated` [tokens, width] is the gradient of the result of `swiglu`.
    """
    gate, up = hidden.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dy = d_activated.float()
    d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
    d_hidden = torch.cat([d_gate, dy * silu], dim=-1)
    return d_hidden.to(hidden.dtype), (silu * up).to(hidden.dtype)


# ── Normalization and rotation of queries and keys ──
#
#     n = x / sqrt(mean(x^2) + eps) * weight      (Qwen3RMSNorm of transformers, for each head;
#                                                  n = x in models without head norms)
#     y = n * cos + rotate_half(n) * sin          (apply_rotary_pos_emb of transformers)
#
# Each row of `cos` and `sin` has every angle twice, once for each half of a head. Only the first
# half of the row is read. If n1 and n2 are the halves of n, the halves of y are
# y1 = n1 cos - n2 sin and y2 = n2 cos + n1 sin. YaRN's scaling of attention is part of `cos` and
# `sin`, so backward is the transposed rotation and not the inverse rotation. The unfused model
# rounds four intermediate results to its dtype, and these functions round no intermediate result.


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the rows of `qkv`, normalize queries and keys if `norms` are given, and rotate them.

    Args:
        qkv: Queries, keys and values of each token, [T, heads.width], contiguous.
        cos: Cosines of the angles, [T, dim] with equal halves, any float dtype.
        sin: Sines of the angles, [T, dim] with equal halves, any float dtype.
        heads: Layout of `qkv`.
        norms: Norms of query and key heads, or None if the model has no head norms.

    Returns:
        Queries [T, query, dim], keys and values [T, kv, dim], contiguous and in the dtype of `qkv`.
    """
    q, k, v = heads.split(qkv)
    cos, sin = _angles(cos, sin, heads, qkv)
    if norms is not None:
        q = _normalised(q, norms.query, norms.eps)[0]
        k = _normalised(k, norms.key, norms.eps)[0]
    q = _rotated(q, cos, sin)
    k = _rotated(k, cos, sin)
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
    """Return the gradients of `qkv` and of the weights of both norms.

    The order of the sums over tokens depends only on shapes, so a run can be repeated bit for bit.

    Args:
        dq: Gradient of the queries. It has the shape and dtype of the queries that `rotate`
            returned, and any strides.
        dk: Gradient of the keys [T, kv, dim], or parts of it [T, kv, parts, dim], which are summed
            in FP32.
        dv: Gradient of the values [T, kv, dim], or parts of it as in `dk`.
        qkv: The argument of `rotate`. It may be None if `norms` is None.
        cos: The argument of `rotate`.
        sin: The argument of `rotate`.
        heads: The argument of `rotate`.
        norms: The argument of `rotate`.

    Returns:
        Three tensors: the gradient of `qkv` in the dtype of `dq`, and the gradients of the weights
        of the query norm and of the key norm. Both weight gradients are [dim] in FP32, or in FP64
        if `dq` is FP64. They are None if `norms` is None.
    """
    cos, sin = _angles(cos, sin, heads, dq)
    dqkv = dq.new_empty(len(dq), heads.width)
    dqkv_queries, dqkv_keys, dqkv_values = heads.split(dqkv)
    if dk.dim() == 4:
        dk = dk.sum(dim=2, dtype=cos.dtype)
    if dv.dim() == 4:
        dv = dv.sum(dim=2, dtype=cos.dtype)
    dqkv_values.copy_(dv)
    dq = _rotated(dq, cos, -sin)
    dk = _rotated(dk, cos, -sin)
    d_query_norm = None
    d_key_norm = None
    if norms is not None and qkv is not None:
        q, k, _ = heads.split(qkv)
        dq, d_query_norm = _normalised_backward(dq, q, norms.query, norms.eps)
        dk, d_key_norm = _normalised_backward(dk, k, norms.key, norms.eps)
    dqkv_queries.copy_(dq)
    dqkv_keys.copy_(dk)
    return dqkv, d_query_norm, d_key_norm


def _angles(cos: Tensor, sin: Tensor, heads: Heads, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first halves of `cos` and `sin` as [T, 1, dim / 2], to broadcast over heads.

    Their dtype is FP64 if `values` are FP64, and FP32 otherwise.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    half = heads.dim // 2
    return cos[:, None, :half].to(dtype), sin[:, None, :half].to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] by the results of `_angles`, and return it in their dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors: the RMSNorm of x, x / RMS without the weight, and 1 / RMS."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    normed = x * rstd
    return normed * weight.to(x.dtype), normed, rstd


def _normalised_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of `weight`.

    `gradient` is the gradient of the first result of `_normalised`.
    """
    _, normed, rstd = _normalised(x, weight, eps)
    weighted = gradient * weight.to(gradient.dtype)
    projection = (weighted * normed).mean(dim=-1, keepdim=True)
    return rstd * (weighted - normed * projection), (gradient * normed).sum(dim=(0, 1))
