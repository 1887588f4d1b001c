"""Triton functions that load a tile of values, quantize it to FP8 and store it.

On Hopper, both operands of an FP8 matrix product must be contiguous along the dimension over which
the product sums. If one product sums over the columns of a tensor [M, K] and another product sums
over its rows, the tensor is stored twice: by rows [M, K] and transposed [K, M]. A kernel that has
computed a tile in registers writes both copies.

As in Transformer Engine, infinities and values beyond the range of the format become the largest
value of the format. NaN stays NaN in the codes, and amaxes ignore it. All functions require tiles
that are completely inside of the tensor.
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
# Map the dtype of a kernel's output to the kernel's argument `fp8`.
TYPES = {torch.bfloat16: None, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@dataclass(frozen=True)
class TensorScaled:
    """Output buffers of a kernel for an FP8 tensor [M, K] with one scale, or for a BF16 tensor.

    If `scale` is None, the kernel computes the scale of current scaling from `amax`. The kernel
    does not write buffers that are None. A BF16 tensor has only `rows`. All tensors are on one
    device.
    """

    dtype: torch.dtype  # float8_e4m3fn, float8_e5m2 or bfloat16
    rows: Tensor | None  # [M, K], uint8 or BF16
    columns: Tensor | None = None  # uint8 [K, M]
    scale_inv: Tensor | None = None  # FP32 [1], written: 1 / scale
    scale: Tensor | None = None  # FP32 [1]
    # FP32 [1]. If `scale` is given, the kernel records the amax of the tensor here (`record_amax`).
    amax: Tensor | None = None
    applied_scale: Tensor | None = None  # FP32 [1], written: the scale of the codes

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a backward kernel that writes the tensor."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "scale": self.scale,
            "scale_inv": self.scale_inv,
            "amax": self.amax,
            "fp8": TYPES[self.dtype],
        }


def allocate(
    quantizer: Any,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    rows: bool,
    columns: bool,
    scale: Tensor | None = None,
) -> tuple[Any, TensorScaled]:
    """Allocate the FP8 tensor that `quantizer` would return. A kernel writes the values later.

    Args:
        quantizer: A Float8Quantizer or Float8CurrentScalingQuantizer of Transformer Engine.
        shape: Shape (M, K) of the tensor.
        device: Device of the tensor.
        rows: True if the tensor needs codes by rows.
        columns: True if the tensor needs transposed codes.
        scale: Scale to use instead of the scale of `quantizer`, FP32 [1]. If it is given, no amax
            is recorded.

    Returns:
        The tensor of Transformer Engine, and the buffers of this tensor.
    """
    te = library()
    if te.utils.is_non_tn_fp8_gemm_supported():
        # On Blackwell and later GPUs, FP8 products can sum over rows or columns, so transposes are
        # not needed.
        rows = True
        columns = False
    row_codes = torch.empty(shape, dtype=torch.uint8, device=device) if rows else None
    column_codes = torch.empty(shape[::-1], dtype=torch.uint8, device=device) if columns else None
    scale_inv = torch.empty(1, device=device)
    amax = None
    applied_scale = None
    if scale is None:
        # The activation kernel writes the scale here, because backward must compute the same codes
        # again. The caller already knows a scale that it has passed.
        applied_scale = torch.empty(1, device=device)
        if isinstance(quantizer, te.Float8Quantizer):  # delayed scaling
            scale = quantizer.scale
            amax = quantizer.amax
        else:
            # With current scaling, `scale` stays None, and the kernel computes it from this amax.
            amax = torch.zeros(1, device=device)
    dtype, *_ = fp8_format(te, quantizer.dtype)
    buffers = TensorScaled(dtype, row_codes, column_codes, scale_inv, scale, amax, applied_scale)
    tensor = te.Float8TensorStorage(
        data=row_codes,
        data_transpose=column_codes,
        fp8_scale_inv=scale_inv,
        fp8_dtype=quantizer.dtype,
        fake_dtype=torch.bfloat16,
        quantizer=quantizer,
    )
    return tensor, buffers


@triton.jit
def store_tensor_scaled(values, scale, rows, columns, i, j, M, K, fp8: tl.constexpr):
    """Quantize a tile with one scale and write it to `rows` and `columns`, unless they are None.

    `values` [BM, BN] and the scalar `scale` are FP32. `rows` [M, K] and `columns` [K, M] are uint8.
    `i` [BM] and `j` [BN] are the indices of the tile's rows and columns in the tensor. They are
    int32 and consecutive.
    """
    codes = fp8_codes(values, scale, fp8)
    if rows is not None:
        store_rows(codes, rows, i, j, K)
    if columns is not None:
        store_columns(codes, columns, i, j, M)


@triton.jit
def tensor_scale(scale, amax, applied_scale, scale_inv, fp8: tl.constexpr):
    """Return the scale of a tensor, an FP32 scalar.

    The result is the value at `scale`. If `scale` is None, the result is computed from the value at
    `amax`. The first program of the grid also writes the reciprocal of the scale to `scale_inv`,
    and the scale to `applied_scale` unless `applied_scale` is None.
    """
    value = tl.load(scale) if scale is not None else scale_from_amax(tl.load(amax), fp8)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, reciprocal(value))
        if applied_scale is not None:
            tl.store(applied_scale, value)
    return value


@triton.jit
def record_amax(amax, values):
    """Store the maximum of the FP32 number at `amax` and all magnitudes of `values` at `amax`.

    NaN is ignored. The number at `amax` must not be negative. FP32 numbers that are not negative
    have the same order as their bits read as integers, so an atomic maximum of integers is used.
    """
    largest = tl.max(tl.abs(values), None)
    # tl.max ignores NaN unless all values are NaN.
    largest = tl.where(largest == largest, largest, 0.0)
    tl.atomic_max(
        amax.to(tl.pointer_type(tl.int32), bitcast=True),
        largest.to(tl.int32, bitcast=True),
        sem="relaxed",
    )


@triton.jit
def scale_from_amax(amax, fp8: tl.constexpr):
    """Return the scale that maps `amax` (FP32, any shape) to the largest value of `fp8`.

    `pretrain.precision.quantizers.tensor.scale_from_amax` has the same rule.
    """
    scale = tl.div_rn(tl.zeros_like(amax) + (448.0 if fp8 == tl.float8e4nv else 57344.0), amax)
    scale = tl.where(scale == _INFINITY, _FP32_MAX, scale)
    return tl.where((amax > 0) & (amax < _INFINITY), scale, 1.0)


@triton.jit
def fp8_codes(values, scale, fp8: tl.constexpr):
    """Return the bytes of values * scale in `fp8`, rounded to nearest even and saturated.

    `values` and `scale` are FP32 and are broadcast to the same shape. The GPU converts the products
    by the instruction `cvt.rn.satfinite`.
    """
    return (values * scale).to(fp8).to(tl.uint8, bitcast=True)


@triton.jit
def program_tile(height: tl.constexpr, width: tl.constexpr):
    """Return the rows [height] and the columns [width] of the tile of this program."""
    i = tl.program_id(0) * height + tl.arange(0, height)
    return i, tl.program_id(1) * width + tl.arange(0, width)


@triton.jit
def tile_at(tensor, i, j, K):
    """Return the addresses [BM, BN] of a tile of `tensor` [M, K] at rows i and columns j."""
    return tensor + i.to(tl.int64)[:, None] * K + j[None, :]


@triton.jit
def load_rows(tensor, i, j, K):
    """Return the values [BM, BN] of `tensor` [M, K] at rows i [BM] and columns j [BN], as FP32."""
    return tl.load(tile_at(tensor, i, j, K)).to(tl.float32)


@triton.jit
def store_rows(codes, rows, i, j, K):
    """Write values or codes [BM, BN] to `rows` [M, K] at rows i [BM] and columns j [BN].

    Values are rounded to the dtype of `rows`.
    """
    tl.store(tile_at(rows, i, j, K), codes)


@triton.jit
def store_columns(codes, columns, i, j, M):
    """Write the transpose of codes [BM, BN] to `columns` [K, M].

    The tile is at rows i [BM] and columns j [BN] of the tensor. It is transposed in shared memory,
    so that a warp writes contiguous memory.
    """
    tl.store(tile_at(columns, j, i, M), tl.trans(_computed_once(codes)))


@triton.jit
def _computed_once(codes):
    """Return `codes` unchanged, and prevent the compiler from recomputing them.

    Without this function, Triton 3.6 recomputed the codes in the layout of the transpose, and every
    fourth column was wrong on an H200.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [codes], dtype=tl.uint8, is_pure=False, pack=4
    )


@triton.jit
def exponential(x):
    """Return e^x, computed by the exponential instruction of the GPU.

    The relative error is about 2^-22 plus 2^-24 * |x|, as for tl.exp. Results below 1e-38 are
    replaced by zero. tl.exp does not replace them, but takes more than twice the instructions.
    """
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(scale):
    """Return 1 / scale, rounded to nearest. Transformer Engine stores this value as scale_inv.

    The result is subnormal for the largest scales.
    """
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
