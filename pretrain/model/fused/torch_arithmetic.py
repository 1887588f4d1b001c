"""The arithmetic of fused layers by torch's own operations: any device, any dtype, nothing quantized.

It is what a CPU trains with, and what the arithmetic on Transformer Engine is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pretrain.model.fused.arithmetic import Activation, Norm, StackedWeight
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.observation import dtype_name


class TorchStackedProduct:
    """y = x w^T + b by torch's own products; a `StackedProduct`."""

    def __init__(self, name: str, members: tuple[str, ...], weights: StackedWeight, arithmetic: TorchArithmetic) -> None:
        self.name = name
        self.members = members
        self.weights = weights
        self._arithmetic = arithmetic

    def begin(self, x: Tensor) -> None:
        pass

    def end(self) -> None:
        pass

    def operand(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        weight = self._matrix(refresh=self._arithmetic.context.first_microbatch)
        self._note("forward", x, weight)
        return F.linear(x, weight, self.weights.bias(x.dtype))

    def gradient_operand(self, dy: Tensor) -> Tensor:
        return dy

    def input_gradient(self, dy: Tensor) -> Tensor:
        weight = self._matrix(refresh=False)
        self._note("dgrad", dy, weight)
        return dy @ weight

    def weight_gradients(self, dy: Tensor, x: Tensor) -> list[Tensor | None]:
        self._note("wgrad", dy, x)
        main_gradient = self.weights.main_gradient
        if main_gradient is None:
            return self.weights.weight_gradients(dy.t() @ x)
        left, right = (x, dy) if self.weights.transposed else (dy, x)
        if left.dtype == main_gradient.dtype:
            main_gradient.addmm_(left.t(), right)
        else:
            main_gradient += left.t() @ right
        return [None] * len(self.weights.weights)

    def _matrix(self, *, refresh: bool) -> Tensor:
        dtype = self._arithmetic.context.compute_dtype
        if not self._arithmetic.differentiable:  # an evaluation's casts are not kept
            return self.weights.matrix(dtype)
        return self.weights.cached_matrix(dtype, refresh=refresh)

    def _note(self, gemm: str, left: Tensor, right: Tensor) -> None:
        self._arithmetic.context.note(self.members, gemm, left, right, lambda operand: dtype_name(operand.dtype))


class TorchArithmetic:
    """Norms and activations in FP32, rounded once to the context's compute dtype; an `Arithmetic`."""

    def __init__(self, context: PrecisionContext) -> None:
        self.context = context
        self.differentiable = True

    def product(
        self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: bool = False
    ) -> TorchStackedProduct:
        """Raises ValueError for `low_precision`, which torch's products have not."""
        if low_precision:
            raise ValueError(f"{name}: torch has no product in low precision")
        return TorchStackedProduct(name, members, weights, self)

    def norm(self, x: Tensor, norm: Norm, product: TorchStackedProduct) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, *bias = self._parameters_of(norm)
        wide = x.float()
        if norm.kind == "layer":
            y, mean, rstd = torch.native_layer_norm(wide, [x.shape[-1]], weight, bias[0] if bias else None, norm.eps)
            return y.to(x.dtype), (mean, rstd)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return ((wide * rstd).to(x.dtype) * weight).to(x.dtype), (rstd,)

    def norm_backward(
        self, dy: Tensor, x: Tensor, statistics: Sequence[Tensor], norm: Norm, residual: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        weight, *bias = self._parameters_of(norm)
        dy, wide = dy.float(), x.float()
        if norm.kind == "layer":
            mean, rstd = statistics
            mask = [True, True, bool(bias)]
            dx, *gradients = torch.ops.aten.native_layer_norm_backward(
                dy, wide, [x.shape[-1]], mean, rstd, weight, bias[0] if bias else None, mask
            )
        else:
            (rstd,) = statistics
            normed = wide * rstd
            gradients = [(dy * normed).sum(0)]
            dy = dy * weight
            dx = (dy - normed * (dy * normed).mean(-1, keepdim=True)) * rstd
        dx = dx if residual is None else dx + residual
        return dx.to(x.dtype), gradients[: len(norm.parameters)]

    def activate(self, hidden: Tensor, kind: Activation, product: TorchStackedProduct) -> tuple[Tensor, Tensor | None]:
        return _activated(hidden, kind), None

    def activate_backward(
        self,
        d_activated: Tensor,
        hidden: Tensor,
        kind: Activation,
        kept: Tensor | None,
        below: TorchStackedProduct,
        above: TorchStackedProduct,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        if kind != "swiglu":
            approximate = "tanh" if kind == "gelu_tanh" else "none"
            d_hidden = torch.ops.aten.gelu_backward(d_activated, hidden, approximate=approximate)
            activated = _activated(hidden, kind)
        else:
            gate, up = hidden.float().chunk(2, dim=-1)
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            dy = d_activated.float()
            d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
            d_hidden = torch.cat([d_gate, dy * silu], dim=-1).to(hidden.dtype)
            activated = (silu * up).to(hidden.dtype)
        return d_hidden, activated, below.weights.bias_gradients(d_hidden)

    def _parameters_of(self, norm: Norm) -> list[Tensor]:
        """Rounded to the activations' dtype, as working copies are, and FP32 for computing."""
        return [parameter.detach().to(self.context.compute_dtype).float() for parameter in norm.parameters]

    def is_first_in_forward(self) -> bool:
        return False

    def finish_backward(self) -> None:
        pass

    def save(self, ctx: FunctionCtx, *operands: Tensor | None) -> None:
        ctx.save_for_backward(*operands)

    def saved(self, ctx: FunctionCtx) -> list[Tensor | None]:
        return list(ctx.saved_tensors)


def _activated(hidden: Tensor, kind: Activation) -> Tensor:
    if kind == "swiglu":
        gate, up = hidden.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(hidden.dtype)
    return F.gelu(hidden, approximate="tanh" if kind == "gelu_tanh" else "none")
