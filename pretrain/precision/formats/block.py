"""FP8 with a scale for each 1x128 values of activations and gradients, and for each 128x128 of weights; in E4M3 throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pretrain.precision.formats.definition import (
    FP8_FORMAT,
    WITHIN_TWO,
    Hardware,
    Option,
    OptionValues,
    Quantize,
    QuantizedPrecision,
    Role,
    Scaling,
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
    options: Mapping[str, Option] = {
        "fp8_format": replace(FP8_FORMAT, default="E4M3", allowed=("E4M3",)),
    }
    hardware = Hardware((9, 0), "H100, H200, B200", cuda=(12, 9))
    te_available = "is_fp8_block_scaling_available"
    block_scaled = True
    operand_bytes = 1 + 4 / 128
    weight_bytes = 1.0  # a scale for a square of 128 x 128 is next to nothing

    def serves_both(self, settings: OptionValues, role: Role) -> bool:
        return role == "weight"

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import block

        grid, square = self.grid(settings, role), self.serves_both(settings, role)
        return lambda x, scale, amax: block.quantize(x, grid, two_dimensional=square)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("power of two", WITHIN_TWO, 128, square=self.serves_both(settings, role))

    def te_recipe(self, te: Any, settings: OptionValues) -> tuple[type, dict[str, Any], dict[str, Any]]:
        arguments = {
            "use_f32_scales": False,
            "fp8_format": te.Format[settings.fp8_format],
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
            "fp8_gemm_fprop": te.MMParams(use_split_accumulator=True),
            "fp8_gemm_dgrad": te.MMParams(use_split_accumulator=True),
            "fp8_gemm_wgrad": te.MMParams(use_split_accumulator=True),
        }
        return te.Float8BlockScaling, arguments, self.te_fp8_quantization(te, power_of_two=True)

    def against_underflow(self, settings: OptionValues) -> str:
        return "`precision=mxfp8` has a scale for every 32 values; `fp8_config.keep_bf16_layers` takes layers out"


PRECISION = Block()
