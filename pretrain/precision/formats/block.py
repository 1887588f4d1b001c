"""FP8 E4M3 with one scale for 1x128 values of activations and gradients, and 128x128 of weights."""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Hardware, QuantizedPrecision, Scaling

PRECISION = QuantizedPrecision(
    name="block",
    description="FP8 E4M3 products; a scale for 1x128 values of activations and gradients, for "
    "128x128 of weights; from sm_100 on Transformer Engine multiplies the same codes as MXFP8, "
    "each scale written once for 32 values",
    peak="fp8",
    multiple_of=128,
    hardware=Hardware((9, 0), "H100, H200, B200"),
    scales=Scaling("power of two", 0.5, 128),
    square_weights=True,
    quantize=lambda x, given: quantizers.blocks.quantize_fp8(
        x, given.grid, two_dimensional=given.square
    ),
    te_recipe="Float8BlockScaling",
    te_available="is_fp8_block_scaling_available",
    operand_bytes=1 + 4 / 128,
    weight_bytes=1.0,  # the scale of a square of 128 x 128 is negligible
)
