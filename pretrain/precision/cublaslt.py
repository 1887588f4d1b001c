"""Compute matrix products with the fastest algorithm of cublasLt.

For a product, cublasLt's heuristic lists about eight algorithms. Libraries use the first algorithm
of the list, which is often not the fastest. This file tries all of them on the first product of
each kind (`Problem`), measures their times, and uses the fastest one for the following products of
this kind. Algorithms whose result differs in any bit from the result of the first algorithm are
discarded, so results never depend on measured times. If a product is added to a sum, the trials
write to separate memory. Choices are cached on disk, so that the next process on the same kind of
GPU needs no trials.

This file computes products in BF16, in FP8 with one scale per tensor, and in FP8 with scales for
blocks of 128. For other products, and with `deterministic: true`, `multiply` returns None, and
Transformer Engine or torch must compute the product. Deterministic runs do not use this file,
because two algorithms whose results are equal in one product may differ in another product.

cublasLt is called through ctypes. It computes D = A B + beta C, with matrices that are stored
column by column. torch stores matrices row by row. For torch's matrices, cublasLt computes

    d [n, m] = b [n, k] a [m, k]^T + beta c

In cublasLt, each operand is marked as transposed or not. `a` is stored as [m, k] if it is
transposed, else as [k, m]. `b` is stored as [k, n] if it is transposed, else as [n, k]. Before
Blackwell, FP8 products require that `a` is transposed and `b` is not. The signatures and constants
are from cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0. They are the same in CUDA 12.
nvmath-python calls cublasLt too, but it does not support blocks of 128 (docs/studies/log.md).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundation.errors import InputError
from foundation.files import CACHE, replace_file
from pretrain.precision.observed import ActiveObserver, fp8_format

# Size of the workspace in bytes. Transformer Engine's workspace has the same size.
WORKSPACE = 32 * 2**20 + 1024
_BF16 = torch.bfloat16
# The only compute capability whose FP8 products this file computes. Blackwell's FP8 products expect
# operands in other layouts.
_FP8_ON = (9, 0)
# The maximum number of algorithms that the heuristic may list. It usually lists about eight.
_REQUESTED = 16
# The number of times that each algorithm is timed.
_ROUNDS = 5
# The first algorithm of the heuristic is used unless another algorithm is faster by this share.
_LEAST_GAIN = 0.01
# Clock cycles (about a millisecond) for which the GPU waits while the CPU queues the launches.
_HEAD_START = 2_000_000
# m, n and k must be multiples of this, because FP8 products require it.
_MULTIPLE_OF = 16


class Factor(NamedTuple):
    """An operand in its stored layout, [rows, k] or [k, rows]. The product sums along k."""

    # BF16 values, or FP8 codes as bytes.
    values: Tensor
    # BF16, or the FP8 type of the codes.
    dtype: torch.dtype
    # The FP32 scales of FP8 codes. `mode` determines their layout. None for BF16.
    scale: Tensor | None
    # The scale mode, a value of cublasLtMatmulMatrixScale_t. 0: one scale per tensor.
    mode: int = 0
    # The bias [rows] of a weight, BF16, which is added to the product.
    bias: Tensor | None = None


class Problem(NamedTuple):
    """The kind of a product: all its properties that the choice of the algorithm depends on.

    The letters a, b, c, d, m, n and k have the same meaning as in cublasLt.
    """

    m: int
    n: int
    k: int
    # Three dtypes: the dtype of a, the dtype of b, and the common dtype of c and d.
    types: tuple[torch.dtype, torch.dtype, torch.dtype]
    # Two flags: True if a is transposed, and True if b is transposed.
    transposed: tuple[bool, bool]
    fast_accumulation: bool
    # True if a matrix c is added that is not d itself.
    adds: bool
    # The scale modes of a and of b, see `Factor.mode`.
    modes: tuple[int, int] = (0, 0)
    # True if a bias [m] is added.
    biased: bool = False


# ── Public functions ────────────────────────────────────────────────────────────────────────────


def multiply(
    left: Any,
    right: Any,
    *,
    layout: str = "TN",
    fast_accumulation: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor | None:
    """Return `right @ left.T`, [n, m], or None if this product is not supported.

    `right` is [n, k] and `left` is [m, k], or their transposes (see `layout`). If `left` is a
    transposed view, as the weight of a Conv1D is, it is read in its stored layout.

    If the result is None, nothing was computed, and another library must compute the product. The
    arguments have the same meaning as in Transformer Engine's general_gemm.

    left, right: BF16 tensors, or with the layout TN, FP8 tensors of Transformer Engine.
    layout: `left` is [m, k] if the first letter is T, and [k, m] if it is N. `right` is [n, k] if
        the second letter is N, and [k, n] if it is T.
    fast_accumulation: sum FP8 products in the tensor cores alone, which is faster but less precise.
    bias: a vector that is added to each row of the product, [m] BF16.
    residual: a matrix that is added to the product, [n, m] BF16. It is not modified.
    total: the sum to which the product is added, [n, m] FP32, or None. If it is given, it is
        returned. Otherwise the result is a new BF16 tensor.
    overwrite: store the product in `total` instead of adding it.
    """
    if isinstance(left, Tensor) and not left.is_contiguous():
        left = left.t()
        layout = ("N" if layout[0] == "T" else "T") + layout[1]
    a, b = _factor(left, bias), _factor(right)
    if a is None or b is None or torch.are_deterministic_algorithms_enabled():
        return None
    transposed = (layout[0] == "T", layout[1] == "T")
    problem = problem_of(a, b, transposed, residual, total, fast_accumulation=fast_accumulation)
    if problem is None or (products := products_on(a.values.device)) is None:
        return None
    # The fourth argument is the matrix that is added: the residual, or the old values of `total`.
    d = products.multiply(problem, a, b, residual if total is None or overwrite else total, total)
    if d is not None and ActiveObserver.current is not None:
        # Pass `right` first. Libraries swap the operands of a product, because cuBLAS stores
        # matrices column by column.
        ActiveObserver.current.record(right, left)
    return d


# The following functions compute products in any dtype on any device. They use `multiply` if it
# supports the product. Their results are not differentiable.


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return x weight^T + bias + residual, [n, m], for x [n, k] and weight [m, k].

    `bias` is [m]. `residual` is [n, m] and is not modified.
    """
    if (y := multiply(weight, x, bias=bias, residual=residual)) is not None:
        return y
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
    """Add left [n, k] @ right [k, m] to `total` [n, m] in FP32.

    With `overwrite`, replace the values of `total`, even if they are NaN. `left` must be the
    transpose of a contiguous tensor, as dy^T is in the weight's gradient dy^T x. One kernel both
    multiplies and adds. The exception is a CPU if the operands have another dtype than `total`: the
    product is first rounded to their dtype.
    """
    beta = 0 if overwrite else 1
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=beta)
    elif not total.is_cuda:
        total.copy_(left @ right if overwrite else total + left @ right)
    elif not total.is_contiguous() and total.t().is_contiguous():
        # The weight of a Conv1D. Kernels add to the transpose, which is contiguous.
        add_product_(total.t(), right.t(), left.t(), overwrite=overwrite)
    elif multiply(right, left.t(), layout="NT", total=total, overwrite=overwrite) is None:
        torch.addmm(total, left, right, beta=beta, out_dtype=torch.float32, out=total)


