"""AdamW for every way to store weights, its parameter groups, gradient norm and clipping, and its state by parameter name.

Every way (pretrain.optimizer.adamw_update) takes the same update in FP32, so BF16 weights with remainders follow the trajectory
of FP32 weights bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pretrain.model.distributed import local_part
from pretrain.model.gradients import clear_main_gradients, gradient_of
from pretrain.optimizer.adamw_update import Hyperparameters, ParameterTensors, convert_weight, mode_of, update_parameters
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.settings.recipe import OptimizerSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exact: bool = True,
        moments: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.exact = exact
        self.moments = moments
        self._updated = 0  # values, in the last step
        self._lost: list[tuple[list[ParameterTensors], Tensor]] = []  # parameters, and how many updates each has lost in it

    def materialise(self) -> None:
        """Allocate all state now: what does not fit fails at the start, and a checkpoint has a place to load into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            bf16 = mode_of(parameter, None) == "bf16"
            moments = self.moments or (torch.bfloat16 if bf16 and not self.exact else torch.float32)
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter, dtype=moments) for name in MOMENTS}
            if bf16 and self.exact:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    @torch.no_grad()
    def master(self, parameter: Tensor) -> Tensor:
        """The weight that updates apply to, FP32; of a DTensor, this process's part."""
        remainder = self._state_of(parameter).get("remainder")
        return convert_weight(local_part(parameter), None if remainder is None else local_part(remainder), "fp32")[0]

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Store the FP32 `master`, a tensor like the parameter or its local part, as this parameter's mode does."""
        remainder = self._state_of(parameter).get("remainder")
        weight, rest = convert_weight(local_part(master), None, mode_of(local_part(parameter), remainder))
        local_part(parameter).copy_(weight)
        if remainder is not None and rest is not None:
            local_part(remainder).copy_(rest)

    @torch.no_grad()
    def step(self, *, clip_coefficient: Tensor | None = None) -> None:
        """One update of every parameter with a gradient, each gradient times `clip_coefficient`, an FP32 scalar on its device.

        Clipping here spares reading and writing all gradients once more, and the rounding of clipped BF16 gradients.
        """
        self._updated, self._lost = 0, []
        counts, alike = [], defaultdict(list)
        for group in self.param_groups:
            numbers = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is None:
                    continue
                state = self._state_of(parameter)
                counts.append(state["step"])
                tensors = _tensors_of(parameter, gradient, state)
                if tensors.weight.numel():  # a process may hold no part of a sharded parameter
                    hyper = Hyperparameters(*numbers, int(state["step"].item()) + 1)
                    alike[hyper, tensors.weight.device, tensors.kind].append(tensors)
                    self._updated += tensors.weight.numel()
        for (hyper, device, _), parameters in alike.items():
            self._lost.append((parameters, _update_on(device)(parameters, hyper, clip_coefficient)))
        if counts:
            torch._foreach_add_(counts, 1)

    def frozen_counts(self) -> Tensor:
        """Counts of the last step on the parameters' device, int64 [2]: this process's values whose update was lost, and all.

        Lost means that the update was not zero and the stored weight (in mode bf16_exact: the master) is what it was before. An
        update is zero where the learning rate is, or where neither its first moment nor its decay moves the weight.
        """
        if not self._lost:
            return torch.zeros(2, dtype=torch.int64)
        lost = torch.cat([counts for _, counts in self._lost]).sum()
        return torch.stack([lost, torch.full_like(lost, self._updated)])

    def frozen_by_weight(self) -> dict[int, Tensor]:
        """This process's count of lost updates in the last step of each weight, by the address of its local part."""
        return {
            each.weight.data_ptr(): count
            for parameters, counts in self._lost
            for each, count in zip(parameters, counts, strict=True)
        }


def _update_on(device: torch.device) -> Callable[[Sequence[ParameterTensors], Hyperparameters, Tensor | None], Tensor]:
    if device.type != "cuda":
        return update_parameters
    from pretrain.optimizer.adamw_kernel import update_by_kernel  # needs Triton, which machines without a GPU may lack

    return update_by_kernel


def _tensors_of(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> ParameterTensors:
    weight, gradient = local_part(parameter), local_part(gradient)
    if not weight.is_contiguous():
        raise ValueError(f"a parameter of shape {list(weight.shape)} and strides {weight.stride()} is not contiguous")
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"gradients are FP32 or BF16, not {gradient.dtype}")
    remainder = local_part(state["remainder"]) if "remainder" in state else None
    return ParameterTensors(weight, remainder, gradient.contiguous(), *(local_part(state[name]) for name in MOMENTS))


def build_optimizer(model: nn.Module, settings: OptimizerSettings, *, exact: bool) -> ExactAdamW:
    """AdamW as the settings say: matrices and embeddings decay, norms and biases do not. `exact` keeps the remainders of BF16
    parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    not_decayed = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return ExactAdamW(
        [group for group in groups if group["params"]],
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
    if sharded := [norm for norm in norms if isinstance(norm, DTensor)]:  # stacked first, so that one exchange serves them all
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
    frozen, total = accelerator.reduce(optimizer.frozen_counts().to(accelerator.device), reduction="sum").tolist()
    return frozen / max(total, 1)


def most_frozen(optimizer: ExactAdamW, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
    """The three parameters of which the step just done lost the largest share of updates, and that share; the largest first,
    parameters that lost none left out. Collective."""
    counts, none = optimizer.frozen_by_weight(), torch.zeros((), dtype=torch.int64)
    parts = {name: local_part(parameter) for name, parameter in model.named_parameters()}
    frozen = torch.stack([counts.get(part.data_ptr(), none).to(accelerator.device) for part in parts.values()])
    values = torch.tensor([part.numel() for part in parts.values()], device=accelerator.device)
    table = accelerator.reduce(torch.stack([frozen, values]), reduction="sum").tolist()
    shares = {name: lost / max(size, 1) for name, lost, size in zip(parts, *table, strict=True) if lost}
    return dict(sorted(shares.items(), key=lambda each: -each[1])[:3])


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
    """How many updates the moments have seen, on which their bias correction rests: training steps less the skipped ones."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)
