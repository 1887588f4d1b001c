"""The rotation of queries and keys on a GPU: one launch a direction, every value read once and written once.

Forward: a tile is some tokens by neighbouring heads, all of queries, all of keys or all of values: so it has one norm weight and
one tensor to write to. A head is two columns of halves: what is rotated with each other lies in the same registers.

Backward: a tile is some tokens of one head. It writes the gradient in BF16, or under delayed scaling, whose scale is known
beforehand, its codes, by rows and by columns. The compiler may not fuse a multiplication with an addition: then both forms have
the same bits. With head norms a program goes through many tiles and adds up the gradients of the norms' weights; torch adds the
programs' sums, in an order that shapes alone decide. So only as many programs are started as run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.fused.formulas import HeadNorms, Heads
from pretrain.model.fused.fp8_tile import (
    TYPES,
    TensorScaled,
    allocate,
    record_amax,
    store_tensor_scaled,
    tensor_scale,
)
from pretrain.precision.transformer_engine import library

# Forward: of a tile of 4,096 values, 32 heads of 128, a thread loads 32: in BF16, four times 16 bytes. It is bound by memory, so
# tiles are so small that a multiprocessor holds five or more.
_TILE, _FORWARD_WARPS = 4096, 4
# Backward, the fastest measured on an H200: tokens of a tile of one head; warps where a head has 128 values, for others in
# proportion; registers of a thread, at most; programs where norm gradients are summed, and the tiles that each of these loads at
# once: all but the last of them go through shared memory, of which heads of 128 want 70 KiB, and 103 with four parts.
_TOKENS, _BACKWARD_WARPS, _REGISTERS, _PROGRAMS, _STAGES = 32, 8, 112, 264, 3
_IN_A_THREAD = tl.constexpr(8)  # neighbours of a row: 16 bytes in BF16
MOST_HEADS = 8  # in a block of forward: 2 KB of a token in BF16, all in one stretch


@triton.jit
def _tile(
    first, token_stride, head_stride, rows: tl.constexpr, heads: tl.constexpr, half: tl.constexpr
):
    """Offsets [rows, half] of the first halves of `heads` heads of each token from `first` on; the second lie `half` further."""
    row = tl.arange(0, rows)
    # 32 bits do within a tile, which holds few tokens
    inside = (row // heads) * token_stride + (row % heads) * head_stride
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
    dk,  # may come in parts that are summed here, as dv, with a stride of parts
    dv,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dk_part,
    dv_token,
    dv_head,
    dv_part,
    qkv,  # None as query_norm, key_norm and norm_sums
    cos,
    sin,
    query_norm,
    key_norm,
    dqkv,  # [tokens, (query + 2 kv) x dim]: the gradient, or with `fp8` its codes, uint8
    columns,  # uint8, the transpose of the codes, or None, as the next three without `fp8`
    scale,
    scale_inv,
    amax,
    norm_sums,  # FP32 [programs a head, query + kv, dim]
    tokens,
    eps,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    height: tl.constexpr,  # tokens of a tile
    whole: tl.constexpr,  # all tiles are full
    parts: tl.constexpr,
    stages: tl.constexpr,
    fp8: tl.constexpr,  # None: the gradient in the dtype of `dqkv`
):
    half: tl.constexpr = dim // 2
    width: tl.constexpr = (query + 2 * kv) * dim
    head = tl.program_id(0) % (query + 2 * kv)
    program = tl.program_id(0) // (query + 2 * kv)
    step = tl.num_programs(0) // (query + 2 * kv) * height
    factor = tensor_scale(scale, None, None, scale_inv, fp8) if fp8 is not None else None
    largest = tl.zeros([height], tl.float32)
    sum1 = tl.zeros([height, half], tl.float32) if query_norm is not None else 0.0
    sum2 = sum1
    if head < query + kv:
        is_query = head < query
        dy = tl.where(is_query, dq, dk)
        dy_token = tl.where(is_query, dq_token, dk_token)
        dy += tl.where(
            is_query, head * tl.cast(dq_head, tl.int64), (head - query) * tl.cast(dk_head, tl.int64)
        )
        weight = None
        if query_norm is not None:
            weight = tl.where(is_query, query_norm, key_norm)
        for first in tl.range(program * height, tokens, step, num_stages=stages):
            here = _inside(first, tokens, height, half, whole)
            dx1, dx2, sum1, sum2 = _differentiate_head(
                dy,
                dy_token,
                dk_part,
                query,
                cos,
                sin,
                qkv,
                weight,
                sum1,
                sum2,
                first,
                here,
                head,
                eps,
                width,
                dim,
                parts,
            )
            largest = _write_head(
                dx1,
                dx2,
                largest,
                factor,
                dqkv,
                columns,
                first,
                here,
                head * dim,
                tokens,
                width,
                fp8,
            )
        if query_norm is not None:
            sum_at = norm_sums + (program * (query + kv) + head) * dim + tl.arange(0, half)
            tl.store(sum_at, tl.sum(sum1, axis=0))
            tl.store(sum_at + half, tl.sum(sum2, axis=0))
    else:
        dy = dv + (head - query - kv) * tl.cast(dv_head, tl.int64)
        for first in tl.range(program * height, tokens, step, num_stages=stages):
            here = _inside(first, tokens, height, half, whole)
            dx1, dx2, sum1, sum2 = _differentiate_head(
                dy,
                dv_token,
                dv_part,
                0,
                None,
                None,
                None,
                None,
                sum1,
                sum2,
                first,
                here,
                head,
                eps,
                width,
                dim,
                parts,
            )
            largest = _write_head(
                dx1,
                dx2,
                largest,
                factor,
                dqkv,
                columns,
                first,
                here,
                head * dim,
                tokens,
                width,
                fp8,
            )
    if fp8 is not None:
        record_amax(amax, largest)


@triton.jit
def _inside(first, tokens, height: tl.constexpr, half: tl.constexpr, whole: tl.constexpr):
    """Which of a tile's values [height, half] there are."""
    row = tl.arange(0, height)[:, None] + tl.zeros([height, half], tl.int32)
    return row >= 0 if whole else first + row < tokens


