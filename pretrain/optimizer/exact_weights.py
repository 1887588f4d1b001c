"""BF16 weights whose 16 missing bits are kept beside them: together an FP32 master, exactly. And the ways between weight modes.

A master is 32 bits: a high half, which is a BF16 number, and a low half. The BF16 weight is the master rounded to nearest, the
int16 remainder is the low half, its bits untouched. The weight's bits are then the high half, or one more where rounding went up:

    weight    = (master + 0x8000) >> 16        (integers; rounds to nearest, ties away from zero)
    remainder = low 16 bits of master, read as int16: negative exactly where rounding went up
    master    = (weight << 16) + remainder     (which takes the one back)

This is Transformer Engine's `store_param_remainders` encoding. A weight differs from the round-to-nearest-even that hardware does
on exact ties alone, one value in 65,536 or so. Round to even cannot be had in 16 bits: an even BF16 number is the rounding of
65,537 masters (32,767 on either side, itself, and both ties), one more than a remainder can tell apart.

Zeros, subnormals, infinities and both signs pass through: integer arithmetic does not notice them. NaN alone is changed, to the
one NaN 0x7FC00000: the NaN that a GPU produces, 0x7FFFFFFF, would carry over into the sign and read as -0.0, a healthy weight.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Weights = Literal["fp32", "bf16", "bf16_exact"]

_NAN = 0x7FC00000

_CONVERSIONS: dict[tuple[Weights, Weights], str] = {
    ("fp32", "bf16_exact"): "split each FP32 weight into a BF16 weight and its 16 remaining bits; nothing is lost",
    ("bf16_exact", "fp32"): "joined each BF16 weight and its remainder into the FP32 weight they are; nothing is lost",
    ("bf16", "bf16_exact"): "gave each BF16 weight a remainder of zero; updates are exact from here on",
    ("bf16", "fp32"): "widened each BF16 weight to FP32; updates are exact from here on",
    ("fp32", "bf16"): "rounded each FP32 weight to BF16; its lower 16 bits are LOST",
    ("bf16_exact", "bf16"): "kept each BF16 weight and dropped its remainder; those 16 bits are LOST",
}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The BF16 weight and the int16 remainder of FP32 masters, of their shape."""
    if master.dtype != torch.float32:
        raise ValueError(f"a master is FP32, not {master.dtype}")
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    # Integer conversions keep the low 16 bits, whatever the sign.
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 masters that split() took apart, bit for bit; of any other pair of BF16 and int16, their sum as bits."""
    if weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise ValueError(f"a master is joined from BF16 and int16, not from {weight.dtype} and {remainder.dtype}")
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, live; any other tensor as it is."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def mode_of(weight: Tensor, remainder: Tensor | None) -> Weights:
    """The weight mode that stores its weights like this."""
    if remainder is not None:
        return "bf16_exact"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights are FP32 or BF16, not {weight.dtype}")
    return "fp32" if weight.dtype == torch.float32 else "bf16"


def convert(weight: Tensor, remainder: Tensor | None, to: Weights) -> tuple[Tensor, Tensor | None]:
    """A weight of any mode as mode `to` stores it: the weight, and its remainder in mode bf16_exact. Plain or local tensors."""
    if to not in get_args(Weights):
        raise ValueError(f"no weight mode {to!r}")
    if mode_of(weight, remainder) == to:
        return weight, remainder
    if to == "bf16":
        return weight.to(torch.bfloat16), None
    master = weight.to(torch.float32) if remainder is None else join(weight, remainder)
    return (master, None) if to == "fp32" else split(master)


def describe_conversion(source: Weights, to: Weights) -> str | None:
    """What convert() did to a checkpoint of mode `source`, in a sentence for the user; None if nothing."""
    return None if source == to else f"weights: {source} became {to}: {_CONVERSIONS[source, to]}"
