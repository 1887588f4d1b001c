"""Rounding to a format's grid, and FP8 with one scale a tensor: current and delayed scaling.

Rounded values are FP32. A torch.float8 cast is not used, because its result beyond the maximum
changed between versions.

Between two powers of two, the values of a format lie one quantum apart. The quantum is a power of
two that follows from the exponent bits of x. Below the smallest normal value the quantum stays
constant: these values are the subnormals.

Divisions are made in FP64 and rounded to FP32. For a quotient of two FP32 values this gives the
bits of an FP32 division rounded to nearest (53 bits are more than twice 24). It does so in compiled
GPU kernels too, where FP32 division is approximate.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pretrain.precision.quantizers import Grid, Quantized

FP32_MANTISSA_BITS = 23
FP32_EXPONENT = 0xFF << FP32_MANTISSA_BITS
# Minus the bits of a power of two, this gives the bits of its reciprocal.
TWICE_THE_BIAS = 2 * 127 << FP32_MANTISSA_BITS
FP32_MAX = torch.finfo(torch.float32).max


def round_to_grid(x: Tensor, grid: Grid) -> Tensor:
    """Round x, FP32 of any shape, to the nearest value of `grid`, ties to even. Return FP32.

    Values beyond the maximum, and infinities, become the maximum, as in the GPU's saturating
    conversions (PTX cvt.satfinite). NaN stays NaN, even if the format has none. The sign of zero is
    kept.
    """
    x, quantum, per_quantum = _in_quanta(x, grid)
    return torch.round(x * per_quantum) * quantum


def round_stochastically(x: Tensor, grid: Grid, uniform: Tensor) -> Tensor:
    """Round x, FP32, to one of the two values of `grid` around it, so that the expectation is x.

    Take the value farther from zero where `uniform`, FP32 in [0, 1) of x's shape, is below the
    position of x between the two values. Values of the grid, NaN and values beyond the maximum are
    rounded as by `round_to_grid`. Return FP32.
    """
    x, quantum, per_quantum = _in_quanta(x, grid)
    # Round the magnitude: for a tiny negative x, 1 - tiny would be 1.
    magnitude = x.abs() * per_quantum
    lower = magnitude.floor()
    rounded = lower + (uniform < magnitude - lower).float()
    return torch.copysign(rounded * quantum, x)


def _in_quanta(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Return saturated x, the quantum at each x, and its reciprocal.

    Quantum and reciprocal are powers of two, so multiplying by them is exact. Both are computed
    from the bits of x, because compilers for GPUs approximate FP32 divisions. They are infinite for
    NaN.
    """
    x = x.float().clamp(-grid.maximum, grid.maximum)
    power = (x.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
    return x, quantum, (TWICE_THE_BIAS - quantum.view(torch.int32)).view(torch.float32)


def absolute_maximum(x: Tensor, dim: int | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """Return the amax over `dim`, or of all of x, FP32.

    NaN does not count: TE's kernels use fmaxf.
    """
    return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float()


def scale_from_amax(
    amax: Tensor, maximum: float, *, power_of_two: bool = False, overflow: float = FP32_MAX
) -> Tensor:
    """Return the factor that brings `amax`, FP32 of any shape, to the format's `maximum`.

    It is 1 for an amax of zero, infinity or NaN, and `overflow` if the quotient overflows FP32.
    With `power_of_two` it is rounded down to one. The rule is compute_scale_from_amax in TE's
    common/recipe/recipe_common.cuh.
    """
    scale = (torch.full_like(amax, maximum, dtype=torch.float64) / amax).float()
    scale = scale.masked_fill(scale.isinf(), overflow)
    if power_of_two:
        scale = (scale.view(torch.int32) & (-1 << FP32_MANTISSA_BITS)).view(torch.float32)
    return scale.masked_fill(~(amax.isfinite() & (amax > 0)), 1)


def decode_scale(scale: Tensor) -> Tensor:
    """Return 1 / scale rounded to nearest, FP32, as TE's scale_inv. It may be subnormal."""
    return scale.double().reciprocal().float()


def quantize(x: Tensor, scale: Tensor, grid: Grid) -> Quantized:
    """Multiply x [rows, columns], of any float dtype, by `scale` in FP32 and round it to `grid`.

    `scale`: FP32, one element.
    """
    scale = scale.reshape(())
    return Quantized(
        round_to_grid(x.float() * scale, grid), torch.ones_like(scale), decode_scale(scale), grid
    )


def quantize_by_amax(x: Tensor, amax: Tensor | None, grid: Grid) -> Quantized:
    """Quantize x with the scale that brings `amax` to the grid's maximum: current scaling.

    `amax`: a scalar; by default the amax of x.
    """
    amax = absolute_maximum(x) if amax is None else amax.float()
    return quantize(x, scale_from_amax(amax, grid.maximum), grid)


def update_scale(
    amax_history: Tensor,
    scale: Tensor,
    maximum: float,
    margin: int,
    algorithm: Literal["max", "most_recent"],
) -> tuple[Tensor, Tensor]:
    """Return the new history and the scale of the next step, for delayed scaling.

    `amax_history` [length, n] FP32 has the amax of the step that ends in row 0, and that of the
    step before in the last row. `scale` is [n] FP32. Row 0 moves to the end, all other rows up by
    one, and row 0 becomes zero. The new scale is `maximum` / 2**margin over the history's largest
    value, or over row 0 (`most_recent`). If that value is zero or not finite, the scale stays. A
    column with a zero in row 0 belongs to a tensor that the step did not quantize, and stays as it
    is.

    This is the fused kernel of TE's common/recipe/delayed_scaling.cu. TE's fallback in Python moves
    idle columns too.
    """
    newest = amax_history[0]
    seen = newest != 0
    rolled = torch.cat([torch.zeros_like(amax_history[:1]), amax_history.roll(-1, dims=0)[1:]])
    largest = absolute_maximum(amax_history, dim=0) if algorithm == "max" else newest
    usable = seen & largest.isfinite() & (largest > 0)
    updated = torch.where(usable, scale_from_amax(largest, maximum * 2.0**-margin), scale)
    return torch.where(seen, rolled, amax_history), updated
