"""RMSNorm on a GPU, with the sum of the residual before it and the format of the product after it.

    x = y + residual                     BF16, as torch adds
    rstd = 1 / sqrt(mean(x^2) + eps)     FP32, for each row
    normed = weight * (rstd * x)         FP32, then BF16 or codes

and its gradient, with that of the residual, which is another reader of x:

    dx = rstd * (weight * dy - rstd * x * mean(weight * dy * rstd * x)) + residual      FP32, then BF16
    dweight = sum over tokens of dy * rstd * x                                         FP32

A program takes some whole rows and goes over them twice, a tile at a time: a row must be known before any of it is normalised. So
few rows are under way at once that the second time finds x in the cache. A tile of whole rows stays in registers. Codes are also
written as their transpose, for which a tile has at least 16 rows; 32 fill a sector of memory.

Delayed scaling knows its scale beforehand, and is one kernel. Where the scales follow from the values, the first kernel leaves x
and rstd, and for a tensor's scale the amax, and a second one quantizes tile by tile. Codes under a given scale come from FP32,
as Transformer Engine's do; all others from values that were rounded to BF16. Multiplications and additions are not fused, so with
the same rstd the codes have the same bits.

Backward holds whole rows in registers. Each program sums what its rows give to dweight, and these sums are added in their order:
how rows are shared out follows from the shape alone, so the bits repeat.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.precision.fp8_tile import (
    BLOCK,
    TYPES,
    BlockScaled,
    TensorScaled,
    load_rows,
    record_amax,
    store_block_scaled,
    store_rows,
    store_tensor_scaled,
    tensor_scale,
    through_bf16,
)

VECTOR = tl.constexpr(8)  # BF16 values in 16 bytes
LEAST_ROWS, LEAST_COLUMNS = 16, 64  # of a tile, the rows where it has codes: smaller ones would be slower than what they replace
CACHED = 1 << 18  # bytes of x that one program may leave in the cache meanwhile: more rows would then be read anew from memory


class NormTiling(NamedTuple):
    """The rows of a program and the columns of its tile, powers of two; `stages` > 1 has loads run that far ahead."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


BY_ROWS = NormTiling(8, 8192, 4)  # in BF16, and before a second kernel: as many columns as may be, and rows for 4,096 values
TRANSPOSED = NormTiling(32, 512, 16)
QUANTIZED = NormTiling(64, 64, 4)  # the second kernel's
BLOCKS = NormTiling(128, 128, 8)
BACKWARD_PROGRAMS = 1024  # at most; each leaves a row of FP32 sums
BACKWARD_VALUES = 2048  # of a tile of whole rows, at least; a thread has eight of them


