"""NVFP4: FP4 with one E4M3 scale per block and one FP32 scale per tensor.

A block has 16 values in activations and gradients, and 16x16 values in weights. By default, the
last 15 % of the layers stay in BF16. torchtitan also keeps 15 % of the layers in BF16 when it
trains in NVFP4, and Megatron Bridge keeps 4 of 32 layers.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import (
    Hardware,
    QuantizedPrecision,
    Scaling,
    StepCosts,
)

PRECISION = QuantizedPrecision(
    name="nvfp4",
    description="FP4 products; one E4M3 scale for every 16 values and one FP32 scale per tensor",
    # The bytes are those of `current`. The share gives the speed relative to FP8 with a scale per
    # tensor in published steps of Llama-3.1-8B.
    costs=StepCosts(1.223, hidden=54, mlp=27, qkv=20, least_parameters=7_000_000_000),
    # The block size, 16, would not suffice: in both layouts, a row of codes must take a multiple of
    # 16 bytes, and two codes take one byte.
    multiple_of=32,
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    # Transformer Engine's check accepts later GPUs too, but its documentation and its tests limit
    # training in NVFP4 to 10.x. On 12.x, the Hadamard transform crashed before version 2.16, and
    # stochastic rounding returned zeros without an error before version 2.19.
    hardware=Hardware(
        (10, 0),
        "B200, B300; Transformer Engine does not train in NVFP4 on later GPUs",
        below=(11, 0),
    ),
    scales=Scaling("E4M3", 16),
    square_weights=True,
    codes=quantizers.E2M1,
    quantize=lambda x, *, square, amax, uniform, **_: quantizers.blocks.quantize_nvfp4(
        x, two_dimensional=square, uniform=uniform, amax=amax
    ),
    served_as="NVFP4",
    te_recipe="NVFP4BlockScaling",
    te_available="is_nvfp4_available",
    operand_bytes=1 / 2 + 1 / 16,
    keeps_last=0.15,
    # Training works although 45 % of a gradient's values become zero, because stochastic rounding
    # preserves the expectation of each value.
    underflow_limit=0.6,
)
