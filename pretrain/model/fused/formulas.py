"""What stands between the products of a fused layer, in torch's own operations: norms, SwiGLU and the rotation of queries and
keys, each with its gradient. A CPU trains with them, and tests hold the kernels to them.

All are functions without a graph. They compute in FP32 (the rotation of FP64 in FP64) and round once, at the end; RMSNorm rounds
before it multiplies by its weight as well, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """A row of the stacked query, key and value product holds `query` heads, then `kv` key heads, then `kv` value heads, of `dim`
    values each."""

    query: int
    kv: int
    dim: int

    @property
    def count(self) -> int:
        return self.query + 2 * self.kv

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.count * self.dim

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of `rows` [T, width]: queries [T, query, dim], keys and values [T, kv, dim]."""
        queries, keys, values = rows.unflatten(1, (self.count, self.dim)).split(
            (self.query, self.kv, self.kv), dim=1
        )
        return queries, keys, values


@dataclass(frozen=True)
class HeadNorms:
    """The root-mean-square norms that Qwen3 puts on every query and key head: their weights [dim], any float dtype."""

    query: Tensor
    key: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x [tokens, width], in its dtype, and 1 / root mean square [tokens, 1], FP32."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * rstd).to(x.dtype) * weight.float()).to(x.dtype), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, `residual` added to it, and that of `weight`, FP32, from the gradient of the norm of x."""
    dy = dy.float()
    normed = x.float() * rstd
    of_weight = (dy * normed).sum(0)
    dy = dy * weight.float()
    dx = (dy - normed * (dy * normed).mean(-1, keepdim=True)) * rstd
    return (dx + residual).to(x.dtype), of_weight


def swiglu(hidden: Tensor) -> Tensor:
    """hidden [tokens, 2 width], gate then up -> silu(gate) * up [tokens, width]."""
    gate, up = hidden.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(hidden.dtype)


def swiglu_backward(d_activated: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `hidden`, and the activated values once more."""
    gate, up = hidden.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dy = d_activated.float()
    d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([d_gate, dy * silu], dim=-1).to(hidden.dtype), (silu * up).to(hidden.dtype)


# ── Queries and keys made ready for attention ─────────────────────────────────────────────────────────────────────────────────
#
#     n = x / sqrt(mean(x^2) + eps) * weight          (transformers' Qwen3RMSNorm, of each head, where a model has it)
#     y = n * cos + rotate_half(n) * sin              (transformers' apply_rotary_pos_emb)
#
# `cos` and `sin` hold every angle twice, once for each half of a head, and only the first half is read. With x1, x2 for the
# halves of a head, y1 = x1 cos - x2 sin and y2 = x2 cos + x1 sin. The scaling that YaRN puts on attention is part of `cos` and
# `sin`, so backward is the transposed rotation and not the inverse one. The unfused model rounds four times on the way.


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the rows of `qkv` [T, heads.width], contiguous, normalise and rotate: queries [T, query, dim], keys and values
    [T, kv, dim], contiguous and in qkv's dtype. `cos`, `sin`: [T, dim], their halves equal, any float dtype."""
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


def _normalised_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, from that of `_normalised(x)[0]`."""
    _, normal, factor = _normalised(x, weight, eps)
    weighted = gradient * weight.to(gradient.dtype)
    along = (weighted * normal).mean(dim=-1, keepdim=True)
    return factor * (weighted - normal * along), (gradient * normal).sum(dim=(0, 1))
