"""The computations of a fused layer: matrix products, and the operations between them.

One product computes queries, keys and values, and one product computes gate and up, because one
large product is faster than several small ones. The parameters of such a product lie in one
storage, one after the other, so the stacked matrix is a view of this storage. The optimizer,
checkpoints and exports still use the separate parameters. FSDP2 gathers parameters into separate
storages. Under FSDP2, each use of the stacked matrix therefore copies the parameters into one
matrix, which is correct but slower.

The operations between the products are norms, activations and rotations. They are computed by torch
(`pretrain.model.fused.formulas`), by Triton kernels for BF16 on a GPU, or by Transformer Engine.
In low precision, norms and activations write their results as quantized operands of the next
product. Under delayed scaling, the Triton kernel for the backward of the rotation writes a
quantized operand too. The kernel that computes the output gradient of a product can also sum this
gradient over tokens. The sum is the gradient of the product's bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pretrain.model.fused import formulas
from pretrain.model.gradients import Summed
from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import Gemm, Operand, TorchGemm
from pretrain.precision.product import (
    LinearPass,
    LinearState,
    PrecisionContext,
    require_not_freed,
)
from pretrain.precision.transformer_engine import TransformerEngineGemm


class StackedLinear(LinearState):
    """Linear layers with the same input, computed as one product with the stacked weight [out, in].

    The parameters are read from the layers at each use, because FSDP2 replaces them.
    """

    def __init__(
        self,
        name: str,
        linears: Mapping[str, nn.Linear | Conv1D],
        context: PrecisionContext,
    ) -> None:
        """Create the stacked linear without moving any parameter.

        Args:
            name: Name of the amax histories and scales of the product in checkpoints.
            linears: Map the name of each linear layer in the model to the layer.
            context: The context of the model.
        """
        super().__init__(name, context, tuple(linears))
        self.linears = tuple(linears.values())
        # True for a Conv1D of transformers, which is never stacked. Its weight is [in, out].
        self.transposed = isinstance(self.linears[0], Conv1D)
        # The Gemm without quantization. It casts the weight once a step and caches the result for
        # the other microbatches of the step.
        self.plain = TorchGemm(name, self.members)

    @property
    def weights(self) -> list[Summed]:
        """List of the weights of all layers."""
        return [linear.weight for linear in self.linears]

    @property
    def biases(self) -> list[Tensor]:
        """List of the biases of all layers. Empty if the layers have no biases.

        In every architecture that is supported, either all layers have a bias or none has.
        """
        return [linear.bias for linear in self.linears if linear.bias is not None]

    @torch.no_grad()
    def lay_together(self) -> None:
        """Move the weights into one storage, one after the other, and the biases into another.

        The Parameter objects, their shapes and their values stay the same.
        """
        for parameters in (self.weights, self.biases):
            if len(parameters) > 1:
                storage = torch.cat([parameter.data for parameter in parameters])
                parts = storage.split([len(parameter) for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.data = part

    def matrix(self) -> Tensor:
        """Return the stacked weight [out, in] in the compute dtype, detached.

        The result is a view of the weights if possible, and a copy otherwise. The matrix of a
        Conv1D is a transposed view.
        """
        matrix = _stacked(self.weights).to(self.context.compute_dtype)
        return matrix.t() if self.transposed else matrix

    @property
    def main_gradient(self) -> Tensor:
        """The main gradient [out, in] of the stacked weight, a view of the weights' main gradients.

        Raises RuntimeError unless the main gradients of the weights are the rows of one matrix, as
        `attach_main_gradients` makes them for `FusedLayers.stacks`.
        """
        gradients = [weight.main_grad for weight in self.weights]
        stacked = gradients[0].t() if self.transposed else _rows_of_one(gradients)
        if stacked is None:
            raise RuntimeError("the main gradients of a stacked weight are not one matrix")
        return stacked

    def bias_gradients(self, total: Tensor | None) -> list[Tensor]:
        """Return the gradient of each bias, FP32. The list is empty if there are no biases.

        `total` [out] is the gradient of the output, summed over tokens in FP32. It may be None if
        there are no biases.
        """
        sizes = [len(bias) for bias in self.biases]
        return list(total.split(sizes)) if total is not None and sizes else []


class StackedPass(LinearPass):
    """One forward of a `StackedLinear` over `x` [tokens, ...], and its backward.

    The three matrix products of a linear layer are computed by `project`, `input_gradient` and
    `add_weight_gradient`. Their arguments may be operands that a norm or an activation has already
    quantized.
    """

    def __init__(self, stack: StackedLinear, x: Tensor, *, differentiable: bool) -> None:
        super().__init__(stack.low or stack.plain, stack.context, differentiable=differentiable)
        self.stack = stack
        self.gemm.begin(x)

    def quantizer(self, role: Role) -> Any | None:
        """Return the quantizer for a kernel that writes the quantized operand of `role`.

        Return None if only the method `quantize` can create this operand; see `Gemm.quantizer`.
        """
        return self.gemm.quantizer(role, both=self.differentiable)

    @property
    def sums_gradient(self) -> bool:
        """True if backward must sum the output gradient over tokens, as the gradient of biases."""
        return bool(self.stack.biases)

    def project(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        """Return x w^T + bias + residual [tokens, out]. Call it once for each pass."""
        biases = self.stack.biases
        bias = _stacked(biases).to(self.context.compute_dtype) if biases else None
        weight = self._stacked_weight(refresh=self.refresh)
        return self.forward_product(x, weight, self.stack.matrix, bias, residual)

    def input_gradient(self, dy: Operand) -> Tensor:
        """Return the gradient of the input [tokens, in] for the output gradient `dy`."""
        return self.gradient_product("dgrad", dy, self._stacked_weight(refresh=False))

    def add_weight_gradient(self, dy: Operand, x: Operand) -> None:
        """Add the gradient of the stacked weight to its main gradient.

        The gradient replaces the values of the main gradient if `pretrain.model.sharding` has set
        `overwrites_main_grad` on the first weight of the stack. `dy` is the output gradient and `x`
        the input.
        """
        marked = self.stack.weights[0]
        overwrite = getattr(marked, "overwrites_main_grad", False)
        marked.overwrites_main_grad = False
        self.weight_gradient(dy, x, self.stack.main_gradient, overwrite=overwrite)

    def _stacked_weight(self, *, refresh: bool) -> Operand:
        """Return the stacked weight as an operand, from the cache unless `refresh` is set.

        Forward and backward both call this method. The pass stores no unquantized weight between
        them, because FSDP2 frees the memory of the gathered weight.
        """
        stack = self.stack
        if not self.gemm.quantizes and stack.weights[0].dtype == self.context.compute_dtype:
            return stack.matrix()
        return self.gemm.weight_operand(
            stack.matrix, refresh=refresh, differentiable=self.differentiable
        )


def is_zero_centered(norm: nn.Module) -> bool:
    """Return True if an RMSNorm multiplies by 1 + weight."""
    return type(norm).__name__ in ("Qwen3_5RMSNorm", "Qwen3NextRMSNorm")


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    parts = [require_not_freed(parameter.detach()) for parameter in parameters]
    view = _rows_of_one(parts)
    return torch.cat(parts) if view is None else view


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all `parts`, stacked along their first dimension.

    Return None if the parts do not lie one after the other in one storage.
    """
    first = parts[0]
    storage = first.untyped_storage().data_ptr()
    position = first.storage_offset()
    for part in parts:
        is_next = part.storage_offset() == position and part.is_contiguous()
        if not is_next or part.untyped_storage().data_ptr() != storage:
            return None
        position += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@dataclass(eq=False)
