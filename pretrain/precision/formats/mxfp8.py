"""MXFP8: FP8 with one power-of-two scale for every 32 values (OCP Microscaling Formats v1.0)."""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import (
    Hardware,
    QuantizedPrecision,
    Scaling,
    StepCosts,
)

PRECISION = QuantizedPrecision(
    name="mxfp8",
    description="FP8 products; one power-of-two scale for every 32 values (OCP Microscaling)",
    # The bytes are those of `current`. The share gives the speed relative to FP8 with a scale per
    # tensor in published steps of Llama-3.1-8B.
    costs=StepCosts(0.595, hidden=54, mlp=27, qkv=20),
    multiple_of=32,
    options={"fp8_format": "E4M3"},
    # Transformer Engine documents 10.0 and 10.3. It refuses 12.x, because cuBLAS before 13.6 lacks
    # the layouts NN and NT there, which backward needs. Its packages have no kernels for 11.x.
    hardware=Hardware(
        (10, 0),
        "B200, B300; Transformer Engine does not train in MXFP8 on later GPUs",
        below=(11, 0),
    ),
    scales=Scaling("power of two", 32),
    quantize=lambda x, *, grid, **_: quantizers.blocks.quantize_mx(x, grid),
    served_as="MXFP8",
    te_recipe="MXFP8BlockScaling",
    te_available="is_mxfp8_available",
    operand_bytes=1 + 1 / 32,
)
