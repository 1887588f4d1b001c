"""Triton kernels for the rotation of queries and keys: one launch each for forward and backward.

Every value is read and written once.

In forward, a tile consists of a few tokens and a few neighbouring heads. The heads of a tile are
all query heads, all key heads or all value heads, so a tile needs one norm weight and one output
tensor. The two halves of a head are loaded separately, so that both values of a rotated pair are in
the registers of one thread.

In backward, a tile consists of a few tokens of one head. The gradient is written in BF16. Under
delayed scaling, the scale is known before the gradient is computed, so the gradient can be written
as FP8 codes by rows and by columns instead. Fusing multiplications with additions is disabled, so
that the BF16 values are the same bit for bit, whether they are written or quantized.

If there are head norms, a program of backward computes many tiles and sums the gradients of the
norms' weights over these tiles. torch then adds the sums of all programs, in an order that depends
only on shapes. To keep the number of sums small, no more programs are started than the GPU can run
at once. The gradients of biases are summed in the same way.

In a model without rotation, such as GPT-2, `cos` and `sin` are None. Forward then needs no kernel,
and backward copies the gradients of queries, keys and values into one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.fused import formulas
from pretrain.model.fused.formulas import HeadNorms, Heads
from pretrain.model.fused.fp8_tile import (
    TensorScaled,
    allocate,
    record_amax,
    store_tensor_scaled,
    tensor_scale,
    tile_at,
)
from pretrain.precision.transformer_engine import library

# Head sizes that the kernels support. With other sizes, such as 80, some threads would be idle.
DIMS = (32, 64, 128)
# Number of values in a tile of forward, such as 32 heads of 128 values. Each thread loads 32 values
# in four accesses, which are 16 bytes each in BF16. The speed of memory limits the kernel, so tiles
# are small enough that five or more programs run on a multiprocessor at the same time.
_TILE = 4096
_FORWARD_WARPS = 4
# The next constants are for backward. They were the fastest on an H200.
_TOKENS = 32  # number of tokens in a tile
_BACKWARD_WARPS = 8  # number of warps for heads of 128 values; proportional to the head size
_REGISTERS = 112  # maximum number of registers of a thread
_PROGRAMS = 264  # maximum number of programs if there are head norms
# Number of tiles that a program loads ahead if there are head norms, or if the gradient is summed
# over tokens. All of these tiles except the last are stored in shared memory. Heads of 128 values
# need 70 KiB of shared memory, or 103 KiB if the gradients are in four parts.
_STAGES = 3
# Number of tiles that a program computes if the gradient is summed over tokens and heads have no
# norms.
_SUMMED_TILES = 8
# Number of neighbouring values of a row that a thread loads: 16 bytes in BF16.
_IN_A_THREAD = tl.constexpr(8)
# Maximum number of heads in a tile of forward. For each token, eight heads of 128 BF16 values are
# 2 KB of contiguous memory.
MOST_HEADS = 8


@triton.jit
def _tile(
    first, token_stride, head_stride, rows: tl.constexpr, heads: tl.constexpr, half: tl.constexpr
):
    """Return the offsets [rows, half] of the values in the first halves of a tile's heads.

    The tile has rows // heads tokens, beginning with token `first`, and `heads` heads of each
    token. The second half of a head starts `half` values after its first half.
    """
    row = tl.arange(0, rows)
    # 32 bits suffice for offsets inside of a tile, because it has few tokens.
    inside = (row // heads) * token_stride + (row % heads) * head_stride
    return tl.cast(first, tl.int64) * token_stride + (inside[:, None] + tl.arange(0, half)[None, :])


@triton.jit
def _load_halves(at, inside, other):
    """Return the halves of the heads of a tile, both FP32 [rows, half].

    `at` has the addresses of the first halves. Values outside of the mask `inside` are `other`.
    """
    half: tl.constexpr = at.shape[1]
    first = tl.load(at, mask=inside, other=other).to(tl.float32)
    return first, tl.load(at + half, mask=inside, other=other).to(tl.float32)


@triton.jit
def _load_angles(cos, sin, first, inside, heads: tl.constexpr, half: tl.constexpr):
    """Return the cosines and sines [rows, half] of the angles of a tile, in FP32."""
    rows: tl.constexpr = inside.shape[0]
    angle = _tile(first, 2 * half, 0, rows, heads, half)
    c = tl.load(cos + angle, mask=inside, other=0).to(tl.float32)
    return c, tl.load(sin + angle, mask=inside, other=0).to(tl.float32)


@triton.jit
def _rotate_forward(
    qkv,  # BF16 [tokens, query + 2 kv, dim]
    cos,  # [tokens, dim]
    sin,  # [tokens, dim]
    query_norm,  # [dim], or None without norms
    key_norm,  # [dim], or None without norms
    q,  # BF16 [tokens, query, dim], written
    k,  # BF16 [tokens, kv, dim], written
    v,  # BF16 [tokens, kv, dim], written
    tokens,
    eps,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    heads: tl.constexpr,
    rows: tl.constexpr,
):
    """Compute one tile: `heads` heads of rows // heads tokens.

    Query heads and key heads are normalized and rotated, and value heads are copied.
    """
    half: tl.constexpr = dim // 2
    blocks: tl.constexpr = (query + 2 * kv) // heads
    head = tl.program_id(0) % blocks * heads
    first = tl.program_id(0) // blocks * (rows // heads)
    inside = (first + tl.arange(0, rows) // heads < tokens)[:, None]
    x_at = qkv + head * dim + _tile(first, (query + 2 * kv) * dim, dim, rows, heads, half)
    if head < query + kv:
        # Missing tokens have ones, so that their root mean square is not zero.
        x1, x2 = _load_halves(x_at, inside, 1)
        c, s = _load_angles(cos, sin, first, inside, heads, half)
        is_query = head < query
        if query_norm is not None:
            weight_at = tl.where(is_query, query_norm, key_norm) + tl.arange(0, half)[None, :]
            factor = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / dim + eps)[:, None]
            x1 *= factor * tl.load(weight_at).to(tl.float32)
            x2 *= factor * tl.load(weight_at + half).to(tl.float32)
        y_at = tl.where(is_query, q + head * dim, k + (head - query) * dim)
        y_at += _tile(first, tl.where(is_query, query, kv) * dim, dim, rows, heads, half)
        # A store rounds to the dtype of the memory.
        tl.store(y_at, x1 * c - x2 * s, mask=inside)
        tl.store(y_at + half, x2 * c + x1 * s, mask=inside)
    else:
        v_at = v + (head - query - kv) * dim + _tile(first, kv * dim, dim, rows, heads, half)
        tl.store(v_at, tl.load(x_at, mask=inside), mask=inside)
        tl.store(v_at + half, tl.load(x_at + half, mask=inside), mask=inside)


@triton.jit
def _rotate_backward(
    dq,  # BF16 [tokens, query, dim]
    dk,  # BF16 [tokens, kv, dim] or [tokens, kv, parts, dim]; the parts are summed
    dv,  # BF16 [tokens, kv, dim] or [tokens, kv, parts, dim]; the parts are summed
    # The next eight are strides between tokens, heads and parts of dq, dk and dv.
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dk_part,
    dv_token,
    dv_head,
    dv_part,
    qkv,  # BF16 [tokens, query + 2 kv, dim], or None without norms
    cos,  # [tokens, dim]
    sin,  # [tokens, dim]
    query_norm,  # [dim], or None without norms
    key_norm,  # [dim], or None without norms
    rows,  # [tokens, (query + 2 kv) x dim], written: BF16, or uint8 codes if `fp8` is given
    columns,  # uint8 [(query + 2 kv) x dim, tokens], written: transpose of the codes, or None
    # The next three are fields of TensorScaled, or None if `fp8` is None.
    scale,
    scale_inv,
    amax,
    norm_sums,  # FP32 [programs of a head, query + kv, dim], written, or None without norms
    sums,  # FP32 [programs of a head, query + 2 kv, dim], written, or None without biases
    tokens,
    eps,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    height: tl.constexpr,
    full: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
    fp8: tl.constexpr,
):
    """Write the gradient of one head for the tokens of this program.

    If `sums` is given, also write the sum of the gradient over these tokens. With head norms, also
    write the gradient of the norm's weight, summed over these tokens. A program computes tiles of
    `height` tokens. `full` is True if no tile has fewer tokens. If `fp8` is None, the gradient is
    written in the dtype of `rows`.
    """
    count: tl.constexpr = query + 2 * kv
    head = tl.program_id(0) % count
    program = tl.program_id(0) // count
    factor = tensor_scale(scale, None, None, scale_inv, fp8) if fp8 is not None else None
    if head < query + kv:
        is_query = head < query
        dy = tl.where(is_query, dq, dk)
        dy_token = tl.where(is_query, dq_token, dk_token)
        query_at = head * tl.cast(dq_head, tl.int64)
        key_at = (head - query) * tl.cast(dk_head, tl.int64)
        dy += tl.where(is_query, query_at, key_at)
        weight = None
        norm_sum_at = None
        if query_norm is not None:
            weight = tl.where(is_query, query_norm, key_norm)
            norm_sum_at = norm_sums + (program * (query + kv) + head) * dim
        _write_gradient(
            dy,
            dy_token,
            dk_part,
            query,
            rows,
            columns,
            factor,
            amax,
            sums,
            head,
            program,
            tokens,
            count,
            dim,
            height,
            full,
            parts,
            stages,
            fp8,
            cos,
            sin,
            qkv,
            weight,
            norm_sum_at,
            eps,
        )
    else:
        dy = dv + (head - query - kv) * tl.cast(dv_head, tl.int64)
        _write_gradient(
            dy,
            dv_token,
            dv_part,
            0,
            rows,
            columns,
            factor,
            amax,
            sums,
            head,
            program,
            tokens,
            count,
            dim,
            height,
            full,
            parts,
            stages,
            fp8,
        )


@triton.jit
def _write_gradient(
    dy,  # gradient of the head, with a stride of `dy_token` between tokens
    dy_token,
    part_stride,  # stride between the parts of the gradient
    first_head_with_parts,  # all earlier heads have one part
    # The next five are as in `_rotate_backward`, except that `scale` is the FP32 value itself.
    rows,
    columns,
    scale,
    amax,
    sums,
    head,
    program,
    tokens,
    count: tl.constexpr,
    dim: tl.constexpr,
    height: tl.constexpr,
    full: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
    fp8: tl.constexpr,
    cos=None,  # [tokens, dim], or None without rotation
    sin=None,  # [tokens, dim], or None without rotation
    qkv=None,  # input of the norm [tokens, count x dim], or None without norms
    weight=None,  # weight of the norm [dim], or None without norms
    norm_sum_at=None,  # FP32 [dim], written: gradient of `weight`, or None without norms
    eps=0.0,
):
    """Write the gradient of a head for the tiles of a program.

    If `weight` is given, write its gradient, summed over the tiles, to `norm_sum_at`. If `sums` is
    given, write the gradient of the head, summed over the tokens of the tiles, to `sums`.
    """
    step = tl.num_programs(0) // count * height  # between the first tokens of a program's tiles
    half: tl.constexpr = dim // 2
    width: tl.constexpr = count * dim
    largest = tl.zeros([height], tl.float32)
    sum1 = tl.zeros([height, half], tl.float32) if weight is not None else 0.0
    sum2 = sum1
    total1 = tl.zeros([height, half], tl.float32) if sums is not None else 0.0
    total2 = total1
    for first in tl.range(program * height, tokens, step, num_stages=stages):
        row = tl.arange(0, height)[:, None] + tl.zeros([height, half], tl.int32)
        inside = row >= 0 if full else first + row < tokens
        dy_at = dy + _tile(first, dy_token, 0, height, 1, half)
        dx1, dx2 = _sum_of_parts(dy_at, inside, part_stride, head, first_head_with_parts, parts)
        if cos is not None:  # rotate back
            c, s = _load_angles(cos, sin, first, inside, 1, half)
            dx1, dx2 = tl.fma(dx1, c, dx2 * s), tl.fma(dx2, c, -(dx1 * s))
        if weight is not None:
            x_at = qkv + head * dim + _tile(first, width, 0, height, 1, half)
            dx1, dx2, sum1, sum2 = _differentiate_norm(
                dx1, dx2, sum1, sum2, x_at, weight, inside, eps
            )
        if sums is not None:
            total1 += dx1
            total2 += dx2
        largest = _write_head(
            dx1, dx2, largest, scale, rows, columns, first, inside, head * dim, tokens, width, fp8
        )
    column = tl.arange(0, half)
    if weight is not None:
        tl.store(norm_sum_at + column, tl.sum(sum1, axis=0))
        tl.store(norm_sum_at + half + column, tl.sum(sum2, axis=0))
    if sums is not None:
        sum_at = sums + program * width + head * dim + column
        tl.store(sum_at, tl.sum(total1, axis=0))
        tl.store(sum_at + half, tl.sum(total2, axis=0))
    if fp8 is not None:
        record_amax(amax, largest)


@triton.jit
def _sum_of_parts(dy_at, inside, part_stride, head, first_head_with_parts, parts: tl.constexpr):
    """Return the halves of a gradient of a head for one tile, FP32. Its parts are summed.

    `dy_at` has the addresses of the first half of the first part. `part_stride` is the stride
    between parts. Heads before `first_head_with_parts` have one part.
    """
    dx1, dx2 = _load_halves(dy_at, inside, 0)
    for number in tl.static_range(1, parts):
        # Use a mask and not a branch, so that the loads of the next tile can overlap with the
        # computation of this tile. Adding zeros broadcasts the scalar to the shape of the tile.
        heads = tl.zeros(dy_at.shape, tl.int32) + head
        has_parts = inside & (heads >= first_head_with_parts)
        part_at = dy_at + number * tl.cast(part_stride, tl.int64)
        part1, part2 = _load_halves(part_at, has_parts, 0)
        dx1 += part1
        dx2 += part2
    return dx1, dx2


@triton.jit
def _differentiate_norm(
    dx1,
    dx2,
    sum1,  # sums of the weight's gradient for the first half of the head, FP32 [height, half]
    sum2,  # sums of the weight's gradient for the second half
    x_at,  # addresses of the first half of the norm's input [height, half]
    weight,  # weight of the norm [2 x half]
    inside,  # mask of the tile [height, half]
    eps,
):
    """Return the gradients of both halves of a head for one tile, and the updated sums.

    The gradients are FP32 [height, half]. `dx1` and `dx2` are the gradients of the norm's output.
    """
    half: tl.constexpr = inside.shape[1]
    dim: tl.constexpr = 2 * half
    # Missing tokens have ones, so that their root mean square is not zero.
    x1, x2 = _load_halves(x_at, inside, 1)
    square = tl.sum(tl.fma(x1, x1, x2 * x2), axis=1)
    factor = tl.rsqrt(tl.fma(square, 1.0 / dim, eps))[:, None]
    x1 *= factor
    x2 *= factor
    sum1 = tl.fma(dx1, x1, sum1)
    sum2 = tl.fma(dx2, x2, sum2)
    # Load the weight for every tile. If it stayed in registers, fewer programs would fit on a
    # multiprocessor.
    weight_at = weight + tl.arange(0, half)[None, :]
    dx1 *= tl.load(weight_at).to(tl.float32)
    dx2 *= tl.load(weight_at + half).to(tl.float32)
    projection = (tl.sum(tl.fma(dx1, x1, dx2 * x2), axis=1) * (1.0 / dim))[:, None]
    dx1 = factor * tl.fma(-x1, projection, dx1)
    dx2 = factor * tl.fma(-x2, projection, dx2)
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
    inside,
    column,
    tokens,
    width: tl.constexpr,
    fp8: tl.constexpr,
):
    """Write the gradient of a head for one tile, and return the updated `largest` [height].

    The tile begins at token `first` and at column `column` of `rows`. `d1` and `d2` are the halves
    of the gradient, FP32 [height, half]. If `fp8` is None, the halves are written to `rows` in the
    dtype of `rows`, and `largest` does not change. Otherwise the halves are rounded to BF16 and
    then quantized, and `largest` has the largest magnitude of each row in all tiles so far.
    """
    half: tl.constexpr = inside.shape[1]
    i = first + tl.arange(0, inside.shape[0])
    j = column + tl.arange(0, half)
    if fp8 is None:
        at = tile_at(rows, i, j, width)
        tl.store(at, d1, mask=inside)
        tl.store(at + half, d2, mask=inside)
    else:
        # Promise the compiler only eight contiguous values. If it knew of more, each thread would
        # store sixteen codes at once, but also load sixteen neighbouring values. The order of the
        # sums over a head would then differ from the order in the BF16 kernel.
        i = tl.max_contiguous(i, _IN_A_THREAD)
        j = tl.max_contiguous(j, _IN_A_THREAD)
        d1 = d1.to(tl.bfloat16).to(tl.float32)
        d2 = d2.to(tl.bfloat16).to(tl.float32)
        store_tensor_scaled(d1, scale, rows, columns, i, j, tokens, width, fp8)
        store_tensor_scaled(d2, scale, rows, columns, i, j + half, tokens, width, fp8)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(d1), tl.abs(d2)), axis=1))
    return largest


def rotate(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: Heads, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `pretrain.model.fused.formulas.rotate` for BF16.

    The formulas are used without a rotation, and for heads that the kernel does not support.
    """
    if cos is None or sin is None or heads.dim not in DIMS:
        return formulas.rotate(qkv, cos, sin, heads, norms)
    tokens = len(qkv)
    rows = _TILE // heads.dim
    q = qkv.new_empty(tokens, heads.query, heads.dim)
    k = qkv.new_empty(tokens, heads.kv, heads.dim)
    v = torch.empty_like(k)
    # Number of heads in a tile: the largest power of two that divides the number of query heads and
    # the number of key heads, but at most MOST_HEADS.
    bits = heads.query | heads.kv
    block = min(bits & -bits, MOST_HEADS, rows)
    programs = heads.count // block * triton.cdiv(tokens, rows // block)
    _rotate_forward[(programs,)](
        qkv=qkv,
        q=q,
        k=k,
        v=v,
        tokens=tokens,
        heads=block,
        rows=rows,
        num_warps=_FORWARD_WARPS,
        enable_fp_fusion=True,
        **_arguments(cos, sin, heads, norms),
    )
    return q, k, v


