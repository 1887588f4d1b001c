"""AdamW for every way to store weights, among them BF16 weights that lose no update.

`fp32`        an FP32 parameter is its own master.
`bf16`        a BF16 parameter is its own master: updates under half a unit in its last place are lost.
`bf16_exact`  a BF16 parameter and 16 remainder bits in the optimizer are an FP32 master (pretrain.exact_weights), at 2 more bytes
              a parameter where a separate master takes 4, and the model computes on BF16 weights without casting them.

All three take the same update, Loshchilov and Hutter's (arXiv:1711.05101, algorithm 2), in FP32 and in the order of operations of
torch.optim.AdamW's single-tensor path. They differ in how a master is read and written, so bf16_exact walks the very trajectory of
fp32, bit for bit. On a CPU the operations are torch's own. On a GPU one Triton kernel does them all and rounds where they do (for
beta1 above 0.5: torch's lerp has another formula below), except that its square root is the nearest FP32 number, which torch's on
a CPU need not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pretrain.exact_weights import Weights, convert, join, mode_of, split

if TYPE_CHECKING:
    from pretrain.exact_adamw_kernel import FusedUpdate

MOMENTS = ("exp_avg", "exp_avg_sq")


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


class ExactAdamW(torch.optim.Optimizer):
    """AdamW over FP32 and BF16 parameters, plain or DTensor, with or without the remainders that make BF16 exact.

    `exact`: keep remainders for BF16 parameters. FP32 parameters need none.
    `moments`: dtype of both moments, FP32 or BF16. None: FP32 where updates are exact, BF16 for plain BF16 parameters, as in torch.
    BF16 moments halve their memory, but a second moment never shrinks then with beta2 at 0.999: one part in a thousand is less
    than half a unit in its last place.

    State of a parameter: `exp_avg`, `exp_avg_sq`, `remainder` (mode bf16_exact), and `step` on the host, so that nothing waits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exact: bool = True,
        moments: torch.dtype | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"out of range: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}")
        if moments not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"moments are FP32 or BF16, not {moments}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.exact = exact
        self.moments = moments
        self._frozen: list[Tensor] = []
        self._updated = 0

    # ── State ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def materialise(self) -> None:
        """Allocate all state now: what does not fit fails at the start, and a checkpoint has a place to load into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            mode = mode_of(parameter, None)
            keeps_remainder = self.exact and mode == "bf16"
            moments = self.moments or (torch.bfloat16 if mode == "bf16" and not self.exact else torch.float32)
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, dtype=moments)
            if keeps_remainder:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps the dtypes of this optimizer: torch's would cast it all to the parameter's."""
        super().load_state_dict(state_dict)
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_ids, parameters, strict=True):
            self.state.pop(parameter, None)
            if saved := state_dict["state"].get(index):
                fresh = self._state_of(parameter)
                if fresh.keys() != saved.keys():
                    raise ValueError(f"state of parameter {index} is {sorted(saved)}, and {sorted(fresh)} is needed")
                for name, tensor in fresh.items():
                    tensor.copy_(saved[name])

    @torch.no_grad()
    def master(self, parameter: Tensor) -> Tensor:
        """The weight that updates apply to, FP32; of a DTensor, this process's part."""
        remainder = self._state_of(parameter).get("remainder")
        return convert(_local(parameter), None if remainder is None else _local(remainder), "fp32")[0]

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Store the FP32 `master`, a tensor like the parameter or its local part, as this parameter's mode does."""
        remainder = self._state_of(parameter).get("remainder")
        to: Weights = mode_of(_local(parameter), remainder)
        weight, rest = convert(_local(master), None, to)
        _local(parameter).copy_(weight)
        if remainder is not None and rest is not None:
            _local(remainder).copy_(rest)

    # ── Updating ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip_coefficient: Tensor | None = None) -> Any:
        """One update of every parameter with a gradient, each gradient times `clip_coefficient`, an FP32 scalar on its device.

        Clipping here spares reading and writing all gradients once more, and the rounding of clipped BF16 gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._frozen, self._updated = [], 0
        for factors, operands in self._updates():
            self._updated += sum(each.weight.numel() for each in operands)
            if operands[0].weight.is_cuda:
                self._frozen += self._fused(operands, factors, clip_coefficient)
            else:
                self._frozen += [update(each, factors, clip_coefficient) for each in operands]
        return loss

    def _updates(self) -> Iterator[tuple[Factors, list[Operands]]]:
        """What there is to do, gathered by the numbers that it is done with and by device."""
        for group in self.param_groups:
            gathered: dict[tuple[int, torch.device], list[Operands]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                state["step"] += 1
                operands = _operands(parameter, state)
                if operands.weight.numel():  # a process may hold no part of a sharded parameter
                    gathered.setdefault((int(state["step"].item()), operands.weight.device), []).append(operands)
            # Floats, as Triton would compile a kernel of its own for the integers 0 and 1.
            numbers = [float(number) for number in (group["lr"], group["weight_decay"], *group["betas"], group["eps"])]
            for (step, _), operands in gathered.items():
                yield Factors(*numbers, step), operands

    @cached_property
    def _fused(self) -> FusedUpdate:
        from pretrain.exact_adamw_kernel import FusedUpdate  # needs Triton, which machines without a GPU may lack

        return FusedUpdate()

    # ── Frozen updates ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def frozen_counts(self) -> Tensor:
        """Of the last step, on the parameters' device: int64 [2], values whose update was lost and values in all.

        Lost means that the update was not zero and the stored weight (in mode bf16_exact: the master) is what it was before. An
        update is zero where the learning rate is, or where neither its first moment nor its decay moves the weight. Values are
        this process's own: sum the counts over processes before dividing.
        """
        if not self._frozen:
            return torch.zeros(2, dtype=torch.int64)
        frozen = torch.stack([counts.sum(dtype=torch.int64) for counts in self._frozen]).sum()
        return torch.stack([frozen, torch.full_like(frozen, self._updated)])

    def frozen_updates(self) -> Tensor:
        """The fraction of this process's values whose non-zero update left the stored weight unchanged in the last step."""
        frozen, total = self.frozen_counts().double()
        return frozen / total.clamp(min=1)


