"""Compare the low-precision products of a microbatch with exact products and with our quantizers.

Some rows and columns of each product's result are computed in two more ways: exactly, from the
unquantized operands, and from the same operands after our plain quantizer has quantized them. The
error of a result is its difference from the exact result. The run's error must have about the same
norm and direction as our quantizer's error (docs/developers/checks.md). A mistake in a
quantizer that the run and the check share is found by pretrain/verify/reference_quantizer.py.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.delayed_state import state_of_operand
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.gemm import GemmKind
from pretrain.precision.observed import ALONG, OPERANDS
from pretrain.precision.product import LinearPass, PrecisionContext, Probe
from pretrain.precision.quantizers.tensor import quantize_by_amax
from pretrain.precision.settings import ActivePrecision

# The number of rows and of columns in a sample: a multiple of every format's block size.
ROWS = 128
# The number of times that a sample is quantized with stochastic rounding.
DRAWS = 3
# The largest allowed norm of an error, divided by the norm of our quantizer's error. The quotient
# is 1.4 if a mantissa bit is missing, or if values are truncated instead of rounded.
LEEWAY = 1.2
# The same tolerance with stochastic rounding: the largest allowed difference from 1 of the relative
# squared error of a row, averaged over the rows. See `_judge_draws`. With three draws, this allows
# norms that are too large or too small by 17 %.
ROW_LEEWAY = 0.25
# With stochastic rounding, a deviation must also exceed this number of standard deviations. Correct
# rounding exceeds it with a probability below 1e-7 (tests/pretrain/observe/test_product_check.py).
SIGMAS = 6.0
# Tolerance relative to the norm of the result. The run's BF16 results are summed in another order
# than our results.
ORDER_OF_SUMS = 2.0**-10
# The cosine of the run's error and our quantizer's error must reach this value. It is 0.8 or more
# if both used the same scales, and about zero otherwise. If the quantizer rounds stochastically,
# the cosine is relative to the cosine of two errors of our quantizer.
LEAST_LIKENESS = 0.5
# The largest allowed component of an error along the bias, as a share of the bias. The component is
# 1 if the bias is missing or added twice.
BIAS_LEEWAY = 0.5


@dataclass(frozen=True)
class Compared:
    """The comparison of a gradient, or of a product's result, with a reference."""

    name: str
    # The norm of the difference, divided by the norm of the reference.
    error: float
    # The error divided by the tolerance. A value above 1 is a mismatch.
    excess: float

    @classmethod
    def of(cls, name: str, error: float, excess: float) -> Compared:
        """Return a comparison with these values. If `excess` is not finite, it becomes infinity."""
        return cls(name, error, excess if math.isfinite(excess) else math.inf)


def worst_first(compared: Iterable[Compared]) -> list[Compared]:
    """Return the comparisons sorted by their excess, the largest excess first."""
    return sorted(compared, key=lambda comparison: comparison.excess, reverse=True)


def judge_product(
    name: str, exact: Tensor, error: Tensor, plain_errors: Sequence[Tensor], bias: Tensor
) -> Compared:
    """Compare the error of the run's product with the error of our plain quantizer.

    The error may have a component along the bias only if the plain error has it too. The error of a
    small bias is far smaller than that of the format, but it is the same for all tokens.

    name: the name of the product, for the message.
    exact: a sample of the exact product.
    error: the run's result minus `exact`, of the same shape.
    plain_errors: the errors of the plain quantizer, each of the same shape. There are DRAWS errors
        if the quantizer rounds the left operand stochastically, otherwise one.
    bias: the bias that was added to the product, FP32 [columns], or zero.

    Waits for the device.
    """
    norm = exact.norm(dtype=torch.float64)
    if norm:
        errors = torch.stack([error, *plain_errors]).double() / norm
        size = errors[0].norm().item()
        excess = _judge_rounding(errors)
    else:
        # The relative error of a product that should be zero is infinite or zero.
        size = excess = math.inf if error.any() else 0.0
    along_bias = ((error - plain_errors[0]).mean(0) * bias).sum().abs()
    # The minimum avoids a division by zero if there is no bias.
    allowed = (BIAS_LEEWAY * bias.square().sum()).clamp(min=1e-30)
    bias_excess = (along_bias / allowed).item()
    return Compared.of(name, size, max(excess, bias_excess))


