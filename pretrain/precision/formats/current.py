"""FP8 with current scaling: one scale per tensor, computed from the amax of the same tensor.

Each tensor is read twice: once to compute its amax, and once to quantize its values.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling, StepCosts

PRECISION = QuantizedPrecision(
    name="current",
    description="FP8 products; one scale per tensor, from the largest value of the same tensor",
    costs=StepCosts(0.643, hidden=54, mlp=27, qkv=20),
    multiple_of=16,
    options={"fp8_format": "HYBRID"},
    hardware=Hardware((8, 9), "L40S, H100, H200, B200"),
    scales=Scaling("FP32"),
    quantize=lambda x, *, grid, amax, **_: quantizers.tensor.quantize_by_amax(x, amax, grid),
    served_as="FP8",
    te_recipe="Float8CurrentScaling",
    te_available="is_fp8_available",
    in_graphs=True,
)
