"""Pass matrix products to an observer at the place where they are computed.

A module may have the name of a low-precision linear layer and still multiply in BF16. So the
observer does not rely on the modules of a model. The code that multiplies encloses the product in
the context `watched`, whose arguments state the layer and the kind of product. The observer reads
the operands of the torch kernels that run inside the context, and replaces Transformer Engine's
GEMM by a function that passes the operands on. `cublaslt.multiply` passes the operands of its own
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch

from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers import E4M3, E5M2, Grid

# Map each product of a linear layer to the roles of its left and its right operand. With g for
# grad_output, the gradient of the output, the products are x w^T, g w and g^T x.
OPERANDS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
# Map each product to the axes along which it sums: the axis of its left operand and the axis of its
# right operand.
ALONG: dict[str, tuple[Along, Along]] = {
    "forward": ("features", "features"),
    "dgrad": ("features", "rows"),
    "wgrad": ("rows", "rows"),
}
# Map Transformer Engine's names of the FP8 types to torch's dtypes and to our grids.
FP8_FORMATS = {
    "kFloat8E4M3": (torch.float8_e4m3fn, E4M3),
    "kFloat8E5M2": (torch.float8_e5m2, E5M2),
}
# A context without effect. It may be entered repeatedly.
NO_CONTEXT = nullcontext()


class ActiveObserver:
    """Holder of the active observer of products."""

    # A ProductObserver (pretrain/observe/product_observer.py), or None.
    current: ClassVar[Any] = None


def watched(
    names: Sequence[str],
    gemm: str,
    emulated: Sequence[str] | None = None,
    *,
    swapped: bool = False,
) -> AbstractContextManager[None]:
    """Return a context that lets the active observer observe all products.

    The context has no effect if no observer is active.

    names: the names of the linear layers that the products belong to.
    gemm: the kind of product: forward, dgrad or wgrad.
    emulated: the kinds of the left and of the right operand of an emulated product, such as
        "e4m3 in blocks of 128". The tensors that the kernel receives do not show these kinds.
    swapped: True if a library computes the transpose of the product, with swapped operands.
    """
    observer = ActiveObserver.current
    if observer is None:
        return NO_CONTEXT
    return observer.watching(names, gemm, emulated, swapped=swapped)


def fp8_format(te: ModuleType, dtype: Any) -> tuple[torch.dtype, Grid]:
    """Return the torch dtype and the grid for an FP8 type of Transformer Engine (`te.DType`)."""
    return FP8_FORMATS[te.DType.cast(dtype).name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