class Arithmetic:
    """Norms, rotations and activations of the fused layers of one model, by formulas in torch.

    They are computed in FP32 and rounded to the compute dtype of `context`. Arguments called `norm`
    are modules of transformers. Their weights are read at each use.
    """

    context: PrecisionContext
    # True if forward saves queries, keys and values for backward. If False, backward recomputes
    # them from the output of the query-key-value product. Layers without head norms ignore this
    # field.
    keeps_rotated: bool = False
    # The class whose static methods save operands for autograd and finish a backward.
    gemm_class: ClassVar[type[Gemm]] = TorchGemm

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """The modules that compute norms, rotations and activations.

        They are the attributes `norm`, `rotary` and `activation`.
        """
        return SimpleNamespace(norm=formulas, rotary=formulas, activation=formulas)

    def parameters_in_compute_dtype(self, norm: Any) -> tuple[Tensor, Tensor | None, float]:
        """Return weight, bias and epsilon of a norm. The bias of an RMSNorm is None.

        Weight and bias are cast to the compute dtype, as in unfused layers.
        """
        dtype = self.context.compute_dtype
        weight, *biases = (parameter.detach().to(dtype) for parameter in norm.parameters())
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return weight, biases[0] if biases else None, eps

    def factors(self, norm: Any, weight: Tensor) -> Tensor:
        """Return the factors by which `norm` multiplies: `weight`, or 1 + weight in FP32.

        `weight` is the weight of `norm` in the compute dtype. Like transformers, this function does
        not round 1 + weight to the compute dtype.
        """
        return 1 + weight.float() if is_zero_centered(norm) else weight

    def norm(
        self, x: Tensor, norm: Any, product: StackedPass
    ) -> tuple[Operand, Tensor, Tensor | None]:
        """Return the norm of x [tokens, hidden] as the input operand of `product`, rstd and mean.

        `norm` is an RMSNorm or an nn.LayerNorm. rstd has the reciprocals of the standard deviations
        or root mean squares, FP32. mean has the means, FP32, or is None for an RMSNorm. Both are
        arguments of `norm_backward`.
        """
        weight, bias, eps = self.parameters_in_compute_dtype(norm)
        y, rstd, mean = self.kernels.norm.norm(x, self.factors(norm, weight), bias, eps)
        return product.quantize("input", y), rstd, mean

    def norm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        rstd: Tensor,
        mean: Tensor | None,
        norm: Any,
        *,
        residual: Tensor,
        summed: bool = False,
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
        """Return dx [tokens, hidden], the gradients of the norm's parameters, and two sums.

        dx is the gradient of x plus `residual`. The two sums are dx summed over tokens and
        `residual` summed over tokens, FP32 [hidden]. Both are None unless `summed` is set. `dy` is
        the gradient of the norm's output, and `rstd` and `mean` are results of `norm`.
        """
        weight = norm.weight.detach().to(self.context.compute_dtype)
        dx, sums = self.kernels.norm.norm_backward(
            dy, x, rstd, mean, self.factors(norm, weight), residual, summed=summed
        )
        if mean is None:  # The kernels of an RMSNorm sum only the gradient of its weight.
            return dx, sums.unbind(), _token_sums(dx, residual) if summed else (None, None)
        # The first two rows are gradients of weight and bias, and the others sum dx and `residual`.
        return dx, sums[:2].unbind(), sums[2:].unbind() if summed else (None, None)

    def rotate_backward(
        self,
        gradients: list[Tensor],
        qkv: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: formulas.Heads,
        norms: formulas.HeadNorms | None,
        product: StackedPass,
    ) -> tuple[Operand, Sequence[Tensor | None], list[Tensor]]:
        """Return the gradients of `qkv`, of the weights of the head norms, and of the biases.

        The gradient of `qkv` is an operand of `product`. The second result has one gradient for the
        query norm and one for the key norm. Both are None without norms. `gradients` has the
        gradients of queries, keys and values. This list is emptied to free memory early.
        """
        dqkv, *d_norms, total = self.kernels.rotary.rotate_backward(
            *gradients, qkv, cos, sin, heads, norms, summed=product.sums_gradient
        )
        gradients.clear()
        return product.quantize("grad_output", dqkv), d_norms, product.stack.bias_gradients(total)

    def activation(
        self, hidden: Tensor, gated: bool, gate_up: StackedPass, down: StackedPass
    ) -> MLPActivation:
        """Return the computation of an activation and its gradient.

        `hidden` [tokens, ...] is the output of `gate_up`, and the input of the activation. The
        activated values are the input of `down`.
        """
        return MLPActivation(self.kernels.activation, gated, gate_up, down)

    def save(self, ctx: Any, *operands: Operand | None) -> None:
        """Save operands of any kind for backward.

        Saving may free codes that the weight gradient does not read. Therefore backward may use a
        saved quantized operand only for a weight gradient.
        """
        tensors, ctx.rest = self.gemm_class.save(*operands)
        ctx.save_for_backward(*tensors)

    def saved(self, ctx: Any) -> Sequence[Operand | None]:
        """Return the operands that `save` has stored in `ctx`, in the same order."""
        rest = ctx.rest
        ctx.rest = None
        return self.gemm_class.restore(ctx.saved_tensors, rest)


