"""Linears that compute in low precision, and the context that all of a model's share.

The modules hold the very Parameters of the modules they stand in for, under the same names, so that tying, checkpoints, sharding
and export see the model that transformers built. torch.compile steps over them: a graph ends before each low-precision product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from foundation.attributes import holding
from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import ProductObserver
from pretrain.precision.product import PlainProduct, Product

PREFIX = "fp8/"  # of the names that `Backend.state` gives, which stand beside the optimizer's in a checkpoint


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

    def state_storage(self) -> list[Tensor]:
        """The memory of `state`, live, in as few tensors as it lies in."""

    def reset(self) -> None:
        """Forget history and cached weights, as before the first forward."""

    def observing(self, observer: ProductObserver) -> AbstractContextManager[Any]:
        """While entered, `observer` sees each product that is multiplied, in forward and backward."""

    def describe(self) -> str:
        """Library and version, for the audit."""


Observer = Callable[[str, Role, Tensor, Product], None]
# (name of the product, gemm: forward, dgrad or wgrad, its result, the bias that the result holds)
ResultObserver = Callable[[str, str, Tensor, Tensor | None], None]


@dataclass
class PrecisionContext:
    """What all products of one model share: whether a low-precision forward is under way, in which microbatch of its step, and
    who is watching. Every model has one; `backend` is the one that computes now, None where nothing is quantized.

    A layer that is recomputed in backward enters the context again, or it would be recomputed in another precision, without any
    sign of it.

    `evaluates_low`: forwards of evaluation enter it too. `compute_dtype`: of activations. `observers` are called with each
    operand of each low-precision product, as it stands before it is quantized: (module name, role, tensor [tokens or out,
    features], product). `calls_outside` counts, by module name, the calls of low-precision linears outside of a low-precision
    forward: in evaluation all of them, in training none. `observed`: somebody looks at the products already. `result_observers`
    are called with what low-precision products give. `quantizing`: false while parity runs the same model with its quantization
    off.
    """

    backend: Backend | None
    compute_dtype: torch.dtype
    evaluates_low: bool = False
    low_precision: bool = False
    first_microbatch: bool = True
    observers: list[Observer] = field(default_factory=list)
    result_observers: list[ResultObserver] = field(default_factory=list)
    quantizing: bool = True
    calls_outside: Counter[str] = field(default_factory=Counter)
    observed: bool = False
    backends: Sequence[Backend] = ()  # of all precisions that the run computes in, one after the other; none: `backend` alone
    _kept: list[Tensor] = field(default_factory=list)  # by `keep_state`, in the order of the backends' storage

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
        before = [tensor.clone() for tensor in self._storage()]
        try:
            yield
        finally:
            self._put_back(before)

    def keep_state(self) -> None:
        """Copy history and scales aside, on their device, until `go_back` is asked for. Where nothing keeps a history this is
        nothing, elsewhere a few launches."""
        live = self._storage()
        if not live:
            return
        self._kept = self._kept or [torch.empty_like(tensor) for tensor in live]
        torch._foreach_copy_(self._kept, live)

    def go_back(self) -> None:
        """History and scales as `keep_state` found them. A step that is left out must not have been: an overflow lasts in a
        history for 1,024 microbatches, and giants that are finite press its scales down for as long."""
        self._put_back(self._kept)

    def forget(self) -> None:
        """Puts all histories and scales back to what they were before the first forward."""
        for backend in self.backends:
            backend.reset()

    def _put_back(self, state: Sequence[Tensor]) -> None:
        self.forget()
        for tensor, before in zip(self._storage(), state, strict=True):
            tensor.copy_(before)

    def _storage(self) -> list[Tensor]:
        return [tensor for backend in self.backends for tensor in backend.state_storage()]


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
