"""Emulated low precision on any device: round operands to a format, multiply in BF16 or FP32.

docs/developers/checks.md ("Emulation") lists the results that equal the hardware's, and the
results that do not. The input of a layer is saved for backward unquantized, because several linear
layers share the same input tensor. Backward quantizes the input again for the weight's gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision import grouped
from pretrain.precision.delayed_state import DelayedState
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.gemm import Gemm, GemmEngine, GemmKind, Saved
from pretrain.precision.observed import ALONG, NO_CONTEXT, OPERANDS, dtype_name, watched
from pretrain.precision.quantizers.tensor import absolute_maximum
from pretrain.precision.settings import ActivePrecision


class Operand(NamedTuple):
    """One operand of a product. The product sums along the last dimension of `values`."""

    # [rows, k]: the codes, multiplied by the scales of their blocks.
    values: Tensor
    # The tensor scale, a scalar, by which `values` are not multiplied. None if the format has no
    # tensor scale.
    scale: Tensor | None

    def t(self) -> Operand:
        return Operand(self.values.t(), self.scale)


class BothWays(NamedTuple):
    """An operand [rows, features] in two quantized forms, one for each of its products.

    One product sums along the features, the other product sums along the rows. Forward quantizes an
    input only along its features. In backward, `EmulatedGemm.restore` quantizes it along its rows.
    """

    # The Operand for the product that sums along the features. None for an input in backward.
    features: Any
    # The Operand for the product that sums along the rows. None for an input in forward, and for
    # an operand that is used only in the other product.
    rows: Operand | None
    # The unquantized input. None for a weight and for a gradient.
    x: Tensor | None = None
    # The delayed scale with which forward quantized the input. None for a weight, for a gradient,
    # and without delayed scaling.
    scale: Tensor | None = None


class EmulationEngine(GemmEngine):
    """The emulated Gemms of one model."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        super().__init__(active, device)
        # Multiply in BF16 on a GPU, because tensor cores multiply BF16 fast. BF16 represents all
        # operands exactly: codes, multiplied by the scales of their blocks.
        self.operand_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.delayed = (
            DelayedState(self.precision, device) if self.precision.keeps_history else None
        )
        # Map a role and an axis to a function that quantizes operands. Each is made only once.
        self.operand_quantizer = functools.cache(self._make_operand_quantizer)

    def _make(
        self, name: str, in_features: int, out_features: int, bias: bool, members: Sequence[str]
    ) -> EmulatedGemm:
        return EmulatedGemm(self, name, members)

    def forward(self) -> AbstractContextManager[None]:
        return NO_CONTEXT if self.delayed is None else self.delayed.forward()

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        if self.delayed is not None:
            again = functools.partial(self.delayed.recomputing, again, self.delayed.forward_scales)
        return super().checkpoint(function, *args, again=again)

    def state(self) -> dict[str, Tensor]:
        return {} if self.delayed is None else self.delayed.state()

    def reset(self) -> None:
        super().reset()
        if self.delayed is not None:
            self.delayed.drop_pass()

    def describe(self) -> str:
        compiled = ", quantization compiled" if self.device.type == "cuda" else ""
        return f"emulated in {dtype_name(self.operand_dtype)}, torch {torch.__version__}{compiled}"

    def without_autocast(self) -> AbstractContextManager[None]:
        """Return a context without autocast, which would round FP32 operands to BF16."""
        return torch.autocast(self.device.type, enabled=False)

    def _make_operand_quantizer(self, role: Role, along: Along) -> Callable[..., tuple[Any, ...]]:
        """Return a function that quantizes x [rows, features] for a product along `along`.

        On a GPU, the function is compiled. The arguments of the function are x, and the scale of
        delayed scaling or None. It returns a tuple: the fields of an `Operand`, and then the amax
        of x. The amax is computed only with delayed scaling and only if `along` is "features",
        otherwise it is None.
        """
        dtype = self.operand_dtype
        quantize = self.precision.quantizer(role, along)
        has_tensor_scale = self.precision.tensor_scaled
        records_amax = self.delayed is not None and along == "features"

        def quantize_operand(x: Tensor, scale: Tensor | None) -> tuple[Any, ...]:
            quantized = quantize(x, scale, None)
            tensor_scale = quantized.tensor_scale if has_tensor_scale else None
            amax = absolute_maximum(x) if records_amax else None
            return quantized.operand_in(dtype), tensor_scale, amax

        # Compiling gains little on a CPU, and the run would have to wait for a C++ compiler.
        if self.device.type != "cuda":
            return quantize_operand
        compiled = torch.compile(quantize_operand, fullgraph=True, dynamic=False)

        def compiled_for_each_shape(*args: Any) -> tuple[Any, ...]:
            # torch's default limit would stop compilation after eight different shapes.
            with torch._dynamo.config.patch(recompile_limit=256):
                return compiled(*args)

        return compiled_for_each_shape


