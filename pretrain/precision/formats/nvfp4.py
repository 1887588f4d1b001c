"""NVFP4: FP4 with one E4M3 scale per block and one FP32 scale per tensor.

A block has 16 values in activations and gradients, and 16x16 values in weights. With
`disable_2d_quantization`, it has 16 values in weights too. By default, the last 15 % of the layers
stay in BF16. torchtitan also keeps 15 % of the layers in BF16 when it trains in NVFP4, and Megatron
Bridge keeps 4 of 32 layers.
"""

from typing import Any

from pretrain.precision import quantizers
from pretrain.precision.formats.definition import Given, Hardware, QuantizedPrecision, Scaling


def _quantize(x: Any, given: Given) -> quantizers.Quantized:
    """Quantize the Tensor x [rows, features] as Transformer Engine's NVFP4BlockScaling does."""
    settings = given.settings
    scopes = ("all", "weights" if given.role == "weight" else "activations")
    selects = settings.nvfp4_4over6 in scopes and given.role != "grad_output"
    amax = given.amax
    if settings.row_scaled_activation and given.role == "input":
        # `OperandStatistics` passes sampled blocks as the rows of x. `amax` is then the amax of the
        # complete row that each block comes from.
        amax = amax if amax is not None and amax.dim() else x.abs().amax(-1, keepdim=True)
    return quantizers.blocks.quantize_nvfp4(
        x,
        two_dimensional=given.square,
        uniform=given.uniform,
        amax=amax,
        error=settings.nvfp4_4over6_err_mode if selects else None,
        largest_scale=256.0 if selects and settings.nvfp4_4over6_e4m3_use_256 in scopes else 448.0,
    )


PRECISION = QuantizedPrecision(
    name="nvfp4",
    description="FP4 products; one E4M3 scale for every 16 values and one FP32 scale per tensor",
    peak="fp4",
    # The block size, 16, would not suffice: in both layouts, a row of codes must take a multiple of
    # 16 bytes, and two codes take one byte.
    multiple_of=32,
    options={
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "backward_override": None,
    },
    hardware=Hardware((10, 0), "B200, GB200"),
    # Rounding a scale to E4M3 changes it by at most 1/17. So the largest value of a block, divided
    # by its scale, lies between 5.6 and 6.4. Stochastic rounding can round it down to 4. With
    # `nvfp4_4over6`, the scale may map it to a value between 3.7 and 4.3, which is rounded to 4.
    scales=Scaling("E4M3", 4 / 6, 16),
    square_weights=True,
    codes=quantizers.E2M1,
    quantize=_quantize,
    served_as="NVFP4",
    te_recipe="NVFP4BlockScaling",
    te_available="is_nvfp4_available",
    operand_bytes=1 / 2 + 1 / 16,
    keeps_last=0.15,
    # Training works although 45 % of a gradient's values become zero, because stochastic rounding
    # preserves the expectation of each value.
    underflow_limit=0.6,
    changed_by={"backward_override": {"plain_backward": True}},
)
