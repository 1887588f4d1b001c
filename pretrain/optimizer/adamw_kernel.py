"""AdamW as a Triton kernel. One launch updates all parameters that have the same dtypes.

The kernel also computes the directions of Muon from its momentum, and applies its updates.

Each value is read once and written once. A separate launch for each parameter would be slow: with
the 310 parameters of Qwen3-1.7B, an H200 would wait for the host for about 15 ms per step, 0.9 % of
a step in FP8. So one launch updates many parameters, and reads the addresses of their tensors from
a table.

All roundings are explicit in the code, and the compiler is not allowed to fuse operations. FP32
weights and BF16 weights with remainders are updated by the same code, so their masters are equal
bit for bit. The kernel computes the same operations as torch on a CPU, and rounds at the same
places. `lerp_` and `addcmul_` of torch use fused multiply-adds, so the kernel computes them by
`tl.fma`. There are two differences from torch. For a beta1 of 0.5 or less, `lerp_` uses another
formula. And the square root of the kernel is correctly rounded, while the square root of torch on a
CPU may be wrong in the last place.
"""

# Kernel arguments without annotations are allowed in this file, because Triton reads annotations
# and accepts its own types only.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of values that a program updates. Each thread has 8 values, which are 16 bytes in BF16.
BLOCK = 1024
WARPS = 4
# Number of bytes that a thread loads at once.
ALIGNMENT = 16
_ALIGNMENT = tl.constexpr(ALIGNMENT)
# Map torch dtypes to Triton dtypes.
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Kind(NamedTuple):
    """Arguments of the kernel that are equal for all parameters of a launch.

    Attributes:
        weight_type: Triton dtype of the weights.
        gradient_type: Triton dtype of the gradients.
        moment_type: Triton dtype of both moments. FP32 without moments.
        moments: Number of moments, see `ParameterTensors`.
        exact: True for `weights: bf16_exact`.
        aligned: True if all tensors are aligned.
    """

    weight_type: tl.dtype
    gradient_type: tl.dtype
    moment_type: tl.dtype
    moments: int
    exact: bool
    aligned: bool


@triton.jit
def _pointers(row, column: tl.constexpr, dtype: tl.constexpr, index, aligned: tl.constexpr):
    """Return pointers to the values of a tensor at the indices `index`.

    `row` points to a row of the table. `column` is the column with the address of the tensor.
    """
    pointers = tl.load(row + column).to(tl.pointer_type(dtype)) + index
    return tl.multiple_of(pointers, _ALIGNMENT) if aligned else pointers


@triton.jit
def _load(pointers, inside):
    """Return the values at `pointers` in FP32."""
    return tl.load(pointers, mask=inside, other=0).to(tl.float32)


