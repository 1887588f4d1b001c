"""Every low-precision product of a microbatch, beside the product that it stands for and one of operands that we quantize.

A sample of a product's result, some rows times some columns, is computed twice more: exactly, from the operands before they were
quantized; and as the format has it, from what the precision's own quantizer makes of them. The run's distance from the exact
result must be that of the format, in size and in direction (docs/verification.md). It also has an absolute bound, which follows
from the format's mantissa bits: a quantizer that is wrong everywhere would otherwise confirm itself.

Under delayed scaling the amaxes that were seen must be where the histories keep them, and the next scales must follow from them.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import mean
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from foundation.overrides import overridden
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.observed import ALONG, OPERANDS
from pretrain.precision.product import PrecisionContext
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

ROWS = 128  # of a result that is sampled, and as many columns: a multiple of every format's block
DRAWS = 3  # of stochastic rounding
# of an error's size, beyond what the draws span: a mantissa bit, or truncation, is 1.4 at least
LEEWAY = 1.2
# of an error's size, beyond the format's bound: healthy errors reach 0.8 of it, a mantissa bit less
# 1.5
BOUND_LEEWAY = 1.1
# of the result's norm: sums of BF16 results come in another order than ours
ORDER_OF_SUMS = 2.0**-10
# of two errors' directions: of the same scales 0.8 or more, of other ones near zero
LEAST_LIKENESS = 0.5
# of the draws of stochastic rounding among themselves, from which on it says something
KNOWN_LIKENESS = 0.1
# relative, of an amax: it may be that of a norm's output before it is rounded to BF16
NOTED = 2.0**-6
OF_THE_RULE = 2.0**-20  # relative: a scale divides by what the library may multiply by


@dataclass(frozen=True)
class Compared:
    """One tensor's gradient, or one product's result."""

    name: str
    error: float  # its norm, relative to that of the reference
    # how many times over what is tolerated; above 1 is a mismatch, and so is not-a-number, the
    # worst
    excess: float

    @classmethod
    def of(cls, name: str, error: float, excess: float) -> Compared:
        return cls(name, error, excess if math.isfinite(excess) else math.inf)


def judge_product(
    name: str, exact: Tensor, error: Tensor, plain: Sequence[Tensor], bound: float
) -> Compared | None:
    """A sample of the unquantized product, the run's error and some of the plain quantizer's; None where all is zero.

    bound: norm that the error of the format stays within.
    """
    norm = exact.norm(dtype=torch.float64)
    if norm == 0 and not error.any():
        return None
    error, *plain = (each.double().flatten() / norm for each in (error, *plain))
    size, sizes = error.norm().item(), [each.norm().item() for each in plain]
    allowed = min(LEEWAY * max(sizes), BOUND_LEEWAY * bound / norm.item()) if norm else 0.0
    excess = size / (allowed + ORDER_OF_SUMS)
    # Where the sums' order is not small beside the quantization, it hides how alike the two are.
    if min(sizes) > 8 * ORDER_OF_SUMS:
        excess = max(excess, (min(sizes) - ORDER_OF_SUMS) / LEEWAY / size if size else math.inf)
        cosine = partial(F.cosine_similarity, dim=0, eps=1e-100)
        # of draws among themselves
        known = mean([cosine(*pair).item() for pair in combinations(plain, 2)] or [1.0])
        if known > KNOWN_LIKENESS:
            likeness = mean(cosine(error, each).item() for each in plain) / known
            excess = max(excess, LEAST_LIKENESS / likeness if likeness > 0 else math.inf)
    return Compared.of(name, size, excess)


class _Sample(NamedTuple):
    """Rows of an operand, with the axis of the product's sum last."""

    values: Tensor
    to_quantize: Tensor  # the same, transformed where the precision transforms them first
    amax: Tensor  # FP32, of the whole operand


