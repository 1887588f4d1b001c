"""AdamW for every way to store weights, its parameter groups, gradient norm and clipping, and its state by parameter name.

Every way (pretrain.optimizer.exact_weights) takes the same update in FP32, so BF16 weights with remainders follow the trajectory
of FP32 weights bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pretrain.model.gradients import clear_main_gradients, gradient_of, local_part
from pretrain.optimizer.exact_weights import join, split
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.settings.recipe import OptimizerSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

MOMENTS = ("exp_avg", "exp_avg_sq")
# Values of a parameter that a CPU updates at once. The dozen operations then find them in its caches, a megabyte of each
# tensor; a whole matrix would come from memory for each of them.
IN_CACHE = 1 << 18


class ExactAdamW(torch.optim.Optimizer):
    """AdamW over FP32 and BF16 parameters, plain or DTensor, with or without the remainders that make BF16 exact.

    `exact`: keep remainders for BF16 parameters. FP32 parameters need none.
    `moments`: dtype of both moments, FP32 or BF16. None: FP32 where updates are exact; for plain BF16 parameters BF16, as in
    torch. BF16 moments halve their memory, but with beta2 at 0.999 a second moment then never shrinks: one part in a thousand is
    less than half a unit in its last place.

    State of a parameter: `exp_avg`, `exp_avg_sq`, `remainder` (mode bf16_exact), and `step` on the host, so that nothing waits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        exact: bool = True,
        moments: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        """`defaults`: lr, betas, eps and weight_decay of the groups in `params` that do not say them."""
        super().__init__(params, defaults)
        self.exact, self.moments = exact, moments
        # values in the last step, and lost updates among them
        self._updated, self._lost = 0, torch.zeros((), dtype=torch.int64)

    def materialise(self) -> None:
        """Allocate all state now: what does not fit fails at the start, and a checkpoint has a place to load into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            bf16 = parameter.dtype == torch.bfloat16
            moments = self.moments or (torch.bfloat16 if bf16 and not self.exact else torch.float32)
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter, dtype=moments) for name in MOMENTS}
            if bf16 and self.exact:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Store the FP32 `master`, a tensor like the parameter or its local part, as this parameter's mode does."""
        weight, remainder = local_part(master), self._state_of(parameter).get("remainder")
        if remainder is not None:
            weight, rest = split(weight)
            local_part(remainder).copy_(rest)
        local_part(parameter).copy_(weight)

    @torch.no_grad()
    def step(self, *, clip_coefficient: Tensor | None = None) -> None:
        """One update of every parameter with a gradient, each gradient times `clip_coefficient`, an FP32 scalar on its device.

        Clipping here spares reading and writing all gradients once more, and the rounding of clipped BF16 gradients.
        """
        updates: list[Update] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := gradient_of(parameter)) is None:
                    continue
                state = self._state_of(parameter)
                state["step"] += 1
                hyper = Hyperparameters(
                    group["lr"],
                    group["weight_decay"],
                    *group["betas"],
                    group["eps"],
                    int(state["step"]),
                )
                tensors = (
                    parameter,
                    state.get("remainder"),
                    gradient.contiguous(),
                    *(state[name] for name in MOMENTS),
                )
                local = ParameterTensors(
                    *(None if each is None else local_part(each) for each in tensors)
                )
                if local.weight.numel():  # a process may hold no part of a sharded parameter
                    updates.append((local, hyper))
        self._updated = sum(tensors.weight.numel() for tensors, _ in updates)
        self._lost = _update_all(updates, clip_coefficient)

    def frozen_counts(self) -> Tensor:
        """Counts of the last step on the parameters' device, int64 [2]: this process's values whose update was lost, and all.

        Lost means that the update was not zero and the stored weight (in mode bf16_exact: the master) is what it was before. An
        update is zero where the learning rate is, or where neither its first moment nor its decay moves the weight.
        """
        return torch.stack([self._lost, torch.full_like(self._lost, self._updated)])


# ── The update ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Hyperparameters(NamedTuple):
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


class ParameterTensors(NamedTuple):
    """The local tensors of one parameter: contiguous, of one shape and device."""

    weight: Tensor  # FP32 or BF16
    remainder: Tensor | None  # int16, in mode bf16_exact
    gradient: Tensor  # FP32 or BF16
    exp_avg: Tensor  # FP32 or BF16, both moments alike
    exp_avg_sq: Tensor


Update = tuple[ParameterTensors, Hyperparameters]


