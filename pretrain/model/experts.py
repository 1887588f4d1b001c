"""Replaces transformers' mixture-of-experts by two grouped products in the current precision.

The module holds the Parameters of the module that it replaces, under the same names. It sorts the
tokens by expert (`arrange`), multiplies all of them in two grouped products with the activation in
between, and adds up each token's choices by their weights. Routers stay transformers': the experts
that a token chooses, and their weights, are inputs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from foundation.overrides import overridden
from pretrain.precision.grouped import ROW_MULTIPLE, STACKS, Groups, arrange, stacked_experts
from pretrain.precision.product import LinearState, PrecisionContext


def group_experts(hf: PreTrainedModel, context: PrecisionContext) -> None:
    """Replace all modules of stacked experts by `GroupedExperts`, in place."""
    for name, module in list(stacked_experts(hf)):
        if not isinstance(module, GroupedExperts):
            hf.set_submodule(name, GroupedExperts(module, name, context))


@contextmanager
def recording_choices(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record the experts of each token: int64 [tokens, choices] for each forward.

    Yields one list for each module of experts, in order. It is filled while the context is entered.
    """
    modules = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    recorded: list[list[Tensor]] = [[] for _ in modules]
    with ExitStack() as recording:
        for module, seen in zip(modules, recorded, strict=True):
            recording.enter_context(overridden(module, seen=seen))
        yield recorded


class GroupedExperts(nn.Module):
    """Replaces the experts of one layer, called `name`."""

    def __init__(self, experts: Any, name: str, context: PrecisionContext) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        # Transformers' activation of gate and up: [rows, 2 width] -> [rows, width].
        self._apply_gate = experts._apply_gate
        is_default = experts._apply_gate.__func__.__module__ == "transformers.integrations.moe"
        self._is_swiglu = is_default and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
        # int64 [experts]: tokens of each expert in training since `load` was last taken.
        self.load: Tensor | None = None
        # The choices of each forward, if they are recorded.
        self.seen: list[Tensor] | None = None
        self.stacks = {key: LinearState(f"{name}.{key}", context) for key in STACKS}

    @torch.compiler.disable
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' output [tokens, hidden].

        `hidden` is [tokens, hidden], `chosen` int64 [tokens, choices] with the weight of each
        choice in `weights`.
        """
        gate_up, down = self.stacks.values()
        multiples = [gemm.row_multiple for gemm in (gate_up.low, down.low) if gemm]
        groups = arrange(chosen, len(self.down_proj), max(multiples, default=ROW_MULTIPLE))
        if self.seen is not None:
            self.seen.append(chosen)
        # If the layer is recomputed, the tokens of all experts count twice.
        if self.training and torch.is_grad_enabled():
            self.load = groups.load if self.load is None else self.load + groups.load
        rows = Dispatched.apply(hidden, groups)
        rows = gate_up(rows, self.gate_up_proj, ends=groups.ends)
        activate = _SwiGLU.apply if self._is_swiglu and in_bf16_on_a_gpu(rows) else self._apply_gate
        rows = down(activate(rows), self.down_proj, ends=groups.ends)
        return Combined.apply(rows, weights, groups).to(hidden.dtype)


# ── Tokens to rows, and back ────────────────────────────────────────────────────────────────────
#
# Forward and backward gather: each value is written once, so each sum has one order.


class Dispatched(torch.autograd.Function):
    """Tokens [tokens, features] -> rows by expert [rows, features], zero where a row is empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.call = (groups.place, len(x))
        choices = len(groups.place) // len(x)
        return x.index_select(0, groups.choice // choices).index_fill_(0, groups.empty, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        place, tokens = ctx.call
        if in_bf16_on_a_gpu(dy):
            from pretrain.model import experts_kernel  # imports Triton, which takes a while

            return experts_kernel.combine(dy.contiguous(), place, None, tokens), None
        return dy.index_select(0, place).view(tokens, -1, dy.shape[1]).sum(1), None


class Combined(torch.autograd.Function):
    """Rows by expert -> the weighted sum of each token's rows [tokens, features], in FP32.

    `weights` is [tokens, choices].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups = groups
        if in_bf16_on_a_gpu(rows):
            from pretrain.model import experts_kernel

            return experts_kernel.combine(rows, groups.place, weights, len(weights))
        choices = rows.index_select(0, groups.place).view(*weights.shape, -1).float()
        return (choices * weights.float()[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        groups = ctx.groups
        if in_bf16_on_a_gpu(rows):
            from pretrain.model import experts_kernel

            d_rows, d_weights = experts_kernel.combine_backward(
                dy.contiguous(), rows, groups.place, weights
            )
        else:
            choices = rows.index_select(0, groups.place).view(*weights.shape, -1).float()
            d_weights = (choices * dy[:, None].float()).sum(-1)
            d_choices = (dy[:, None].float() * weights.float()[..., None]).flatten(0, 1)
            d_rows = d_choices.to(rows.dtype).index_select(0, groups.choice)
        return d_rows.index_fill_(0, groups.empty, 0), d_weights.to(weights.dtype), None


def in_bf16_on_a_gpu(x: Tensor) -> bool:
    """Return whether Triton kernels can compute on x."""
    return x.is_cuda and x.dtype == torch.bfloat16


class _SwiGLU(torch.autograd.Function):
    """Gate and up [rows, 2 width] -> silu(gate) * up, in BF16 on a GPU, in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        from pretrain.model.fused import activation_kernel

        ctx.save_for_backward(hidden)
        return activation_kernel.swiglu(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        from pretrain.model.fused import activation_kernel

        return activation_kernel.swiglu_backward(dy.contiguous(), *ctx.saved_tensors)[0]