@triton.jit
def _by_vector(values):
    """Values [rows, columns] with those that a thread loads at once along an axis of their own: what is reduced along it first is
    so by each thread alone, and leaves an eighth of it to be kept in registers."""
    return tl.reshape(values, [values.shape[0], values.shape[1] // VECTOR, VECTOR])


@triton.jit
def _add(x, residual, at):
    """The tile `at` of x, FP32; with `residual`, unless that is None, added to it in place."""
    values = tl.load(x + at).to(tl.float32)
    if residual is not None:
        values = through_bf16(values + tl.load(residual + at, eviction_policy="evict_first").to(tl.float32))
        tl.store(x + at, values.to(tl.bfloat16))
    return values


@triton.jit
def _normalise(values, weight, factor, j):
    """A tile of x at the columns j, as normed values; `factor` [rows] are their rstd."""
    return tl.load(weight + j).to(tl.float32)[None, :] * (factor[:, None] * values)


# ── Kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _rms_norm(
    x,  # BF16 [tokens, width]: without the residual yet
    residual,  # the same, or None
    weight,  # [width]
    rstd,  # FP32 [tokens]
    normed,  # BF16 [tokens, width] or None
    rows,  # uint8 [tokens, width] or None
    columns,  # uint8 [width, tokens] or None
    scale,  # FP32 [1]: of rows and columns
    scale_inv,
    amax,  # FP32 [1] or None: raised to the largest magnitude of what is quantized here or later
    tokens,
    eps,
    width: tl.constexpr,
    fp8: tl.constexpr,  # None: nothing is quantized here
    normalised: tl.constexpr,  # whether there is more to do than rstd
    height: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    i = tl.program_id(0) * height + tl.arange(0, height)
    first = tl.program_id(0).to(tl.int64) * height * width
    inside = tl.arange(0, height)[:, None] * width + tl.arange(0, step)[None, :]
    if step == width:  # x stays in registers
        kept = _add(x, residual, first + inside)
        squares = tl.sum(_by_vector(kept * kept), axis=2)
    else:
        squares = tl.zeros([height, step // VECTOR], tl.float32)
        for start in tl.range(0, width, step, num_stages=stages):
            values = _add(x, residual, first + (start + inside))
            squares += tl.sum(_by_vector(values * values), axis=2)
        tl.debug_barrier()  # what a thread will read of x, another one of this program may have written
    factor = tl.rsqrt(tl.sum(squares, axis=1) * (1.0 / width) + eps)
    tl.store(rstd + i, factor)
    if normalised:
        if fp8 is not None:
            to_codes = tensor_scale(scale, None, None, scale_inv, 0.0, False, fp8)
        largest = tl.zeros([height, step // VECTOR], tl.float32)
        for start in tl.range(0, width, step, num_stages=stages):
            j = start + tl.arange(0, step)
            values = _normalise(kept if step == width else load_rows(x, i, j, width), weight, factor, j)
            if fp8 is not None:
                store_tensor_scaled(values, to_codes, rows, columns, i, j, tokens, width, fp8)
            else:
                values = through_bf16(values)
            if normed is not None:
                store_rows(values.to(tl.bfloat16), normed, i, j, width)
            if amax is not None:
                largest = tl.maximum(largest, tl.max(_by_vector(tl.abs(values)), axis=2))
        if amax is not None:
            record_amax(amax, largest)


@triton.jit
def _quantize(
    x,
    weight,
    rstd,
    rows,
    columns,
    amax,
    scale_inv,
    tokens,
    epsilon,
    width: tl.constexpr,
    power_of_two: tl.constexpr,
    fp8: tl.constexpr,
    height: tl.constexpr,
    step: tl.constexpr,
):
    i, j = tl.program_id(0) * height + tl.arange(0, height), tl.program_id(1) * step + tl.arange(0, step)
    values = through_bf16(_normalise(load_rows(x, i, j, width), weight, tl.load(rstd + i), j))
    scale = tensor_scale(None, amax, None, scale_inv, epsilon, power_of_two, fp8)
    store_tensor_scaled(values, scale, rows, columns, i, j, tokens, width, fp8)


@triton.jit
def _quantize_blocks(
    x,
    weight,
    rstd,
    rows,
    rows_scale_inv,
    columns,
    columns_scale_inv,
    tokens,
    epsilon,
    width: tl.constexpr,
    power_of_two: tl.constexpr,
    fp8: tl.constexpr,
    height: tl.constexpr,
):
    row, column = tl.program_id(0) * height, tl.program_id(1) * BLOCK
    i, j = row + tl.arange(0, height), column + tl.arange(0, BLOCK)
    values = through_bf16(_normalise(load_rows(x, i, j, width), weight, tl.load(rstd + i), j))
    store_block_scaled(
        values, rows, rows_scale_inv, columns, columns_scale_inv, row, column, tokens, width, epsilon, power_of_two, fp8
    )


@triton.jit
def _rms_norm_backward(
    dy,  # BF16 [tokens, width]
    x,  # the same
    rstd,  # FP32 [tokens]
    weight,  # [width]
    residual,  # as dy, or None
    dx,  # BF16 [tokens, width]
    sums,  # FP32 [programs, width]
    tokens,
    rows,  # of a program
    width: tl.constexpr,
    height: tl.constexpr,
    step: tl.constexpr,  # the least power of two that holds a row
):
    j = tl.arange(0, step)
    inside = j < width
    scale = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([height, step], tl.float32)
    for start in tl.range(0, rows, height):
        i = tl.program_id(0) * rows + start + tl.arange(0, height)
        there, at = (i < tokens)[:, None] & inside[None, :], i.to(tl.int64)[:, None] * width + j[None, :]
        factor = tl.load(rstd + i, mask=i < tokens, other=0.0)[:, None]
        normed = factor * tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        gradient = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        total += gradient * normed
        gradient *= scale
        mean = tl.sum(gradient * normed, axis=1) * (1.0 / width)
        values = factor * (gradient - normed * mean[:, None])
        if residual is not None:
            values += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + at, values.to(tl.bfloat16), mask=there)
    tl.store(sums + tl.program_id(0) * width + j, tl.sum(total, axis=0), mask=inside)


def divides(x: Tensor, to: type[TensorScaled] | type[BlockScaled] | None) -> bool:
    """Whether the kernels that write as `to` says take `x` [tokens, width]: contiguous BF16, whole tiles. None: those that write
    BF16, backward too, which take any number of tokens."""
    rows, columns = (BLOCKS.rows, BLOCKS.columns) if to is BlockScaled else (LEAST_ROWS if to else 1, LEAST_COLUMNS)
    whole = x.shape[0] % rows == 0 and x.shape[1] % columns == 0
    return whole and x.dtype == torch.bfloat16 and x.is_contiguous()


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, tiling: NormTiling | None = None
) -> tuple[Tensor, Tensor]:
    """Add `residual` to x [tokens, width] in place, both BF16; return the norm of the sum, BF16, and its rstd [tokens], FP32."""
    normed = torch.empty_like(x)
    return normed, _launch(x, residual, weight, eps, tiling or _by_rows(x), normed=normed)


def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x with `residual` added, and that of `weight` [width], FP32, from the gradient of the norm of x and
    its rstd [tokens], FP32. All others are BF16 [tokens, width], contiguous."""
    tokens, width = x.shape
    step = triton.next_power_of_2(width)
    height = max(1, BACKWARD_VALUES // step)
    rows = height * math.ceil(tokens / (height * BACKWARD_PROGRAMS))
    programs = math.ceil(tokens / rows)
    dx, sums = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        *(dy, x, rstd, weight, residual, dx, sums, tokens, rows, width, height, step),
        num_warps=min(16, height * step // 256),
        enable_fp_fusion=False,
    )
    return dx, sums.sum(dim=0)


def rms_norm_scaled(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    written: TensorScaled,
    tiling: NormTiling | None = None,
    second: NormTiling = QUANTIZED,
) -> Tensor:
    """`rms_norm` with its norm quantized by one scale, to where `written` says; returns rstd."""
    if written.scale is not None:
        # Without a transpose too: a row's squares are summed as the tile has it, and an evaluation has the bits of training.
        return _launch(x, residual, weight, eps, tiling or _transposed(x), written=written)
    rstd = _launch(x, residual, weight, eps, _by_rows(x), amax=written.amax)
    tokens, width = x.shape
    height, step, warps = _tile(x, second)
    _quantize[tokens // height, width // step](
        *(x, weight, rstd, written.rows, written.columns, written.amax, written.scale_inv, tokens, written.epsilon),
        *(width, written.power_of_two, TYPES[written.dtype], height, step),
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return rstd


def rms_norm_blocks(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, written: BlockScaled, tiling: NormTiling = BLOCKS
) -> Tensor:
    """`rms_norm` with its norm quantized by a scale for every 128 values, to where `written` says; returns rstd."""
    rstd = _launch(x, residual, weight, eps, _by_rows(x))
    tokens, width = x.shape
    _quantize_blocks[tokens // tiling.rows, width // tiling.columns](
        *(x, weight, rstd, written.rows, written.rows_scale_inv, written.columns, written.columns_scale_inv),
        *(tokens, written.epsilon, width, written.power_of_two, TYPES[written.dtype], tiling.rows),
        num_warps=tiling.warps,
        enable_fp_fusion=False,
    )
    return rstd


def _by_rows(x: Tensor) -> NormTiling:
    columns = math.gcd(x.shape[1], BY_ROWS.columns)
    return BY_ROWS._replace(rows=min(BY_ROWS.rows, max(1, 4096 // columns)), columns=columns)


def _transposed(x: Tensor) -> NormTiling:
    """Returns a tiling with the fewer rows, the wider they are."""
    rows = TRANSPOSED.rows
    while rows > LEAST_ROWS and rows * x.shape[1] * x.element_size() > CACHED:
        rows //= 2
    return TRANSPOSED._replace(rows=rows)


def _tile(x: Tensor, tiling: NormTiling) -> tuple[int, int, int]:
    """Rows and columns of a tile that divides x, and warps for it: a thread has 16 values at least."""
    height, step = math.gcd(x.shape[0], tiling.rows), math.gcd(x.shape[1], tiling.columns)
    return height, step, max(1, min(tiling.warps, height * step // 512))


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    tiling: NormTiling,
    *,
    normed: Tensor | None = None,
    written: TensorScaled | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """The kernel that adds; returns rstd."""
    tokens, width = x.shape
    height, step, warps = _tile(x, tiling)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    codes, fp8 = (None, None, None, None, amax), None
    if written is not None:
        codes, fp8 = (written.rows, written.columns, written.scale, written.scale_inv, written.amax), TYPES[written.dtype]
    normalised = any(each is not None for each in (normed, *codes))
    _rms_norm[(tokens // height,)](
        *(x, residual, weight, rstd, normed, *codes, tokens, eps),
        *(width, fp8, normalised, height, step, tiling.stages),
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return rstd
