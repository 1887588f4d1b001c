"""Every low-precision product of a pass, beside the product that it stands for and one of operands that we quantize.

A product is seen with its operands as they were before they were quantized, and with its result. A sample of the result, some
rows times some columns, is computed twice more: from the operands as they are, and from what the precision's own quantizer,
which tests hold to other implementations bit for bit, makes of them.

* How far the run's result is from the first, and how far the second is: these two errors must be alike in size. Truncation, a
  mantissa bit less, a neighbour's scale, rows that are not those of the other operand, a transform on one side, an old copy of a
  weight: all make the error larger. Another format with more bits, or none, makes it smaller.
* Both errors must point the same way too, since rounding the same values twice errs alike. So scales that are not this format's
  are found even where they cost nothing. Where rounding is stochastic, several draws say how large the errors are, and how alike.

Under delayed scaling the amaxes that were seen must be where the histories keep them, and the next scales must follow from them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from foundation.attributes import holding
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.observed import OPERANDS
from pretrain.precision.product import Product
from pretrain.precision.settings import ActivePrecision
from pretrain.verify.histories import HistoryWatch

ROWS = 128  # of a result that is sampled, and as many columns: a multiple of every format's block
DRAWS = 3  # of stochastic rounding
LEEWAY = 1.2  # of an error's size, beyond what the draws span: a mantissa bit, or truncation, is 1.4 at least
ORDER_OF_SUMS = 2.0**-10  # of the result's norm: sums of BF16 results come in another order than ours
LEAST_LIKENESS = 0.5  # of two errors' directions: of the same scales 0.8 or more, of other ones near zero
KNOWN_LIKENESS = 0.1  # of the draws of stochastic rounding among themselves, from which on it says something

Key = TypeVar("Key")

# The axis that each product's sum runs along, seen from its left and its right operand.
_ALONG: dict[str, tuple[Along, Along]] = {
    "forward": ("features", "features"),
    "dgrad": ("features", "rows"),
    "wgrad": ("rows", "rows"),
}


@dataclass(frozen=True)
class ProductParity:
    """One result; errors are norms relative to that of the unquantized product."""

    name: str
    gemm: str
    error: float
    least: float  # of the plain quantizer's errors
    most: float
    likeness: float | None  # cosine of the run's error and the plain one, over that of two plain ones; None: too small to tell

    @property
    def excess(self) -> float:
        """How many times over what is tolerated it is; above 1 is a mismatch. Not-a-number is the worst."""
        if self.most == 0:
            return self.error / ORDER_OF_SUMS
        excess = self.error / (LEEWAY * self.most + ORDER_OF_SUMS)
        # Where the sums' order is not small beside the quantization, it hides how alike the two are.
        if self.least > 8 * ORDER_OF_SUMS:
            excess = max(excess, (self.least - ORDER_OF_SUMS) / LEEWAY / self.error if self.error else math.inf)
            if self.likeness is not None:
                excess = max(excess, LEAST_LIKENESS / self.likeness if self.likeness > 0 else math.inf)
        return excess if math.isfinite(excess) else math.inf

    def cells(self) -> tuple[str, str, str, str]:
        alike = "-" if self.likeness is None else f"{self.likeness:.3f}"
        return f"{self.name} {self.gemm}", f"{self.error:.2%}", f"{self.least:.2%} to {self.most:.2%}", alike


class ProductProbe:
    """Looks at the products of one quantized pass of `packed`: `watching` around the pass, `products` after it."""

    def __init__(self, packed: PackedLanguageModel, active: ActivePrecision) -> None:
        self._packed, self._context, self.active = packed, packed.context, active
        self._before = {name: tensor.clone() for name, tensor in packed.context.state().items()}
        self._rows: dict[tuple[str, Role], Tensor] = {}
        self._samples: dict[tuple[str, Role, Along], tuple[Tensor, Tensor]] = {}
        self._figures: dict[tuple[str, str], Tensor] = {}
        self._history: HistoryWatch | None = None  # of the microbatch under way
        self._wrong_histories: list[str] = []
        self._microbatch = -1
        # What is laid out with the axis of the sum last is quantized alike for every product.
        self._quantize = {role: active.precision.along_features(active.settings, role) for role in get_args(Role)}
        self._rounds_by_chance = active.settings.disable_stochastic_rounding is False
        head = packed.hf.get_output_embeddings().low_now
        self._head = head.name if head else None  # whose product is called for a chunk of tokens at a time

    @contextmanager
    def watching(self) -> Iterator[None]:
        context = self._context
        counting = self._packed.register_forward_pre_hook(self._next_microbatch)
        context.observers.append(self.see_operand)
        context.result_observers.append(self.see_result)
        try:
            yield
        finally:
            counting.remove()
            context.observers.remove(self.see_operand)
            context.result_observers.remove(self.see_result)
        self._end_microbatch()
        self._samples.clear()

    def _next_microbatch(self, *_: Any) -> None:
        self._end_microbatch()
        self._microbatch += 1
        self._history = HistoryWatch(self._context, self.active) if self.active.precision.keeps_history else None

    def _end_microbatch(self) -> None:
        self._wrong_histories += self._history.wrong() if self._history else []

    @torch.no_grad()
    def see_operand(self, name: str, role: Role, tensor: Tensor, product: Product) -> None:
        if self._history and (role != "weight" or self._microbatch == 0):  # which is quantized once a step
            self._history.see(name, role, tensor, product)
        amax = tensor.abs().amax().float()
        if self._microbatch > 0 or (name != self._head and (name, role, "features") in self._samples):
            return  # a layer that is recomputed; of the head the last tokens stay, since the documents at an end are compared
        rows, columns = (_sampled(name, size) for size in tensor.shape)
        if role != "weight":
            rows = self._rows[name, role] = _tokens(tensor)
        # Copies: a view would keep the whole operand.
        self._samples[name, role, "features"] = tensor[rows].clone(), amax
        part = tensor[:, columns].clone()
        along_rows, transform = part.t(), self.active.precision.transform(self.active.settings, role)
        if transform is not None:
            along_rows = transform(along_rows)
            if self.active.precision.tensor_scaled:
                amax = transform(tensor.t()).abs().amax().float()
        self._samples[name, role, "rows"] = along_rows, amax
        if role != "weight":
            self._samples[name, role, "as it is"] = part.t(), amax

    @torch.no_grad()
    def see_result(self, name: str, gemm: str, result: Tensor, bias: Tensor | None) -> None:
        if self._microbatch > 0 or (name != self._head and (name, gemm) in self._figures):
            return
        (left_role, right_role), (left_along, right_along) = OPERANDS[gemm], _ALONG[gemm]
        left, right = self._samples.get((name, left_role, left_along)), self._samples.get((name, right_role, right_along))
        if left is None or right is None:
            return
        rows = _sampled(name, len(result)) if gemm == "wgrad" else self._rows[name, left_role]
        columns = _sampled(name, result.shape[1])
        measured = result[rows][:, columns].float()
        added = torch.zeros((), device=result.device) if bias is None else bias.float()[columns]
        with holding(torch.backends.cuda.matmul, fp32_precision="ieee"):
            if gemm == "wgrad":
                left_as_it_is, right_as_it_is = (self._samples[name, role, "as it is"][0] for role in (left_role, right_role))
            else:
                left_as_it_is, right_as_it_is = left[0], right[0]
            exact = left_as_it_is.float() @ right_as_it_is.float().t()
            errors = []
            for _ in range(DRAWS if self._rounds_by_chance and "grad_output" in (left_role, right_role) else 1):
                operands = [
                    self._quantize[role](rows_of, self._scale(name, role), amax).dequantize()
                    for role, (rows_of, amax) in ((left_role, left), (right_role, right))
                ]
                plain = (operands[0] @ operands[1].t() + added).to(result.dtype).float() - added
                errors.append(plain - exact)
        error = measured - added - exact
        vectors = torch.stack([exact, error, *errors]).flatten(1).double()
        self._figures[name, gemm] = vectors @ vectors.t()

    def _scale(self, name: str, role: Role) -> Tensor | None:
        if not self.active.precision.keeps_history:
            return None
        return of_operand(self._before, name, role, "scale")

    def products(self) -> list[ProductParity]:
        """Every result that was seen, the worst first. Those whose product is nothing but zeros are left out."""
        products = []
        for (name, gemm), figures in _on_cpu(self._figures).items():
            exact, error, *plain = figures.diagonal().clamp(min=0).sqrt().tolist()
            if exact == 0 and error == 0:
                continue
            norms = figures.diagonal().clamp(min=1e-300).sqrt()
            cosines = (figures / norms / norms[:, None])[1:, 1:].tolist()
            alike, known = mean(cosines[0][1:]), 1.0
            if len(plain) > 1:
                known = mean(cosines[i][j] for i in range(1, len(cosines)) for j in range(1, i))
            likeness = alike / known if known > KNOWN_LIKENESS else None
            exact = exact or math.nan
            products.append(ProductParity(name, gemm, error / exact, min(plain) / exact, max(plain) / exact, likeness))
        return sorted(products, key=lambda each: each.excess, reverse=True)

    def wrong_histories(self) -> list[str]:
        """The operands of delayed scaling whose history or scale is not what the pass has made of it. Collective."""
        return self._wrong_histories


def _on_cpu(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies tensors of one dtype to the CPU at once, so that the device is waited for once."""
    if not tensors:
        return {}
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {key: part.view(tensors[key].shape) for key, part in zip(tensors, parts, strict=True)}


def _tokens(tensor: Tensor) -> Tensor:
    """Indices of some rows, from all over the tensor: those that are not zero first, as gradients of masked labels are."""
    scattered = torch.arange(1, len(tensor) + 1, device=tensor.device) * 2654435761 % 2**31
    order = scattered + (tensor != 0).any(dim=1) * 2**31
    return order.topk(min(ROWS, len(tensor))).indices


def _sampled(name: str, size: int) -> slice:
    """Rows of a matrix of the product `name` that hold whole squares of every format: a block of 128 that the name draws, so that
    the products of a model's layers are looked at in all places, at their ends too."""
    blocks = -(-size // ROWS)
    begin = ROWS * (zlib.crc32(name.encode()) % blocks)
    return slice(begin, min(begin + ROWS, size))
