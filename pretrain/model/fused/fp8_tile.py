"""What Triton kernels do with a tile of values beside computing it: load it, quantize it to FP8, store it.

Hopper's FP8 products read both operands along the inner dimension. So a tensor [M, K] that one product reads by rows and another
by columns exists twice: as it is, and as its transpose [K, M]. A kernel that holds a tile in registers writes both.

As in TE, numbers beyond the format's range, infinities too, become its largest value; NaN stays NaN in the codes but does not
count for an amax. Everything here is for tiles that lie wholly inside the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.precision.observed import fp8_format
from pretrain.precision.transformer_engine import library

_FP32_MAX = tl.constexpr(3.4028234663852886e38)
_INFINITY = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@dataclass(frozen=True)
class TensorScaled:
    """Where a kernel writes a tensor [M, K], and with which scale: `scale`, or where that is None, current scaling's, from
    `amax`. All on one device. What is None is not written."""

    dtype: torch.dtype  # float8_e4m3fn or float8_e5m2
    rows: Tensor | None  # uint8 [M, K]
    columns: Tensor | None  # uint8 [K, M]
    scale_inv: Tensor  # FP32 [1], written: 1 / scale
    scale: Tensor | None = None  # FP32 [1]
    amax: Tensor | None = None  # FP32 [1], raised to the tensor's amax where a scale is given
    used: Tensor | None = None  # FP32 [1], written: the scale


def allocate(
    quantizer: Any,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    rows: bool,
    columns: bool,
    scale: Tensor | None = None,
) -> tuple[Any, TensorScaled]:
    """What `quantizer` would make of a tensor [M, K], and its parts, for a kernel to write. With `scale` it is quantized by that,
    and no amax is recorded."""
    te = library()
    # from Blackwell on, products read both ways, and there are no transposes
    if te.utils.is_non_tn_fp8_gemm_supported():
        rows, columns = True, False
    by_rows = torch.empty(shape, dtype=torch.uint8, device=device) if rows else None
    by_columns = torch.empty(shape[::-1], dtype=torch.uint8, device=device) if columns else None
    scale_inv, amax, used = torch.empty(1, device=device), None, None
    if scale is None and isinstance(quantizer, te.Float8Quantizer):  # delayed scaling
        scale, amax, used = quantizer.scale, quantizer.amax, torch.empty(1, device=device)
    elif scale is None:
        amax, used = torch.zeros(1, device=device), torch.empty(1, device=device)
    written = TensorScaled(
        fp8_format(te, quantizer.dtype)[0], by_rows, by_columns, scale_inv, scale, amax, used
    )
    options = {
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "fake_dtype": torch.bfloat16,
        "quantizer": quantizer,
    }
    return te.Float8TensorStorage(data=by_rows, data_transpose=by_columns, **options), written


@triton.jit
def store_tensor_scaled(values, scale, rows, columns, i, j, M, K, fp8: tl.constexpr):
    """Quantize a tile `values` [BM, BN] FP32 with one FP32 `scale` and write it to `rows` [M, K] and `columns` [K, M], uint8;
    None is not written. i [BM] and j [BN] are the tile's rows and columns in the tensor: int32, each contiguous."""
    codes = fp8_codes(values, scale, fp8)
    if rows is not None:
        store_rows(codes, rows, i, j, K)
    if columns is not None:
        store_columns(codes, columns, i, j, M)


@triton.jit
def tensor_scale(scale, amax, used, scale_inv, fp8: tl.constexpr):
    """The scale of a tensor: what the pointer `scale` holds, or where that is None, current scaling's, from `amax`.

    Of a two-dimensional grid the first program writes it to `used`, unless that is None, and its reciprocal to `scale_inv`.
    """
    value = tl.load(scale) if scale is not None else scale_from_amax(tl.load(amax), fp8)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, reciprocal(value))
        if used is not None:
            tl.store(used, value)
    return value


@triton.jit
def record_amax(amax, values):
    """Raise `amax`, a pointer to one FP32 number that is not negative, to the largest magnitude in `values`. NaN does not count.
    Such numbers order as their bits do, so the maximum is one of integers."""
    largest = tl.max(tl.abs(values), None)
    # a maximum passes NaN over, unless there is nothing else
    largest = tl.where(largest == largest, largest, 0.0)
    tl.atomic_max(
        amax.to(tl.pointer_type(tl.int32), bitcast=True),
        largest.to(tl.int32, bitcast=True),
        sem="relaxed",
    )


@triton.jit
def scale_from_amax(amax, fp8: tl.constexpr):
    """What to multiply by so that `amax` (FP32, any shape) lands on the largest value of `fp8`: the rule of
    pretrain.precision.quantizers.tensor.scale_from_amax."""
    scale = tl.div_rn(tl.zeros_like(amax) + (448.0 if fp8 == tl.float8e4nv else 57344.0), amax)
    scale = tl.where(scale == _INFINITY, _FP32_MAX, scale)
    return tl.where((amax > 0) & (amax < _INFINITY), scale, 1.0)


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
    every fourth column then held something else."""
    if INTERPRETED:
        return codes
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [codes], dtype=tl.uint8, is_pure=False, pack=4
    )


@triton.jit
def exponential(x):
    """e^x by the GPU's own instruction. The relative error is 2^-22 or so, and 2^-24 more for each unit of x, as tl.exp's is.
    Below 1e-38 the result is zero: tl.exp's care for such numbers takes more than twice the instructions."""
    if INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(scale):
    """1 / scale, rounded to nearest: what TE stores as scale_inv. Subnormal for the largest scales."""
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
