"""The arithmetic of fused layers in BF16 on a GPU without Transformer Engine: by Triton, cublasLt and torch, all of which come
with torch. It rounds where Transformer Engine does: norms and SwiGLU in FP32 from BF16, rounded once; an RMSNorm of a width that
is no multiple of 64 is that of the base class. Imported only where Triton is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.fused import activation_kernel, norm_kernel
from pretrain.model.fused.arithmetic import APPROXIMATIONS, Activation, Arithmetic, Norm, Operand, StackedProduct, StackedWeight
from pretrain.precision import products
from pretrain.precision.linear import Backend


class SearchedProduct(StackedProduct):
    """A product by cublasLt's algorithms as pretrain.precision.products finds them, where it can. With a bias, torch computes
    it."""

    def adds(self, x: Operand) -> bool:
        return not self.weights.biases and products.takes(x)

    def forward(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        if self.weights.biases:
            return super().forward(x, residual)
        return products.linear(x, self._matrix(refresh=self._arithmetic.context.first_microbatch), residual)

    def gradient_operand(self, dy: Tensor) -> Operand:
        return dy.contiguous()

    def input_gradient(self, dy: Operand) -> Tensor:
        return products.input_gradient(dy, self._matrix(refresh=False))


class TritonArithmetic(Arithmetic):
    """BF16 activations; sums in FP32."""

    by = ", without Transformer Engine"

    def product(
        self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: Sequence[Backend] = ()
    ) -> SearchedProduct:
        return SearchedProduct(name, members, weights, self)

    def norm(
        self, x: Tensor, norm: Norm, product: StackedProduct, residual: Tensor | None = None
    ) -> tuple[Operand, tuple[Tensor, ...]]:
        weight, *bias = (parameter.detach().to(x.dtype) for parameter in norm.parameters)
        if norm.kind == "rms":
            if not norm_kernel.divides(x, None):
                return super().norm(x, norm, product, residual)
            y, *statistics = norm_kernel.rms_norm(x, _contiguous(residual), weight, norm.eps)
        else:
            if residual is not None:
                x.add_(residual)
            y, *statistics = torch.native_layer_norm(x, [x.shape[-1]], weight, bias[0] if bias else None, norm.eps)
        return y, tuple(statistics)

    def norm_backward(
        self, dy: Tensor, x: Tensor, statistics: Sequence[Tensor], norm: Norm, residual: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        weight, *bias = (parameter.detach().to(x.dtype) for parameter in norm.parameters)
        if norm.kind == "rms":
            if not norm_kernel.divides(x, None):
                return super().norm_backward(dy, x, statistics, norm, residual)
            dx, of_weight = norm_kernel.rms_norm_backward(dy, x, *statistics, weight, _contiguous(residual))
            return dx, [of_weight]
        mask = [True, True, bool(bias)]
        dx, *gradients = torch.ops.aten.native_layer_norm_backward(
            dy, x, [x.shape[-1]], *statistics, weight, bias[0] if bias else None, mask
        )
        return dx if residual is None else dx.add_(residual), gradients[: len(norm.parameters)]

    def activate(self, hidden: Tensor, kind: Activation, product: StackedProduct) -> tuple[Operand, Operand | None]:
        if kind == "swiglu":
            return activation_kernel.forward_bf16(hidden), None
        activated = F.gelu(hidden, approximate=APPROXIMATIONS[kind])
        return activated, activated

    def activate_backward(
        self, d_activated: Tensor, hidden: Tensor, kind: Activation, kept: Operand, gate_up: StackedProduct, down: StackedProduct
    ) -> tuple[Operand, Operand, list[Tensor]]:
        if kind == "swiglu":
            d_hidden, activated = activation_kernel.backward_bf16(d_activated, hidden)
        else:
            d_hidden = torch.ops.aten.gelu_backward(d_activated, hidden, approximate=APPROXIMATIONS[kind])
            activated = kept
        return d_hidden, activated, gate_up.weights.bias_gradients(d_hidden)


def _contiguous(residual: Tensor | None) -> Tensor | None:
    return None if residual is None else residual.contiguous()