@triton.jit
def _differentiate_head(
    dy,  # of the head, with dy_token values between tokens
    dy_token,
    part,  # values between parts
    from_head,  # the first that comes in parts
    cos,  # None for a head of values
    sin,
    qkv,  # what was normed [tokens, width]
    weight,  # None without norms: then the sums stay as they are
    sum1,
    sum2,
    first,
    here,  # which values [height, dim / 2] there are
    head,
    eps,
    width: tl.constexpr,
    dim: tl.constexpr,
    parts: tl.constexpr,
):
    """Returns the gradients of a head's halves [height, dim / 2] at the tokens from `first` on, FP32, and the sums for its norm's
    weight with theirs added."""
    height: tl.constexpr = here.shape[0]
    half: tl.constexpr = dim // 2
    dy_at = dy + _tile(first, dy_token, 0, height, 1, half)
    dx1 = tl.load(dy_at, mask=here, other=0).to(tl.float32)
    dx2 = tl.load(dy_at + half, mask=here, other=0).to(tl.float32)
    for number in tl.static_range(1, parts):
        # Masked and not branched: only so are a next tile's loads under way while this one is computed.
        more = dy_at + number * tl.cast(part, tl.int64)
        also = here & (tl.zeros(dy_at.shape, tl.int32) + head >= from_head)
        dx1 += tl.load(more, mask=also, other=0).to(tl.float32)
        dx2 += tl.load(more + half, mask=also, other=0).to(tl.float32)
    if cos is not None:  # turned back
        angle = _tile(first, dim, 0, height, 1, half)
        c = tl.load(cos + angle, mask=here, other=0).to(tl.float32)
        s = tl.load(sin + angle, mask=here, other=0).to(tl.float32)
        dx1, dx2 = tl.fma(dx1, c, dx2 * s), tl.fma(dx2, c, -(dx1 * s))
    if weight is not None:  # through the norm
        x = qkv + head * dim + _tile(first, width, 0, height, 1, half)
        x1 = tl.load(x, mask=here, other=1).to(tl.float32)
        x2 = tl.load(x + half, mask=here, other=1).to(tl.float32)
        factor = tl.rsqrt(tl.fma(tl.sum(tl.fma(x1, x1, x2 * x2), axis=1), 1.0 / dim, eps))[:, None]
        x1, x2 = x1 * factor, x2 * factor
        sum1, sum2 = tl.fma(dx1, x1, sum1), tl.fma(dx2, x2, sum2)
        # Loaded for every tile: registers for them, too, would leave a multiprocessor too few programs.
        weight_at = weight + tl.arange(0, half)[None, :]
        dx1, dx2 = (
            dx1 * tl.load(weight_at).to(tl.float32),
            dx2 * tl.load(weight_at + half).to(tl.float32),
        )
        along = (tl.sum(tl.fma(dx1, x1, dx2 * x2), axis=1) * (1.0 / dim))[:, None]
        dx1, dx2 = factor * tl.fma(-x1, along, dx1), factor * tl.fma(-x2, along, dx2)
    return dx1, dx2, sum1, sum2


