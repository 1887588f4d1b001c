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
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pretrain.model.fused import formulas
from pretrain.model.gradients import Summed
from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import Gemm, GemmEngine, Operand, TorchGemm
from pretrain.precision.product import LinearPass, LinearState, PrecisionContext
from pretrain.precision.scope import features_of
from pretrain.precision.transformer_engine import TransformerEngineGemm

# Head sizes that the Triton kernel of the rotation supports. With other sizes, such as 80, some
# threads of the kernel would be idle.
ROTARY_KERNEL_DIMS = (32, 64, 128)


class Implementation(IntEnum):
    """Implementations of norms, activations and rotations.

    If an implementation does not support a computation, the computation uses the preceding
    implementation of this list.
    """

    FORMULAS, KERNELS, TRANSFORMER_ENGINE = range(3)


class StackedLinear(LinearState):
    """Linear layers with the same input, computed as one product with the stacked weight [out, in].

    The parameters are read from the layers at each use, because FSDP2 replaces them.
    """

    def __init__(
        self,
        name: str,
        linears: Mapping[str, nn.Linear | Conv1D],
        arithmetic: Arithmetic,
        engines: Sequence[GemmEngine] = (),
    ) -> None:
        """Create the stacked linear without moving any parameter.

        Args:
            name: Name of the amax histories and scales of the product in checkpoints.
            linears: Map the name of each linear layer in the model to the layer.
            arithmetic: The arithmetic of the model's fused layers.
            engines: The engines that quantize this product.
        """
        super().__init__(name, arithmetic.context, tuple(linears))
        self.linears = tuple(linears.values())
        # True for a Conv1D of transformers, which is never stacked. Its weight is [in, out].
        self.transposed = isinstance(self.linears[0], Conv1D)
        self.arithmetic = arithmetic
        sizes = [features_of(linear) for linear in self.linears]
        for engine in engines:
            self.add(engine, sizes[0][0], sum(size for _, size in sizes))
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

    def __init__(self, stack: StackedLinear, x: Tensor) -> None:
        super().__init__(
            stack.low or stack.plain,
            stack.context,
            differentiable=stack.arithmetic.differentiable,
        )
        self.stack = stack
        self.gemm.begin(x)

    def quantizer(self, role: Role) -> Any | None:
        """Return the quantizer for a kernel that writes the quantized operand of `role`.

        Return None if only the method `quantize` can create this operand; see `Gemm.quantizer`.
        """
        return self.gemm.quantizer(role, both=self.differentiable)

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

        `dy` is the output gradient and `x` the input.
        """
        self.weight_gradient(dy, x, self.stack.main_gradient)

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


def parameters_of(norm: nn.Module) -> list[nn.Parameter]:
    """Return the weight of an RMSNorm, or the weight and the bias of an nn.LayerNorm."""
    return list(norm.parameters(recurse=False))


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    parts = [parameter.detach() for parameter in parameters]
    view = _rows_of_one(parts)
    return torch.cat(parts) if view is None else view


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all `parts`, stacked along their first dimension.

    Return None if the parts do not lie one after the other in one storage.
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
    """Norms, rotations and activations of the fused layers of one model.

    They are computed in FP32 and rounded to the compute dtype of `context`. Arguments called `norm`
    are modules of transformers. Their weights are read at each use.
    """

    context: PrecisionContext
    implementation: Implementation = Implementation.FORMULAS
    # True if a backward may follow the current forward.
    differentiable: bool = True
    # True if forward saves queries, keys and values for backward. If False, backward recomputes
    # them from the output of the query-key-value product. Layers without head norms ignore this
    # field.
    keeps_rotated: bool = False

    def norm(
        self, x: Tensor, norm: Any, product: StackedPass
    ) -> tuple[Operand, Tensor, Tensor | None]:
        """Return the norm of x [tokens, hidden] as the input operand of `product`, rstd and mean.

        `norm` is an RMSNorm or an nn.LayerNorm. rstd has the reciprocals of the standard deviations
        or root mean squares, FP32. mean has the means, FP32, or is None for an RMSNorm. Both are
        arguments of `norm_backward`.
        """
        # Cast the parameters to the compute dtype, as in unfused layers. An RMSNorm has no bias.
        dtype = self.context.compute_dtype
        weight, *biases = (parameter.detach().to(dtype) for parameter in parameters_of(norm))
        bias = biases[0] if biases else None
        eps = norm.variance_epsilon if bias is None else norm.eps
        if self.implementation == Implementation.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            def compute(quantizer: Any | None) -> Any:
                options = (eps, None, quantizer, tex.DType.kBFloat16, 0, False)
                if bias is None:
                    return tex.rmsnorm_fwd(x, weight, *options)
                return tex.layernorm_fwd(x, weight, bias, *options)

            quantizer = product.quantizer("input")
            y, mean, rstd = compute(quantizer)
            if quantizer is None:
                return product.quantize("input", y), rstd, mean
            product.show("input", lambda: compute(None)[0])
            return y, rstd, mean
        y, rstd, mean = self.kernels.norm.norm(x, weight, bias, eps)
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
        gradients: Sequence[Tensor]
        totals: Sequence[Tensor] = ()
        if mean is None and self.implementation == Implementation.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            dx, *gradients = tex.rmsnorm_bwd_add(dy, x, residual, rstd, weight, 0, False)
        else:
            dx, sums = self.kernels.norm.norm_backward(
                dy, x, rstd, mean, weight, residual, summed=summed
            )
            count = 1 if mean is None else 2
            gradients = sums[:count].unbind()
            totals = sums[count:].unbind()
        if summed and not totals:  # The kernels of an RMSNorm do not sum these gradients.
            totals = [values.sum(dim=0, dtype=torch.float32) for values in (dx, residual)]
        return dx, gradients, totals or (None, None)

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """A namespace of three modules, which compute norms, rotations and activations.

        Its attributes are `norm`, `rotary` and `activation`. If `implementation` is FORMULAS, each
        of them is the module `formulas`. Otherwise each is a module with Triton kernels.
        """
        if self.implementation == Implementation.FORMULAS:
            return SimpleNamespace(norm=formulas, rotary=formulas, activation=formulas)
        from pretrain.model.fused import activation_kernel, norm_kernel, rotary_kernel

        return SimpleNamespace(norm=norm_kernel, rotary=rotary_kernel, activation=activation_kernel)

    def rotation(self, heads: formulas.Heads) -> ModuleType:
        """Return the module whose `rotate` and `rotate_backward` support the size of `heads`."""
        return self.kernels.rotary if heads.dim in ROTARY_KERNEL_DIMS else formulas

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: formulas.Heads,
        norms: formulas.HeadNorms | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, see `formulas.rotate`."""
        rotation = formulas if cos is None else self.rotation(heads)
        return rotation.rotate(qkv, cos, sin, heads, norms)

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
        rotation = self.rotation(heads)
        quantizer = product.quantizer("grad_output")
        inputs = (qkv, cos, sin, heads, norms)
        stack = product.stack
        summed = bool(stack.biases)
        writes_codes = (
            quantizer is not None
            and rotation is not formulas
            and rotation.supports(quantizer, gradients[0])
        )
        if not writes_codes:
            dqkv, *d_norms, total = rotation.rotate_backward(*gradients, *inputs, summed=summed)
            gradients.clear()
            return product.quantize("grad_output", dqkv), d_norms, stack.bias_gradients(total)
        product.show("grad_output", lambda: rotation.rotate_backward(*gradients, *inputs)[0])
        codes, *d_norms, total = rotation.quantized_rotate_backward(
            quantizer, gradients, *inputs, summed=summed
        )
        gradients.clear()
        return codes, d_norms, stack.bias_gradients(total)

    def activate(
        self, hidden: Tensor, kind: formulas.Activation, gate_up: StackedPass, down: StackedPass
    ) -> tuple[Operand, Operand | None]:
        """Return the activated values as the input operand of `down`, and a value for backward.

        `hidden` [tokens, ...] is the output of `gate_up`. The value for backward is either the
        operand itself, or the scale with which backward quantizes the recomputed operand. This
        value is None if backward recomputes the operand and needs no scale.
        """
        kernels = self.kernels.activation
        quantizer = down.quantizer("input")
        writer = self._writer_of_codes(hidden, kind, gate_up, quantizer)
        if writer is None:
            operand = down.quantize("input", kernels.activate(hidden, kind))
            return operand, operand if down.gemm.quantizes else None
        if writer is kernels:
            down.show("input", lambda: kernels.activate(hidden, kind))
            return kernels.quantized_activate(hidden, kind, quantizer)
        down.show("input", lambda: writer.swiglu(hidden, None))
        activated = writer.swiglu(hidden, quantizer)
        return activated, activated

    def activate_backward(
        self,
        d_activated: Tensor,
        hidden: Tensor,
        kind: formulas.Activation,
        kept: Operand | None,
        gate_up: StackedPass,
        down: StackedPass,
    ) -> tuple[Operand, Operand, list[Tensor]]:
        """Return the gradient of `hidden`, the input of `down`, and bias gradients of `gate_up`.

        The first two results are operands. The gradient of `hidden` is the output gradient of
        `gate_up`. The input of `down` is needed for the weight gradient of `down`. `d_activated` is
        the gradient of the input of `down`, and `kept` is the second result of `activate`.
        """
        kernels = self.kernels.activation
        quantizer = down.quantizer("input")
        writer = self._writer_of_codes(hidden, kind, gate_up, quantizer)
        stack = gate_up.stack
        summed = bool(stack.biases)
        if writer is None:
            d_hidden, activated, total = kernels.activate_backward(
                d_activated, hidden, kind, summed=summed
            )
            operand = down.gemm.quantize("input", activated) if kept is None else kept
            d_hidden = gate_up.quantize("grad_output", d_hidden)
            return d_hidden, operand, stack.bias_gradients(total)
        gradient_quantizer = gate_up.quantizer("grad_output")
        if writer is kernels:
            gate_up.show(
                "grad_output",
                lambda: kernels.activate_backward(d_activated, hidden, kind, summed=False)[0],
            )
            *operands, total = kernels.quantized_activate_backward(
                d_activated, hidden, kind, gradient_quantizer, quantizer, kept, summed=summed
            )
            return *operands, stack.bias_gradients(total)
        gate_up.show("grad_output", lambda: writer.dswiglu(d_activated, hidden, None))
        return writer.dswiglu(d_activated.contiguous(), hidden, gradient_quantizer), kept, []

    def _writer_of_codes(
        self, hidden: Tensor, kind: formulas.Activation, gate_up: StackedPass, quantizer: Any | None
    ) -> Any | None:
        """Return the module that can write activated values in place of `quantizer`.

        It is a module of Triton kernels, or Transformer Engine's extension, which writes only
        SwiGLU and sums no gradients for biases. Return None if `quantizer` is None or if neither
        module supports the activation, the biases and `quantizer`.
        """
        if quantizer is None:
            return None
        kernels = self.kernels.activation
        if gate_up.gemm.quantizes and kernels.supports(hidden, kind, quantizer):
            return kernels
        if kind != formulas.SWIGLU or gate_up.stack.biases:
            return None
        import transformer_engine_torch as tex

        return tex

    @property
    def gemm_class(self) -> type[Gemm]:
        """The class whose static methods save operands for autograd and finish a backward."""
        on_te = self.implementation == Implementation.TRANSFORMER_ENGINE
        return TransformerEngineGemm if on_te else TorchGemm

    def save(self, ctx: Any, *operands: Operand | None) -> None:
        """Save operands of any kind for backward, if a backward may follow.

        Saving may free codes that the weight gradient does not read. Therefore backward may use a
        saved quantized operand only for a weight gradient.
        """
        if self.differentiable:
            tensors, ctx.rest = self.gemm_class.save(*operands)
            ctx.save_for_backward(*tensors)

    def saved(self, ctx: Any) -> Sequence[Operand | None]:
        """Return the operands that `save` has stored in `ctx`, in the same order."""
        rest = ctx.rest
        ctx.rest = None
        return self.gemm_class.restore(ctx.saved_tensors, rest)
