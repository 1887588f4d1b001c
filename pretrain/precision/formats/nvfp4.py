"""NVFP4: FP4 with an E4M3 scale for every 16 values under an FP32 scale for the tensor; weights in squares of 16x16."""

from __future__ import annotations

from typing import Any

from pretrain.precision.formats import definition
from pretrain.precision.formats.definition import Hardware, OptionValues, Quantize, QuantizedPrecision, Scaling, TeRecipe, Uniform
from pretrain.precision.quantizers import E2M1, Grid


def quantize(grid: Grid, square: bool, uniform: Uniform) -> Quantize:
    from pretrain.precision.quantizers import blocks

    return lambda x, scale, amax: blocks.quantize_nvfp4(x, two_dimensional=square, uniform=uniform(x), amax=amax)


def te_recipe(te: Any, settings: OptionValues) -> TeRecipe:
    arguments = {
        "disable_rht": settings.disable_rht,
        "disable_stochastic_rounding": settings.disable_stochastic_rounding,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": te.Format.E2M1,
        "fp8_format": te.Format.E4M3,
    }
    rotated = {"random_hadamard_transform": not settings.disable_rht}
    rounded = {"stochastic_rounding": not settings.disable_stochastic_rounding}
    quantization = {
        "fp4_quant_fwd_inp": definition.te_quantization(te, **rotated),
        "fp4_quant_fwd_weight": definition.te_quantization(te, fp4_2d_quantization=True),
        "fp4_quant_bwd_grad": definition.te_quantization(te, **rotated, **rounded),
    }
    return te.NVFP4BlockScaling, arguments, quantization


PRECISION = QuantizedPrecision(
    name="nvfp4",
    order=60,
    description="FP4 products; an E4M3 scale for every 16 values under a scale a tensor",
    peak="fp4",
    multiple_of=32,  # not its blocks' 16: rows of codes begin at 16 bytes, two codes in each, whichever way a product reads
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware((10, 0), "B200, GB200"),
    # An E4M3 scale is a 17th off at most, so the largest value lies between 5.6 and 6.4. Rounded by chance it may become 4.
    scales=Scaling("E4M3", 4 / 6, 16),
    square_weights=True,
    codes=E2M1,
    quantize=quantize,
    te_recipe=te_recipe,
    te_available="is_nvfp4_available",
    te_name="nvfp4",
    operand_bytes=1 / 2 + 1 / 16,
    underflow_limit=0.6,  # it loses 45 % of a gradient and still trains, as stochastic rounding makes up for it on average
)
