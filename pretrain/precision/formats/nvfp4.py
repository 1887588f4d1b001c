"""NVFP4: FP4 with an E4M3 scale for 16 values and an FP32 scale a tensor; weights in 16x16 squares.

The last layers stay in BF16, as in other NVFP4 trainings: torchtitan keeps 15 % of the layers,
Megatron Bridge 4 of 32.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="nvfp4",
    description="FP4 products; an E4M3 scale for every 16 values under a scale a tensor",
    peak="fp4",
    # Not 16, the block size: a row of codes must be a multiple of 16 bytes, with two codes a byte,
    # in both layouts.
    multiple_of=32,
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware((10, 0), "B200, GB200"),
    # An E4M3 scale is off by at most 1/17, so the largest value lies between 5.6 and 6.4.
    # Stochastic rounding may make it 4.
    scales=Scaling("E4M3", 4 / 6, 16),
    square_weights=True,
    codes=quantizers.E2M1,
    quantize=lambda x, given: quantizers.blocks.quantize_nvfp4(
        x, two_dimensional=given.square, uniform=given.uniform, amax=given.amax
    ),
    te_recipe="NVFP4BlockScaling",
    te_available="is_nvfp4_available",
    operand_bytes=1 / 2 + 1 / 16,
    keeps_last=0.15,
    # Training works with an underflow of 45 % of a gradient, because stochastic rounding keeps the
    # mean right.
    underflow_limit=0.6,
)
