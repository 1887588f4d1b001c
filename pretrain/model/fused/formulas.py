"""Norms, activations and the rotation of queries and keys in plain torch, with their gradients.

A fused layer calls these functions between its matrix products if no kernel is used, for example on
a CPU. Tests compare the Triton kernels with them.

The functions are called inside of an autograd.Function, where autograd records nothing. Therefore
each computation has a second function for its gradient. Computations are in FP32, except for the
rotation of FP64 inputs, which is in FP64. Results are rounded once, at the end. An RMSNorm also
rounds the normalized values before it multiplies them by the weight, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Map the two kinds of MLP, with and without a gate, to the activation function that fused layers
# compute, by its names in transformers: SiLU, or the approximation of GELU by tanh.
ACTIVATIONS = {True: ("silu", "swish"), False: ("gelu_new", "gelu_pytorch_tanh")}


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the LayerNorm of x [tokens, width], or the RMSNorm if `bias` is None.

    Returns:
        Three tensors: the result in the dtype of x, the reciprocals of the standard deviations or
        of the root mean squares, FP32 [tokens], and the means, FP32 [tokens]. The means are None
        for an RMSNorm.
    """
    x_fp32 = x.float()
    mean = None
    if bias is not None:
        mean = x_fp32.mean(-1)
        x_fp32 = x_fp32 - mean[:, None]
    rstd = torch.rsqrt(x_fp32.square().mean(-1) + eps)
    normed = x_fp32 * rstd[:, None]
    if bias is None:
        return (normed.to(x.dtype) * weight.float()).to(x.dtype), rstd, None
    return (normed * weight.float() + bias.float()).to(x.dtype), rstd, mean


def norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    residual: Tensor,
    *,
    summed: bool,
) -> tuple[Tensor, Tensor]:
    """Return dx [tokens, width], and FP32 sums over tokens [count, width].

    dx is the gradient of x plus `residual`. For an RMSNorm, `count` is 1, and the sum is the
    gradient of `weight`. For a LayerNorm, `count` is 2, and the sums are the gradients of `weight`
    and of the bias. For a LayerNorm with `summed`, `count` is 4, and the other two sums are the
    sums of dx and of `residual`.

    `dy` is the gradient of the norm's output, and `rstd` and `mean` are results of `norm`.
    `residual` is the gradient of x from the residual branch.
    """
    dy = dy.float()
    x_fp32 = x.float() if mean is None else x.float() - mean[:, None]
    normed = x_fp32 * rstd[:, None]
    sums = [(dy * normed).sum(0)]
    weighted = dy * weight.float()
    dx = weighted - normed * (weighted * normed).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - weighted.mean(-1, keepdim=True)
    dx = dx * rstd[:, None] + residual
    if mean is not None:
        sums.append(dy.sum(0))
        if summed:
            sums += [dx.float().sum(0), residual.float().sum(0)]
    return dx.to(x.dtype), torch.stack(sums)


def activated_width(hidden: Tensor, *, gated: bool) -> int:
    """Return the number of activated values in a row, for the input `hidden` of `activate`."""
    return hidden.shape[1] // 2 if gated else hidden.shape[1]


def activate(hidden: Tensor, *, gated: bool) -> Tensor:
    """Return the activated values [tokens, width] of `hidden`.

    With `gated`, `hidden` is [tokens, 2 width]. The first half of each row is called gate, the
    second half is called up, and the result is silu(gate) * up. Otherwise `hidden` is [tokens,
    width], and the result is the approximation of gelu(hidden) by tanh.
    """
    if gated:
        gate, up = hidden.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(hidden.dtype)
    return F.gelu(hidden.float(), approximate="tanh").to(hidden.dtype)


