"""Triton kernels for activations and their gradients. They write operands of matrix products.

If the activation is gated, the first half of each row of `hidden` [T, 2 F] is called gate, the
second half is called up, and the activated values [T, F] are silu(gate) * up. Otherwise `hidden` is
[T, F] and the activated values are the approximation of gelu(hidden) by tanh. The activated values
are computed in FP32 from BF16 inputs. Each input value is read once.

Backward must read `hidden`, so it can also recompute the activated values. Only the weight gradient
of the next linear layer reads the transpose of the activated values. Backward writes this
transpose, so that the transpose takes no memory between forward and backward. The kernels are
compiled without fused multiply-adds, so that forward and backward compute the same bits. Backward
can also sum the gradient over the tokens of a program, for the gradient of a bias.

The kernels write BF16 values, or the FP8 codes of a Transformer Engine tensor with one scale. Like
the unfused model and the emulation, the kernels round values to BF16 before they quantize them. The
amax of current scaling is computed before this rounding, as in Transformer Engine's kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.model.fused.formulas import activated_width
from pretrain.model.fused.fp8_tile import (
    TensorScaled,
    allocate,
    exponential,
    load_rows,
    program_tile,
    record_amax,
    store_rows,
    store_tensor_scaled,
    tensor_scale,
)
from pretrain.precision.transformer_engine import library


class Tile(NamedTuple):
    """Size of the tile of activated values that a Triton program computes at a time.

    Attributes:
        rows: Number of tokens of the tile.
        columns: Number of activated values of a token in the tile.
        warps: Number of warps of the program.
        tiles: Number of tiles that the program computes, one below the other.
        stages: Number of these tiles that are loaded or computed at the same time.
    """

    rows: int
    columns: int
    warps: int
    tiles: int = 1
    stages: int = 1


# The coefficients of x and of x^3 in 2 sqrt(2 / pi) (x + 0.044715 x^3).
_LINEAR = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715 * 1.5957691216057308)
# Tiles of the kernels that write FP8 codes. A tile has 32 rows, so that the codes of a column fill
# a memory sector of 32 bytes in the transpose. With larger tiles, fewer programs would run at the
# same time. The program for an ungated activation loads the next tiles while it computes a tile.
# Both backward tiles are the fastest of 80 on an H200 (h200_gpt2_tiles.json).
FORWARD = Tile(32, 128, 4)
GATED_BACKWARD = Tile(32, 128, 8)
UNGATED_BACKWARD = Tile(32, 64, 4, tiles=16, stages=3)
# Largest tile of the BF16 kernel that sums the gradient over the tokens of a tile. Tiles with many
# rows write few sums.
SUMMED_BACKWARD = Tile(32, 128, 4)


@triton.jit
def _sigmoid(x):
    """Return the sigmoid of x, computed with the GPU's approximate exponential and reciprocal.

    If x is below -87, the result is zero. Otherwise the error is a few units in the last place of
    FP32, which changes about one FP8 rounding in 100,000.
    """
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
    """Round FP32 values to BF16, two values per instruction, and return them as FP32.

    The compiler would round one value per instruction, which makes the backward kernel 1.5 times
    slower.
    """
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
def _function(x, gated: tl.constexpr):
    """Return the values and the derivatives at x of SiLU if `gated` is True, otherwise of GELU.

    Both functions are x s, where s is the sigmoid of an inner function of x. Their derivative is
    s + x s (1 - s) inner'. For SiLU, the inner function is x. For the approximation of GELU, it is
    2 sqrt(2 / pi) (x + 0.044715 x^3), because 1 + tanh(x) is twice the sigmoid of 2 x.
    """
    if gated:
        share = _sigmoid(x)
        slope = tl.fma(x, share * (1 - share), share)
    else:
        square = x * x
        share = _sigmoid(x * tl.fma(square, _CUBIC, _LINEAR))
        slope = tl.fma(x, share * (1 - share) * tl.fma(square, 3 * _CUBIC, _LINEAR), share)
    return x * share, slope


@triton.jit
def _load(hidden, i, j, F, gated: tl.constexpr):
    """Return the gate and up of a tile. Without a gate, both are the input of the function."""
    if gated:
        gate = load_rows(hidden, i, j, 2 * F)
        up = load_rows(hidden, i, j + F, 2 * F)
    else:
        gate = load_rows(hidden, i, j, F)
        up = gate
    return gate, up


@triton.jit
def _activate(gate, up, gated: tl.constexpr):
    """Return the activated values of a tile from the results of `_load`."""
    values, _ = _function(gate, gated)
    if gated:
        values *= up
    return values


@triton.jit
def _differentiate(d_activated, gate, up, gated: tl.constexpr):
    """Return the gradients of both results of `_load`.

    Without a gate, both gradients are the gradient of the input of the function.
    """
    values, slope = _function(gate, gated)
    d_gate = slope * d_activated
    d_up = d_gate
    if gated:
        d_gate *= up
        d_up = d_activated * values
    return d_gate, d_up


# ── Kernels ──
#
# Each program computes one tile, or several tiles below each other. Consecutive programs compute
# tiles below each other too, so that together they fill complete cache lines of the transposes.


@triton.jit
def _activation_amax(
    d_activated,
    hidden,
    amax,
    F,
    gated: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Record the amax of one tile by `record_amax`. This is the first pass of current scaling.

    The tile is from the gradient of `hidden`, or from the activated values if `d_activated` is
    None.
    """
    i, j = program_tile(height, width)
    gate, up = _load(hidden, i, j, F, gated)
    if d_activated is None:
        record_amax(amax, _activate(gate, up, gated))
    else:
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up, gated)
        record_amax(amax, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))


