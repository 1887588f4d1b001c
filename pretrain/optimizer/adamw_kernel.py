"""AdamW on a GPU: one launch over the blocks of many tensors, each value read once and written once.

A launch takes all parameters of one group whose dtypes agree. It finds its tensors through a table of addresses on the device, so
a model of hundreds of tensors, most of them small, costs one launch and not hundreds. The table is copied again only when an
address has changed: gradients may be allocated anew every step.

The arithmetic is written rounding by rounding, and the compiler may not fuse what is written apart. All modes share it, so FP32
masters and BF16 weights with remainders get the same bits. It rounds where torch's CPU operations round: lerp_ and addcmul_ use
fused multiply-adds, here tl.fma. This holds for beta1 above 0.5, where lerp_ changes its formula. The square root here is the
nearest FP32 number; torch's on a CPU may be the one beside it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.optimizer.adamw_update import Hyperparameters, ParameterTensors

_ALIGNMENT = tl.constexpr(16)  # bytes a thread loads at once; also the count of values that a tensor must have a multiple of

_Kind = tuple[torch.dtype, torch.dtype, torch.dtype, bool, bool]  # of weight, gradient, moments; has remainders; is aligned
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _pointers(row, column: tl.constexpr, dtype: tl.constexpr, at, aligned: tl.constexpr):
    """Returns pointers to the values `at` of the tensor in `column` of a table row; address 0 stands for no tensor and is never
    read."""
    pointers = tl.load(row + column).to(tl.pointer_type(dtype)) + at
    return tl.multiple_of(pointers, _ALIGNMENT) if aligned else pointers


@triton.jit
def _adamw(
    table,  # int64 [tensors, 6]: addresses of weight, remainder, gradient, exp_avg, exp_avg_sq, and how many values they have
    blocks,  # int32 [programs, 2]: tensor, and which block of it
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
    count: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + 6 * tl.load(blocks + 2 * program)
    # 64 bits: one tensor may have more than 2**31 values.
    at = tl.load(blocks + 2 * program + 1).to(tl.int64) * block + tl.arange(0, block)
    inside = at < tl.load(row + 5)
    if aligned:  # neighbours are inside or outside together, so that they may be loaded together
        inside = tl.max_constancy(inside, _ALIGNMENT)

    weight_at = _pointers(row, 0, weight_type, at, aligned)
    remainder_at = _pointers(row, 1, tl.int16, at, aligned)
    exp_avg_at = _pointers(row, 3, moment_type, at, aligned)
    exp_avg_sq_at = _pointers(row, 4, moment_type, at, aligned)
    weight = tl.load(weight_at, mask=inside, other=0)
    gradient = tl.load(_pointers(row, 2, gradient_type, at, aligned), mask=inside, other=0).to(tl.float32)
    exp_avg = tl.load(exp_avg_at, mask=inside, other=0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_at, mask=inside, other=0).to(tl.float32)
    if exact:  # adamw_update.join
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
    if exact:  # adamw_update.split
        bits = tl.where(after == after, after.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(weight_at, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(remainder_at, bits.to(tl.int16), mask=inside)
        stored = after
    else:
        rounded = after.to(weight_type)
        tl.store(weight_at, rounded, mask=inside)
        stored = rounded.to(tl.float32)
    if count:
        moved = (learning_rate != 0) & ((exp_avg != 0) | ((weight_decay != 0) & (before != 0)))
        # A counter per program: adding to one counter would queue a million programs up behind each other.
        tl.store(frozen + program, tl.sum((inside & moved & (stored == before)).to(tl.int32)))


@dataclass(frozen=True)
class FusedLaunch:
    """What one launch needs on the device, kept from step to step."""

    kind: _Kind
    rows: list[tuple[int, ...]]  # those of `table`
    table: Tensor
    blocks: Tensor
    frozen: Tensor

    def frozen_by_weight(self) -> dict[int, Tensor]:
        """How many of its values the last update of each weight lost, int64 scalars on its device, by the weight's address."""
        counts = torch.zeros(len(self.rows), dtype=torch.int64, device=self.frozen.device)
        counts.index_add_(0, self.blocks[:, 0].long(), self.frozen.long())
        return {row[0]: count for row, count in zip(self.rows, counts, strict=True)}


