"""FP32 and BF16, the precisions that do not quantize operands.

In BF16, weights that are stored in FP32 are cast to BF16 copies before they are multiplied.
"""

from pretrain.precision.formats.definition import Precision, StepCosts

FP32 = Precision(
    name="fp32",
    description="FP32 products; the reference for comparisons with all other precisions",
    compute_dtype="float32",
)
BF16 = Precision(
    name="bf16",
    description="BF16 products with FP32 accumulation",
    costs=StepCosts(0.699, hidden=24, mlp=18, qkv=12, unfused=1.8, grouped=0.87),
    in_graphs=True,
)
