"""NVFP4: FP4 with an E4M3 scale for every 16 values under an FP32 scale for the tensor; weights in squares of 16x16.

The last layers stay in BF16, as where others train in it: torchtitan keeps 15 % of the layers, Megatron Bridge 4 of 32.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="nvfp4",
    description="FP4 products; an E4M3 scale for every 16 values under a scale a tensor",
    peak="fp4",
    # not its blocks' 16: rows of codes begin at 16 bytes, two codes in each, whichever way a
    # product reads
    multiple_of=32,
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware((10, 0), "B200, GB200"),
    # An E4M3 scale is a 17th off at most, so the largest value lies between 5.6 and 6.4. Rounded by chance it may become 4.
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
    # it loses 45 % of a gradient and still trains, as stochastic rounding makes up for it on
    # average
    underflow_limit=0.6,
)