# ── Operands ────────────────────────────────────────────────────────────────────────────────────


def _factor(operand: Any, bias: Tensor | None = None) -> Factor | None:
    """Return the operand as a Factor, or None if it is not supported.

    Two kinds of operands are supported: plain BF16 tensors on a GPU, and FP8 tensors of Transformer
    Engine that have a row-wise form, with one scale per tensor or with scales for blocks of 128.
    """
    if type(operand) in (Tensor, nn.Parameter):
        is_supported = operand.dtype == _BF16 and operand.is_cuda
        return Factor(operand, operand.dtype, None, bias=bias) if is_supported else None
    te = sys.modules.get("transformer_engine.pytorch")
    if not te or not isinstance(
        operand, (te.Float8TensorStorage, te.Float8BlockwiseQTensorStorage)
    ):
        return None
    stored = operand.get_metadata()
    if "data" in stored:
        values, scale, mode = stored["data"], stored["fp8_scale_inv"], _TENSOR
    else:
        values, scale = stored["rowwise_data"], stored["rowwise_scale_inv"]
        mode = _SQUARES if stored["is_2D_scaled"] else _VECTORS
    if values is None:
        return None
    return Factor(values, fp8_format(te, stored["fp8_dtype"])[0], scale, mode, bias)


def problem_of(
    a: Factor,
    b: Factor,
    transposed: tuple[bool, bool],
    residual: Tensor | None,
    total: Tensor | None,
    *,
    fast_accumulation: bool,
) -> Problem | None:
    """Return the Problem of a product, or None if the product is not supported.

    Dtypes, sizes, strides and addresses are checked. `a` and `b` are the operands. See `Problem`
    for `transposed`, and `multiply` for the other arguments.
    """
    is_fp8 = a.scale is not None
    # FP8 operands must have one layout, and both operands must be FP8 or neither.
    if is_fp8 != (b.scale is not None) or (is_fp8 and transposed != (True, False)):
        return None
    # cublasLt stores matrices by columns, so it reads the rows of a tensor as columns.
    m, k = a.values.shape if transposed[0] else reversed(a.values.shape)
    inner, n = b.values.shape if transposed[1] else reversed(b.values.shape)
    if inner != k or any(size % _MULTIPLE_OF or not size for size in (m, n, k)):
        return None
    for tensor in (a.values, b.values, a.bias, residual, total):
        if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT):
            return None
    types = (a.dtype, b.dtype, _BF16 if total is None else total.dtype)
    return Problem(
        m=m,
        n=n,
        k=k,
        types=types,
        transposed=transposed,
        fast_accumulation=is_fp8 and fast_accumulation,
        adds=residual is not None,
        modes=(a.mode, b.mode),
        biased=a.bias is not None,
    )


