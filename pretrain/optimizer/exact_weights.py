"""Exact BF16 weights: a BF16 weight and a 16-bit remainder that together are an FP32 master.

The master is the weight that the optimizer updates. With `weights: fp32` or `weights: bf16`, the
master is the parameter itself. With `weights: bf16_exact`, the master is an FP32 value that is
stored in two tensors: a BF16 parameter, and 16 remainder bits in the state of the optimizer.
docs/evidence.md compares the three modes.

The encoding is the same as in Transformer Engine's `store_param_remainders`. The BF16 weight is the
master rounded to nearest. The int16 remainder has the low 16 bits of the master:

    weight    = (master + 0x8000) >> 16        (integers; rounds to nearest, ties away from zero)
    remainder = low 16 bits of master, read as int16; negative only if the weight was rounded up
    master    = (weight << 16) + remainder     (a negative remainder undoes the rounding up)

Hardware rounds ties to even instead. The weight differs from hardware rounding only if the master
is an exact tie, which is about one value in 65,536. Ties cannot be rounded to even here: each even
BF16 number would then be the rounded value of 65,537 masters, but the 16 bits of the remainder
distinguish only 65,536 of them.

The integer arithmetic preserves zeros, subnormals, infinities and signs. Every NaN is replaced by
the NaN 0x7FC00000. Without the replacement, the NaN 0x7FFFFFFF, which GPUs produce, would carry
into the sign bit and become -0.0. The damaged weight would then not be noticed.
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
    """Return the FP32 masters of BF16 weights and int16 remainders. This is the inverse of `split`.

    The two tensors may have any values, including pairs of values that `split` never returns.
    """
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def master_of(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """Return the FP32 master of a weight that is stored in any of the three modes.

    `weight` and `remainder` are plain tensors or local parts of DTensors. `remainder` is None
    unless the weight is exact BF16.
    """
    return weight.to(torch.float32) if remainder is None else join(weight, remainder)
