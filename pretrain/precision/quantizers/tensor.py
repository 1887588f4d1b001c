"""Rounding to the values of a format, and FP8 with one scale for the whole tensor: current and delayed scaling.

Values are kept as FP32, without a torch.float8 cast, whose result beyond the maximum changed from one version to the next.

A format's values between two powers of two lie evenly spaced, one quantum apart, and the quantum is a power of two that the bits
of x name. Below the smallest normal value the quantum stays what it was there, which is all that subnormals are.

Divisions are made in FP64 and rounded to FP32. For a quotient of two FP32 values that gives the same bits as an FP32 division
rounded to nearest (53 bits are more than twice 24), and it stays so inside a compiled GPU kernel, where FP32 division is only
approximate.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pretrain.precision.quantizers import Grid, Quantized

FP32_MANTISSA_BITS = 23
FP32_EXPONENT = 0xFF << FP32_MANTISSA_BITS
# less the bits of a power of two: those of its reciprocal
TWICE_THE_BIAS = 2 * 127 << FP32_MANTISSA_BITS
FP32_MAX = torch.finfo(torch.float32).max


def round_to_grid(x: Tensor, grid: Grid) -> Tensor:
    """FP32 x, any shape, to the nearest value of `grid`, FP32; of two equally near, to the one whose last mantissa bit is zero.
    What lies beyond the maximum, infinities too, becomes the maximum, as in the GPU's saturating conversions (PTX cvt.satfinite).
    NaN stays NaN, even where the format has none, and the sign of zero is kept."""
    x, quantum, per_quantum = _in_quanta(x, grid)
    return torch.round(x * per_quantum) * quantum


def round_stochastically(x: Tensor, grid: Grid, uniform: Tensor) -> Tensor:
    """FP32 x to one of the two values of `grid` around it, by chance, so that the result's expectation is x; FP32. `uniform`,
    FP32 in [0, 1) and of x's shape, decides: the value farther from zero is taken where `uniform` is below the part of the way
    that x has come to it. Values of the grid, NaN and all beyond the maximum are as in `round_to_grid`."""
    x, quantum, per_quantum = _in_quanta(x, grid)
    # of the magnitude, as 1 - tiny would be 1 for a tiny negative x
    magnitude = x.abs() * per_quantum
    lower = magnitude.floor()
    rounded = lower + (uniform < magnitude - lower).float()
    return torch.copysign(rounded * quantum, x)


def _in_quanta(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Saturated x, the distance of the grid's values around each x, and its reciprocal: powers of two, so both multiply exactly.
    Both are read off the bits of x, as compilers for GPUs make an FP32 division approximate. For NaN they are infinite."""
    x = x.float().clamp(-grid.maximum, grid.maximum)
    power = (x.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
    return x, quantum, (TWICE_THE_BIAS - quantum.view(torch.int32)).view(torch.float32)


def absolute_maximum(x: Tensor, dim: int | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """The amax over `dim`, or of all of x: FP32. NaN does not count, as TE's kernels take their maxima by fmaxf."""
    return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float()


def scale_from_amax(
    amax: Tensor, maximum: float, *, power_of_two: bool = False, overflow: float = FP32_MAX
) -> Tensor:
    """What to multiply by so that `amax`, FP32 of any shape, lands on the format's `maximum`: FP32, of amax's shape. 1 for an
    amax of zero, infinity or NaN; `overflow` where the quotient overflows FP32; then, if `power_of_two`, rounded down to one.
    The rule is compute_scale_from_amax in TE's common/recipe/recipe_common.cuh."""
    scale = (torch.full_like(amax, maximum, dtype=torch.float64) / amax).float()
    scale = scale.masked_fill(scale.isinf(), overflow)
    if power_of_two:
        scale = (scale.view(torch.int32) & (-1 << FP32_MANTISSA_BITS)).view(torch.float32)
    return scale.masked_fill(~(amax.isfinite() & (amax > 0)), 1)


def decode_scale(scale: Tensor) -> Tensor:
    """1 / scale rounded to nearest, FP32, subnormal for the largest scales: what TE stores as scale_inv."""
    return scale.double().reciprocal().float()


def quantize(x: Tensor, scale: Tensor, grid: Grid) -> Quantized:
    """x [rows, columns] of any float dtype, multiplied by `scale` (FP32, one element) in FP32 and rounded to `grid`."""
    scale = scale.reshape(())
    return Quantized(
        round_to_grid(x.float() * scale, grid), torch.ones_like(scale), decode_scale(scale), grid
    )


def quantize_by_amax(x: Tensor, amax: Tensor | None, grid: Grid) -> Quantized:
    """`quantize` by the scale that takes `amax` (scalar; None: x's own) to the grid's maximum: current scaling."""
    amax = absolute_maximum(x) if amax is None else amax.float()
    return quantize(x, scale_from_amax(amax, grid.maximum), grid)


def update_scale(
    amax_history: Tensor,
    scale: Tensor,
    maximum: float,
    margin: int,
    algorithm: Literal["max", "most_recent"],
) -> tuple[Tensor, Tensor]:
    """Delayed scaling at the end of a step: the new history and the scale of the next step.

    `amax_history` [length, n] FP32 holds in row 0 the amax of the step that ends and, in the last row, that of the step before;
    `scale` [n] FP32. Row 0 moves to the end, all others up by one, and row 0 is zero. The scale is `maximum` / 2**margin over the
    history's largest value, or over row 0's (`most_recent`); where that is zero or not finite the scale stays. A column
    whose row 0 is zero belongs to a tensor that the step did not quantize: it is left as it is.

    This is the fused kernel of TE's common/recipe/delayed_scaling.cu. TE's fallback in Python moves idle columns too.
    """
    newest = amax_history[0]
    seen = newest != 0
    rolled = torch.cat([torch.zeros_like(amax_history[:1]), amax_history.roll(-1, dims=0)[1:]])
    largest = absolute_maximum(amax_history, dim=0) if algorithm == "max" else newest
    usable = seen & largest.isfinite() & (largest > 0)
    updated = torch.where(usable, scale_from_amax(largest, maximum * 2.0**-margin), scale)
    return torch.where(seen, rolled, amax_history), updated
