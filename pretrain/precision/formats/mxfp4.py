"""MXFP4: FP4 with a power of two as the scale of every 32 values (OCP Microscaling Formats v1.0), in emulation alone.

A power of two brings a block's largest value to between 3 and 6, the maximum of E2M1, so nothing is cut. MXFP4 needs the two
means of NVFP4 even more:

* Gradients are rounded stochastically, which is right on average as nothing is cut.
* Both operands of the weight gradient are spread by a random Hadamard transform. One of 16 values multiplies by 1/4, which BF16
  holds; one of 32, the size of a block, would not be exact.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="mxfp4",
    description="FP4 products; a power-of-two scale for every 32 values (OCP Microscaling); emulated only",
    peak="fp4",
    multiple_of=32,
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware(None, "no release of Transformer Engine offers it"),
    scales=Scaling("power of two", 0.5, 32),
    codes=quantizers.E2M1,
    quantize=lambda x, given: quantizers.blocks.quantize_mx(x, given.grid, uniform=given.uniform),
    operand_bytes=1 / 2 + 1 / 32,
    # a run in which 55 % of an operand became zero trained; the same run in NVFP4 lost 38 %
    underflow_limit=0.75,
)
