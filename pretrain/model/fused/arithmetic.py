"""What the pieces of a fused layer compute with: products and norms in one precision, on one kind of device.

An operand is a tensor as a product takes it: quantized, or as it was. What makes it is told which product it is for, so that a
norm or an activation can write it in the format of that product's input and nothing is read and written once more to round it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pretrain.model.fused.weights import StackedWeight
from pretrain.precision.product import ObservedProduct

Activation = Literal["swiglu", "gelu_tanh", "gelu"]
Operand = Any  # a Tensor, or a quantized tensor of Transformer Engine


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
    """One model's."""

    dtype: torch.dtype  # of activations
    first_microbatch: bool  # of a step: casts and quantized copies of the weights are made anew
    differentiable: bool  # the forward under way will be differentiated

    def product(self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: bool) -> StackedProduct:
        """Of the linears `members`; `low_precision`: in the run's recipe, where it has one."""

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

    def opens_forward(self) -> bool:
        """Whether the piece that asks is the first of a low-precision forward, whose backward is therefore the last."""

    def close_backward(self) -> None:
        """After that backward."""

    def save(self, ctx: FunctionCtx, *operands: Operand) -> None:
        """ctx.save_for_backward for operands of any kind; of a quantized one, what the weight's gradient takes. In a forward that
        will not be differentiated nothing need be kept."""

    def saved(self, ctx: FunctionCtx) -> list[Operand]:
        """What `save` was given, in order."""

    def observed_products(self) -> Any:
        """Collects, while entered, what the products multiply, by the names of their members."""


class Witness(ABC):
    """Of an arithmetic: notes the operands of its matrix products while somebody looks."""

    def __init__(self) -> None:
        self._seen: dict[str, list[ObservedProduct]] | None = None

    def note(self, product: StackedProduct, gemm: str, left: Operand, right: Operand) -> None:
        """`gemm`: forward, dgrad or wgrad, of operands as they are handed to the kernel."""
        if self._seen is not None:
            for member in product.members:
                self._seen.setdefault(member, []).append(ObservedProduct(gemm, self.kind(left), self.kind(right)))

    @abstractmethod
    def kind(self, operand: Operand) -> str:
        """What an operand is called in the audit."""

    @contextmanager
    def observed_products(self) -> Iterator[dict[str, list[ObservedProduct]]]:
        self._seen = {}
        try:
            yield self._seen
        finally:
            self._seen = None
