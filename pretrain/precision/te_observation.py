"""What Transformer Engine's matrix products really multiplied: the operands as they are handed to its GEMM, by product.

A module in FP8 mode may still multiply in BF16, and a flag that says FP8 proves nothing. Every product of te.Linear goes through
one function, and the classes and dtypes of what arrives there are what the tensor cores get.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pretrain.precision.observation import dtype_name
from pretrain.precision.product import ObservedProduct

# The memory layout names the product: forward x w^T, gradient of the input g w, gradient of the weight g^T x.
_GEMMS = {"TN": "forward", "NN": "dgrad", "NT": "wgrad"}


class GemmObserver:
    """Collects in `seen`, for each product by name, its GEMMs in the order they ran; a recomputed forward is there twice.

    Which product a GEMM belongs to, the kernel's arguments do not say. In forward it is the product that is being called; in
    backward the one whose node the autograd engine runs. Recomputation nests forwards in such a node, hence a stack.
    """

    def __init__(self, te: ModuleType) -> None:
        self.seen: dict[str, list[ObservedProduct]] = {}
        self._te = te
        self._running: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, every GEMM of te.Linear is seen."""
        module = importlib.import_module("transformer_engine.pytorch.module.linear")
        multiply = module.general_gemm

        def observed(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
            self._record(kwargs.get("layout", "TN"), left, right)
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
            output.grad_fn.register_hook(lambda *_: self._end())

    def _end(self) -> None:  # returns nothing: what a hook returns would replace the gradients
        self._running.pop()

    def _record(self, layout: str, left: Any, right: Any) -> None:
        # cuBLAS counts columns first, so Transformer Engine names the operands the other way round: the weight before the input.
        if self._running:
            seen = ObservedProduct(_GEMMS[layout], operand_kind(self._te, right), operand_kind(self._te, left))
            self.seen.setdefault(self._running[-1], []).append(seen)


def operand_kind(te: ModuleType, operand: Any) -> str:
    """The number format and the scaling of a GEMM's operand, such as "e4m3 tensor-scaled"; of a plain tensor its dtype."""
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
