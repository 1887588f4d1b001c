"""The three products of a linear, in whatever computes them: one interface, the linears of a model, and what they share.

    forward  y  = x w^T + b     x [tokens, in], w [out, in]
    dgrad    dx = dy w          dy [tokens, out]
    wgrad    dw = dy^T x        added to the weight's FP32 `main_grad` where it has one

Implementations: `PlainProduct` here, in the dtype of the operands; `emulation.EmulatedProduct`;
`transformer_engine.TransformerEngineProduct`. Callers: `LinearFunction` (a lone linear), the fused nodes of a decoder layer
(pretrain.model.fused), and each chunk of the LM head (pretrain.model.loss.head).

A model's linears are LowPrecisionLinears: they hold the very Parameters of the modules they stand in for, under the same names,
so that tying, checkpoints, sharding and export see the model that transformers built. torch.compile ends a graph before each.

A caller goes through one microbatch in this order (`LinearCall` does); the product knows which axis each of the three sums over.

    product.begin(x)
    weight = product.weight_operand(matrix, refresh=first_microbatch, differentiable=True)
    input = product.operand("input", x)
    y = product.multiply("forward", input, weight, torch.bfloat16, bias)
    product.end()
    ...
    gradient = product.operand("grad_output", dy)
    dx = product.multiply("dgrad", gradient, weight, torch.bfloat16)
    product.accumulate(main_grad, gradient, input)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from foundation.attributes import holding
from pretrain.precision import searched
from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import watched

PREFIX = "fp8/"  # of the names that `Backend.state` gives, which stand beside the optimizer's in a checkpoint
Operand = Any  # a Tensor, an emulated operand, or a quantized tensor of Transformer Engine
Gemm = Literal["forward", "dgrad", "wgrad"]


class Product:
    """The products of one linear, or of several whose weights are stacked into one."""

    supports_fused_loss: bool = False  # as the LM head: its output gradient may come quantized from the softmax

    def __init__(self, name: str) -> None:
        self.name = name  # of its history and its scales in a checkpoint
        self.members: Sequence[str] = (name,)  # the linears that it computes, for whoever looks on
        self.weight: Operand | None = None  # what is kept of the weight for a step's later microbatches

    def begin(self, x: Tensor) -> None:
        """Called before the first operand of a forward over `x` [tokens, in]."""

    def end(self) -> None:
        """Called after the forward product."""

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> Operand:
        """x [rows, features] as a factor of its two products, or of the forward alone unless `both`."""
        raise NotImplementedError

    def quantizer(self, role: Role, *, both: bool) -> Any | None:
        """The library's own, for a kernel that writes the operand itself; None where only `operand` makes it."""
        return None

    def weight_operand(self, matrix: Callable[[], Tensor], *, refresh: bool, differentiable: bool) -> Operand:
        """The weight as a factor. `matrix` gives it, [out, in], where it must be quantized: where `refresh` (the first microbatch
        of a step), and where nothing is kept from one. Evaluation, not `differentiable`, leaves alone what training keeps."""
        if not differentiable:
            return self.operand("weight", matrix(), both=False)
        if refresh or self.weight is None:
            self.weight = None  # or two of the largest would be in memory at once
            self.weight = self.operand("weight", matrix())
        return self.weight

    def multiply(self, gemm: Gemm, left: Operand, right: Operand, dtype: torch.dtype, *added: Tensor | None) -> Tensor:
        """The result of `gemm` in `dtype`, summed in FP32. `added` to a forward product: a bias [out], before it is rounded, and
        a residual [tokens, out], before or after, which stays as it was."""
        raise NotImplementedError

    def accumulate(self, total: Tensor, left: Operand, right: Operand, *, overwrite: bool = False) -> None:
        """Adds the weight's gradient to `total` [out, in], FP32 or BF16; `overwrite`: takes its place."""
        (total.zero_() if overwrite else total).add_(self.multiply("wgrad", left, right, torch.float32))

    @staticmethod
    def codes(operand: Operand) -> Tensor:
        """The values that the forward product takes, in whatever holds them: for whoever compares two operands."""
        return operand

    @staticmethod
    def save(*operands: Operand) -> tuple[Sequence[Tensor | None], Any]:
        """Inputs, needed from now on for weights' gradients alone, and other tensors: as autograd can save them, with what
        `restore` needs beside them."""
        return operands, None

    @staticmethod
    def restore(tensors: Sequence[Tensor | None], rest: Any) -> Sequence[Operand]:
        return tensors

    @staticmethod
    def is_first_in_forward() -> bool:
        """Whether no quantized product of this forward came before, asked once by each: its backward is the last, and calls
        `finish_backward`."""
        return False

    @staticmethod
    def finish_backward() -> None:
        """All gradients of this microbatch have been quantized: histories of delayed scaling move on."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, first_microbatch: bool, context: PrecisionContext | None = None
    ) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out], all of one dtype -> [tokens, out], differentiable in each.

        `first_microbatch` quantizes the weight; later microbatches of a step use what was kept of it. Gradients have their
        tensors' dtypes; the weight's is added to its `main_grad` where it has one. `context`: whose observers look on."""
        context = context or PrecisionContext(None, x.dtype)
        call = LinearCall(self, context, refresh=first_microbatch, differentiable=torch.is_grad_enabled())
        return LinearFunction.apply(x, weight, bias, call)


