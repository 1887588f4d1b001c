"""Matrix products by the fastest of cublasLt's algorithms, found by trying them, where Transformer Engine takes the first named.

The heuristic of cublasLt names some eight algorithms for a product. Which is the fastest depends on shape, clock and power, and
it is often not the first: docs/results.md has the figures. So the first product of a kind is computed by each of them, in turns
and in place. One that gives other bits than the first named is not taken: then times do not choose what is computed.

A product may also add a residual, d = a b + c with c apart from d, which spares the kernel that would add it, and a rounding.
Or it adds to an FP32 sum of gradients, c being d: then the algorithms are tried into another place, so that it adds once.

Whatever does not fit here is left to Transformer Engine or torch: `multiply` returns None and has done nothing. So is everything
where runs are to repeat their bits (`deterministic: true`): that two algorithms give the same is seen and not known.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.precision.cublaslt import (
    ALIGNMENT,
    SCALE_ALIGNMENT,
    SUCCESS,
    CublasLt,
    CublasLtError,
    Matmul,
    OpaqueAlgorithm,
    ScaleEach,
)

WORKSPACE = 32 * 2**20 + 1024  # bytes, as Transformer Engine's; before Hopper 4 MiB
_BF16 = torch.bfloat16
_FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}  # by Transformer Engine's names
_ASKED = 16  # algorithms, of which the heuristic names half
_ROUNDS = 5
_LEAST_GAIN = 0.01  # below it the first named stays
_HEAD_START = 2_000_000  # cycles, a millisecond in which launches are queued
_MULTIPLE_OF = 16  # of all sizes: FP8's products take no other
_BLOCK = 128  # values along k that share a scale, where a tensor has more than one
_BF16_SINCE, _FP8_ON = (8, 0), (9, 0)  # compute capabilities; Blackwell's FP8 products read operands in other ways


class Factor(NamedTuple):
    """An operand as it lies in memory, [rows, inner] or [inner, rows]."""

    values: Tensor  # BF16, or bytes
    dtype: torch.dtype
    scale: Tensor | None  # of FP8 codes, FP32, shaped as `ScaleEach` says
    each: ScaleEach = ScaleEach.TENSOR


class Problem(NamedTuple):
    """What two products that take one algorithm have in common; the letters are those of pretrain.precision.cublaslt."""

    m: int
    n: int
    k: int
    types: tuple[torch.dtype, torch.dtype]  # of a and b
    transposed: tuple[bool, bool]
    fast_accumulation: bool
    adds: bool  # c, in BF16 as d is
    sums: bool = False  # c and d are one, in FP32
    scales: tuple[ScaleEach, ScaleEach] = (ScaleEach.TENSOR, ScaleEach.TENSOR)  # of a and b


class _Chosen(NamedTuple):
    matmul: Matmul
    algorithm: OpaqueAlgorithm


# ── What the rest of training calls ─────────────────────────────────────────────────────────────────────────────────────────────


def multiply(
    left: Any,
    right: Any,
    *,
    layout: str = "TN",
    fast_accumulation: bool = False,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor | None:
    """d [n, m] BF16 = right [n, k] left [m, k]^T (+ `residual`); None, and nothing done, where another library has to.

    As Transformer Engine's general_gemm: `left` is [m, k] if `layout` begins with T, else [k, m]; `right` is [n, k] if it ends
    with N, else [k, n]. Tensors in BF16, or with TN Transformer Engine's, with one scale or in blocks. `residual` [n, m] BF16
    stays as it was. `fast_accumulation`: of FP8 products with one scale a tensor, in the tensor cores alone.

    With `total` [n, m] FP32 the product is added to it, or with `overwrite` takes the place of what it held, and it is returned.
    """
    if torch.are_deterministic_algorithms_enabled():
        return None
    a, b = _factor(left), _factor(right)
    if a is None or b is None:
        return None
    transposed = layout[0] == "T", layout[1] == "T"
    problem = problem_of(a, b, transposed, residual, fast_accumulation=fast_accumulation, total=total)
    products = _of_device(a.values.device)
    return products.multiply(problem, a, b, residual, total, overwrite=overwrite) if products and problem else None


# Operations of torch's, so that the audit sees them. None is differentiable.


@torch.library.custom_op("pretrain::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? residual=None) -> Tensor")
def linear(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """x [n, k] weight [m, k]^T as torch's linear, by `multiply` where it can; `residual` [n, m] added, which stays as it was."""
    y = multiply(weight, x, residual=residual)
    if y is not None:
        return y
    y = F.linear(x, weight)
    return y if residual is None else y.add_(residual)


