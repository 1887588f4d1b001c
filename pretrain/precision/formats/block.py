"""FP8 E4M3 with one scale per block.

A block has 1x128 values in activations and gradients, and 128x128 values in weights.
"""

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import (
    BLACKWELL,
    Hardware,
    QuantizedPrecision,
    Scaling,
    StepCosts,
)

PRECISION = QuantizedPrecision(
    name="block",
    description="FP8 E4M3 products; one scale for every 1x128 values of activations and gradients, "
    "and for every 128x128 values of weights; on sm_100 and later, Transformer Engine multiplies "
    "the same codes by MXFP8 products, which repeat each scale for every 32 values",
    costs=StepCosts(0.500, hidden=58, mlp=27, qkv=18, below=BLACKWELL),
    multiple_of=128,
    # 12.x is supported although `mxfp8` does not support it. Transformer Engine stores transposed
    # copies of the codes of `block`, so all MXFP8 products have the layout TN.
    hardware=Hardware((9, 0), "H100, H200, B200, RTX 5090"),
    scales=Scaling("power of two", 128),
    square_weights=True,
    quantize=lambda x, *, grid, square, **_: quantizers.blocks.quantize_fp8(
        x, grid, two_dimensional=square
    ),
    served_as="FP8 blocks",
    te_recipe="Float8BlockScaling",
    te_available="is_fp8_block_scaling_available",
    in_graphs=True,
    operand_bytes=1 + 4 / 128,
    weight_bytes=1.0,  # one scale for 128 x 128 values takes negligible memory
)