def rotate_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    norms: HeadNorms | None,
    written: TensorScaled | None = None,
    *,
    summed: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute `pretrain.model.fused.formulas.rotate_backward` for BF16.

    Return the gradient of `qkv`, the gradients of the two norms' weights, and the gradient of `qkv`
    summed over tokens (if `summed` is set). The formulas are used for heads that the kernel does
    not support. If `written` is given, the gradient of `qkv` is rounded to BF16 and written to the
    buffers of `written` as FP8 codes. The first result is then `written.rows`, and the number of
    tokens must be a multiple of 32.
    """
    if heads.dim not in DIMS:
        return formulas.rotate_backward(dq, dk, dv, qkv, cos, sin, heads, norms, summed=summed)
    tokens = len(dq)
    gradients = _with_strides("dq", dq) | _with_strides("dk", dk) | _with_strides("dv", dv)
    # Gradients of queries are never in parts.
    del gradients["dq_part"]
    tiles = _SUMMED_TILES if summed else 1  # of a program
    programs = triton.cdiv(tokens, _TOKENS * tiles)  # of a head
    norm_sums = None
    if norms is not None:
        programs = min(programs, max(1, _PROGRAMS // heads.count))
        norm_sums = dq.new_empty(programs, heads.query + heads.kv, heads.dim, dtype=torch.float32)
    sums = dq.new_empty(programs, heads.width, dtype=torch.float32) if summed else None
    if written is None:
        written = TensorScaled(torch.bfloat16, dq.new_empty(tokens, heads.width))
    parts = dk.shape[2] if dk.dim() == 4 else 1
    # A program with one tile has no tile to load ahead.
    has_many_tiles = norms is not None or summed
    stages = _STAGES if has_many_tiles else 1
    _rotate_backward[(heads.count * programs,)](
        qkv=None if norms is None else qkv,
        norm_sums=norm_sums,
        sums=sums,
        tokens=tokens,
        height=_TOKENS,
        full=tokens % _TOKENS == 0,
        parts=parts,
        stages=stages,
        num_warps=max(1, _BACKWARD_WARPS * heads.dim // 128),
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
        **gradients,
        **_arguments(cos, sin, heads, norms),
        **written.arguments,
    )
    # The order of these sums depends on shapes only.
    total = None if sums is None else sums.sum(0)
    if norm_sums is None:
        return written.rows, None, None, total
    query_sums, key_sums = norm_sums.split((heads.query, heads.kv), dim=1)
    return written.rows, query_sums.sum(dim=(0, 1)), key_sums.sum(dim=(0, 1)), total


def _arguments(
    cos: Tensor | None, sin: Tensor | None, heads: Heads, norms: HeadNorms | None
) -> dict[str, Any]:
    """Return the arguments that both kernels have."""
    cos, sin = (None if table is None else table.contiguous() for table in (cos, sin))
    query, key, eps = (norms.query, norms.key, norms.eps) if norms else (None, None, 0.0)
    tensors = {"cos": cos, "sin": sin, "query_norm": query, "key_norm": key}
    return {**tensors, "eps": eps, **vars(heads)}


def _with_strides(name: str, gradient: Tensor) -> dict[str, Any]:
    """Return a gradient and the strides of its tokens, heads and parts, as arguments of the kernel.

    The gradient is the argument `name` of the kernel, [T, kv, parts, dim], or [T, kv, dim] without
    parts. The stride of missing parts is 0.
    """
    # The kernel requires that the values of a head are contiguous.
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    token, head, *part, _ = gradient.stride()
    arguments = {name: gradient, f"{name}_token": token, f"{name}_head": head}
    return arguments | {f"{name}_part": part[0] if part else 0}


def supports(quantizer: Any, dq: Tensor) -> bool:
    """Return True if `quantized_rotate_backward` can quantize in place of `quantizer`.

    It supports delayed scaling, and BF16 gradients `dq` [tokens, query, dim] with a multiple of 32
    tokens and with the head sizes DIMS.
    """
    return (
        dq.shape[2] in DIMS
        and isinstance(quantizer, library().Float8Quantizer)
        and dq.dtype == torch.bfloat16
        and len(dq) % _TOKENS == 0
    )


def quantized_rotate_backward(
    quantizer: Any,
    gradients: Sequence[Tensor],
    qkv: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    norms: HeadNorms | None,
    *,
    summed: bool,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of `qkv` and of both norm weights, and the summed gradient of `qkv`.

    The gradient of `qkv` is rounded to BF16 and then quantized to FP8. It has codes by rows, by
    columns or both, as `rowwise_usage` and `columnwise_usage` of `quantizer` request. The other
    results equal the results of `rotate_backward` bit for bit. `gradients` has the gradients of
    queries, keys and values. The other arguments are as in `rotate_backward`.
    """
    dq, dk, dv = gradients
    dqkv, written = allocate(
        quantizer,
        (len(dq), heads.width),
        dq.device,
        rows=quantizer.rowwise_usage,
        columns=quantizer.columnwise_usage,
    )
    inputs = (dq, dk, dv, qkv, cos, sin, heads, norms, written)
    _, *sums = rotate_backward(*inputs, summed=summed)
    return dqkv, *sums