@triton.jit
def _write_head(
    d1,
    d2,
    largest,
    scale,
    rows,
    columns,
    first,
    here,
    column,
    tokens,
    width: tl.constexpr,
    fp8: tl.constexpr,
):
    """Write a head's gradients, whose halves d1 and d2 [height, dim / 2] are FP32, from the token `first` and the column `column`
    on. For codes they are rounded to BF16, and `largest` [height] is returned as the largest magnitudes up to now."""
    half: tl.constexpr = d1.shape[1]
    i, j = first + tl.arange(0, d1.shape[0]), column + tl.arange(0, half)
    if fp8 is None:
        at = rows + i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(at, d1.to(rows.dtype.element_ty), mask=here)
        tl.store(at + half, d2.to(rows.dtype.element_ty), mask=here)
    else:
        # Codes could be stored sixteen at a time. A thread would then hold as many neighbours of what is loaded, too, and sums
        # over a head would have another order than without codes.
        i, j = tl.max_contiguous(i, _IN_A_THREAD), tl.max_contiguous(j, _IN_A_THREAD)
        d1, d2 = d1.to(tl.bfloat16).to(tl.float32), d2.to(tl.bfloat16).to(tl.float32)
        store_tensor_scaled(d1, scale, rows, columns, i, j, tokens, width, fp8)
        store_tensor_scaled(d2, scale, rows, columns, i, j + half, tokens, width, fp8)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(d1), tl.abs(d2)), axis=1))
    return largest


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """pretrain.model.fused.formulas.rotate, for BF16 and heads of 32, 64 or 128 values."""
    tokens, rows = len(qkv), _TILE // heads.dim
    q = qkv.new_empty(tokens, heads.query, heads.dim)
    k = qkv.new_empty(tokens, heads.kv, heads.dim)
    v = torch.empty_like(k)
    both = heads.query | heads.kv
    # heads: a power of two that divides queries and keys
    block = min(both & -both, MOST_HEADS, rows)
    query_norm, key_norm, eps = (
        (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    )
    _rotate_forward[(heads.count // block * triton.cdiv(tokens, rows // block),)](
        *(qkv, cos.contiguous(), sin.contiguous(), query_norm, key_norm, q, k, v, tokens, eps),
        *(heads.query, heads.kv, heads.dim, block, rows),
        num_warps=_FORWARD_WARPS,
        enable_fp_fusion=True,
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
    written: TensorScaled | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """pretrain.model.fused.formulas.rotate_backward, for BF16 and heads of 32, 64 or 128 values. With `written`, the gradient of
    qkv, rounded to BF16, is written there in codes, and the first result is None: whole tiles of 32 tokens."""
    # The values of a head must be neighbours.
    dq, dk, dv = (each if each.stride(-1) == 1 else each.contiguous() for each in (dq, dk, dv))
    tokens, parts = len(dq), dk.shape[2] if dk.dim() == 4 else 1
    strides = [
        *dq.stride()[:2],
        *(
            each.stride(axis) if axis < each.dim() - 1 else 0
            for each in (dk, dv)
            for axis in range(3)
        ),
    ]
    dqkv, sums, programs = None, None, triton.cdiv(tokens, _TOKENS)
    if written is None:
        dqkv = dq.new_empty(tokens, heads.width)
        outputs, fp8 = (dqkv, None, None, None, None), None
    else:
        outputs = (written.rows, written.columns, written.scale, written.scale_inv, written.amax)
        fp8 = TYPES[written.dtype]
    query_norm, key_norm, eps = (
        (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    )
    if norms is not None:
        programs = min(programs, max(1, _PROGRAMS // heads.count))
        sums = torch.empty(
            programs, heads.query + heads.kv, heads.dim, dtype=torch.float32, device=dq.device
        )
    _rotate_backward[(heads.count * programs,)](
        *(dq, dk, dv, *strides, None if norms is None else qkv, cos.contiguous(), sin.contiguous()),
        *(query_norm, key_norm, *outputs, sums, tokens, eps),
        *(
            heads.query,
            heads.kv,
            heads.dim,
            _TOKENS,
            tokens % _TOKENS == 0,
            parts,
            1 if norms is None else _STAGES,
            fp8,
        ),
        num_warps=max(1, _BACKWARD_WARPS * heads.dim // 128),
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
    )
    if sums is None:
        return dqkv, None, None
    # In an order that shapes alone decide.
    return dqkv, sums[:, : heads.query].sum(dim=(0, 1)), sums[:, heads.query :].sum(dim=(0, 1))


def writes(quantizer: Any, dq: Tensor) -> bool:
    """Whether `quantized_rotate_backward` can write what Transformer Engine's `quantizer` would, with gradients like `dq`
    [tokens, query, dim]: under delayed scaling, in whole tiles."""
    return (
        isinstance(quantizer, library().Float8Quantizer)
        and dq.dtype == torch.bfloat16
        and len(dq) % _TOKENS == 0
    )


def quantized_rotate_backward(
    quantizer: Any,
    gradients: Sequence[Tensor],
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
) -> tuple[Any, list[Tensor | None]]:
    """The gradient of `qkv`, rounded to BF16, in what the usages of `quantizer` say; and those of the norms' weights, which have
    the bits of `rotate_backward`."""
    usages = {"rows": quantizer.rowwise_usage, "columns": quantizer.columnwise_usage}
    dqkv, written = allocate(quantizer, (len(cos), heads.width), cos.device, **usages)
    _, *of_norms = rotate_backward(*gradients, qkv, cos, sin, heads, norms, written)
    return dqkv, of_norms
