"""What Triton kernels do with a tile of values beside computing it: load it, quantize it to FP8, store it.

Hopper's FP8 products read both operands along the inner dimension. So a tensor [M, K] that one product reads by rows and another
by columns exists twice: as it is, and as its transpose [K, M]. A kernel that holds a tile in registers writes both.

As in TE, numbers beyond the format's range, infinities too, become its largest value; NaN stays NaN in the codes but does not
count for an amax. Everything here is for tiles that lie wholly inside the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)  # values that share a scale in TE's `block` recipe, along a row or along a column
FP32_MAX = tl.constexpr(3.4028234663852886e38)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
_INFINITY = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@dataclass(frozen=True)
class TensorScaled:
    """Names where a tensor [M, K] is written, and with which scale: `scale`, or where that is None, current scaling's, from
    `amax`.

    All on one device. What is None is not written.
    """

    dtype: torch.dtype  # float8_e4m3fn or float8_e5m2
    rows: Tensor | None  # uint8 [M, K]
    columns: Tensor | None  # uint8 [K, M]
    scale_inv: Tensor  # FP32 [1], written: 1 / scale
    scale: Tensor | None = None  # FP32 [1]
    amax: Tensor | None = None  # FP32 [1], raised to the tensor's amax where a scale is given
    used: Tensor | None = None  # FP32 [1], written: the scale
    epsilon: float = 0.0  # current scaling: the least amax
    power_of_two: bool = False  # current scaling


@dataclass(frozen=True)
class BlockScaled:
    """Names where a tensor [M, K], with M and K multiples of 128, is written with a scale for every 128 values."""

    dtype: torch.dtype  # float8_e4m3fn or float8_e5m2
    rows: Tensor | None  # uint8 [M, K]
    rows_scale_inv: Tensor | None  # FP32 [K / 128, M]
    columns: Tensor | None  # uint8 [K, M]
    columns_scale_inv: Tensor | None  # FP32 [M / 128, K]
    epsilon: float = 0.0
    power_of_two: bool = True


@triton.jit
def store_tensor_scaled(values, scale, rows, columns, i, j, M, K, fp8: tl.constexpr):
    """Quantize a tile `values` [BM, BN] FP32 with one FP32 `scale` and write it to `rows` [M, K] and `columns` [K, M].

    Both are pointers to uint8; None is not written. i [BM] and j [BN] are the tile's rows and columns in the tensor: int32,
    each contiguous. `fp8` is tl.float8e4nv (E4M3) or tl.float8e5 (E5M2).
    """
    codes = fp8_codes(values, scale, fp8)
    if rows is not None:
        store_rows(codes, rows, i, j, K)
    if columns is not None:
        store_columns(codes, columns, i, j, M)


@triton.jit
def tensor_scale(scale, amax, used, scale_inv, epsilon, power_of_two: tl.constexpr, fp8: tl.constexpr):
    """The scale of a tensor: what the pointer `scale` holds, or where that is None, current scaling's, from `amax`.

    Of a two-dimensional grid the first program writes it to `used`, unless that is None, and its reciprocal to `scale_inv`.
    """
    value = tl.load(scale) if scale is not None else scale_from_amax(tl.load(amax), epsilon, FP32_MAX, power_of_two, fp8)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, reciprocal(value, False))
        if used is not None:
            tl.store(used, value)
    return value


@triton.jit
def record_amax(amax, values):
    """Raise `amax`, a pointer to one FP32 number that is not negative, to the largest magnitude in `values`. NaN does not count.
    Such numbers order as their bits do, so the maximum is one of integers."""
    largest = largest_magnitude(values, None)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_from_amax(amax, epsilon, overflow: tl.constexpr, power_of_two: tl.constexpr, fp8: tl.constexpr):
    """What to multiply by so that `amax` (FP32, any shape), but at least `epsilon`, lands on the largest value of `fp8`:
    the rule of pretrain.precision.quantizers.tensor.scale_from_amax."""
    return _scale_of(tl.where(amax < epsilon, epsilon, amax), overflow, power_of_two, fp8)


@triton.jit
def _scale_of(amax, overflow: tl.constexpr, power_of_two: tl.constexpr, fp8: tl.constexpr):
    if power_of_two:
        # The largest values are 1.75 x 2^n. So the quotient's exponent is n less that of amax, and one less again where the
        # mantissa of amax is above 1.75: a subtraction of bits, where a division for every block would show in the time.
        maximum_bits: tl.constexpr = 0x43E00000 if fp8 == tl.float8e4nv else 0x47600000
        exponent = tl.minimum((maximum_bits - amax.to(tl.int32, bitcast=True)) >> 23, 127)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(tl.zeros_like(amax) + (448.0 if fp8 == tl.float8e4nv else 57344.0), amax)
        scale = tl.where(scale == _INFINITY, overflow, scale)
    return tl.where((amax > 0) & (amax < _INFINITY), scale, 1.0)


@triton.jit
def store_block_scaled(
    values,
    rows,
    rows_scale_inv,
    columns,
    columns_scale_inv,
    row,
    column,
    M,
    K,
    epsilon,
    power_of_two: tl.constexpr,
    fp8: tl.constexpr,
):
    """Quantize a tile of FP32 `values` that were BF16, and write it as TE's Float8BlockwiseQTensor has it.

    `rows` [M, K] has a scale for each 1 x 128 values, `columns`, the transpose [K, M], one for each 128 x 1: they are quantized
    apart, and their bytes differ. FP32 `rows_scale_inv` [K / 128, M] and `columns_scale_inv` [M / 128, K] hold the scales'
    reciprocals in the order in which products read them. `row` and `column` say where the tile begins. It is 128 wide for
    `rows`, 128 high for `columns`; either may be None, with its scales.
    """
    i = row + tl.arange(0, values.shape[0])
    j = column + tl.arange(0, values.shape[1])
    if rows is not None:
        tl.static_assert(values.shape[1] == BLOCK)
        scale = scale_from_amax(largest_magnitude(values, 1), epsilon, BF16_MAX, power_of_two, fp8)
        tl.store(rows_scale_inv + (column // BLOCK).to(tl.int64) * M + i, reciprocal(scale, power_of_two))
        store_rows(fp8_codes(values, scale[:, None], fp8), rows, i, j, K)
    if columns is not None:
        tl.static_assert(values.shape[0] == BLOCK)
        scale = scale_from_amax(largest_magnitude(values, 0), epsilon, BF16_MAX, power_of_two, fp8)
        tl.store(columns_scale_inv + (row // BLOCK).to(tl.int64) * K + j, reciprocal(scale, power_of_two))
        store_columns(fp8_codes(values, scale[None, :], fp8), columns, i, j, M)


@triton.jit
def fp8_codes(values, scale, fp8: tl.constexpr):
    """The bytes of `values` x `scale` (FP32, broadcast) in `fp8`, rounded to nearest even and saturated (cvt.rn.satfinite)."""
    return (values * scale).to(fp8).to(tl.uint8, bitcast=True)


@triton.jit
def load_rows(tensor, i, j, K):
    """The values [BM, BN] of `tensor` [M, K] at the rows i [BM] and columns j [BN], as FP32."""
    return tl.load(tensor + i.to(tl.int64)[:, None] * K + j[None, :]).to(tl.float32)


@triton.jit
def store_rows(codes, rows, i, j, K):
    """Write codes [BM, BN] to `rows` [M, K] at the rows i [BM] and columns j [BN]."""
    tl.store(rows + i.to(tl.int64)[:, None] * K + j[None, :], codes)


@triton.jit
def store_columns(codes, columns, i, j, M):
    """Write the transpose of codes [BM, BN] to `columns` [K, M], for a tile at the tensor's rows i [BM] and columns j [BN].
    Transposed in shared memory, so that what a warp writes is contiguous."""
    tl.store(columns + j.to(tl.int64)[:, None] * M + i[None, :], tl.trans(_computed_once(codes)))


@triton.jit
def _computed_once(codes):
    """`codes`, hidden from the compiler, which would compute them anew in the transpose's layout: Triton 3.6 does, and on an H200
    every fourth column then held something else (benchmarks/results/h200_triton_transpose.json)."""
    if INTERPRETED:
        return codes
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [codes], dtype=tl.uint8, is_pure=False, pack=4)


@triton.jit
def through_bf16(values):
    """FP32 values rounded to BF16, as FP32."""
    return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def exponential(x):
    """e^x by the GPU's own instruction. The relative error is 2^-22 or so, and 2^-24 more for each unit of x, as tl.exp's is.
    Below 1e-38 the result is zero: tl.exp's care for such numbers takes more than twice the instructions."""
    if INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def largest_magnitude(values, axis: tl.constexpr):
    """The amax along `axis`, or of all (None). A maximum passes NaN over, unless there is nothing else."""
    largest = tl.max(tl.abs(values), axis)
    return tl.where(largest == largest, largest, 0.0)