def _update_all(updates: Sequence[Update], clip_coefficient: Tensor | None) -> Tensor:
    """Update all of these in place, each gradient times the FP32 scalar `clip_coefficient`; returns how many updates were lost
    (ExactAdamW.frozen_counts), an int64 scalar on their device."""
    if updates and updates[0][0].weight.is_cuda:
        # needs Triton, which machines without a GPU may lack
        from pretrain.optimizer.adamw_kernel import update_by_kernel

        return update_by_kernel(updates, clip_coefficient)
    lost = torch.zeros((), dtype=torch.int64)
    for tensors, hyper in updates:
        pieces = (
            repeat(None) if each is None else each.view(-1).split(IN_CACHE) for each in tensors
        )
        for piece in zip(*pieces, strict=False):  # a missing remainder has no end
            lost += _update(ParameterTensors(*piece), hyper, clip_coefficient)
    return lost


def _update(
    tensors: ParameterTensors, hyper: Hyperparameters, clip_coefficient: Tensor | None
) -> Tensor:
    """The algorithm is Loshchilov and Hutter's (arXiv:1711.05101, algorithm 2). The operations and their order are those of
    torch.optim.adam._single_tensor_adam, in FP32 whatever is stored: FP32 masters get torch.optim.AdamW's bits, and BF16 moments
    and plain BF16 weights are rounded once, when they are written. The kernel for GPUs rounds in the same places."""
    weight, remainder = tensors.weight, tensors.remainder
    in_place = weight.dtype == torch.float32  # the weight is its own master
    before = weight.to(torch.float32, copy=True) if remainder is None else join(weight, remainder)
    gradient = tensors.gradient.float()
    if clip_coefficient is not None:
        gradient = gradient * clip_coefficient
    master = weight if in_place else before.clone()
    # FP32 moments: no copies
    exp_avg, exp_avg_sq = tensors.exp_avg.float(), tensors.exp_avg_sq.float()

    if hyper.weight_decay != 0:
        master.mul_(hyper.decay)
    exp_avg.lerp_(gradient, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)
    denominator = exp_avg_sq.sqrt().div_(hyper.bias_correction2_sqrt).add_(hyper.eps)
    master.addcdiv_(exp_avg, denominator, value=-hyper.step_size)

    if exp_avg is not tensors.exp_avg:
        tensors.exp_avg.copy_(exp_avg)
        tensors.exp_avg_sq.copy_(exp_avg_sq)
    if remainder is not None:
        for stored, part in zip((weight, remainder), split(master), strict=True):
            stored.copy_(part)
    elif not in_place:
        weight.copy_(master)
    after = weight if remainder is None else master
    # `bool` of a number is `!= 0` in a tenth of the time that a CPU takes to compare. An infinite weight counts as changed.
    moved = exp_avg.bool()
    if hyper.weight_decay != 0:
        moved |= before.bool()
    return (moved & ~(after - before).bool()).sum() * (hyper.learning_rate != 0)


# ── Around it ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_optimizer(model: nn.Module, settings: OptimizerSettings, *, exact: bool) -> ExactAdamW:
    """AdamW as the settings say: matrices and embeddings decay, norms and biases do not. `exact` keeps the remainders of BF16
    parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    not_decayed = [p for p in parameters if p.dim() < 2]
    return ExactAdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": not_decayed, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        exact=exact,
        moments=getattr(torch, WEIGHT_DTYPES[settings.moments]) if settings.moments else None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm over all gradients, an FP32 scalar on their device, over all shards where they are sharded.

    Summed in FP32 also for BF16 gradients: torch's own clip_grad_norm_ would return a BF16 number of three digits.
    """
    gradients = [gradient for gradient in map(gradient_of, parameters) if gradient is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    whole = [norm for norm in norms if not isinstance(norm, DTensor)]
    # stacked first, so that one exchange serves them all
    if sharded := [norm for norm in norms if isinstance(norm, DTensor)]:
        whole.append(torch.linalg.vector_norm(torch.stack(sharded)).full_tensor())
    return torch.linalg.vector_norm(torch.stack(whole))


def clip_coefficient(norm: Tensor, limit: float | None) -> Tensor | None:
    """The factor that brings gradients of this norm to at most `limit`, an FP32 scalar on its device; None: no limit."""
    return None if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


def clear_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Clear the gradients of the step that is done. Main gradients are cleared in place; any others give their memory back."""
    if sharding := getattr(model, "sharding", None):
        sharding.abandon()
    clear_main_gradients(model.parameters())
    optimizer.zero_grad()


def frozen_share(optimizer: ExactAdamW, accelerator: Accelerator) -> float:
    """The fraction of all parameters whose non-zero update left their stored weight as it was, in the step just done."""
    frozen, total = accelerator.reduce(
        optimizer.frozen_counts().to(accelerator.device), reduction="sum"
    ).tolist()
    return frozen / max(total, 1)


def named_state(optimizer: ExactAdamW, model: nn.Module) -> dict[str, Tensor]:
    """The state tensors as `exp_avg/<parameter name>` and so on, live: writing into them is loading."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[parameter]}": tensor
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, tensor in optimizer.state[parameter].items()
        if key != "step"
    }


def set_updates_done(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Set how many updates the moments have seen, by which their bias is corrected: training steps less the skipped ones."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)
