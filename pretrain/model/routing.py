"""The routers of a mixture of experts: the loss that balances what they choose, as transformers has it, and how balanced it is.

`model.config.output_router_logits: true` asks for that loss, in transformers' words, and `router_aux_loss_coef` says how much of
it is trained. transformers adds it to a batch's mean loss; here a batch is a microbatch, and it is added once for each label: a
step trains the mean of its microbatches' losses, each with the weight of its labels. It is computed in FP32, over the tokens that
have a label.

A hook keeps a router's logits beside it until the model's forward has ended. transformers' own way of asking for them cannot be
compiled. Where experts are grouped, logits are FP32 (`in_fp32`), which most architectures round to BF16: a token's choices are
the largest of them, and where two are nearly alike rounding would choose.
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
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from foundation.errors import InputError
from packing.arrow import IGNORE
from pretrain.model.experts import GroupedExperts
from pretrain.precision.grouped import stacked_experts

STARVED = 0.1  # of the tokens that a layer's experts get on average: who gets fewer learns little


def check(hf: PreTrainedModel) -> None:
    """InputError where a model that is to balance its experts has no loss for it that is known here."""
    if _balancing_loss(hf) is None or not _routers(hf):
        lacks = (
            "no loss that balances experts by their router's logits, or one of its own"
            if _routers(hf)
            else "no routers"
        )
        raise InputError(
            f"`model.config.output_router_logits: true`: {type(hf).__name__} has {lacks}; set it to false"
        )


class Routing:
    """The routers of one model, of which there are some."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self.routers, self._hf = _routers(hf), hf
        self.coefficient: float | None = (
            hf.router_aux_loss_coef if getattr(hf.config, "output_router_logits", None) else None
        )
        # FP32 [layers, experts]: tokens of each expert, over the mean of its layer
        self.loads: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        for router, index in self.routers.items():
            router.register_forward_hook(_keeping_logits(index))

    @classmethod
    def of(cls, hf: PreTrainedModel) -> Routing | None:
        """None where the model has no routers."""
        return cls(hf) if _routers(hf) else None

    def add_loss(self, loss: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        """The summed `loss` of a forward that has ended, over labels [...] int64; in training with the balance of its experts,
        once for each label, where the model asks for that."""
        logits = [vars(router).pop("router_logits") for router in self.routers]
        if not training:
            return loss
        labelled = labels.flatten() != IGNORE
        number, sums = labelled.sum(), {"router_entropy": labelled.sum() * _entropy(logits)}
        if self.coefficient is not None:
            # without a label it is multiplied by zero, and must be a number
            counted = labelled | ~labelled.any()
            of_experts = tuple(each.float() for each in logits)
            balance = _balancing_loss(self._hf)(
                of_experts, logits[0].shape[-1], self._hf.num_experts_per_tok, counted
            )
            loss = loss + self.coefficient * number * balance
            sums["router_loss"] = (number * balance).detach()
        self._sums = {name: each + self._sums.get(name, 0) for name, each in sums.items()}
        return loss

    @property
    def names(self) -> list[str]:
        """Of what is added up: `router_entropy`, as a share of that of an even choice among all experts, and where it is trained
        `router_loss`, not multiplied by its coefficient."""
        return ["router_entropy", *(["router_loss"] if self.coefficient is not None else [])]

    def take_sums(self) -> dict[str, Tensor]:
        """Sums over labels since this was last called, by `names`; empty where nothing was forwarded. Loads are forgotten too."""
        sums, self._sums = self._sums, {}
        for experts in self._experts:
            experts.load = None
        return sums

    def balance(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """How the layers have spread tokens over their experts since `take_sums` was last called: the largest load of an expert,
        as a multiple of its layer's mean, and the share of experts that starve. Empty where experts are not grouped. Collective.
        """
        if not self._experts:
            return {}
        nothing = torch.zeros(1, device=accelerator.device)
        loads = [
            nothing.expand(len(each.down_proj)) if each.load is None else each.load.float()
            for each in self._experts
        ]
        loads = accelerator.reduce(torch.stack(loads), reduction="sum")
        self.loads = loads / loads.mean(1, keepdim=True).clamp(min=1)
        return {
            "expert_load": self.loads.max(),
            "starved_experts": (self.loads < STARVED).float().mean(),
        }

    def in_fp32(self) -> None:
        """Let the routers of experts that can be grouped compute their logits in FP32, and with them what follows as far as they
        do not round it themselves. Operands and gradients stay in the dtype of activations. A router of several matrices, of
        which one takes what another gives, stays as it is."""
        blocks = {name.rpartition(".")[0] for name, _ in stacked_experts(self._hf)}
        for name, router in self._hf.named_modules():
            matrices = (
                [each for each in router.parameters() if each.dim() == 2]
                if router in self.routers
                else []
            )
            if len(matrices) == 1 and name.rpartition(".")[0] in blocks:
                router.forward = _with_logits_in_fp32(router.forward)

    @cached_property
    def _experts(self) -> list[GroupedExperts]:
        return [module for module in self._hf.modules() if isinstance(module, GroupedExperts)]


class _LinearInFP32(TorchFunctionMode):
    """While entered, a linear's result is the FP32 sum of its products."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (_linear_in_fp32 if function is F.linear else function)(*args, **(kwargs or {}))


def _with_logits_in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a router, with its one product in FP32."""

    @torch.compiler.disable
    def forward_in_fp32(*inputs: Any, **options: Any) -> Any:
        with _LinearInFP32():
            return forward(*inputs, **options)

    return forward_in_fp32


def _linear_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _Logits.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class _Logits(torch.autograd.Function):
    """x [tokens, hidden] times weight [experts, hidden], transposed, as it adds up: in FP32, not rounded to BF16."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return F.linear(x.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)
        return dy @ weight, dy.t() @ x


def forget_logits(layer: nn.Module) -> None:
    """What the routers of a layer have kept when it was computed again in backward: nobody asks for it, and it would keep the
    whole layer's activations."""
    for module in layer.modules():
        vars(module).pop("router_logits", None)


@torch.no_grad()
def _entropy(logits: list[Tensor]) -> Tensor:
    log_p = [torch.log_softmax(each.float(), dim=-1) for each in logits]
    return -torch.stack([(each.exp() * each).sum(-1).mean() for each in log_p]).mean() / math.log(
        logits[0].shape[-1]
    )


def _keeping_logits(index: int) -> Callable[..., None]:
    def keep(router: nn.Module, inputs: Any, output: Any) -> None:
        router.router_logits = output[index] if isinstance(output, tuple) else output

    return keep


def _routers(hf: PreTrainedModel) -> dict[nn.Module, int]:
    """Its routers in order, each with the place of its logits in what it returns, as transformers says it."""
    recorded = (getattr(hf.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    return (
        {module: recorded.index for module in hf.modules() if isinstance(module, kind)}
        if kind
        else {}
    )


def _balancing_loss(hf: PreTrainedModel) -> Callable[..., Tensor] | None:
    """transformers' own, from the file of the architecture."""
    return getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