@contextmanager
def watching_products(
    packed: PackedLanguageModel, active: ActivePrecision
) -> Iterator[tuple[list[Compared], list[str]]]:
    """Looks at the products of one microbatch, and fills the lists that it yields as it is left: with every product that was
    seen, the worst first, and as `watching_histories` does. Collective."""
    context, precision, settings = packed.context, active.precision, active.settings
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    # The head's is called for a chunk of tokens at a time.
    of_head = {each.name for each in packed.hf.get_output_embeddings().products.values()}
    # What is laid out with the axis of the sum last is quantized alike for every product.
    quantize = {role: precision.along_features(settings, role) for role in get_args(Role)}
    samples: dict[tuple[str, Role, Along], _Sample] = {}
    rows_of: dict[tuple[str, Role], Tensor] = {}
    products: dict[tuple[str, str], Compared | None] = {}
    worst_first: list[Compared] = []

    @torch.no_grad()
    def see_operand(name: str, role: Role, tensor: Tensor) -> None:
        if name not in of_head and (name, role, "features") in samples:
            # a layer that is recomputed; of the head the last tokens stay, since the documents at
            # an end are compared
            return
        amax, whole = tensor.abs().amax().float(), tensor
        tensor = _of_one_expert(whole, context.groups.get(name), role == "weight")
        rows, columns = (_sampled(name, size) for size in tensor.shape)
        if role != "weight":
            rows = rows_of[name, role] = _tokens(tensor)
        # Copies: a view would keep the whole operand.
        of_rows, of_columns = tensor[rows].clone(), tensor[:, columns].clone().t()
        samples[name, role, "features"] = _Sample(of_rows, of_rows, amax)
        transformed, transform = of_columns, precision.transform(settings, role)
        if transform is not None:
            transformed = transform(of_columns)
            if precision.tensor_scaled:
                amax = transform(whole.t()).abs().amax().float()
        samples[name, role, "rows"] = _Sample(of_columns, transformed, amax)

    def scale_of(name: str, role: Role) -> Tensor | None:
        return of_operand(before, name, role, "scale") if precision.keeps_history else None

    def quantized(name: str, role: Role, sample: _Sample) -> Tensor:
        return quantize[role](sample.to_quantize, scale_of(name, role), sample.amax).dequantize()

    @torch.no_grad()
    def see_result(name: str, gemm: str, result: Tensor, bias: Tensor | None) -> None:
        roles = OPERANDS[gemm]
        operands = [
            samples.get((name, role, along)) for role, along in zip(roles, ALONG[gemm], strict=True)
        ]
        if None in operands or (name not in of_head and (name, gemm) in products):
            return
        result = _of_one_expert(result.flatten(0, -2), context.groups.get(name), gemm == "wgrad")
        rows = _sampled(name, len(result)) if gemm == "wgrad" else rows_of[name, roles[0]]
        columns = _sampled(name, result.shape[1])
        added = torch.zeros((), device=result.device) if bias is None else bias.float()[columns]
        by_chance = settings.disable_stochastic_rounding is False and "grad_output" in roles
        with overridden(torch.backends.cuda.matmul, fp32_precision="ieee"):
            left, right = (operand.values.float() for operand in operands)
            exact = left @ right.t()
            plain = []
            for _ in range(DRAWS if by_chance else 1):
                if not (precision.plain_forward and gemm == "forward"):
                    left, right = (
                        quantized(name, *each) for each in zip(roles, operands, strict=True)
                    )
                plain.append((left @ right.t() + added).to(result.dtype).float() - added - exact)
        error = result[rows][:, columns].float() - added - exact
        variances = [
            _rounding_variance(active, role, operand, scale_of(name, role))
            for role, operand in zip(roles, operands, strict=True)
        ]
        bound = _error_bound([operand.to_quantize for operand in operands], variances, exact)
        products[name, gemm] = judge_product(f"{name} {gemm}", exact, error, plain, bound)

    with watching_histories(context, active) as wrong_histories:
        observers = {
            "observers": [*context.observers, see_operand],
            "result_observers": [see_result],
        }
        with overridden(context, **observers):
            yield worst_first, wrong_histories
    worst_first += sorted(
        filter(None, products.values()), key=lambda each: each.excess, reverse=True
    )