@triton.jit
def _join(weight, remainder):
    """Return the FP32 masters of BF16 weights and int16 remainders, like `exact_weights.join`."""
    bits = (weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainder.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _split(master):
    """Return BF16 weights and int16 remainders of FP32 masters, like `exact_weights.split`."""
    bits = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
    rounded = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return rounded, bits.to(tl.int16)


@triton.jit
def _adamw(
    # int64 [tensors, 7]. The columns are the addresses of weight, remainder, gradient, exp_avg and
    # exp_avg_sq, the number of values, and the index of the tensor's first program.
    table,
    tensor_of,  # int64 [programs]: index of the table's row for each program
    frozen,  # int32 [programs]: output, the number of lost updates of each program
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
    moments: tl.constexpr,
    exact: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    """Update `block` values of one parameter in place, as `ParameterTensors` describes.

    `moments` chooses one of three computations:

    * 2: AdamW updates weight, remainder and both moments.
    * 1: Muon updates its momentum exp_avg. Its `weight` is the buffer of the direction, which is
      overwritten by g + beta2 * (exp_avg - g). Here g is the clipped gradient, and beta2 is the
      momentum. The learning rate is 0, so `frozen` is 0.
    * 0: Muon updates weight and remainder. `gradient` is the direction, and is not clipped.

    If `exact` is True, the weights are BF16 and have remainders. If `aligned` is True, all
    addresses and the number of values are multiples of ALIGNMENT, so that values can be loaded
    together.
    """
    program = tl.program_id(0)
    row = table + 7 * tl.load(tensor_of + program)
    # The index has 64 bits, because a tensor may have more than 2**31 values.
    index = (program - tl.load(row + 6)) * block + tl.arange(0, block)
    inside = index < tl.load(row + 5)
    if aligned:
        # Each group of ALIGNMENT neighbouring values is either completely inside the tensor or
        # completely outside of it, so the values of a group can be loaded together.
        inside = tl.max_constancy(inside, _ALIGNMENT)
    weight_at = _pointers(row, 0, weight_type, index, aligned)
    remainder_at = _pointers(row, 1, tl.int16, index, aligned)
    if exact:
        before = _join(tl.load(weight_at, mask=inside), tl.load(remainder_at, mask=inside))
    else:
        before = _load(weight_at, inside)

    direction = _load(_pointers(row, 2, gradient_type, index, aligned), inside)
    if moments > 0:
        gradient = direction * tl.load(clip_coefficient)
        exp_avg_at = _pointers(row, 3, moment_type, index, aligned)
        direction = _load(exp_avg_at, inside)
        direction = tl.fma(one_minus_beta1, gradient - direction, direction)
        tl.store(exp_avg_at, direction.to(moment_type), mask=inside)
    if moments == 2:
        exp_avg_sq_at = _pointers(row, 4, moment_type, index, aligned)
        square = _load(exp_avg_sq_at, inside) * beta2
        exp_avg_sq = tl.fma(one_minus_beta2 * gradient, gradient, square)
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
        after = before * decay + tl.div_rn(negative_step_size * direction, denominator)
        tl.store(exp_avg_sq_at, exp_avg_sq.to(moment_type), mask=inside)
    elif moments == 1:
        # torch's `lerp` uses this formula for weights of at least 0.5.
        after = tl.fma(beta2 - 1, direction - gradient, direction)
    else:
        after = tl.fma(negative_step_size, direction, before * decay)
    if exact:
        rounded, remainder = _split(after)
        tl.store(remainder_at, remainder, mask=inside)
    else:
        rounded = after.to(weight_type)
        after = rounded.to(tl.float32)
    tl.store(weight_at, rounded, mask=inside)
    has_update = (learning_rate != 0) & ((direction != 0) | ((weight_decay != 0) & (before != 0)))
    # Each program writes its count to a separate element. Atomic additions of all programs to one
    # counter would be slow, because a launch may have a million programs.
    tl.store(frozen + program, tl.sum((inside & has_update & (after == before)).to(tl.int32)))


def prepare_update(
    updates: Sequence[tuple[Any, Any]], clip_coefficient: Tensor | None
) -> Callable[[], Tensor]:
    """Return a function that updates parameters in place on a GPU.

    The function returns the number of lost updates, an int64 scalar on the GPU. The host work is
    done before the function is returned, so that the function can start the kernels at once.
    `pretrain.optimizer.adamw` calls `prepare_update`.

    Args:
        updates: Pairs of `ParameterTensors` and `Hyperparameters`.
        clip_coefficient: FP32 scalar, a factor of the gradients. None means 1.0.
    """
    device = updates[0][0].weight.device
    coefficient = torch.ones((), device=device) if clip_coefficient is None else clip_coefficient
    # Map the arguments `hyper` and `kind` of each launch to its argument `parameters`, which has
    # the addresses and the number of values of each parameter.
    by_kind = defaultdict(list)
    for tensors, hyper in updates:
        addresses = [0 if tensor is None else tensor.view(-1).data_ptr() for tensor in tensors]
        values = tensors.weight.numel()
        # The addresses may be unaligned, because FSDP2 may split a tensor at any position.
        aligned = all(number % ALIGNMENT == 0 for number in (*addresses, values))
        moments = [tensor for tensor in tensors[3:] if tensor is not None]
        kind = Kind(
            weight_type=_TYPES[tensors.weight.dtype],
            gradient_type=_TYPES[tensors.gradient.dtype],
            moment_type=_TYPES[moments[0].dtype if moments else torch.float32],
            moments=len(moments),
            exact=tensors.remainder is not None,
            aligned=aligned,
        )
        by_kind[hyper, kind].append((*addresses, values))
    # A launch has only addresses. Keep the tensors of `updates` until it has started, because some
    # are copies of gradients that nothing else refers to.
    launches = [
        (_prepare_launch(parameters, hyper, kind, coefficient), updates)
        for (hyper, kind), parameters in by_kind.items()
    ]
    return lambda: torch.stack([launch() for launch, _ in launches]).sum()


def _prepare_launch(
    parameters: Sequence[Sequence[int]], hyper: Any, kind: Kind, coefficient: Tensor
) -> Callable[[], Tensor]:
    """Return a function that updates parameters of one kind in one launch.

    The function returns the number of lost updates, as defined by `ExactAdamW.lost_counts`.

    Args:
        parameters: For each parameter, the addresses of its five tensors and its number of values.
        hyper: `Hyperparameters` of all these parameters.
        kind: The kind of all these parameters.
        coefficient: FP32 scalar, a factor of the gradients.
    """
    # The kernel's table. A row has five addresses, the number of values, and the first program of
    # a parameter.
    rows = []
    programs = 0
    for *addresses, values in parameters:
        first_program = programs
        rows.append((*addresses, values, first_program))
        programs += triton.cdiv(values, BLOCK)
    device = coefficient.device
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )
    # The parameter of each program. With `output_size`, the host does not wait for the device.
    tensor_of = torch.repeat_interleave(-(-table[:, 5] // BLOCK), output_size=programs)
    frozen = torch.empty(programs, dtype=torch.int32, device=device)
    numbers = (
        hyper.decay,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.bias_correction2_sqrt,
        hyper.eps,
        -hyper.step_size,
        hyper.learning_rate,
        hyper.weight_decay,
    )

    def launch() -> Tensor:
        with torch.cuda.device_of(frozen):
            _adamw[(programs,)](
                table,
                tensor_of,
                frozen,
                coefficient,
                # Triton would compile separate kernels for the integers 0 and 1.
                *map(float, numbers),
                *kind,
                BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
        return frozen.sum()

    return launch
