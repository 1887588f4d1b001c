"""Low-precision products on any device: operands rounded as the precision has them, multiplied in BF16 or FP32.

docs/precision.md ("Emulation") says what is equal to the hardware's products and what is not. Inputs are kept for backward as
they came, in BF16, and quantized there once more for the weight gradient: linears that share an input then share what is kept
of it, where each would have codes of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint, noop_context_fn

from foundation.attributes import holding
from pretrain.precision.delayed_state import DelayedState
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.linear import NormFunction, NormKind, norm_in_fp32
from pretrain.precision.observation import BITS, ProductObserver, ScalesOf, dtype_name
from pretrain.precision.quantizers.blocks import BlockQuantized
from pretrain.precision.quantizers.tensor import absolute_maximum
from pretrain.precision.settings import ActivePrecision

# Graphs of one compiled function: a shape of a weight, an input or a gradient each, which torch would give up on after eight.
GRAPHS = 256


@dataclass(frozen=True)
class Operand:
    """One factor of a product: `values` [rows, k], k the axis of the sum, times the scalar `scale`, if there is one.

    `block_scale` [rows or rows / block, k / block] is in the values already, and beside them for whoever looks on."""

    values: Tensor
    scale: Tensor | None
    block_scale: Tensor | None = None

    def t(self) -> Operand:
        return Operand(self.values.t(), self.scale, None if self.block_scale is None else self.block_scale.t())

    @property
    def scales(self) -> ScalesOf:
        return ScalesOf(self.block_scale, self.scale)


def operand_dtype_of(active: ActivePrecision, device_type: str) -> torch.dtype:
    """What emulated operands are multiplied in on such a device: the smallest dtype that holds them and is not slow."""
    bits = [active.precision.significant_bits(active.settings, role) for role in get_args(Role)]
    return torch.bfloat16 if device_type == "cuda" and max(bits) <= BITS["bfloat16"] else torch.float32


class EmulationBackend:
    """Emulated products of one model; a `Backend`."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        self.active = active
        self.device = device
        self.delayed = DelayedState(active, device) if active.precision.keeps_history else None
        self.recomputing = False
        self.observer: ProductObserver | None = None
        self._products: list[EmulatedProduct] = []
        self._prepare = functools.cache(self._compiled_preparation)
        if device.type == "cuda" and torch.cuda.is_available():
            products_of_bf16_give_fp32()  # tried now, as the first product's observer would take the trial for a part of it

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> EmulatedProduct:
        product = EmulatedProduct(self, name)
        self._products.append(product)
        return product

    def norm(self, kind: NormKind, size: int, eps: float) -> NormFunction:
        return _compiled(lambda x, weight, bias: norm_in_fp32(kind, x, weight, bias, eps), self.device)

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext() if self.delayed is None else self.delayed.forward()

    def checkpoint(
        self, function: Callable[..., Any], *args: Any, context_fn: Callable[[], Any] = noop_context_fn, **kwargs: Any
    ) -> Any:
        scales = None if self.delayed is None else self.delayed.forward_scales

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, again = context_fn()
            return first, self._recompute(scales, again)

        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def state(self) -> dict[str, Tensor]:
        return {} if self.delayed is None else self.delayed.state()

    def state_storage(self) -> list[Tensor]:
        return [] if self.delayed is None else self.delayed.storage()

    def reset(self) -> None:
        if self.delayed is not None:
            self.delayed.reset()
        for product in self._products:
            product.weight = None

    def observing(self, observer: ProductObserver) -> AbstractContextManager[None]:
        return holding(self, observer=observer)

    def describe(self) -> str:
        compiled = ", quantization compiled" if self.device.type == "cuda" else ""
        return f"emulated in {dtype_name(self.operand_dtype)}, torch {torch.__version__}{compiled}"

    @property
    def operand_dtype(self) -> torch.dtype:
        """What operands are multiplied in, see `operand_dtype_of`."""
        return operand_dtype_of(self.active, self.device.type)

    def prepare(self, role: Role, x: Tensor, along: Along, scale: Tensor | None = None) -> tuple[Operand, Tensor | None]:
        """The operand of a product that sums `along` x's features or rows, and x's amax where delayed scaling is to note it."""
        *operand, amax = self._prepare(role, along)(x, scale)
        return Operand(*operand), amax

    def _compiled_preparation(self, role: Role, along: Along) -> Callable[..., tuple[Tensor | None, ...]]:
        precision = self.active.precision
        quantize, scaled = precision.quantizer(self.active.settings, role, along), precision.tensor_scaled
        noting_amax = self.delayed is not None and along == "features"
        dtype = self.operand_dtype

        def preparation(x: Tensor, scale: Tensor | None) -> tuple[Tensor | None, ...]:
            quantized = quantize(x, scale, None)
            in_blocks = isinstance(quantized, BlockQuantized)
            operand = quantized.operand_in(dtype) if in_blocks else quantized.operand.to(dtype)
            amax = absolute_maximum(x) if noting_amax else None
            return operand, quantized.tensor_scale if scaled else None, quantized.scales if in_blocks else None, amax

        return _compiled(preparation, self.device)

    @contextmanager
    def _recompute(self, scales: Tensor | None, context: AbstractContextManager[Any]) -> Iterator[None]:
        scaling = nullcontext() if self.delayed is None else self.delayed.recompute(scales)
        with context, scaling, holding(self, recomputing=True):
            yield


