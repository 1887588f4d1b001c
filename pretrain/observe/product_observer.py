"""Observe the matrix products of linears, with the operands that the kernels receive.

Products of torch are observed below autograd, by a dispatch mode. Products of Transformer Engine
are observed at the one function of its C++ extension that computes GEMMs. Products of cublasLt are
observed in pretrain/precision/cublaslt.py, which calls cublasLt.

The kind of each operand is recorded: its number format and its scaling. The kind of an operand of
Transformer Engine is read from the operand. The emulation multiplies FP32 or BF16 values, so it
states the kinds of its operands (`watched`). The values of operands are not read: the parity check
compares products with exact products (pretrain/observe/product_check.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.overrides import overridden
from pretrain.precision.observed import FP8_FORMATS, ActiveObserver, dtype_name, fp8_format

_aten = torch.ops.aten
# Operations of torch that multiply.
_PRODUCTS = (
    _aten.mm,
    _aten.bmm,
    _aten.linear,
    _aten.matmul,
    _aten._grouped_mm,
    _aten._int_mm,
    _aten._scaled_mm,
    _aten._scaled_mm_v2,
    _aten._scaled_grouped_mm,
)
# Operations that add a product to their first argument, which may be an FP32 sum.
_SUMS = (_aten.addmm, _aten.addmm_, _aten.baddbmm)
# Map operations to the positions of the two factors in their arguments.
FACTORS = dict.fromkeys(_PRODUCTS, slice(0, 2)) | dict.fromkeys(_SUMS, slice(1, 3))
# Operations whose third and fourth argument are the scales of the factors.
SCALED = {_aten._scaled_mm, _aten._scaled_grouped_mm}
# Map the transposition of the two operands of Transformer Engine's GEMM to the kind of product.
TE_LAYOUTS = {(True, False): "forward", (False, False): "dgrad", (False, True): "wgrad"}


class ObservedProduct(NamedTuple):
    """A product of a linear.

    gemm: "forward", "dgrad" or "wgrad".
    left, right: the kinds of the operands, such as "e4m3 in blocks of 128" or "bfloat16".
    engine: the library or the operation that multiplied, such as "emulation" or "aten.mm".
    """

    gemm: str
    left: str
    right: str
    engine: str


class _Block(NamedTuple):
    """A `watched` block that is running, with the arguments of `watched`."""

    names: Sequence[str]
    gemm: str
    emulated: Sequence[str] | None
    swapped: bool


class ProductObserver:
    """Record the products of each linear.

    `products` maps the name of each linear to its products, in the order of execution. The
    forward product of a recomputed layer appears twice. Nothing is observed until `observing` is
    entered.
    """

    def __init__(self) -> None:
        self.products: dict[str, list[ObservedProduct]] = {}
        # The `watched` blocks that are running, the innermost one last. Blocks are nested if a
        # layer is recomputed inside the backward of another product.
        self._running: list[_Block] = []

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe all products inside `watched` blocks during the caller's `with` statement.

        Products of torch, Transformer Engine and cublasLt are observed.
        """
        extension: Any = sys.modules.get("transformer_engine_torch")
        multiply: Any = getattr(extension, "generic_gemm", None)

        def gemm(
            a: Any, transposes_a: bool, b: Any, transposes_b: bool, *rest: Any, **options: Any
        ) -> Any:
            # cuBLAS stores matrices by columns, so Transformer Engine swaps the two operands.
            layout = TE_LAYOUTS.get((transposes_a, transposes_b))
            self.record(b, a, engine="Transformer Engine", gemm=layout)
            return multiply(a, transposes_a, b, transposes_b, *rest, **options)

        with ExitStack() as overrides:
            overrides.enter_context(overridden(ActiveObserver, current=self))
            if extension is not None:
                overrides.enter_context(overridden(extension, generic_gemm=gemm))
            yield

    @contextmanager
    def watching(
        self,
        names: Sequence[str],
        gemm: str,
        emulated: Sequence[str] | None,
        *,
        swapped: bool,
    ) -> Iterator[None]:
        """Return a context manager that observes the products of its `with` block.

        The arguments are the same as for `watched`.

        The returned context manager can also decorate a function. Products of torch are observed
        only during the `with` body, because a dispatch mode around a whole step would prevent
        torch.compile from compiling the step.
        """
        self._running.append(_Block(names, gemm, emulated, swapped))
        try:
            with TorchProducts(self):
                yield
        finally:
            self._running.pop()

    def record(
        self,
        *operands: Any,
        scales: Sequence[Tensor | None] = (None, None),
        engine: str = "cublasLt",
        gemm: str | None = None,
    ) -> None:
        """Record a product, if it runs inside a `watched` block.

        operands: both factors, as tensors that the kernel receives, or as quantized tensors of
            Transformer Engine.
        scales: the scales of both operands, if the kernel receives them as separate tensors. They
            and `gemm`, the kind of product, are for products outside of a `watched` block.
        engine: the library or the operation that multiplies.
        """
        if not self._running:
            return
        block = self._running[-1]
        left, right = map(operand_kind, operands)
        if block.swapped:
            left, right = right, left
        if block.emulated:
            left, right = block.emulated
            engine = "emulation"
        product = ObservedProduct(block.gemm, left, right, engine)
        for name in block.names:
            self.products.setdefault(name, []).append(product)

    def follow_values(self, operation: Any, result: Any, source: Any = None) -> None:
        """Do nothing. An observer may follow the values of tensors through all operations.

        operation: the operation of torch, without its overload.
        result: the result of the operation: a tensor, or a structure of tensors.
        source: the first argument of the operation.
        """