class KernelArithmetic(Arithmetic):
    """Norms, rotations and activations by our Triton kernels, in BF16 on a GPU."""

    @cached_property
    def kernels(self) -> SimpleNamespace:
        from pretrain.model.fused import activation_kernel, norm_kernel, rotary_kernel

        return SimpleNamespace(norm=norm_kernel, rotary=rotary_kernel, activation=activation_kernel)


class TransformerEngineArithmetic(KernelArithmetic):
    """Norms, rotations and activations that write the operands of Transformer Engine's products.

    Transformer Engine computes norms, except for the gradient of a LayerNorm. Our Triton kernels
    compute the rest, except for SwiGLU with block scales.
    """

    gemm_class = TransformerEngineGemm

    def norm(
        self, x: Tensor, norm: Any, product: StackedPass
    ) -> tuple[Operand, Tensor, Tensor | None]:
        import transformer_engine_torch as tex

        weight, bias, eps = self.parameters_in_compute_dtype(norm)

        def compute(quantizer: Any | None) -> Any:
            """Return the output, mean and rstd. The mean of an RMSNorm is None."""
            # None allocates the output, and 0 is the number of SMs to leave to other kernels.
            options = (eps, None, quantizer, tex.DType.kBFloat16, 0, is_zero_centered(norm))
            if bias is None:
                return tex.rmsnorm_fwd(x, weight, *options)
            return tex.layernorm_fwd(x, weight, bias, *options)

        y, mean, rstd = compute(product.quantizer("input"))
        product.show("input", lambda: compute(None)[0])
        return y, rstd, mean

    def norm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        rstd: Tensor,
        mean: Tensor | None,
        norm: Any,
        *,
        residual: Tensor,
        summed: bool = False,
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
        if mean is not None:
            return super().norm_backward(dy, x, rstd, mean, norm, residual=residual, summed=summed)
        import transformer_engine_torch as tex

        weight = norm.weight.detach().to(self.context.compute_dtype)
        # 0 is the number of SMs to leave to other kernels.
        options = (0, is_zero_centered(norm))
        dx, *gradients = tex.rmsnorm_bwd_add(dy, x, residual, rstd, weight, *options)
        return dx, gradients, _token_sums(dx, residual) if summed else (None, None)

    def rotate_backward(
        self,
        gradients: list[Tensor],
        qkv: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: formulas.Heads,
        norms: formulas.HeadNorms | None,
        product: StackedPass,
    ) -> tuple[Operand, Sequence[Tensor | None], list[Tensor]]:
        rotary = self.kernels.rotary
        inputs = (qkv, cos, sin, heads, norms)
        quantizer = product.quantizer("grad_output")
        if not rotary.supports(quantizer, gradients[0]):
            return super().rotate_backward(gradients, *inputs, product)
        codes, *d_norms, total = rotary.quantized_rotate_backward(
            quantizer, gradients, *inputs, summed=product.sums_gradient
        )
        product.show("grad_output", lambda: rotary.rotate_backward(*gradients, *inputs)[0])
        gradients.clear()
        return codes, d_norms, product.stack.bias_gradients(total)

    def activation(
        self, hidden: Tensor, gated: bool, gate_up: StackedPass, down: StackedPass
    ) -> MLPActivation:
        kernels = self.kernels.activation
        quantizer = down.quantizer("input")
        # The kernel writes two operands: the input of `down`, which `supports` checks, and the
        # output gradient of `gate_up`.
        if gate_up.gemm.quantizes and kernels.supports(hidden, quantizer, gated=gated):
            return TensorScaledActivation(kernels, gated, gate_up, down)
        # Transformer Engine's kernel writes only the input of `down`, and sums no gradients of
        # biases.
        if down.gemm.quantizes and gated and not gate_up.sums_gradient:
            import transformer_engine_torch as tex

            return TransformerEngineSwiGLU(tex, gated, gate_up, down)
        return super().activation(hidden, gated, gate_up, down)


