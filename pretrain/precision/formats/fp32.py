"""FP32: what every other precision is compared with."""

from __future__ import annotations

from pretrain.precision.formats.definition import Precision, Tolerance


class Fp32(Precision):
    name = "fp32"
    order = 0
    description = "FP32 products; the reference that every other precision is compared with"
    compute_dtype = "float32"
    peak = "fp32"
    tolerance = Tolerance(loss=1e-4, gradient_norm=1e-3, cosine=0.9999)
    accelerate_name = "no"


PRECISION = Fp32()
