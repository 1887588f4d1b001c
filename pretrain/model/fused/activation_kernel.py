"""Triton kernels for SwiGLU and its gradient, written in the formats of the products that follow.

`hidden` [T, 2 F] holds the gate in its first half and up in its second half. The activated values
are silu(gate) * up, computed in FP32 from BF16. Each value is read once.

Backward reads `hidden` anyway and recomputes the activated values. Their transpose, which only the
weight gradient needs, therefore takes no memory between forward and backward. Multiplications and
additions are not fused, so both computations give the same bits.

Codes are FP8 tensors of Transformer Engine with one scale. Values are rounded to BF16 before they
are quantized, as in the unfused model and in the emulation. The amax of current scaling is taken
before that rounding, in all three.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.fused.fp8_tile import (
    INTERPRETED,
    TYPES,
    TensorScaled,
    allocate,
    exponential,
    load_rows,
    record_amax,
    store_rows,
    store_tensor_scaled,
    tensor_scale,
)
from pretrain.precision.transformer_engine import library


class Tile(NamedTuple):
    """Rows and columns of the activated values that one program computes, and its warps."""

    rows: int
    columns: int
    warps: int


# Tiles of kernels that write codes. 32 rows fill a memory sector of 32 bytes in the transpose.
# Larger tiles leave fewer programs running at once.
FORWARD = Tile(32, 128, 4)
BACKWARD = Tile(32, 128, 8)


@triton.jit
def _sigmoid(x):
    """Return the sigmoid of x by the GPU's approximate exponential and reciprocal.

    For ordinary x the error is a few units in the last place of FP32, which changes about one FP8
    rounding in 100,000. Below x = -87 the result is zero.
    """
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=r,r",
        [1 + exponential(-x)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _through_bf16_by_twos(values):
    """Round FP32 values to BF16 and return them as FP32, two values per instruction.

    The compiler would round one at a time, which makes the backward kernel 1.5 times slower.
    """
    if INTERPRETED:
        return values.to(tl.bfloat16).to(tl.float32)
    return tl.inline_asm_elementwise(
        "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; "
        "shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
        "=r,=r,r,r",
        [values],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _activate(gate, up):
    """Return silu(gate) * up."""
    return gate * _sigmoid(gate) * up


@triton.jit
def _differentiate(d_activated, gate, up):
    """Return the gradients of gate and up.

    With s the sigmoid of x, the derivative of silu(x) is s + x s (1 - s).
    """
    sigmoid = _sigmoid(gate)
    d_gate = tl.fma(gate, sigmoid * (1 - sigmoid), sigmoid) * d_activated * up
    d_up = d_activated * (gate * sigmoid)
    return d_gate, d_up


# ── Kernels ──
#
# A program computes one tile. Programs of the same column of tiles are consecutive, so that
# together they fill complete cache lines of the transposes.


@triton.jit
def _swiglu_amax(d_activated, hidden, amax, F, height: tl.constexpr, width: tl.constexpr):
    """Record the amax of one tile, the first pass of current scaling.

    It is the amax of the gradient of `hidden`, or of the activated values if `d_activated` is None.
    """
    i = tl.program_id(0) * height + tl.arange(0, height)
    j = tl.program_id(1) * width + tl.arange(0, width)
    gate = load_rows(hidden, i, j, 2 * F)
    up = load_rows(hidden, i, j + F, 2 * F)
    if d_activated is None:
        record_amax(amax, _activate(gate, up))
    else:
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up)
        record_amax(amax, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))


@triton.jit
def _swiglu_forward(
    hidden,  # BF16 [T, 2 F]
    rows,  # [T, F], written: uint8 codes, or BF16 if `fp8` is None
    scale,  # this one and the next three: fields of TensorScaled, or None
    amax,
    used,
    scale_inv,
    F,
    fp8: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Write the activated values of one tile, in FP8 or, if `fp8` is None, in BF16."""
    i = tl.program_id(0) * height + tl.arange(0, height)
    j = tl.program_id(1) * width + tl.arange(0, width)
    activated = _activate(load_rows(hidden, i, j, 2 * F), load_rows(hidden, i, j + F, 2 * F))
    if fp8 is None:
        store_rows(activated.to(tl.bfloat16), rows, i, j, F)
    else:
        activated = _through_bf16_by_twos(activated)
        if scale is not None and amax is not None:
            record_amax(amax, activated)
        value = tensor_scale(scale, amax, used, scale_inv, fp8)
        store_tensor_scaled(activated, value, rows, None, i, j, 0, F, fp8)


