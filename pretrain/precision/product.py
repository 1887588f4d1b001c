"""Linear layers in low precision: the state of each layer, its autograd function and its module.

`LowPrecisionLinear` replaces a linear module of a model. It holds the same Parameters under the
same names, so tied weights, checkpoints, sharding and export see the model that transformers built.
torch.compile ends its graph before each of these modules.

A forward goes this way: the module calls its `LinearState`, which takes the Gemm of the current
precision and applies `LinearFunction`. The autograd function runs a `LinearPass`: quantize,
multiply, show operands and results to the observers of the model's `PrecisionContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from foundation.overrides import overridden
from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import (
    Gemm,
    GemmEngine,
    GemmKind,
    Operand,
    Saved,
    TorchGemm,
    add_to,
    checkpointed,
)
from pretrain.precision.observed import watched

# Prefix of the names of `GemmEngine.state`, which a checkpoint stores beside the optimizer's
# tensors.
PREFIX = "fp8/"


@dataclass
class PrecisionContext:
    """The state that all products of one model share."""

    backend: GemmEngine | None  # the current engine; None if nothing is quantized
    compute_dtype: torch.dtype  # of activations
    evaluates_low: bool = False  # evaluation computes in low precision too
    low_precision: bool = False  # a low-precision forward runs now
    first_microbatch: bool = True  # of a step
    # Called with the layer's name, the role, and an operand before it is quantized.
    observers: list[Callable[[str, Role, Tensor], None]] = field(default_factory=list)
    # Called with a Gemm, its quantized weight, and the weight.
    weight_observers: list[Callable[[Gemm, Operand, Tensor], None]] = field(default_factory=list)
    # Called with the layer's name, the product, its result and its bias.
    result_observers: list[Callable[[str, GemmKind, Tensor, Tensor | None], None]] = field(
        default_factory=list
    )
    quantizing: bool = True  # False while parity runs the model without quantization
    # The ends of each expert's rows in the latest grouped products, by the layer's name.
    groups: dict[str, Tensor] = field(default_factory=dict)
    backends: Sequence[GemmEngine] = ()  # the engines of all precisions of the run

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Enclose a forward of the model."""
        if self.backend is None or not self.quantizing or not (training or self.evaluates_low):
            yield
            return
        with self.backend.forward(), overridden(self, low_precision=True):
            yield

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return function(*args), which backward computes again in the same precision.

        The second time uses the weights that were quantized the first time.
        """
        again = partial(overridden, self, low_precision=self.low_precision, first_microbatch=False)
        if self.backend is None or not self.quantizing:
            return checkpointed(function, *args, again=again)
        return self.backend.checkpoint(function, *args, again=again)

    def state(self) -> dict[str, Tensor]:
        """Return the live histories and scales of the current engine, if it has delayed scaling."""
        return self.backend.state() if self.backend else {}

    def saved_state(self) -> dict[str, Tensor]:
        """Return `state` of all engines of the run, which a checkpoint stores."""
        return {name: tensor for engine in self.backends for name, tensor in engine.state().items()}

    def copied_state(self) -> list[Tensor]:
        """Return copies of `saved_state` on its device, for `go_back`."""
        live = list(self.saved_state().values())
        copies = [torch.empty_like(tensor) for tensor in live]
        if live:
            torch._foreach_copy_(copies, live)
        return copies

    def go_back(self, copies: Sequence[Tensor]) -> None:
        """Restore histories and scales from `copies`, and reset all other state of the engines.

        An overflow would stay in a history for 1,024 microbatches. A failed pass leaves scales that
        were stored for recomputing a layer.
        """
        self.forget()
        for tensor, before in zip(self.saved_state().values(), copies, strict=True):
            tensor.copy_(before)

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Enclose passes that are not part of training. Restore histories and scales afterwards."""
        copies = self.copied_state()
        try:
            yield
        finally:
            self.go_back(copies)

    def forget(self) -> None:
        """Reset the engines to their state before the first forward."""
        for engine in self.backends:
            engine.reset()


# The context of passes that no observer sees.
UNOBSERVED = PrecisionContext(None, torch.bfloat16)


