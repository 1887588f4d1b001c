"""SwiGLU and its gradient on a GPU, written in the formats of the products that follow: one kernel, each value read once.

`hidden` [T, 2 F] holds the gate in its first half and up in its second; activated = silu(gate) * up, in FP32 from BF16. Backward
reads `hidden` anyway and makes the activated values again on the way: their transpose, which only the weight gradient needs,
costs no memory from forward to backward. Multiplications and additions are not fused, so both have the same bits.
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
    exponential,
    load_rows,
    record_amax,
    store_rows,
    store_tensor_scaled,
    tensor_scale,
)


class Tile(NamedTuple):
    """What one program takes, and with how many warps."""

    rows: int
    columns: int
    warps: int


# 32 bytes of a transpose's row are a sector of memory, whole. Larger tiles leave fewer programs in flight.
FORWARD, BACKWARD = Tile(32, 128, 4), Tile(32, 128, 8)
NARROW = Tile(64, 64, 4)  # for both, where F is no multiple of 128


@triton.jit
def _sigmoid(x):
    """Computes the sigmoid by the GPU's own exponential and reciprocal. Where x is ordinary they are off by a few units in FP32's
    last place: that decides one rounding to FP8 in some hundred thousand. Below x = -87 the result is zero."""
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1 + exponential(-x)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _through_bf16_by_twos(values):
    """FP32 values rounded to BF16, as FP32, two at a time.

    Left to the compiler, they are rounded one by one, by an instruction of a quarter of the others' rate, and are transposed in a
    way that takes twice the registers: the kernel of the gradient then takes 1.5 times as long. Other kernels have lost by this,
    as the compiler then computed a tile twice (docs/log.md)."""
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
def _swiglu_forward(hidden, rows, scale, amax, used, scale_inv, F, fp8: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
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
        store_tensor_scaled(activated, value, activated_rows, activated_columns, i, j, T, F, activated_fp8)


def _launch(kernel: Any, tile: Tile, hidden: Tensor, *arguments: Any) -> None:
    grid = hidden.shape[0] // tile.rows, hidden.shape[1] // (2 * tile.columns)
    kernel[grid](*arguments, tile.rows, tile.columns, num_warps=tile.warps, enable_fp_fusion=False)


# ── In BF16 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def swiglu(hidden: Tensor) -> Tensor:
    """The activated values [T, F] of `hidden` [T, 2 F], both BF16, contiguous, of any size."""
    activated = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
    _launch(_swiglu_forward, _along_rows(hidden), hidden, hidden, activated, *[None] * 4, activated.shape[1], None)
    return activated


def swiglu_backward(d_activated: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `hidden` [T, 2 F] and the activated values [T, F], BF16, contiguous, of any size. The values have the bits
    of `swiglu`."""
    d_hidden, activated, nothing = torch.empty_like(hidden), torch.empty_like(d_activated), (None, None, None)
    arguments = (d_activated, hidden, d_hidden, None, *nothing, activated, *nothing, *d_activated.shape, None, None)
    _launch(_swiglu_backward, _along_rows(hidden), hidden, *arguments)
    return d_hidden, activated


def _along_rows(hidden: Tensor) -> Tile:
    """Returns a tile that divides `hidden`, of 2,048 values if possible, most of them in one row: nothing here is transposed."""
    columns = math.gcd(hidden.shape[1] // 2, 2048)
    return Tile(math.gcd(hidden.shape[0], 2048 // columns), columns, 4)


# ── In codes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def divides(hidden: Tensor) -> bool:
    """Whether the kernels that write codes take `hidden` [T, 2 F]: contiguous BF16, whole tiles."""
    whole = hidden.shape[0] % NARROW.rows == 0 and hidden.shape[1] % (2 * NARROW.columns) == 0
    return whole and hidden.dtype == torch.bfloat16 and hidden.is_contiguous()


def write_swiglu(hidden: Tensor, activated: TensorScaled) -> None:
    """Write the activated values of `hidden` [T, 2 F] BF16 to the rows of `activated`."""
    if activated.scale is None:
        _find_amax(None, hidden, activated.amax)
    arguments = (hidden, activated.rows, activated.scale, activated.amax, activated.used, activated.scale_inv)
    _launch(_swiglu_forward, _tile(hidden, FORWARD), hidden, *arguments, hidden.shape[1] // 2, TYPES[activated.dtype])


def write_swiglu_backward(d_activated: Tensor, hidden: Tensor, d_hidden: TensorScaled, activated: TensorScaled) -> None:
    """Write the gradient of `hidden` [T, 2 F], from that of the activated values [T, F], both BF16, and the activated values.

    Both are rounded to BF16 first. The activated values are written with the scale that `activated` gives.
    """
    if d_hidden.scale is None:
        _find_amax(d_activated, hidden, d_hidden.amax)
    gradient = (d_hidden.rows, d_hidden.columns, d_hidden.scale, d_hidden.amax, d_hidden.scale_inv)
    again = (activated.rows, activated.columns, activated.scale, activated.scale_inv)
    types = TYPES[d_hidden.dtype], TYPES[activated.dtype]
    tile = _tile(hidden, BACKWARD)
    _launch(_swiglu_backward, tile, hidden, d_activated, hidden, *gradient, *again, *d_activated.shape, *types)


def _find_amax(d_activated: Tensor | None, hidden: Tensor, amax: Tensor) -> None:
    _launch(_swiglu_amax, _tile(hidden, FORWARD), hidden, d_activated, hidden, amax, hidden.shape[1] // 2)


def _tile(hidden: Tensor, tile: Tile) -> Tile:
    """`tile` where it divides `hidden`; else NARROW, which does, as `divides` has asked."""
    return NARROW if hidden.shape[1] // 2 % tile.columns else tile
