"""Linear layers in low precision: the state of each layer, its autograd function and its module.

`LowPrecisionLinear` replaces a linear module of a model. It has the same Parameters under the same
names. So tied weights, checkpoints, sharding and export work as with the model that transformers
built. torch.compile ends its graph before each `LowPrecisionLinear`.

In a forward, the module calls its `LinearState`. The `LinearState` selects the Gemm of the current
precision and applies `LinearFunction`, an autograd function. `LinearFunction` runs a
`SingleWeightPass`, which quantizes the operands, multiplies them, and shows operands and results to
the probes of the model's `PrecisionContext`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from foundation.overrides import overridden
from pretrain.precision.formats.definition import Role
from pretrain.precision.formats.unquantized import BF16
from pretrain.precision.gemm import (
    Gemm,
    GemmEngine,
    GemmKind,
    Operand,
    Saved,
    TorchGemm,
    checkpointed,
)
from pretrain.precision.observed import watched
from pretrain.precision.settings import ActivePrecision


class Probe:
    """Observer of the products of one model. A subclass overrides the methods that it needs.

    An argument `values` or `matrix` is a function that returns a tensor. Some operands
    exist only in quantized form, and the function then computes the unquantized values again. So a
    probe should call it only if it needs the values.

    A probe sees the values that a product is meant to compute with. The operands that the kernels
    of torch, Transformer Engine and cublasLt really receive are observed in another way
    (`pretrain.precision.observed`).
    """

    # True if `result` is overridden. A residual is then added after its product, and a weight's
    # gradient is the difference of two sums.
    observes_results: bool = False

    def operand(
        self, name: str, role: Role, values: Callable[[], Tensor], call: LinearPass, /
    ) -> None:
        """Observe an operand of a low-precision product before it is quantized.

        name: the name of the product's Gemm.
        role: the role of the operand. A weight is observed when it is quantized.
        values: returns the unquantized operand [rows, features].
        call: the pass of the linear layer, in forward and in its backward.
        """

    def weight(self, gemm: Gemm, operand: Operand, matrix: Callable[[], Tensor], /) -> None:
        """Observe the weight that a forward product multiplies. It may be unquantized.

        operand: the weight as an operand of `gemm`, possibly from the cache.
        matrix: returns the present unquantized weight [out, in]. Under FSDP2, it may be called
            only in the microbatch that has quantized the weight.
        """

    def result(
        self, name: str, kind: GemmKind, result: Tensor, bias: Tensor | None, call: LinearPass, /
    ) -> None:
        """Observe the result of a low-precision product, which includes the `bias` if it has one.

        `name` and `call` are the same as in `operand`.
        """


# The precision of a model whose products are never quantized.
UNQUANTIZED_MODEL = ActivePrecision(BF16.name, BF16, "torch")


@dataclass
class PrecisionContext:
    """The current precision of one model, and the state that all its products share."""

    # The dtype of activations.
    compute_dtype: torch.dtype
    # Map the name of each quantized precision of the run to its engine.
    engines: Mapping[str, GemmEngine] = field(default_factory=dict)
    # The current precision.
    current: ActivePrecision = UNQUANTIZED_MODEL
    # True if evaluation computes in low precision too.
    evaluates_low: bool = False
    # True while a low-precision forward runs.
    low_precision: bool = False
    # True during the first microbatch of a step.
    first_microbatch: bool = True
    # The probes that observe the products. Empty in most steps.
    probes: tuple[Probe, ...] = ()
    # False while the parity check or the gap to BF16 runs the model without quantization.
    quantizing: bool = True

    @property
    def engine(self) -> GemmEngine | None:
        """The engine of the current precision. None if the precision is not quantized."""
        return self.engines.get(self.current.name)

    def using(self, precision: ActivePrecision) -> AbstractContextManager[None]:
        """Return a context in which `precision`, a precision of the run, is the current one."""
        return overridden(self, current=precision)

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Return a context for a forward of the model.

        Inside, linear layers compute in the current precision. In an evaluation (`training=False`),
        they are unquantized unless `evaluates_low` is set.
        """
        if self.engine is None or not self.quantizing or not (training or self.evaluates_low):
            yield
            return
        with self.engine.forward(), overridden(self, low_precision=True):
            yield

    def probing(self, probe: Probe) -> AbstractContextManager[None]:
        """Return a context in which `probe` observes the products, beside other probes."""
        return overridden(self, probes=(*self.probes, probe))

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return function(*args). Backward recomputes the function in the same precision.

        The recomputation uses the quantized weights of the first computation.
        """
        again = functools.partial(
            overridden, self, low_precision=self.low_precision, first_microbatch=False
        )
        if self.engine is None or not self.quantizing:
            return checkpointed(function, *args, again=again)
        return self.engine.checkpoint(function, *args, again=again)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of `GemmEngine.state` of the current engine.

        The dict is empty if the current precision is not quantized.
        """
        return self.engine.state() if self.engine else {}

    def saved_state(self) -> dict[str, Tensor]:
        """Return the tensors of `GemmEngine.state` of all engines, for a checkpoint."""
        state: dict[str, Tensor] = {}
        for engine in self.engines.values():
            state |= engine.state()
        return state

    def copied_state(self) -> list[Tensor]:
        """Return copies of the tensors of `saved_state`, on the same device, for `go_back`."""
        live = list(self.saved_state().values())
        copies = [torch.empty_like(tensor) for tensor in live]
        if live:
            torch._foreach_copy_(copies, live)
        return copies

    def go_back(self, copies: Sequence[Tensor]) -> None:
        """Restore histories and scales from `copies`, and reset all other state of the engines.

        `copies` is the result of `copied_state`. Call this method after a skipped step. Otherwise
        an overflow in the step would stay in the histories, for 1,024 microbatches by default. Call
        this method also after a pass that failed. Otherwise the next recomputation of a layer would
        use the scales that the failed pass stored.
        """
        self.reset_engines()
        for tensor, before in zip(self.saved_state().values(), copies, strict=True):
            tensor.copy_(before)

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Return a context for passes that are not part of training.

        Histories and scales are restored when the context is left.
        """
        copies = self.copied_state()
        try:
            yield
        finally:
            self.go_back(copies)

    def reset_engines(self) -> None:
        """Reset the engines to their state before the first forward."""
        for engine in self.engines.values():
            engine.reset()


class LinearState:
    """The name of one linear layer, and its products in the current precision.

    Each engine of the run that quantizes the layer has a Gemm of this name.
    """

    def __init__(self, name: str, context: PrecisionContext, members: Sequence[str] = ()) -> None:
        """Create the state of the layer `name`, without any Gemm.

        `members` are the names of the layers whose weights are stacked. By default, the only member
        is the layer `name`.
        """
        self.name = name
        self.members = members or (name,)
        self.context = context

    def create_gemm(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        """Create the Gemm of the layer in the engine of the current precision.

        The current precision is quantized. `bias` is True if the layer has a bias.
        """
        engine: Any = self.context.engine
        engine.gemm(self.name, in_features, out_features, bias=bias, members=self.members)

    @property
    def low(self) -> Gemm | None:
        """The Gemm that computes the layer in the current low-precision forward.

        None if no low-precision forward runs, or if the current engine does not quantize the layer.
        """
        engine = self.context.engine
        return engine.gemms.get(self.name) if engine and self.context.low_precision else None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, ends: Tensor | None = None
    ) -> Tensor:
        """Return x w^T + bias [rows, out] in the current precision, differentiable.

        x: the input [rows, in].
        weight: the weight [out, in]. If it has the attribute `main_grad`, backward adds its
            gradient to `main_grad`.
        bias: the bias [out], or None.
        ends: the end of each expert's rows in a mixture of experts, int32 [experts], or None. With
            `ends`, the rows are sorted by expert, and the weight is [experts, out, in].

        In low precision, x, weight and bias are cast to the context's compute dtype. Otherwise,
        weight and bias are cast to the dtype of x. The first microbatch of a step quantizes the
        weight. The other microbatches use the cached quantized weight.
        """
        gemm = self.low
        context = self.context
        if gemm is None:
            gemm = TorchGemm(self.name, self.members)
            # This context has the compute dtype of x, and no probes.
            context = PrecisionContext(x.dtype)
        dtype = context.compute_dtype
        linear_pass = SingleWeightPass(
            gemm,
            context,
            differentiable=torch.is_grad_enabled(),
            ends=ends,
        )
        return LinearFunction.apply(x.to(dtype), *in_dtype(dtype, weight, bias), linear_pass)


class LinearPass:
    """One forward of a linear layer and its backward.

    A pass has the steps of a forward and of a backward. Its subclasses combine the steps for a
    layer whose weight is one tensor (`SingleWeightPass`), and for stacked weights. The steps show
    operands, weights and results to the probes of the context.
    """

    # True if each row of the output's gradient has a scale of its own in dgrad.
    gradient_has_row_scales = False

    def __init__(
        self,
        gemm: Gemm,
        context: PrecisionContext,
        *,
        differentiable: bool,
        first: bool = True,
        ends: Tensor | None = None,
    ) -> None:
        """Create a pass.

        differentiable: True if a backward can follow.
        first: True in the first pass of the layer in a microbatch. In the first microbatch of a
            step, this pass quantizes the weight even if a quantized weight is cached.
        ends: the end of each expert's rows, int32 [experts]. None if the products are not grouped.
        """
        self.gemm = gemm
        self.context = context
        self.refresh = first and context.first_microbatch
        self.differentiable = differentiable
        self.ends = ends

    @property
    def results_are_observed(self) -> bool:
        """True if a probe observes the results of the products of this pass."""
        return self.gemm.quantizes and any(probe.observes_results for probe in self.context.probes)

    def quantize(self, role: Role, x: Tensor) -> Operand:
        """Quantize the input [tokens, in] or the output's gradient [tokens, out].

        The operand can be used in both of its products if a backward can follow.
        """
        self.show(role, lambda: x)
        return self.gemm.quantize(role, x, both=self.differentiable)

    def forward_product(
        self,
        x: Operand,
        weight: Operand,
        matrix: Callable[[], Tensor],
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return x w^T + bias + residual [tokens, out].

        x, weight: quantized operands.
        matrix: function that returns the unquantized weight [out, in].
        residual: the values that are added, [tokens, out]. They are not modified.
        """
        if residual is not None and self.results_are_observed:
            # A probe must observe the product without the residual.
            return self.forward_product(x, weight, matrix, bias).add_(residual)
        self.show_weight(weight, matrix)
        dtype = self.context.compute_dtype
        y = self.gemm.matmul("forward", x, weight, dtype, bias, residual, ends=self.ends)
        self.show_result("forward", y, bias)
        self.gemm.end()
        return y

    def gradient_product(self, kind: GemmKind, left: Operand, right: Operand) -> Tensor:
        """Return a product of backward: dgrad or wgrad.

        `left` and `right` are the factors in the same order as in `Gemm.matmul`. The dtype is the
        compute dtype of the context.
        """
        dtype = self.context.compute_dtype
        gradient = self.gemm.matmul(kind, left, right, dtype, ends=self.ends)
        self.show_result(kind, gradient)
        return gradient

    def weight_gradient(
        self, dy: Operand, x: Operand, total: Tensor | None, *, overwrite: bool
    ) -> Tensor | None:
        """Compute the weight's gradient dy^T x [out, in].

        Without `total`, return the gradient. Otherwise add the gradient to `total` and return None.
        With `overwrite`, the gradient replaces the values of `total`.
        """
        if total is None:
            return self.gradient_product("wgrad", dy, x)
        if not self.results_are_observed:
            self.gemm.accumulate(total, dy, x, overwrite=overwrite, ends=self.ends)
            return None
        # A probe must observe the sum that the kernel computes, without its earlier values.
        before = total.float()
        after = before.clone()
        self.gemm.accumulate(after, dy, x, overwrite=overwrite, ends=self.ends)
        self.show_result("wgrad", after if overwrite else after - before)
        total.copy_(after)
        return None

    def show(self, role: Role, values: Callable[[], Tensor]) -> None:
        """Show an operand to the probes. `values` returns it unquantized, [..., features]."""
        if self.context.probes and self.gemm.quantizes:
            # Several probes may need the values, which are computed only once.
            rows = functools.cache(lambda: values().detach().flatten(0, -2))
            for probe in self.context.probes:
                probe.operand(self.gemm.name, role, rows, self)

    def show_weight(self, weight: Operand, matrix: Callable[[], Tensor]) -> None:
        """Show the weight of the forward product to the probes.

        If the weight was quantized in this pass, also show it as an operand. `matrix` returns the
        unquantized weight.
        """
        if self.refresh:
            self.show("weight", matrix)
        for probe in self.context.probes:
            probe.weight(self.gemm, weight, matrix)

    def show_result(self, kind: GemmKind, result: Tensor, bias: Tensor | None = None) -> None:
        """Show the result of a product to the probes."""
        if self.gemm.quantizes:
            for probe in self.context.probes:
                probe.result(self.gemm.name, kind, result.detach(), bias, self)