class LinearState:
    """The Gemms of one linear layer: one for each engine of the run that quantizes the layer."""

    def __init__(self, name: str, context: PrecisionContext, members: Sequence[str] = ()) -> None:
        """Create the state of the layer `name`, without any Gemm.

        `members`: the layers whose weights are stacked, by default the layer `name` alone.
        """
        self.name = name
        self.members = members or (name,)
        self.context = context
        self.gemms: dict[GemmEngine | None, Gemm] = {}

    def add(self, engine: GemmEngine, *features: int, bias: bool = False) -> None:
        """Let `engine` compute the layer while it is the context's. `features`: in, out."""
        self.gemms[engine] = engine.gemm(self.name, *features, bias=bias, members=self.members)

    @property
    def low(self) -> Gemm | None:
        """The Gemm of the low-precision forward under way.

        None outside of such a forward, and if the current engine leaves the layer unquantized.
        """
        return self.gemms.get(self.context.backend) if self.context.low_precision else None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, ends: Tensor | None = None
    ) -> Tensor:
        """Return x w^T + bias [rows, out] in the current precision, differentiable.

        x is [rows, in], weight [out, in], bias [out]. With `ends`, int32 [experts], the rows are
        sorted by expert and weight is [experts, out, in]. All are cast to the context's compute
        dtype; without low precision to the dtype of x. The first microbatch of a step quantizes the
        weight, later ones use the cached one. The weight's gradient is added to `main_grad`, if the
        weight has that.
        """
        gemm = self.low
        context = self.context
        if gemm is None:
            gemm = TorchGemm(self.name, self.members)
            context = PrecisionContext(None, x.dtype)
        dtype = context.compute_dtype
        linear_pass = LinearPass(
            gemm,
            context,
            refresh=context.first_microbatch,
            differentiable=torch.is_grad_enabled(),
            ends=ends,
        )
        weight = summing_where(weight, weight.to(dtype))
        bias = None if bias is None else bias.to(dtype)
        return LinearFunction.apply(x.to(dtype), weight, bias, linear_pass)


