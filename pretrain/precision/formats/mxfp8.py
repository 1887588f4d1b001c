"""MXFP8: FP8 with one power-of-two scale for every 32 values (OCP Microscaling Formats v1.0)."""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="mxfp8",
    description="FP8 products; one power-of-two scale for every 32 values (OCP Microscaling)",
    peak="fp8",
    multiple_of=32,
    options={"fp8_format": "E4M3"},
    hardware=Hardware((10, 0), "B200, GB200", below=(12, 0)),
    scales=Scaling("power of two", 0.5, 32),
    quantize=lambda x, given: quantizers.blocks.quantize_mx(x, given.grid),
    served_as="MXFP8",
    te_recipe="MXFP8BlockScaling",
    te_available="is_mxfp8_available",
    operand_bytes=1 + 1 / 32,
)
