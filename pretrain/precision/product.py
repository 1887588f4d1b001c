"""The three products of a linear, in whatever computes them: one interface, the linears of a model, and what they share.

    forward  y  = x w^T + b     x [tokens, in], w [out, in]
    dgrad    dx = dy w          dy [tokens, out]
    wgrad    dw = dy^T x        added to the weight's FP32 `main_grad` where it has one

A model's linears are LowPrecisionLinears: they hold the very Parameters of the modules they stand in for, under the same names,
so that tying, checkpoints, sharding and export see the model that transformers built. torch.compile ends a graph before each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from foundation.overrides import overridden
from pretrain.precision import searched
from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import watched

# of the names that `Backend.state` gives, which stand beside the optimizer's in a checkpoint
PREFIX = "fp8/"
Operand = Any  # a Tensor, an emulated operand, or a quantized tensor of Transformer Engine
Saved = tuple[Sequence[Tensor | None], Any]  # of operands, see `Product.save`
Gemm = Literal["forward", "dgrad", "wgrad"]


class Product:
    """The products of one linear, or of several whose weights are stacked into one."""

    # as the LM head: its output gradient may come quantized from the softmax
    supports_fused_loss: bool = False

    def __init__(self, name: str) -> None:
        self.name = name  # of its history and its scales in a checkpoint
        self.members: Sequence[str] = (name,)  # the linears that it computes, for whoever looks on
        # what is kept of the weight for a step's later microbatches
        self.weight: Operand | None = None

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

    def weight_operand(
        self, matrix: Callable[[], Tensor], *, refresh: bool, differentiable: bool
    ) -> Operand:
        """The weight as a factor: what was kept of it, or quantized anew from `matrix`(), [out, in], under `refresh` (a step's
        first microbatch) and where nothing was kept. Evaluation, not `differentiable`, leaves alone what training keeps."""
        if not differentiable:
            return self.operand("weight", matrix(), both=False)
        if refresh or self.weight is None:
            self.weight = None  # or two of the largest would be in memory at once
            self.weight = self.operand("weight", matrix())
        return self.weight

    def multiply(
        self, gemm: Gemm, left: Operand, right: Operand, dtype: torch.dtype, *added: Tensor | None
    ) -> Tensor:
        """The result of `gemm` in `dtype`, summed in FP32. `added` to a forward product: a bias [out], before it is rounded, and
        a residual [tokens, out], before or after, which stays as it was."""
        raise NotImplementedError

    def accumulate(
        self, total: Tensor, left: Operand, right: Operand, *, overwrite: bool = False
    ) -> None:
        """Adds the weight's gradient to `total` [out, in], FP32 or BF16; `overwrite`: takes its place."""
        add_to(total, self.multiply("wgrad", left, right, torch.float32), overwrite=overwrite)

    @staticmethod
    def codes(operand: Operand) -> Tensor:
        """The values that the forward product takes, in whatever holds them: for whoever compares two operands."""
        return operand

    @staticmethod
    def save(*operands: Operand) -> Saved:
        """Splits operands into tensors that autograd saves and the rest that `restore` needs. From here on an input serves the
        weight's gradient alone."""
        return operands, None

    @staticmethod
    def restore(tensors: Sequence[Tensor | None], rest: Any) -> Sequence[Operand]:
        return tensors

    @staticmethod
    def is_first_in_forward() -> bool:
        """True for the first product of a forward; each asks once. Backward reaches it last, and it then calls
        `finish_backward`."""
        return False

    @staticmethod
    def finish_backward() -> None:
        """All gradients of this microbatch have been quantized: histories of delayed scaling move on."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: PrecisionContext
    ) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out] -> [tokens, out], differentiable in each, in the context's compute dtype,
        to which all are cast.

        The step's first microbatch quantizes the weight; later ones use what was kept of it. The weight's gradient is added to
        its `main_grad` where it has one."""
        dtype = context.compute_dtype
        x, weight = x.to(dtype), summing_where(weight, weight.to(dtype))
        call = LinearCall(
            self, context, refresh=context.first_microbatch, differentiable=torch.is_grad_enabled()
        )
        return LinearFunction.apply(x, weight, None if bias is None else bias.to(dtype), call)


class PlainProduct(Product):
    """Operands as they are: nothing is quantized."""

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> Tensor:
        return x.contiguous() if x.is_cuda else x

    def weight_operand(self, matrix: Callable[[], Tensor], **options: bool) -> Tensor:
        return matrix()

    def multiply(
        self, gemm: Gemm, left: Tensor, right: Tensor, dtype: torch.dtype, *added: Tensor | None
    ) -> Tensor:
        with watched(self.members, gemm):
            if gemm == "forward":
                return searched.linear(left, right, *added)
            if gemm == "dgrad" and (dx := searched.multiply(right, left, layout="NN")) is not None:
                return dx.to(dtype)
            return ((left if gemm == "dgrad" else left.t()) @ right).to(dtype)

    def accumulate(
        self, total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False
    ) -> None:
        with watched(self.members, "wgrad"):
            searched.add_product_(total, left.t(), right, overwrite=overwrite)


