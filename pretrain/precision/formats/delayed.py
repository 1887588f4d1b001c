"""FP8 with delayed scaling: one scale per tensor, computed from the amaxes of past microbatches.

`pretrain.precision.delayed_state` stores these amaxes.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling, StepCosts

PRECISION = QuantizedPrecision(
    name="delayed",
    description="FP8 products; one scale per tensor, from the largest values of past microbatches",
    costs=StepCosts(0.643, hidden=48, mlp=18, qkv=14),
    multiple_of=16,
    options={
        "fp8_format": "HYBRID",
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    },
    hardware=Hardware((8, 9), "L40S, H100, H200, B200"),
    scales=Scaling("FP32"),
    quantize=lambda x, *, grid, scale, **_: quantizers.tensor.quantize(x, scale, grid),
    served_as="static FP8",
    keeps_history=True,
    te_recipe="DelayedScaling",
    te_available="is_fp8_available",
    in_graphs=True,
)
