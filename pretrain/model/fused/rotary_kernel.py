"""The rotation of queries and keys on a GPU: one launch a direction, every value read once and written once.

A tile is some tokens by a block of neighbouring heads, each head as two columns of halves, so that what is rotated against each
other lies in the same registers. A block holds only query heads, only key heads or only value heads, and so has one norm weight
and one tensor to write to. Blocks of the same tokens run side by side, and share cos and sin in the cache.

The launches are bound by memory, so tiles are so small that a multiprocessor holds five or more.

Backward adds up the gradients of the norms' weights in registers over all the tiles of a program, and the programs' sums are
added by torch, in an order that depends on the shapes alone. So backward with norms starts only as many programs as run at once,
and each goes through the tokens in strides; everything else starts one program a tile.

Backward writes its gradient in BF16, or in the format of the products that read it, by rows and by columns: then a tile is some
tokens of one head, whose columns are whole sectors of the transpose. Both have the same bits, because every multiplication and
addition is rounded as it is written here, and a thread holds eight neighbours of a row in both. Left to the compiler, some lanes
of a tile would fuse two operations and others not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.attention.heads import HeadNorms, Heads
from pretrain.model.fused.rotary_arithmetic import normal, sum_of_parts, through_norm, turned_back
from pretrain.model.fused.rotary_block_kernel import rotate_backward_in_blocks
from pretrain.precision.fp8_tile import (
    BLOCK,
    TYPES,
    BlockScaled,
    TensorScaled,
    record_amax,
    store_tensor_scaled,
    tensor_scale,
    through_bf16,
)


@dataclass(frozen=True)
class RotaryTiling:
    """How a launch is cut. Of a tile of 4,096 values a thread loads 32: in BF16, four times 16 bytes."""

    values: int  # of a tile; 4,096 are 32 heads of 128
    warps: int
    programs: int = 792  # of a backward that sums norm gradients: 6 x an H200's 132 multiprocessors, which 80 registers allow
    registers: int | None = None  # of a thread, at most
    stages: int = 1  # tiles that a program of such a backward loads at once; more than one go through shared memory


FORWARD = RotaryTiling(4096, 4)
BACKWARD = RotaryTiling(2048, 4, registers=80)  # it loads two tiles of all and keeps sums: a larger one would not fit five times


@dataclass(frozen=True)
class CodesTiling:
    """How a launch that writes codes is cut: of a head, so many tokens a tile."""

    tokens: int
    warps: int  # where a head has 128 values; for others in proportion
    registers: int  # of a thread, at most
    programs: int  # of a backward that sums norm gradients
    stages: int  # tiles that such a program loads at once, at most: all but the last of them go through shared memory


TENSOR_SCALED = CodesTiling(32, 8, 112, 264, 3)  # 32 tokens are a sector of the transpose. The fastest measured on an H200
BLOCK_SCALED = CodesTiling(BLOCK.value, 4, 255, 264, 1)  # 128 of them share a scale. Two programs find room
MOST_HEADS = 8  # in a block: 2 KB of a token in BF16, all in one stretch
_NO_NORMS = HeadNorms(None, None, 0.0)
IN_A_THREAD = tl.constexpr(8)  # neighbours of a row: 16 bytes in BF16


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
    dqkv,
    norm_sums,  # FP32 [programs a block, blocks of queries and keys, dim]
    tokens,
    eps,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    heads: tl.constexpr,
    rows: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
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
        for first in tl.range(start, tokens, step, num_stages=stages):
            here = (first + tl.arange(0, rows) // heads < tokens)[:, None]
            dy_at = dy + _tile(first, dy_token, dy_head, rows, heads, half)
            angle = _tile(first, dim, 0, rows, heads, half)
            at = head * dim + _tile(first, width, dim, rows, heads, half)
            dy1, dy2 = sum_of_parts(dy_at, dk_part, here, head, query, parts, half)
            c = tl.load(cos + angle, mask=here, other=0).to(tl.float32)
            s = tl.load(sin + angle, mask=here, other=0).to(tl.float32)
            dx1, dx2 = turned_back(dy1, dy2, c, s)
            if query_norm is not None:
                x1 = tl.load(qkv + at, mask=here, other=1).to(tl.float32)
                x2 = tl.load(qkv + at + half, mask=here, other=1).to(tl.float32)
                x1, x2, factor = normal(x1, x2, dim, eps)
                sum1 = tl.fma(dx1, x1, sum1)
                sum2 = tl.fma(dx2, x2, sum2)
                dx1, dx2 = through_norm(dx1 * w1, dx2 * w2, x1, x2, factor, dim)
            tl.store(dqkv + at, dx1.to(dqkv.dtype.element_ty), mask=here)
            tl.store(dqkv + at + half, dx2.to(dqkv.dtype.element_ty), mask=here)
        if query_norm is not None:
            sum_at = norm_sums + (program * ((query + kv) // heads) + head // heads) * dim + tl.arange(0, half)
            tl.store(sum_at, tl.sum(sum1, axis=0))
            tl.store(sum_at + half, tl.sum(sum2, axis=0))
    else:
        for first in tl.range(start, tokens, step, num_stages=stages):
            here = (first + tl.arange(0, rows) // heads < tokens)[:, None]
            dy_at = dv + (head - query - kv).to(tl.int64) * dv_head + _tile(first, dv_token, dv_head, rows, heads, half)
            dx_at = dqkv + head * dim + _tile(first, width, dim, rows, heads, half)
            dx1, dx2 = sum_of_parts(dy_at, dv_part, here, head, 0, parts, half)
            tl.store(dx_at, dx1.to(dqkv.dtype.element_ty), mask=here)
            tl.store(dx_at + half, dx2.to(dqkv.dtype.element_ty), mask=here)


@triton.jit
def _rotate_backward_in_codes(
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
    rows,  # uint8 [tokens, (query + 2 kv) x dim], or None
    scale_inv,
    columns,  # uint8, its transpose, or None. Where there is neither, nothing is written but the amax
    scale,
    amax,
    norm_sums,  # FP32 [programs a head, query + kv, dim]
    tokens,
    eps,
    epsilon,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    height: tl.constexpr,  # tokens of a tile, of which there are whole ones
    parts: tl.constexpr,
    stages: tl.constexpr,
    power_of_two: tl.constexpr,
    fp8: tl.constexpr,
):
    half: tl.constexpr = dim // 2
    width: tl.constexpr = (query + 2 * kv) * dim
    head = tl.program_id(0) % (query + 2 * kv)
    program = tl.program_id(0) // (query + 2 * kv)
    step = tl.num_programs(0) // (query + 2 * kv) * height
    finds_amax: tl.constexpr = rows is None and columns is None
    records: tl.constexpr = finds_amax or scale is not None
    scale_of_all = None
    if not finds_amax:
        scale_of_all = tensor_scale(scale, amax, None, scale_inv, epsilon, power_of_two, fp8)
    largest = tl.zeros([height], tl.float32)
    here = tl.zeros([height, half], tl.int32) == 0  # tiles are whole
    if head < query + kv:
        is_query = head < query
        dy = tl.where(is_query, dq, dk)
        dy_token = tl.where(is_query, dq_token, dk_token)
        dy += tl.where(is_query, head * tl.cast(dq_head, tl.int64), (head - query) * tl.cast(dk_head, tl.int64))
        if query_norm is not None:
            weight_at = tl.where(is_query, query_norm, key_norm) + tl.arange(0, half)[None, :]
            sum1 = tl.zeros([height, half], tl.float32)
            sum2 = tl.zeros([height, half], tl.float32)
        for first in tl.range(program * height, tokens, step, num_stages=stages):
            dy_at = dy + _tile(first, dy_token, 0, height, 1, half)
            angle = _tile(first, dim, 0, height, 1, half)
            dy1, dy2 = sum_of_parts(dy_at, dk_part, here, head, query, parts, half)
            c = tl.load(cos + angle).to(tl.float32)
            s = tl.load(sin + angle).to(tl.float32)
            dx1, dx2 = turned_back(dy1, dy2, c, s)
            if query_norm is not None:
                at = head * dim + _tile(first, width, 0, height, 1, half)
                x1, x2, factor = normal(tl.load(qkv + at).to(tl.float32), tl.load(qkv + at + half).to(tl.float32), dim, eps)
                sum1 = tl.fma(dx1, x1, sum1)
                sum2 = tl.fma(dx2, x2, sum2)
                # Loaded for every tile: registers for them, too, would leave a multiprocessor too few programs.
                w1 = tl.load(weight_at).to(tl.float32)
                w2 = tl.load(weight_at + half).to(tl.float32)
                dx1, dx2 = through_norm(dx1 * w1, dx2 * w2, x1, x2, factor, dim)
            dx1, dx2 = through_bf16(dx1), through_bf16(dx2)
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(dx1), tl.abs(dx2)), axis=1))
            if not finds_amax:
                _write_head(dx1, dx2, scale_of_all, rows, columns, first, head * dim, tokens, width, fp8)
        if query_norm is not None and not finds_amax:
            sum_at = norm_sums + (program * (query + kv) + head) * dim + tl.arange(0, half)
            tl.store(sum_at, tl.sum(sum1, axis=0))
            tl.store(sum_at + half, tl.sum(sum2, axis=0))
    else:
        for first in tl.range(program * height, tokens, step, num_stages=stages):
            dy_at = dv + (head - query - kv) * tl.cast(dv_head, tl.int64) + _tile(first, dv_token, 0, height, 1, half)
            dx1, dx2 = sum_of_parts(dy_at, dv_part, here, head, 0, parts, half)
            if parts > 1:
                dx1, dx2 = through_bf16(dx1), through_bf16(dx2)
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(dx1), tl.abs(dx2)), axis=1))
            if not finds_amax:
                _write_head(dx1, dx2, scale_of_all, rows, columns, first, head * dim, tokens, width, fp8)
    if records:
        record_amax(amax, largest)


@triton.jit
def _write_head(d1, d2, scale, rows, columns, first, column, tokens, width: tl.constexpr, fp8: tl.constexpr):
    """Write a head's gradients, whose halves d1 and d2 [height, dim / 2] are FP32 that was BF16, from the token `first` and the
    column `column` on."""
    half: tl.constexpr = d1.shape[1]
    # Codes could be stored sixteen at a time. A thread would then hold as many neighbours of what is loaded, too, and sums over a
    # head would have another order than in `_rotate_backward`.
    i = tl.max_contiguous(first + tl.arange(0, d1.shape[0]), IN_A_THREAD)
    j = tl.max_contiguous(column + tl.arange(0, half), IN_A_THREAD)
    store_tensor_scaled(d1, scale, rows, columns, i, j, tokens, width, fp8)
    store_tensor_scaled(d2, scale, rows, columns, i, j + half, tokens, width, fp8)


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
    dq, dk, dv = map(_as_read, (dq, dk, dv))
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
            arguments = [dq, dk, dv, *dq.stride()[:2], *_strides(dk), *_strides(dv)]
            arguments += [None if norms is _NO_NORMS else qkv, cos.contiguous(), sin.contiguous(), norms.query, norms.key]
            arguments += [dqkv, sums, tokens, norms.eps, *layout, _parts(dk), tiling.stages if sums is not None else 1]
            options = {"num_warps": tiling.warps, "maxnreg": tiling.registers, "enable_fp_fusion": False}
            _rotate_backward[(blocks * programs,)](*arguments, **options)
    if sums is None:
        return dqkv, None, None
    queries = heads.query // block
    return dqkv, sums[:, :queries].sum(dim=(0, 1)), sums[:, queries:].sum(dim=(0, 1))


def writes(to: type[TensorScaled] | type[BlockScaled], dq: Tensor, heads: Heads) -> bool:
    """Whether `rotate_backward_in_codes` takes gradients like `dq` [T, query, dim]: BF16, of whole tiles; a head is a block."""
    tiling = BLOCK_SCALED if to is BlockScaled else TENSOR_SCALED
    return dq.dtype == torch.bfloat16 and len(dq) % tiling.tokens == 0 and (to is TensorScaled or heads.dim == BLOCK.value)


def rotate_backward_in_codes(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    written: TensorScaled | BlockScaled,
    *,
    tiling: CodesTiling | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`rotate_backward` that writes the gradient [T, width], rounded to BF16, to `written`, for rows that `writes` says it takes.

    Returns the gradients of the norms' weights: sums in another order than of `rotate_backward`, which shapes alone decide too.
    """
    tiling = tiling or (BLOCK_SCALED if isinstance(written, BlockScaled) else TENSOR_SCALED)
    tokens, height = len(dq), tiling.tokens
    dq, dk, dv = map(_as_read, (dq, dk, dv))
    tiles, sums = tokens // height, None
    programs = tiles if norms is None else min(tiles, max(1, tiling.programs // heads.count))
    if norms is not None:
        sums = torch.empty(programs, heads.rotated, heads.dim, dtype=torch.float32, device=dq.device)
    of_norms = norms or _NO_NORMS
    inputs = [dq, dk, dv, *dq.stride()[:2], *_strides(dk), *_strides(dv)]
    inputs += [qkv if norms else None, cos.contiguous(), sin.contiguous(), of_norms.query, of_norms.key]
    parts = _parts(dk)
    shape = {"query": heads.query, "kv": heads.kv, "dim": heads.dim, "parts": parts}
    shape |= {"stages": 1 if norms is None else _stages(tiling, heads, parts, cos.element_size(), _shared_memory(dq))}
    shape |= {"tokens": tokens, "eps": of_norms.eps, "epsilon": written.epsilon, "power_of_two": written.power_of_two}
    shape |= {"fp8": TYPES[written.dtype], "num_warps": max(1, tiling.warps * heads.dim // 128)}
    shape |= {"maxnreg": tiling.registers, "enable_fp_fusion": False}

    grid = (heads.count * programs,)
    with torch.cuda.device_of(dq):
        if isinstance(written, BlockScaled):
            outputs = (written.rows, written.rows_scale_inv, written.columns, written.columns_scale_inv, sums)
            rotate_backward_in_blocks[grid](*inputs, *outputs, **shape)
        else:
            outputs = (written.rows, written.scale_inv, written.columns, written.scale, written.amax, sums)
            if written.scale is None:  # current scaling: the amax before anything is written
                _rotate_backward_in_codes[grid](*inputs, None, None, None, None, written.amax, sums, height=height, **shape)
            _rotate_backward_in_codes[grid](*inputs, *outputs, height=height, **shape)
    return (None, None) if sums is None else (sums[:, : heads.query].sum(dim=(0, 1)), sums[:, heads.query :].sum(dim=(0, 1)))


def _shared_memory(tensor: Tensor) -> int:
    """Bytes that a program may have: 227 KiB on Hopper, 99 KiB on Ada and on Blackwell's smaller GPUs."""
    if not tensor.is_cuda:  # Triton's interpreter
        return sys.maxsize
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin


def _as_read(gradient: Tensor) -> Tensor:
    """The values of a head must be neighbours."""
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def _parts(gradient: Tensor) -> int:
    return gradient.shape[2] if gradient.dim() == 4 else 1


def _strides(gradient: Tensor) -> tuple[int, int, int]:
    """Of tokens, heads and parts."""
    token, head, *part = gradient.stride()[:-1]
    return token, head, part[0] if part else 0


def _stages(tiling: CodesTiling, heads: Heads, parts: int, angle_bytes: int, shared_memory: int) -> int:
    """As many of the tiling's stages as find room there, beside a tile of codes to transpose and 1 KiB for sums."""
    tile = tiling.tokens * heads.dim
    of_a_stage = tile * (2 * (parts + 1) + angle_bytes)  # dy and x in BF16; half of cos and half of sin
    return max(1, min(tiling.stages, 1 + (shared_memory - tile - 1024) // of_a_stage))


def _layout(heads: Heads, tiling: RotaryTiling) -> tuple[int, int, int, int, int]:
    """The kernels' constants, `query` to `rows`. A block has as many heads as a power of two that divides queries and keys."""
    both = heads.query | heads.kv
    rows = tiling.values // heads.dim
    return heads.query, heads.kv, heads.dim, min(both & -both, MOST_HEADS, rows), rows