def _rounding_variance(
    active: ActivePrecision, role: Role, operand: _Sample, scale: Tensor | None
) -> Tensor:
    """Return a bound on the mean squared rounding error of each value of an operand, of its shape.

    A value's quantum is at most 2^-mantissa_bits of it, or the format's smallest one, under the largest
    scale that its block may have. Errors are spread evenly over a quantum, and over two under
    stochastic rounding. Infinite where a delayed scale cuts the operand.
    """
    precision, settings = active.precision, active.settings
    grid, scaling = precision.grid(settings, role), precision.scaling(role)
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
    quantum = torch.maximum(magnitude, smallest * 2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
    return quantum.square() / (6 if precision.is_stochastic(settings, role) else 12)


def _error_bound(operands: Sequence[Tensor], variances: Sequence[Tensor], exact: Tensor) -> float:
    """Return the norm that the rounding error of the product `exact` stays within.

    The errors of different values are independent, except that equal rows of an operand err alike:
    then the product's error is the same share of it as the operands' errors are of them.
    """
    left, right = (operand.float().square() for operand in operands)
    independent = variances[0] @ right.t() + left @ variances[1].t()
    shares = variances[0].sum() / left.sum() + variances[1].sum() / right.sum()
    return torch.maximum(independent.sum(), shares * exact.square().sum()).sqrt().item()


def _of_one_expert(rows: Tensor, ends: Tensor | None, is_weight: bool) -> Tensor:
    """The rows of the expert with most tokens, of a grouped product's weight [experts x out, in], or of another operand or a
    result [rows, features] by expert. All rows of a product without `ends`."""
    if ends is None:
        return rows
    begins = [0, *ends.tolist()]
    expert = max(range(len(ends)), key=lambda each: begins[each + 1] - begins[each])
    return (
        rows.unflatten(0, (len(ends), -1))[expert]
        if is_weight
        else rows[begins[expert] : begins[expert + 1]]
    )


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


@contextmanager
def watching_histories(context: PrecisionContext, active: ActivePrecision) -> Iterator[list[str]]:
    """Looks at the operands of one microbatch, and fills the list that it yields as it is left: with those whose delayed scale or
    history is not what the microbatch makes of it. Collective; does nothing in precisions that keep no history.

    A history must have moved on by one entry, the largest value of the operand on all ranks, and its scale must be what the rule
    makes of it. Zeros move nothing."""
    wrong: list[str] = []
    before, settings = (
        {name: tensor.clone() for name, tensor in context.state().items()},
        active.settings,
    )
    if not before:
        yield wrong
        return
    amaxes: dict[Role, dict[str, Tensor]] = defaultdict(dict)

    def see_operand(name: str, role: Role, tensor: Tensor) -> None:
        # a maximum of magnitudes that makes no copy
        amax = torch.linalg.vector_norm(tensor, math.inf).float()
        amaxes[role][name] = torch.maximum(amax, amaxes[role].get(name, amax))

    with overridden(context, observers=[*context.observers, see_operand]):
        yield wrong
    for role, of_role in sorted(amaxes.items()):  # in one order on all ranks
        names, amax = sorted(of_role), torch.stack([of_role[name] for name in sorted(of_role)])
        if dist.is_initialized():
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        (old_history, old_scale), (history, scale) = (
            [
                torch.stack([of_operand(state, name, role, key) for name in names], -1)
                for key in ("amax_history", "scale")
            ]
            for state in (before, context.state())
        )
        rule = (
            active.precision.grid(settings, role).maximum,
            settings.margin,
            settings.amax_compute_algo,
        )
        right_history, right_scale = update_scale(
            torch.cat([history[-1:], old_history[1:]]), old_scale, *rule
        )
        moved = (history == right_history).all(0) & torch.isclose(
            history[-1], amax, rtol=NOTED, atol=0
        )
        moved &= torch.isclose(scale, right_scale, rtol=OF_THE_RULE, atol=0)
        # An overflow is left to the health check (a NaN is no amax). Of a history of one microbatch nothing is left to look at.
        judged = history.isfinite().all(0) & amax.isfinite() & (amax > 0) & (len(history) > 1)
        wrong += [
            f"{name} ({role})"
            for name, is_wrong in zip(names, (judged & ~moved).tolist(), strict=True)
            if is_wrong
        ]