@triton.jit
def _swiglu_backward(
    d_activated,  # BF16 [T, F]
    hidden,  # BF16 [T, 2 F]
    rows,  # [T, 2 F], written: gradient of `hidden`, uint8 codes, or BF16 if `fp8` is None
    columns,  # uint8 [2 F, T], written: transpose of the codes, or None
    scale,  # this one and the next two: fields of TensorScaled for the gradient, or None
    amax,
    scale_inv,
    activated_rows,  # [T, F], written: activated values, or None
    activated_columns,  # uint8 [F, T], written: transpose of their codes, or None
    activated_scale,
    activated_scale_inv,
    T,
    F,
    fp8: tl.constexpr,
    activated_fp8: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Write the gradient of `hidden` and the activated values for one tile.

    Both are FP8 with formats `fp8` and `activated_fp8`, or BF16 if `fp8` is None.
    """
    i = tl.program_id(0) * height + tl.arange(0, height)
    j = tl.program_id(1) * width + tl.arange(0, width)
    gate = load_rows(hidden, i, j, 2 * F)
    up = load_rows(hidden, i, j + F, 2 * F)
    if fp8 is None:
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up)
        store_rows(d_gate.to(tl.bfloat16), rows, i, j, 2 * F)
        store_rows(d_up.to(tl.bfloat16), rows, i, j + F, 2 * F)
        store_rows(_activate(gate, up).to(tl.bfloat16), activated_rows, i, j, F)
    else:
        activated = _through_bf16_by_twos(_activate(gate, up))
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up)
        d_gate = _through_bf16_by_twos(d_gate)
        d_up = _through_bf16_by_twos(d_up)
        if scale is not None and amax is not None:
            record_amax(amax, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))
        value = tensor_scale(scale, amax, None, scale_inv, fp8)
        store_tensor_scaled(d_gate, value, rows, columns, i, j, T, 2 * F, fp8)
        store_tensor_scaled(d_up, value, rows, columns, i, j + F, T, 2 * F, fp8)
        value = tensor_scale(activated_scale, None, None, activated_scale_inv, activated_fp8)
        store_tensor_scaled(
            activated, value, activated_rows, activated_columns, i, j, T, F, activated_fp8
        )


def _launch(kernel: Any, tile: Tile, hidden: Tensor, *arguments: Any) -> None:
    """Launch `kernel` with one program for each tile of the activated values."""
    grid = hidden.shape[0] // tile.rows, hidden.shape[1] // (2 * tile.columns)
    kernel[grid](*arguments, tile.rows, tile.columns, num_warps=tile.warps, enable_fp_fusion=False)


# ── BF16 ──


def swiglu(hidden: Tensor) -> Tensor:
    """Return the activated values [T, F] of `hidden` [T, 2 F], BF16 and contiguous.

    Any size is allowed.
    """
    F = hidden.shape[1] // 2
    activated = hidden.new_empty(len(hidden), F)
    unscaled = (None, None, None, None)
    arguments = (hidden, activated, *unscaled, F, None)
    _launch(_swiglu_forward, _along_rows(hidden), hidden, *arguments)
    return activated


def swiglu_backward(d_activated: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `hidden` [T, 2 F] and the activated values [T, F].

    All tensors are BF16 and contiguous, of any size. The activated values have the bits of
    `swiglu`.
    """
    d_hidden = torch.empty_like(hidden)
    activated = torch.empty_like(d_activated)
    unscaled = (None, None, None)
    gradient = (d_hidden, None, *unscaled)
    recomputed = (activated, *unscaled)
    arguments = (d_activated, hidden, *gradient, *recomputed, *d_activated.shape, None, None)
    _launch(_swiglu_backward, _along_rows(hidden), hidden, *arguments)
    return d_hidden, activated


def _along_rows(hidden: Tensor) -> Tile:
    """Return a tile for kernels that write no transpose.

    It divides `hidden` and has 2,048 values if possible, most of them in one row.
    """
    columns = math.gcd(hidden.shape[1] // 2, 2048)
    return Tile(math.gcd(hidden.shape[0], 2048 // columns), columns, 4)


# ── FP8 ──


def takes(hidden: Tensor, quantizer: Any) -> bool:
    """Return whether the kernels can quantize as `quantizer` of Transformer Engine does.

    They support FP8 with one scale for a tensor. `hidden` [T, 2 F], BF16 and contiguous, must
    consist of complete tiles.
    """
    te = library()
    rows, columns = hidden.shape
    has_full_tiles = rows % FORWARD.rows == 0 and columns % (2 * FORWARD.columns) == 0
    supported = te.Float8CurrentScalingQuantizer | te.Float8Quantizer
    return has_full_tiles and isinstance(quantizer, supported)


def quantized_swiglu(hidden: Tensor, quantizer: Any) -> tuple[Any, Tensor | None]:
    """Return the activated values [T, F] of `hidden` [T, 2 F] in FP8 by rows, and their scale.

    The scale is FP32 [1]. Backward uses it to recompute the activated values.
    """
    shape = len(hidden), hidden.shape[1] // 2
    activated, buffers = allocate(quantizer, shape, hidden.device, rows=True, columns=False)
    write_swiglu(hidden, buffers)
    return activated, buffers.used


def quantized_swiglu_backward(
    d_activated: Tensor,
    hidden: Tensor,
    gradient_quantizer: Any,
    activated_quantizer: Any,
    scale: Tensor,
) -> tuple[Any, Any]:
    """Return the gradient of `hidden` and the recomputed activated values, both in FP8.

    Args:
        d_activated: Gradient of the activated values, BF16 [T, F].
        hidden: BF16 [T, 2 F].
        gradient_quantizer: Quantizer of the gradient. Its usages decide whether the result has
            codes by rows, by columns or both.
        activated_quantizer: Quantizer of the activated values. The result has codes by columns,
            which the weight gradient of the next product reads.
        scale: Scale of the activated values from `quantized_swiglu`.
    """
    d_hidden, gradient = allocate(
        gradient_quantizer,
        hidden.shape,
        hidden.device,
        rows=gradient_quantizer.rowwise_usage,
        columns=gradient_quantizer.columnwise_usage,
    )
    activated, recomputed = allocate(
        activated_quantizer, d_activated.shape, hidden.device, rows=False, columns=True, scale=scale
    )
    write_swiglu_backward(d_activated.contiguous(), hidden, gradient, recomputed)
    return d_hidden, activated


def write_swiglu(hidden: Tensor, activated: TensorScaled) -> None:
    """Write the activated values of `hidden` [T, 2 F] BF16 to the rows of `activated`."""
    if activated.scale is None:
        _find_amax(None, hidden, activated.amax)
    arguments = (
        hidden,
        activated.rows,
        activated.scale,
        activated.amax,
        activated.used,
        activated.scale_inv,
        hidden.shape[1] // 2,
        TYPES[activated.dtype],
    )
    _launch(_swiglu_forward, FORWARD, hidden, *arguments)


def write_swiglu_backward(
    d_activated: Tensor, hidden: Tensor, d_hidden: TensorScaled, activated: TensorScaled
) -> None:
    """Write the gradient of `hidden` to `d_hidden`, and the activated values to `activated`.

    `d_activated` [T, F] and `hidden` [T, 2 F] are BF16. `activated` must have a scale.
    """
    if d_hidden.scale is None:
        _find_amax(d_activated, hidden, d_hidden.amax)
    gradient = (d_hidden.rows, d_hidden.columns, d_hidden.scale, d_hidden.amax, d_hidden.scale_inv)
    recomputed = (activated.rows, activated.columns, activated.scale, activated.scale_inv)
    types = (TYPES[d_hidden.dtype], TYPES[activated.dtype])
    arguments = (d_activated, hidden, *gradient, *recomputed, *d_activated.shape, *types)
    _launch(_swiglu_backward, BACKWARD, hidden, *arguments)


def _find_amax(d_activated: Tensor | None, hidden: Tensor, amax: Tensor | None) -> None:
    """Record the amax of the gradient of `hidden`, or without one of the activated values."""
    _launch(_swiglu_amax, FORWARD, hidden, d_activated, hidden, amax, hidden.shape[1] // 2)
