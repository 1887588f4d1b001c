"""SwiGLU and its gradient on a GPU, written in the formats of the products that follow: one kernel, each value read once.

`hidden` [T, 2 F] holds the gate in its first half and up in its second; activated = silu(gate) * up, in FP32 from BF16. Backward
reads `hidden` anyway and makes the activated values again on the way: their transpose, which only the weight gradient needs,
costs no memory from forward to backward. Multiplications and additions are not fused, so both have the same bits.

Codes are Transformer Engine's FP8 tensors with one scale. What is quantized has been rounded to BF16 first, as in the unfused
model and in the emulation; current scaling's amax is from before that rounding, there and here.
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
    """What one program takes, and with how many warps."""

    rows: int
    columns: int
    warps: int


# Of codes. 32 bytes of a transpose's row are a sector of memory, whole. Larger tiles leave fewer programs in flight.
FORWARD, BACKWARD = Tile(32, 128, 4), Tile(32, 128, 8)


@triton.jit
def _sigmoid(x):
    """Computes the sigmoid by the GPU's own exponential and reciprocal. Where x is ordinary they are off by a few units in FP32's
    last place: that decides one rounding to FP8 in some hundred thousand. Below x = -87 the result is zero."""
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
    """FP32 values rounded to BF16, as FP32, two at a time: rounded one by one, as the compiler would, the gradient's kernel takes
    1.5 times as long."""
    if INTERPRETED:
        return values.to(tl.bfloat16).to(tl.float32)
    return tl.inline_asm_elementwise(
        "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
        "=r,=r,r,r",
        [values],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _activate(gate, up):
    return gate * _sigmoid(gate) * up


@triton.jit
def _differentiate(d_activated, gate, up):
    """The gradients of gate and up: d silu(x) = s + x s (1 - s), with s the sigmoid of x."""
    sigmoid = _sigmoid(gate)
    d_gate = tl.fma(gate, sigmoid * (1 - sigmoid), sigmoid) * d_activated * up
    d_up = d_activated * (gate * sigmoid)
    return d_gate, d_up


# ── Kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A program takes one tile. Those of one column of tiles follow each other: together they fill whole lines of the transposes.


@triton.jit
def _swiglu_amax(d_activated, hidden, amax, F, height: tl.constexpr, width: tl.constexpr):
    """The first pass of current scaling: the amax of the gradient, or without `d_activated` of the activated values."""
    i = tl.program_id(0) * height + tl.arange(0, height)
    j = tl.program_id(1) * width + tl.arange(0, width)
    gate, up = load_rows(hidden, i, j, 2 * F), load_rows(hidden, i, j + F, 2 * F)
    if d_activated is None:
        record_amax(amax, _activate(gate, up))
    else:
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up)
        record_amax(amax, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))


@triton.jit
def _swiglu_forward(
    hidden,
    rows,
    scale,
    amax,
    used,
    scale_inv,
    F,
    fp8: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """`fp8` is None where `rows` takes BF16."""
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
    d_activated,
    hidden,
    rows,
    columns,
    scale,
    amax,
    scale_inv,
    activated_rows,
    activated_columns,
    activated_scale,
    activated_scale_inv,
    T,
    F,
    fp8: tl.constexpr,  # None where `rows` and `activated_rows` take BF16
    activated_fp8: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    i = tl.program_id(0) * height + tl.arange(0, height)
    j = tl.program_id(1) * width + tl.arange(0, width)
    gate, up = load_rows(hidden, i, j, 2 * F), load_rows(hidden, i, j + F, 2 * F)
    if fp8 is None:
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up)
        store_rows(d_gate.to(tl.bfloat16), rows, i, j, 2 * F)
        store_rows(d_up.to(tl.bfloat16), rows, i, j + F, 2 * F)
        store_rows(_activate(gate, up).to(tl.bfloat16), activated_rows, i, j, F)
    else:
        activated = _through_bf16_by_twos(_activate(gate, up))
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up)
        d_gate, d_up = _through_bf16_by_twos(d_gate), _through_bf16_by_twos(d_up)
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
    grid = hidden.shape[0] // tile.rows, hidden.shape[1] // (2 * tile.columns)
    kernel[grid](*arguments, tile.rows, tile.columns, num_warps=tile.warps, enable_fp_fusion=False)


# ── In BF16 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def swiglu(hidden: Tensor) -> Tensor:
    """The activated values [T, F] of `hidden` [T, 2 F], both BF16, contiguous, of any size."""
    activated = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
    _launch(
        _swiglu_forward,
        _along_rows(hidden),
        hidden,
        hidden,
        activated,
        *[None] * 4,
        activated.shape[1],
        None,
    )
    return activated


def swiglu_backward(d_activated: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `hidden` [T, 2 F] and the activated values [T, F], BF16, contiguous, of any size. The values have the bits
    of `swiglu`."""
    d_hidden, activated, nothing = (
        torch.empty_like(hidden),
        torch.empty_like(d_activated),
        (None, None, None),
    )
    arguments = (
        d_activated,
        hidden,
        d_hidden,
        None,
        *nothing,
        activated,
        *nothing,
        *d_activated.shape,
        None,
        None,
    )
    _launch(_swiglu_backward, _along_rows(hidden), hidden, *arguments)
    return d_hidden, activated