class EmulatedProduct:
    """y = x w^T + b of one linear."""

    def __init__(self, backend: EmulationBackend, name: str) -> None:
        self.name = name
        self.serves_both = partial(backend.active.precision.serves_both, backend.active.settings)
        self._backend = backend
        self._module = None if backend.delayed is None else backend.delayed.register(name)
        self.weight: tuple[Operand, Operand] | None = None  # quantized, for the forward product and for the gradient of the input

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, first_microbatch: bool) -> Tensor:
        """See LinearProduct; of any float dtype. Gradients have their tensors' dtypes; all sums are in FP32, into a weight's
        `main_grad` too. Raises RuntimeError where the precision's blocks do not divide a dimension."""
        if self.weight is None or (first_microbatch and not self._backend.recomputing):
            self._quantize_weight(weight.detach())
        return _Products.apply(x, weight, bias, self)

    def scale(self, role: Role) -> Tensor | None:
        """The scale in force of delayed scaling, an FP32 scalar; None for other precisions."""
        return None if self._module is None else self._backend.delayed.scale(self._module, role)

    def operand(self, role: Role, x: Tensor, along: Along, scale: Tensor | None) -> Operand:
        """`EmulationBackend.prepare`; delayed scaling notes x's amax."""
        operand, amax = self._backend.prepare(role, x, along, scale)
        if amax is not None:
            self._backend.delayed.record(self._module, role, amax)
        return operand

    def multiply(self, gemm: str, left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        observer = self._backend.observer
        with observer.during((self.name,), gemm, scales=(left.scales, right.scales)) if observer else nullcontext():
            return multiply(left, right, dtype, bias)

    @torch.no_grad()
    def _quantize_weight(self, weight: Tensor) -> None:
        self.weight = None  # or two of the largest would be in memory at once
        scale = self.scale("weight")
        forward = self.operand("weight", weight, "features", scale)
        dgrad = forward.t() if self.serves_both("weight") else self.operand("weight", weight, "rows", scale)
        self.weight = (forward, dgrad)


class _Products(torch.autograd.Function):
    """The three products of a linear."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, product: EmulatedProduct) -> Tensor:
        quantized_weight, ctx.weight_for_dgrad = product.weight
        ctx.input_scale = product.scale("input")
        ctx.product = product
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.main_gradient = getattr(weight, "main_grad", None)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        inputs = product.operand("input", x, "features", ctx.input_scale)
        return product.multiply("forward", inputs, quantized_weight, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        product, grad_output = ctx.product, grad_output.contiguous()
        scale = product.scale("grad_output")
        grad_input = grad_weight = along_features = None
        if needs_input or product.serves_both("grad_output"):
            along_features = product.operand("grad_output", grad_output, "features", scale)
        if needs_input:
            grad_input = product.multiply("dgrad", along_features, ctx.weight_for_dgrad, grad_output.dtype)
        if needs_weight:
            if product.serves_both("grad_output"):
                along_tokens = along_features.t()
            else:
                del along_features  # two of them would be in memory at once
                along_tokens = product.operand("grad_output", grad_output, "rows", scale)
            inputs = product.operand("input", x, "rows", ctx.input_scale)
            main = ctx.main_gradient
            grad_weight = product.multiply("wgrad", along_tokens, inputs, ctx.weight_dtype if main is None else torch.float32)
            if main is not None:  # in FP32, as the hardware's products add to it
                main += grad_weight
                grad_weight = None
        grad_bias = grad_output.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return grad_input, grad_weight, grad_bias, None


def multiply(left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """left [m, k] times right [n, k] transposed, scaled, plus `bias` [n]: all in FP32, then rounded once to `dtype`; [m, n]."""
    product = _product_in_fp32(left.values, right.values.t())
    scale = None if left.scale is None else (left.scale * right.scale).reshape(1)  # of one dimension, or it would be cast
    out = torch.empty_like(product, dtype=dtype)
    if bias is None:
        return out.copy_(product) if scale is None else torch.mul(product, scale, out=out)
    if scale is None:
        return torch.add(product, bias, out=out)
    return torch.addcmul(bias.float(), product, scale, out=out)


def _product_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of BF16 or FP32 matrices, with FP32 sums."""
    if left.dtype == torch.bfloat16 and products_of_bf16_give_fp32():
        return torch.mm(left, right, out_dtype=torch.float32)
    with holding(torch.backends.cuda.matmul, fp32_precision="ieee"):  # no TF32, whatever the user set
        return left.float() @ right.float()


@functools.cache
def products_of_bf16_give_fp32() -> bool:
    """Whether this torch and GPU write a product of BF16 matrices as FP32: tried, as no version number tells."""
    factor = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        product = torch.mm(factor, factor, out_dtype=torch.float32)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return product.dtype == torch.float32 and bool((product == 16).all())


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function`, compiled for each shape on CUDA; a CPU gains little from that and would wait for a C++ compiler."""
    if device.type != "cuda":
        return function
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return compiled(*args)

    return call
