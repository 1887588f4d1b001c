"""MXFP4: FP4 with a power of two as the scale of every 32 values (OCP Microscaling Formats v1.0), in emulation alone.

A power of two brings a block's largest value to between 3 and 6, the maximum of E2M1, so nothing is cut. MXFP4 needs the two
means of NVFP4 even more:

* Gradients are rounded stochastically, which is right on average as nothing is cut.
* Both operands of the weight gradient are spread by a random Hadamard transform. One of 16 values multiplies by 1/4, which BF16
  holds; one of 32, the size of a block, would not be exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.precision.formats.definition import WITHIN_TWO, Hardware, OptionValues, Quantize, QuantizedPrecision, Role, Scaling
from pretrain.precision.quantizers import E2M1, Grid


class Mxfp4(QuantizedPrecision):
    name = "mxfp4"
    order = 70
    colour = "#7D4BD8"
    description = "FP4 products; a power-of-two scale for every 32 values (OCP Microscaling); emulated only"
    peak = "fp4"
    multiple_of = 32
    options: Mapping[str, Any] = {"disable_rht": False, "disable_stochastic_rounding": False}
    hardware = Hardware(None, "no release of Transformer Engine offers it")
    block_scaled = True
    operand_bytes = 1 / 2 + 1 / 32
    format_name = "E2M1"
    underflow_limit = 0.75  # a run in which 55 % of an operand became zero trained; the same run in NVFP4 lost 38 %

    def grid(self, settings: OptionValues, role: Role) -> Grid:
        return E2M1

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import blocks

        uniform = self.uniform(settings, role)
        return lambda x, scale, amax: blocks.quantize_mx(x, E2M1, uniform=uniform(x))

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("power of two", WITHIN_TWO, 32)


PRECISION = Mxfp4()
