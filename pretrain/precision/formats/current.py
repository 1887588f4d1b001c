"""FP8 with current scaling: a scale for the whole tensor, from its own largest value, for which it is read twice."""

from __future__ import annotations

from typing import Any

from pretrain.precision.formats import definition
from pretrain.precision.formats.definition import Hardware, OptionValues, Quantize, QuantizedPrecision, Scaling, TeRecipe, Uniform
from pretrain.precision.quantizers import Grid


def quantize(grid: Grid, square: bool, uniform: Uniform) -> Quantize:
    from pretrain.precision.quantizers import tensor

    return lambda x, scale, amax: tensor.quantize_by_amax(x, amax, grid)


def te_recipe(te: Any, settings: OptionValues) -> TeRecipe:
    arguments = {"use_power_2_scales": False, "fp8_format": te.Format[settings.fp8_format]}
    arguments |= definition.te_split_accumulators(te, forward=False)
    return te.Float8CurrentScaling, arguments, definition.te_fp8_quantization(te, power_of_two=False)


PRECISION = QuantizedPrecision(
    name="current",
    order=30,
    description="FP8 products; a scale a tensor, from its own largest value",
    peak="fp8",
    multiple_of=16,
    options={"fp8_format": "HYBRID"},
    hardware=Hardware((8, 9), "L40S, H100, H200, B200"),
    scales=Scaling("FP32", 0.85),
    quantize=quantize,
    te_recipe=te_recipe,
    te_available="is_fp8_available",
)
