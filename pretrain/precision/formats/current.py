"""FP8 with current scaling: a scale for the whole tensor, from its own largest value, for which it is read twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.precision.formats.definition import (
    AT_THE_TOP,
    Hardware,
    OptionValues,
    Quantize,
    QuantizedPrecision,
    Role,
    Scaling,
    TeRecipe,
)


class Current(QuantizedPrecision):
    name = "current"
    order = 30
    colour = "#C99700"
    description = "FP8 products; a scale a tensor, from its own largest value"
    peak = "fp8"
    multiple_of = 16
    options: Mapping[str, Any] = {"fp8_format": "HYBRID"}
    hardware = Hardware((8, 9), "L40S, H100, H200, B200")
    te_available = "is_fp8_available"
    tensor_scaled = True
    fuses_head = True
    activates_again = True

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import tensor

        grid = self.grid(settings, role)
        return lambda x, scale, amax: tensor.quantize_by_amax(x, amax, grid)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("FP32", AT_THE_TOP)

    def te_recipe(self, te: Any, settings: OptionValues) -> TeRecipe:
        arguments = {"use_power_2_scales": False, "fp8_format": te.Format[settings.fp8_format]}
        arguments |= self.te_split_accumulators(te, forward=False)
        return te.Float8CurrentScaling, arguments, self.te_fp8_quantization(te, power_of_two=False)


PRECISION = Current()