def _judge_rounding(errors: Tensor) -> float:
    """Return the excess of the run's error in a product without a bias.

    errors: the run's error, and then the plain quantizer's errors, [1 + draws, rows, columns].
        The unit is the norm of the exact product.
    """
    # Each of `too_large`, `too_small` and `too_different` is above 1 if the error is.
    size, *plain_sizes = errors.flatten(1).norm(dim=1).tolist()
    too_large = size / (LEEWAY * max(plain_sizes) + ORDER_OF_SUMS)
    # Differences in the order of sums would make the directions of such small errors differ. So a
    # small error is a mismatch only if it is too large.
    is_small = min(plain_sizes) <= 8 * ORDER_OF_SUMS
    if len(plain_sizes) > 1:
        excess = _judge_draws(errors)
        return min(too_large, excess) if is_small else excess
    if is_small:
        return too_large
    too_small = (plain_sizes[0] - ORDER_OF_SUMS) / LEEWAY / size if size else math.inf
    of_run, of_plain = errors.flatten(1)
    cosine = F.cosine_similarity(of_run, of_plain, dim=0, eps=1e-100).item()
    too_different = LEAST_LIKENESS / cosine if cosine > 0 else math.inf
    return max(too_large, too_small, too_different)


def _judge_draws(errors: Tensor) -> float:
    """Compare an error of stochastic rounding with errors of our quantizer.

    Return the larger excess of two statistics: the squared norm of the run's error, and its inner
    product with our quantizer's errors.

    A few rows of a gradient may be much larger than all others. Then the norm of the complete error
    depends on a few roundings, and correct draws differ by more than 20 %. So the errors in each
    row are divided by their root mean square over all draws, and every row counts equally.

    A deviation is a mismatch if it exceeds a fixed tolerance and SIGMAS standard deviations.

    errors: the run's error, followed by the errors of two or more draws of our quantizer,
        [1 + draws, rows, columns]. The rows are rows of the operand that is rounded stochastically:
        tokens in dgrad, and output features in wgrad.
    """
    number = len(errors)
    # Inner products of the errors of each row, [rows, 1 + draws, 1 + draws].
    products = torch.einsum("drc,erc->rde", errors, errors)
    mean_square = products.diagonal(dim1=1, dim2=2).mean(1)
    is_used = mean_square != 0
    products = products[is_used] / mean_square[is_used, None, None]
    squares = products.diagonal(dim1=1, dim2=2)
    difference = (squares[:, 0].mean() - 1).abs().item()
    # Mean inner product of each error with all other errors.
    inner = (products.sum(2) - squares) / (number - 1)
    # Sums over the rows. `of_run` is the mean inner product of the run's error with our quantizer's
    # errors, and `among_plain` is that of two errors of our quantizer. All columns of `inner`
    # together contain the products with the run's error twice.
    of_run = inner[:, 0].sum()
    among_plain = (inner.sum() - 2 * of_run) / (number - 2)
    allowed = (1 - LEAST_LIKENESS) * among_plain.clamp(min=1e-100)
    unlike = ((among_plain - of_run) / allowed).item()
    # Both the tolerance and the standard deviations must be exceeded.
    size_excess = min(difference / ROW_LEEWAY, _squared_excess(squares))
    direction_excess = min(unlike, _squared_excess(inner))
    return max(size_excess, direction_excess)


def _squared_excess(statistic: Tensor) -> float:
    """Return (deviation / (SIGMAS * standard deviation))² for the run's sum of `statistic`.

    The sum is over the rows. Its deviation is the difference from the mean of all columns' sums. If
    the run rounds correctly, its errors have the same distribution as our quantizer's errors. Then
    the run's value in a row is a random choice from all values of the row. Rows are rounded
    independently, so the variance of the sum is the sum of the variances of the rows.

    statistic: a value for each row and error, [rows, 1 + draws]. The run's error comes first.
    """
    centered = statistic - statistic.mean(1, keepdim=True)
    variance = centered.square().mean(1).sum().clamp(min=1e-100)
    return (centered[:, 0].sum().square() / variance).item() / SIGMAS**2


class _Sample(NamedTuple):
    """Some rows of an operand, as [rows, k]. The product sums over the last axis, k."""

    values: Tensor
    # The input of our plain quantizer: `values` after the precision's transform (for example a
    # Hadamard transform), or `values` if the precision has no transform.
    to_quantize: Tensor
    # The largest magnitude in the whole operand, an FP32 scalar. If a transformed operand has a
    # tensor scale, it is the largest magnitude after the transform.
    amax: Tensor
    # The delayed scale of the operand, or None if the precision has no histories.
    scale: Tensor | None
    # Indices of the operand's rows in the sample. If the sample was taken from the transposed
    # operand, they are indices of the operand's columns.
    rows: Tensor | slice
    # True if each row has a scale of its own, computed from its largest magnitude.
    has_row_scales: bool = False


