"""AdamW for a recipe's weights, its parameter groups, the gradient norm, and its state by parameter name.

`weights: fp32` keeps parameters, gradients and moments in FP32. `weights: bf16` keeps all of them in BF16, half the memory, and
loses every update smaller than half a unit in the last place of its weight. `weights: bf16_exact` has BF16 parameters, FP32
gradients and moments, and the 16 bits that make a parameter an FP32 master: no update is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pretrain.model.wrapping import clear_main_gradients, gradient_of
from pretrain.optimizer.exact_adamw import ExactAdamW
from pretrain.settings.recipe import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings, *, exact: bool) -> ExactAdamW:
    """AdamW; `exact` keeps the remainders of BF16 parameters. `decay: matrices` spares norms and biases, which decay does not
    help; `decay: all` is torch's default."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if settings.decay == "all" or p.dim() >= 2]
    spared = [p for p in parameters if settings.decay == "matrices" and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return ExactAdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        exact=exact,
        moments={None: None, "fp32": torch.float32, "bf16": torch.bfloat16}[settings.moments],
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
    if sharded := [norm for norm in norms if isinstance(norm, DTensor)]:  # stacked first: one exchange, and not one a parameter
        whole.append(torch.linalg.vector_norm(torch.stack(sharded)).full_tensor())
    return torch.linalg.vector_norm(torch.stack(whole))


def clip_coefficient(norm: Tensor, limit: float | None) -> Tensor | None:
    """The factor that brings gradients of this norm to at most `limit`, an FP32 scalar on its device; None: no limit."""
    return None if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


def clear_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Forget the gradients of the step that is done.

    Main gradients are cleared in place. So are gradients under DistributedDataParallel, views into its buckets: when dropped,
    they would return beside these, a second copy of all gradients, for as long as microbatches accumulate. Any others give their
    memory back.
    """
    clear_main_gradients(model.parameters())
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


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
