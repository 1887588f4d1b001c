"""Router loss and router statistics of a mixture of experts.

`model.config.output_router_logits: true` asks for the load-balancing loss of transformers, with
coefficient `router_aux_loss_coef`. transformers adds it to the mean loss of a batch. Here a batch
is a microbatch, and the loss is added once for each label: a step minimizes the mean of its
microbatches' losses, weighted by their labels. It is computed in FP32 over the tokens with a label.

A hook stores the logits on each router until the forward of the model has ended. The way of
transformers to return them cannot be compiled. If experts are grouped, logits are FP32 (`in_fp32`).
Most architectures round them to BF16. A token chooses the experts with the largest logits, and if
two are almost equal, rounding would decide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from foundation.errors import InputError
from packing.arrow import IGNORE
from pretrain.model.experts import GroupedExperts
from pretrain.precision.grouped import stacked_experts

# An expert is starved if it gets less than this share of its layer's mean load. It learns little.
STARVED = 0.1


def check(hf: PreTrainedModel) -> None:
    """Raise InputError if `hf` has no router or no load-balancing loss that is supported."""
    routers = _routers(hf)
    if routers and _balancing_loss(hf) is not None:
        return
    if routers:
        problem = "no loss that balances experts by the logits of their router, or its own loss"
    else:
        problem = "no routers"
    raise InputError(
        f"`model.config.output_router_logits: true`: {type(hf).__name__} has {problem}; "
        "set it to false"
    )


class Routing:
    """The routers of a model with a mixture of experts.

    Attributes:
        routers: The router modules in order, with the index of the logits in their output.
        coefficient: Factor of the router loss, or None if it is not trained.
        loads: Number of tokens of each expert, divided by the mean of its layer, FP32 [layers,
            experts]. Set by `balance`.
    """

    def __init__(self, hf: Any) -> None:
        self.routers = _routers(hf)
        self._hf = hf
        self.coefficient: float | None = None
        if getattr(hf.config, "output_router_logits", None):
            self.coefficient = hf.router_aux_loss_coef
        self.loads: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        for router, index in self.routers.items():
            router.register_forward_hook(_keeping_logits(index))

    @classmethod
    def of(cls, hf: PreTrainedModel) -> Routing | None:
        """Return the routing of a model, or None if it has no routers."""
        return cls(hf) if _routers(hf) else None

    def add_loss(self, loss: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        """Add the router loss of a forward that has ended to its summed `loss`.

        In training the router loss is added once for each label, if the model asks for it, and the
        sums for `take_sums` are updated. In evaluation `loss` is returned unchanged. `labels` are
        int64 of any shape.
        """
        logits = [vars(router).pop("router_logits") for router in self.routers]
        if not training:
            return loss
        is_labelled = labels.flatten() != IGNORE
        label_count = is_labelled.sum()
        sums = {"router_entropy": label_count * _entropy(logits)}
        if self.coefficient is not None:
            # Without any label all tokens count. The loss is then multiplied by zero, but it must
            # be finite.
            mask = is_labelled | ~is_labelled.any()
            balance = _balancing_loss(self._hf)(
                tuple(layer_logits.float() for layer_logits in logits),
                logits[0].shape[-1],
                self._hf.num_experts_per_tok,
                mask,
            )
            loss = loss + self.coefficient * label_count * balance
            sums["router_loss"] = (label_count * balance).detach()
        self._sums = {name: value + self._sums.get(name, 0) for name, value in sums.items()}
        return loss

    @property
    def names(self) -> list[str]:
        """Names of the sums.

        `router_entropy` is relative to an even choice among all experts. `router_loss`, if it is
        trained, is not multiplied by its coefficient.
        """
        return ["router_entropy", *(["router_loss"] if self.coefficient is not None else [])]

    def take_sums(self) -> dict[str, Tensor]:
        """Return and reset the sums over labels since the last call, by `names`; reset loads too.

        Return an empty dictionary if there was no forward in training.
        """
        sums = self._sums
        self._sums = {}
        for experts in self._experts:
            experts.load = None
        return sums

    def balance(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """Return how evenly tokens were distributed over experts since the last `take_sums`.

        `expert_load` is the largest load of an expert as a multiple of its layer's mean.
        `starved_experts` is the share of experts with a load below STARVED. Return an empty
        dictionary if experts are not grouped. Collective.
        """
        if not self._experts:
            return {}
        zero = torch.zeros(1, device=accelerator.device)
        loads = [
            zero.expand(len(experts.down_proj)) if experts.load is None else experts.load.float()
            for experts in self._experts
        ]
        loads = accelerator.reduce(torch.stack(loads), reduction="sum")
        self.loads = loads / loads.mean(1, keepdim=True).clamp(min=1)
        return {
            "expert_load": self.loads.max(),
            "starved_experts": (self.loads < STARVED).float().mean(),
        }

    def in_fp32(self) -> None:
        """Compute the logits of routers in FP32, if their experts can be grouped.

        Later results, such as the weights of experts, are FP32 as far as the router does not round
        them itself. Operands and gradients stay in the dtype of activations. A router with several
        matrices is not changed, because one matrix may read the result of another.
        """
        blocks = {name.rpartition(".")[0] for name, _ in stacked_experts(self._hf)}
        for name, router in self._hf.named_modules():
            if router not in self.routers or name.rpartition(".")[0] not in blocks:
                continue
            matrices = [parameter for parameter in router.parameters() if parameter.dim() == 2]
            if len(matrices) == 1:
                router.forward = _with_logits_in_fp32(router.forward)

    @cached_property
    def _experts(self) -> list[GroupedExperts]:
        return [module for module in self._hf.modules() if isinstance(module, GroupedExperts)]


class _LinearInFP32(TorchFunctionMode):
    """Replace `F.linear` by a product with an FP32 result while the mode is active."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.linear:
            function = _linear_in_fp32
        return function(*args, **(kwargs or {}))


