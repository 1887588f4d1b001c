"""FP32 and BF16: products of unquantized operands.

Under BF16, FP32 weights are cast to BF16 working copies at each use.
"""

from pretrain.precision.formats.definition import Precision

FP32 = Precision(
    name="fp32",
    description="FP32 products; the reference that every other precision is compared with",
    compute_dtype="float32",
    peak="fp32",
)
BF16 = Precision(name="bf16", description="BF16 products with FP32 accumulation", peak="bf16")