# ── Products of one GPU ─────────────────────────────────────────────────────────────────────────


class Products:
    """The cublasLt products of one GPU.

    All of them share a workspace, so only one stream may compute them: the stream that was current
    when the object was created. A CUDA graph of products is captured on another stream, but must be
    launched on this stream. The dynamic loader finds the cublasLt library by its name and returns
    the library that torch has already loaded. So torch and this class use the same version and the
    same heuristic.
    """

    def __init__(self, device: torch.device) -> None:
        """Load the library. `device` must be the current device, and torch must have used it."""
        self.library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
        for name, arguments in _SIGNATURES.items():
            # ctypes assumes an int as the result, which is right for all of these functions.
            getattr(self.library, name).argtypes = arguments
        self.handle = self.create("")  # cublasLtCreate
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.current_stream(device).cuda_stream
        self._has_fp8 = torch.cuda.get_device_capability(device) == _FP8_ON
        # Everything that a cached choice depends on, except the kind of the product.
        self._environment = (
            Path(__file__).read_bytes(),
            self.library.cublasLtGetVersion(),
            torch.cuda.get_device_name(device),
        )
        # Map each kind of product to the algorithm that is used, or to None if cublasLt rejects the
        # kind.
        self.chosen: dict[Problem, tuple[Matmul, Algorithm] | None] = {}

    def require(self, name: str, *arguments: Any) -> None:
        """Call the function `name` of cublasLt. Raise CublasLtError if it fails."""
        if status := getattr(self.library, name)(*arguments):
            raise CublasLtError(f"{name} returned status {status}")

    def create(self, kind: str, *arguments: Any) -> c_void_p:
        """Return a new object of cublasLt, such as a MatmulDesc."""
        created = c_void_p()
        self.require(f"cublasLt{kind}Create", byref(created), *arguments)
        return created

    def set_value(self, kind: str, where: c_void_p, attribute: int, value: Any) -> None:
        """Set an attribute of `where`, an object of `kind` that `create` returned."""
        self.require(f"cublasLt{kind}SetAttribute", where, attribute, byref(value), sizeof(value))

    def multiply(
        self, problem: Problem, a: Factor, b: Factor, added: Tensor | None, total: Tensor | None
    ) -> Tensor | None:
        """Return the product of kind `problem`, or None if this object cannot compute it.

        If the result is None, no kernel was started. `added` is the matrix that is added to the
        product, or None. The product is written to `total`, or to a new tensor if `total` is None.
        """
        if (
            # cublasLt has rejected this kind of product. A kind without trials has no entry yet.
            self.chosen.get(problem, ()) is None
            # Only one stream may use the workspace. A graph is captured on another stream, but it
            # is launched on this stream.
            or (
                torch.cuda.current_stream().cuda_stream != self.stream
                and not torch.cuda.is_current_stream_capturing()
            )
            or (a.scale is not None and not self._has_fp8)
        ):
            return None
        d = total
        if d is None:
            d = torch.empty(problem.n, problem.m, dtype=_BF16, device=a.values.device)
        # OutOfMemoryError means that a trial for a sum could not allocate separate memory.
        with suppress(CublasLtError, torch.OutOfMemoryError):
            matmul, algorithm = self.chosen.get(problem) or self._choose(problem, a, b, added, d)
            if matmul.run(algorithm, a, b, added, d) == SUCCESS:
                return d
        self.chosen[problem] = None
        return None

    def _choose(
        self, problem: Problem, a: Factor, b: Factor, added: Tensor | None, d: Tensor
    ) -> tuple[Matmul, Algorithm]:
        """Try all algorithms and return the fastest one. Raise CublasLtError if none runs.

        The trials write to d, or to a new tensor if d is the same tensor as `added`. If an earlier
        process has cached its choice, the cached algorithm is returned without trials.
        """
        matmul = Matmul(self, problem)
        cached = cache_file(self._environment, problem)
        with suppress(OSError, ValueError):
            algorithm = Algorithm.from_buffer_copy(cached.read_bytes())
            self.chosen[problem] = matmul, algorithm
            return matmul, algorithm
        # The heuristic must know the scales, because not all algorithms support scales.
        matmul.set_pointers(a, b)
        named = matmul.named_by_heuristic()
        d = torch.empty_like(d) if d is added else d
        launches = [functools.partial(matmul.run, algorithm, a, b, added, d) for algorithm in named]
        same, decisive = same_as_first(launches, d, added)
        # If the comparison is not decisive, do not store a choice, so that the next product of this
        # kind repeats the trials.
        if not decisive:
            return matmul, named[same[0]]
        best = fastest(_times([launches[number] for number in same]))
        algorithm = named[same[best]]
        self.chosen[problem] = matmul, algorithm
        # The folder of caches may be read-only.
        with suppress(InputError):
            replace_file(cached, bytes(algorithm))
        return matmul, algorithm


