"""The rotation of queries and keys on a GPU: one launch a direction, every value read once and written once.

Forward's tile is some tokens by a block of neighbouring heads, each head as two columns of halves, so that what is rotated
against each other lies in the same registers. A block holds only query heads, only key heads or only value heads, and so has one
norm weight and one tensor to write to. Blocks of the same tokens run side by side, and share cos and sin in the cache.

Backward's tile is some tokens of one head. It writes the gradient in BF16, or in the format of the products that read it, by rows
and by columns, whose columns are whole sectors of the transpose. Both have the same bits, because every multiplication and
addition is rounded as it is written (pretrain.model.fused.rotary_arithmetic), and a thread holds eight neighbours of a row.

Backward adds up the gradients of the norms' weights in registers over all the tiles of a program, and the programs' sums are
added by torch, in an order that depends on the shapes alone. So backward with norms starts only as many programs as run at once,
and each goes through the tokens in strides; everything else starts one program a tile.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.attention.heads import HeadNorms, Heads
from pretrain.model.fused.rotary_arithmetic import gradient_of_head
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
class ForwardTiling:
    """How forward is cut. Of a tile of 4,096 values a thread loads 32: in BF16, four times 16 bytes. It is bound by memory, so
    tiles are so small that a multiprocessor holds five or more."""

    values: int  # of a tile; 4,096 are 32 heads of 128
    warps: int


@dataclass(frozen=True)
class BackwardTiling:
    """How backward is cut: of a head, so many tokens a tile."""

    tokens: int
    warps: int  # where a head has 128 values; for others in proportion
    registers: int  # of a thread, at most
    programs: int  # of a backward that sums norm gradients
    stages: int  # tiles that such a program loads at once, at most: all but the last of them go through shared memory


FORWARD = ForwardTiling(4096, 4)
BACKWARD = BackwardTiling(32, 8, 112, 264, 3)  # 32 tokens are a sector of the transpose. The fastest measured on an H200
BACKWARD_IN_BLOCKS = BackwardTiling(BLOCK.value, 4, 255, 264, 1)  # 128 of them share a scale. Two programs find room
MOST_HEADS = 8  # in a block of forward: 2 KB of a token in BF16, all in one stretch
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
    rows,  # [tokens, (query + 2 kv) x dim]: the gradient, or with `fp8` its codes, uint8; or None
    scale_inv,  # None without `fp8`, as columns, scale and amax
    columns,  # uint8, the transpose of the codes, or None. With neither rows nor columns, nothing is written but the amax
    scale,
    amax,
    norm_sums,  # FP32 [programs a head, query + kv, dim]
    tokens,
    eps,
    epsilon,
    query: tl.constexpr,
    kv: tl.constexpr,
    dim: tl.constexpr,
    height: tl.constexpr,  # tokens of a tile
    whole: tl.constexpr,  # all tiles are full, as they must be for codes
    parts: tl.constexpr,
    stages: tl.constexpr,
    power_of_two: tl.constexpr,
    fp8: tl.constexpr,  # None: the gradient in the dtype of `rows`
):
    half: tl.constexpr = dim // 2
    width: tl.constexpr = (query + 2 * kv) * dim
    head = tl.program_id(0) % (query + 2 * kv)
    program = tl.program_id(0) // (query + 2 * kv)
    step = tl.num_programs(0) // (query + 2 * kv) * height
    writes: tl.constexpr = rows is not None or columns is not None
    factor = None
    if fp8 is not None and writes:
        factor = tensor_scale(scale, amax, None, scale_inv, epsilon, power_of_two, fp8)
    largest = tl.zeros([height], tl.float32)
    sum1 = tl.zeros([height, half], tl.float32) if query_norm is not None else 0.0
    sum2 = sum1
    if head < query + kv:
        is_query = head < query
        dy = tl.where(is_query, dq, dk)
        dy_token = tl.where(is_query, dq_token, dk_token)
        dy += tl.where(is_query, head * tl.cast(dq_head, tl.int64), (head - query) * tl.cast(dk_head, tl.int64))
        weight = None
        if query_norm is not None:
            weight = tl.where(is_query, query_norm, key_norm)
        for first in tl.range(program * height, tokens, step, num_stages=stages):
            here = _inside(first, tokens, height, half, whole)
            dx1, dx2, sum1, sum2 = gradient_of_head(
                dy, dy_token, dk_part, query, cos, sin, qkv, weight, sum1, sum2, first, 1, here, head, width, dim, parts, eps
            )
            largest = _write_head(dx1, dx2, largest, factor, rows, columns, first, here, head * dim, tokens, width, fp8)
        if query_norm is not None and writes:
            sum_at = norm_sums + (program * (query + kv) + head) * dim + tl.arange(0, half)
            tl.store(sum_at, tl.sum(sum1, axis=0))
            tl.store(sum_at + half, tl.sum(sum2, axis=0))
    else:
        dy = dv + (head - query - kv) * tl.cast(dv_head, tl.int64)
        for first in tl.range(program * height, tokens, step, num_stages=stages):
            here = _inside(first, tokens, height, half, whole)
            dx1, dx2, sum1, sum2 = gradient_of_head(
                dy, dv_token, dv_part, 0, None, None, None, None, sum1, sum2, first, 1, here, head, width, dim, parts, eps
            )
            largest = _write_head(dx1, dx2, largest, factor, rows, columns, first, here, head * dim, tokens, width, fp8)
    if fp8 is not None and (scale is not None or not writes):
        record_amax(amax, largest)


@triton.jit
def _inside(first, tokens, height: tl.constexpr, half: tl.constexpr, whole: tl.constexpr):
    """Which of a tile's values [height, half] there are."""
    row = tl.arange(0, height)[:, None] + tl.zeros([height, half], tl.int32)
    return row >= 0 if whole else first + row < tokens


