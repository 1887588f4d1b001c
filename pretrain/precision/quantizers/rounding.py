"""Rounding to the few values that a low-precision format can hold.

Values are kept as FP32, without a torch.float8 cast: those exist for some formats, on some devices, in some versions, and what
they do beyond the maximum changed from one version to the next.

A format's values between two powers of two lie evenly spaced, one quantum apart, and the quantum is a power of two that the bits
of x name. Below the smallest normal value the quantum stays what it was there, which is all that subnormals are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.precision.quantizers.grid import Grid

FP32_MANTISSA_BITS = 23
FP32_EXPONENT = 0xFF << FP32_MANTISSA_BITS
TWICE_THE_BIAS = 2 * 127 << FP32_MANTISSA_BITS  # less the bits of a power of two: those of its reciprocal


def round_to_grid(x: Tensor, grid: Grid) -> Tensor:
    """FP32 x, any shape, to the nearest value of `grid`, FP32; of two equally near, to the one whose last mantissa bit is zero.

    What lies beyond the maximum, infinities too, becomes the maximum, as in the GPU's saturating conversions (PTX cvt.satfinite).
    NaN stays NaN, even where the format has none, and the sign of zero is kept.
    """
    x, quantum, per_quantum = _in_quanta(x, grid)
    return torch.round(x * per_quantum) * quantum


def round_stochastically(x: Tensor, grid: Grid, uniform: Tensor) -> Tensor:
    """FP32 x to one of the two values of `grid` around it, by chance, so that the result's expectation is x; FP32.

    `uniform`, FP32 in [0, 1) and of x's shape, decides: the value farther from zero is taken where `uniform` is below the part of
    the way that x has come to it. Values of the grid, NaN and all beyond the maximum are as in `round_to_grid`.
    """
    x, quantum, per_quantum = _in_quanta(x, grid)
    magnitude = x.abs() * per_quantum  # of the magnitude, as 1 - tiny would be 1 for a tiny negative x
    lower = magnitude.floor()
    rounded = lower + (uniform < magnitude - lower).float()
    return torch.copysign(rounded * quantum, x)


def _in_quanta(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Saturated x, the distance of the grid's values around each x, and its reciprocal: powers of two, so both multiply exactly.

    Both are read off the bits of x, whose exponent alone is a power of two; compilers for GPUs turn an FP32 division into an
    approximate one. For NaN they are infinite.
    """
    x = x.float().clamp(-grid.maximum, grid.maximum)
    power = (x.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
    return x, quantum, (TWICE_THE_BIAS - quantum.view(torch.int32)).view(torch.float32)
