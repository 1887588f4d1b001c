"""Linears and norms whose arithmetic a low-precision backend does: inside a low-precision forward, and nowhere else.

The modules here own nothing new. They hold the very Parameters of the modules they stand in for, under the same names, so that
tying, checkpoints, sharding and export see the model that transformers built; what multiplies them is a `Product`, made by a
`Backend` (Transformer Engine, or the emulation). torch.compile steps over them: a graph ends before each low-precision product
and another begins after it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pretrain.precision.context import PrecisionContext
from pretrain.precision.product import LinearProduct, NormFunction


class LowPrecisionLinear(nn.Module):
    """Stands in for an nn.Linear or a transformers Conv1D, whose weight [in, out] is `transposed`."""

    def __init__(self, linear: nn.Linear | Conv1D, name: str, product: LinearProduct, context: PrecisionContext) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.transposed = isinstance(linear, Conv1D)
        self.name = name
        self.product = product
        self.context = context

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight = self.weight.t() if self.transposed else self.weight
        if not self.context.low_precision:
            self.context.plain_calls[self.name] += 1
            return F.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        y = self.context.multiply(self.name, self.product, x.reshape(-1, x.shape[-1]), weight, self.bias)
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class LowPrecisionNorm(nn.Module):
    """Stands in for an RMSNorm or a LayerNorm; in evaluation it computes the same in plain torch, all of it in FP32."""

    def __init__(self, norm: nn.Module, eps: float, function: NormFunction, context: PrecisionContext) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.eps = eps
        self.kind = norm_kind(norm)
        self.function = function
        self.context = context
        self.calls = 0  # in low precision; for the audit

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        if self.context.low_precision:
            self.calls += 1
            dtype = self.context.compute_dtype
            return self.function(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        return plain_norm(self.kind, x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.kind}, {tuple(self.weight.shape)}, eps={self.eps}"


def norm_kind(module: nn.Module) -> Literal["rms", "layer"] | None:
    """Which norm `module` is by its class; None if it is none, or one without a weight."""
    if getattr(module, "weight", None) is None:
        return None
    if isinstance(module, nn.LayerNorm):
        return "layer"
    return "rms" if type(module).__name__.endswith("RMSNorm") else None


def plain_norm(kind: Literal["rms", "layer"], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The norm of x over its last dimension, all of it in FP32 and rounded once, to x's dtype."""
    if kind == "rms":
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.layer_norm(x.float(), weight.shape, weight.float(), None if bias is None else bias.float(), eps).to(x.dtype)