def largest_magnitude(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in a tensor, an FP32 scalar, without a copy of the tensor."""
    return torch.linalg.vector_norm(tensor, math.inf).float()


# Map the axis of the sum to a sample of an operand. An expert without tokens has an empty dict.
_Samples = dict[Along, _Sample]


class ProductCheck(Probe):
    """Probe that samples the operands and results of all products, and compares each result.

    Only the first microbatch of a step is compared, because each comparison takes milliseconds. A
    product may run several times in this microbatch: its layer is recomputed or called several
    times, or the LM head computes in chunks of tokens. Each result is compared.
    """

    observes_results = True

    def __init__(self, context: PrecisionContext, active: ActivePrecision) -> None:
        """Create the check before the first microbatch.

        context: the context of the model's products.
        active: the precision of the microbatches.
        """
        self._context = context
        self._precision = active.quantized_precision
        # Map the name of each product to the comparisons of its results.
        self._products: dict[str, list[Compared]] = defaultdict(list)
        # One quantizer for each role is enough, because the products sum over the last axis of all
        # samples.
        self._quantize = {role: self._precision.along_features(role) for role in get_args(Role)}
        # Map the name of each grouped product to the experts that are compared.
        self._experts: dict[str, set[int]] = {}
        # Map (name of the linear, role) to the samples of the newest operand: one for each chosen
        # expert, or one without experts.
        self.samples: dict[tuple[str, Role], list[_Samples]] = {}
        # The samples of each call's input. Another call of the same linear may run before the
        # backward of a call.
        self._inputs: WeakKeyDictionary[LinearPass, list[_Samples]] = WeakKeyDictionary()
        # Map the name of each linear to the gradient of its output, summed over tokens.
        self.token_sums: dict[str, Tensor] = {}
        # Copy of the delayed scales of the first microbatch.
        self._state = {name: tensor.clone() for name, tensor in context.state().items()}

    def compared(self) -> list[Compared]:
        """Return the worst comparison of each product, the largest excess first."""
        return worst_first(worst_first(results)[0] for results in self._products.values())

    @torch.no_grad()
    def operand(
        self, name: str, role: Role, values: Callable[[], Tensor], call: LinearPass
    ) -> None:
        """Sample an operand before it is quantized, and sum the gradients of outputs."""
        tensor = values()
        if role == "grad_output":
            total = tensor.sum(0, dtype=torch.float32)
            self.token_sums[name] = total + self.token_sums.get(name, 0.0)
        if not self._context.first_microbatch:
            return
        if call.ends is not None and name not in self._experts:
            self._experts[name] = _some_experts(name, tensor, call.ends)
        parts = self._parts(name, tensor, call.ends, is_weight=role == "weight")
        samples = [self._sampled(name, role, tensor, part) for part in parts]
        if role == "grad_output" and call.gradient_has_row_scales:
            (sample,) = samples
            sample["features"] = sample["features"]._replace(has_row_scales=True)
        self.samples[name, role] = samples
        if role == "input":
            self._inputs[call] = samples

    def _sampled(self, name: str, role: Role, tensor: Tensor, part: Tensor) -> _Samples:
        """Return the samples of `part`, the rows of one expert in the operand `tensor`."""
        if not len(part):
            return {}
        scale = state_of_operand(self._state, name, role, "scale") if self._state else None
        rows = _slice_of(name, len(part)) if role == "weight" else token_rows(part)
        columns = _slice_of(name, part.shape[1])
        # Copy the rows and columns, because a view would keep the whole operand in memory.
        of_rows = part[rows].clone()
        of_columns = part[:, columns].clone().t()
        # A scale of the tensor depends on all values, not only on those of the sample.
        amax = largest_magnitude(tensor)
        # A format may transform operands that are summed along their rows.
        transformed = of_columns
        transformed_amax = amax
        transform = self._precision.transform(role)
        if transform is not None:
            transformed = transform(of_columns)
            if self._precision.tensor_scaled:
                transformed_amax = largest_magnitude(transform(tensor.t()))
        return {
            "features": _Sample(of_rows, of_rows, amax, scale, rows),
            "rows": _Sample(of_columns, transformed, transformed_amax, scale, columns),
        }

    @torch.no_grad()
    def result(
        self, name: str, gemm: GemmKind, result: Tensor, bias: Tensor | None, call: LinearPass
    ) -> None:
        """Compare a sample of a product's result. Waits for the device.

        If `bias` is not None, `result` includes the bias.
        """
        if not self._context.first_microbatch:
            return
        parts = self._parts(name, result.flatten(0, -2), call.ends, is_weight=gemm == "wgrad")
        for number, part in enumerate(parts):
            operands = {}
            for role, along in zip(OPERANDS[gemm], ALONG[gemm], strict=True):
                samples = self._inputs[call] if role == "input" else self.samples[name, role]
                if along in samples[number]:
                    operands[role] = samples[number][along]
            # An expert without rows has no samples.
            if len(operands) == 2:
                product = f"{name} {gemm}"
                self._products[product].append(self._compare(product, operands, part, bias))

    def _parts(
        self, name: str, rows: Tensor, ends: Tensor | None, *, is_weight: bool
    ) -> list[Tensor]:
        """Return the rows of each chosen expert. Return all rows if there are no experts.

        rows: the rows of all experts, sorted by expert. They are weights or weight gradients
            [experts x out, in] if `is_weight` is set. Otherwise they are an input, an output
            gradient or a result [tokens, features].
        ends: the end of each expert's tokens, int32 [experts], or None if the linear has no
            experts.
        """
        if ends is None:
            return [rows]
        if is_weight:
            parts: Sequence[Tensor] = rows.unflatten(0, (len(ends), -1))
        else:
            parts = rows.tensor_split(ends[:-1].tolist())
        return [parts[expert] for expert in self._experts[name]]

    def _compare(
        self, name: str, operands: Mapping[Role, _Sample], result: Tensor, bias: Tensor | None
    ) -> Compared:
        """Compare a sample of a product's result with the exact and the plain result.

        name: the name of the product.
        operands: the two samples by role, in the order of the product's factors.
        result: the result, for one expert if there are experts.
        bias: the bias that `result` includes, or None.
        """
        left, right = operands.values()
        added = torch.zeros((), device=result.device)
        if bias is not None:
            added = bias.float()[right.rows]
        is_stochastic = any(map(self._precision.is_stochastic, operands))
        plain_errors = []
        with (
            # FP32 factors must not be rounded to TF32.
            overridden(torch.backends.cuda.matmul, fp32_precision="ieee"),
            # The draws must not change the random numbers of later products.
            torch.random.fork_rng([result.device] if result.is_cuda else [], is_stochastic),
        ):
            exact = left.values.float() @ right.values.float().t()
            for _ in range(DRAWS if is_stochastic else 1):
                factors = [self._quantized(role, sample) for role, sample in operands.items()]
                rounded = (factors[0] @ factors[1].t() + added).to(result.dtype)
                plain_errors.append(rounded.float() - added - exact)
        error = result[left.rows][:, right.rows].float() - added - exact
        return judge_product(name, exact, error, plain_errors, added)

    def _quantized(self, role: Role, sample: _Sample) -> Tensor:
        """Return the values of a sample after our plain quantizer has quantized them."""
        if sample.has_row_scales:
            grid = self._precision.grid(role)
            rows = sample.values.split(1)
            quantized = [quantize_by_amax(row, None, grid) for row in rows]
            return torch.cat([row.dequantize() for row in quantized])
        quantize = self._quantize[role]
        return quantize(sample.to_quantize, sample.scale, sample.amax).dequantize()


def _some_experts(name: str, inputs: Tensor, ends: Tensor) -> set[int]:
    """Return the experts with the most and the fewest tokens, and one that a hash chooses.

    Experts without tokens are not chosen.

    name: the name of the product, which is hashed.
    inputs: the inputs of all experts, [tokens, features]. Rows that fill gaps are zero.
    ends: the end of each expert's rows, int32 [experts].
    """
    parts = inputs.any(1).tensor_split(ends[:-1].tolist())
    tokens = torch.stack([part.sum() for part in parts]).tolist()
    used = [expert for expert, count in enumerate(tokens) if count]
    used.sort(key=tokens.__getitem__)
    hashed = zlib.crc32(name.encode()) % len(used)
    return {used[-1], used[0], used[hashed]}


def token_rows(tensor: Tensor) -> Tensor:
    """Return the indices of at most ROWS rows, spread over the tensor.

    Rows of zeros are chosen only if there are too few other rows. The gradients of tokens with a
    masked label are such rows.
    """
    # Compute a hash below 2^31 from the index of each row. Add 2^31 if the row is not zero. Choose
    # the rows with the largest results.
    hashes = torch.arange(1, len(tensor) + 1, device=tensor.device) * 2654435761 % 2**31
    hashes += tensor.any(1) * 2**31
    return hashes.topk(min(ROWS, len(tensor))).indices


def _slice_of(name: str, size: int) -> slice:
    """Return a slice of at most ROWS consecutive indices below `size`, for the product `name`.

    The slice starts at a multiple of ROWS, so it contains whole blocks of every format. A hash of
    the name chooses the start. So the samples of different layers have different positions, and
    some samples are at the end of a matrix.
    """
    blocks = -(-size // ROWS)
    first = ROWS * (zlib.crc32(name.encode()) % blocks)
    return slice(first, min(first + ROWS, size))