class SingleWeightPass(LinearPass):
    """The pass of a layer whose weight is one tensor."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saved]:
        """Return the output [tokens, out] for x [tokens, in], and the data to save for `backward`.

        The data are the result of `Gemm.save` for x. They are empty if no backward can follow.
        """
        gemm = self.gemm
        gemm.begin(x)
        # True if all gradients have been quantized after the backward of this pass.
        self.ends_backward = self.differentiable and gemm.claim_first_in_forward()
        operand = self.quantize("input", x)
        # The quantized weight, from forward to backward.
        self.weight = gemm.weight_operand(
            lambda: require_not_freed(weight),
            refresh=self.refresh,
            differentiable=self.differentiable,
        )
        y = self.forward_product(operand, self.weight, lambda: require_not_freed(weight), bias)
        return y, gemm.save(operand) if self.differentiable else ((), None)

    def backward(
        self, dy: Tensor, saved: Saved | None, total: Tensor | None, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the input and the gradient of the weight.

        dy: the gradient of the output.
        saved: the data that `forward` returned. None if the weight needs no gradient.
        total: the gradient sum that the weight's gradient is added to, see `weight_gradient`.

        The weight's gradient is None if `saved` is None, or if the gradient was added to `total`.
        """
        gradient = self.quantize("grad_output", dy.contiguous())
        dx = self.gradient_product("dgrad", gradient, self.weight)
        dw = None
        if saved is not None:
            # `forward` has saved one operand, the input.
            (x,) = self.gemm.restore(*saved)
            dw = self.weight_gradient(gradient, x, total, overwrite=overwrite)
        # The first pass of the model's forward is the last one in backward. After it, all gradients
        # have been quantized, and delayed scaling can update their histories.
        if self.ends_backward:
            self.gemm.finish_backward()
        return dx, dw


