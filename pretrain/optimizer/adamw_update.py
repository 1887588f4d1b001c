"""One AdamW update, Loshchilov and Hutter's (arXiv:1711.05101, algorithm 2), on one parameter stored in any weight mode.

The operations and their order are those of torch.optim.adam._single_tensor_adam, in FP32 whatever is stored: FP32 masters get
torch.optim.AdamW's bits, and BF16 moments and plain BF16 weights are rounded once, when they are written. The kernel for GPUs
(pretrain.optimizer.exact_adamw_kernel) rounds in the same places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.optimizer.exact_weights import join, split


@dataclass(frozen=True)
class Factors:
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
class Operands:
    """The local tensors of one parameter: contiguous, of one shape and device."""

    weight: Tensor  # FP32 or BF16
    remainder: Tensor | None  # int16, in mode bf16_exact
    gradient: Tensor  # FP32 or BF16
    exp_avg: Tensor  # FP32 or BF16, both moments alike
    exp_avg_sq: Tensor


def update(operands: Operands, factors: Factors, clip_coefficient: Tensor | None) -> Tensor:
    """Update one parameter in place, its gradient times the FP32 scalar `clip_coefficient`; returns how many updates were lost.

    Lost: not zero, and the master as it is stored is what it was (see ExactAdamW.frozen_counts). int64 scalar, any device.
    """
    weight, remainder = operands.weight, operands.remainder
    in_place = weight.dtype == torch.float32  # the weight is its own master
    before = weight.to(torch.float32, copy=True) if remainder is None else join(weight, remainder)
    gradient = operands.gradient.float()
    if clip_coefficient is not None:
        gradient = gradient * clip_coefficient
    master = weight if in_place else before.clone()
    exp_avg, exp_avg_sq = operands.exp_avg.float(), operands.exp_avg_sq.float()  # FP32 moments: no copies

    if factors.weight_decay != 0:
        master.mul_(factors.decay)
    exp_avg.lerp_(gradient, 1 - factors.beta1)
    exp_avg_sq.mul_(factors.beta2).addcmul_(gradient, gradient, value=1 - factors.beta2)
    denominator = exp_avg_sq.sqrt().div_(factors.bias_correction2_sqrt).add_(factors.eps)
    master.addcdiv_(exp_avg, denominator, value=-factors.step_size)

    if exp_avg is not operands.exp_avg:
        operands.exp_avg.copy_(exp_avg)
        operands.exp_avg_sq.copy_(exp_avg_sq)
    if remainder is None:
        if not in_place:
            weight.copy_(master)
        unchanged = weight == before
    else:
        for stored, part in zip((weight, remainder), split(master), strict=True):
            stored.copy_(part)
        unchanged = master == before
    if not unchanged.any():  # the rule in FP32, and half the work of counting
        return torch.zeros((), dtype=torch.int64, device=weight.device)
    moved = exp_avg != 0
    if factors.weight_decay != 0:
        moved |= before != 0
    return (unchanged & moved).sum() * (factors.learning_rate != 0)