@torch.library.custom_op("pretrain::input_gradient", mutates_args=(), schema="(Tensor dy, Tensor weight) -> Tensor")
def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy [n, m] weight [m, k], by `multiply` where it can."""
    dx = multiply(weight, dy, layout="NN")
    return dy @ weight if dx is None else dx


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
    """total [n, m] += left [n, k] @ right [k, m] in FP32, in one product where possible; `overwrite` leaves out what `total`
    held, even NaN."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if overwrite else 1)
    elif total.is_cuda and products_sum_in_fp32():
        _add_product(total, left, right, overwrite)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total += left @ right


@torch.library.custom_op(
    "pretrain::add_product",
    mutates_args=("total",),
    schema="(Tensor(a!) total, Tensor left, Tensor right, bool overwrite) -> ()",
)
def _add_product(total: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """`left` is the transpose of what lies in memory, in a gradient of weights; by `multiply` where it can."""
    if multiply(right, left.t(), layout="NT", total=total, overwrite=overwrite) is None:
        torch.addmm(total, left, right, beta=0 if overwrite else 1, out_dtype=torch.float32, out=total)


@functools.cache
def products_sum_in_fp32() -> bool:
    """Whether this torch and GPU add a product of BF16 matrices to an FP32 one, and write one over what was there: tried, as no
    version number tells."""
    total = torch.full((16, 16), math.nan, device="cuda")
    factor = torch.ones(16, 16, device="cuda", dtype=_BF16)
    try:
        for beta in (0, 1):
            torch.addmm(total, factor, factor, beta=beta, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return bool((total == 32).all())


def takes(operand: Any) -> bool:
    """Whether `multiply` is for such operands, on this GPU and in this run; a single product may still be none for it."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    factor = _factor(operand)
    products = None if factor is None else _of_device(factor.values.device)
    return products is not None and products.multiplies(factor)


def describe() -> str | None:
    """Says for the audit for how many products algorithms were searched so far; None where for none."""
    count = sum(products.searched for products in _by_device.values() if products)
    return f"{count} searched" if count else None


# ── Operands ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _factor(operand: Any) -> Factor | None:
    """Returns the operand as a factor; None for what is neither a plain tensor in BF16 nor FP8 with one scale a tensor or a
    block, quantized along its rows."""
    if type(operand) in (Tensor, nn.Parameter):
        return Factor(operand, operand.dtype, None) if operand.dtype == _BF16 and operand.is_cuda else None
    te = sys.modules.get("transformer_engine.pytorch")
    if te is None:
        return None
    if isinstance(operand, te.Float8TensorStorage):
        values, scale, each = operand._data, operand._scale_inv, ScaleEach.TENSOR
    elif isinstance(operand, te.Float8BlockwiseQTensorStorage):
        values, scale = operand._rowwise_data, operand._rowwise_scale_inv
        each = ScaleEach.SQUARE if operand._is_2D_scaled else ScaleEach.VECTOR
    else:
        return None
    if values is None or not values.is_cuda:
        return None
    return Factor(values, fp8_dtype(te, operand._fp8_dtype), scale, each)


def fp8_dtype(te: ModuleType, dtype: Any) -> torch.dtype:
    """torch's name of one of Transformer Engine's FP8 types."""
    return _FP8[te.DType.cast(dtype).name]


def problem_of(
    a: Factor,
    b: Factor,
    transposed: tuple[bool, bool],
    residual: Tensor | None,
    *,
    fast_accumulation: bool,
    total: Tensor | None = None,
) -> Problem | None:
    """What the product of `a` and `b` is; None where cublasLt would not take it as they lie."""
    if a.values.dim() != 2 or b.values.dim() != 2:
        return None
    is_fp8 = a.dtype != _BF16
    if is_fp8 != (b.dtype != _BF16) or (is_fp8 and transposed != (True, False)):
        return None
    (m, k), (n, inner) = (
        shape if along else shape[::-1] for shape, along in ((a.values.shape, transposed[0]), (b.values.shape, not transposed[1]))
    )
    per_tensor = a.each is b.each is ScaleEach.TENSOR
    if not per_tensor and (ScaleEach.TENSOR in (a.each, b.each) or a.each is b.each is ScaleEach.SQUARE or k % _BLOCK):
        return None
    fast = is_fp8 and fast_accumulation and per_tensor  # Transformer Engine's neither: tensor cores cannot
    adds, sums = residual is not None, total is not None
    problem = Problem(m, n, k, (a.dtype, b.dtype), transposed, fast, adds, sums, (a.each, b.each))
    if inner != k or 0 in (m, n, k) or any(size % _MULTIPLE_OF for size in (m, n, k)):
        return None
    if residual is not None and (residual.dtype != _BF16 or residual.shape != (n, m)):
        return None
    if total is not None and (residual is not None or total.dtype != torch.float32 or total.shape != (n, m)):
        return None
    tensors = [tensor for tensor in (a.values, b.values, residual, total) if tensor is not None]
    scales = [factor.scale for factor in (a, b) if is_fp8]
    if is_fp8 and not (_is_scaled(a, m, k) and _is_scaled(b, n, k)):
        return None
    fits = all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    return problem if fits and len({tensor.device for tensor in (*tensors, *scales)}) == 1 else None


def _is_scaled(factor: Factor, rows: int, inner: int) -> bool:
    """Whether its scales are those that cublasLt will read."""
    scale = factor.scale
    if scale is None or scale.dtype != torch.float32:
        return False
    if factor.each is ScaleEach.TENSOR:
        return scale.numel() == 1
    across = inner // _BLOCK
    shape = (across, rows) if factor.each is ScaleEach.VECTOR else (-(-rows // _BLOCK), across + -across % 4)
    return scale.shape == shape and scale.is_contiguous() and scale.data_ptr() % SCALE_ALIGNMENT == 0


# ── Of one GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Products:
    """The products of one GPU, on the stream on which the first of them is computed: they share a workspace."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the current one. CublasLtError or OSError where its library cannot be used."""
        self.searched = 0
        self._device, self._library = device, CublasLt()
        self._capability = torch.cuda.get_device_capability(device)
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._bytes = WORKSPACE if self._capability >= _FP8_ON else 4 * 2**20
        self._workspace = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        self._chosen: dict[Problem, _Chosen | None] = {}

    def multiplies(self, factor: Factor) -> bool:
        """Whether this GPU has products of such factors."""
        return self._capability >= _BF16_SINCE if factor.dtype == _BF16 else self._capability == _FP8_ON

    def multiply(
        self,
        problem: Problem,
        a: Factor,
        b: Factor,
        residual: Tensor | None,
        total: Tensor | None = None,
        *,
        overwrite: bool = False,
    ) -> Tensor | None:
        """Multiplies as the function `multiply` does; None where cublasLt refuses, in which case nothing was started."""
        if problem in self._chosen and self._chosen[problem] is None:
            return None
        device = self._device.index
        stream = torch.cuda.current_stream().cuda_stream
        if torch.cuda.current_device() != device or stream != self._stream or not self.multiplies(a):
            return None
        added = residual if total is None or overwrite else total
        d = torch.empty(problem.n, problem.m, dtype=_BF16, device=self._device) if total is None else total
        with suppress(CublasLtError):
            chosen = self._chosen.get(problem) or self._choose(problem, a, b, added, d)
            if chosen is not None and self._run(chosen, a, b, added, d) == SUCCESS:
                return d
        self._chosen[problem] = None
        return None

    def _run(self, chosen: _Chosen, a: Factor, b: Factor, added: Tensor | None, d: Tensor) -> int:
        matmul, algorithm = chosen
        if a.scale is not None:
            matmul.set_scales(a.scale, b.scale)
        c, beta = (d, 0.0) if added is None else (added, 1.0)
        return matmul.run(a.values, b.values, c, d, beta, algorithm, self._workspace, self._stream)

    def _choose(self, problem: Problem, a: Factor, b: Factor, added: Tensor | None, d: Tensor) -> _Chosen | None:
        """The fastest algorithm; None where none runs. d is written over, more than once, unless it is `added`: then it stays as
        it is."""
        sizes, types = (problem.m, problem.n, problem.k), (*problem.types, d.dtype)
        options = {"fast_accumulation": problem.fast_accumulation, "scales": problem.scales}
        matmul = self._library.matmul(sizes, types, problem.transposed, **options)
        if a.scale is not None:  # not all algorithms can scale
            matmul.set_scales(a.scale, b.scale)
        named = [_Chosen(matmul, algorithm) for algorithm in matmul.named_by_heuristic(_ASKED, self._bytes)]
        if d is added:
            try:
                d = torch.empty_like(d)
            except torch.OutOfMemoryError:  # no room to try them: in this run the first named
                self._chosen[problem] = named[0] if named else None
                return self._chosen[problem]
        runs = [(chosen, functools.partial(self._run, chosen, a, b, added, d)) for chosen in named]
        same, told = _same_as_first(runs, d, added)
        if not same:
            return None
        if not told:  # the next product of this kind will tell more
            return same[0][0]
        best, _ = same[fastest(_times([run for _, run in same])) if len(same) > 1 else 0]
        self.searched += 1
        self._chosen[problem] = best
        return best


_Run = tuple[_Chosen, Callable[[], int]]


def _same_as_first(runs: Sequence[_Run], d: Tensor, added: Tensor | None) -> tuple[list[_Run], bool]:
    """Returns those that run and write into d the bits of the first of them, by the sum of all that they write; and whether that
    tells anything. It does not of a product of zeros, which leaves zeros or what it is `added` to, nor where d is not finite: any
    algorithm would write that."""
    ran, sums = [], []
    for each in runs:
        if each[1]() == SUCCESS:
            ran.append(each)
            sums.append(d.view(torch.int64).sum())
    if not ran:
        return [], False
    unchanged = torch.zeros_like(sums[0]) if added is None else added.view(torch.int64).sum()
    finite = d.sum().isfinite().long()  # of the last one, as of all: the operands decide it. In FP64 the sum would copy d
    *found, unchanged, finite = torch.stack([*sums, unchanged, finite]).tolist()
    told = bool(finite) and found[0] not in (0, unchanged)
    return [each for each, bits in zip(ran, found, strict=True) if bits == found[0]], told


def fastest(times: Sequence[Sequence[float]]) -> int:
    """The number of the algorithm with the least median, if that is worth a change from number 0."""
    medians = [statistics.median(each) for each in times]
    best = medians.index(min(medians))
    return best if medians[best] < (1 - _LEAST_GAIN) * medians[0] else 0


def _times(launches: Sequence[Callable[[], int]]) -> list[list[float]]:
    """Milliseconds by launch and round; rounds go through them forth and back, as clocks move with power."""
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
    torch.cuda._sleep(_HEAD_START)
    for turn in range(_ROUNDS):
        for index in range(len(launches)) if turn % 2 == 0 else reversed(range(len(launches))):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            launches[index]()
            ended.record()
            marks[index].append((begun, ended))
    torch.cuda.synchronize()
    return [[begun.elapsed_time(ended) for begun, ended in pairs] for pairs in marks]


def _of_device(device: torch.device) -> Products | None:
    """Returns the products of the current device; None for another one, and where cublasLt cannot be called."""
    if device.index != torch.cuda.current_device():
        return None
    if device.index not in _by_device:
        try:
            _by_device[device.index] = Products(device)
        except (CublasLtError, OSError, AttributeError):  # no such library, or one that lacks a function
            _by_device[device.index] = None
    return _by_device[device.index]


_by_device: dict[int, Products | None] = {}