class EmulatedGemm(Gemm):
    """The products of one linear layer. `EmulationEngine.operand_quantizer` quantizes operands."""

    def __init__(self, engine: EmulationEngine, name: str, members: Sequence[str]) -> None:
        super().__init__(name, members)
        self.row_multiple = max(self.row_multiple, engine.precision.multiple_of)
        self._engine = engine
        self._delayed = engine.delayed
        # Index of the layer in the histories of delayed scaling.
        self._index = engine.delayed.register(name) if engine.delayed else 0

    def quantize(self, role: Role, x: Tensor, *, both: bool = True) -> BothWays:
        if role == "weight" and x.dim() > 2:
            x = x.flatten(0, -2)  # the weights of all experts are quantized as one matrix
        scale = self._delayed.scale(self._index, role) if self._delayed else None
        features = self.quantize_along(role, x, "features", scale)
        if role == "input":
            # In backward, `restore` quantizes the input along its rows.
            return BothWays(features, None, x, scale)
        if self._engine.precision.serves_both(role):
            return BothWays(features, features.t())
        rows = self.quantize_along(role, x, "rows", scale) if both else None
        return BothWays(features, rows)

    def quantize_along(self, role: Role, x: Tensor, along: Along, scale: Tensor | None) -> Operand:
        """Quantize x [rows, features] for a product that sums along `along`.

        With delayed scaling, quantize with `scale`. If `along` is "features", also record the amax
        of x.
        """
        with self._engine.without_autocast():
            *operand, amax = self._engine.operand_quantizer(role, along)(x, scale)
        if self._delayed and amax is not None:
            self._delayed.record(self._index, role, amax)
        return Operand(*operand)

    def factors(self, kind: GemmKind, left: BothWays, right: BothWays) -> list[Operand]:
        """Return the Operands of `left` and `right` that the product `kind` multiplies."""
        left_axis, right_axis = ALONG[kind]
        return [getattr(left, left_axis), getattr(right, right_axis)]

    def matmul(
        self,
        kind: GemmKind,
        left: BothWays,
        right: BothWays,
        dtype: torch.dtype | None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        ends: Tensor | None = None,
    ) -> Tensor:
        a, b = self.factors(kind, left, right)
        # The kinds of the operands, for observers.
        kinds = [self._engine.precision.operand_kind(role) for role in OPERANDS[kind]]
        with watched(self.members, kind, kinds), self._engine.without_autocast():
            if ends is not None:
                return multiply_grouped(kind, a, b, dtype, ends)
            y = multiply(a, b, dtype, bias)
        return y if residual is None else y.add_(residual)

    @staticmethod
    def codes(operand: BothWays) -> Tensor:
        return operand.features.values

    @staticmethod
    def save(*operands: BothWays) -> Saved:
        # A `SingleWeightPass` saves only the input. Fused layers, which save more, do not use the
        # emulation.
        (operand,) = operands
        return (operand.x, operand.scale), None

    # This is not a static method as in Gemm, because quantizing the input again needs the layer's
    # state.
    def restore(self, tensors: Sequence[Any], rest: Any) -> list[BothWays]:  # type: ignore[override]
        """Return the input, quantized for the product of the weight's gradient."""
        x, scale = tensors
        return [BothWays(None, self.quantize_along("input", x, "rows", scale))]


def multiply(
    left: Operand, right: Operand, dtype: torch.dtype | None, bias: Tensor | None = None
) -> Tensor:
    """Return left right^T + bias, [m, n], for left [m, k], right [n, k] and bias [n].

    The product is multiplied by the tensor scales of the operands. Product, scaling and bias are
    computed in FP32, and the result is rounded once to `dtype`. If `dtype` is None, it stays FP32.
    """
    if left.values.is_cuda:
        product = torch.mm(left.values, right.values.t(), out_dtype=torch.float32)
    else:
        product = left.values @ right.values.t()
    return _scaled(product, left, right, dtype, bias)


def multiply_grouped(
    kind: GemmKind, left: Operand, right: Operand, dtype: torch.dtype | None, ends: Tensor
) -> Tensor:
    """Return the grouped product `kind` of two operands, computed in FP32.

    The result is rounded to `dtype`. If `dtype` is None, it stays FP32. `ends` is the same as in
    `Gemm.matmul`.
    """
    right_values = grouped.right_for_kernel(kind, right.values.float(), len(ends))
    product = F.grouped_mm(left.values.float(), right_values, offs=ends)
    return _scaled(product, left, right, dtype)


def _scaled(
    product: Tensor,
    left: Operand,
    right: Operand,
    dtype: torch.dtype | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `product` times the tensor scales of its operands, plus bias, rounded to `dtype`.

    `product` [m, n] is FP32 and is overwritten.
    """
    if left.scale is None or right.scale is None:
        result = product if bias is None else product.add_(bias)
    elif bias is None:
        result = product.mul_(left.scale * right.scale)
    else:
        result = torch.addcmul(bias.float(), product, left.scale * right.scale)
    return result if dtype is None else result.to(dtype)
