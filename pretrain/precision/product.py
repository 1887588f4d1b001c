"""The three products of a linear, in whatever computes them: one interface, the linears of a model, and what they share.

    forward  y  = x w^T + b     x [tokens, in], w [out, in]
    dgrad    dx = dy w          dy [tokens, out]
    wgrad    dw = dy^T x        added to the weight's FP32 `main_grad` where it has one

Implementations: `PlainProduct` here, in the dtype of the operands; `emulation.EmulatedProduct`;
`transformer_engine.TransformerEngineProduct`. Callers: `LinearFunction` (a lone linear), the fused nodes of a decoder layer
(pretrain.model.fused), and each chunk of the LM head (pretrain.model.loss.head). "Quantization off", which parity compares with,
is `LinearFunction` on a `PlainProduct`: gradients then add up where those of quantized products do.

A model's linears are LowPrecisionLinears: they hold the very Parameters of the modules they stand in for, under the same names,
so that tying, checkpoints, sharding and export see the model that transformers built. torch.compile steps over them: a graph ends
before each low-precision product. What they share is a PrecisionContext, whose `backend` makes their products.

A caller goes through one microbatch in this order (`LinearCall` does):

    product.begin(x)
    left, right = product.operand("input", x, "features"), product.weight_operands(matrix, refresh=first_microbatch, ...)[0]
    y = product.multiply("forward", left, right, torch.bfloat16, bias)
    product.end()
    ...
    by_features = product.operand("grad_output", dy, "features")
    dx = product.multiply("dgrad", by_features, weight_for_dgrad, torch.bfloat16)
    by_rows = product.operand("grad_output", dy, "rows", made=by_features)
    product.accumulate(main_grad, by_rows, input_by_rows)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.observed import ProductObserver

PREFIX = "fp8/"  # of the names that `Backend.state` gives, which stand beside the optimizer's in a checkpoint
Operand = Any  # a Tensor, an emulated operand, or a quantized tensor of Transformer Engine
Gemm = Literal["forward", "dgrad", "wgrad"]


class Product:
    """The products of one linear, or of several whose weights are stacked into one. Raises RuntimeError where the precision's
    blocks do not divide a dimension."""

    name: str  # of its history and its scales in a checkpoint
    members: Sequence[str]  # the linears that it computes, for whoever looks on
    keeps_input = True  # backward quantizes the input once more; False: it takes what forward quantized

    def begin(self, x: Tensor) -> None:
        """Called before the first operand of a forward over `x` [tokens, in]."""

    def end(self) -> None:
        """Called after the forward product."""

    def operand(
        self, role: Role, x: Tensor, along: Along, scale: Tensor | None = None, *, made: Operand = None, both: bool = True
    ) -> Operand:
        """x [rows, features] as the factor of a product that sums `along` its features or its rows.

        `made`: what the same x became along its features. A quantizer that writes both layouts at once returns it again, and
        writes both only if `both`. `scale`: of delayed scaling, where it is not the one in force (`scale`)."""
        raise NotImplementedError

    def quantizer(self, role: Role, *, both: bool) -> Any | None:
        """The library's own, for a kernel that writes the operand itself; None where only `operand` makes it."""
        return None

    def weight_operands(self, matrix: Callable[[], Tensor], *, refresh: bool, differentiable: bool) -> tuple[Operand, Operand]:
        """The weight as forward and as dgrad multiply it. `matrix` gives it, [out, in]; it is called where the weight must be
        quantized: where `refresh` (the first microbatch of a step), and where nothing is kept from one."""
        raise NotImplementedError

    def multiply(
        self,
        gemm: Gemm,
        left: Operand,
        right: Operand,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The result of `gemm` in `dtype`, summed in FP32; `bias` [out] is added before it is rounded, and so may
        be `residual` [tokens, out] of a fused layer's forward product, which stays as it was."""
        raise NotImplementedError

    def accumulate(self, total: Tensor, left: Operand, right: Operand, *, overwrite: bool = False) -> None:
        """Adds the weight's gradient to `total` [out, in], FP32 or BF16; `overwrite`: takes its place."""
        gradient = self.multiply("wgrad", left, right, torch.float32)
        if overwrite:
            total.zero_()
        total += gradient

    def serves_both(self, role: Role) -> bool:
        """Whether one quantization of an operand enters both of its products."""
        return True

    def scale(self, role: Role) -> Tensor | None:
        """The scale in force of delayed scaling, an FP32 scalar; None for other precisions, and where a library has it."""
        return None

    def save(self, operand: Operand) -> tuple[Sequence[Tensor | None], Any]:
        """An operand, no longer needed along its features, as tensors that autograd can save, and what `restore` needs. Only of
        products that do not keep their input."""
        raise NotImplementedError

    def restore(self, tensors: Sequence[Tensor | None], rest: Any) -> Operand:
        raise NotImplementedError

    def is_first_in_forward(self) -> bool:
        """Whether this is the first product of the forward under way: its backward is the last one's, and calls
        `finish_backward`."""
        return False

    def finish_backward(self) -> None:
        """All gradients of this microbatch have been quantized: histories of delayed scaling move on."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, first_microbatch: bool, context: PrecisionContext | None = None
    ) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out], all of one dtype -> [tokens, out], differentiable in each.

        `first_microbatch` quantizes the weight and keeps the result; later microbatches of a step use what was kept. Gradients
        have their tensors' dtypes; the weight's is added to its `main_grad` where it has one, and none is returned. `context`:
        the model's PrecisionContext, whose observers see operands and results."""
        call = LinearCall(self, context, refresh=first_microbatch, differentiable=torch.is_grad_enabled())
        return LinearFunction.apply(x, weight, bias, call)


class PlainProduct(Product):
    """Operands as they are: nothing is quantized."""

    def __init__(self, name: str, *, searched: bool = False) -> None:
        """`searched`: by the fastest of cublasLt's algorithms (pretrain.precision.searched)."""
        self.name, self.members, self._searched = name, (name,), searched

    def operand(self, role: Role, x: Tensor, along: Along, scale: Tensor | None = None, **options: Any) -> Tensor:
        return x.contiguous() if self._searched and role == "grad_output" else x

    def weight_operands(self, matrix: Callable[[], Tensor], **options: bool) -> tuple[Tensor, Tensor]:
        weight = matrix()
        return weight, weight

    def multiply(
        self,
        gemm: Gemm,
        left: Tensor,
        right: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        if gemm == "forward" and self._searched and bias is None:
            return searched.linear(left, right, residual)
        if gemm == "forward":
            y = F.linear(left, right, bias)
            return y if residual is None else y.add_(residual)
        if gemm == "dgrad":
            return (searched.input_gradient(left, right) if self._searched else left @ right).to(dtype)
        return (left.t() @ right).to(dtype)

    def accumulate(self, total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
        add_product_(total, left.t(), right, overwrite=overwrite)


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
    """total [n, m] += left [n, k] @ right [k, m] in FP32, in one product where possible; `overwrite` leaves out what `total`
    held, even NaN."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if overwrite else 1)
    elif total.is_cuda:
        searched.add_product(total, left, right, overwrite)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total += left @ right


class LinearCall:
    """One forward of a product over a microbatch (or a part of it), and its backward."""

    def __init__(self, product: Product, context: PrecisionContext | None = None, *, refresh: bool, differentiable: bool) -> None:
        """`refresh`: the weight is quantized, though a copy may be kept. `differentiable`: there may be a backward. `context`:
        see `Product.__call__`."""
        self.product, self._context, self._refresh, self._differentiable = product, context, refresh, differentiable
        self._input: Operand = None
        self._rest: Any = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keeps: bool) -> Tensor:
        """`keeps`: a gradient of the weight will be computed."""
        product = self.product
        self._show("input", x)
        self._show("weight", weight)
        product.begin(x)
        self._ends_backward = self._differentiable and product.is_first_in_forward()
        for_forward, self._weight = product.weight_operands(
            lambda: weight, refresh=self._refresh, differentiable=self._differentiable
        )
        self._scale = product.scale("input")
        operand = product.operand("input", x, "features", self._scale, both=keeps)
        y = product.multiply("forward", operand, for_forward, x.dtype, bias)
        product.end()
        self._show_result("forward", y, bias)
        self._input = x if product.keeps_input else operand
        return y

    def save(self) -> Sequence[Tensor | None]:
        """The input as tensors for autograd to save; it is not held here any longer."""
        operand, self._input = self._input, None
        if self.product.keeps_input:
            return [operand]
        tensors, self._rest = self.product.save(operand)
        return tensors

    def restore(self, tensors: Sequence[Tensor | None]) -> None:
        self._input = tensors[0] if self.product.keeps_input else self.product.restore(tensors, self._rest)

    def backward(
        self, dy: Tensor, needs: Sequence[bool], dtype: torch.dtype, total: Tensor | None, *, overwrite: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of input and weight, of those that it `needs`: dx in dy's dtype; dw in `dtype`, or None where it was
        added to `total`."""
        product, dy, dx, dw = self.product, dy.contiguous(), None, None
        self._show("grad_output", dy)
        scale = product.scale("grad_output")
        operand = product.operand("grad_output", dy, "features", scale) if needs[0] else None
        if needs[0]:
            dx = product.multiply("dgrad", operand, self._weight, dy.dtype)
            self._show_result("dgrad", dx)
        if needs[1]:
            if not product.serves_both("grad_output"):
                operand = None  # or the two would be in memory at once
            left = product.operand("grad_output", dy, "rows", scale, made=operand)
            right = product.operand("input", self._input, "rows", self._scale, made=None if product.keeps_input else self._input)
            if total is None:
                dw = product.multiply("wgrad", left, right, dtype)
                self._show_result("wgrad", dw)
            elif self._results_watched:  # whoever looks on is to see this product alone
                gradient = product.multiply("wgrad", left, right, torch.float32)
                self._show_result("wgrad", gradient)
                (total.zero_() if overwrite else total).add_(gradient)
            else:
                product.accumulate(total, left, right, overwrite=overwrite)
        if self._ends_backward:
            product.finish_backward()
        return dx, dw

    @property
    def _results_watched(self) -> bool:
        return self._context is not None and bool(self._context.result_observers)

    def _show(self, role: Role, tensor: Tensor) -> None:
        if self._context is not None:
            self._context.show(self.product.name, role, tensor, self.product)

    def _show_result(self, gemm: Gemm, result: Tensor, bias: Tensor | None = None) -> None:
        if self._context is not None:
            self._context.show_result(self.product.name, gemm, result, bias)


class LinearFunction(torch.autograd.Function):
    """A linear by itself: x, weight and bias in, y out, see `Product.__call__`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        ctx.call, ctx.dtypes = call, (weight.dtype, None if bias is None else bias.dtype)
        ctx.main_gradient = getattr(weight, "main_grad", None)
        keeps = ctx.needs_input_grad[1]
        y = call.forward(x.detach(), weight.detach(), None if bias is None else bias.detach(), keeps=keeps)
        tensors = call.save()
        ctx.save_for_backward(*(tensors if keeps else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight_dtype, bias_dtype = ctx.dtypes
        if ctx.needs_input_grad[1]:
            ctx.call.restore(ctx.saved_tensors)
        dx, dw = ctx.call.backward(dy, ctx.needs_input_grad[:2], weight_dtype, ctx.main_gradient)
        db = dy.sum(0, dtype=torch.float32).to(bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


# ── The linears of a model, and what they share ─────────────────────────────────────────────────────────────────────────────────


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

    def checkpoint(self, function: Callable[..., Any], *args: Any, context_fn: Callable[[], Any], **kwargs: Any) -> Any:
        """function(*args, **kwargs) now, and again in backward: in the same precision, with the same scales, on the same random
        numbers. `context_fn` returns two contexts, for now and for then."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, live, as unquantized tensors; empty where every scale comes from the tensor it scales."""

    def reset(self) -> None:
        """Forget history and cached weights, as before the first forward."""

    def observing(self, observer: ProductObserver) -> AbstractContextManager[Any]:
        """While entered, `observer` sees each product that is multiplied, in forward and backward."""

    def describe(self) -> str:
        """Library and version, for the audit."""


# (name of the product, role, the operand before it is quantized [tokens or out, features], product)
Observer = Callable[[str, Role, Tensor, Product], None]
# (name of the product, gemm, its result, the bias that the result holds)
ResultObserver = Callable[[str, str, Tensor, Tensor | None], None]


@dataclass
class PrecisionContext:
    """What all products of one model share: whether a low-precision forward is under way, in which microbatch of its step, and
    who is watching. Every model has one; `backend` is the one that computes now, None where nothing is quantized.

    A layer that is recomputed in backward enters the context again, or it would be recomputed in another precision, without any
    sign of it.
    """

    backend: Backend | None
    compute_dtype: torch.dtype  # of activations
    evaluates_low: bool = False  # forwards of evaluation are in low precision too
    low_precision: bool = False  # a low-precision forward is under way
    first_microbatch: bool = True
    observers: list[Observer] = field(default_factory=list)
    result_observers: list[ResultObserver] = field(default_factory=list)
    quantizing: bool = True  # false while parity runs the same model with its quantization off
    # Calls of low-precision linears outside of a low-precision forward, by name: in evaluation all of them, in training none.
    calls_outside: Counter[str] = field(default_factory=Counter)
    observed: bool = False  # a ProductObserver sees the products already
    backends: Sequence[Backend] = ()  # of all precisions that the run computes in, one after the other; none: `backend` alone
    _kept: list[Tensor] = field(default_factory=list)  # by `keep_state`

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

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` now, and again in backward, in this context both times."""
        if self.backend is None or not self.quantizing:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), holding(self, low_precision=True)

        return self.backend.checkpoint(function, *args, context_fn=contexts, **kwargs)

    def multiply(
        self, name: str, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, *, later_call: bool = False
    ) -> Tensor:
        """x [tokens, in] times weight [out, in], in the low precision; operands in another dtype than BF16 are cast here.

        `later_call`: the module has been called in this forward before (the LM head takes its tokens in chunks), with this
        weight.
        """
        x, weight = x.to(self.compute_dtype), summing_where(weight, weight.to(self.compute_dtype))
        bias = None if bias is None else bias.to(self.compute_dtype)
        refresh = (self.first_microbatch or not torch.is_grad_enabled()) and not later_call
        return product(x, weight, bias, first_microbatch=refresh, context=self)

    def show(self, name: str, role: Role, tensor: Tensor, product: Product) -> None:
        """An operand of `product`, before it is quantized, to all observers."""
        for observer in self.observers:
            observer(name, role, tensor.detach(), product)

    def show_result(self, name: str, gemm: str, result: Tensor, bias: Tensor | None = None) -> None:
        """What a low-precision product gave, to all who look on; `bias` is what has been added to it."""
        for observer in self.result_observers:
            observer(name, gemm, result.detach(), bias)

    @contextmanager
    def observed_by(self, observer: ProductObserver) -> Iterator[None]:
        """While entered, `observer` sees the products of the backend. Fused layers have theirs (`FusedLayers.observed_by`)."""
        with holding(self, observed=True), self.backend.observing(observer) if self.backend else nullcontext():
            yield

    def state(self) -> dict[str, Tensor]:
        """Histories and scales of delayed scaling, live; other precisions keep nothing between two steps."""
        return self.backend.state() if self.backend else {}

    def saved_state(self) -> dict[str, Tensor]:
        """`state` of every precision of the run, whose turn it is or not: what a checkpoint holds."""
        return {name: tensor for backend in self.backends for name, tensor in backend.state().items()}

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Put this around passes that are not training's: history and scales are afterwards what they were before.

        Whatever else the backend holds is forgotten: a pass that ran out of memory leaves behind scales put aside for recomputing
        a layer, which the next backward would take for its own.
        """
        before = [tensor.clone() for tensor in self._states()]
        try:
            yield
        finally:
            self._put_back(before)

    def keep_state(self) -> None:
        """Copy histories and scales aside, on their device, for `go_back`; nothing where nothing keeps a history."""
        if live := self._states():
            self._kept = self._kept or [torch.empty_like(tensor) for tensor in live]
            torch._foreach_copy_(self._kept, live)

    def go_back(self) -> None:
        """Histories and scales as they were at the last `keep_state`. A step that is left out must leave nothing: an overflow
        lasts in a history for 1,024 microbatches, and giants that are finite press its scales down for as long."""
        self._put_back(self._kept)

    def forget(self) -> None:
        """Puts all histories and scales back to what they were before the first forward."""
        for backend in self.backends:
            backend.reset()

    def _put_back(self, state: Sequence[Tensor]) -> None:
        self.forget()
        for tensor, before in zip(self._states(), state, strict=True):
            tensor.copy_(before)

    def _states(self) -> list[Tensor]:
        return list(self.saved_state().values())


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
        if not (self.context.low_precision and self.is_low):
            self.context.calls_outside[self.name] += 1
            weight, bias = summing_where(weight, weight.to(x.dtype)), None if self.bias is None else self.bias.to(x.dtype)
            if self.context.quantizing:
                return F.linear(x, weight, bias)
            y = PlainProduct(self.name)(x.reshape(-1, x.shape[-1]), weight, bias, first_microbatch=True)
            return y.view(*x.shape[:-1], -1)
        y = self.context.multiply(self.name, self.product, x.reshape(-1, x.shape[-1]), weight, self.bias)
        return y.view(*x.shape[:-1], -1)
