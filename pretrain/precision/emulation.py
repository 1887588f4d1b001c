"""Low-precision products on any device: operands rounded as the precision has them, multiplied in BF16 or FP32.

docs/verification.md ("Emulation") says what is equal to the hardware's products and what is not. Inputs are kept for backward as
they came, in BF16, which linears share, and quantized there once more for the weight gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.precision import grouped
from pretrain.precision.delayed_state import DelayedState
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.grouped import Grouped
from pretrain.precision.observed import ALONG, dtype_name, watched
from pretrain.precision.product import Backend, Gemm, Product
from pretrain.precision.quantizers.blocks import BlockQuantized
from pretrain.precision.quantizers.tensor import absolute_maximum
from pretrain.precision.settings import ActivePrecision


class Operand(NamedTuple):
    """One factor of a product: `values` [rows, k], k the axis of the sum, times the scalar `scale`, if there is one.

    `block_scale` [rows or rows / block, k / block] is in the values already, and beside them for whoever looks on."""

    values: Tensor
    scale: Tensor | None
    block_scale: Tensor | None = None

    def t(self) -> Operand:
        return Operand(
            self.values.t(), self.scale, None if self.block_scale is None else self.block_scale.t()
        )


class BothWays(NamedTuple):
    """An operand [rows, features], quantized for sums along either axis. An input is quantized along its features alone; for its
    rows `restore` takes x, and the delayed scale that was in force when it came."""

    features: Operand | None
    rows: Operand | None
    x: Tensor | None = None
    scale: Tensor | None = None


class EmulationBackend(Backend):
    """Emulated products of one model."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        self.active = active
        self.device = device
        # What operands are multiplied in: BF16 holds those of every format, and is fast where there are tensor cores.
        self.operand_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.delayed = DelayedState(active, device) if active.precision.keeps_history else None
        self.products: list[EmulatedProduct] = []
        self._prepare = functools.cache(self._compiled_preparation)

    def product(
        self, name: str, in_features: int, out_features: int, *, bias: bool, grouped: bool = False
    ) -> EmulatedProduct:
        self.products.append((EmulatedGroupedProduct if grouped else EmulatedProduct)(self, name))
        return self.products[-1]

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext() if self.delayed is None else self.delayed.forward()

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        scales = None if self.delayed is None else self.delayed.forward_scales

        @contextmanager
        def recomputing() -> Iterator[None]:
            with again(), nullcontext() if self.delayed is None else self.delayed.recompute(scales):
                yield

        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputing())
        )

    def state(self) -> dict[str, Tensor]:
        return {} if self.delayed is None else self.delayed.state()

    def reset(self) -> None:
        super().reset()
        if self.delayed is not None:
            self.delayed.forget_pass()

    def describe(self) -> str:
        compiled = ", quantization compiled" if self.device.type == "cuda" else ""
        return f"emulated in {dtype_name(self.operand_dtype)}, torch {torch.__version__}{compiled}"

    def prepare(
        self, role: Role, x: Tensor, along: Along, scale: Tensor | None = None
    ) -> tuple[Operand, Tensor | None]:
        """The operand of a product that sums `along` x's features or rows, and x's amax where delayed scaling is to note it."""
        *operand, amax = self._prepare(role, along)(x, scale)
        return Operand(*operand), amax

    def _compiled_preparation(
        self, role: Role, along: Along
    ) -> Callable[..., tuple[Tensor | None, ...]]:
        precision, dtype = self.active.precision, self.operand_dtype
        quantize, scaled = (
            precision.quantizer(self.active.settings, role, along),
            precision.tensor_scaled,
        )
        noting_amax = self.delayed is not None and along == "features"

        def preparation(x: Tensor, scale: Tensor | None) -> tuple[Tensor | None, ...]:
            quantized = quantize(x, scale, None)
            in_blocks = isinstance(quantized, BlockQuantized)
            operand = quantized.operand_in(dtype) if in_blocks else quantized.operand.to(dtype)
            amax = absolute_maximum(x) if noting_amax else None
            return (
                operand,
                quantized.tensor_scale if scaled else None,
                quantized.scales if in_blocks else None,
                amax,
            )

        # a CPU gains little from compiling and would wait for a C++ compiler
        if self.device.type != "cuda":
            return preparation
        compiled = torch.compile(preparation, fullgraph=True, dynamic=False)

        def compiled_for_each_shape(*args: Tensor | None) -> tuple[Tensor | None, ...]:
            # shapes; torch would give up after eight
            with torch._dynamo.config.patch(recompile_limit=256):
                return compiled(*args)

        return compiled_for_each_shape


