"""Exact BF16 weights: a BF16 weight and a 16-bit remainder that together are an FP32 master.

The master is the weight that the optimizer updates. With `weights: fp32` or `bf16` it is the
parameter itself. With `weights: bf16_exact` it is an FP32 value, stored as a BF16 parameter and 16
remainder bits in the optimizer. docs/precision.md compares the three modes.

The encoding is that of Transformer Engine's `store_param_remainders`. The BF16 weight is the master
rounded to nearest. The int16 remainder is the low half of the master, unchanged:

    weight    = (master + 0x8000) >> 16        (integers; rounds to nearest, ties away from zero)
    remainder = low 16 bits of master, read as int16: negative exactly where rounding went up
    master    = (weight << 16) + remainder     (a negative remainder undoes the rounding up)

Hardware rounds ties to even instead. A weight differs from hardware rounding only on exact ties,
about one value in 65,536. Rounding ties to even would not fit: an even BF16 number would then be
the rounding of 65,537 masters, and 16 bits distinguish only 65,536.

The arithmetic on integers keeps zeros, subnormals, infinities and signs. Every NaN becomes the NaN
0x7FC00000. A GPU's own NaN, 0x7FFFFFFF, would carry into the sign bit and become -0.0, which looks
like a healthy weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 masters into BF16 weights and int16 remainders of the same shape."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    weight = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    # The conversion to int16 keeps the low 16 bits, whatever the sign.
    return weight, bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 masters of BF16 weights and int16 remainders: the inverse of `split`.

    For a pair that does not come from `split`, the result is the sum of their bits.
    """
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def master_of(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """Return the FP32 master of a weight in any mode.

    `remainder` is None unless the weight is exact BF16. Both are plain tensors or local parts.
    """
    return weight.to(torch.float32) if remainder is None else join(weight, remainder)