def _along_rows(hidden: Tensor) -> Tile:
    """Returns a tile that divides `hidden`, of 2,048 values if possible, most of them in one row: nothing here is transposed."""
    columns = math.gcd(hidden.shape[1] // 2, 2048)
    return Tile(math.gcd(hidden.shape[0], 2048 // columns), columns, 4)


# ── In codes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def takes(hidden: Tensor, quantizer: Any) -> bool:
    """Whether the kernels write what Transformer Engine's `quantizer` would, of `hidden` [T, 2 F] BF16, contiguous: FP8 with one
    scale a tensor, in whole tiles."""
    te, whole = (
        library(),
        hidden.shape[0] % FORWARD.rows == 0 and hidden.shape[1] % (2 * FORWARD.columns) == 0,
    )
    return whole and isinstance(quantizer, te.Float8CurrentScalingQuantizer | te.Float8Quantizer)


def quantized_swiglu(hidden: Tensor, quantizer: Any) -> tuple[Any, Tensor]:
    """hidden [T, 2 F] -> the activated values [T, F] in codes, by rows alone; and their scale, FP32 [1], with which backward
    makes them again."""
    shape = len(hidden), hidden.shape[1] // 2
    activated, written = allocate(quantizer, shape, hidden.device, rows=True, columns=False)
    write_swiglu(hidden, written)
    return activated, written.used


def quantized_swiglu_backward(
    d_activated: Tensor,
    hidden: Tensor,
    gradient_quantizer: Any,
    activated_quantizer: Any,
    scale: Tensor,
) -> tuple[Any, Any]:
    """The gradient of `hidden` [T, 2 F] in what the usages of `gradient_quantizer` say, and the activated values [T, F] as the
    next product's weight gradient takes them: columnwise, with forward's `scale`. `d_activated` [T, F] and `hidden` are BF16."""
    usages = {
        "rows": gradient_quantizer.rowwise_usage,
        "columns": gradient_quantizer.columnwise_usage,
    }
    d_hidden, gradient = allocate(gradient_quantizer, hidden.shape, hidden.device, **usages)
    activated, again = allocate(
        activated_quantizer, d_activated.shape, hidden.device, rows=False, columns=True, scale=scale
    )
    write_swiglu_backward(d_activated.contiguous(), hidden, gradient, again)
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
    )
    _launch(
        _swiglu_forward, FORWARD, hidden, *arguments, hidden.shape[1] // 2, TYPES[activated.dtype]
    )


def write_swiglu_backward(
    d_activated: Tensor, hidden: Tensor, d_hidden: TensorScaled, activated: TensorScaled
) -> None:
    """Write the gradient of `hidden` [T, 2 F], from that of the activated values [T, F], both BF16, and the activated values,
    with the scale that `activated` gives."""
    if d_hidden.scale is None:
        _find_amax(d_activated, hidden, d_hidden.amax)
    gradient = (d_hidden.rows, d_hidden.columns, d_hidden.scale, d_hidden.amax, d_hidden.scale_inv)
    again = (activated.rows, activated.columns, activated.scale, activated.scale_inv)
    types = TYPES[d_hidden.dtype], TYPES[activated.dtype]
    _launch(
        _swiglu_backward,
        BACKWARD,
        hidden,
        d_activated,
        hidden,
        *gradient,
        *again,
        *d_activated.shape,
        *types,
    )


def _find_amax(d_activated: Tensor | None, hidden: Tensor, amax: Tensor) -> None:
    _launch(_swiglu_amax, FORWARD, hidden, d_activated, hidden, amax, hidden.shape[1] // 2)
