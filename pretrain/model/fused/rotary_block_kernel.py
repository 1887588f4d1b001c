"""The rotation's gradient in FP8 with a scale for every 128 values, by rows and by columns: a tile is 128 tokens of a head, which
is a block. Two rows' BF16 values share a word (`pretrain.precision.fp8_tile.pairs`): so two programs share a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.model.fused.rotary_arithmetic import gradient_of_head
from pretrain.precision.fp8_tile import BLOCK, pairs, store_pairs_by_columns, store_pairs_by_rows


@triton.jit
def rotate_backward_in_blocks(
    dq,  # as of `_rotate_backward`
    dk,
    dv,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dk_part,
    dv_token,
    dv_head,
    dv_part,
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    rows,  # uint8 [tokens, (query + 2 kv) x 128], or None
    rows_scale_inv,  # FP32 [query + 2 kv, tokens]
    columns,  # uint8, the transpose of the shape of `rows`, or None
    columns_scale_inv,  # FP32 [tokens / 128, (query + 2 kv) x 128]
    norm_sums,  # FP32 [programs a head, query + kv, 128]
    tokens,
    eps,
    epsilon,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,  # 128: a head is a block
    parts: tl.constexpr,
    stages: tl.constexpr,
    power_of_two: tl.constexpr,
    fp8: tl.constexpr,
):
    """A tile is 128 tokens of a head, in `pairs` of rows: four loads of every fourth row, and of both halves."""
    half: tl.constexpr = dim // 2
    width: tl.constexpr = (query + 2 * kv) * dim
    head = tl.program_id(0) % (query + 2 * kv)
    program = tl.program_id(0) // (query + 2 * kv)
    step = tl.num_programs(0) // (query + 2 * kv) * BLOCK
    to = (rows, rows_scale_inv, columns, columns_scale_inv)
    sum1 = tl.zeros([BLOCK // 4, half], tl.float32) if query_norm is not None else 0.0
    sum2 = sum1
    if head < query + kv:
        is_query = head < query
        dy = tl.where(is_query, dq, dk)
        dy_token = tl.where(is_query, dq_token, dk_token)
        dy += tl.where(is_query, head * tl.cast(dq_head, tl.int64), (head - query) * tl.cast(dk_head, tl.int64))
        weight = None
        if query_norm is not None:
            weight = tl.where(is_query, query_norm, key_norm)
        for first in tl.range(program * BLOCK, tokens, step, num_stages=stages):
            above1, above2, sum1, sum2 = _two_rows(
                dy, dk_part, query, cos, sin, qkv, weight, sum1, sum2, first, dy_token, head, width, dim, parts, eps
            )
            below1, below2, sum1, sum2 = _two_rows(
                dy, dk_part, query, cos, sin, qkv, weight, sum1, sum2, first + 2, dy_token, head, width, dim, parts, eps
            )
            _write_blocks(above1, above2, below1, below2, to, first, head, tokens, width, epsilon, power_of_two, fp8)
        if query_norm is not None:
            sum_at = norm_sums + (program * (query + kv) + head) * dim + tl.arange(0, half)
            tl.store(sum_at, tl.sum(sum1, axis=0))
            tl.store(sum_at + half, tl.sum(sum2, axis=0))
    else:
        dy = dv + (head - query - kv) * tl.cast(dv_head, tl.int64)
        for first in tl.range(program * BLOCK, tokens, step, num_stages=stages):
            above1, above2, sum1, sum2 = _two_rows(
                dy, dv_part, 0, None, None, None, None, sum1, sum2, first, dv_token, head, width, dim, parts, eps
            )
            below1, below2, sum1, sum2 = _two_rows(
                dy, dv_part, 0, None, None, None, None, sum1, sum2, first + 2, dv_token, head, width, dim, parts, eps
            )
            _write_blocks(above1, above2, below1, below2, to, first, head, tokens, width, epsilon, power_of_two, fp8)


@triton.jit
def _two_rows(
    dy,
    part,
    from_head,
    cos,
    sin,
    qkv,
    weight,
    sum1,
    sum2,
    first,
    dy_token,
    head,
    width: tl.constexpr,
    dim: tl.constexpr,
    parts: tl.constexpr,
    eps,
):
    """The gradients of a head's halves as `pairs` [32, dim / 2] of the tokens `first` + 4 g and `first` + 4 g + 1; the sums."""
    here = tl.zeros([BLOCK // 4, dim // 2], tl.int32) == 0
    a1, a2, sum1, sum2 = gradient_of_head(
        dy, dy_token, part, from_head, cos, sin, qkv, weight, sum1, sum2, first, 4, here, head, width, dim, parts, eps
    )
    b1, b2, sum1, sum2 = gradient_of_head(
        dy, dy_token, part, from_head, cos, sin, qkv, weight, sum1, sum2, first + 1, 4, here, head, width, dim, parts, eps
    )
    return pairs(a1, b1), pairs(a2, b2), sum1, sum2


@triton.jit
def _write_blocks(
    above1, above2, below1, below2, to, first, head, tokens, width, epsilon, power_of_two: tl.constexpr, fp8: tl.constexpr
):
    """Write a head's gradients from the token `first` on: of each half `pairs` of rows, and those below."""
    rows, rows_inv, columns, columns_inv = to
    row, column = tl.cast(first, tl.int32), head * BLOCK
    if rows is not None:
        store_pairs_by_rows(above1, above2, rows, rows_inv, row, column, tokens, width, epsilon, power_of_two, fp8)
        store_pairs_by_rows(below1, below2, rows, rows_inv, row + 2, column, tokens, width, epsilon, power_of_two, fp8)
    if columns is not None:
        store_pairs_by_columns(above1, below1, columns, columns_inv, row, column, tokens, width, epsilon, power_of_two, fp8)
        column += BLOCK // 2
        store_pairs_by_columns(above2, below2, columns, columns_inv, row, column, tokens, width, epsilon, power_of_two, fp8)
