"""FP8 with delayed scaling: a scale for the whole tensor, from the largest values of past microbatches (`delayed_state`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.precision.formats.current import Current
from pretrain.precision.formats.definition import OptionValues, Quantize, Role, Scaling, TeRecipe


class Delayed(Current):
    name = "delayed"
    order = 20
    colour = "#D55E00"
    description = "FP8 products; a scale a tensor, from the largest values of past microbatches"
    accelerate_name = "fp8"
    fallback_rank = 0
    options: Mapping[str, Any] = {
        "fp8_format": "HYBRID",
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    }
    keeps_history = True

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import tensor

        grid = self.grid(settings, role)
        return lambda x, scale, amax: tensor.quantize(x, scale, grid)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("FP32", 0.0)

    def te_recipe(self, te: Any, settings: OptionValues) -> TeRecipe:
        arguments = {
            "margin": settings.margin,
            "fp8_format": te.Format[settings.fp8_format],
            "amax_history_len": settings.amax_history_len,
            "amax_compute_algo": settings.amax_compute_algo,
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,  # over all ranks: every rank quantizes the same weight, and must do so with the same scale
        }
        return te.DelayedScaling, arguments, {}


PRECISION = Delayed()
