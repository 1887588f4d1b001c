"""Show matrix products to an observer where they are computed.

A module may have the name of a low-precision linear and still multiply in BF16. So the code that
multiplies announces the product (`watched`), and the observer looks at the operands of the kernels
that run inside. `see` shows products of libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers import E4M3, E5M2, Grid

# The left and the right operand of a linear's products: x w^T, g w and g^T x.
OPERANDS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
# The axis that the sum of each product runs along, in its left and in its right operand.
ALONG: dict[str, tuple[Along, Along]] = {
    "forward": ("features", "features"),
    "dgrad": ("features", "rows"),
    "wgrad": ("rows", "rows"),
}
# The FP8 types by Transformer Engine's names.
FP8_FORMATS = {
    "kFloat8E4M3": (torch.float8_e4m3fn, E4M3),
    "kFloat8E5M2": (torch.float8_e5m2, E5M2),
}
# A context without effect. It may be entered any number of times.
NO_CONTEXT = nullcontext()
# The scales of an emulated operand: of its blocks, and of the tensor.
Scales = tuple[Tensor | None, Tensor | None]


class ProductWatcher:
    """Base class of an observer of products. `current` is the one that observes now, or None."""

    current: ClassVar[ProductWatcher | None] = None

    def during(
        self, names: Sequence[str], gemm: str, scales: Sequence[Scales] | None = None
    ) -> AbstractContextManager[None]:
        """Observe the products of torch inside the block. See `watched` for the arguments."""
        raise NotImplementedError

    def library_product(self, *operands: tuple[Any, bool]) -> None:
        """Observe a product of a library: two operands, each with whether it is read by rows."""
        raise NotImplementedError


def watched(
    names: Sequence[str], gemm: str, scales: Sequence[Scales] | None = None
) -> AbstractContextManager[None]:
    """Announce that products inside the block are `gemm` of the linears `names`.

    scales: of the operands of an emulated product.
    """
    watcher = ProductWatcher.current
    return NO_CONTEXT if watcher is None else watcher.during(names, gemm, scales)


def see(left: Any, right: Any, layout: str) -> None:
    """Show a library's product. Operands and layout are named as in `searched.multiply`."""
    watcher = ProductWatcher.current
    if watcher is not None:
        # cuBLAS stores columns first, so libraries name the operands the other way round.
        watcher.library_product((right, layout[1] == "N"), (left, layout[0] == "T"))


def fp8_format(te: ModuleType, dtype: Any) -> tuple[torch.dtype, Grid]:
    """Return torch's dtype and our grid of one of Transformer Engine's FP8 types."""
    return FP8_FORMATS[te.DType.cast(dtype).name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
