"""Forward products in BF16 and gradients in low precision: what a phase with `forward: bf16` computes.

Loss and activations are then those of the BF16 model, while two of three products are as fast as before. At the end of a training
that takes back most of what NVFP4 has cost (arXiv:2509.25149, appendix D).

A phase in the same precision without it shares quantizers, histories and quantized weights: its backend is inside of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.precision.formats.definition import Role
from pretrain.precision.grouped import PlainGroupedProduct
from pretrain.precision.product import Backend, Gemm, Operand, PlainProduct, Product, Saved


@dataclass(eq=False)
class TwoForms:
    """An operand in two forms. `plain` is unquantized, [rows, features], for the forward product; of a weight it is the function
    that gives it, and None once the forward has used it. `low` is quantized, for the products of backward; None without one."""

    plain: Tensor | Callable[[], Tensor] | None
    low: Operand | None


class PlainForwardProduct:
    """A `Product` that is `low`, a quantized one, but for its forward product, which takes operands as they are."""

    supports_fused_loss = False
    __call__ = Product.__call__

    def __init__(self, low: Product, plain: Product) -> None:
        self.low, self._plain = low, plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.low, name)

    def __setattr__(self, name: str, value: Any) -> None:
        for product in (self.low, self._plain) if name in ("members", "ends") else (self,):
            object.__setattr__(product, name, value)

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> Operand:
        """Of an input both forms: histories of delayed scaling see it in forward, as ever."""
        if role != "input":
            return self.low.operand(role, x, both=both)
        return TwoForms(self._plain.operand(role, x), self.low.operand(role, x) if both else None)

    def quantizer(self, role: Role, *, both: bool) -> Any | None:
        return None if role == "input" else self.low.quantizer(role, both=both)

    def weight_operand(
        self, matrix: Callable[[], Tensor], *, refresh: bool, differentiable: bool
    ) -> TwoForms:
        low = (
            self.low.weight_operand(matrix, refresh=refresh, differentiable=True)
            if differentiable
            else None
        )
        return TwoForms(matrix, low)

    def multiply(
        self, gemm: Gemm, left: Operand, right: Operand, dtype: torch.dtype, *added: Tensor | None
    ) -> Tensor:
        if gemm != "forward":
            return self.low.multiply(gemm, left, right.low if gemm == "dgrad" else right, dtype)
        matrix, right.plain = right.plain(), None
        return self._plain.multiply(gemm, left.plain, matrix, dtype, *added)

    def codes(self, operand: Operand) -> Tensor:
        """Those of a gradient's product: the forward has no copy that could be old."""
        return self.low.codes(operand.low if isinstance(operand, TwoForms) else operand)

    def save(self, operand: TwoForms) -> Saved:
        return self.low.save(operand.low)


class PlainForwardBackend:
    """A `Backend` whose products are those of another one, but for their forward."""

    def __init__(self, low: Backend) -> None:
        self._low = low

    def product(
        self, name: str, *sizes: int, bias: bool, grouped: bool = False
    ) -> PlainForwardProduct:
        # of the phase without it
        there = (each for each in self._low.products if each.name == name)
        low = next(there, None) or self._low.product(name, *sizes, bias=bias, grouped=grouped)
        return PlainForwardProduct(low, (PlainGroupedProduct if grouped else PlainProduct)(name))

    def __getattr__(self, name: str) -> Any:
        """Forwards, recomputation and the state are the other one's."""
        return getattr(self._low, name)