def _with_logits_in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of a router so that its linear returns FP32."""

    @torch.compiler.disable
    def forward_in_fp32(*inputs: Any, **options: Any) -> Any:
        with _LinearInFP32():
            return forward(*inputs, **options)

    return forward_in_fp32


def _linear_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` with an FP32 result."""
    y = _Logits.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class _Logits(torch.autograd.Function):
    """x [tokens, hidden] times the transpose of weight [experts, hidden], in FP32.

    The result is not rounded to the dtype of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return F.linear(x.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)
        return dy @ weight, dy.t() @ x


def forget_logits(layer: nn.Module) -> None:
    """Drop the logits that routers stored when `layer` was recomputed in backward.

    Nothing reads them, and they would keep all activations of the layer alive.
    """
    for module in layer.modules():
        vars(module).pop("router_logits", None)


@torch.no_grad()
def _entropy(logits: list[Tensor]) -> Tensor:
    """Return the mean entropy of the routers, relative to that of an even choice."""
    entropies = []
    for layer_logits in logits:
        log_p = torch.log_softmax(layer_logits.float(), dim=-1)
        entropies.append((log_p.exp() * log_p).sum(-1).mean())
    return -torch.stack(entropies).mean() / math.log(logits[0].shape[-1])


def _keeping_logits(index: int) -> Callable[..., None]:
    """Return a forward hook that stores the logits on the router.

    `index` is their position if the router returns a tuple.
    """

    def keep(router: nn.Module, inputs: Any, output: Any) -> None:
        router.router_logits = output[index] if isinstance(output, tuple) else output

    return keep


def _routers(hf: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the routers in order, with the index of the logits in their output.

    Both come from the model's own record of what transformers can return.
    """
    recorded = (getattr(hf.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    if recorded is None or kind is None:
        return {}
    return {module: recorded.index for module in hf.modules() if isinstance(module, kind)}


def _balancing_loss(hf: PreTrainedModel) -> Any:
    """Return the load-balancing loss from the transformers file of the architecture, if any."""
    return getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
