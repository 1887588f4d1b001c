"""FP32: what every other precision is compared with."""

from __future__ import annotations

from pretrain.precision.formats.definition import Precision


class Fp32(Precision):
    name = "fp32"
    order = 0
    colour = "#7A7A7A"
    description = "FP32 products; the reference that every other precision is compared with"
    compute_dtype = "float32"
    peak = "fp32"
    accelerate_name = "no"


PRECISION = Fp32()