def _token_sums(*gradients: Tensor) -> list[Tensor]:
    """Return the sum of each tensor [tokens, width] over tokens, FP32 [width]."""
    return [gradient.sum(dim=0, dtype=torch.float32) for gradient in gradients]


@dataclass(eq=False)
class MLPActivation:
    """The activation between two products of an MLP, computed in the compute dtype."""

    # The module that computes the activation.
    kernels: Any
    # True if the activation is SwiGLU, and False if it is GELU.
    gated: bool
    # The product before the activation, and the product after it.
    gate_up: StackedPass
    down: StackedPass

    def forward(self, hidden: Tensor) -> tuple[Operand, Any]:
        """Return the activated values as the input operand of `down`, and a value for backward.

        `hidden` is the output of `gate_up`. The value for backward is None if backward computes the
        operand again.
        """
        operand = self.down.quantize("input", self.kernels.activate(hidden, gated=self.gated))
        return operand, operand if self.down.gemm.quantizes else None

    def backward(
        self, d_activated: Tensor, hidden: Tensor, kept: Any
    ) -> tuple[Operand, Operand, list[Tensor]]:
        """Return the gradient of `hidden`, the input of `down`, and bias gradients of `gate_up`.

        The first two results are operands. The gradient of `hidden` is the output gradient of
        `gate_up`. The input of `down` is needed for the weight gradient of `down`. `d_activated` is
        the gradient of the input of `down`, and `kept` is the second result of `forward`.
        """
        d_hidden, activated, total = self.kernels.activate_backward(
            d_activated, hidden, gated=self.gated, summed=self.gate_up.sums_gradient
        )
        if kept is None:
            kept = self.down.quantize("input", activated)
        d_hidden = self.gate_up.quantize("grad_output", d_hidden)
        return d_hidden, kept, self.gate_up.stack.bias_gradients(total)


