"""Compare the low-precision products of a microbatch with the exact ones and with our quantizers.

A sample of a product's result, some rows times some columns, is computed twice more: exactly, from
the operands before they were quantized, and from these operands after the precision's own
quantizer. The distance of the run's result from the exact one must be that of the format, in size
and in direction (docs/verification.md). There is also an absolute bound, which follows from the
mantissa bits of the format: a quantizer that is wrong everywhere would otherwise confirm itself.

Under delayed scaling the histories must have the amaxes that were observed, and the next scales
must follow from them.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import mean
from typing import Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from foundation.overrides import overridden
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import Along, QuantizedPrecision, Role
from pretrain.precision.observed import ALONG, OPERANDS
from pretrain.precision.product import PrecisionContext
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

# Rows and columns of a result that are sampled: a multiple of every format's block.
ROWS = 128
DRAWS = 3  # of stochastic rounding
# Tolerance of an error's size beyond that of the draws. One mantissa bit, or truncation, gives 1.4.
LEEWAY = 1.2
# Tolerance of an error's size beyond the format's bound. Healthy errors reach 0.8 of it, and one
# mantissa bit less gives 1.5.
BOUND_LEEWAY = 1.1
# Tolerance relative to the result's norm: BF16 results are summed in another order than ours.
ORDER_OF_SUMS = 2.0**-10
# Cosine of the directions of two errors. The same scales give 0.8 or more, other ones about zero.
LEAST_LIKENESS = 0.5
# Below this cosine among draws of stochastic rounding, the likeness has no meaning.
KNOWN_LIKENESS = 0.1
# Relative tolerance of an amax, which may be that of a norm's output before it is rounded to BF16.
AMAX_TOLERANCE = 2.0**-6
# Relative tolerance of a scale. We divide where the library may multiply by the reciprocal.
SCALE_TOLERANCE = 2.0**-20


@dataclass(frozen=True)
class Compared:
    """The comparison of one gradient, or of one product's result."""

    name: str
    error: float  # norm, relative to that of the reference
    # The error in multiples of the tolerance. Above 1 is a mismatch. NaN counts as infinity.
    excess: float

    @classmethod
    def of(cls, name: str, error: float, excess: float) -> Compared:
        """Return the comparison, with infinity in place of an excess that is not finite."""
        return cls(name, error, excess if math.isfinite(excess) else math.inf)


def judge_product(
    name: str, exact: Tensor, error: Tensor, plain: Sequence[Tensor], bound: float
) -> Compared | None:
    """Compare a product's error with the plain quantizer's. Return None if everything is zero.

    exact: a sample of the unquantized product.
    error: of the run's result.
    plain: errors of the plain quantizer, several if it rounds stochastically.
    bound: the largest norm of the format's error.
    """
    norm = exact.norm(dtype=torch.float64)
    if norm == 0 and not error.any():
        return None
    error, *plain = (values.double().flatten() / norm for values in (error, *plain))
    size = error.norm().item()
    sizes = [values.norm().item() for values in plain]
    allowed = min(LEEWAY * max(sizes), BOUND_LEEWAY * bound / norm.item()) if norm else 0.0
    excess = size / (allowed + ORDER_OF_SUMS)
    # If the order of sums is not small beside the quantization, it hides the likeness of errors.
    if min(sizes) > 8 * ORDER_OF_SUMS:
        too_small = (min(sizes) - ORDER_OF_SUMS) / LEEWAY / size if size else math.inf
        excess = max(excess, too_small)
        cosine = partial(F.cosine_similarity, dim=0, eps=1e-100)
        among_draws = mean([cosine(*pair).item() for pair in combinations(plain, 2)] or [1.0])
        if among_draws > KNOWN_LIKENESS:
            likeness = mean(cosine(error, values).item() for values in plain) / among_draws
            excess = max(excess, LEAST_LIKENESS / likeness if likeness > 0 else math.inf)
    return Compared.of(name, size, excess)


