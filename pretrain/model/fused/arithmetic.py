"""What stands between the products of a fused layer: norms and activations, which write the format of the product after them.

`FORMULAS` are torch's own operations: a CPU trains with them, and tests hold the kernels to them. `KERNELS`, for BF16 on a GPU:
SwiGLU and RMSNorm are Triton's. `TRANSFORMER_ENGINE`: norms are its own, which add the residual's gradient in backward; in low
precision they and SwiGLU write quantized operands. Its LayerNormLinear and LayerNormMLP fuse less: they add the residual's
gradient in a kernel of its own, write the gradient of SwiGLU in BF16 before they quantize it, and sum gradients of biases that do
not exist.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pretrain.model.fused.stacked import By, Shared, StackedProduct
from pretrain.precision import transformer_engine
from pretrain.precision.product import Operand


class Arithmetic(Shared):
    """One model's. Norms and activations are computed in FP32 and rounded to the context's compute dtype: once, but for RMSNorm
    by formulas, which rounds before it multiplies by its weight as well, as transformers does. `norm`: a module of transformers,
    whose weight is looked up at each use."""

    def norm(self, x: Tensor, norm: nn.Module, product: StackedProduct) -> tuple[Operand, Tensor]:
        """x [tokens, hidden] normalised, as the input of `product`, and 1 / root mean square [tokens], FP32, for backward."""
        weight, eps = self._weight_of(norm), norm.variance_epsilon
        if self.by == By.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            options = (tex.DType.kBFloat16, 0, False)
            if product.watched:
                product.show("input", tex.rmsnorm_fwd(x, weight, eps, None, None, *options)[0])
            y, _, rstd = tex.rmsnorm_fwd(x, weight, eps, None, product.quantizer("input"), *options)
            return y, rstd
        if self.by >= By.KERNELS and x.is_cuda:
            from pretrain.model.fused import norm_kernel

            y, rstd = norm_kernel.rms_norm(x, weight, eps)
        else:
            wide = x.float()
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            y = ((wide * rstd).to(x.dtype) * weight.float()).to(x.dtype)
        return product.operand(y), rstd

    def norm_backward(
        self, dy: Tensor, x: Tensor, rstd: Tensor, norm: nn.Module, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of x, `residual` [tokens, hidden] added to it, and that of the norm's weight."""
        weight = self._weight_of(norm)
        if self.by == By.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            if residual is None:
                return tex.rmsnorm_bwd(dy, x, rstd, weight, 0, False)
            return tex.rmsnorm_bwd_add(dy, x, residual, rstd, weight, 0, False)
        if self.by >= By.KERNELS and x.is_cuda:
            from pretrain.model.fused import norm_kernel

            return norm_kernel.rms_norm_backward(dy, x, rstd, weight, residual)
        dy = dy.float()
        normed = x.float() * rstd
        of_weight = (dy * normed).sum(0)
        dy = dy * weight.float()
        dx = (dy - normed * (dy * normed).mean(-1, keepdim=True)) * rstd
        dx = dx if residual is None else dx + residual
        return dx.to(x.dtype), of_weight

    def activate(self, hidden: Tensor, gate_up: StackedProduct, down: StackedProduct) -> tuple[Operand, Operand | None]:
        """hidden [tokens, 2 x width: gate, then up], the output of `gate_up` -> silu(gate) * up as the input of `down`, and what
        `activate_backward` is to be given as `kept`."""
        if (quantizer := down.quantizer("input")) is not None:
            import transformer_engine_torch as tex

            from pretrain.model.fused import activation

            if down.watched:
                down.show("input", tex.swiglu(hidden, None))
            if gate_up.low_precision and activation.takes(hidden, quantizer):
                return activation.swiglu(hidden, quantizer)
            activated = tex.swiglu(hidden, quantizer)
            return activated, activated
        if self.by >= By.KERNELS:
            from pretrain.model.fused import activation_kernel

            return down.operand(activation_kernel.forward_bf16(hidden)), None
        gate, up = hidden.float().chunk(2, dim=-1)
        return down.operand((F.silu(gate) * up).to(hidden.dtype)), None

    def activate_backward(
        self, d_activated: Tensor, hidden: Tensor, kept: Operand, gate_up: StackedProduct, down: StackedProduct
    ) -> tuple[Operand, Operand, list[Tensor]]:
        """The gradient of `hidden` as the output gradient of `gate_up`, the activated values as the weight gradient of `down`
        takes them, and the gradients of the biases of `gate_up`."""
        if (quantizer := down.quantizer("input")) is not None:
            return self._activate_backward_quantized(d_activated, hidden, kept, gate_up, quantizer)
        if self.by >= By.KERNELS:
            from pretrain.model.fused import activation_kernel

            d_hidden, activated = activation_kernel.backward_bf16(d_activated, hidden)
        else:
            gate, up = hidden.float().chunk(2, dim=-1)
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            dy = d_activated.float()
            d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
            d_hidden = torch.cat([d_gate, dy * silu], dim=-1).to(hidden.dtype)
            activated = (silu * up).to(hidden.dtype)
        biases = gate_up.weights.bias_gradients(d_hidden)
        return gate_up.gradient_operand(d_hidden), down.product.operand("input", activated), biases

    def _activate_backward_quantized(
        self, d_activated: Tensor, hidden: Tensor, kept: Operand, gate_up: StackedProduct, of_down: Any
    ) -> tuple[Operand, Operand, list[Tensor]]:
        import transformer_engine_torch as tex

        from pretrain.model.fused import activation

        biases, of_gate_up = [], gate_up.quantizer("grad_output")
        if gate_up.watched or gate_up.weights.biases:  # who looks at the gradient, or sums it, wants it unquantized
            in_bf16 = tex.dswiglu(d_activated, hidden, None)
            gate_up.show("grad_output", in_bf16)
            biases = gate_up.weights.bias_gradients(in_bf16)
        if gate_up.low_precision and activation.takes(hidden, of_down):
            return *activation.swiglu_backward(d_activated, hidden, of_gate_up, of_down, kept), biases
        return tex.dswiglu(d_activated.contiguous(), hidden, of_gate_up), kept, biases

    def _weight_of(self, norm: nn.Module) -> Tensor:
        """Rounded to the activations' dtype, as working copies are."""
        return norm.weight.detach().to(self.context.compute_dtype)

    def is_first_in_forward(self) -> bool:
        """Whether the node that asks is the first of a low-precision forward, whose backward is therefore the last."""
        return self.by == By.TRANSFORMER_ENGINE and transformer_engine.is_first_in_forward()

    def save(self, ctx: FunctionCtx, *operands: Operand | None) -> None:
        """ctx.save_for_backward for operands of any kind; of a quantized one, what the weight's gradient takes. Nothing where
        there is no backward."""
        if self.differentiable:
            tensors, ctx.rest = transformer_engine.save(*operands) if self.by == By.TRANSFORMER_ENGINE else (operands, None)
            ctx.save_for_backward(*tensors)

    def saved(self, ctx: FunctionCtx) -> list[Operand | None]:
        """Returns what `save` was given, in order."""
        if self.by != By.TRANSFORMER_ENGINE:
            return list(ctx.saved_tensors)
        rest, ctx.rest = ctx.rest, None
        return transformer_engine.restore(ctx.saved_tensors, rest)