def add_to(total: Tensor, gradient: Tensor, *, overwrite: bool) -> None:
    """Adds `gradient` to the sum `total` in its dtype; `overwrite`: puts it in place of what `total` held."""
    total.copy_(gradient) if overwrite else total.add_(gradient)


class Multiplication:
    """One forward of a product over a microbatch, or a part of it, and its backward: call the product's `begin`, then these in
    order. Observers see operands before they are quantized, and results."""

    def __init__(
        self,
        product: Product,
        context: PrecisionContext,
        *,
        refresh: bool = True,
        differentiable: bool = True,
    ) -> None:
        """`refresh`: the weight is quantized, though a copy may be kept. `differentiable`: there may be a backward."""
        self.product, self.context, self.refresh, self.differentiable = (
            product,
            context,
            refresh,
            differentiable,
        )
        self.seen_by = context  # whose observers see operands and results

    def operand(self, role: Role, x: Tensor) -> Operand:
        """The input [tokens, in], for forward and for the weight's gradient, or the output's gradient [tokens, out]."""
        self.show(role, x)
        return self.product.operand(role, x, both=self.differentiable)

    def output(
        self,
        x: Operand,
        weight: Operand,
        matrix: Callable[[], Tensor],
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """-> [tokens, out], with `residual` added, in the product itself where it can be; `residual` stays as it was. `matrix`
        gives the weight [out, in] as it is now."""
        self.show_weight(weight, matrix)
        # who looks on sees this product alone
        inside = residual is not None and not self.seen_by.result_observers
        y = self.multiply("forward", x, weight, bias, *([residual] if inside else []))
        self.product.end()
        return y if inside or residual is None else y.add_(residual)

    def weight_gradient(
        self, dy: Operand, x: Operand, total: Tensor | None, *, overwrite: bool = False
    ) -> Tensor | None:
        """-> [out, in]; None where it was added to `total`, or with `overwrite` took its place."""
        if total is None:
            return self.multiply("wgrad", dy, x)
        if self.seen_by.result_observers:
            add_to(total, self.multiply("wgrad", dy, x, dtype=torch.float32), overwrite=overwrite)
        else:
            self.product.accumulate(total, dy, x, overwrite=overwrite)
        return None

    def multiply(
        self,
        gemm: Gemm,
        left: Operand,
        right: Operand,
        *added: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`added`: bias and residual."""
        result = self.product.multiply(
            gemm, left, right, dtype or self.context.compute_dtype, *added
        )
        self.show_result(gemm, result, *added[:1])
        return result

    def show(self, role: Role, tensor: Tensor) -> None:
        """An operand before it is quantized, [tokens or out, features]."""
        for observer in self.seen_by.observers:
            observer(self.product.name, role, tensor.detach().flatten(0, -2))

    def show_weight(self, weight: Operand, matrix: Callable[[], Tensor]) -> None:
        """Show the weight as the forward product takes it, beside the weight itself; where it is made, among the operands too."""
        if self.refresh and self.seen_by.observers:
            self.show("weight", matrix())
        for observer in self.context.weight_observers:
            observer(self.product, weight, matrix().detach())

    def show_result(self, gemm: Gemm, result: Tensor, bias: Tensor | None = None) -> None:
        """`bias` is what has been added to it."""
        for observer in self.seen_by.result_observers:
            observer(self.product.name, gemm, result.detach(), bias)


class LinearCall(Multiplication):
    """A whole forward, and a whole backward, with a weight that is handed in."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
        """x [tokens, in] -> [tokens, out], and what `backward` takes of x."""
        product = self.product
        product.begin(x)
        self._ends_backward = self.differentiable and product.is_first_in_forward()
        operand = self.operand("input", x)
        self._weight = product.weight_operand(
            lambda: weight, refresh=self.refresh, differentiable=self.differentiable
        )
        y = self.output(operand, self._weight, lambda: weight, bias)
        return y, product.save(operand) if self.differentiable else ((), None)

    def backward(
        self, dy: Tensor, saved: Saved | None, total: Tensor | None, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of input and weight; none of the weight without what was `saved`, or where it was added to `total`."""
        gradient = self.operand("grad_output", dy.contiguous())
        dx, dw = self.multiply("dgrad", gradient, self._weight), None
        if saved is not None:
            dw = self.weight_gradient(
                gradient, *self.product.restore(*saved), total, overwrite=overwrite
            )
        if self._ends_backward:
            self.product.finish_backward()
        return dx, dw


class LinearFunction(torch.autograd.Function):
    """A linear by itself: x, weight and bias in, y out, see `Product.__call__`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall
    ) -> Tensor:
        ctx.call, ctx.main_gradient = call, getattr(weight, "main_grad", None)
        y, (tensors, ctx.rest) = call.forward(
            x.detach(), weight.detach(), None if bias is None else bias.detach()
        )
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = (ctx.saved_tensors, ctx.rest) if ctx.needs_input_grad[1] else None
        dx, dw = ctx.call.backward(dy, saved, ctx.main_gradient)
        db = dy.sum(0, dtype=torch.float32).to(dy.dtype) if ctx.needs_input_grad[2] else None
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

    products: list[Any]  # all that `product` has made

    def product(
        self, name: str, in_features: int, out_features: int, *, bias: bool, grouped: bool = False
    ) -> Product:
        """The product of the linear called `name`, with a state of its own where the precision keeps one. `grouped`: of all
        experts of a mixture's layer (pretrain.precision.grouped)."""

    def forward(self) -> AbstractContextManager[Any]:
        """Entered around each low-precision forward of the whole model. Leaving it, delayed scaling makes new scales."""

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """function(*args) now, and once more in backward, inside of `again()`, with the same scales and random numbers."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, live, as unquantized tensors; empty where every scale comes from the tensor it scales."""

    def reset(self) -> None:
        """Puts back what was before the first forward: histories zero, scales one, and of weights nothing kept."""
        for name, tensor in self.state().items():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)
        for product in self.products:
            product.weight = None

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
    # Who is watching, called as `Multiplication` does in `show`, `show_weight` and `show_result`.
    observers: list[Callable[[str, Role, Tensor], None]] = field(default_factory=list)
    weight_observers: list[Callable[[Product, Operand, Tensor], None]] = field(default_factory=list)
    result_observers: list[Callable[[str, Gemm, Tensor, Tensor | None], None]] = field(
        default_factory=list
    )
    quantizing: bool = True  # false while parity runs the same model with its quantization off
    # of grouped products, by name: where each expert's rows end now
    groups: dict[str, Tensor] = field(default_factory=dict)
    # of all precisions that the run computes in, one after the other
    backends: Sequence[Backend] = ()

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Put this around a forward of the whole model."""
        if self.backend is None or not self.quantizing or not (training or self.evaluates_low):
            yield
            return
        with self.backend.forward(), overridden(self, low_precision=True):
            yield

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` now, and again in backward, in this context both times: else it would be in another precision then. The
        second time it uses what was kept of weights the first time."""
        again = partial(overridden, self, low_precision=self.low_precision, first_microbatch=False)
        if self.backend is None or not self.quantizing:
            return checkpoint(
                function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again())
            )
        return self.backend.checkpoint(function, *args, again=again)

    def state(self) -> dict[str, Tensor]:
        """Histories and scales of delayed scaling, live; other precisions keep nothing between two steps."""
        return self.backend.state() if self.backend else {}

    def saved_state(self) -> dict[str, Tensor]:
        """`state` of every precision of the run, whose turn it is or not: what a checkpoint holds."""
        return {
            name: tensor for backend in self.backends for name, tensor in backend.state().items()
        }

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
        """Put this around passes that are not training's: it puts histories and scales back afterwards."""
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
    """What has a product for some of the run's precisions, by the backend that computes it, and none for the others."""

    context: PrecisionContext
    products: dict[Backend | None, Product]

    @property
    def low(self) -> Product | None:
        """What multiplies in the low-precision forward under way; None outside of one, and where it is not in low precision."""
        return self.products.get(self.context.backend) if self.context.low_precision else None


class LowPrecisionLinear(TakesTurns, nn.Module):
    """Stands in for an nn.Linear or a transformers Conv1D, whose weight [in, out] is `transposed`."""

    def __init__(
        self, linear: nn.Linear | Conv1D, name: str, product: Product, context: PrecisionContext
    ) -> None:
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
        weight = (
            summing_where(self.weight, self.weight.t(), transposed=True)
            if self.transposed
            else self.weight
        )
        rows = x.reshape(-1, x.shape[-1])
        if low := self.low:
            return low(rows, weight, self.bias, self.context).view(*x.shape[:-1], -1)
        weight, bias = (
            summing_where(weight, weight.to(x.dtype)),
            None if self.bias is None else self.bias.to(x.dtype),
        )
        if self.context.quantizing:
            with watched((self.name,), "forward"):
                return F.linear(x, weight, bias)
        return PlainProduct(self.name)(rows, weight, bias, PrecisionContext(None, x.dtype)).view(
            *x.shape[:-1], -1
        )