class PlainProduct(Product):
    """Operands as they are: nothing is quantized."""

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> Tensor:
        return x.contiguous() if x.is_cuda else x

    def weight_operand(self, matrix: Callable[[], Tensor], **options: bool) -> Tensor:
        return matrix()

    def multiply(self, gemm: Gemm, left: Tensor, right: Tensor, dtype: torch.dtype, *added: Tensor | None) -> Tensor:
        if gemm == "forward":
            return searched.linear(left, right, *added)
        return (searched.input_gradient(left, right) if gemm == "dgrad" else left.t() @ right).to(dtype)

    def accumulate(self, total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
        searched.add_product_(total, left.t(), right, overwrite=overwrite)


class LinearCall:
    """One forward of a product over a microbatch (or a part of it), and its backward. The context's observers look on."""

    def __init__(self, product: Product, context: PrecisionContext, *, refresh: bool, differentiable: bool) -> None:
        """`refresh`: the weight is quantized, though a copy may be kept. `differentiable`: there may be a backward."""
        self.product, self.context, self._refresh, self._differentiable = product, context, refresh, differentiable
        self.tensors: Sequence[Tensor | None] = ()  # what is kept of the input, for the weight's gradient

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keeps: bool) -> Tensor:
        """`keeps`: a gradient of the weight will be computed."""
        product, context = self.product, self.context
        context.show(product.name, "input", x)
        context.show(product.name, "weight", weight)
        product.begin(x)
        self._ends_backward = self._differentiable and product.is_first_in_forward()
        self._weight = product.weight_operand(lambda: weight, refresh=self._refresh, differentiable=self._differentiable)
        context.show_weight(product, self._weight, lambda: weight)
        operand = product.operand("input", x, both=keeps)
        y = product.multiply("forward", operand, self._weight, x.dtype, bias)
        product.end()
        self.tensors, self._rest = product.save(operand) if keeps else ((), None)
        context.show_result(product.name, "forward", y, bias)
        return y

    def backward(
        self, dy: Tensor, needs: Sequence[bool], dtype: torch.dtype, total: Tensor | None, *, overwrite: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of input and weight that it `needs`: dx in dy's dtype; dw in `dtype`, or None if added to `total`."""
        product, context, dx, dw = self.product, self.context, None, None
        context.show(product.name, "grad_output", dy)
        gradient = product.operand("grad_output", dy.contiguous())
        if needs[0]:
            dx = product.multiply("dgrad", gradient, self._weight, dy.dtype)
            context.show_result(product.name, "dgrad", dx)
        if needs[1]:
            (x,), self.tensors = product.restore(self.tensors, self._rest), ()  # autograd's graph would keep them
            dw = context.weight_gradient(product, gradient, x, dtype, total, overwrite=overwrite)
        if self._ends_backward:
            product.finish_backward()
        return dx, dw


class LinearFunction(torch.autograd.Function):
    """A linear by itself: x, weight and bias in, y out, see `Product.__call__`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        ctx.call, ctx.dtypes = call, (weight.dtype, None if bias is None else bias.dtype)
        ctx.main_gradient = getattr(weight, "main_grad", None)
        keeps = ctx.needs_input_grad[1]
        y = call.forward(x.detach(), weight.detach(), None if bias is None else bias.detach(), keeps=keeps)
        ctx.save_for_backward(*call.tensors)
        call.tensors = ()  # autograd holds them, or has them computed again
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, (weight_dtype, bias_dtype) = ctx.call, ctx.dtypes
        call.tensors = ctx.saved_tensors
        dx, dw = call.backward(dy, ctx.needs_input_grad[:2], weight_dtype, ctx.main_gradient)
        db = dy.sum(0, dtype=torch.float32).to(bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def summing_where(parameter: Tensor, copy: Tensor, *, transposed: bool = False) -> Tensor:
    """`copy`, a cast or (`transposed`) a transpose of `parameter`, whose gradient adds up where the parameter's does: in its
    `main_grad`. Shapes do not tell: a square matrix has the same both ways."""
    main = getattr(parameter, "main_grad", None)
    if main is not None and copy is not parameter:
        copy.main_grad = main.t() if transposed else main
    return copy


class Backend(Protocol):
    """What computes one model's low-precision products; made once a model."""

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> Product:
        """The product of the linear called `name`, with a state of its own where the precision keeps one."""

    def forward(self) -> AbstractContextManager[Any]:
        """Entered around each low-precision forward of the whole model. Leaving it, delayed scaling makes new scales."""

    def checkpoint(self, function: Callable[..., Any], *args: Any, again: Callable[[], AbstractContextManager[None]]) -> Any:
        """function(*args) now, and once more in backward, inside of `again()`, with the same scales and random numbers."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, live, as unquantized tensors; empty where every scale comes from the tensor it scales."""

    def reset(self) -> None:
        """Forget history and cached weights, as before the first forward."""

    def describe(self) -> str:
        """Library and version, for the audit."""


@dataclass
class PrecisionContext:
    """What all products of one model share: whether a low-precision forward is under way, in which microbatch of its step, and
    who is watching. `backend` is the one that computes now, None where nothing is quantized."""

    backend: Backend | None
    compute_dtype: torch.dtype  # of activations
    evaluates_low: bool = False  # forwards of evaluation are in low precision too
    low_precision: bool = False  # a low-precision forward is under way
    first_microbatch: bool = True
    # Who is watching is called with what `show`, `show_weight` and `show_result` say.
    observers: list[Callable[[str, Role, Tensor], None]] = field(default_factory=list)
    weight_observers: list[Callable[[Product, Operand, Tensor], None]] = field(default_factory=list)
    result_observers: list[Callable[[str, Gemm, Tensor, Tensor | None], None]] = field(default_factory=list)
    quantizing: bool = True  # false while parity runs the same model with its quantization off
    backends: Sequence[Backend] = ()  # of all precisions that the run computes in, one after the other; none: `backend` alone

    def __post_init__(self) -> None:
        self.backends = self.backends or ([self.backend] if self.backend else [])

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Put this around a forward of the whole model."""
        if self.backend is None or not self.quantizing or not (training or self.evaluates_low):
            yield
            return
        with self.backend.forward(), holding(self, low_precision=True):
            yield

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` now, and again in backward, in this context both times: else it would be in another precision then."""
        if self.backend is None or not self.quantizing:
            return checkpoint(function, *args, use_reentrant=False)
        return self.backend.checkpoint(function, *args, again=lambda: holding(self, low_precision=True))

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] times weight [out, in], in the low precision; operands in another dtype than BF16 are cast here."""
        x, weight = x.to(self.compute_dtype), summing_where(weight, weight.to(self.compute_dtype))
        bias = None if bias is None else bias.to(self.compute_dtype)
        return product(x, weight, bias, first_microbatch=self.first_microbatch, context=self)

    def weight_gradient(
        self, product: Product, dy: Operand, x: Operand, dtype: torch.dtype, total: Tensor | None, *, overwrite: bool = False
    ) -> Tensor | None:
        """The weight's gradient [out, in] in `dtype`; None where it was added to `total`, or with `overwrite` took its place. Who
        looks at results sees this product alone."""
        if total is None or self.result_observers:
            gradient = product.multiply("wgrad", dy, x, dtype if total is None else torch.float32)
            self.show_result(product.name, "wgrad", gradient)
            if total is None:
                return gradient
            (total.zero_() if overwrite else total).add_(gradient)
        else:
            product.accumulate(total, dy, x, overwrite=overwrite)
        return None

    def show(self, name: str, role: Role, tensor: Tensor) -> None:
        """An operand of the product `name`, before it is quantized, [tokens or out, features], to all observers."""
        for observer in self.observers:
            observer(name, role, tensor.detach())

    def show_weight(self, product: Product, operand: Operand, matrix: Callable[[], Tensor]) -> None:
        """A weight as a forward product is about to take it, and as it is, [out, in], to all who look on."""
        for observer in self.weight_observers:
            observer(product, operand, matrix().detach())

    def show_result(self, name: str, gemm: Gemm, result: Tensor, bias: Tensor | None = None) -> None:
        """What a low-precision product gave, to all who look on; `bias` is what has been added to it."""
        for observer in self.result_observers:
            observer(name, gemm, result.detach(), bias)

    def state(self) -> dict[str, Tensor]:
        """Histories and scales of delayed scaling, live; other precisions keep nothing between two steps."""
        return self.backend.state() if self.backend else {}

    def saved_state(self) -> dict[str, Tensor]:
        """`state` of every precision of the run, whose turn it is or not: what a checkpoint holds."""
        return {name: tensor for backend in self.backends for name, tensor in backend.state().items()}

    def copied_state(self) -> list[Tensor]:
        """Copies `saved_state`, on its device, for `go_back`."""
        live = list(self.saved_state().values())
        copies = [torch.empty_like(tensor) for tensor in live]
        if live:
            torch._foreach_copy_(copies, live)
        return copies

    def go_back(self, copies: Sequence[Tensor]) -> None:
        """Histories and scales as they were when `copies` were made: an overflow would last in a history for 1,024 microbatches.
        Whatever else backends hold is forgotten, such as scales that a broken pass put aside for recomputing a layer."""
        self.forget()
        for tensor, before in zip(self.saved_state().values(), copies, strict=True):
            tensor.copy_(before)

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Put this around passes that are not training's: history and scales are afterwards what they were before."""
        copies = self.copied_state()
        try:
            yield
        finally:
            self.go_back(copies)

    def forget(self) -> None:
        """Puts all histories and scales back to what they were before the first forward."""
        for backend in self.backends:
            backend.reset()