@dataclass
class FusedUpdate:
    """Updates the parameters of a group, once a step, in one launch for each combination of dtypes."""

    block: int = 1024  # values a program takes; with 4 warps 8 a thread, 16 bytes of BF16
    warps: int = 4
    count: bool = True  # frozen updates; benchmarks alone leave them out
    _launches: dict[tuple[_Kind, int], FusedLaunch] = field(default_factory=dict)

    def __call__(
        self, parameters: list[ParameterTensors], hyper: Hyperparameters, clip_coefficient: Tensor | None
    ) -> list[Tensor]:
        """Update `parameters`, all on one device, in place; returns counts of lost updates, to be summed."""
        return self.launch(self.prepare(parameters), hyper, clip_coefficient)

    def prepare(self, parameters: list[ParameterTensors]) -> list[FusedLaunch]:
        """The launches that update `parameters`, all on one device. The caller keeps their tensors until `launch` was called."""
        kinds: dict[_Kind, list[tuple[int, ...]]] = defaultdict(list)
        for each in parameters:
            row = _row(each)
            kinds[_kind_of(each, row)].append(row)
        return [self._prepare(kind, rows, parameters[0].weight.device) for kind, rows in kinds.items()]

    def launch(self, launches: list[FusedLaunch], hyper: Hyperparameters, clip_coefficient: Tensor | None) -> list[Tensor]:
        """Update the parameters that `launches` were prepared for; returns counts of lost updates, to be summed."""
        device = launches[0].table.device
        coefficient = torch.ones((), device=device) if clip_coefficient is None else clip_coefficient
        if coefficient.dtype != torch.float32 or coefficient.device != device:
            raise ValueError(f"the clip coefficient is FP32 on {device}, not {coefficient.dtype} on {coefficient.device}")
        return [self._launch(each, hyper, coefficient) for each in launches]

    def _launch(self, launch: FusedLaunch, hyper: Hyperparameters, coefficient: Tensor) -> Tensor:
        weight_type, gradient_type, moment_type, exact, aligned = launch.kind
        with torch.cuda.device_of(launch.table):
            _adamw[(len(launch.blocks),)](
                launch.table,
                launch.blocks,
                launch.frozen,
                coefficient,
                hyper.decay,
                1 - hyper.beta1,
                hyper.beta2,
                1 - hyper.beta2,
                hyper.bias_correction2_sqrt,
                hyper.eps,
                -hyper.step_size,
                hyper.learning_rate,
                hyper.weight_decay,
                _TYPES[weight_type],
                _TYPES[gradient_type],
                _TYPES[moment_type],
                exact,
                aligned,
                self.count,
                self.block,
                num_warps=self.warps,
                enable_fp_fusion=False,
            )
        return launch.frozen

    def _prepare(self, kind: _Kind, rows: list[tuple[int, ...]], device: torch.device) -> FusedLaunch:
        """The tables for `rows`: those of an earlier step where they still hold."""
        key = (kind, rows[0][0])  # groups do not share parameters, so the first weight's address tells launches apart
        known, sizes = self._launches.get(key), [row[-1] for row in rows]
        if known is not None and known.rows == rows:
            return known
        if known is not None and [row[-1] for row in known.rows] == sizes:
            blocks, frozen = known.blocks, known.frozen
        else:
            blocks = self._blocks(sizes).to(device)
            frozen = torch.zeros(len(blocks), dtype=torch.int32, device=device)
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        # A new one: what was prepared before, and was not launched, keeps the table that it was prepared with.
        self._launches[key] = FusedLaunch(kind, rows, table, blocks, frozen)
        return self._launches[key]

    def _blocks(self, sizes: list[int]) -> Tensor:
        """int32 [programs, 2]: for each program its tensor and block, tensor by tensor."""
        counts = torch.tensor([triton.cdiv(size, self.block) for size in sizes])
        tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        firsts = (counts.cumsum(0) - counts)[tensors]
        return torch.stack([tensors, torch.arange(len(tensors)) - firsts], dim=1).to(torch.int32)


def _row(parameter: ParameterTensors) -> tuple[int, ...]:
    remainder = 0 if parameter.remainder is None else parameter.remainder.data_ptr()
    tensors = (parameter.gradient, parameter.exp_avg, parameter.exp_avg_sq)
    return (parameter.weight.data_ptr(), remainder, *(tensor.data_ptr() for tensor in tensors), parameter.weight.numel())


def _kind_of(parameter: ParameterTensors, row: tuple[int, ...]) -> _Kind:
    """What a launch is compiled for. Tensors that FSDP cut at odd places are read value by value, others 16 bytes at a time."""
    aligned = all(number % _ALIGNMENT.value == 0 for number in row)
    dtypes = (parameter.weight.dtype, parameter.gradient.dtype, parameter.exp_avg.dtype)
    return (*dtypes, parameter.remainder is not None, aligned)
