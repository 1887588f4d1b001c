"""Matrix products by the fastest of cublasLt's algorithms, which are timed at the first product.

cublasLt's heuristic lists about eight algorithms for a product. Libraries take the first one, which
is often not the fastest (docs/results.md). Here each algorithm computes the first product of a
kind. Algorithms whose bits differ from the first algorithm's are discarded, so results never depend
on measured times. If a product adds to a sum, the trials write to other memory.

This file computes products in BF16, and in FP8 with one scale a tensor or in blocks of 128. For
other products, `multiply` returns None, and Transformer Engine or torch computes them. It also does
so under `deterministic: true`, because bits that were equal once need not be equal again.

cublasLt is called through ctypes. It computes D = A B + beta C, columns first. In torch's terms,
rows first, this is

    d [n, m] = b [n, k] a [m, k]^T + beta c

`a` is stored as [m, k] if it is called transposed, else as [k, m]. `b` is stored as [k, n] if
transposed, else as [n, k]. FP8 products before Blackwell need `a` transposed and `b` not.
Signatures and numbers are from cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0. They are
the same in CUDA 12.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import (
    POINTER,
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.precision.observed import fp8_format, see

WORKSPACE = 32 * 2**20 + 1024  # bytes, the same as Transformer Engine's
_BF16 = torch.bfloat16
_FP8_ON = (9, 0)  # compute capability; Blackwell's FP8 products read operands in other ways
_REQUESTED = 16  # algorithms; the heuristic lists about half of them
_ROUNDS = 5
_LEAST_GAIN = 0.01  # relative; if no algorithm gains as much, the first one is taken
_HEAD_START = 2_000_000  # cycles, about a millisecond, to queue launches
_MULTIPLE_OF = 16  # all sizes must be multiples of this, as FP8 products require


class Factor(NamedTuple):
    """An operand as it is stored, [rows, inner] or [inner, rows]."""

    values: Tensor  # BF16, or bytes
    dtype: torch.dtype
    scale: Tensor | None  # FP32 scales of FP8 codes, in the layout that `mode` names
    mode: int = 0  # cublasLtMatmulMatrixScale_t


class Problem(NamedTuple):
    """The kind of a product. All products of a kind use one algorithm. Letters as in cublasLt."""

    m: int
    n: int
    k: int
    types: tuple[torch.dtype, torch.dtype, torch.dtype]  # of a, of b, of c and d
    transposed: tuple[bool, bool]
    fast_accumulation: bool
    adds: bool  # there is a c, in memory other than d's
    modes: tuple[int, int] = (0, 0)  # of the scales of a and b


# ── Public functions ────────────────────────────────────────────────────────────────────────────


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
    """Return right [n, k] left [m, k]^T (+ `residual`), [n, m] BF16, or None if not supported here.

    If it returns None, nothing was computed, and another library has to. Arguments are as of
    Transformer Engine's general_gemm: `left` is [m, k] if `layout` begins with T, else [k, m];
    `right` is [n, k] if `layout` ends with N, else [k, n]. Both are tensors in BF16, or, with TN,
    Transformer Engine's tensors in FP8. `residual` [n, m] BF16 is not modified.
    `fast_accumulation`: FP8 products are summed in the tensor cores alone. With `total` [n, m]
    FP32, the product is added to `total`, or overwrites it, and `total` is returned.
    """
    a, b = _factor(left), _factor(right)
    if a is None or b is None or torch.are_deterministic_algorithms_enabled():
        return None
    problem = problem_of(
        a,
        b,
        (layout[0] == "T", layout[1] == "T"),
        residual,
        total,
        fast_accumulation=fast_accumulation,
    )
    if problem is None or (products := products_on(a.values.device)) is None:
        return None
    d = products.multiply(problem, a, b, residual if total is None or overwrite else total, total)
    if d is not None:
        see(left, right, layout)
    return d


# Products in any dtype on any device, by `multiply` if possible. They are not differentiable.


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return x [n, k] weight [m, k]^T + `bias` [m] + `residual` [n, m], which is not modified."""
    if bias is None and (y := multiply(weight, x, residual=residual)) is not None:
        return y
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
    """Add left [n, k] @ right [k, m] to `total` [n, m] in FP32, in one product if possible.

    With `overwrite`, replace what `total` held, even NaN. `left` is the transpose of a contiguous
    tensor, as in a gradient of weights.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if overwrite else 1)
    elif not total.is_cuda:
        total.copy_(left @ right if overwrite else total + left @ right)
    elif multiply(right, left.t(), layout="NT", total=total, overwrite=overwrite) is None:
        torch.addmm(
            total, left, right, beta=0 if overwrite else 1, out_dtype=torch.float32, out=total
        )


# ── Operands ────────────────────────────────────────────────────────────────────────────────────


def _factor(operand: Any) -> Factor | None:
    """Return the operand as a factor, or None if it is not supported.

    Supported are plain tensors in BF16, and FP8 that is quantized along its rows with one scale or
    in blocks of 128.
    """
    if type(operand) in (Tensor, nn.Parameter):
        is_supported = operand.dtype == _BF16 and operand.is_cuda
        return Factor(operand, operand.dtype, None) if is_supported else None
    te = sys.modules.get("transformer_engine.pytorch")
    if te and isinstance(operand, te.Float8TensorStorage):
        values, scale, mode = operand._data, operand._scale_inv, 0
    elif te and isinstance(operand, te.Float8BlockwiseQTensorStorage):
        values, scale, mode = (
            operand._rowwise_data,
            operand._rowwise_scale_inv,
            _SQUARES if operand._is_2D_scaled else _VECTORS,
        )
    else:
        return None
    if values is None:
        return None
    return Factor(values, fp8_format(te, operand._fp8_dtype)[0], scale, mode)


def problem_of(
    a: Factor,
    b: Factor,
    transposed: tuple[bool, bool],
    residual: Tensor | None,
    total: Tensor | None,
    *,
    fast_accumulation: bool,
) -> Problem | None:
    """Return the kind of a product of `multiply`, or None if cublasLt rejects the memory layout."""
    is_fp8 = a.scale is not None
    if is_fp8 != (b.scale is not None) or (is_fp8 and transposed != (True, False)):
        return None
    m, k = a.values.shape if transposed[0] else reversed(a.values.shape)
    inner, n = b.values.shape if transposed[1] else reversed(b.values.shape)
    if inner != k or 0 in (m, n, k) or any(size % _MULTIPLE_OF for size in (m, n, k)):
        return None
    tensors = [tensor for tensor in (a.values, b.values, residual, total) if tensor is not None]
    if not all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors):
        return None
    return Problem(
        m,
        n,
        k,
        (a.dtype, b.dtype, _BF16 if total is None else total.dtype),
        transposed,
        is_fp8 and fast_accumulation,
        residual is not None,
        (a.mode, b.mode),
    )


# ── Products of one GPU ─────────────────────────────────────────────────────────────────────────


class Products:
    """The products of one GPU, on the stream of the first product, because they share a workspace.

    The library is the one that torch has loaded, which the loader finds by its name. Another
    library could have another version and other heuristics.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` must be the current device, which torch has already used."""
        self.library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
        for name, arguments in _SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments  # results are int by default
        self.handle = self.create("")
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.current_stream(device).cuda_stream
        self._has_fp8 = torch.cuda.get_device_capability(device) == _FP8_ON
        # None: cublasLt rejects the kind.
        self.chosen: dict[Problem, tuple[Matmul, Algorithm] | None] = {}

    def require(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.library, name)(*arguments):
            raise CublasLtError(f"{name} returned status {status}")

    def create(self, kind: str, *arguments: Any) -> c_void_p:
        created = c_void_p()
        self.require(f"cublasLt{kind}Create", byref(created), *arguments)
        return created

    def set_value(self, kind: str, where: c_void_p, attribute: int, value: Any) -> None:
        self.require(f"cublasLt{kind}SetAttribute", where, attribute, byref(value), sizeof(value))

    def multiply(
        self, problem: Problem, a: Factor, b: Factor, added: Tensor | None, total: Tensor | None
    ) -> Tensor | None:
        """Multiply as the function `multiply` does. If cublasLt rejects the product, return None.

        Then nothing was started.
        """
        if (
            self.chosen.get(problem, ()) is None
            or torch.cuda.current_stream().cuda_stream != self.stream
            or (a.scale is not None and not self._has_fp8)
        ):
            return None
        d = total
        if d is None:
            d = torch.empty(problem.n, problem.m, dtype=_BF16, device=a.values.device)
        # Out of memory: there is no room to try algorithms for a sum.
        with suppress(CublasLtError, torch.OutOfMemoryError):
            chosen = self.chosen.get(problem) or self._choose(problem, a, b, added, d)
            if chosen is not None and chosen[0].run(chosen[1], a, b, added, d) == SUCCESS:
                return d
        self.chosen[problem] = None
        return None

    def _choose(
        self, problem: Problem, a: Factor, b: Factor, added: Tensor | None, d: Tensor
    ) -> tuple[Matmul, Algorithm] | None:
        """Return the fastest algorithm, or None. Overwrite d, unless d is `added`."""
        matmul = Matmul(self, problem)
        matmul.set_scales(a, b)  # before the heuristic: not all algorithms can scale
        named = matmul.named_by_heuristic()
        d = torch.empty_like(d) if d is added else d
        launches = [functools.partial(matmul.run, algorithm, a, b, added, d) for algorithm in named]
        same, decisive = same_as_first(launches, d, added)
        if not same:
            return None
        if not decisive:  # try again with the next product of this kind
            return matmul, named[same[0]]
        best = fastest(_times([launches[number] for number in same])) if len(same) > 1 else 0
        self.chosen[problem] = matmul, named[same[best]]
        return self.chosen[problem]


@functools.cache
def products_on(device: torch.device) -> Products | None:
    """Return the products of the current `device`, or None if cublasLt cannot be called."""
    # There is no such library, or it lacks a function.
    with suppress(CublasLtError, OSError, AttributeError):
        return Products(device)
    return None


def same_as_first(
    launches: Sequence[Callable[[], int]], d: Tensor, added: Tensor | None
) -> tuple[list[int], bool]:
    """Return the indices of launches that write the same bits into d as the first one that runs.

    Bits are compared by their sum over d. Also return whether the comparison is decisive. It is not
    for a product of zeros, or if d is not finite: every algorithm would write the same.
    """
    ran = []
    sums = []
    for number, launch in enumerate(launches):
        if launch() == SUCCESS:
            ran.append(number)
            sums.append(d.view(torch.int64).sum())
    if not ran:
        return [], False
    unchanged = torch.zeros_like(sums[0]) if added is None else added.view(torch.int64).sum()
    # It is enough to look at the last result, because the operands decide whether d is finite. A
    # sum in FP64 would copy d.
    finite = d.sum().isfinite().long()
    *bits, unchanged, finite = torch.stack([*sums, unchanged, finite]).tolist()
    same = [number for number, written in zip(ran, bits, strict=True) if written == bits[0]]
    return same, bool(finite) and bits[0] not in (0, unchanged)


def fastest(times: Sequence[Sequence[float]]) -> int:
    """Return the index of the algorithm with the least median time, or 0 if it gains too little."""
    medians = [statistics.median(milliseconds) for milliseconds in times]
    best = medians.index(min(medians))
    return best if medians[best] < (1 - _LEAST_GAIN) * medians[0] else 0


def _times(launches: Sequence[Callable[[], int]]) -> list[list[float]]:
    """Return milliseconds by launch and round.

    Every second round runs backwards, because clocks change with power.
    """
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
    torch.cuda._sleep(_HEAD_START)
    for turn in range(_ROUNDS):
        for index in range(len(launches)) if turn % 2 == 0 else reversed(range(len(launches))):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launches[index]()
            end.record()
            marks[index].append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in pairs] for pairs in marks]


# ── cublasLt ────────────────────────────────────────────────────────────────────────────────────

SUCCESS = 0
ALIGNMENT = 256  # bytes; the heuristic assumes it of tensors by default
# cudaDataType
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F, _SCALE_32F = 68, 0  # cublasComputeType_t, and cudaDataType of alpha and beta
# cublasLtMatmulDescAttributes_t
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B = 3, 4
_DESC_SCALE_A, _DESC_SCALE_B = 17, 18
_DESC_FAST_ACCUMULATION = 25
_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 31, 32
# cublasLtMatmulMatrixScale_t, since CUDA 12.9, for r rows: FP32 [k / 128, r], and [r / 128, k /
# 128] with its rows padded to multiples of 4. There is no product of two tensors in squares.
_VECTORS, _SQUARES = 4, 5
_PREFERENCE_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
# Alpha and beta. The call itself reads them.
_FACTORS = {number: byref(c_float(number)) for number in (0.0, 1.0)}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: an algorithm for a kind of product, 64 bytes that may be copied."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


# Every function returns a cublasStatus_t. Handles, descriptors and device pointers are void *. A
# value comes with its number of bytes.
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    # Handle, operation, layouts of A, B, C and D, preference, count, results, number of results.
    "cublasLtMatmulAlgoGetHeuristic": [
        *[c_void_p] * 7,
        c_int,
        POINTER(HeuristicResult),
        POINTER(c_int),
    ],
    # Handle, operation, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm,
    # workspace, its bytes, stream.
    "cublasLtMatmul": [*[c_void_p] * 12, POINTER(Algorithm), c_void_p, c_size_t, c_void_p],
}


class CublasLtError(RuntimeError):
    """A call of cublasLt has failed."""


class Matmul:
    """cublasLt's description of a kind of product, accumulated and scaled in FP32. c is like d.

    The caller provides the tensors: contiguous, of these sizes and types, on one device. The
    descriptions take some hundred bytes, until the process ends.
    """

    def __init__(self, products: Products, problem: Problem) -> None:
        m, n, k = problem[:3]
        transposed = problem.transposed
        self._products = products
        self._operation = products.create("MatmulDesc", _COMPUTE_32F, _SCALE_32F)
        # cublasOperation_t: 0 as it lies, 1 transposed
        self._set(_DESC_TRANSPOSE_A, c_int32(transposed[0]))
        self._set(_DESC_TRANSPOSE_B, c_int32(transposed[1]))
        if problem.fast_accumulation:
            self._set(_DESC_FAST_ACCUMULATION, c_int8(1))
        for attribute, mode in zip(
            (_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B), problem.modes, strict=True
        ):
            if mode:  # One scale a tensor is the default, also of older libraries.
                self._set(attribute, c_int32(mode))
        shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
        layouts = [
            products.create("MatrixLayout", _TYPES[dtype], rows, columns, rows)
            for (rows, columns), dtype in zip(shapes, problem.types, strict=True)
        ]
        self._layouts = (*layouts, layouts[-1])  # of A, B, C and D

    def _set(self, attribute: int, value: Any) -> None:
        self._products.set_value("MatmulDesc", self._operation, attribute, value)

    def set_scales(self, a: Factor, b: Factor) -> None:
        """Set the device pointers of FP8 scales. They must be valid until the product is done."""
        for attribute, factor in ((_DESC_SCALE_A, a), (_DESC_SCALE_B, b)):
            if factor.scale is not None:
                self._set(attribute, c_void_p(factor.scale.data_ptr()))

    def named_by_heuristic(self) -> list[Algorithm]:
        """Return the algorithms that fit the workspace, the fastest by cublasLt's estimate first.

        They need tensors that begin at a multiple of ALIGNMENT bytes.
        """
        products = self._products
        preference = products.create("MatmulPreference")
        size = c_uint64(products.workspace.numel())
        products.set_value("MatmulPreference", preference, _PREFERENCE_WORKSPACE_BYTES, size)
        results = (HeuristicResult * _REQUESTED)()
        number = c_int()
        product = (products.handle, self._operation, *self._layouts, preference)
        products.require(
            "cublasLtMatmulAlgoGetHeuristic", *product, _REQUESTED, results, byref(number)
        )
        return [
            Algorithm.from_buffer_copy(result.algorithm)
            for result in results[: number.value]
            if result.state == SUCCESS
        ]

    def run(
        self, algorithm: Algorithm, a: Factor, b: Factor, added: Tensor | None, d: Tensor
    ) -> int:
        """Start d = a b (+ `added`) on the products' stream. Return a cublasStatus_t.

        If it is not 0, nothing was started.
        """
        self.set_scales(a, b)
        layout_a, layout_b, layout_c, layout_d = self._layouts
        products = self._products
        c, beta = (d, 0.0) if added is None else (added, 1.0)
        return products.library.cublasLtMatmul(
            products.handle,
            self._operation,
            _FACTORS[1.0],
            a.values.data_ptr(),
            layout_a,
            b.values.data_ptr(),
            layout_b,
            _FACTORS[beta],
            c.data_ptr(),
            layout_c,
            d.data_ptr(),
            layout_d,
            algorithm,
            products.workspace.data_ptr(),
            products.workspace.numel(),
            products.stream,
        )
