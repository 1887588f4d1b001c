"""Every low-precision product of a microbatch, beside the product that it stands for and one of operands that we quantize.

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
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.attributes import holding
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.delayed_state import PLACES, of_operand
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.observed import OPERANDS
from pretrain.precision.product import PrecisionContext, Product
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

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
    """Looks at the products of one microbatch of `packed`: `watching` around it, `products` after it."""

    def __init__(self, packed: PackedLanguageModel, active: ActivePrecision) -> None:
        self._context, self._precision, self._settings = packed.context, active.precision, active.settings
        self._before = {name: tensor.clone() for name, tensor in packed.context.state().items()}
        self._rows: dict[tuple[str, Role], Tensor] = {}
        self._samples: dict[tuple[str, Role, Along], _Sample] = {}
        self._figures: dict[tuple[str, str], Tensor] = {}
        # What is laid out with the axis of the sum last is quantized alike for every product.
        self._quantize = {role: active.precision.along_features(active.settings, role) for role in get_args(Role)}
        head = packed.hf.get_output_embeddings().low_now
        self._head = head.name if head else None  # whose product is called for a chunk of tokens at a time

    @contextmanager
    def watching(self) -> Iterator[None]:
        observers, result_observers = self._context.observers, self._context.result_observers
        with holding(
            self._context, observers=[*observers, self._see_operand], result_observers=[*result_observers, self._see_result]
        ):
            yield
        self._samples.clear()

    def _is_seen(self, name: str, key: tuple[str, ...], seen: dict) -> bool:
        """Whether it belongs to a layer that is recomputed; of the head the last tokens stay, as documents at an end are
        compared."""
        return name != self._head and key in seen

    @torch.no_grad()
    def _see_operand(self, name: str, role: Role, tensor: Tensor, _: Product) -> None:
        if self._is_seen(name, (name, role, "features"), self._samples):
            return
        amax = tensor.abs().amax().float()
        rows, columns = (_sampled(name, size) for size in tensor.shape)
        if role != "weight":
            rows = self._rows[name, role] = _tokens(tensor)
        # Copies: a view would keep the whole operand.
        of_rows, of_columns = tensor[rows].clone(), tensor[:, columns].clone().t()
        self._samples[name, role, "features"] = _Sample(of_rows, of_rows, amax)
        transformed, transform = of_columns, self._precision.transform(self._settings, role)
        if transform is not None:
            transformed = transform(of_columns)
            if self._precision.tensor_scaled:
                amax = transform(tensor.t()).abs().amax().float()
        self._samples[name, role, "rows"] = _Sample(of_columns, transformed, amax)

    @torch.no_grad()
    def _see_result(self, name: str, gemm: str, result: Tensor, bias: Tensor | None) -> None:
        roles = OPERANDS[gemm]
        samples = [self._samples.get((name, role, along)) for role, along in zip(roles, _ALONG[gemm], strict=True)]
        if None in samples or self._is_seen(name, (name, gemm), self._figures):
            return
        rows = _sampled(name, len(result)) if gemm == "wgrad" else self._rows[name, roles[0]]
        columns = _sampled(name, result.shape[1])
        measured = result[rows][:, columns].float()
        added = torch.zeros((), device=result.device) if bias is None else bias.float()[columns]
        by_chance = self._settings.disable_stochastic_rounding is False and "grad_output" in roles
        with holding(torch.backends.cuda.matmul, fp32_precision="ieee"):
            left, right = (sample.values.float() for sample in samples)
            exact = left @ right.t()
            errors = [measured - added - exact]
            for _ in range(DRAWS if by_chance else 1):
                left, right = (self._quantized(name, *each) for each in zip(roles, samples, strict=True))
                plain = (left @ right.t() + added).to(result.dtype).float() - added
                errors.append(plain - exact)
        vectors = torch.stack([exact, *errors]).flatten(1).double()
        self._figures[name, gemm] = vectors @ vectors.t()

    def _quantized(self, name: str, role: Role, sample: _Sample) -> Tensor:
        scale = of_operand(self._before, name, role, "scale") if self._precision.keeps_history else None
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


# ── Delayed scaling's histories ────────────────────────────────────────────────────────────────────────────────────────────────

NOTED = 2.0**-6  # relative: an amax may be that of a norm's output before it is rounded to BF16
OF_THE_RULE = 2.0**-20  # relative: a scale divides by what the library may multiply by


@contextmanager
def watching_histories(context: PrecisionContext, active: ActivePrecision) -> Iterator[list[str]]:
    """Watches one microbatch, and fills the list that it yields as it is left: with the operands whose history did not move on by
    one entry, the largest value of all ranks, or whose scale is not what the rule makes of its history. Of zeros it must stay as
    it was. Empty where scales come from the tensors themselves. Collective."""
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    amaxes: dict[Role, dict[str, Tensor]] = {role: {} for role in PLACES}
    wrong: list[str] = []

    def see(name: str, role: Role, operand: Tensor, _: Product) -> None:
        amax = operand.abs().amax().float()
        amaxes[role][name] = torch.maximum(amax, amaxes[role].get(name, amax))

    with holding(context, observers=[*context.observers, *([see] if before else [])]):
        yield wrong
    for role, of_role in amaxes.items():
        if names := sorted(of_role):
            amax = torch.stack([of_role[name] for name in names])
            are_wrong = _wrong_histories(names, role, amax, before, context.state(), active)
            wrong += [f"{name} ({role})" for name, is_wrong in zip(names, are_wrong.tolist(), strict=True) if is_wrong]


def _wrong_histories(
    names: list[str],
    role: Role,
    amax: Tensor,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    active: ActivePrecision,
) -> Tensor:
    """A bool for each of `names`, whose operands in `role` have these FP32 amaxes on this rank."""
    if dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    (old_history, old_scale), (history, scale) = (
        [torch.stack([of_operand(state, name, role, key) for name in names], -1) for key in ("amax_history", "scale")]
        for state in (before, after)
    )
    settings = active.settings
    rule = (active.precision.grid(settings, role).maximum, settings.margin, settings.amax_compute_algo)
    right_history, right_scale = update_scale(torch.cat([history[-1:], old_history[1:]]), old_scale, *rule)
    moved = (history == right_history).all(0) & torch.isclose(history[-1], amax, rtol=NOTED, atol=0)
    moved &= torch.isclose(scale, right_scale, rtol=OF_THE_RULE, atol=0)
    stayed = (history == old_history).all(0) & (scale == old_scale)
    # An overflow is left to the health check (a NaN is no amax). Of a history of one microbatch nothing is left to look at.
    judged = history.isfinite().all(0) & amax.isfinite() & (len(history) > 1)
    never_moved = history[0] != 0
    return (judged & ~torch.where(amax > 0, moved, stayed)) | never_moved
