"""AdamW on a GPU: one launch a tensor, each value read once and written once.

The arithmetic is written rounding by rounding, and the compiler may not fuse what is written apart. All ways to store weights
share it, so FP32 masters and BF16 weights with remainders get the same bits. It rounds where torch's CPU operations round: lerp_
and addcmul_ use fused multiply-adds, here tl.fma. This holds for beta1 above 0.5, where lerp_ changes its formula. The square
root here is the nearest FP32 number; torch's on a CPU may be the one beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.optimizer.adamw_update import Hyperparameters, ParameterTensors

BLOCK, WARPS = 1024, 4  # values of a program: 8 a thread, 16 bytes of BF16


@triton.jit
def _adamw(
    weight_at,
    remainder_at,  # int16, in mode bf16_exact; or None
    gradient_at,
    exp_avg_at,
    exp_avg_sq_at,
    frozen,  # int32 [programs]: lost updates
    clip_coefficient,  # FP32 scalar
    values,  # of the tensor
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias_correction2_sqrt,
    eps,
    negative_step_size,
    learning_rate,
    weight_decay,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    # 64 bits: one tensor may have more than 2**31 values.
    at = program.to(tl.int64) * block + tl.arange(0, block)
    inside = at < values
    weight = tl.load(weight_at + at, mask=inside, other=0)
    gradient = tl.load(gradient_at + at, mask=inside, other=0).to(tl.float32)
    exp_avg = tl.load(exp_avg_at + at, mask=inside, other=0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_at + at, mask=inside, other=0).to(tl.float32)
    if remainder_at is not None:  # adamw_update.join
        remainder = tl.load(remainder_at + at, mask=inside, other=0)
        bits = (weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainder.to(tl.int32)
        before = bits.to(tl.float32, bitcast=True)
    else:
        before = weight.to(tl.float32)

    gradient = gradient * tl.load(clip_coefficient)
    exp_avg = tl.fma(one_minus_beta1, gradient - exp_avg, exp_avg)
    exp_avg_sq = tl.fma(one_minus_beta2 * gradient, gradient, exp_avg_sq * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
    after = before * decay + tl.div_rn(negative_step_size * exp_avg, denominator)

    tl.store(exp_avg_at + at, exp_avg.to(exp_avg_at.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_at + at, exp_avg_sq.to(exp_avg_sq_at.dtype.element_ty), mask=inside)
    if remainder_at is not None:  # adamw_update.split
        bits = tl.where(after == after, after.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(weight_at + at, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(remainder_at + at, bits.to(tl.int16), mask=inside)
        stored = after
    else:
        rounded = after.to(weight_at.dtype.element_ty)
        tl.store(weight_at + at, rounded, mask=inside)
        stored = rounded.to(tl.float32)
    moved = (learning_rate != 0) & ((exp_avg != 0) | ((weight_decay != 0) & (before != 0)))
    # A counter per program: adding to one counter would queue a million programs up behind each other.
    tl.store(frozen + program, tl.sum((inside & moved & (stored == before)).to(tl.int32)))


def update_by_kernel(tensors: ParameterTensors, hyper: Hyperparameters, clip_coefficient: Tensor | None) -> Tensor:
    """`adamw_update.update_parameter` for tensors on a GPU; returns counts of lost updates, int32, to be summed."""
    values, device = tensors.weight.numel(), tensors.weight.device
    coefficient = torch.ones((), device=device) if clip_coefficient is None else clip_coefficient
    if coefficient.dtype != torch.float32 or coefficient.device != device:
        raise ValueError(f"the clip coefficient is FP32 on {device}, not {coefficient.dtype} on {coefficient.device}")
    # Floats, as Triton would compile a kernel of its own for the integers 0 and 1.
    numbers = (hyper.decay, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.bias_correction2_sqrt, hyper.eps)
    numbers = map(float, (*numbers, -hyper.step_size, hyper.learning_rate, hyper.weight_decay))
    frozen = torch.empty(triton.cdiv(values, BLOCK), dtype=torch.int32, device=device)
    with torch.cuda.device_of(frozen):
        _adamw[(len(frozen),)](
            *(tensors.weight, tensors.remainder, tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq),
            *(frozen, coefficient, values, *numbers, BLOCK),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return frozen