class TorchProducts(TorchDispatchMode):
    """Dispatch mode that passes each operation of torch to a ProductObserver."""

    supports_higher_order_operators = True

    def __init__(self, observer: ProductObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch. If it is a product, record it first.

        A subclass of Tensor, such as the FP8 tensor of torchao, computes the operation by other
        operations, which are observed instead.
        """
        if set(types) - {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented
        operation = getattr(function, "overloadpacket", None)
        if operation in FACTORS:
            factors = args[FACTORS[operation]]
            scales = _scales_in(operation, args)
            self._observer.record(*factors, scales=scales, engine=str(operation))
        result = function(*args, **(kwargs or {}))
        self._observer.follow_values(operation, result, *args[:1])
        return result


def _scales_in(operation: Any, args: tuple[Any, ...]) -> Sequence[Tensor | None]:
    """Return the scales of both factors in the arguments of a product, or two times None."""
    if operation is _aten._scaled_mm_v2:
        # Each factor has a list of scales, in the third and the sixth argument. The first scale of
        # a list is that of the values.
        return args[2][0], args[5][0]
    return args[2:4] if operation in SCALED else (None, None)


def operand_kind(operand: Any, scale: Tensor | None = None) -> str:
    """Return the number format and scaling of an operand, such as "e4m3 tensor-scaled".

    For an unquantized tensor, return the name of its dtype. `scale` has the scales of one of
    torch's FP8 tensors. Without `scale`, the tensor is an operand of a grouped product of ours, in
    which all rows have the scale of the tensor.
    """
    te: Any = sys.modules.get("transformer_engine.pytorch")
    if te is not None and isinstance(operand, te.QuantizedTensorStorage):
        return _kind_in_te(te, operand)
    grid = dict(FP8_FORMATS.values()).get(operand.dtype)
    if grid is None:
        return dtype_name(operand.dtype)
    scales = 1 if scale is None else scale.numel()
    values_per_scale = operand.numel() // scales
    if values_per_scale == operand.numel():
        scaling = "tensor-scaled"
    # One scale for each row, or for each column of a transposed operand.
    elif values_per_scale in operand.shape:
        scaling = "row-scaled"
    else:
        scaling = f"in blocks of {values_per_scale}"
    return f"{grid.name.lower()} {scaling}"


def _kind_in_te(te: Any, operand: Any) -> str:
    """Return the kind of a quantized tensor of Transformer Engine."""
    if isinstance(operand, te.NVFP4TensorStorage):
        return "e2m1 in blocks of 16"
    _, grid = fp8_format(te, operand.get_metadata()["fp8_dtype"])
    scaling = "tensor-scaled"
    if isinstance(operand, te.MXFP8TensorStorage):
        scaling = "in blocks of 32"
    elif isinstance(operand, te.Float8BlockwiseQTensorStorage):
        scaling = "in blocks of 128"
    return f"{grid.name.lower()} {scaling}"