def cache_file(environment: tuple[Any, ...], problem: Problem) -> Path:
    """Return the path of the cache file for a problem. It contains the 64 bytes of an `Algorithm`.

    environment: all other data that the choice depends on, see `Products._environment`.
    """
    digest = hashlib.sha256(repr((environment, problem)).encode()).hexdigest()
    return CACHE / "gemm_algorithms" / digest


@functools.cache
def products_on(device: torch.device) -> Products | None:
    """Return the products of `device`, or None if cublasLt cannot be called.

    `device` must be the current device.
    """
    # These exceptions mean that the library does not exist, or lacks a function.
    with suppress(CublasLtError, OSError, AttributeError):
        return Products(device)
    return None


def same_as_first(
    launches: Sequence[Callable[[], int]], d: Tensor, added: Tensor | None
) -> tuple[list[int], bool]:
    """Find the launches that write the same bits to d as the first launch that succeeds.

    launches: functions that start one algorithm and return a cublasStatus_t.
    d: the tensor that every launch writes to.
    added: the matrix that every launch adds to its product, or None.

    Return the indices of these launches, and True if the comparison is decisive. The comparison is
    not decisive if the product is zero or if d is not finite, because different algorithms could
    then write the same bits. Instead of all bits, checksums are compared: d is read as int64
    numbers, and the numbers are added up. Raise CublasLtError if no launch succeeds.
    """
    ran = []
    sums = []
    for number, launch in enumerate(launches):
        if launch() == SUCCESS:
            ran.append(number)
            sums.append(d.view(torch.int64).sum())
    if not ran:
        raise CublasLtError("no algorithm of the heuristic runs")
    # The checksum of d if the product is zero and only `added` is left.
    unchanged = torch.zeros_like(sums[0]) if added is None else added.view(torch.int64).sum()
    # It suffices to check the result of the last launch: whether d is finite depends on the
    # operands, not on the algorithm. The sum is not computed in FP64, because that would copy d.
    finite = d.sum().isfinite().long()
    *bits, unchanged, finite = torch.stack([*sums, unchanged, finite]).tolist()
    same = [number for number, written in zip(ran, bits, strict=True) if written == bits[0]]
    return same, bool(finite) and bits[0] not in (0, unchanged)


