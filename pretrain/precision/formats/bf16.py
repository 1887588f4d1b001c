"""BF16: FP32 weights are cast to BF16 working copies at each use, BF16 weights are used as they are."""

from __future__ import annotations

from pretrain.precision.formats.definition import Precision


class Bf16(Precision):
    name = "bf16"
    order = 10
    colour = "#1F77B4"
    description = "BF16 products with FP32 accumulation"
    peak = "bf16"
    accelerate_name = "bf16"
    fallback_rank = 1


PRECISION = Bf16()
