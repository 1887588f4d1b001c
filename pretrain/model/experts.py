"""A mixture's experts by grouped products, in the precision whose turn it is, in place of transformers' module.

The module holds the very Parameters of the one it stands in for, under the same names. Tokens are sorted by expert (`arrange`),
all of them go through two grouped products with the activation between, and each gets the weighted sum of its choices. Routers
stay transformers': which experts a token chooses, and with which weights, comes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from foundation.overrides import overridden
from pretrain.precision.grouped import (
    STACKS,
    GroupedCall,
    Groups,
    PlainGroupedProduct,
    arrange,
    stacked_experts,
)
from pretrain.precision.product import (
    LinearFunction,
    PrecisionContext,
    Product,
    TakesTurns,
    summing_where,
)


def group_experts(hf: PreTrainedModel, context: PrecisionContext) -> None:
    """Puts `GroupedExperts` in the place of each module that holds stacked experts, unless they are there; in place."""
    for name, module in list(stacked_experts(hf)):
        if not isinstance(module, GroupedExperts):
            hf.set_submodule(name, GroupedExperts(module, name, context))


@contextmanager
def recording_choices(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Yields a list for each module of experts in order, which is filled while entered: with the experts of each token, int64
    [tokens, choices], one forward after the other."""
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    with ExitStack() as recording:
        for each in experts:
            recording.enter_context(overridden(each, seen=[]))
        yield [each.seen for each in experts]


class GroupedLinear(TakesTurns):
    """One stack of experts' weights as a grouped product."""

    def __init__(self, name: str, context: PrecisionContext) -> None:
        self.name, self.context, self.products = name, context, {}
        self._plain = PlainGroupedProduct(name)

    @property
    def now(self) -> Product:
        """What multiplies in the forward under way."""
        return self.low or self._plain

    def __call__(self, rows: Tensor, stack: Tensor, groups: Groups) -> Tensor:
        """rows [rows, in] by expert, stack [experts, out, in] -> [rows, out]."""
        product = self.now
        # whose observers look on
        context = PrecisionContext(None, rows.dtype) if product is self._plain else self.context
        options = {
            "refresh": context.first_microbatch,
            "differentiable": torch.is_grad_enabled(),
            "groups": groups,
        }
        call, dtype = GroupedCall(product, context, **options), context.compute_dtype
        return LinearFunction.apply(
            rows.to(dtype), summing_where(stack, stack.to(dtype)), None, call
        )


class GroupedExperts(nn.Module):
    """Stands in for the experts of one layer, called `name`."""

    def __init__(self, experts: nn.Module, name: str, context: PrecisionContext) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        # transformers' own: gate and up [rows, 2 width] -> [rows, width]
        self._apply_gate = experts._apply_gate
        usual = experts._apply_gate.__func__.__module__ == "transformers.integrations.moe"
        self._is_swiglu = usual and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
        # int64 [experts]: tokens of each in training since this was last taken
        self.load: Tensor | None = None
        self.seen: list[Tensor] | None = None  # where choices are recorded: those of each forward
        self.stacks = {key: GroupedLinear(f"{name}.{key}", context) for key in STACKS}

    @torch.compiler.disable
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, hidden]; chosen int64 [tokens, choices], with a weight each in `weights` -> [tokens, hidden]."""
        gate_up, down = self.stacks.values()
        groups = arrange(chosen, len(self.down_proj), max(gate_up.now.aligned, down.now.aligned))
        if self.seen is not None:
            self.seen.append(chosen)
        # of a layer that is recomputed all count twice
        if self.training and torch.is_grad_enabled():
            self.load = groups.load if self.load is None else self.load + groups.load
        rows = gate_up(Dispatched.apply(hidden, groups), self.gate_up_proj, groups)
        has_kernel = self._is_swiglu and in_bf16_on_a_gpu(rows)
        rows = down(
            _SwiGLU.apply(rows) if has_kernel else self._apply_gate(rows), self.down_proj, groups
        )
        return Combined.apply(rows, weights, groups).to(hidden.dtype)


# ── Tokens to rows, and back ────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Forward and backward only read where they write, so that each sum has one order.


class Dispatched(torch.autograd.Function):
    """Tokens [tokens, features] as rows by expert [rows, features], zeros where there is none."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups, ctx.tokens = groups, len(x)
        return x.index_select(0, groups.choice // (len(groups.place) // len(x))).index_fill_(
            0, groups.empty, 0
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        place = ctx.groups.place
        if in_bf16_on_a_gpu(dy):
            from pretrain.model import experts_kernel  # brings Triton, which takes a while

            return experts_kernel.combine(dy.contiguous(), place, None, ctx.tokens), None
        return dy.index_select(0, place).view(ctx.tokens, -1, dy.shape[1]).sum(1), None


class Combined(torch.autograd.Function):
    """The sum [tokens, features] of each token's rows [rows, features] times its weights [tokens, choices], in FP32."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups = groups
        if in_bf16_on_a_gpu(rows):
            from pretrain.model import experts_kernel

            return experts_kernel.combine(rows, groups.place, weights, len(weights))
        choices = rows.index_select(0, groups.place).view(*weights.shape, -1).float()
        return (choices * weights.float()[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows, weights), groups = ctx.saved_tensors, ctx.groups
        if in_bf16_on_a_gpu(rows):
            from pretrain.model import experts_kernel

            d_rows, d_weights = experts_kernel.combine_backward(
                dy.contiguous(), rows, groups.place, weights
            )
        else:
            choices = rows.index_select(0, groups.place).view(*weights.shape, -1).float()
            d_weights = (choices * dy[:, None].float()).sum(-1)
            of_choices = (dy[:, None].float() * weights.float()[..., None]).flatten(0, 1)
            d_rows = of_choices.to(rows.dtype).index_select(0, groups.choice)
        return d_rows.index_fill_(0, groups.empty, 0), d_weights.to(weights.dtype), None


def in_bf16_on_a_gpu(x: Tensor) -> bool:
    """Whether there are kernels for it."""
    return x.is_cuda and x.dtype == torch.bfloat16


class _SwiGLU(torch.autograd.Function):
    """gate and up [rows, 2 width] -> silu(gate) * up, BF16 on a GPU: in one kernel, and one for its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor) -> Tensor:
        from pretrain.model.fused import activation_kernel

        ctx.save_for_backward(hidden)
        return activation_kernel.swiglu(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Tensor:
        from pretrain.model.fused import activation_kernel

        return activation_kernel.swiglu_backward(dy.contiguous(), *ctx.saved_tensors)[0]
