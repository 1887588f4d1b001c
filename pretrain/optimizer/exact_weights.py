"""How weights are stored: FP32, BF16, or BF16 with the 16 bits that make it FP32 again.

The master is the weight that updates apply to: under `weights: fp32` and `bf16` the parameter itself, under `bf16_exact` the FP32
value of a BF16 parameter and 16 remainder bits in the optimizer. docs/precision.md compares the three.

The encoding of bf16_exact is Transformer Engine's `store_param_remainders`. The BF16 weight is the master rounded to nearest. The
int16 remainder is the master's low half, unchanged:

    weight    = (master + 0x8000) >> 16        (integers; rounds to nearest, ties away from zero)
    remainder = low 16 bits of master, read as int16: negative exactly where rounding went up
    master    = (weight << 16) + remainder     (a negative remainder undoes the rounding up)

Hardware rounds ties to even instead, so a weight differs from it on exact ties alone, about one value in 65,536. Ties to even do
not fit: an even BF16 number is then the rounding of 65,537 masters, one more than 16 bits can tell apart. Zeros, subnormals,
infinities and signs are kept, because the arithmetic is on integers. Every NaN becomes the NaN 0x7FC00000: a GPU's own NaN,
0x7FFFFFFF, would carry into the sign bit and read as -0.0, which looks like a healthy weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The BF16 weight and the int16 remainder of FP32 masters, of their shape."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    # Integer conversions keep the low 16 bits, whatever the sign.
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 masters that split() took apart, bit for bit; of any other pair of BF16 and int16, their sum as bits."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def master_of(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """The FP32 master of a weight as any mode stores it, with its remainder in mode bf16_exact. Plain or local tensors."""
    return weight.to(torch.float32) if remainder is None else join(weight, remainder)
