"""MXFP4: FP4 with one power-of-two scale for every 32 values (OCP Microscaling Formats v1.0).

No library computes MXFP4 products, so they are emulated. The scale maps the largest value of a
block to a value between 3 and 6. As 6 is the maximum of E2M1, no value saturates. MXFP4 uses the
same two methods as NVFP4, and needs them even more:

* Gradients are rounded stochastically. The expectation of a rounded gradient is the gradient,
  because no value saturates.
* Both operands of the weight gradient's product are multiplied by a random Hadamard transform,
  which spreads outliers over 16 values. This transform multiplies by 1/4, which is exact in BF16. A
  transform of 32 values, the block size, would multiply by a number that is not exact in BF16.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="mxfp4",
    description="FP4 products; one power-of-two scale for every 32 values (OCP Microscaling); "
    "emulated only",
    multiple_of=32,
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware(None, missing="a kernel, but no release of Transformer Engine has one"),
    scales=Scaling("power of two", 32),
    codes=quantizers.E2M1,
    quantize=lambda x, *, grid, uniform, **_: quantizers.blocks.quantize_mx(
        x, grid, uniform=uniform
    ),
    served_as="MXFP4",
    operand_bytes=1 / 2 + 1 / 32,
    # We saw a run that trained although 55 % of an operand's values became zero. With the same
    # recipe in NVFP4, 38 % became zero.
    underflow_limit=0.75,
)
