"""A product that adds its weight's gradient to the weight's sum itself, as those of fused layers do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class AddsToTheSum(torch.autograd.Function):
    """x w^T, whose backward adds the weight's gradient to its `main_grad`, in that dtype, and returns none."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.weight.main_grad.addmm_(gradient.t().to(ctx.weight.main_grad.dtype), ctx.x.to(ctx.weight.main_grad.dtype))
        return gradient @ ctx.weight, None
