"""For each recipe, how the operands of a linear's three products are quantized.

    forward  y      = x w^T          sums over in_features    input and weight along their features
    dgrad    grad_x = grad_y w       sums over out_features   grad_output along its features, weight along its rows
    wgrad    grad_w = grad_y^T x     sums over tokens         grad_output and input along their rows

A scale can be taken out of a sum only if it is the same for all of its terms, so a block of values that share one lies along the
axis of the sum. Every operand enters two products that sum over different axes. One scale for the whole tensor, or for a square
of it, serves both; a scale for a stretch of 16, 32 or 128 values does not, and then the operand is quantized twice, each time
from its high-precision values: quantizing the codes of the first again would round twice.

What serves which recipe is Transformer Engine's choice (common/recipe/__init__.py and pytorch/quantization.py of release 2.20).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pretrain.precision.linear import Role
from pretrain.precision.quantizers import block, hadamard, mxfp8, nvfp4, tensor
from pretrain.precision.quantizers.grid import E4M3, E5M2, Grid
from pretrain.precision.quantizers.quantized import Quantized
from pretrain.precision.selection import ActivePrecision

# The axis of a product's sum, seen from one operand [rows, features]: `rows` are tokens, or the out_features of a weight.
Along = Literal["features", "rows"]

# (x [rows, features], scale of delayed scaling or None, amax of x if known or None) -> codes whose last dimension is the sum's.
Quantize = Callable[[Tensor, Tensor | None, Tensor | None], Quantized]

SCALED_PER_TENSOR = ("delayed", "current", "nvfp4")  # the others have a tensor scale of one


def quantize_operand(
    active: ActivePrecision, role: Role, x: Tensor, *, along: Along, scale: Tensor | None = None, amax: Tensor | None = None
) -> Quantized:
    """x [rows, features], the `role` of a product that sums `along` its features or its rows, as `engaged` quantizes it.

    Codes come with the axis of the sum last: [rows, features], or [features, rows]. Delayed scaling takes the `scale` in force,
    FP32 and scalar, which is a matter of its history. `amax`, scalar, spares recipes that need x's the search for it (`features`
    only: along rows NVFP4 wants that of the transformed values). Stochastic rounding draws from torch's generator of x's device.

    Raises RuntimeError where the recipe's blocks do not divide the axis of the sum.
    """
    return quantizer(active, role, along)(x, scale, amax)


def serves_both(active: ActivePrecision, role: Role) -> bool:
    """Whether the codes of one quantization enter both products of an operand."""
    settings = active.settings
    match active.precision.name:
        case "delayed" | "current":
            return True
        case "block":
            return role == "weight"
        case "mxfp8":
            return role == "weight" and bool(settings.enable_2d_quantization)
        case "nvfp4":
            return role == "weight" and not settings.disable_2d_quantization
    raise ValueError(f"{active.precision.name} quantizes nothing")


def quantizer(active: ActivePrecision, role: Role, along: Along) -> Quantize:
    """`quantize_operand` with all but its tensors settled: a pure function of tensors, for a compiler to look through."""
    if along == "features":
        return _along_features(active, role)
    if serves_both(active, role):
        return _transposing_the_result(_along_features(active, role))
    if active.precision.name == "nvfp4" and role != "weight" and not active.settings.disable_rht:
        return _transposing(_along_features(active, role), hadamard.transform)
    return _transposing(_along_features(active, role))


def grid_of(active: ActivePrecision, role: Role) -> Grid:
    """The FP8 format of a role: HYBRID gives gradients range rather than precision."""
    return E5M2 if role == "grad_output" and active.settings.fp8_format == "HYBRID" else E4M3


def _along_features(active: ActivePrecision, role: Role) -> Quantize:
    settings, grid = active.settings, grid_of(active, role)
    match active.precision.name:
        case "delayed":
            return lambda x, scale, amax: tensor.quantize(x, scale, grid)
        case "current":
            return _with_current_scale(grid, bool(settings.use_power_2_scales))
        case "block":
            square, power_of_two = role == "weight", not settings.use_f32_scales
            return lambda x, scale, amax: block.quantize(x, grid, two_dimensional=square, power_of_two=power_of_two)
        case "mxfp8":
            square, rounding = serves_both(active, role), settings.scale_rounding
            return lambda x, scale, amax: mxfp8.quantize(x, grid, rounding=rounding, two_dimensional=square)
        case "nvfp4":
            # Rounding by chance keeps a sum of gradients right on average. Activations and weights are rounded to nearest:
            # there chance would add noise to every forward, and there is no average over steps to take it out again.
            if role == "grad_output" and not settings.disable_stochastic_rounding:
                return _nvfp4_by_chance
            square = serves_both(active, role)
            return lambda x, scale, amax: nvfp4.quantize(x, two_dimensional=square, amax=amax)
    raise ValueError(f"{active.precision.name} quantizes nothing")


def _with_current_scale(grid: Grid, power_of_two: bool) -> Quantize:
    def quantize(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
        amax = tensor.absolute_maximum(x) if amax is None else amax.float()
        return tensor.quantize(x, tensor.scale_from_amax(amax, grid.maximum, power_of_two=power_of_two), grid)

    return quantize


def _nvfp4_by_chance(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
    return nvfp4.quantize(x, two_dimensional=False, amax=amax, uniform=torch.rand_like(x, dtype=torch.float32))


def _transposing(quantize: Quantize, transform: Callable[[Tensor], Tensor] | None = None) -> Quantize:
    """Quantize x^T, or what `transform` makes of it, along its last dimension."""

    def quantize_rows(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
        return quantize(x.t() if transform is None else transform(x.t()), scale, None)

    return quantize_rows


def _transposing_the_result(quantize: Quantize) -> Quantize:
    def quantize_and_transpose(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
        quantized = quantize(x, scale, amax)
        blocks = quantized.block_scale
        return Quantized(quantized.codes.t(), blocks.t() if blocks.dim() else blocks, quantized.tensor_scale, quantized.grid)

    return quantize_and_transpose
