"""What a fused layer computes with: its products, and the norms, activations and rotations between them, which write the format
of the product after them.

Queries, keys and values are one product, as gate and up are: one large product is faster than three. Their parameters are laid
into one storage, one after the other, so the stacked matrix is a view, and optimizer, checkpoints and export know nothing of it.
Where they lie apart (FSDP2 gathers them so), the matrix is put together when it is used: right, and slower.

Between the products stand torch's own operations (`pretrain.model.fused.formulas`), Triton kernels for BF16 on a GPU, or
Transformer Engine, whose norms add the residual's gradient in backward and in low precision write quantized operands, as SwiGLU
does there. Under delayed scaling the rotation's backward does so too.
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
from torch.autograd.function import FunctionCtx

from pretrain.model.fused import formulas
from pretrain.precision.formats.definition import Role
from pretrain.precision.plain_forward import TwoForms
from pretrain.precision.product import (
    Backend,
    Multiplication,
    Operand,
    PlainProduct,
    PrecisionContext,
    Product,
    TakesTurns,
)
from pretrain.precision.transformer_engine import TransformerEngineProduct

_NOBODY = PrecisionContext(None, torch.bfloat16)  # to see products that are not in low precision
# heads of other sizes, such as 80 values, would leave lanes of a tile idle
ROTARY_KERNEL_DIMS = (32, 64, 128)


class By(IntEnum):
    """What computes norms and activations; each brings what those before it have."""

    FORMULAS, KERNELS, TRANSFORMER_ENGINE = range(3)


class CastProduct(PlainProduct):
    """Keeps the cast of a weight for a step's later microbatches, as others do a quantized one."""

    weight_operand = Product.weight_operand


