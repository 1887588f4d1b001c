"""FP8 with delayed scaling: a scale for the whole tensor, from the largest values of past microbatches (`delayed_state`)."""

from __future__ import annotations

from typing import Any

from pretrain.precision.formats.definition import Hardware, OptionValues, Quantize, QuantizedPrecision, Scaling, TeRecipe, Uniform
from pretrain.precision.quantizers import Grid


def quantize(grid: Grid, square: bool, uniform: Uniform) -> Quantize:
    from pretrain.precision.quantizers import tensor

    return lambda x, scale, amax: tensor.quantize(x, scale, grid)


def te_recipe(te: Any, settings: OptionValues) -> TeRecipe:
    arguments = {
        "margin": settings.margin,
        "fp8_format": te.Format[settings.fp8_format],
        "amax_history_len": settings.amax_history_len,
        "amax_compute_algo": settings.amax_compute_algo,
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,  # over all ranks: every rank quantizes the same weight, and must do so with the same scale
    }
    return te.DelayedScaling, arguments, {}


PRECISION = QuantizedPrecision(
    name="delayed",
    order=20,
    description="FP8 products; a scale a tensor, from the largest values of past microbatches",
    peak="fp8",
    accelerate_name="fp8",
    fallback_rank=0,
    multiple_of=16,
    options={"fp8_format": "HYBRID", "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"},
    hardware=Hardware((8, 9), "L40S, H100, H200, B200"),
    scales=Scaling("FP32", 0.0),
    quantize=quantize,
    keeps_history=True,
    te_recipe=te_recipe,
    te_available="is_fp8_available",
)
