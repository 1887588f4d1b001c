"""What the pieces of a fused layer compute with: products and norms in one precision, on one kind of device.

An operand is a tensor as a product takes it: quantized, or as it was. What makes it is told which product it is for, so that a
norm or an activation can write it in the format of that product's input and nothing is read and written once more to round it.

Queries, keys and values are one product of the same input, as gate and up are, and one large product is faster than three. Their
parameters are laid into one storage, one after the other, so the stacked matrix is a view and costs nothing. Whoever looks at a
parameter sees its own shape and name: optimizer, checkpoints and export know nothing of the stack. FSDP2 shards parameters one by
one and gathers them apart; there the matrix is put together when it is used. The same happens where a model was copied or
converted after its layers were fused: right, and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.pytorch_utils import Conv1D

from pretrain.precision.linear import PrecisionContext

Activation = Literal["swiglu", "gelu_tanh", "gelu"]
Operand = Any  # a Tensor, or a quantized tensor of Transformer Engine


class StackedWeight:
    """The weights [out_i, in] of `linears` as one matrix [sum of out_i, in], and their biases as one vector.

    `linears` are nn.Linear, or one transformers Conv1D, whose weight [in, out] is then `transposed`. Parameters are looked up
    at each use, as FSDP2 exchanges them.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        self.linears = tuple(linears)
        self.transposed = isinstance(linears[0], Conv1D)
        self._copy: Tensor | None = None  # in the compute dtype, where the parameters have another

    @property
    def weights(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    @property
    def biases(self) -> list[Tensor]:
        """Empty, or one a linear: no architecture here has a bias in one of them alone."""
        return [linear.bias for linear in self.linears if linear.bias is not None]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    @property
    def out_features(self) -> int:
        return sum(weight.shape[1 if self.transposed else 0] for weight in self.weights)

    @property
    def in_features(self) -> int:
        return self.weights[0].shape[0 if self.transposed else 1]

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

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[out] in `dtype`, without a graph; None where the linears have none."""
        return self._stacked([bias.detach() for bias in self.biases], dtype) if self.biases else None

    @property
    def main_gradient(self) -> Tensor | None:
        """The buffer that the weights' gradients add up in, laid out as the weights are; None where autograd collects them."""
        gradients = [getattr(weight, "main_grad", None) for weight in self.weights]
        return None if gradients[0] is None else _rows_of_one(gradients)

    def weight_gradients(self, stacked: Tensor) -> list[Tensor]:
        """The gradient of `matrix` [out, in] as that of each parameter, in its layout; views."""
        if self.transposed:
            return [stacked.t()]
        return list(stacked.split([len(weight) for weight in self.weights]))

    def bias_gradients(self, dy: Tensor) -> list[Tensor]:
        """Of each bias, from dy [tokens, out]; summed in FP32. Empty where the linears have none."""
        if not self.biases:
            return []
        return list(dy.sum(dim=0, dtype=torch.float32).split([len(bias) for bias in self.biases]))

    def _stacked(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        if self.transposed and parts[0].dim() == 2:
            return parts[0].t().to(dtype).contiguous()
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


class StackedProduct(Protocol):
    """y = x w^T + b for the stacked weights of some linears, forward and backward, each a call of its own."""

    name: str  # of its history and scales in a checkpoint
    members: tuple[str, ...]  # the linears that it stands in for, by Hugging Face name
    weights: StackedWeight

    def begin(self, x: Tensor) -> None:
        """Before the first use in a forward over `x` [tokens, ...]."""

    def end(self) -> None:
        """After the last use in a forward."""

    def operand(self, x: Tensor) -> Operand:
        """x [tokens, in] as the product's input, for forward and for the weight's gradient."""

    def forward(self, x: Operand) -> Tensor:
        """-> [tokens, out]."""

    def gradient_operand(self, dy: Tensor) -> Operand:
        """dy [tokens, out] as the product's output gradient."""

    def input_gradient(self, dy: Operand) -> Tensor:
        """-> [tokens, in]."""

    def weight_gradients(self, dy: Operand, x: Operand) -> list[Tensor | None]:
        """One a weight; None where it has been added to the main gradient."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm or LayerNorm before a product; its parameters are those of `module`, looked up at each use."""

    module: nn.Module
    kind: Literal["rms", "layer"]
    eps: float

    @property
    def parameters(self) -> list[Tensor]:
        bias = getattr(self.module, "bias", None)
        return [self.module.weight] if bias is None else [self.module.weight, bias]


class Arithmetic(Protocol):
    """One model's. In the first microbatch of a step it casts or quantizes the weights; the others share what was made there."""

    context: PrecisionContext  # tells the microbatch, and is told of every product and its operands
    differentiable: bool  # the forward under way will be differentiated

    def product(self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: bool) -> StackedProduct:
        """Of the linears `members`; `low_precision`: in the run's low precision, where it has one."""

    def norm(self, x: Tensor, norm: Norm, product: StackedProduct) -> tuple[Operand, tuple[Tensor, ...]]:
        """x [tokens, hidden] normalised, as the input of `product`, and the statistics that backward needs."""

    def norm_backward(
        self, dy: Tensor, x: Tensor, statistics: Sequence[Tensor], norm: Norm, residual: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x, `residual` [tokens, hidden] added to it, and those of the norm's parameters."""

    def activate(self, hidden: Tensor, kind: Activation, product: StackedProduct) -> tuple[Operand, Operand]:
        """hidden [tokens, 2 x width: gate, then up] (swiglu) or [tokens, width] as the input of `product`, and what
        `activate_backward` is to be given of that."""

    def activate_backward(
        self, d_activated: Tensor, hidden: Tensor, kind: Activation, kept: Operand, below: StackedProduct, above: StackedProduct
    ) -> tuple[Operand, Operand, list[Tensor]]:
        """The gradient of `hidden` as the output gradient of `below`, the activated values as the weight gradient of `above`
        takes them, and the gradients of the biases of `below`."""

    def is_first_in_forward(self) -> bool:
        """Whether the piece that asks is the first of a low-precision forward, whose backward is therefore the last."""

    def finish_backward(self) -> None:
        """After that backward."""

    def save(self, ctx: FunctionCtx, *operands: Operand) -> None:
        """ctx.save_for_backward for operands of any kind; of a quantized one, what the weight's gradient takes. In a forward that
        will not be differentiated nothing need be kept."""

    def saved(self, ctx: FunctionCtx) -> list[Operand]:
        """What `save` was given, in order."""