def activate_backward(
    d_activated: Tensor, hidden: Tensor, *, gated: bool, summed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of `hidden`, the activated values, and the summed gradient.

    The activated values are the recomputed result of `activate`. The summed gradient is the
    gradient of `hidden`, summed over tokens in FP32. It is None unless `summed` is set.
    `d_activated` [tokens, width] is the gradient of the result of `activate`.
    """
    dy = d_activated.float()
    if gated:
        gate, up = hidden.float().chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        slopes = sigmoid + silu * (1 - sigmoid)
        d_hidden = torch.cat([dy * up * slopes, dy * silu], dim=-1)
        values = silu * up
    else:
        x = hidden.float()
        values = F.gelu(x, approximate="tanh")
        slopes = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")
        d_hidden = dy * slopes
    total = d_hidden.sum(0) if summed else None
    return d_hidden.to(hidden.dtype), values.to(hidden.dtype), total


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


@dataclass(frozen=True)
class Heads:
    """Layout of a row of the stacked query, key and value product.

    A row has `query` query heads, then `kv` key heads, then `kv` value heads. Each head has `dim`
    values.
    """

    query: int
    kv: int
    dim: int

    @property
    def count(self) -> int:
        """Number of heads in a row."""
        return self.query + 2 * self.kv

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.count * self.dim

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `rows` [T, width] into queries [T, query, dim], keys and values [T, kv, dim].

        The results are views of `rows`.
        """
        queries, keys, values = rows.unflatten(1, (self.count, self.dim)).split(
            (self.query, self.kv, self.kv), dim=1
        )
        return queries, keys, values


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the RMSNorms that Qwen3 applies to query and key heads.

    The weights `query` and `key` have shape [dim] and any floating-point dtype. `eps` is added to
    the mean square of a head.
    """

    query: Tensor
    key: Tensor
    eps: float


def rotate(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: Heads, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the rows of `qkv`, normalize queries and keys if `norms` are given, and rotate them.

    Args:
        qkv: Queries, keys and values of each token, [T, heads.width], contiguous.
        cos: Cosines of the angles, [T, dim] with equal halves, any float dtype. None in a model
            without rotation, which has no head norms either.
        sin: Sines of the angles, as `cos`.
        heads: Layout of `qkv`.
        norms: Norms of query and key heads, or None if the model has no head norms.

    Returns:
        Queries [T, query, dim], keys and values [T, kv, dim], in the dtype of `qkv`. With rotation,
        all three are contiguous. Without rotation, all three are views of `qkv`.
    """
    q, k, v = heads.split(qkv)
    if cos is None or sin is None:
        return q, k, v
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
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    norms: HeadNorms | None,
    *,
    summed: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of `qkv` and of both norm weights, and the summed gradient of `qkv`.

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
        summed: True if the summed gradient is needed.

    Returns:
        Four tensors: the gradient of `qkv` in the dtype of `dq`, the gradients of the weights of
        the query norm and of the key norm, and the sum of the gradient of `qkv` over tokens, FP32
        [heads.width]. Both weight gradients are [dim] in FP32, or in FP64 if `dq` is FP64. They are
        None if `norms` is None. The sum is None unless `summed` is set.
    """
    wide = torch.promote_types(dq.dtype, torch.float32)
    dqkv = dq.new_empty(len(dq), heads.width)
    dqkv_queries, dqkv_keys, dqkv_values = heads.split(dqkv)
    if dk.dim() == 4:
        dk = dk.sum(dim=2, dtype=wide)
    if dv.dim() == 4:
        dv = dv.sum(dim=2, dtype=wide)
    dqkv_values.copy_(dv)
    if cos is not None and sin is not None:
        cos, sin = _angles(cos, sin, heads, dq)
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
    total = dqkv.sum(dim=0, dtype=torch.float32) if summed else None
    return dqkv, d_query_norm, d_key_norm, total


def _angles(cos: Tensor, sin: Tensor, heads: Heads, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first halves of `cos` and `sin` as [T, 1, dim / 2], to broadcast over heads.

    Their dtype is FP64 if `values` are FP64, and FP32 otherwise.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    half = heads.dim // 2
    return cos[:, None, :half].to(dtype), sin[:, None, :half].to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] by the results of `_angles`. The result has the dtype of `cos`."""
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