class TakesTurns:
    """What has products of its own in some of the run's precisions, by the backend that computes them, and none in the others."""

    context: PrecisionContext
    products: dict[Backend | None, Product]

    @property
    def is_low(self) -> bool:
        """Whether the backend whose turn it is has a product here."""
        return self.context.backend in self.products

    @property
    def product(self) -> Product:
        return self.products[self.context.backend]


class LowPrecisionLinear(TakesTurns, nn.Module):
    """Stands in for an nn.Linear or a transformers Conv1D, whose weight [in, out] is `transposed`."""

    def __init__(self, linear: nn.Linear | Conv1D, name: str, product: Product, context: PrecisionContext) -> None:
        """`product`: of the context's present backend."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.transposed = isinstance(linear, Conv1D)
        self.name = name
        self.products = {context.backend: product}
        self.context = context

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight = summing_where(self.weight, self.weight.t(), transposed=True) if self.transposed else self.weight
        rows = x.reshape(-1, x.shape[-1])
        if self.context.low_precision and self.is_low:
            return self.context.multiply(self.product, rows, weight, self.bias).view(*x.shape[:-1], -1)
        weight, bias = summing_where(weight, weight.to(x.dtype)), None if self.bias is None else self.bias.to(x.dtype)
        if self.context.quantizing:
            with watched((self.name,), "forward"):
                return F.linear(x, weight, bias)
        return PlainProduct(self.name)(rows, weight, bias, first_microbatch=True).view(*x.shape[:-1], -1)