@contextmanager
def watching_products(
    packed: PackedLanguageModel, active: ActivePrecision
) -> Iterator[tuple[list[Compared], list[str]]]:
    """Observe the products of one microbatch. Return the comparisons and the wrong histories.

    Both lists are filled when the block ends. Comparisons are of every product, the worst first.
    `watching_histories` finds the wrong histories. Collective.
    """
    check = _ProductCheck(packed, active)
    context = packed.context
    worst_first: list[Compared] = []
    with watching_histories(context, active) as wrong_histories:
        observers = [*context.observers, check.see_operand]
        with overridden(context, observers=observers, result_observers=[check.see_result]):
            yield worst_first, wrong_histories
    compared = filter(None, check.products.values())
    worst_first += sorted(compared, key=lambda product: product.excess, reverse=True)


class _Sample(NamedTuple):
    """Rows of an operand, with the axis of the product's sum last."""

    values: Tensor
    to_quantize: Tensor  # `values`, transformed if the precision transforms them first
    amax: Tensor  # FP32, of the whole operand


class _ProductCheck:
    """The operands and results of one microbatch."""

    def __init__(self, packed: PackedLanguageModel, active: ActivePrecision) -> None:
        self.products: dict[tuple[str, str], Compared | None] = {}  # by name and gemm
        self._precision = cast(QuantizedPrecision, active.precision)
        self._settings = active.settings
        self._groups = packed.context.groups
        self._before = {name: tensor.clone() for name, tensor in packed.context.state().items()}
        # The head's products run once for each chunk of tokens.
        self._head = packed.hf.get_output_embeddings().state.name
        # One quantizer for all products, because samples have the axis of the sum last.
        self._quantize = {
            role: self._precision.along_features(active.settings, role) for role in get_args(Role)
        }
        self._samples: dict[tuple[str, Role, Along], _Sample] = {}
        self._rows: dict[tuple[str, Role], Tensor | slice] = {}

    @torch.no_grad()
    def see_operand(self, name: str, role: Role, tensor: Tensor) -> None:
        """Sample an operand [rows, features] before it is quantized."""
        is_repeated = (name, role, "features") in self._samples
        if role != "input" and name != self._head and is_repeated:
            # A recomputed layer. Of the head the last tokens count, because documents at the end of
            # a microbatch are compared. If a forward calls a layer several times, its last input
            # counts, because backward starts with the last call.
            return
        amax = tensor.abs().amax().float()
        is_weight = role == "weight"
        part = _of_largest_expert(tensor, self._groups.get(name), is_weight=is_weight)
        rows = _sampled(name, len(part)) if is_weight else _token_rows(part)
        self._rows[name, role] = rows
        # Copies: a view would keep the whole operand alive.
        of_rows = part[rows].clone()
        of_columns = part[:, _sampled(name, part.shape[1])].clone().t()
        self._samples[name, role, "features"] = _Sample(of_rows, of_rows, amax)
        transform = self._precision.transform(self._settings, role)
        if transform is not None and self._precision.tensor_scaled:
            amax = transform(tensor.t()).abs().amax().float()
        transformed = of_columns if transform is None else transform(of_columns)
        self._samples[name, role, "rows"] = _Sample(of_columns, transformed, amax)

    @torch.no_grad()
    def see_result(self, name: str, gemm: str, result: Tensor, bias: Tensor | None) -> None:
        """Compare a sample of a product's result, which includes `bias`."""
        roles = OPERANDS[gemm]
        keys = [(name, *key) for key in zip(roles, ALONG[gemm], strict=True)]
        is_repeated = name != self._head and (name, gemm) in self.products
        if is_repeated or not self._samples.keys() >= {*keys}:
            return
        operands = {key[1]: self._samples[key] for key in keys}
        is_weight = gemm == "wgrad"
        result = _of_largest_expert(
            result.flatten(0, -2), self._groups.get(name), is_weight=is_weight
        )
        rows = _sampled(name, len(result)) if is_weight else self._rows[name, roles[0]]
        columns = _sampled(name, result.shape[1])
        added = torch.zeros((), device=result.device) if bias is None else bias.float()[columns]
        exact, plain = self._references(name, gemm, operands, added, result.dtype)
        error = result[rows][:, columns].float() - added - exact
        bound = self._error_bound(name, operands, exact)
        self.products[name, gemm] = judge_product(f"{name} {gemm}", exact, error, plain, bound)

    def _references(
        self,
        name: str,
        gemm: str,
        operands: Mapping[Role, _Sample],
        added: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the exact product of the samples, and errors of the plain quantizer.

        added: the bias, which is added before the result is rounded to `dtype`.
        """
        is_stochastic = self._settings.disable_stochastic_rounding is False
        draws = DRAWS if is_stochastic and "grad_output" in operands else 1
        quantizes = not (self._precision.plain_forward and gemm == "forward")
        plain = []
        with overridden(torch.backends.cuda.matmul, fp32_precision="ieee"):
            left, right = (operand.values.float() for operand in operands.values())
            exact = left @ right.t()
            for _ in range(draws):
                if quantizes:
                    left, right = (
                        self._quantize[role](
                            operand.to_quantize, self._scale_of(name, role), operand.amax
                        ).dequantize()
                        for role, operand in operands.items()
                    )
                plain.append((left @ right.t() + added).to(dtype).float() - added - exact)
        return exact, plain

    def _scale_of(self, name: str, role: Role) -> Tensor | None:
        """Return the delayed scale of an operand, or None in precisions without histories."""
        has_history = self._precision.keeps_history
        return of_operand(self._before, name, role, "scale") if has_history else None

    def _error_bound(self, name: str, operands: Mapping[Role, _Sample], exact: Tensor) -> float:
        """Return the norm that the rounding error of the product `exact` stays within.

        The errors of different values are independent, except that equal rows of an operand err
        alike: then the product's error is the same share of it as the operands' errors are of them.
        """
        left, right = (operand.to_quantize.float().square() for operand in operands.values())
        of_left, of_right = (
            self._rounding_variance(role, operand, self._scale_of(name, role))
            for role, operand in operands.items()
        )
        independent = of_left @ right.t() + left @ of_right.t()
        shares = of_left.sum() / left.sum() + of_right.sum() / right.sum()
        return torch.maximum(independent.sum(), shares * exact.square().sum()).sqrt().item()

    def _rounding_variance(self, role: Role, operand: _Sample, scale: Tensor | None) -> Tensor:
        """Return a bound on the mean squared rounding error of each value of an operand.

        A value's quantum is at most 2^-mantissa_bits of it, or the format's smallest one, under the
        largest scale that its block may have. Errors are spread evenly over a quantum, and over two
        under stochastic rounding. Infinite where a delayed scale cuts the operand.
        """
        grid = self._precision.grid(self._settings, role)
        scaling = self._precision.scaling(role)
        magnitude = operand.to_quantize.abs().float()
        amax = operand.amax
        if scaling.block:
            height = scaling.block if scaling.square else 1
            blocks = magnitude.unflatten(1, (-1, scaling.block)).unflatten(0, (-1, height))
            amax = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape(magnitude.shape)
        if scale is None:
            smallest = amax / (scaling.least * grid.maximum)
        else:
            smallest = torch.where(amax * scale <= grid.maximum, 1 / scale, math.inf)
        least = smallest * 2.0**grid.min_exponent
        quantum = torch.maximum(magnitude, least) * 2.0**-grid.mantissa_bits
        return quantum.square() / (6 if self._precision.is_stochastic(self._settings, role) else 12)


def _of_largest_expert(rows: Tensor, ends: Tensor | None, *, is_weight: bool) -> Tensor:
    """Return the rows of the expert with the most tokens, or all rows of an ungrouped product.

    rows: a grouped weight [experts x out, in], or another operand or a result [rows, features] in
        the order of experts.
    ends: the end of each expert's rows, or None for an ungrouped product.
    """
    if ends is None:
        return rows
    bounds = [0, *ends.tolist()]
    expert = max(range(len(ends)), key=lambda index: bounds[index + 1] - bounds[index])
    if is_weight:
        return rows.unflatten(0, (len(ends), -1))[expert]
    return rows[bounds[expert] : bounds[expert + 1]]


def _token_rows(tensor: Tensor) -> Tensor:
    """Return indices of some rows, spread over the tensor.

    Rows that are not zero come first. Gradients of masked labels are zero.
    """
    scattered = torch.arange(1, len(tensor) + 1, device=tensor.device) * 2654435761 % 2**31
    return (scattered + (tensor != 0).any(dim=1) * 2**31).topk(min(ROWS, len(tensor))).indices


def _sampled(name: str, size: int) -> slice:
    """Return rows of a matrix of the product `name` that hold whole squares of every format.

    The name draws a block of 128, so that products of a model's layers are sampled in all places,
    also at their ends.
    """
    blocks = -(-size // ROWS)
    first = ROWS * (zlib.crc32(name.encode()) % blocks)
    return slice(first, min(first + ROWS, size))


# ── Histories ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def watching_histories(context: PrecisionContext, active: ActivePrecision) -> Iterator[list[str]]:
    """Observe the operands of one microbatch, and return the list of wrong histories.

    The list is filled when the block ends. A history must have moved on by one entry, the largest
    value of the operand over all ranks, and its scale must follow from it by the rule. An operand
    of zeros changes nothing. Collective. The list stays empty in precisions without histories.
    """
    wrong: list[str] = []
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    if not before:
        yield wrong
        return
    amaxes: dict[Role, dict[str, Tensor]] = defaultdict(dict)

    def see_operand(name: str, role: Role, tensor: Tensor) -> None:
        # A maximum of magnitudes that makes no copy.
        amax = torch.linalg.vector_norm(tensor, math.inf).float()
        amaxes[role][name] = torch.maximum(amax, amaxes[role].get(name, amax))

    with overridden(context, observers=[*context.observers, see_operand]):
        yield wrong
    for role, by_name in sorted(amaxes.items()):  # all ranks need the same order
        wrong += _wrong_histories(role, by_name, before, context.state(), active)


def _wrong_histories(
    role: Role,
    amaxes: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    active: ActivePrecision,
) -> list[str]:
    """Return the operands of `role` whose history or scale is wrong after a microbatch."""
    names = sorted(amaxes)
    amax = torch.stack([amaxes[name] for name in names])
    if dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)

    def stacked(state: Mapping[str, Tensor], key: Literal["amax_history", "scale"]) -> Tensor:
        return torch.stack([of_operand(state, name, role, key) for name in names], -1)

    history = stacked(after, "amax_history")
    scale = stacked(after, "scale")
    settings = active.settings
    expected_history, expected_scale = update_scale(
        torch.cat([history[-1:], stacked(before, "amax_history")[1:]]),
        stacked(before, "scale"),
        cast(QuantizedPrecision, active.precision).grid(settings, role).maximum,
        settings.margin or 0,
        settings.amax_compute_algo or "max",
    )
    is_right = (history == expected_history).all(0)
    is_right &= torch.isclose(history[-1], amax, rtol=AMAX_TOLERANCE, atol=0)
    is_right &= torch.isclose(scale, expected_scale, rtol=SCALE_TOLERANCE, atol=0)
    # Overflows are left to the health check, because NaN is no amax. A history of one microbatch
    # keeps nothing that could be checked.
    is_judged = history.isfinite().all(0) & amax.isfinite() & (amax > 0) & (len(history) > 1)
    return [
        f"{name} ({role})"
        for name, is_wrong in zip(names, (is_judged & ~is_right).tolist(), strict=True)
        if is_wrong
    ]