@triton.jit
def _activation_forward(
    hidden,  # BF16 [T, 2 F], or [T, F] without a gate
    rows,  # [T, F], written: uint8 codes, or BF16 if `fp8` is None
    # The next four are fields of TensorScaled, or None.
    scale,
    amax,
    applied_scale,
    scale_inv,
    F,
    fp8: tl.constexpr,
    gated: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Write the activated values of one tile in the FP8 format `fp8`, or in BF16 if it is None."""
    i, j = program_tile(height, width)
    gate, up = _load(hidden, i, j, F, gated)
    activated = _activate(gate, up, gated)
    if fp8 is None:
        store_rows(activated, rows, i, j, F)
    else:
        activated = _through_bf16_by_twos(activated)
        if scale is not None and amax is not None:
            record_amax(amax, activated)
        value = tensor_scale(scale, amax, applied_scale, scale_inv, fp8)
        store_tensor_scaled(activated, value, rows, None, i, j, 0, F, fp8)


@triton.jit
def _activation_backward(
    d_activated,  # BF16 [T, F]
    hidden,  # BF16 [T, W], where W is 2 F, or F without a gate
    sums,  # FP32 [programs, W], written: the gradient, summed over a program's tokens, or None
    T,
    F,
    # [T, W], written: gradient with respect to `hidden`. BF16 if `fp8` is None, else uint8 codes.
    rows,
    columns,  # uint8 [W, T], written: transpose of the codes in `rows`, or None
    # The next three are fields of TensorScaled for the gradient, or None.
    scale,
    amax,
    scale_inv,
    activated_rows,  # [T, F], written: activated values, or None
    activated_columns,  # uint8 [F, T], written: transposed codes of the activated values, or None
    # The next two are fields of TensorScaled for the activated values, or None.
    activated_scale,
    activated_scale_inv,
    fp8: tl.constexpr,
    activated_fp8: tl.constexpr,
    gated: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    tiles: tl.constexpr,
    stages: tl.constexpr,
):
    """Write the loss's gradient with respect to `hidden`, and the activated values.

    The program computes `tiles` tiles. The gradient is FP8 in the format `fp8`, and the activated
    values are FP8 in the format `activated_fp8`. If `fp8` is None, both are BF16.
    """
    j = tl.program_id(1) * width + tl.arange(0, width)
    stride = 2 * F if gated else F
    if fp8 is not None:
        factor = tensor_scale(scale, amax, None, scale_inv, fp8)
        activated_factor = tensor_scale(
            activated_scale, None, None, activated_scale_inv, activated_fp8
        )
    largest = tl.zeros([height, width], tl.float32)
    sum_gate = tl.zeros([height, width], tl.float32)
    sum_up = sum_gate
    for tile in tl.range(0, tiles, num_stages=stages):
        i = (tl.program_id(0) * tiles + tile) * height + tl.arange(0, height)
        gate, up = _load(hidden, i, j, F, gated)
        activated = _activate(gate, up, gated)
        d_gate, d_up = _differentiate(load_rows(d_activated, i, j, F), gate, up, gated)
        sum_gate += d_gate
        sum_up += d_up
        if fp8 is None:
            store_rows(d_gate.to(tl.bfloat16), rows, i, j, stride)
            if gated:
                store_rows(d_up.to(tl.bfloat16), rows, i, j + F, stride)
            store_rows(activated.to(tl.bfloat16), activated_rows, i, j, F)
        else:
            activated = _through_bf16_by_twos(activated)
            d_gate = _through_bf16_by_twos(d_gate)
            d_up = _through_bf16_by_twos(d_up)
            largest = tl.maximum(largest, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))
            store_tensor_scaled(d_gate, factor, rows, columns, i, j, T, stride, fp8)
            if gated:
                store_tensor_scaled(d_up, factor, rows, columns, i, j + F, T, stride, fp8)
            store_tensor_scaled(
                activated,
                activated_factor,
                activated_rows,
                activated_columns,
                i,
                j,
                T,
                F,
                activated_fp8,
            )
    if scale is not None and amax is not None:
        record_amax(amax, largest)
    if sums is not None:
        sum_at = sums + tl.program_id(0) * tl.cast(stride, tl.int64) + j
        tl.store(sum_at, tl.sum(sum_gate, axis=0))
        if gated:
            tl.store(sum_at + F, tl.sum(sum_up, axis=0))


def _launch(kernel: Any, tile: Tile, hidden: Tensor, *, gated: bool, **arguments: Any) -> None:
    """Launch one program of `kernel` for each `tile.tiles` tiles of the activated values."""
    width = activated_width(hidden, gated=gated)
    grid = (len(hidden) // (tile.rows * tile.tiles), width // tile.columns)
    kernel[grid](
        hidden=hidden,
        F=width,
        gated=gated,
        height=tile.rows,
        width=tile.columns,
        num_warps=tile.warps,
        enable_fp_fusion=False,
        **arguments,
    )


def _launch_forward(tile: Tile, hidden: Tensor, activated: TensorScaled, *, gated: bool) -> None:
    """Launch the forward kernel, which writes the activated values."""
    arguments = {**activated.arguments, "applied_scale": activated.applied_scale}
    del arguments["columns"]
    _launch(_activation_forward, tile, hidden, gated=gated, **arguments)


def _launch_backward(
    tile: Tile,
    d_activated: Tensor,
    hidden: Tensor,
    d_hidden: TensorScaled,
    activated: TensorScaled,
    *,
    gated: bool,
    summed: bool,
) -> Tensor | None:
    """Launch the backward kernel, which writes the gradient of `hidden` and the activated values.

    Return the gradient of `hidden`, summed over tokens in FP32. It is None unless `summed` is set.
    """
    tokens, features = hidden.shape
    sums = None
    if summed:
        programs = tokens // (tile.rows * tile.tiles)
        sums = hidden.new_empty(programs, features, dtype=torch.float32)
    arguments = {f"activated_{name}": value for name, value in activated.arguments.items()}
    del arguments["activated_amax"]
    arguments |= {"d_activated": d_activated, "sums": sums, "T": tokens, **d_hidden.arguments}
    arguments |= {"tiles": tile.tiles, "stages": tile.stages}
    _launch(_activation_backward, tile, hidden, gated=gated, **arguments)
    return None if sums is None else sums.sum(0)


# ── BF16 ──


def activate(hidden: Tensor, *, gated: bool) -> Tensor:
    """Return the activated values [T, F] of `hidden`.

    `hidden` is [T, 2 F] if the activation is gated, and [T, F] otherwise. Both tensors are BF16 and
    contiguous. T and F may have any size.
    """
    activated = hidden.new_empty(len(hidden), activated_width(hidden, gated=gated))
    buffers = TensorScaled(torch.bfloat16, activated)
    _launch_forward(_along_rows(*activated.shape), hidden, buffers, gated=gated)
    return activated


def activate_backward(
    d_activated: Tensor, hidden: Tensor, *, gated: bool, summed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of `hidden`, the activated values [T, F], and the summed gradient.

    The summed gradient is the gradient of `hidden`, summed over tokens in FP32. It is None unless
    `summed` is set. All other tensors are BF16 and contiguous. T and F may have any size. The
    activated values equal the result of `activate` bit for bit.
    """
    d_hidden = torch.empty_like(hidden)
    activated = torch.empty_like(d_activated)
    tile = _along_rows(*d_activated.shape)
    if summed:
        # As in `_along_rows`, the tile divides the tensor.
        rows, columns = (
            math.gcd(*sizes) for sizes in zip(SUMMED_BACKWARD[:2], d_activated.shape, strict=True)
        )
        tile = Tile(rows, columns, SUMMED_BACKWARD.warps)
    buffers = (TensorScaled(torch.bfloat16, values) for values in (d_hidden, activated))
    total = _launch_backward(tile, d_activated, hidden, *buffers, gated=gated, summed=summed)
    return d_hidden, activated, total


def _along_rows(tokens: int, width: int) -> Tile:
    """Return the tile for kernels that write no transpose.

    The height of the tile divides `tokens`, and its width divides `width`. The tile has 2,048
    values if possible, in as few rows as possible.
    """
    columns = math.gcd(width, 2048)
    return Tile(math.gcd(tokens, 2048 // columns), columns, 4)


# ── FP8 ──


def supports(hidden: Tensor, quantizer: Any, *, gated: bool) -> bool:
    """Return True if the kernels can quantize in place of `quantizer` of Transformer Engine.

    The kernels support FP8 with one scale for a tensor, if `hidden` consists of complete tiles.
    `hidden` is BF16 and contiguous.
    """
    te = library()
    width = activated_width(hidden, gated=gated)
    has_full_tiles = len(hidden) % FORWARD.rows == 0 and width % FORWARD.columns == 0
    supported = te.Float8CurrentScalingQuantizer | te.Float8Quantizer
    return has_full_tiles and isinstance(quantizer, supported)


def quantized_activate(hidden: Tensor, quantizer: Any, *, gated: bool) -> tuple[Any, Tensor | None]:
    """Return the activated values [T, F] of `hidden` in FP8, and their scale.

    The FP8 tensor has codes by rows only. The scale is FP32 [1]. Backward needs this scale to
    recompute the same codes.
    """
    shape = len(hidden), activated_width(hidden, gated=gated)
    activated, buffers = allocate(quantizer, shape, hidden.device, rows=True, columns=False)
    write_activated(hidden, buffers, gated=gated)
    return activated, buffers.applied_scale


def quantized_activate_backward(
    d_activated: Tensor,
    hidden: Tensor,
    gradient_quantizer: Any,
    activated_quantizer: Any,
    scale: Tensor,
    *,
    gated: bool,
    summed: bool,
) -> tuple[Any, Any, Tensor | None]:
    """Return the gradient of `hidden`, the activated values, and the summed gradient.

    The first two results are FP8, and the activated values are recomputed. The summed gradient is
    the gradient of `hidden`, summed over tokens in FP32. It is None unless `summed` is set.

    Args:
        d_activated: Gradient of the activated values, BF16 [T, F].
        hidden: Input of the activation function, BF16 [T, 2 F], or [T, F] without a gate.
        gradient_quantizer: Quantizer of the gradient. Its attributes `rowwise_usage` and
            `columnwise_usage` determine whether the gradient has codes by rows, by columns or both.
        activated_quantizer: Quantizer of the activated values. The result has codes by columns
            only, because only the weight gradient of the next linear layer reads these codes.
        scale: Scale of the activated values from `quantized_activate`.
        gated: True if the activation is gated.
        summed: True if the summed gradient is needed.
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
    total = write_activate_backward(
        d_activated.contiguous(), hidden, gradient, recomputed, gated=gated, summed=summed
    )
    return d_hidden, activated, total


def write_activated(hidden: Tensor, activated: TensorScaled, *, gated: bool) -> None:
    """Write the FP8 codes of the activated values to `activated.rows`.

    If `activated` has no scale, the scale is computed first.
    """
    if activated.scale is None:
        _find_amax(None, hidden, activated.amax, gated=gated)
    _launch_forward(FORWARD, hidden, activated, gated=gated)


def write_activate_backward(
    d_activated: Tensor,
    hidden: Tensor,
    d_hidden: TensorScaled,
    activated: TensorScaled,
    *,
    gated: bool,
    summed: bool,
) -> Tensor | None:
    """Write the gradient of `hidden` and the activated values as FP8 codes.

    The kernel writes the gradient into the buffers of `d_hidden`, and the activated values into the
    buffers of `activated`. `d_activated` [T, F] and `hidden` are BF16. If `d_hidden` has no scale,
    the scale is computed first. `activated` must have a scale. Returns the gradient of `hidden`,
    summed over tokens in FP32, or None unless `summed` is set.
    """
    if d_hidden.scale is None:
        _find_amax(d_activated, hidden, d_hidden.amax, gated=gated)
    tile = GATED_BACKWARD if gated else UNGATED_BACKWARD
    # Each program computes the same number of tiles.
    tile = tile._replace(tiles=math.gcd(len(hidden) // tile.rows, tile.tiles))
    buffers = (d_hidden, activated)
    return _launch_backward(tile, d_activated, hidden, *buffers, gated=gated, summed=summed)


def _find_amax(
    d_activated: Tensor | None, hidden: Tensor, amax: Tensor | None, *, gated: bool
) -> None:
    """Record the amax of the gradient of `hidden` in `amax`.

    If `d_activated` is None, record the amax of the activated values instead.
    """
    tensors = {"d_activated": d_activated, "amax": amax}
    _launch(_activation_amax, FORWARD, hidden, gated=gated, **tensors)