def fastest(times: Sequence[Sequence[float]]) -> int:
    """Return the index of the algorithm with the smallest median time.

    `times` are the measured times of each algorithm. Return 0 if no algorithm is faster than the
    first one by the share _LEAST_GAIN.
    """
    medians = [statistics.median(milliseconds) for milliseconds in times]
    best = medians.index(min(medians))
    return best if medians[best] < (1 - _LEAST_GAIN) * medians[0] else 0


def _times(launches: Sequence[Callable[[], int]]) -> list[list[float]]:
    """Return the times of each launch in all rounds, in milliseconds.

    Every second round runs the launches in reverse order, because the GPU's clock rate changes
    during the measurement.
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
# Tensors must begin at an address that is a multiple of this number of bytes. cublasLt's heuristic
# assumes this alignment by default.
ALIGNMENT = 256
# Values of cudaDataType.
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
# A value of cublasComputeType_t, and the cudaDataType of alpha and beta.
_COMPUTE_32F, _SCALE_32F = 68, 0
# Values of cublasLtMatmulDescAttributes_t.
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B = 3, 4
_DESC_EPILOGUE, _DESC_BIAS = 7, 8
_DESC_SCALE_A, _DESC_SCALE_B = 17, 18
_DESC_FAST_ACCUMULATION = 25
_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 31, 32
# A value of cublasLtEpilogue_t: add a bias, which has the type of D.
_EPILOGUE_BIAS = 4
# Values of cublasLtMatmulMatrixScale_t. The last two exist since CUDA 12.9.
# _TENSOR: one scale per tensor.
# _VECTORS: one scale for 1 x 128 values. An operand with r rows has FP32 scales [k / 128, r].
# _SQUARES: one scale for 128 x 128 values. The scales are [r / 128, k / 128]. A row of scales is
# padded to a multiple of 4 scales.
# cublasLt cannot multiply two operands that both have scales for squares.
_TENSOR, _VECTORS, _SQUARES = 0, 4, 5
# A value of cublasLtMatmulPreferenceAttributes_t.
_PREFERENCE_WORKSPACE_BYTES = 1
# Pointers to the possible values of alpha and beta. cublasLtMatmul reads them before it returns.
_FACTORS = {number: byref(c_float(number)) for number in (0.0, 1.0)}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: an algorithm for a kind of product. The 64 bytes may be copied."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm that the heuristic lists."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


# Map each function of cublasLt to the types of its arguments. Every function except the first one
# returns a cublasStatus_t. Handles, descriptors and device pointers are void *. A pointer to a
# value is followed by the number of bytes of the value.
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtGetVersion": [],
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    # Arguments: handle, operation, layouts of A, B, C and D, preference, maximum number of results,
    # results, number of results.
    "cublasLtMatmulAlgoGetHeuristic": [
        *[c_void_p] * 7,
        c_int,
        POINTER(HeuristicResult),
        POINTER(c_int),
    ],
    # Arguments: handle, operation, alpha, A, layout of A, B, layout of B, beta, C, layout of C, D,
    # layout of D, algorithm, workspace, bytes of the workspace, stream.
    "cublasLtMatmul": [*[c_void_p] * 12, POINTER(Algorithm), c_void_p, c_size_t, c_void_p],
}


class CublasLtError(RuntimeError):
    """Exception for a call of cublasLt that returned an error status."""


class Matmul:
    """cublasLt's descriptors of a kind of product. Sums and scales are computed in FP32.

    c and d have the same layout. The tensors passed to the methods must be contiguous, must have
    the sizes and types of the Problem, and must be on one device. The descriptors are not freed
    before the process ends. They take a few hundred bytes.
    """

    def __init__(self, products: Products, problem: Problem) -> None:
        m, n, k = problem[:3]
        transposed = problem.transposed
        self._products = products
        self._operation = products.create("MatmulDesc", _COMPUTE_32F, _SCALE_32F)
        # Values of cublasOperation_t: 0 for not transposed, 1 for transposed.
        self._set(_DESC_TRANSPOSE_A, c_int32(transposed[0]))
        self._set(_DESC_TRANSPOSE_B, c_int32(transposed[1]))
        if problem.fast_accumulation:
            self._set(_DESC_FAST_ACCUMULATION, c_int8(1))
        if problem.biased:
            self._set(_DESC_EPILOGUE, c_int32(_EPILOGUE_BIAS))
        for attribute, mode in zip(
            (_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B), problem.modes, strict=True
        ):
            # _TENSOR is the default, so it need not be set. Libraries before CUDA 12.9 do not have
            # this attribute.
            if mode != _TENSOR:
                self._set(attribute, c_int32(mode))
        shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
        # The last argument of a layout is the distance between columns.
        layouts = [
            products.create("MatrixLayout", _TYPES[dtype], rows, columns, rows)
            for (rows, columns), dtype in zip(shapes, problem.types, strict=True)
        ]
        self._layouts = (*layouts, layouts[-1])  # the layouts of A, B, C and D

    def _set(self, attribute: int, value: Any) -> None:
        self._products.set_value("MatmulDesc", self._operation, attribute, value)

    def set_pointers(self, a: Factor, b: Factor) -> None:
        """Set the device pointers to the FP8 scales of a and b, and to the bias.

        The tensors must not be freed before the product is computed.
        """
        if a.bias is not None:
            self._set(_DESC_BIAS, c_void_p(a.bias.data_ptr()))
        for attribute, factor in ((_DESC_SCALE_A, a), (_DESC_SCALE_B, b)):
            if factor.scale is not None:
                self._set(attribute, c_void_p(factor.scale.data_ptr()))

    def named_by_heuristic(self) -> list[Algorithm]:
        """Return the algorithms that the heuristic lists. The first one has the best estimate.

        Each algorithm fits into the workspace, and needs tensors that begin at a multiple of
        ALIGNMENT bytes.
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
        """Start the product of a and b, plus bias and `added`, on the current stream.

        The result is written to d.

        Return a cublasStatus_t. If the status is not SUCCESS, no kernel was started.
        """
        self.set_pointers(a, b)
        products = self._products
        layout_a, layout_b, layout_c, layout_d = self._layouts
        c, beta = (d, 0.0) if added is None else (added, 1.0)
        factors = (_FACTORS[1.0], a.values.data_ptr(), layout_a, b.values.data_ptr(), layout_b)
        sums = (_FACTORS[beta], c.data_ptr(), layout_c, d.data_ptr(), layout_d)
        workspace = (products.workspace.data_ptr(), products.workspace.numel())
        stream = torch.cuda.current_stream().cuda_stream
        return products.library.cublasLtMatmul(
            products.handle, self._operation, *factors, *sums, algorithm, *workspace, stream
        )
