"""NVFP4: FP4 with an E4M3 scale for every 16 values under an FP32 scale for the tensor; weights in squares of 16x16."""

from __future__ import annotations

from pretrain.precision.formats.definition import Hardware, Quantize, QuantizedPrecision, Scaling, Uniform
from pretrain.precision.quantizers import E2M1, Grid


def quantize(grid: Grid, square: bool, uniform: Uniform) -> Quantize:
    from pretrain.precision.quantizers import blocks

    return lambda x, scale, amax: blocks.quantize_nvfp4(x, two_dimensional=square, uniform=uniform(x), amax=amax)


PRECISION = QuantizedPrecision(
    name="nvfp4",
    order=60,
    description="FP4 products; an E4M3 scale for every 16 values under a scale a tensor",
    peak="fp4",
    multiple_of=32,  # not its blocks' 16: rows of codes begin at 16 bytes, two codes in each, whichever way a product reads
    options={"disable_rht": False, "disable_stochastic_rounding": False},
    hardware=Hardware((10, 0), "B200, GB200"),
    # An E4M3 scale is a 17th off at most, so the largest value lies between 5.6 and 6.4. Rounded by chance it may become 4.
    scales=Scaling("E4M3", 4 / 6, 16),
    square_weights=True,
    codes=E2M1,
    quantize=quantize,
    te_recipe="NVFP4BlockScaling",
    te_available="is_nvfp4_available",
    operand_bytes=1 / 2 + 1 / 16,
    underflow_limit=0.6,  # it loses 45 % of a gradient and still trains, as stochastic rounding makes up for it on average
)