class LinearPass:
    """One forward of a linear layer and its backward.

    Observers of the context see operands before they are quantized, weights as they are multiplied,
    and results. Of a Gemm that does not quantize, they see the weight only.
    """

    def __init__(
        self,
        gemm: Gemm,
        context: PrecisionContext,
        *,
        refresh: bool,
        differentiable: bool,
        ends: Tensor | None = None,
    ) -> None:
        """Create a pass.

        `refresh`: quantize the weight even if it is cached. `differentiable`: backward may follow.
        `ends`, int32 [experts]: the end of each expert's rows, if the products are grouped.
        """
        self.gemm = gemm
        self.context = context
        self.refresh = refresh
        self.differentiable = differentiable
        self.ends = ends
        self.observed = context if gemm.quantizes else UNOBSERVED
        engine = self.observed.backend
        self.forward_in_bf16 = engine is not None and engine.forward_in_bf16
        if self.forward_in_bf16 and not differentiable:
            # No product of this pass takes quantized operands.
            self.forward_in_bf16 = False
            self.gemm = TorchGemm(gemm.name, gemm.members)

    def quantize(self, role: Role, x: Tensor) -> Operand:
        """Return the input [tokens, in] or the output's gradient [tokens, out] as an operand.

        An input serves the forward product and the weight's gradient.
        """
        if self.ends is not None:
            self.context.groups[self.gemm.name] = self.ends
        if self.observed.observers:
            self.show(role, x)
        if self.forward_in_bf16 and role == "input":
            # `forward_product` multiplies x itself. It is quantized here for the weight's gradient,
            # because delayed scaling records the amax of an input in forward.
            self._input = x
        return self.gemm.quantize(role, x, both=self.differentiable)

    def forward_product(
        self,
        x: Operand,
        weight: Operand,
        matrix: Callable[[], Tensor],
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return x w^T + bias + residual [tokens, out]. `residual` is not modified.

        `matrix` returns the weight [out, in] as it is now.
        """
        self.show_weight(weight, matrix)
        gemm = self.gemm
        if self.forward_in_bf16:
            gemm = TorchGemm(gemm.name, gemm.members)
            x = gemm.quantize("input", self._input)
            weight = matrix()
            del self._input
        observers = self.observed.result_observers
        dtype = self.context.compute_dtype
        y = gemm.matmul(
            "forward", x, weight, dtype, bias, None if observers else residual, ends=self.ends
        )
        for observer in observers:
            observer(gemm.name, "forward", y.detach(), bias)
        self.gemm.end()
        # Result observers see the product alone, so the residual is added after them.
        return y.add_(residual) if observers and residual is not None else y

    def gradient_product(
        self, kind: GemmKind, left: Operand, right: Operand, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a product of backward, by default in the context's compute dtype."""
        dtype = dtype or self.context.compute_dtype
        gradient = self.gemm.matmul(kind, left, right, dtype, ends=self.ends)
        for observer in self.observed.result_observers:
            observer(self.gemm.name, kind, gradient.detach(), None)
        return gradient

    def weight_gradient(
        self, dy: Operand, x: Operand, total: Tensor | None, *, overwrite: bool = False
    ) -> Tensor | None:
        """Return the weight's gradient [out, in], or add it to `total` and return None.

        With `overwrite`, the gradient replaces what `total` held.
        """
        if total is None:
            return self.gradient_product("wgrad", dy, x)
        if self.observed.result_observers:
            add_to(total, self.gradient_product("wgrad", dy, x, torch.float32), overwrite=overwrite)
        else:
            self.gemm.accumulate(total, dy, x, overwrite=overwrite, ends=self.ends)
        return None

    def show(self, role: Role, tensor: Tensor) -> None:
        """Show the observers an operand before it is quantized, as a matrix [..., features]."""
        for observer in self.observed.observers:
            observer(self.gemm.name, role, tensor.detach().flatten(0, -2))

    def show_weight(self, weight: Operand, matrix: Callable[[], Tensor]) -> None:
        """Show the weight observers the operand `weight` and the weight that it was made of.

        If this pass has quantized the weight, show it to the operand observers too.
        """
        if self.refresh and self.observed.observers:
            self.show("weight", matrix())
        for observer in self.context.weight_observers:
            observer(self.gemm, weight, matrix().detach())

    # ── The pass of a layer whose weight is one tensor ──────────────────────────────────────────

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
        """Return the output [tokens, out] for x [tokens, in], and what `backward` needs of x."""
        gemm = self.gemm
        gemm.begin(x)
        self._ends_backward = self.differentiable and gemm.is_first_in_forward()
        operand = self.quantize("input", x)
        self._weight = gemm.weight_operand(
            lambda: weight, refresh=self.refresh, differentiable=self.differentiable
        )
        y = self.forward_product(operand, self._weight, lambda: weight, bias)
        return y, gemm.save(operand) if self.differentiable else ((), None)

    def backward(
        self, dy: Tensor, saved: Saved | None, total: Tensor | None, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of input and weight.

        The weight's is None without what `forward` saved, and if it was added to `total`.
        """
        gradient = self.quantize("grad_output", dy.contiguous())
        dx = self.gradient_product("dgrad", gradient, self._weight)
        dw = None
        if saved is not None:
            (x,) = self.gemm.restore(*saved)
            dw = self.weight_gradient(gradient, x, total, overwrite=overwrite)
        if self._ends_backward:
            self.gemm.finish_backward()
        return dx, dw


class LinearFunction(torch.autograd.Function):
    """y = x w^T + b by a `LinearPass`, see `LinearState.__call__`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear_pass: LinearPass
    ) -> Tensor:
        ctx.linear_pass = linear_pass
        ctx.main_gradient = getattr(weight, "main_grad", None)
        y, (tensors, ctx.rest) = linear_pass.forward(
            x.detach(), weight.detach(), None if bias is None else bias.detach()
        )
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = (ctx.saved_tensors, ctx.rest) if ctx.needs_input_grad[1] else None
        dx, dw = ctx.linear_pass.backward(dy, saved, ctx.main_gradient)
        db = dy.sum(0, dtype=torch.float32).to(dy.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def summing_where(parameter: Tensor, copy: Any, *, transposed: bool = False) -> Tensor:
    """Return `copy`, a cast of `parameter`, with the `main_grad` of the parameter.

    The gradient of the copy then adds up where the parameter's does. With `transposed`, `copy` is
    the transpose. Shapes cannot tell: a square matrix has the same shape both ways.
    """
    main = getattr(parameter, "main_grad", None)
    if main is not None and copy is not parameter:
        copy.main_grad = main.t() if transposed else main
    return copy


class LowPrecisionLinear(nn.Module):
    """Replaces an nn.Linear, or a transformers Conv1D, whose weight [in, out] is `transposed`."""

    def __init__(self, linear: nn.Linear | Conv1D, name: str, context: PrecisionContext) -> None:
        """Take the Parameters of `linear`, which is called `name` in the model."""
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.transposed = isinstance(linear, Conv1D)
        self.state = LinearState(name, context)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T + b, [..., in] -> [..., out]."""
        weight = self.weight
        if self.transposed:
            weight = summing_where(weight, weight.t(), transposed=True)
        if self.state.low is None and self.state.context.quantizing:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            with watched(self.state.members, "forward"):
                return F.linear(x, weight.to(x.dtype), bias)
        return self.state(x.reshape(-1, x.shape[-1]), weight, self.bias).view(*x.shape[:-1], -1)