class StackedProduct(TakesTurns, Multiplication):
    """y = x w^T + b for the weights [sum of out, in] and biases of some linears, stacked, by the `Product` of what computes now:
    forward and backward, each a call of its own, on operands that a norm or an activation may have written. Parameters are looked
    up at each use, as FSDP2 exchanges them."""

    def __init__(
        self,
        name: str,
        linears: Mapping[str, nn.Linear],
        arithmetic: Arithmetic,
        low_precision: Sequence[Backend] = (),
    ) -> None:
        """`name`: of its history and scales in a checkpoint. `linears`: by name in the model. `low_precision`: the backends that
        compute it in low precision, when it is their turn."""
        self.members, self.linears, self._arithmetic = (
            tuple(linears),
            tuple(linears.values()),
            arithmetic,
        )
        sizes = self.linears[0].in_features, sum(linear.out_features for linear in self.linears)
        self.products = {
            backend: backend.product(name, *sizes, bias=False) for backend in low_precision
        }
        self.plain = CastProduct(name)
        for product in (self.plain, *self.products.values()):
            product.members = self.members
        super().__init__(self.plain, arithmetic.context)

    # ── Parameters ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def weights(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    @property
    def biases(self) -> list[Tensor]:
        """The biases: none, or one for each linear, as no architecture here has a bias in one of them alone."""
        return [linear.bias for linear in self.linears if linear.bias is not None]

    @torch.no_grad()
    def lay_together(self) -> None:
        """Move the parameters into one storage, in order; they keep their identity, shape and values."""
        for parameters in (self.weights, self.biases):
            if len(parameters) > 1:
                storage = torch.cat([parameter.data for parameter in parameters])
                for parameter, part in zip(
                    parameters, storage.split([len(p) for p in parameters]), strict=True
                ):
                    parameter.data = part

    def matrix(self) -> Tensor:
        """The weights [out, in] in the compute dtype, without a graph: a view of the parameters wherever they allow it."""
        return _stacked(self.weights).to(self.context.compute_dtype)

    @property
    def main_gradient(self) -> Tensor | None:
        """The buffer that the weights' gradients add up in, laid out as the weights are; None where autograd collects them."""
        gradients = [getattr(weight, "main_grad", None) for weight in self.weights]
        return None if gradients[0] is None else _rows_of_one(gradients)

    def bias_gradients(self, dy: Tensor) -> list[Tensor]:
        """Returns the gradient of each bias, from dy [tokens, out], summed in FP32. Empty where the linears have none."""
        if not self.biases:
            return []
        return list(dy.sum(dim=0, dtype=torch.float32).split([len(bias) for bias in self.biases]))

    # ── Products ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def low_precision(self) -> bool:
        """Whether the forward under way is in low precision, and its backward."""
        return self.product is not self.plain

    def begin(self, x: Tensor) -> None:
        """Call this before the first use in a forward over `x` [tokens, ...]; `forward` is the last use."""
        self.product = self.low or self.plain
        self.seen_by = self.context if self.low_precision else _NOBODY
        self.refresh, self.differentiable = (
            self.context.first_microbatch,
            self._arithmetic.differentiable,
        )
        self.product.begin(x)

    def forward(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        """-> [tokens, out], `residual` and the bias added, see `output`."""
        bias = _stacked(self.biases).to(self.context.compute_dtype) if self.biases else None
        return self.output(x, self._weight(refresh=self.refresh), self.matrix, bias, residual)

    def input_gradient(self, dy: Operand) -> Tensor:
        """-> [tokens, in]."""
        return self.multiply("dgrad", dy, self._weight(refresh=False))

    def weight_gradients(self, dy: Operand, x: Operand) -> list[Tensor | None]:
        """Returns one for each weight; None where it has been added to the main gradient."""
        gradient = self.weight_gradient(dy, x, self.main_gradient)
        if gradient is None:
            return [None] * len(self.linears)
        return list(gradient.split([len(weight) for weight in self.weights]))

    def quantizer(self, role: Role) -> Any | None:
        """What a kernel that writes this operand quantizes with; None where `operand` makes it."""
        return self.product.quantizer(role, both=self.differentiable)

    def _weight(self, *, refresh: bool) -> Operand:
        """Asked for in forward and in backward: FSDP2 frees a matrix in between, of which nothing may be kept."""
        if not self.low_precision and self.linears[0].weight.dtype == self.context.compute_dtype:
            return self.matrix()
        return self.product.weight_operand(
            self.matrix, refresh=refresh, differentiable=self.differentiable
        )


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    parts = [parameter.detach() for parameter in parameters]
    whole = _rows_of_one(parts)
    return torch.cat(parts) if whole is None else whole


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after the other in one storage as one tensor, stacked along their first dimension; else None."""
    first = parts[0]
    for one, next_one in pairwise(parts):
        adjacent = next_one.data_ptr() == one.data_ptr() + one.numel() * one.element_size()
        if (
            not adjacent
            or one.untyped_storage().data_ptr() != next_one.untyped_storage().data_ptr()
        ):
            return None
    if not all(part.is_contiguous() for part in parts):
        return None
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@dataclass(eq=False)
class Arithmetic:
    """What the fused layers of one model have in common, and what they compute between products: in FP32, rounded to the
    context's compute dtype. A `norm` is a module of transformers, whose weight is looked up at each use."""

    context: PrecisionContext
    by: By = By.FORMULAS
    differentiable: bool = True  # the forward under way will be differentiated
    # for backward, where heads are normed: queries, keys and values, else made again from qkv
    keeps_rotated: bool = False

    def norm(self, x: Tensor, norm: nn.Module, product: StackedProduct) -> tuple[Operand, Tensor]:
        """x [tokens, hidden] normalised, as the input of `product`, and 1 / root mean square, FP32, for backward."""
        weight, eps = self._weight_of(norm), norm.variance_epsilon
        if self.by == By.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            options = (tex.DType.kBFloat16, 0, False)
            if (quantizer := product.quantizer("input")) is not None and product.seen_by.observers:
                product.show("input", tex.rmsnorm_fwd(x, weight, eps, None, None, *options)[0])
            y, _, rstd = tex.rmsnorm_fwd(x, weight, eps, None, quantizer, *options)
            return (product.operand("input", y) if quantizer is None else y), rstd
        y, rstd = self.kernels.norm.rms_norm(x, weight, eps)
        return product.operand("input", y), rstd

    def norm_backward(
        self, dy: Tensor, x: Tensor, rstd: Tensor, norm: nn.Module, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradient of x, `residual` [tokens, hidden] added to it, and that of the norm's weight."""
        weight = self._weight_of(norm)
        if self.by == By.TRANSFORMER_ENGINE:
            import transformer_engine_torch as tex

            return tex.rmsnorm_bwd_add(dy, x, residual, rstd, weight, 0, False)
        return self.kernels.norm.rms_norm_backward(dy, x, rstd, weight, residual)

    def _weight_of(self, norm: nn.Module) -> Tensor:
        """Rounded to the activations' dtype, as working copies are."""
        return norm.weight.detach().to(self.context.compute_dtype)

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """The modules with norms, rotations and activations: the formulas, or kernels for BF16 on a GPU."""
        if self.by == By.FORMULAS:
            return SimpleNamespace(norm=formulas, rotary=formulas, activation=formulas)
        from pretrain.model.fused import activation_kernel, norm_kernel, rotary_kernel

        return SimpleNamespace(norm=norm_kernel, rotary=rotary_kernel, activation=activation_kernel)

    def rotation(self, heads: formulas.Heads) -> ModuleType:
        """What has `rotate` and `rotate_backward` for heads like these."""
        return self.kernels.rotary if heads.dim in ROTARY_KERNEL_DIMS else formulas

    def rotate_backward(
        self,
        gradients: list[Tensor],
        qkv: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads: formulas.Heads,
        norms: formulas.HeadNorms | None,
        product: StackedProduct,
    ) -> tuple[Operand, Sequence[Tensor | None], list[Tensor]]:
        """The gradient of `qkv` as the output gradient of `product`, and those of the head norms' weights and of the biases.
        `gradients` is empty afterwards: memory for what is made of them."""
        rotation, quantizer, rest = (
            self.rotation(heads),
            product.quantizer("grad_output"),
            (qkv, cos, sin, heads, norms),
        )
        if (
            quantizer is None
            or product.biases
            or rotation is formulas
            or not rotation.writes(quantizer, gradients[0])
        ):
            dqkv, *of_norms = rotation.rotate_backward(*gradients, *rest)
            gradients.clear()
            return product.operand("grad_output", dqkv), of_norms, product.bias_gradients(dqkv)
        if product.seen_by.observers:  # who looks at the gradient wants it unquantized
            product.show("grad_output", rotation.rotate_backward(*gradients, *rest)[0])
        codes, of_norms = rotation.quantized_rotate_backward(quantizer, gradients, *rest)
        gradients.clear()
        return codes, of_norms, []

    def activate(
        self, hidden: Tensor, gate_up: StackedProduct, down: StackedProduct
    ) -> tuple[Operand, Operand | None]:
        """hidden [tokens, 2 x width: gate, then up], the output of `gate_up` -> silu(gate) * up as the input of `down`, and what
        `activate_backward` is to be given as `kept`."""
        if (quantizer := down.quantizer("input")) is not None:
            import transformer_engine_torch as tex

            if down.seen_by.observers:
                down.show("input", tex.swiglu(hidden, None))
            if gate_up.low_precision and self.kernels.activation.takes(hidden, quantizer):
                return self.kernels.activation.quantized_swiglu(hidden, quantizer)
            activated = tex.swiglu(hidden, quantizer)
            return activated, activated
        operand = down.operand("input", self.kernels.activation.swiglu(hidden))
        return operand, operand if isinstance(operand, TwoForms) else None

    def activate_backward(
        self,
        d_activated: Tensor,
        hidden: Tensor,
        kept: Operand,
        gate_up: StackedProduct,
        down: StackedProduct,
    ) -> tuple[Operand, Operand]:
        """The gradient of `hidden` as the output gradient of `gate_up`, and the activated values as the weight gradient of `down`
        takes them."""
        if (of_down := down.quantizer("input")) is None:
            d_hidden, activated = self.kernels.activation.swiglu_backward(d_activated, hidden)
            activated = down.product.operand("input", activated) if kept is None else kept
            return gate_up.operand("grad_output", d_hidden), activated
        import transformer_engine_torch as tex

        of_gate_up = gate_up.quantizer("grad_output")
        if gate_up.seen_by.observers:  # who looks at the gradient wants it unquantized
            gate_up.show("grad_output", tex.dswiglu(d_activated, hidden, None))
        if gate_up.low_precision and self.kernels.activation.takes(hidden, of_down):
            return self.kernels.activation.quantized_swiglu_backward(
                d_activated, hidden, of_gate_up, of_down, kept
            )
        return tex.dswiglu(d_activated.contiguous(), hidden, of_gate_up), kept

    @property
    def library(self) -> type[Product]:
        """What takes operands apart for autograd, and knows when a backward ends."""
        return TransformerEngineProduct if self.by == By.TRANSFORMER_ENGINE else PlainProduct

    def save(self, ctx: FunctionCtx, *operands: Operand | None) -> None:
        """ctx.save_for_backward for operands of any kind; of a quantized one, what the weight's gradient takes. Nothing where
        there is no backward."""
        if self.differentiable:
            tensors, ctx.rest = self.library.save(
                *(each.low if isinstance(each, TwoForms) else each for each in operands)
            )
            ctx.save_for_backward(*tensors)

    def saved(self, ctx: FunctionCtx) -> Sequence[Operand | None]:
        """Returns what `save` was given, in order."""
        rest, ctx.rest = ctx.rest, None
        return self.library.restore(ctx.saved_tensors, rest)
