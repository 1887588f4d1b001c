"""What the pieces of a fused layer compute with: the stacked weights of a product, the products, norms and activations.

Without kernels the arithmetic is torch's own operations, nothing quantized: a CPU trains with it, and tests hold the kernels to
it. With kernels (BF16 on a GPU) products are those of pretrain.precision.products, SwiGLU and RMSNorm are Triton's.
pretrain.model.fused.te_arithmetic adds products in low precision by Transformer Engine.

An operand is a tensor as a product takes it: quantized, or as it was. What makes it is told which product it is for, so that a
norm or an activation can write it in the format of that product's input.

Queries, keys and values are one product, as gate and up are: one large product is faster than three. Their parameters are laid
into one storage, one after the other, so the stacked matrix is a view, and optimizer, checkpoints and export know nothing of it.
Where they lie apart (FSDP2 gathers them so), the matrix is put together when it is used: right, and slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pretrain.precision import products
from pretrain.precision.linear import Backend, PrecisionContext
from pretrain.precision.observed import OPERANDS, ProductObserver

Operand = Any  # a Tensor, or a quantized tensor of Transformer Engine


class StackedWeight:
    """The weights of `linears` as one matrix [sum of out, in], and their biases as one vector. Parameters are looked up at each
    use, as FSDP2 exchanges them."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self._copy: Tensor | None = None  # in the compute dtype, where the parameters have another

    @property
    def weights(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    @property
    def biases(self) -> list[Tensor]:
        """The biases: none, or one for each linear, as no architecture here has a bias in one of them alone."""
        return [linear.bias for linear in self.linears if linear.bias is not None]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    @property
    def out_features(self) -> int:
        return sum(len(weight) for weight in self.weights)

    @property
    def in_features(self) -> int:
        return self.weights[0].shape[1]

    @torch.no_grad()
    def lay_together(self) -> None:
        """Move the parameters into one storage, in order; they keep their identity, shape and values."""
        for parameters in (self.weights, self.biases):
            if len(parameters) > 1:
                storage = torch.cat([parameter.data for parameter in parameters])
                for parameter, part in zip(parameters, storage.split([len(p) for p in parameters]), strict=True):
                    parameter.data = part

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in `dtype`, without a graph: a view of the parameters wherever they allow it."""
        return self._stacked([weight.detach() for weight in self.weights], dtype)

    def cached_matrix(self, dtype: torch.dtype, *, refresh: bool) -> Tensor:
        """`matrix`; where that is a cast, the last one made unless `refresh`, so that the microbatches of a step share it."""
        if self.weights[0].dtype == dtype:
            return self.matrix(dtype)
        if refresh or self._copy is None:
            self._copy = self.matrix(dtype)
        return self._copy

    def forget_copy(self) -> None:
        """The next `cached_matrix` is made again."""
        self._copy = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[out] in `dtype`, without a graph; None where the linears have none."""
        return self._stacked([bias.detach() for bias in self.biases], dtype) if self.biases else None

    @property
    def main_gradient(self) -> Tensor | None:
        """The buffer that the weights' gradients add up in, laid out as the weights are; None where autograd collects them."""
        gradients = [getattr(weight, "main_grad", None) for weight in self.weights]
        return None if gradients[0] is None else _rows_of_one(gradients)

    def weight_gradients(self, stacked: Tensor) -> list[Tensor]:
        """The gradient of `matrix` [out, in] as that of each parameter; views."""
        return list(stacked.split([len(weight) for weight in self.weights]))

    def bias_gradients(self, dy: Tensor) -> list[Tensor]:
        """Returns the gradient of each bias, from dy [tokens, out], summed in FP32. Empty where the linears have none."""
        if not self.biases:
            return []
        return list(dy.sum(dim=0, dtype=torch.float32).split([len(bias) for bias in self.biases]))

    def _stacked(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        whole = _rows_of_one(parts)
        return (torch.cat(parts) if whole is None else whole).to(dtype)


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after the other in one storage as one tensor, stacked along their first dimension; else None."""
    first = parts[0]
    for one, next_one in pairwise(parts):
        adjacent = next_one.data_ptr() == one.data_ptr() + one.numel() * one.element_size()
        if not adjacent or one.untyped_storage().data_ptr() != next_one.untyped_storage().data_ptr():
            return None
    if not all(part.is_contiguous() for part in parts):
        return None
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@dataclass(frozen=True)
class Norm:
    """An RMSNorm before a product; its weight is looked up at each use."""

    module: nn.Module
    eps: float

    @property
    def weight(self) -> Tensor:
        return self.module.weight


class StackedProduct:
    """y = x w^T + b for the stacked weights of some linears, forward and backward, each a call of its own."""

    low_precision = False  # of the forward under way, and of its backward

    def __init__(self, name: str, members: tuple[str, ...], weights: StackedWeight, arithmetic: Arithmetic) -> None:
        self.name = name  # of its history and scales in a checkpoint
        self.members = members  # the linears that it stands in for, by Hugging Face name
        self.weights = weights
        self.computed_low_by: tuple[Backend, ...] = ()  # the backends that compute it in low precision, when it is their turn
        self._arithmetic = arithmetic

    def begin(self, x: Tensor) -> None:
        """Call this before the first use in a forward over `x` [tokens, ...]; `forward` is the last use."""

    def operand(self, x: Tensor) -> Operand:
        """x [tokens, in] as the product's input, for forward and for the weight's gradient."""
        return x

    def adds(self, x: Operand) -> bool:
        """Whether `forward` of x adds a residual in the product itself, for less than a kernel or the next norm would."""
        return self._arithmetic.by_kernels and not self.weights.biases and products.takes(x)

    def forward(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        """-> [tokens, out], with `residual` added, which stays as it was."""
        weight = self._matrix(refresh=self._arithmetic.context.first_microbatch)
        if self._arithmetic.by_kernels and not self.weights.biases:
            return products.linear(x, weight, residual)
        y = F.linear(x, weight, self.weights.bias(x.dtype))
        return y if residual is None else y.add_(residual)

    def gradient_operand(self, dy: Tensor) -> Operand:
        """dy [tokens, out] as the product's output gradient."""
        return dy.contiguous() if self._arithmetic.by_kernels else dy

    def input_gradient(self, dy: Operand) -> Tensor:
        """-> [tokens, in]."""
        weight = self._matrix(refresh=False)
        return products.input_gradient(dy, weight) if self._arithmetic.by_kernels else dy @ weight

    def weight_gradients(self, dy: Operand, x: Operand) -> list[Tensor | None]:
        """Returns one for each weight; None where it has been added to the main gradient."""
        main_gradient = self.weights.main_gradient
        if main_gradient is None:
            return self.weights.weight_gradients(dy.t() @ x)
        products.add_product_(main_gradient, dy.t(), x)
        return [None] * len(self.weights.weights)

    def _matrix(self, *, refresh: bool) -> Tensor:
        dtype = self._arithmetic.context.compute_dtype
        if not self._arithmetic.differentiable:  # an evaluation's casts are not kept
            return self.weights.matrix(dtype)
        return self.weights.cached_matrix(dtype, refresh=refresh)

    @contextmanager
    def observed_by(self, observer: ProductObserver) -> Iterator[None]:
        """While entered, whatever the three products multiply is seen: their methods are watched from outside."""
        gemms = {"forward": self.forward, "input_gradient": self.input_gradient, "weight_gradients": self.weight_gradients}
        for (method, function), gemm in zip(gemms.items(), OPERANDS, strict=True):
            setattr(self, method, observer.watched(function, self.members, gemm))
        try:
            yield
        finally:
            for method in gemms:
                delattr(self, method)


class Arithmetic:
    """One model's. Norms and activations are computed in FP32 and rounded to the context's compute dtype: once, but for RMSNorm
    without kernels, which rounds before it multiplies by its weight as well, as transformers does."""

    def __init__(self, context: PrecisionContext, *, by_kernels: bool = False) -> None:
        """`by_kernels`: by those for BF16 on a GPU."""
        self.context = context
        self.by_kernels = by_kernels
        self.differentiable = True  # the forward under way will be differentiated
        self.keeps_rotated = False  # for backward, where heads are normed: queries, keys and values, else made again from qkv

    def product(
        self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: Sequence[Backend] = ()
    ) -> StackedProduct:
        """Returns the product of the linears `members`. `low_precision`: the backends that compute it in low precision, which
        torch's own products never have."""
        return StackedProduct(name, members, weights, self)

    def norm(
        self, x: Tensor, norm: Norm, product: StackedProduct, residual: Tensor | None = None
    ) -> tuple[Operand, tuple[Tensor, ...]]:
        """x [tokens, hidden], to which `residual` is added in place, normalised, as the input of `product`; and the statistics
        that backward needs."""
        if residual is not None:
            x.add_(residual)
        weight = self._weight_of(norm)
        if self.by_kernels and x.is_cuda:
            from pretrain.model.fused import norm_kernel

            y, rstd = norm_kernel.rms_norm(x, weight, norm.eps)
            return y, (rstd,)
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return ((wide * rstd).to(x.dtype) * weight.float()).to(x.dtype), (rstd,)

    def norm_backward(
        self, dy: Tensor, x: Tensor, statistics: Sequence[Tensor], norm: Norm, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of x, `residual` [tokens, hidden] added to it, and that of the norm's weight."""
        (rstd,), weight = statistics, self._weight_of(norm)
        if self.by_kernels and x.is_cuda:
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
        if self.by_kernels:
            from pretrain.model.fused import activation_kernel

            return activation_kernel.forward_bf16(hidden), None
        gate, up = hidden.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(hidden.dtype), None

    def activate_backward(
        self, d_activated: Tensor, hidden: Tensor, kept: Operand, gate_up: StackedProduct, down: StackedProduct
    ) -> tuple[Operand, Operand, list[Tensor]]:
        """The gradient of `hidden` as the output gradient of `gate_up`, the activated values as the weight gradient of `down`
        takes them, and the gradients of the biases of `gate_up`."""
        if self.by_kernels:
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
        return gate_up.gradient_operand(d_hidden), activated, gate_up.weights.bias_gradients(d_hidden)

    def _weight_of(self, norm: Norm) -> Tensor:
        """Rounded to the activations' dtype, as working copies are."""
        return norm.weight.detach().to(self.context.compute_dtype)

    def is_first_in_forward(self) -> bool:
        """Whether the piece that asks is the first of a low-precision forward, whose backward is therefore the last."""
        return False

    def finish_backward(self) -> None:
        """Call this at the end of that backward."""

    def save(self, ctx: FunctionCtx, *operands: Operand | None) -> None:
        """ctx.save_for_backward for operands of any kind; of a quantized one, what the weight's gradient takes."""
        ctx.save_for_backward(*operands)

    def saved(self, ctx: FunctionCtx) -> list[Operand | None]:
        """Returns what `save` was given, in order."""
        return list(ctx.saved_tensors)
