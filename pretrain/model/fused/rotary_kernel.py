"""The rotation of queries and keys on a GPU: one launch a direction, every value read once and written once.

A tile is some tokens by a block of neighbouring heads, each head as two columns of halves, so that what is rotated against each
other lies in the same registers. A block holds only query heads, only key heads or only value heads, and so has one norm weight
and one tensor to write to. Blocks of the same tokens run side by side, and share cos and sin in the cache.

The launches are bound by memory, so tiles are so small that a multiprocessor holds five or more.

Backward adds up the gradients of the norms' weights in registers over all the tiles of a program, and the programs' sums are
added by torch, in an order that depends on the shapes alone. So backward with norms starts only as many programs as run at once,
and each goes through the tokens in strides; everything else starts one program a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.attention.heads import HeadNorms, Heads


@dataclass(frozen=True)
class RotaryTiling:
    """How a launch is cut. Of a tile of 4,096 values a thread loads 32: in BF16, four times 16 bytes."""

    values: int  # of a tile; 4,096 are 32 heads of 128
    warps: int
    programs: int = 792  # of a backward that sums norm gradients: 6 x an H200's 132 multiprocessors, which 80 registers allow


FORWARD = RotaryTiling(4096, 4)
BACKWARD = RotaryTiling(2048, 4)  # of everything it loads two tiles and keeps sums: a larger one would not fit five times
MOST_HEADS = 8  # in a block: 2 KB of a token in BF16, all in one stretch
_NO_NORMS = HeadNorms(None, None, 0.0)


@triton.jit
def _tile(first, token_stride, head_stride, rows: tl.constexpr, heads: tl.constexpr, half: tl.constexpr):
    """Offsets [rows, half] of the first halves of `heads` heads of each token from `first` on; the second lie `half` further."""
    row = tl.arange(0, rows)
    inside = (row // heads) * token_stride + (row % heads) * head_stride  # 32 bits do within a tile, which holds few tokens
    return tl.cast(first, tl.int64) * token_stride + (inside[:, None] + tl.arange(0, half)[None, :])


@triton.jit
def _rotate_forward(
    qkv,  # [tokens, query + 2 kv, dim]
    cos,  # [tokens, dim]
    sin,
    query_norm,  # [dim], or None as key_norm
    key_norm,
    q,  # [tokens, query, dim]
    k,  # [tokens, kv, dim]
    v,
    tokens,
    eps,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    heads: tl.constexpr,  # in a block
    rows: tl.constexpr,
):
    half: tl.constexpr = dim // 2
    blocks: tl.constexpr = (query + 2 * kv) // heads
    head = tl.program_id(0) % blocks * heads
    first = tl.program_id(0) // blocks * (rows // heads)
    here = (first + tl.arange(0, rows) // heads < tokens)[:, None]
    x_at = qkv + head * dim + _tile(first, (query + 2 * kv) * dim, dim, rows, heads, half)
    if head < query + kv:
        x1 = tl.load(x_at, mask=here, other=1).to(tl.float32)
        x2 = tl.load(x_at + half, mask=here, other=1).to(tl.float32)
        angle = _tile(first, dim, 0, rows, heads, half)
        c = tl.load(cos + angle, mask=here, other=0).to(tl.float32)
        s = tl.load(sin + angle, mask=here, other=0).to(tl.float32)
        is_query = head < query
        if query_norm is not None:
            weight_at = tl.where(is_query, query_norm, key_norm) + tl.arange(0, half)[None, :]
            factor = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / dim + eps)[:, None]
            x1 *= factor * tl.load(weight_at).to(tl.float32)
            x2 *= factor * tl.load(weight_at + half).to(tl.float32)
        y_at = tl.where(is_query, q + head * dim, k + (head - query) * dim)
        y_at += _tile(first, tl.where(is_query, query, kv) * dim, dim, rows, heads, half)
        tl.store(y_at, (x1 * c - x2 * s).to(q.dtype.element_ty), mask=here)
        tl.store(y_at + half, (x2 * c + x1 * s).to(q.dtype.element_ty), mask=here)
    else:
        v_at = v + (head - query - kv) * dim + _tile(first, kv * dim, dim, rows, heads, half)
        tl.store(v_at, tl.load(x_at, mask=here), mask=here)
        tl.store(v_at + half, tl.load(x_at + half, mask=here), mask=here)


@triton.jit
def _rotate_backward(
    dq,  # of shapes like forward's, with strides of tokens and of heads
    dk,
    dv,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dv_token,
    dv_head,
    qkv,  # None as query_norm, key_norm and norm_sums
    cos,
    sin,
    query_norm,
    key_norm,
    dqkv,
    norm_sums,  # FP32 [programs a block, blocks of queries and keys, dim]
    tokens,
    eps,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    heads: tl.constexpr,
    rows: tl.constexpr,
):
    half: tl.constexpr = dim // 2
    width: tl.constexpr = (query + 2 * kv) * dim
    blocks: tl.constexpr = (query + 2 * kv) // heads
    head = tl.program_id(0) % blocks * heads
    program = tl.program_id(0) // blocks
    step = tl.num_programs(0) // blocks * (rows // heads)
    start = program * (rows // heads)
    if head < query + kv:
        is_query = head < query
        dy = tl.where(is_query, dq, dk)
        dy_token = tl.where(is_query, dq_token, dk_token)
        dy_head = tl.where(is_query, dq_head, dk_head)
        dy += tl.where(is_query, head, head - query).to(tl.int64) * dy_head  # a head may be strides of all tokens away
        if query_norm is not None:
            weight_at = tl.where(is_query, query_norm, key_norm) + tl.arange(0, half)[None, :]
            w1 = tl.load(weight_at).to(tl.float32)
            w2 = tl.load(weight_at + half).to(tl.float32)
            sum1 = tl.zeros([rows, half], tl.float32)
            sum2 = tl.zeros([rows, half], tl.float32)
        for first in range(start, tokens, step):
            here = (first + tl.arange(0, rows) // heads < tokens)[:, None]
            dy_at = dy + _tile(first, dy_token, dy_head, rows, heads, half)
            angle = _tile(first, dim, 0, rows, heads, half)
            at = head * dim + _tile(first, width, dim, rows, heads, half)
            dy1 = tl.load(dy_at, mask=here, other=0).to(tl.float32)
            dy2 = tl.load(dy_at + half, mask=here, other=0).to(tl.float32)
            c = tl.load(cos + angle, mask=here, other=0).to(tl.float32)
            s = tl.load(sin + angle, mask=here, other=0).to(tl.float32)
            dx1 = dy1 * c + dy2 * s
            dx2 = dy2 * c - dy1 * s
            if query_norm is not None:
                x1 = tl.load(qkv + at, mask=here, other=1).to(tl.float32)
                x2 = tl.load(qkv + at + half, mask=here, other=1).to(tl.float32)
                factor = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / dim + eps)[:, None]
                x1 *= factor
                x2 *= factor
                sum1 += dx1 * x1
                sum2 += dx2 * x2
                dx1 *= w1
                dx2 *= w2
                along = (tl.sum(dx1 * x1 + dx2 * x2, axis=1) / dim)[:, None]
                dx1 = factor * (dx1 - x1 * along)
                dx2 = factor * (dx2 - x2 * along)
            tl.store(dqkv + at, dx1.to(dqkv.dtype.element_ty), mask=here)
            tl.store(dqkv + at + half, dx2.to(dqkv.dtype.element_ty), mask=here)
        if query_norm is not None:
            sum_at = norm_sums + (program * ((query + kv) // heads) + head // heads) * dim + tl.arange(0, half)
            tl.store(sum_at, tl.sum(sum1, axis=0))
            tl.store(sum_at + half, tl.sum(sum2, axis=0))
    else:
        for first in range(start, tokens, step):
            here = (first + tl.arange(0, rows) // heads < tokens)[:, None]
            dy_at = dv + (head - query - kv).to(tl.int64) * dv_head + _tile(first, dv_token, dv_head, rows, heads, half)
            dx_at = dqkv + head * dim + _tile(first, width, dim, rows, heads, half)
            tl.store(dx_at, tl.load(dy_at, mask=here), mask=here)
            tl.store(dx_at + half, tl.load(dy_at + half, mask=here), mask=here)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    *,
    tiling: RotaryTiling = FORWARD,
) -> tuple[Tensor, Tensor, Tensor]:
    """pretrain.model.fused.rotary.rotate, for rows that it says have a kernel."""
    tokens = len(qkv)
    q = qkv.new_empty(tokens, heads.query, heads.dim)
    k = qkv.new_empty(tokens, heads.kv, heads.dim)
    v = torch.empty_like(k)
    *_, block, rows = layout = _layout(heads, tiling)
    norms = norms or _NO_NORMS
    if tokens:
        with torch.cuda.device_of(qkv):
            _rotate_forward[(heads.count // block * triton.cdiv(tokens, rows // block),)](
                qkv,
                cos.contiguous(),
                sin.contiguous(),
                norms.query,
                norms.key,
                q,
                k,
                v,
                tokens,
                norms.eps,
                *layout,
                num_warps=tiling.warps,
            )
    return q, k, v


def rotate_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    *,
    tiling: RotaryTiling = BACKWARD,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """pretrain.model.fused.rotary.rotate_backward, for rows that it says have a kernel."""
    tokens = len(dq)
    dqkv = dq.new_empty(tokens, heads.width)
    dq, dk, dv = (gradient if gradient.stride(2) == 1 else gradient.contiguous() for gradient in (dq, dk, dv))
    *_, block, rows = layout = _layout(heads, tiling)
    blocks = heads.count // block
    programs = triton.cdiv(tokens, rows // block)
    sums = None
    if norms is not None:
        programs = min(programs, max(1, tiling.programs // blocks))
        sums = torch.empty(programs, heads.rotated // block, heads.dim, dtype=torch.float32, device=dq.device)
    norms = norms or _NO_NORMS
    if tokens:
        with torch.cuda.device_of(dq):
            _rotate_backward[(blocks * programs,)](
                dq,
                dk,
                dv,
                *dq.stride()[:2],
                *dk.stride()[:2],
                *dv.stride()[:2],
                None if norms is _NO_NORMS else qkv,
                cos.contiguous(),
                sin.contiguous(),
                norms.query,
                norms.key,
                dqkv,
                sums,
                tokens,
                norms.eps,
                *layout,
                num_warps=tiling.warps,
            )
    if sums is None:
        return dqkv, None, None
    queries = heads.query // block
    return dqkv, sums[:, :queries].sum(dim=(0, 1)), sums[:, queries:].sum(dim=(0, 1))


def _layout(heads: Heads, tiling: RotaryTiling) -> tuple[int, int, int, int, int]:
    """The kernels' constants, `query` to `rows`. A block has as many heads as a power of two that divides queries and keys."""
    both = heads.query | heads.kv
    rows = tiling.values // heads.dim
    return heads.query, heads.kv, heads.dim, min(both & -both, MOST_HEADS, rows), rows
