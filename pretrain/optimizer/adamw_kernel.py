"""AdamW on a GPU: one launch for all tensors of the same dtypes, each value read once and written once.

A launch finds its tensors through a table of their addresses. With a launch a tensor an H200 waits for the host for some 15 ms a
step of Qwen3-1.7B, which has 310 tensors: 0.9 % of a step in FP8.

The arithmetic is written rounding by rounding, and the compiler may not fuse what is written apart. All ways to store weights
share it, so FP32 masters and BF16 weights with remainders get the same bits. It rounds where torch's CPU operations round: lerp_
and addcmul_ use fused multiply-adds, here tl.fma. This holds for beta1 above 0.5, where lerp_ changes its formula. The square
root here is the nearest FP32 number; torch's on a CPU may be the one beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # values of a program: 8 a thread, 16 bytes of BF16
ALIGNMENT = 16  # bytes that a thread loads at once
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _pointers(row, column: tl.constexpr, dtype: tl.constexpr, at, aligned: tl.constexpr):
    """Pointers to the values `at` of the tensor in `column` of a row of the table."""
    pointers = tl.load(row + column).to(tl.pointer_type(dtype)) + at
    return tl.multiple_of(pointers, _ALIGNMENT) if aligned else pointers


@triton.jit
def _adamw(
    # int64 [tensors, 7]: addresses of weight, remainder, gradient and moments; how many values; the
    # first program
    table,
    tensor_of,  # int64 [programs]: its row of the table
    frozen,  # int32 [programs]: lost updates
    clip_coefficient,  # FP32 scalar
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias_correction2_sqrt,
    eps,
    negative_step_size,
    learning_rate,
    weight_decay,
    weight_type: tl.constexpr,
    gradient_type: tl.constexpr,
    moment_type: tl.constexpr,
    exact: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + 7 * tl.load(tensor_of + program)
    # 64 bits: one tensor may have more than 2**31 values.
    at = (program - tl.load(row + 6)) * block + tl.arange(0, block)
    inside = at < tl.load(row + 5)
    if aligned:  # neighbours are inside or outside together, so that they may be loaded together
        inside = tl.max_constancy(inside, _ALIGNMENT)
    weight_at = _pointers(row, 0, weight_type, at, aligned)
    remainder_at = _pointers(row, 1, tl.int16, at, aligned)
    exp_avg_at = _pointers(row, 3, moment_type, at, aligned)
    exp_avg_sq_at = _pointers(row, 4, moment_type, at, aligned)
    weight = tl.load(weight_at, mask=inside, other=0)
    gradient = tl.load(_pointers(row, 2, gradient_type, at, aligned), mask=inside, other=0).to(
        tl.float32
    )
    exp_avg = tl.load(exp_avg_at, mask=inside, other=0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_at, mask=inside, other=0).to(tl.float32)
    if exact:  # exact_weights.join
        remainder = tl.load(remainder_at, mask=inside, other=0)
        bits = (weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainder.to(tl.int32)
        before = bits.to(tl.float32, bitcast=True)
    else:
        before = weight.to(tl.float32)

    gradient = gradient * tl.load(clip_coefficient)
    exp_avg = tl.fma(one_minus_beta1, gradient - exp_avg, exp_avg)
    exp_avg_sq = tl.fma(one_minus_beta2 * gradient, gradient, exp_avg_sq * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
    after = before * decay + tl.div_rn(negative_step_size * exp_avg, denominator)

    tl.store(exp_avg_at, exp_avg.to(moment_type), mask=inside)
    tl.store(exp_avg_sq_at, exp_avg_sq.to(moment_type), mask=inside)
    if exact:  # exact_weights.split
        bits = tl.where(after == after, after.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(
            weight_at,
            ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
            mask=inside,
        )
        tl.store(remainder_at, bits.to(tl.int16), mask=inside)
        stored = after
    else:
        rounded = after.to(weight_type)
        tl.store(weight_at, rounded, mask=inside)
        stored = rounded.to(tl.float32)
    moved = (learning_rate != 0) & ((exp_avg != 0) | ((weight_decay != 0) & (before != 0)))
    # A counter per program: adding to one counter would queue a million programs up behind each other.
    tl.store(frozen + program, tl.sum((inside & moved & (stored == before)).to(tl.int32)))


def update_by_kernel(updates: Sequence[tuple[Any, Any]], clip_coefficient: Tensor | None) -> Tensor:
    """`_update_all` of pretrain.optimizer.adamw on a GPU: pairs of ParameterTensors and Hyperparameters."""
    device = updates[0][0].weight.device
    coefficient = torch.ones((), device=device) if clip_coefficient is None else clip_coefficient
    alike = defaultdict(list)
    for tensors, hyper in updates:
        addresses = [0 if each is None else each.view(-1).data_ptr() for each in tensors]
        values = tensors.weight.numel()
        # unless FSDP2 cut a tensor at an odd place
        aligned = all(number % ALIGNMENT == 0 for number in (*addresses, values))
        types = (_TYPES[each.dtype] for each in (tensors.weight, tensors.gradient, tensors.exp_avg))
        alike[hyper, (*types, tensors.remainder is not None, aligned)].append((*addresses, values))
    return torch.stack(
        [_launch(tensors, hyper, kind, coefficient) for (hyper, kind), tensors in alike.items()]
    ).sum()


def _launch(
    tensors: Sequence[Sequence[int]], hyper: Any, kind: Sequence[Any], coefficient: Tensor
) -> Tensor:
    """Update the tensors of one `kind`, each given by its addresses and its number of values; returns the lost updates."""
    rows, programs = [], 0
    for each in tensors:
        rows.append((*each, programs))
        programs += triton.cdiv(each[-1], BLOCK)
    device = coefficient.device
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )
    ends = torch.cat([table[1:, 6], table.new_full((1,), programs)])
    tensor_of = torch.repeat_interleave(ends - table[:, 6], output_size=programs)
    frozen = torch.empty(programs, dtype=torch.int32, device=device)
    # Floats, as Triton would compile a kernel of its own for the integers 0 and 1.
    numbers = (
        hyper.decay,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.bias_correction2_sqrt,
        hyper.eps,
    )
    numbers = map(float, (*numbers, -hyper.step_size, hyper.learning_rate, hyper.weight_decay))
    with torch.cuda.device_of(frozen):
        _adamw[(programs,)](
            table,
            tensor_of,
            frozen,
            coefficient,
            *numbers,
            *kind,
            BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return frozen.sum()
