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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple, get_args

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


class _Sample(NamedTuple):
    """Rows of an operand, with the axis of the product's sum last."""

    values: Tensor
    to_quantize: Tensor  # the same, transformed where the precision transforms them first
    amax: Tensor  # FP32, of the whole operand


class ProductProbe:
    """Looks at the products of one quantized pass of `packed`: `watching` around the pass, `products` after it."""

    def __init__(self, packed: PackedLanguageModel, active: ActivePrecision) -> None:
        self._packed, self._context, self.active = packed, packed.context, active
        self._before = {name: tensor.clone() for name, tensor in packed.context.state().items()}
        self._rows: dict[tuple[str, Role], Tensor] = {}
        self._samples: dict[tuple[str, Role, Along], _Sample] = {}
        self._figures: dict[tuple[str, str], Tensor] = {}
        self._history: HistoryWatch | None = None  # of the microbatch under way
        self.wrong_histories: list[str] = []  # operands whose history or scale is not what the pass makes of it
        self._microbatch = -1
        # What is laid out with the axis of the sum last is quantized alike for every product.
        self._quantize = {role: active.precision.along_features(active.settings, role) for role in get_args(Role)}
        self._rounds_by_chance = active.settings.disable_stochastic_rounding is False
        head = packed.hf.get_output_embeddings().low_now
        self._head = head.name if head else None  # whose product is called for a chunk of tokens at a time

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collective at its end, where histories are watched."""
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
        self.wrong_histories += self._history.wrong() if self._history else []

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
        of_rows, of_columns = tensor[rows].clone(), tensor[:, columns].clone().t()
        self._samples[name, role, "features"] = _Sample(of_rows, of_rows, amax)
        transformed, transform = of_columns, self.active.precision.transform(self.active.settings, role)
        if transform is not None:
            transformed = transform(of_columns)
            if self.active.precision.tensor_scaled:
                amax = transform(tensor.t()).abs().amax().float()
        self._samples[name, role, "rows"] = _Sample(of_columns, transformed, amax)

    @torch.no_grad()
    def see_result(self, name: str, gemm: str, result: Tensor, bias: Tensor | None) -> None:
        if self._microbatch > 0 or (name != self._head and (name, gemm) in self._figures):
            return
        roles = OPERANDS[gemm]
        samples = [self._samples.get((name, role, along)) for role, along in zip(roles, _ALONG[gemm], strict=True)]
        if None in samples:
            return
        rows = _sampled(name, len(result)) if gemm == "wgrad" else self._rows[name, roles[0]]
        columns = _sampled(name, result.shape[1])
        measured = result[rows][:, columns].float()
        added = torch.zeros((), device=result.device) if bias is None else bias.float()[columns]
        with holding(torch.backends.cuda.matmul, fp32_precision="ieee"):
            left, right = (sample.values.float() for sample in samples)
            exact = left @ right.t()
            errors = []
            for _ in range(DRAWS if self._rounds_by_chance and "grad_output" in roles else 1):
                left, right = (self._quantized(name, *each) for each in zip(roles, samples, strict=True))
                plain = (left @ right.t() + added).to(result.dtype).float() - added
                errors.append(plain - exact)
        error = measured - added - exact
        vectors = torch.stack([exact, error, *errors]).flatten(1).double()
        self._figures[name, gemm] = vectors @ vectors.t()

    def _quantized(self, name: str, role: Role, sample: _Sample) -> Tensor:
        scale = of_operand(self._before, name, role, "scale") if self.active.precision.keeps_history else None
        return self._quantize[role](sample.to_quantize, scale, sample.amax).dequantize()

    def products(self) -> list[ProductParity]:
        """Every result that was seen, the worst first. Those whose product is nothing but zeros are left out."""
        products = []
        for (name, gemm), figures in self._figures.items():
            figures = figures.cpu()
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