def update(operands: Operands, factors: Factors, clip_coefficient: Tensor | None) -> Tensor:
    """AdamW on one parameter with torch's operations, in place, on any device; returns how many values' updates were lost.

    The operations and their order are those of torch.optim.adam._single_tensor_adam.
    """
    weight, remainder = operands.weight, operands.remainder
    before = weight.to(torch.float32, copy=True) if remainder is None else join(weight, remainder)
    gradient = operands.gradient.float()
    if clip_coefficient is not None:
        gradient = gradient * clip_coefficient
    master, exp_avg, exp_avg_sq = before.clone(), operands.exp_avg.float(), operands.exp_avg_sq.float()  # FP32 moments: no copies

    if factors.weight_decay != 0:
        master.mul_(factors.decay)
    exp_avg.lerp_(gradient, 1 - factors.beta1)
    exp_avg_sq.mul_(factors.beta2).addcmul_(gradient, gradient, value=1 - factors.beta2)
    denominator = (exp_avg_sq.sqrt() / factors.bias_correction2_sqrt).add_(factors.eps)
    master.addcdiv_(exp_avg, denominator, value=-factors.step_size)

    operands.exp_avg.copy_(exp_avg)
    operands.exp_avg_sq.copy_(exp_avg_sq)
    if remainder is None:
        weight.copy_(master)
        unchanged = weight == before
    else:
        for stored, part in zip((weight, remainder), split(master), strict=True):
            stored.copy_(part)
        unchanged = master == before
    moved = exp_avg != 0
    if factors.weight_decay != 0:
        moved |= before != 0
    return (unchanged & moved).sum() * (factors.learning_rate != 0)


def _operands(parameter: Tensor, state: dict[str, Tensor]) -> Operands:
    weight, gradient = _local(parameter), _local(parameter.grad)
    if not weight.is_contiguous():
        raise ValueError(f"a parameter of shape {list(weight.shape)} and strides {weight.stride()} is not contiguous")
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"gradients are FP32 or BF16, not {gradient.dtype}")
    remainder = _local(state["remainder"]) if "remainder" in state else None
    return Operands(weight, remainder, gradient.contiguous(), _local(state["exp_avg"]), _local(state["exp_avg_sq"]))


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, live; any other tensor as it is."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
