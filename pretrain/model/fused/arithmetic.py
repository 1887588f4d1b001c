"""The computations of a fused layer: products, and norms, activations and rotations in between.

Queries, keys and values are one product, and so are gate and up: one large product is faster than
three. Their parameters lie in one storage, one after the other. So the stacked matrix is a view,
and optimizer, checkpoints and export do not notice. Where the parameters lie apart, as FSDP2
gathers them, the matrix is copied together at each use. That is correct, and slower.

Between the products compute torch's operations (`pretrain.model.fused.formulas`), Triton kernels
for BF16 on a GPU, or Transformer Engine. Transformer Engine's norms add the residual's gradient in
backward. In low precision its norms and its SwiGLU write quantized operands. Under delayed scaling
the backward of the rotation writes them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.model.fused import formulas
from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import Gemm, GemmEngine, Operand, TorchGemm
from pretrain.precision.product import LinearPass, LinearState, PrecisionContext
from pretrain.precision.transformer_engine import TransformerEngineGemm

# Sizes of heads that the rotation's kernel takes. Others, such as 80, would leave lanes idle.
ROTARY_KERNEL_DIMS = (32, 64, 128)


class Implementation(IntEnum):
    """The implementation of norms and activations. Each one includes those before it."""

    FORMULAS, KERNELS, TRANSFORMER_ENGINE = range(3)


class StackedLinear(LinearState):
    """Linear layers that read the same input, as one product with the stacked weight [out, in].

    Parameters are looked up at each use, because FSDP2 exchanges them.
    """

    def __init__(
        self,
        name: str,
        linears: Mapping[str, nn.Linear],
        arithmetic: Arithmetic,
        engines: Sequence[GemmEngine] = (),
    ) -> None:
        """`name`: of the histories and scales in a checkpoint. `linears`: by their names.

        `engines`: the engines that quantize this product.
        """
        super().__init__(name, arithmetic.context, tuple(linears))
        self.linears = tuple(linears.values())
        self.arithmetic = arithmetic
        out_features = sum(linear.out_features for linear in self.linears)
        for engine in engines:
            self.add(engine, self.linears[0].in_features, out_features)
        # The Gemm without quantization. It caches the cast of a weight for a step's microbatches.
        self.plain = TorchGemm(name, self.members)

    @property
    def weights(self) -> list[Tensor]:
        """The weights of all layers."""
        return [linear.weight for linear in self.linears]

    @property
    def biases(self) -> list[Tensor]:
        """The biases of all layers, or none. No architecture has a bias in some of them only."""
        return [linear.bias for linear in self.linears if linear.bias is not None]

    @torch.no_grad()
    def lay_together(self) -> None:
        """Move the parameters into one storage, in order. Identity, shape and values stay."""
        for parameters in (self.weights, self.biases):
            if len(parameters) > 1:
                storage = torch.cat([parameter.data for parameter in parameters])
                parts = storage.split([len(parameter) for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.data = part

    def matrix(self) -> Tensor:
        """Return the weights [out, in] in the compute dtype, detached, as a view if possible."""
        return _stacked(self.weights).to(self.context.compute_dtype)

    @property
    def main_gradient(self) -> Tensor | None:
        """The buffer [out, in] where the weights' gradients add up.

        None if there is none, or if the parts of the weights do not lie together.
        """
        gradients = [weight.main_grad for weight in self.weights if hasattr(weight, "main_grad")]
        return _rows_of_one(gradients) if len(gradients) == len(self.linears) else None

    def bias_gradients(self, dy: Tensor) -> list[Tensor]:
        """Return the gradient of each bias from dy [tokens, out], summed in FP32."""
        if not self.biases:
            return []
        return list(dy.sum(dim=0, dtype=torch.float32).split([len(bias) for bias in self.biases]))

    def start(self, x: Tensor) -> StackedPass:
        """Start a forward over `x` [tokens, ...] in the current precision."""
        return StackedPass(self, x)


class StackedPass(LinearPass):
    """One forward of a `StackedLinear` and its backward, each product a call of its own.

    A norm or an activation may have written the operands.
    """

    def __init__(self, stack: StackedLinear, x: Tensor) -> None:
        super().__init__(
            stack.low or stack.plain,
            stack.context,
            refresh=stack.context.first_microbatch,
            differentiable=stack.arithmetic.differentiable,
        )
        self.stack = stack
        self.gemm.begin(x)

    def quantizer(self, role: Role) -> Any | None:
        """Return the quantizer for a kernel that writes this operand, see `Gemm.quantizer`."""
        if self.forward_in_bf16 and role == "input":
            return None
        return self.gemm.quantizer(role, both=self.differentiable)

    def project(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        """Return x w^T + bias + residual [tokens, out]. Called once."""
        biases = self.stack.biases
        bias = _stacked(biases).to(self.context.compute_dtype) if biases else None
        weight = self._stacked_weight(refresh=self.refresh)
        return self.forward_product(x, weight, self.stack.matrix, bias, residual)

    def input_gradient(self, dy: Operand) -> Tensor:
        """Return the gradient of the input [tokens, in]."""
        return self.gradient_product("dgrad", dy, self._stacked_weight(refresh=False))

    def weight_gradients(self, dy: Operand, x: Operand) -> list[Tensor | None]:
        """Return the gradient of each weight, None if added to the main gradient."""
        gradient = self.weight_gradient(dy, x, self.stack.main_gradient)
        if gradient is None:
            return [None] * len(self.stack.linears)
        return list(gradient.split([len(weight) for weight in self.stack.weights]))

    def _stacked_weight(self, *, refresh: bool) -> Operand:
        """Return the weight as an operand, in forward and again in backward.

        The pass keeps no unquantized weight in between, because FSDP2 frees its memory.
        """
        stack = self.stack
        if not self.gemm.quantizes and stack.weights[0].dtype == self.context.compute_dtype:
            return stack.matrix()
        return self.gemm.weight_operand(
            stack.matrix, refresh=refresh, differentiable=self.differentiable
        )


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    parts = [parameter.detach() for parameter in parameters]
    view = _rows_of_one(parts)
    return torch.cat(parts) if view is None else view


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all parts, stacked along their first dimension.

    Return None unless they lie one after the other in one storage.
    """
    first = parts[0]
    for part, next_part in pairwise(parts):
        is_adjacent = next_part.data_ptr() == part.data_ptr() + part.numel() * part.element_size()
        shared = part.untyped_storage().data_ptr() == next_part.untyped_storage().data_ptr()
        if not (is_adjacent and shared):
            return None
    if not all(part.is_contiguous() for part in parts):
        return None
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@dataclass(eq=False)
class Arithmetic:
    """The computations that the fused layers of one model share.

    They run in FP32 and round to the compute dtype of `context`. A `norm` is a module of
    transformers, whose weight is looked up at each use.
    """

    context: PrecisionContext
    implementation: Implementation = Implementation.FORMULAS
    # A backward may follow the forward under way.
    differentiable: bool = True
    # Keep queries, keys and values for backward where heads are normed. Else backward makes them
    # again from the output of the product.
    keeps_rotated: bool = False

    def norm(self, x: Tensor, norm: Any, product: StackedPass) -> tuple[Operand, Tensor]:
        """Normalise x [tokens, hidden] as the input of `product`.

        Return the operand, and 1 / root mean square in FP32 for backward.
        """
        weight = self._weight_of(norm)
        eps = norm.variance_epsilon
        if self.implementation == Implementation.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            options = (tex.DType.kBFloat16, 0, False)
            if (quantizer := product.quantizer("input")) is not None and product.observed.observers:
                product.show("input", tex.rmsnorm_fwd(x, weight, eps, None, None, *options)[0])
            y, _, rstd = tex.rmsnorm_fwd(x, weight, eps, None, quantizer, *options)
            return (product.quantize("input", y) if quantizer is None else y), rstd
        y, rstd = self.kernels.norm.rms_norm(x, weight, eps)
        return product.quantize("input", y), rstd

    def norm_backward(
        self, dy: Tensor, x: Tensor, rstd: Tensor, norm: Any, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of x plus `residual` [tokens, hidden], and that of the weight."""
        weight = self._weight_of(norm)
        if self.implementation == Implementation.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            return tex.rmsnorm_bwd_add(dy, x, residual, rstd, weight, 0, False)
        return self.kernels.norm.rms_norm_backward(dy, x, rstd, weight, residual)

    def _weight_of(self, norm: Any) -> Tensor:
        """Return the weight of a norm in the dtype of activations, as working copies are."""
        return norm.weight.detach().to(self.context.compute_dtype)

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """Modules with norms, rotations and activations: formulas, or kernels for BF16 on a GPU."""
        if self.implementation == Implementation.FORMULAS:
            return SimpleNamespace(norm=formulas, rotary=formulas, activation=formulas)
        from pretrain.model.fused import activation_kernel, norm_kernel, rotary_kernel

        return SimpleNamespace(norm=norm_kernel, rotary=rotary_kernel, activation=activation_kernel)

    def rotation(self, heads: formulas.Heads) -> ModuleType:
        """Return the module with `rotate` and `rotate_backward` for such heads."""
        return self.kernels.rotary if heads.dim in ROTARY_KERNEL_DIMS else formulas

    def rotate_backward(
        self,
        gradients: list[Tensor],
        qkv: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads: formulas.Heads,
        norms: formulas.HeadNorms | None,
        product: StackedPass,
    ) -> tuple[Operand, Sequence[Tensor | None], list[Tensor]]:
        """Return the gradient of `qkv` as an operand of `product`, and gradients of parameters.

        The parameters are the head norms' weights and the biases. The list `gradients`, of queries,
        keys and values, is emptied to free memory for the results.
        """
        rotation = self.rotation(heads)
        quantizer = product.quantizer("grad_output")
        inputs = (qkv, cos, sin, heads, norms)
        stack = product.stack
        writes_codes = (
            quantizer is not None
            and not stack.biases
            and rotation is not formulas
            and rotation.writes(quantizer, gradients[0])
        )
        if not writes_codes:
            dqkv, *of_norms = rotation.rotate_backward(*gradients, *inputs)
            gradients.clear()
            return product.quantize("grad_output", dqkv), of_norms, stack.bias_gradients(dqkv)
        if product.observed.observers:  # they see the gradient before it is quantized
            product.show("grad_output", rotation.rotate_backward(*gradients, *inputs)[0])
        codes, of_norms = rotation.quantized_rotate_backward(quantizer, gradients, *inputs)
        gradients.clear()
        return codes, of_norms, []

    def activate(
        self, hidden: Tensor, gate_up: StackedPass, down: StackedPass
    ) -> tuple[Operand, Operand | None]:
        """Return silu(gate) * up as the input of `down`, and the operand to keep for backward.

        `hidden` [tokens, 2 x width], gate and then up, is the output of `gate_up`.
        """
        if (quantizer := down.quantizer("input")) is None:
            operand = down.quantize("input", self.kernels.activation.swiglu(hidden))
            return operand, operand if down.forward_in_bf16 else None
        import transformer_engine_torch as tex

        if down.observed.observers:
            down.show("input", tex.swiglu(hidden, None))
        if gate_up.gemm.quantizes and self.kernels.activation.takes(hidden, quantizer):
            return self.kernels.activation.quantized_swiglu(hidden, quantizer)
        activated = tex.swiglu(hidden, quantizer)
        return activated, activated

    def activate_backward(
        self,
        d_activated: Tensor,
        hidden: Tensor,
        kept: Operand | None,
        gate_up: StackedPass,
        down: StackedPass,
    ) -> tuple[Operand, Operand]:
        """Return the gradient of `hidden` and the input of `down` as operands of gradients.

        The first is the output gradient of `gate_up`, the second serves the weight's gradient of
        `down`. `kept` is what `activate` returned to keep.
        """
        if (of_down := down.quantizer("input")) is None:
            d_hidden, activated = self.kernels.activation.swiglu_backward(d_activated, hidden)
            operand = down.gemm.quantize("input", activated) if kept is None else kept
            return gate_up.quantize("grad_output", d_hidden), operand
        import transformer_engine_torch as tex

        of_gate_up = gate_up.quantizer("grad_output")
        if gate_up.observed.observers:  # they see the gradient before it is quantized
            gate_up.show("grad_output", tex.dswiglu(d_activated, hidden, None))
        if gate_up.gemm.quantizes and self.kernels.activation.takes(hidden, of_down):
            return self.kernels.activation.quantized_swiglu_backward(
                d_activated, hidden, of_gate_up, of_down, kept
            )
        return tex.dswiglu(d_activated.contiguous(), hidden, of_gate_up), kept

    @property
    def gemm_class(self) -> type[Gemm]:
        """The class that saves operands for autograd and knows when a backward ends."""
        on_te = self.implementation == Implementation.TRANSFORMER_ENGINE
        return TransformerEngineGemm if on_te else TorchGemm

    def save(self, ctx: Any, *operands: Operand | None) -> None:
        """Save operands of any kind for backward, where they serve weights' gradients only.

        Does nothing if no backward follows.
        """
        if self.differentiable:
            tensors, ctx.rest = self.gemm_class.save(*operands)
            ctx.save_for_backward(*tensors)

    def saved(self, ctx: Any) -> Sequence[Operand | None]:
        """Return the operands that `save` was given, in order."""
        rest = ctx.rest
        ctx.rest = None
        return self.gemm_class.restore(ctx.saved_tensors, rest)