class TensorScaledActivation(MLPActivation):
    """An activation whose Triton kernels write FP8 codes with one scale per tensor."""

    def forward(self, hidden: Tensor) -> tuple[Operand, Tensor | None]:
        """Return the quantized activation and its scale. Backward quantizes with the same scale."""
        self.down.show("input", lambda: self.kernels.activate(hidden, gated=self.gated))
        quantizer = self.down.quantizer("input")
        return self.kernels.quantized_activate(hidden, quantizer, gated=self.gated)

    def backward(
        self, d_activated: Tensor, hidden: Tensor, kept: Tensor
    ) -> tuple[Operand, Operand, list[Tensor]]:
        inputs = (d_activated, hidden)
        options = {"gated": self.gated, "summed": self.gate_up.sums_gradient}
        self.gate_up.show(
            "grad_output", lambda: self.kernels.activate_backward(*inputs, **options)[0]
        )
        activated_quantizer = self.down.quantizer("input")
        gradient_quantizer = self.gate_up.quantizer("grad_output")
        *operands, total = self.kernels.quantized_activate_backward(
            *inputs, gradient_quantizer, activated_quantizer, kept, **options
        )
        return *operands, self.gate_up.stack.bias_gradients(total)


class TransformerEngineSwiGLU(MLPActivation):
    """SwiGLU by Transformer Engine's extension, which is `kernels`."""

    def forward(self, hidden: Tensor) -> tuple[Operand, Operand]:
        self.down.show("input", lambda: self.kernels.swiglu(hidden, None))
        operand = self.kernels.swiglu(hidden, self.down.quantizer("input"))
        return operand, operand

    def backward(
        self, d_activated: Tensor, hidden: Tensor, kept: Operand
    ) -> tuple[Operand, Operand, list[Tensor]]:
        self.gate_up.show("grad_output", lambda: self.kernels.dswiglu(d_activated, hidden, None))
        quantizer = self.gate_up.quantizer("grad_output")
        return self.kernels.dswiglu(d_activated.contiguous(), hidden, quantizer), kept, []