@triton.jit
def reciprocal(scale, power_of_two: tl.constexpr):
    """1 / scale, rounded to nearest: what TE stores as scale_inv. Subnormal for the largest scales, of 2^127 too."""
    if power_of_two:
        bits = tl.maximum((254 << 23) - scale.to(tl.int32, bitcast=True), 1 << 22)
        return bits.to(tl.float32, bitcast=True)
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


# ── Two rows in a word ────────────────────────────────────────────────────────────────────────────────────────────────────────
# A block scaling's tile of 128 x 128 in FP32 takes every register of a multiprocessor, and while its only program computes,
# nothing is loaded. Its values are BF16's, so that two rows' fit into words [32, 128]: of the rows 4 g and 4 g + 1, or of
# 4 g + 2 and 4 g + 3, for every g. A thread then holds four neighbours of a column. It makes one word of their codes, and
# words are what is transposed: a quarter of the accesses to shared memory, and no bytes to put together.


@triton.jit
def pairs(first, second):
    """Words (int32) of two FP32 values rounded to BF16, the `first` in the lower half. Computed once: see `_computed_once`."""
    if INTERPRETED:
        upper = second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return upper | first.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def firsts(words):
    """The lower values of `pairs`, FP32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def seconds(words):
    """The upper values of `pairs`, FP32."""
    return (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def store_pairs_by_rows(
    words, right, rows, rows_scale_inv, row, column, M, K, epsilon, power_of_two: tl.constexpr, fp8: tl.constexpr
):
    """`store_block_scaled`'s rows, of `words` [32, 128]: the rows `row` + 4 g and `row` + 4 g + 1, from `column` on. Or of
    `words` and `right` [32, 64], the halves of a block; else `right` is None."""
    width: tl.constexpr = words.shape[1]
    tl.static_assert(width == (BLOCK if right is None else BLOCK // 2))
    i = 4 * tl.arange(0, words.shape[0])
    # Sixteen codes could be stored at a time. A thread would then hold as many neighbours, and compute as many columns' scales.
    j = tl.max_contiguous(column + tl.arange(0, width), 8)
    rows += row.to(tl.int64) * K + (i[:, None] * K + j[None, :])
    rows_scale_inv += (column // BLOCK).to(tl.int64) * M + row + i
    amax = _largest_pairs(words, 1)
    if right is not None:
        amax = _larger_pairs(amax, _largest_pairs(right, 1))
    scale = _scale_of(tl.maximum(firsts(amax), epsilon), BF16_MAX, power_of_two, fp8)  # NaN is never the larger
    tl.store(rows_scale_inv, reciprocal(scale, power_of_two))
    tl.store(rows, fp8_codes(firsts(words), scale[:, None], fp8))
    if right is not None:
        tl.store(rows + width, fp8_codes(firsts(right), scale[:, None], fp8))
    scale = _scale_of(tl.maximum(seconds(amax), epsilon), BF16_MAX, power_of_two, fp8)
    tl.store(rows_scale_inv + 1, reciprocal(scale, power_of_two))
    tl.store(rows + K, fp8_codes(seconds(words), scale[:, None], fp8))
    if right is not None:
        tl.store(rows + K + width, fp8_codes(seconds(right), scale[:, None], fp8))


@triton.jit
def store_pairs_by_columns(
    words, words_below, columns, columns_scale_inv, row, column, M, K, epsilon, power_of_two: tl.constexpr, fp8: tl.constexpr
):
    """`store_block_scaled`'s columns, of `words` and `words_below` [32, N]: the rows `row` + 4 g to `row` + 4 g + 3, 128 in all,
    from `column` on. `columns` lies at whole words of memory."""
    amax = _largest_pairs(_larger_pairs(words & 0x7FFF7FFF, words_below & 0x7FFF7FFF), 0)
    amax = tl.maximum(tl.maximum(firsts(amax), seconds(amax)), epsilon)
    scale = _scale_of(amax, BF16_MAX, power_of_two, fp8)
    j = tl.arange(0, words.shape[1])
    tl.store(columns_scale_inv + ((row // BLOCK).to(tl.int64) * K + column) + j, reciprocal(scale, power_of_two))
    codes = _codes_of_four(words, words_below, scale[None, :], fp8)
    to = columns.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(within(to, column, row // 4, M // 4, j, tl.arange(0, words.shape[0])), tl.trans(codes))


@triton.jit
def within(tensor, row, column, K, i, j):
    """Pointers to a tile of `tensor` [M, K] that begins at `row` and `column`. Within it 32 bits do: i [BM] and j [BN]."""
    return tensor + (row.to(tl.int64) * K + column) + (i[:, None] * K + j[None, :])


@triton.jit
def _largest_pairs(words, axis: tl.constexpr):
    """Returns the amax of either half along `axis`. A maximum passes NaN over, unless there is nothing else."""
    if INTERPRETED:
        return pairs(tl.max(tl.abs(firsts(words)), axis), tl.max(tl.abs(seconds(words)), axis))
    return tl.reduce(words & 0x7FFF7FFF, axis, _larger_pairs)


@triton.jit
def _larger_pairs(a, b):
    if INTERPRETED:
        return pairs(tl.maximum(firsts(a), firsts(b)), tl.maximum(seconds(a), seconds(b)))
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _codes_of_four(words, words_below, scale, fp8: tl.constexpr):
    """Words of the `fp8_codes` of four rows, the first in the lowest byte."""
    if INTERPRETED:
        lower = _bytes(firsts(words), scale, fp8) | _bytes(seconds(words), scale, fp8) << 8
        return lower | _bytes(firsts(words_below), scale, fp8) << 16 | _bytes(seconds(words_below), scale, fp8) << 24
    convert: tl.constexpr = "cvt.rn.satfinite." + ("e4m3x2" if fp8 == tl.float8e4nv else "e5m2x2") + ".f32 "
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d; .reg .b16 lower, upper;"
        "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xffff0000;"
        "mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $3; mul.rn.f32 c, c, $3; mul.rn.f32 d, d, $3;"
        + convert
        + "lower, b, a;"
        + convert
        + "upper, d, c; mov.b32 $0, {lower, upper};}",
        "=r,r,r,r",
        [words, words_below, scale],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _bytes(values, scale, fp8: tl.constexpr):
    return fp8_codes(values, scale, fp8).to(tl.int32)
