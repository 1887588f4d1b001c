"""What the matrix products of a model really multiplied, seen from underneath: the operands as they reach the kernel.

A module may carry the right name and multiply in BF16 all the same, so nothing here asks a module anything. Every product of
te.Linear goes through one function of Transformer Engine, and the classes and dtypes of what arrives there are what the tensor
cores get. An emulated operand is known by the few significant bits of its values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

BITS = {"bfloat16": 8, "float32": 24}  # significant bits of a dtype's values, the leading one included

# The memory layout names the product: forward x w^T, gradient of the input g w, gradient of the weight g^T x.
_GEMMS = {"TN": "forward", "NN": "dgrad", "NT": "wgrad"}

# (names of the linears, gemm, left operand, right operand, what an operand is called): see PrecisionContext.note.
Note = Callable[[Sequence[str], str, Any, Any, Callable[[Any], str]], None]


class ObservedProduct(NamedTuple):
    """One product of a linear: `gemm` is forward, dgrad or wgrad; `left` and `right` say what its operands were."""

    gemm: str
    left: str
    right: str


def significant_bits(tensor: Tensor) -> int:
    """The most significant bits, from a value's first one-bit to its last, that any finite value of `tensor` has: 8 of BF16
    numbers, 4 of E4M3 numbers times powers of two. Waits for the device."""
    mantissa = tensor.float().nan_to_num(0, 0, 0).view(torch.int32) & 0x7FFFFF
    for bits in range(1, 24):
        if not (mantissa & ((1 << (24 - bits)) - 1)).any():
            return bits
    return 24


class GemmObserver:
    """Notes the GEMMs of each te.Linear product in the order they run; a recomputed forward is noted twice.

    In forward a GEMM belongs to the product that is being called, in backward to the one whose node the autograd engine runs.
    Recomputation nests forwards in such a node, hence a stack.
    """

    def __init__(self, te: ModuleType, note: Note) -> None:
        self._te, self._note = te, note
        self._running: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, every GEMM of te.Linear is seen."""
        module = importlib.import_module("transformer_engine.pytorch.module.linear")
        multiply = module.general_gemm

        def observed(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running:  # cuBLAS counts columns first, so TE names the operands the other way round: the weight first
                gemm = _GEMMS[kwargs.get("layout", "TN")]
                self._note(self._running[-1:], gemm, right, left, partial(operand_kind, self._te))
            return multiply(left, right, *args, **kwargs)

        module.general_gemm = observed
        try:
            yield
        finally:
            module.general_gemm = multiply

    @contextmanager
    def forward_of(self, name: str) -> Iterator[None]:
        """Around the call of a product."""
        self._running.append(name)
        try:
            yield
        finally:
            self._running.pop()

    def watch_backward(self, name: str, output: Tensor) -> None:
        """Attribute to `name` what the node that made `output` multiplies in backward."""
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _: self._running.append(name))
            # None, as what a hook returns would replace the gradients.
            output.grad_fn.register_hook(lambda *_: self._running.pop() and None)


def operand_kind(te: ModuleType, operand: Any) -> str:
    """The number format and the scaling of a GEMM's operand, such as "e4m3 tensor-scaled"; of an unquantized tensor its dtype."""
    if isinstance(operand, te.Float8TensorStorage):
        return f"{_format(te, operand._fp8_dtype)} tensor-scaled"
    if isinstance(operand, te.Float8BlockwiseQTensorStorage):
        return f"{_format(te, operand._fp8_dtype)} {'128x128' if operand._is_2D_scaled else '1x128'} blocks"
    if isinstance(operand, te.MXFP8TensorStorage):
        return f"mxfp8 {_format(te, operand._fp8_dtype)}"
    if isinstance(operand, te.NVFP4TensorStorage):
        return "nvfp4 e2m1"
    return dtype_name(operand.dtype) if isinstance(operand, torch.Tensor) else type(operand).__name__


def _format(te: ModuleType, dtype: Any) -> str:
    """kFloat8E4M3 -> e4m3."""
    return te.DType.cast(dtype).name[-4:].lower()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
