"""MXFP8: FP8 with a power of two as the scale of every 32 values (OCP Microscaling Formats v1.0)."""

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


class Mxfp8(QuantizedPrecision):
    name = "mxfp8"
    order = 50
    colour = "#4AA8DE"
    description = "FP8 products; a power-of-two scale for every 32 values (OCP Microscaling)"
    peak = "fp8"
    multiple_of = 32
    options: Mapping[str, Any] = {"fp8_format": "E4M3"}
    hardware = Hardware((10, 0), "B200, GB200", below=(12, 0))
    te_available = "is_mxfp8_available"
    block_scaled = True
    operand_bytes = 1 + 1 / 32

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import blocks

        grid = self.grid(settings, role)
        return lambda x, scale, amax: blocks.quantize_mx(x, grid)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("power of two", WITHIN_TWO, 32)

    def te_recipe(self, te: Any, settings: OptionValues) -> TeRecipe:
        arguments = {"margin": 0, "fp8_format": te.Format[settings.fp8_format], "enable_2d_quantization": False}
        return te.MXFP8BlockScaling, arguments, {}

    def te_operand_kinds(self, settings: OptionValues, role: Role) -> set[str]:
        return {f"mxfp8 {self.grid(settings, role).name.lower()}"}


PRECISION = Mxfp8()
