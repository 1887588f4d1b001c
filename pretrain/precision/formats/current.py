"""FP8 with current scaling: one scale a tensor, from its own amax, so a tensor is read twice."""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="current",
    description="FP8 products; a scale a tensor, from its own largest value",
    peak="fp8",
    multiple_of=16,
    options={"fp8_format": "HYBRID"},
    hardware=Hardware((8, 9), "L40S, H100, H200, B200"),
    scales=Scaling("FP32", 0.85),
    quantize=lambda x, given: quantizers.tensor.quantize_by_amax(x, given.amax, given.grid),
    te_recipe="Float8CurrentScaling",
    te_available="is_fp8_available",
)
