"""MXFP8: FP8 with a power of two as the scale of every 32 values (OCP Microscaling Formats v1.0)."""

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


class Mxfp8(QuantizedPrecision):
    name = "mxfp8"
    order = 50
    colour = "#4AA8DE"
    description = "FP8 products; a power-of-two scale for every 32 values (OCP Microscaling)"
    peak = "fp8"
    multiple_of = 32
    options: Mapping[str, Option] = {
        "fp8_format": replace(FP8_FORMAT, default="E4M3"),
    }
    hardware = Hardware((10, 0), "B200, GB200", below=(12, 0))
    te_available = "is_mxfp8_available"
    block_scaled = True
    operand_bytes = 1 + 1 / 32

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import mx

        grid = self.grid(settings, role)
        return lambda x, scale, amax: mx.quantize(x, grid)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("power of two", WITHIN_TWO, 32)

    def cautions(self, settings: OptionValues) -> tuple[str, ...]:
        if settings.fp8_format != "HYBRID":
            return ()
        return (
            "`fp8_config.fp8_format: HYBRID`: with gradients in E5M2, MXFP8 was seen to diverge (Megatron-Bridge#638); E4M3 "
            "is the default",
        )

    def te_recipe(self, te: Any, settings: OptionValues) -> tuple[type, dict[str, Any], dict[str, Any]]:
        arguments = {"margin": 0, "fp8_format": te.Format[settings.fp8_format], "enable_2d_quantization": False}
        return te.MXFP8BlockScaling, arguments, {}

    def te_operand_kinds(self, settings: OptionValues, role: Role) -> set[str]:
        return {f"mxfp8 {self.grid(settings, role).name.lower()}"}


PRECISION = Mxfp8()
