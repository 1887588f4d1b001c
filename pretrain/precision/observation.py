"""What the matrix products of a model really multiplied, seen from underneath: the operands as they reach the product.

Settings, class names and flags say what was meant. A module may carry the right name and multiply in BF16 all the same, so
nothing here asks a module anything: PyTorch's own products are caught on their way to the kernel, and a low-precision backend
shows the operands it hands to its kernels (`observed_products`). An emulated operand is an ordinary BF16 tensor; what gives it
away is that its values have no more significant bits than the format it stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {"bfloat16": 8, "float32": 24}  # significant bits of a dtype's values, the leading one included


def significant_bits(tensor: Tensor) -> int:
    """The most significant bits, from a value's first one-bit to its last, that any finite value of `tensor` has; waits for the
    device. A tensor of BF16 numbers that were not quantized has 8, one of E4M3 numbers times powers of two 4."""
    mantissa = tensor.float().nan_to_num(0, 0, 0).view(torch.int32) & 0x7FFFFF
    for bits in range(1, 24):
        if not (mantissa & ((1 << (24 - bits)) - 1)).any():
            return bits
    return 24


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
