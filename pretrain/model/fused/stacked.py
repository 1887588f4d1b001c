"""The stacked weights of a fused layer, and their product.

Queries, keys and values are one product, as gate and up are: one large product is faster than three. Their parameters are laid
into one storage, one after the other, so the stacked matrix is a view, and optimizer, checkpoints and export know nothing of it.
Where they lie apart (FSDP2 gathers them so), the matrix is put together when it is used: right, and slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import OPERANDS, ProductObserver
from pretrain.precision.product import Backend, Gemm, Operand, PlainProduct, PrecisionContext, Product


class By(IntEnum):
    """What computes norms and activations (`Arithmetic`); each brings what those before it have."""

    FORMULAS, KERNELS, TRANSFORMER_ENGINE = range(3)


@dataclass(frozen=True)
class Heads:
    """A row of the stacked query, key and value product holds `query` heads, then `kv` key heads, then `kv` value heads, of `dim`
    values each."""

    query: int
    kv: int
    dim: int

    @property
    def rotated(self) -> int:
        """Heads that carry a position: the queries' and the keys'."""
        return self.query + self.kv

    @property
    def count(self) -> int:
        return self.query + 2 * self.kv

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.count * self.dim

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of `rows` [T, width]: queries [T, query, dim], keys and values [T, kv, dim]."""
        queries, keys, values = rows.unflatten(1, (self.count, self.dim)).split((self.query, self.kv, self.kv), dim=1)
        return queries, keys, values


@dataclass(frozen=True)
class HeadNorms:
    """The root-mean-square norms that Qwen3 puts on every query and key head: their weights [dim], any float dtype."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(eq=False)
class Shared:
    """What the fused layers of one model have in common."""

    context: PrecisionContext
    by: By = By.FORMULAS
    differentiable: bool = True  # the forward under way will be differentiated
    keeps_rotated: bool = False  # for backward, where heads are normed: queries, keys and values, else made again from qkv


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
        return _stacked(self.weights).to(dtype)

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
        return _stacked(self.biases).to(dtype) if self.biases else None

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


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    parts = [parameter.detach() for parameter in parameters]
    whole = _rows_of_one(parts)
    return torch.cat(parts) if whole is None else whole


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


class StackedProduct:
    """y = x w^T + b for the stacked weights of some linears, by the `Product` of what computes now: forward and backward, each
    a call of its own, on operands that a norm or an activation may have written."""

    def __init__(
        self,
        name: str,
        members: tuple[str, ...],
        weights: StackedWeight,
        shared: Shared,
        low_precision: Sequence[Backend] = (),
    ) -> None:
        """`name`: of its history and scales in a checkpoint. `members`: the linears that it stands in for, by Hugging Face name.
        `low_precision`: the backends that compute it in low precision, when it is their turn."""
        self.name, self.members, self.weights, self._shared = name, members, weights, shared
        sizes = weights.in_features, weights.out_features
        self.low = {backend: backend.product(name, *sizes, bias=False) for backend in low_precision}
        for product in self.low.values():
            product.members = members
        self._plain = PlainProduct(name, searched=shared.by >= By.KERNELS)
        self.product: Product = self._plain  # of the forward under way, and of its backward

    @property
    def low_precision(self) -> bool:
        """Whether the forward under way is in low precision, and its backward."""
        return self.product is not self._plain

    def begin(self, x: Tensor) -> None:
        """Call this before the first use in a forward over `x` [tokens, ...]; `forward` is the last use."""
        context = self._shared.context
        self.product = self.low.get(context.backend, self._plain) if context.low_precision else self._plain
        self.product.begin(x)

    def operand(self, x: Tensor) -> Operand:
        """x [tokens, in] as the product's input, for forward and for the weight's gradient."""
        self.show("input", x)
        return self.product.operand("input", x, both=self._shared.differentiable)

    def forward(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        """-> [tokens, out], with `residual` added, which stays as it was: in the product itself where that can."""
        context, product, alone = self._shared.context, self.product, self._results_watched
        if self.watched:  # the weights as they are now, whatever copy of them multiplies
            self.show("weight", self.weights.matrix(context.compute_dtype))
        weight = self._weight_operand(refresh=context.first_microbatch)
        bias = self.weights.bias(context.compute_dtype)
        y = product.multiply("forward", x, weight, context.compute_dtype, bias, residual=None if alone else residual)
        self._show_result("forward", y, bias)
        product.end()
        return y.add_(residual) if alone and residual is not None else y

    def gradient_operand(self, dy: Tensor) -> Operand:
        """dy [tokens, out] as the product's output gradient."""
        self.show("grad_output", dy)
        return self.product.operand("grad_output", dy)

    def input_gradient(self, dy: Operand) -> Tensor:
        """-> [tokens, in]."""
        weight = self._weight_operand(refresh=False)
        dx = self.product.multiply("dgrad", dy, weight, self._shared.context.compute_dtype)
        self._show_result("dgrad", dx)
        return dx

    def weight_gradients(self, dy: Operand, x: Operand) -> list[Tensor | None]:
        """Returns one for each weight; None where it has been added to the main gradient."""
        total, product = self.weights.main_gradient, self.product
        if total is not None and not self._results_watched:
            product.accumulate(total, dy, x)
            return [None] * len(self.weights.weights)
        gradient = product.multiply("wgrad", dy, x, self._shared.context.compute_dtype if total is None else torch.float32)
        self._show_result("wgrad", gradient)
        if total is None:
            return self.weights.weight_gradients(gradient)
        total.add_(gradient)
        return [None] * len(self.weights.weights)

    def quantizer(self, role: Role) -> Any | None:
        """What a kernel that writes this operand quantizes with; None where `operand` or `gradient_operand` makes it."""
        return self.product.quantizer(role, both=role == "grad_output" or self._shared.differentiable)

    def show(self, role: Role, tensor: Tensor) -> None:
        """Shows an operand to whoever looks at operands: the statistics of a step."""
        if self.low_precision:
            self._shared.context.show(self.name, role, tensor)

    @property
    def watched(self) -> bool:
        return self.low_precision and bool(self._shared.context.observers)

    @property
    def _results_watched(self) -> bool:
        """Whether somebody looks at results, who is to see this product alone."""
        return self.low_precision and bool(self._shared.context.result_observers)

    def _show_result(self, gemm: Gemm, result: Tensor, bias: Tensor | None = None) -> None:
        if self._results_watched:
            self._shared.context.show_result(self.name, gemm, result, bias)

    def _weight_operand(self, *, refresh: bool) -> Operand:
        """Asked for in forward and in backward: FSDP2 frees a matrix in between."""
        dtype, differentiable = self._shared.context.compute_dtype, self._shared.differentiable

        def matrix() -> Tensor:
            if differentiable and not self.low_precision:
                return self.weights.cached_matrix(dtype, refresh=refresh)
            return self.weights.matrix(dtype)  # an evaluation's casts are not kept, nor is what is quantized

        return self.product.weight_operand(matrix, refresh=refresh, differentiable=differentiable)

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
