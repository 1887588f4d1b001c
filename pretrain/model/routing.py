"""Router loss and router statistics of a mixture of experts.

The router loss is the load-balancing loss of transformers with the coefficient
`router_aux_loss_coef`. `model.config.output_router_logits: true` enables it. transformers adds this
loss to the mean loss of a batch. This module computes the router loss of each microbatch, in FP32
over the tokens with a label, multiplies it by the number of these tokens, and adds it to the summed
loss of the microbatch. The step later divides the sum by the number of its tokens with a label. So
the step minimizes a weighted mean of the router losses of its microbatches. The weight of a
microbatch is its number of tokens with a label.

A hook stores the logits on each router until the forward of the model has ended, because torch
cannot compile transformers' own code that returns them. If experts are grouped, logits are computed
in FP32 (`Routing.compute_logits_in_fp32`). Most architectures of transformers round them to BF16. A
token chooses the experts with the largest logits, and if two logits are almost equal, rounding
could change the choice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cached_property, partial
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

# An expert is starved if its load is less than this fraction of the mean load of its layer. Such an
# expert learns little.
STARVED = 0.1


def check(hf: PreTrainedModel) -> None:
    """Raise InputError if `hf` has no routers, or no load-balancing loss that is supported."""
    if not routers_of(hf) or _balancing_loss(hf) is None:
        raise InputError(
            f"`model.config.output_router_logits: true` requires a router loss, but "
            f"{type(hf).__name__} has no load-balancing loss on router logits that is supported; "
            "set `model.config.output_router_logits: false`, and remove "
            "`model.config.router_aux_loss_coef` if it is set"
        )


class Routing:
    """The routers of a model. Only a mixture of experts has routers.

    Without routers, the methods change nothing and report nothing.

    Attributes:
        routers: Map each router module, in order, to the index of the logits in its output.
        coefficient: Factor of the router loss, or None if the router loss is off.
        loads: Number of tokens of each expert, divided by the mean number of tokens of the experts
            in its layer, FP32 [layers, experts]. None until `balance` sets it.
    """

    def __init__(self, hf: Any) -> None:
        self.routers = routers_of(hf)
        self._hf = hf
        self.coefficient: float | None = None
        if self.routers and getattr(hf.config, "output_router_logits", None):
            self.coefficient = hf.router_aux_loss_coef
        self.loads: Tensor | None = None
        # The sums that `take_sums` returns.
        self._sums: dict[str, Tensor] = {}
        for router, index in self.routers.items():
            router.register_forward_hook(partial(_keep_logits, index))

    def add_loss(self, loss: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        """Return `loss` plus the router loss. Call it after each forward of the model.

        In training, the router loss is multiplied by its coefficient and by the number of tokens
        with a label, and then added. Nothing is added if the router loss is off. The sums that
        `take_sums` returns are updated in both cases. In evaluation, `loss` is returned unchanged.

        Args:
            loss: Sum of the losses of all tokens with a label, an FP32 scalar.
            labels: Labels of the forward, int64 of any shape.
            training: True in training, False in evaluation.
        """
        logits = [vars(router).pop("router_logits") for router in self.routers]
        if not (training and logits):
            return loss
        is_labelled = labels.flatten() != IGNORE
        label_count = is_labelled.sum()
        sums = {"router_entropy": label_count * _entropy(logits)}
        if self.coefficient is not None:
            # If no token has a label, use all tokens. The router loss is then multiplied by zero,
            # but it must be finite.
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

    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums of the router statistics since the last call, and reset the sums.

        The result maps names to FP32 scalars. `router_entropy` is the entropy of the routers
        relative to the entropy of a uniform choice among all experts. `router_loss` is the router
        loss without its coefficient. It is missing if the router loss is off. Each scalar is a sum
        over all forwards in training since the last call. Each summand is the value of one forward,
        times its number of tokens with a label. The loads of the experts are reset too. Return an
        empty dictionary without routers, or without a forward in training since the last call.
        """
        sums = self._sums
        self._sums = {}
        for experts in self._experts:
            experts.load = None
        return sums

    def balance(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """Return statistics of the distribution of tokens over experts since the last `take_sums`.

        The load of an expert is its number of tokens, divided by the mean number of tokens of the
        experts in its layer. `expert_load` is the largest load of all experts. `starved_experts` is
        the fraction of experts with a load below STARVED. Return an empty dictionary if experts are
        not grouped. All ranks must call this method.
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

    def compute_logits_in_fp32(self) -> None:
        """Compute the logits of routers in FP32, if their experts are grouped or have biases.

        Values that a router computes from its logits, such as the weights of experts, are then FP32
        too, unless the code of the router rounds them. The matrix product that computes the logits
        still has operands and gradients in the dtype of activations. A router with several matrices
        is not changed, because the input of one matrix may be the output of another one and not
        activations.
        """
        # Names of the modules that contain grouped or biased experts. Their routers are in the same
        # modules.
        mixtures = {name.rpartition(".")[0] for name, _ in stacked_experts(self._hf, biased=True)}
        for name, router in self._hf.named_modules():
            is_grouped = router in self.routers and name.rpartition(".")[0] in mixtures
            matrices = [parameter for parameter in router.parameters() if parameter.dim() == 2]
            if is_grouped and len(matrices) == 1:
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
    """Return a function that calls a router's `forward` and computes each `F.linear` in FP32."""

    @torch.compiler.disable
    def forward_in_fp32(*inputs: Any, **options: Any) -> Any:
        with _LinearInFP32():
            return forward(*inputs, **options)

    return forward_in_fp32


def _linear_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `F.linear` in FP32, for operands in any dtype."""
    y = _Logits.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class _Logits(torch.autograd.Function):
    """Multiply x [tokens, hidden] by the transpose of weight [experts, hidden].

    The result is FP32. It is not rounded to the dtype of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
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

    Nothing reads these logits, and they would keep all activations of the layer in memory.
    """
    for module in layer.modules():
        vars(module).pop("router_logits", None)


@torch.no_grad()
def _entropy(logits: list[Tensor]) -> Tensor:
    """Return the mean entropy of the routers, divided by the entropy of a uniform choice.

    `logits` has one tensor [tokens, experts] for each router.
    """
    entropies = []
    for layer_logits in logits:
        log_p = torch.log_softmax(layer_logits.float(), dim=-1)
        entropies.append((log_p.exp() * log_p).sum(-1).mean())
    return -torch.stack(entropies).mean() / math.log(logits[0].shape[-1])


def _keep_logits(index: int, router: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook that stores the logits on the router.

    `index` is the position of the logits in the output if the router returns a tuple.
    """
    router.router_logits = output[index] if isinstance(output, tuple) else output


def routers_of(hf: PreTrainedModel) -> dict[nn.Module, int]:
    """Return a dict from each router, in order, to the index of the logits in its output.

    The attribute `_can_record_outputs` of transformers has the class of the routers and the index.
    """
    recorded = (getattr(hf.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    if recorded is None or kind is None:
        return {}
    return {module: recorded.index for module in hf.modules() if isinstance(module, kind)}


def _balancing_loss(hf: PreTrainedModel) -> Any:
    """Return the load-balancing loss function from the architecture's file in transformers.

    Return None if the file has no such function.
    """
    return getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
