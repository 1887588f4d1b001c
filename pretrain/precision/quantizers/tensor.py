"""Round to the values of a format, and quantize to FP8 with one scale per tensor.

Current or delayed scaling computes the scale. Rounded values are returned in FP32. They are
not cast to torch's float8 dtypes, because the result of such a cast for values beyond the maximum
changed between versions of torch.

Between two neighbouring powers of two, the values of a format have a constant distance, the
quantum. The quantum is a power of two, which can be computed from the exponent bits of x. All
subnormals have the quantum of the smallest normal value.

Divisions are computed in FP64 and rounded to FP32. For two FP32 operands, the result has the same
bits as an FP32 division that rounds to nearest, because FP64 has more than twice the mantissa
bits (53) of FP32 (24). This is also true in compiled GPU kernels, where FP32 division is only
approximate.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pretrain.precision.quantizers import Grid, Quantized

FP32_MANTISSA_BITS = 23
FP32_EXPONENT = 0xFF << FP32_MANTISSA_BITS  # mask of the exponent bits
# This integer minus the bits of a power of two is equal to the bits of the power's reciprocal.
TWICE_THE_BIAS = 2 * 127 << FP32_MANTISSA_BITS
FP32_MAX = torch.finfo(torch.float32).max


def round_to_grid(x: Tensor, grid: Grid) -> Tensor:
    """Round x, FP32 of any shape, to the nearest value of `grid`, ties to even. Return FP32.

    Values beyond the maximum of the grid, and infinities, become the maximum with their sign, as in
    the GPU's saturating conversions (PTX cvt.satfinite). NaN stays NaN, even if the format has no
    NaN. Zeros keep their sign.
    """
    x, quantum, per_quantum = _in_quanta(x, grid)
    return torch.round(x * per_quantum) * quantum


def round_stochastically(x: Tensor, grid: Grid, uniform: Tensor) -> Tensor:
    """Round x, FP32 of any shape, stochastically to `grid`. Return FP32.

    A value between two neighbours in the grid is rounded to one of them. Let d be the distance, in
    quanta, between the value and the neighbour closer to zero. The value is rounded away from zero
    if its random number is below d, otherwise toward zero. So the expectation of the result is the
    value before rounding. Values of the grid, NaN, and values beyond the maximum have the same
    results as in `round_to_grid`.

    uniform: random numbers in [0, 1), FP32, in the shape of x.
    """
    x, quantum, per_quantum = _in_quanta(x, grid)
    # Round magnitudes instead of signed values. The floor of a tiny negative value would be -1, and
    # its distance from -1 would be rounded to 1, so the value could never be rounded to -1.
    magnitude = x.abs() * per_quantum
    lower = magnitude.floor()
    rounded = lower + (uniform < magnitude - lower).float()
    return torch.copysign(rounded * quantum, x)


def _in_quanta(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Return three FP32 tensors: x after saturation, the quantum at each x, and its reciprocal.

    Quanta and reciprocals are powers of two, so multiplying by them is exact. They are computed
    from the bits of x, because compilers for GPUs approximate FP32 divisions. If x is NaN, the
    quantum and its reciprocal are not finite.
    """
    x = x.float().clamp(-grid.maximum, grid.maximum)
    power = (x.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
    return x, quantum, (TWICE_THE_BIAS - quantum.view(torch.int32)).view(torch.float32)


def absolute_maximum(x: Tensor, dim: int | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """Return the largest absolute value of x, in FP32, along `dim` or over all dimensions.

    NaN is ignored, as in the kernels of Transformer Engine (TE), which use fmaxf.
    """
    return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float()


def scale_from_amax(
    amax: Tensor, maximum: float, *, power_of_two: bool = False, overflow: float = FP32_MAX
) -> Tensor:
    """Return maximum / amax: the factor that maps the largest value of a tensor to `maximum`.

    amax: FP32 of any shape. If an amax is zero, infinity or NaN, its factor is 1.
    maximum: the maximum of the format.
    power_of_two: True if the factor is rounded down to a power of two.
    overflow: the factor if the quotient overflows FP32.

    The rule is that of compute_scale_from_amax in TE's common/recipe/recipe_common.cuh.
    """
    scale = (torch.full_like(amax, maximum, dtype=torch.float64) / amax).float()
    scale = scale.masked_fill(scale.isinf(), overflow)
    if power_of_two:
        scale = (scale.view(torch.int32) & (-1 << FP32_MANTISSA_BITS)).view(torch.float32)
    return scale.masked_fill(~(amax.isfinite() & (amax > 0)), 1)


def decode_scale(scale: Tensor) -> Tensor:
    """Return 1 / scale, rounded to the nearest FP32 value, which may be subnormal.

    TE calls it scale_inv.
    """
    return scale.double().reciprocal().float()


def quantize(x: Tensor, scale: Tensor, grid: Grid) -> Quantized:
    """Multiply x [rows, columns] by `scale` in FP32, and round the product to `grid`.

    x has any float dtype. `scale` is an FP32 tensor with one element.
    """
    scale = scale.reshape(())
    return Quantized(
        round_to_grid(x.float() * scale, grid), torch.ones_like(scale), decode_scale(scale), grid
    )


def quantize_by_amax(x: Tensor, amax: Tensor | None, grid: Grid) -> Quantized:
    """Quantize x with current scaling: the scale maps `amax` to the maximum of the grid.

    `amax` is a scalar. If it is None, it is computed from x.
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
    """Update the history and the scale of delayed scaling after a microbatch. Return both.

    amax_history: the amaxes, [length, ...] FP32, one column for each tensor. Row 0 contains the
        amaxes of the microbatch that ends. The last row contains the amaxes of the previous
        microbatch.
    scale: the scales that the microbatch used, [...] FP32.
    maximum: the maximum of the format.
    margin: the number of times that a scale is halved.
    algorithm: the rule for the amax of a column: its largest value (`max`) or its value in row 0
        (`most_recent`).

    In the returned history, the old row 0 is the last row. The old row 1 is dropped, and each later
    row i moves to row i - 1. The new row 0 is zero. The returned scale is maximum / 2**margin /
    amax, or the old scale if the amax is zero or not finite. A column with a zero in row 0 belongs
    to a tensor that was not quantized in the microbatch. Its history and its scale are returned
    unchanged.

    The fused kernel in TE's common/recipe/delayed_scaling.cu follows the same rules. In contrast,
    TE's fallback in Python also moves the rows of tensors that were not quantized.
    """
    newest = amax_history[0]
    seen = newest != 0
    rolled = torch.cat([torch.zeros_like(amax_history[:1]), amax_history.roll(-1, dims=0)[1:]])
    largest = absolute_maximum(amax_history, dim=0) if algorithm == "max" else newest
    usable = seen & largest.isfinite() & (largest > 0)
    updated = torch.where(usable, scale_from_amax(largest, maximum * 2.0**-margin), scale)
    return torch.where(seen, rolled, amax_history), updated
