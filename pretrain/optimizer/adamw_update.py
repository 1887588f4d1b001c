"""How weights are stored, and one AdamW update of one parameter that is stored in any of these ways.

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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from pretrain.precision.settings import Weights

_NAN = 0x7FC00000
# Values of a parameter that a CPU updates at once. The dozen operations then find them in its caches, a megabyte of each
# tensor; a whole matrix would come from memory for each of them.
_IN_CACHE = 1 << 18
ALIGNMENT = 16  # bytes that a GPU's thread loads at once


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The BF16 weight and the int16 remainder of FP32 masters, of their shape."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    # Integer conversions keep the low 16 bits, whatever the sign.
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 masters that split() took apart, bit for bit; of any other pair of BF16 and int16, their sum as bits."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def mode_of(weight: Tensor, remainder: Tensor | None) -> Weights:
    """The weight mode that stores its weights like this."""
    if remainder is not None:
        return "bf16_exact"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights are FP32 or BF16, not {weight.dtype}")
    return "fp32" if weight.dtype == torch.float32 else "bf16"


def convert_weight(weight: Tensor, remainder: Tensor | None, to: Weights) -> tuple[Tensor, Tensor | None]:
    """A weight of any mode as mode `to` stores it: the weight, and its remainder in mode bf16_exact. Plain or local tensors."""
    if mode_of(weight, remainder) == to:
        return weight, remainder
    if to == "bf16":
        return weight.to(torch.bfloat16), None
    master = weight.to(torch.float32) if remainder is None else join(weight, remainder)
    return (master, None) if to == "fp32" else split(master)


def describe_conversion(source: Weights, to: Weights) -> str | None:
    """What convert_weight() did to a checkpoint of mode `source`, in a sentence for the user; None if nothing."""
    if source == to:
        return None
    lost = "the lower 16 bits of each weight are LOST" if to == "bf16" else "nothing is lost, and updates are exact from here on"
    return f"weights: {source} became {to}; {lost}"


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one update, in double precision; each is rounded to FP32 where it is used, as torch does with its own."""

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    step: int  # of this update, from 1

    @property
    def decay(self) -> float:
        return 1 - self.learning_rate * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.learning_rate / (1 - self.beta1**self.step)

    @property
    def bias_correction2_sqrt(self) -> float:
        return math.sqrt(1 - self.beta2**self.step)


@dataclass(frozen=True)
class ParameterTensors:
    """The local tensors of one parameter: contiguous, of one shape and device."""

    weight: Tensor  # FP32 or BF16
    remainder: Tensor | None  # int16, in mode bf16_exact
    gradient: Tensor  # FP32 or BF16
    exp_avg: Tensor  # FP32 or BF16, both moments alike
    exp_avg_sq: Tensor

    @property
    def addresses(self) -> list[int]:
        """Where weight, remainder, gradient and moments begin; 0 where there is no remainder."""
        tensors = (self.weight, self.remainder, self.gradient, self.exp_avg, self.exp_avg_sq)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype, torch.dtype, bool, bool]:
        """What one launch of the kernel for GPUs has in common: the dtypes of weight, gradient and moments, whether there are
        remainders, and whether all is aligned, as it is unless FSDP2 cut a tensor at an odd place."""
        aligned = all(number % ALIGNMENT == 0 for number in (*self.addresses, self.weight.numel()))
        return self.weight.dtype, self.gradient.dtype, self.exp_avg.dtype, self.remainder is not None, aligned

    def split(self, values: int) -> Iterator[ParameterTensors]:
        """Views of so many values each, fewer the last."""
        tensors = (self.weight, self.remainder, self.gradient, self.exp_avg, self.exp_avg_sq)
        parts = (repeat(None) if each is None else each.view(-1).split(values) for each in tensors)
        return (ParameterTensors(*part) for part in zip(*parts, strict=False))  # a missing remainder has no end


def update_parameters(parameters: Sequence[ParameterTensors], hyper: Hyperparameters, clip_coefficient: Tensor | None) -> Tensor:
    """`update_parameter` of each; returns how many updates each has lost, int64 [parameters]."""
    return torch.stack([update_parameter(each, hyper, clip_coefficient) for each in parameters])


def update_parameter(tensors: ParameterTensors, hyper: Hyperparameters, clip_coefficient: Tensor | None) -> Tensor:
    """Update one parameter in place, its gradient times the FP32 scalar `clip_coefficient`; returns how many updates were lost.

    The algorithm is Loshchilov and Hutter's (arXiv:1711.05101, algorithm 2). The operations and their order are those of
    torch.optim.adam._single_tensor_adam, in FP32 whatever is stored: FP32 masters get torch.optim.AdamW's bits, and BF16 moments
    and plain BF16 weights are rounded once, when they are written. The kernel for GPUs rounds in the same places.

    An update is lost where it was not zero and the stored master did not change (see ExactAdamW.frozen_counts). The count is an
    int64 scalar on any device.
    """
    if not tensors.weight.is_cpu or tensors.weight.numel() <= _IN_CACHE:
        return _update(tensors, hyper, clip_coefficient)
    lost = [_update(part, hyper, clip_coefficient) for part in tensors.split(_IN_CACHE)]
    return torch.stack(lost).sum()


def _update(tensors: ParameterTensors, hyper: Hyperparameters, clip_coefficient: Tensor | None) -> Tensor:
    weight, remainder = tensors.weight, tensors.remainder
    in_place = weight.dtype == torch.float32  # the weight is its own master
    before = weight.to(torch.float32, copy=True) if remainder is None else join(weight, remainder)
    gradient = tensors.gradient.float()
    if clip_coefficient is not None:
        gradient = gradient * clip_coefficient
    master = weight if in_place else before.clone()
    exp_avg, exp_avg_sq = tensors.exp_avg.float(), tensors.exp_avg_sq.float()  # FP32 moments: no copies

    if hyper.weight_decay != 0:
        master.mul_(hyper.decay)
    exp_avg.lerp_(gradient, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)
    denominator = exp_avg_sq.sqrt().div_(hyper.bias_correction2_sqrt).add_(hyper.eps)
    master.addcdiv_(exp_avg, denominator, value=-hyper.step_size)

    if exp_avg is not tensors.exp_avg:
        tensors.exp_avg.copy_(exp_avg)
        tensors.exp_avg_sq.copy_(exp_avg_sq)
    if remainder is None:
        if not in_place:
            weight.copy_(master)
        after = weight
    else:
        for stored, part in zip((weight, remainder), split(master), strict=True):
            stored.copy_(part)
        after = master
    # `bool` of a number is `!= 0` in a tenth of the time that a CPU takes to compare. An infinite weight counts as changed.
    moved = exp_avg.bool()
    if hyper.weight_decay != 0:
        moved |= before.bool()
    return (moved & ~(after - before).bool()).sum() * (hyper.learning_rate != 0)