class EmulatedProduct(Product):
    def __init__(self, backend: EmulationBackend, name: str) -> None:
        super().__init__(name)
        self._backend = backend
        self._module = None if backend.delayed is None else backend.delayed.register(name)

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> BothWays:
        scale = None if self._module is None else self._backend.delayed.scale(self._module, role)
        features = self.quantized(role, x, "features", scale)
        if role == "input":
            return BothWays(features, None, x, scale)
        if self._backend.active.precision.serves_both(role):
            return BothWays(features, features.t())
        return BothWays(features, self.quantized(role, x, "rows", scale) if both else None)

    def quantized(self, role: Role, x: Tensor, along: Along, scale: Tensor | None) -> Operand:
        """Delayed scaling notes x's amax where it is quantized along features."""
        operand, amax = self._backend.prepare(role, x, along, scale)
        if amax is not None:
            self._backend.delayed.record(self._module, role, amax)
        return operand

    @staticmethod
    def codes(operand: BothWays) -> Tensor:
        return operand.features.values

    def factors(self, gemm: Gemm, left: BothWays, right: BothWays) -> list[Operand]:
        """What `gemm` multiplies, both with the axis of its sum last."""
        return [
            getattr(operand, along)
            for operand, along in zip((left, right), ALONG[gemm], strict=True)
        ]

    def multiply(
        self,
        gemm: Gemm,
        left: BothWays,
        right: BothWays,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        factors = self.factors(gemm, left, right)
        with watched(
            self.members, gemm, [(factor.block_scale, factor.scale) for factor in factors]
        ):
            return multiply(*factors, dtype, bias)

    def save(self, operand: BothWays) -> tuple[Sequence[Tensor | None], Any]:
        return (operand.x, operand.scale), None

    def restore(self, tensors: Sequence[Tensor | None], rest: Any) -> list[BothWays]:
        x, scale = tensors
        return [BothWays(None, self.quantized("input", x, "rows", scale))]


class EmulatedGroupedProduct(Grouped, EmulatedProduct):
    """The operands of all experts are quantized as one, and multiplied in FP32."""

    def __init__(self, backend: EmulationBackend, name: str) -> None:
        super().__init__(backend, name)
        self.aligned = max(self.aligned, backend.active.precision.multiple_of)

    def multiply(
        self,
        gemm: Gemm,
        left: BothWays,
        right: BothWays,
        dtype: torch.dtype | None,
        bias: None = None,
    ) -> Tensor:
        a, b = factors = self.factors(gemm, left, right)
        if gemm == "wgrad":
            operands = a.values.t(), b.values.t()
        elif gemm == "forward":
            operands = a.values, b.values.unflatten(0, (len(self.ends), -1))
        else:
            stacked = self._by_expert(b.values)
            operands = a.values, stacked.mT
            of_blocks = (
                None if b.block_scale is None else self._by_expert(b.block_scale).flatten(0, 1)
            )
            factors = [a, Operand(stacked.flatten(0, 1), b.scale, of_blocks)]
        with watched(
            self.members, gemm, [(factor.block_scale, factor.scale) for factor in factors]
        ):
            product = grouped.multiply(gemm, *(each.float() for each in operands), self.ends)
        if a.scale is not None:
            product.mul_(a.scale * b.scale)
        return product if dtype is None else product.to(dtype)

    def _by_expert(self, values: Tensor) -> Tensor:
        """values [in, experts x out] -> [experts, in, out]: of a weight whose product sums along the rows of each expert."""
        return values.unflatten(1, (len(self.ends), -1)).transpose(0, 1)


def multiply(
    left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """left [m, k] times right [n, k] transposed, scaled, plus `bias` [n]: all in FP32, then rounded once to `dtype`; [m, n]."""
    if left.values.is_cuda:
        product = torch.mm(left.values, right.values.t(), out_dtype=torch.float32)
    else:
        product = left.values @ right.values.t()
    # of one dimension, or it would be cast
    scale = None if left.scale is None else (left.scale * right.scale).reshape(1)
    out = torch.empty_like(product, dtype=dtype)
    if bias is None:
        return out.copy_(product) if scale is None else torch.mul(product, scale, out=out)
    if scale is None:
        return torch.add(product, bias, out=out)
    return torch.addcmul(bias.float(), product, scale, out=out)
