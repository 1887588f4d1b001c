"""FP8 with a scale for each 1x128 values of activations and gradients, and for each 128x128 of weights; in E4M3 throughout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.precision.formats.definition import (
    WITHIN_TWO,
    Hardware,
    OptionValues,
    Quantize,
    QuantizedPrecision,
    Role,
    Scaling,
    TeRecipe,
)


class Block(QuantizedPrecision):
    name = "block"
    order = 40
    colour = "#009E73"
    description = (
        "FP8 E4M3 products; a scale for 1x128 values of activations and gradients, for 128x128 of weights; from sm_100 on "
        "Transformer Engine multiplies the same codes as MXFP8, each scale written once for 32 values"
    )
    peak = "fp8"
    multiple_of = 128
    options: Mapping[str, Any] = {"fp8_format": "E4M3"}
    hardware = Hardware((9, 0), "H100, H200, B200", cuda=(12, 9))
    te_available = "is_fp8_block_scaling_available"
    block_scaled = True
    operand_bytes = 1 + 4 / 128
    weight_bytes = 1.0  # a scale for a square of 128 x 128 is next to nothing

    def takes(self, key: str, value: Any) -> bool:
        return super().takes(key, value) and (key, value) != ("fp8_format", "HYBRID")

    def serves_both(self, settings: OptionValues, role: Role) -> bool:
        return role == "weight"

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import blocks

        grid, square = self.grid(settings, role), self.serves_both(settings, role)
        return lambda x, scale, amax: blocks.quantize_fp8(x, grid, two_dimensional=square)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("power of two", WITHIN_TWO, 128, square=self.serves_both(settings, role))

    def te_recipe(self, te: Any, settings: OptionValues) -> TeRecipe:
        arguments = {
            "use_f32_scales": False,
            "fp8_format": te.Format[settings.fp8_format],
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
        }
        arguments |= self.te_split_accumulators(te)
        return te.Float8BlockScaling, arguments, self.te_fp8_quantization(te, power_of_two=True)


PRECISION = Block()