@triton.jit
def _write_head(d1, d2, largest, scale, rows, columns, first, here, column, tokens, width: tl.constexpr, fp8: tl.constexpr):
    """Write a head's gradients, whose halves d1 and d2 [height, dim / 2] are FP32, from the token `first` and the column `column`
    on. For codes they are rounded to BF16, and `largest` [height] is returned as the largest magnitudes up to now."""
    half: tl.constexpr = d1.shape[1]
    i, j = first + tl.arange(0, d1.shape[0]), column + tl.arange(0, half)
    if fp8 is None:
        at = rows + i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(at, d1.to(rows.dtype.element_ty), mask=here)
        tl.store(at + half, d2.to(rows.dtype.element_ty), mask=here)
    else:
        d1, d2 = through_bf16(d1), through_bf16(d2)
        if rows is not None or columns is not None:
            # Codes could be stored sixteen at a time. A thread would then hold as many neighbours of what is loaded, too, and
            # sums over a head would have another order than without codes.
            i, j = tl.max_contiguous(i, IN_A_THREAD), tl.max_contiguous(j, IN_A_THREAD)
            store_tensor_scaled(d1, scale, rows, columns, i, j, tokens, width, fp8)
            store_tensor_scaled(d2, scale, rows, columns, i, j + half, tokens, width, fp8)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(d1), tl.abs(d2)), axis=1))
    return largest


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    *,
    tiling: ForwardTiling = FORWARD,
) -> tuple[Tensor, Tensor, Tensor]:
    """pretrain.model.fused.rotary.rotate, for rows that it says have a kernel."""
    tokens = len(qkv)
    q = qkv.new_empty(tokens, heads.query, heads.dim)
    k = qkv.new_empty(tokens, heads.kv, heads.dim)
    v = torch.empty_like(k)
    *_, block, rows = layout = _layout(heads, tiling)
    query_norm, key_norm, eps = _of(norms)
    if tokens:
        with torch.cuda.device_of(qkv):
            _rotate_forward[(heads.count // block * triton.cdiv(tokens, rows // block),)](
                qkv,
                cos.contiguous(),
                sin.contiguous(),
                query_norm,
                key_norm,
                q,
                k,
                v,
                tokens,
                eps,
                *layout,
                num_warps=tiling.warps,
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
    *,
    tiling: BackwardTiling | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """pretrain.model.fused.rotary.rotate_backward, for rows that it says have a kernel."""
    dqkv = dq.new_empty(len(dq), heads.width)
    backward = _Backward((dq, dk, dv), qkv, (cos, sin), heads, norms, tiling or BACKWARD)
    backward.launch(_rotate_backward, dqkv, None, None, None, None, **backward.tile, epsilon=0.0, power_of_two=False, fp8=None)
    return dqkv, *backward.of_norms()


def writes(to: type[TensorScaled] | type[BlockScaled], dq: Tensor, heads: Heads) -> bool:
    """Whether `rotate_backward_in_codes` takes gradients like `dq` [T, query, dim]: BF16, of whole tiles; a head is a block."""
    tiling = BACKWARD_IN_BLOCKS if to is BlockScaled else BACKWARD
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
    tiling: BackwardTiling | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`rotate_backward` that writes the gradient [T, width], rounded to BF16, to `written`, for rows that `writes` says it takes.

    Returns the gradients of the norms' weights.
    """
    blocks = isinstance(written, BlockScaled)
    backward = _Backward((dq, dk, dv), qkv, (cos, sin), heads, norms, tiling or (BACKWARD_IN_BLOCKS if blocks else BACKWARD))
    how = {"epsilon": written.epsilon, "power_of_two": written.power_of_two, "fp8": TYPES[written.dtype]}
    if blocks:
        outputs = (written.rows, written.rows_scale_inv, written.columns, written.columns_scale_inv)
        backward.launch(rotate_backward_in_blocks, *outputs, **how)
    else:
        if written.scale is None:  # current scaling: the amax before anything is written
            backward.launch(_rotate_backward, None, None, None, None, written.amax, **backward.tile, **how)
        outputs = (written.rows, written.scale_inv, written.columns, written.scale, written.amax)
        backward.launch(_rotate_backward, *outputs, **backward.tile, **how)
    return backward.of_norms()


class _Backward:
    """What all launches of one backward are given: what they read, the sums for the norms' weights, and how they are cut."""

    def __init__(
        self,
        gradients: tuple[Tensor, Tensor, Tensor],
        qkv: Tensor | None,
        angles: tuple[Tensor, Tensor],
        heads: Heads,
        norms: HeadNorms | None,
        tiling: BackwardTiling,
    ) -> None:
        (dq, dk, dv), (cos, sin) = map(_as_read, gradients), angles
        tokens, parts = len(dq), dk.shape[2] if dk.dim() == 4 else 1
        self.queries, self.sums, stages = heads.query, None, 1
        programs = triton.cdiv(tokens, tiling.tokens)
        if norms is not None:
            programs = min(programs, max(1, tiling.programs // heads.count))
            self.sums = torch.empty(programs, heads.rotated, heads.dim, dtype=torch.float32, device=dq.device)
            stages = _stages(tiling, heads, parts, dq.element_size(), cos.element_size(), _shared_memory(dq))
        self.programs = heads.count * programs
        query_norm, key_norm, eps = _of(norms)
        self.inputs = [dq, dk, dv, *dq.stride()[:2], *_strides(dk), *_strides(dv)]
        self.inputs += [None if norms is None else qkv, cos.contiguous(), sin.contiguous(), query_norm, key_norm]
        self.options = {"query": heads.query, "kv": heads.kv, "dim": heads.dim, "parts": parts, "stages": stages}
        self.options |= {"tokens": tokens, "eps": eps, "num_warps": max(1, tiling.warps * heads.dim // 128)}
        self.options |= {"maxnreg": tiling.registers, "enable_fp_fusion": False}
        self.tile = {"height": tiling.tokens, "whole": tokens % tiling.tokens == 0}

    def launch(self, kernel: triton.JITFunction, *outputs: Tensor | None, **how: Any) -> None:
        """Write to `outputs`, as `how` says."""
        if self.programs:
            with torch.cuda.device_of(self.inputs[0]):
                kernel[(self.programs,)](*self.inputs, *outputs, self.sums, **self.options, **how)

    def of_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the norms' weights: sums in an order that shapes alone decide."""
        if self.sums is None:
            return None, None
        return self.sums[:, : self.queries].sum(dim=(0, 1)), self.sums[:, self.queries :].sum(dim=(0, 1))


def _of(norms: HeadNorms | None) -> tuple[Tensor | None, Tensor | None, float]:
    return (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)


def _shared_memory(tensor: Tensor) -> int:
    """Bytes that a program may have: 227 KiB on Hopper, 99 KiB on Ada and on Blackwell's smaller GPUs."""
    if not tensor.is_cuda:  # Triton's interpreter
        return sys.maxsize
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin


def _as_read(gradient: Tensor) -> Tensor:
    """The values of a head must be neighbours."""
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def _strides(gradient: Tensor) -> tuple[int, int, int]:
    """Returns the strides of tokens, heads and parts."""
    token, head, *part = gradient.stride()[:-1]
    return token, head, part[0] if part else 0


def _stages(tiling: BackwardTiling, heads: Heads, parts: int, value_bytes: int, angle_bytes: int, shared_memory: int) -> int:
    """Returns how many of the tiling's stages fit into shared memory beside a tile of codes to transpose and 1 KiB for sums."""
    tile = tiling.tokens * heads.dim
    of_a_stage = tile * (value_bytes * (parts + 1) + angle_bytes)  # dy and x; half of cos and half of sin
    return max(1, min(tiling.stages, 1 + (shared_memory - tile - 1024) // of_a_stage))


def _layout(heads: Heads, tiling: ForwardTiling) -> tuple[int, int, int, int, int]:
    """The kernels' constants, `query` to `rows`. A block has as many heads as a power of two that divides queries and keys."""
    both = heads.query | heads.kv
    rows = tiling.values // heads.dim
    return heads.query, heads.kv, heads.dim, min(both & -both, MOST_HEADS, rows), rows
