"""MXFP4: FP4 with a power-of-two scale for 32 values (OCP Microscaling Formats v1.0), emulated.

The scale brings a block's largest value between 3 and 6, the maximum of E2M1, so no value
saturates. MXFP4 needs the two methods of NVFP4 even more:

* Gradients are rounded stochastically. Their mean is right, because no value saturates.
* A random Hadamard transform spreads both operands of the weight gradient. A transform of 16 values
  multiplies by 1/4, which is exact in BF16. A transform of 32 values, the block size, would not be.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="mxfp4",
    description="FP4 products; a power-of-two scale for every 32 values (OCP Microscaling); "
    "emulated only",
    peak="fp4",
    multiple_of=32,
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware(None, "no release of Transformer Engine offers it"),
    scales=Scaling("power of two", 0.5, 32),
    codes=quantizers.E2M1,
    quantize=lambda x, given: quantizers.blocks.quantize_mx(x, given.grid, uniform=given.uniform),
    operand_bytes=1 / 2 + 1 / 32,
    # A run with an underflow of 55 % trained. The same run in NVFP4 had 38 %.
    underflow_limit=0.75,
)