class LinearFunction(torch.autograd.Function):
    """The autograd function y = x w^T + b, computed by a `SingleWeightPass`.

    `LinearState.__call__` documents the arguments.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear_pass: SingleWeightPass
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


def require_not_freed(weight: Tensor) -> Tensor:
    """Return `weight`. Raise RuntimeError if its values were freed (`pretrain.model.sharding`).

    Reading freed values would end the process.
    """
    if weight.numel() > 0 and weight.untyped_storage().size() == 0:
        raise RuntimeError(
            "FSDP2: a product reads a gathered weight that was freed when it was quantized"
        )
    return weight


def with_main_grad_of(parameter: Tensor, copy: Any, *, transposed: bool = False) -> Tensor:
    """Return `copy`, a cast of `parameter`, with the `main_grad` of `parameter` as an attribute.

    With this attribute, backward adds the gradient of the copy to the gradient sum of the
    parameter. Set `transposed` if `copy` is the transpose of `parameter`. The function cannot
    derive this from the shapes, because the transpose of a square matrix has the same shape.
    """
    main = getattr(parameter, "main_grad", None)
    if main is not None and copy is not parameter:
        copy.main_grad = main.t() if transposed else main
    return copy


def in_dtype(
    dtype: torch.dtype, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in `dtype`, the dtype of the layer's matrix products.

    A parameter with a different dtype is copied in each call. The copy of the weight has the
    `main_grad` of the weight.
    """
    return with_main_grad_of(weight, weight.to(dtype)), None if bias is None else bias.to(dtype)


class LowPrecisionLinear(nn.Module):
    """Replacement for an nn.Linear, or for a transformers Conv1D with a weight [in, out].

    `transposed` is True if the replaced module is a Conv1D.
    """

    def __init__(self, linear: nn.Linear | Conv1D, name: str, context: PrecisionContext) -> None:
        """Create the replacement for `linear`, whose name in the model is `name`.

        It has the same Parameters as `linear`.
        """
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.transposed = isinstance(linear, Conv1D)
        self.state = LinearState(name, context)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T + b [..., out] for x [..., in].

        The result has the dtype of x, or the compute dtype in an autocast.
        """
        weight = self.weight
        if self.transposed:
            weight = with_main_grad_of(weight, weight.t(), transposed=True)
        # A layer that is not quantized now is computed by torch. The parity check without
        # quantization is an exception, because it checks the code of `LinearState`.
        if self.state.low is None and self.state.context.quantizing:
            with watched(self.state.members, "forward"):
                return F.linear(x, *in_dtype(x.dtype, weight, self.bias))
        rows = x.reshape(-1, x.shape[-1])
        y = self.state(rows, weight, self.bias).view(*x.shape[:-1], -1)
        return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)
