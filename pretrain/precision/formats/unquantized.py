"""FP32 and BF16, the precisions that do not quantize operands.

In BF16, weights that are stored in FP32 are cast to BF16 copies before they are multiplied.
"""

from pretrain.precision.formats.definition import Precision

FP32 = Precision(
    name="fp32",
    description="FP32 products; the reference for comparisons with all other precisions",
    compute_dtype="float32",
)
BF16 = Precision(
    name="bf16",
    description="BF16 products with FP32 accumulation",
    in_graphs=True,
)
