"""NVIDIA's cublasLt, called directly: every algorithm that its heuristic names for a product, where libraries take the first.

Names are cublasLt's: D = A B + beta C, columns first. In torch's terms, rows first: d [n, m] = b [n, k] a [m, k]^T + beta c. In
memory `a` is [m, k] if it is called transposed and [k, m] if not, and `b` is [k, n] if it is called transposed and [n, k] if not.
FP8 products before Blackwell take `a` transposed and `b` not.

Source of the signatures and numbers: cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0; they are the same in CUDA 12.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import (
    POINTER,
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUCCESS = 0
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType
_COMPUTE_32F, _SCALE_32F = 68, 0  # cublasComputeType_t, and cudaDataType of alpha and beta
_TRANSPOSE = {False: 0, True: 1}  # cublasOperation_t

# cublasLtMatmulDescAttributes_t
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B, _DESC_SCALE_A, _DESC_SCALE_B, _DESC_FAST_ACCUMULATION = 3, 4, 17, 18, 25
_PREFERENCE_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
_CAPABILITY_TILES, _CAPABILITY_CUSTOM_OPTION_MAX, _CAPABILITY_STAGES = 6, 7, 13  # cublasLtMatmulAlgoCapAttributes_t
# cublasLtMatmulAlgoConfigAttributes_t, with the type of each.
_SETTINGS: dict[str, tuple[int, Any]] = {
    "id": (0, c_int32),
    "tile": (1, c_uint32),
    "split_k": (2, c_int32),
    "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32),
    "custom": (5, c_uint32),
    "stages": (6, c_uint32),
    "inner_shape": (7, c_uint16),
    "cluster": (8, c_uint16),
}
_CLUSTERS = range(52)  # cublasLtClusterShape_t


class OpaqueAlgorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: 64 bytes that may be copied and kept."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", OpaqueAlgorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


_VALUE = [c_void_p, c_size_t]  # where a value is, and its bytes
_LAYOUTS = [c_void_p] * 4  # of A, B, C and D
# Each returns a cublasStatus_t. Handles, descriptors and device pointers are void *.
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, *_VALUE],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, *_VALUE],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p, c_void_p, *_LAYOUTS, c_void_p, c_int, POINTER(HeuristicResult), POINTER(c_int)],
    "cublasLtMatmulAlgoCheck": [c_void_p, c_void_p, *_LAYOUTS, POINTER(OpaqueAlgorithm), POINTER(HeuristicResult)],
    "cublasLtMatmulAlgoCapGetAttribute": [POINTER(OpaqueAlgorithm), c_int, *_VALUE, POINTER(c_size_t)],
    "cublasLtMatmulAlgoConfigGetAttribute": [POINTER(OpaqueAlgorithm), c_int, *_VALUE, POINTER(c_size_t)],
    "cublasLtMatmulAlgoConfigSetAttribute": [POINTER(OpaqueAlgorithm), c_int, *_VALUE],
    "cublasLtMatmul": [
        *(c_void_p, c_void_p),  # handle, operation
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # alpha, A and its layout, B and its layout
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # beta, C and its layout, D and its layout
        *(POINTER(OpaqueAlgorithm), c_void_p, c_size_t, c_void_p),  # algorithm, workspace and its bytes, stream
    ],
}


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One way to compute one product, the bytes of workspace that it needs, and who named it."""

    opaque: OpaqueAlgorithm
    workspace: int
    source: str

    @property
    def key(self) -> bytes:
        return bytes(self.opaque)


class CublasLtError(RuntimeError):
    """A call that had to succeed did not."""


class CublasLt:
    """The library at `path`, by default the one that torch has loaded: another could differ in version and in choices."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path or loaded_library()
        self._library = ctypes.CDLL(self.path)
        self._library.cublasLtGetVersion.restype = c_size_t
        self._library.cublasLtGetVersion.argtypes = []
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = c_int, arguments

    @property
    def version(self) -> int:
        """130100 for 13.1.0."""
        return self._library.cublasLtGetVersion()

    @cached_property
    def handle(self) -> c_void_p:
        """On the current device, whose context must exist."""
        handle = c_void_p()
        self.require("cublasLtCreate", byref(handle))
        return handle

    def status(self, name: str, *arguments: Any) -> int:
        return getattr(self._library, name)(*arguments)

    def require(self, name: str, *arguments: Any) -> None:
        if status := self.status(name, *arguments):
            raise CublasLtError(f"{name} of {self.path} returned status {status}")

    def settings(self, algorithm: Algorithm) -> dict[str, int]:
        """What distinguishes it, by name, in the numbers of cublasLt.h; without what it does not tell."""
        found = {}
        for name, (attribute, kind) in _SETTINGS.items():
            value, written = kind(), c_size_t()
            place = (algorithm.opaque, attribute, byref(value), sizeof(value), byref(written))
            if self.status("cublasLtMatmulAlgoConfigGetAttribute", *place) == SUCCESS:
                found[name] = int(value.value)
        return found

    def with_setting(self, algorithm: Algorithm, name: str, number: int) -> OpaqueAlgorithm | None:
        """A copy that differs in one setting; None where the setting takes no such number."""
        attribute, kind = _SETTINGS[name]
        changed, value = OpaqueAlgorithm.from_buffer_copy(algorithm.opaque), kind(number)
        status = self.status("cublasLtMatmulAlgoConfigSetAttribute", changed, attribute, byref(value), sizeof(value))
        return changed if status == SUCCESS else None

    def numbers(self, algorithm: Algorithm) -> dict[str, list[int]]:
        """The numbers that some settings may take, as the algorithm states them."""
        most = self._capability(algorithm, _CAPABILITY_CUSTOM_OPTION_MAX, c_int32)
        return {
            "tile": self._capability(algorithm, _CAPABILITY_TILES, c_uint32),
            "stages": self._capability(algorithm, _CAPABILITY_STAGES, c_uint32),
            "custom": list(range(min(most[0], 31) + 1)) if most else [],
            "swizzle": [0, 1],
            "cluster": list(_CLUSTERS),
        }

    def _capability(self, algorithm: Algorithm, attribute: int, kind: Any) -> list[int]:
        written = c_size_t()
        get = "cublasLtMatmulAlgoCapGetAttribute"
        if self.status(get, algorithm.opaque, attribute, None, 0, byref(written)) != SUCCESS or not written.value:
            return []
        values = (kind * (written.value // sizeof(kind)))()
        status = self.status(get, algorithm.opaque, attribute, byref(values), sizeof(values), byref(written))
        return [int(value) for value in values] if status == SUCCESS else []

    @contextmanager
    def matmul(
        self,
        sizes: tuple[int, int, int],
        types: tuple[torch.dtype, torch.dtype, torch.dtype],
        transposed: tuple[bool, bool],
        scales: tuple[Tensor, Tensor] | None = None,
        *,
        fast_accumulation: bool = False,
    ) -> Iterator[Matmul]:
        """The product of `sizes` (m, n, k), of a and b into d with these `types`, c like d; accumulated and scaled in FP32.

        `scales`: for FP8, one FP32 number on the device for each of a and b, which their codes are multiplied by.
        """
        m, n, k = sizes
        shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
        with ExitStack() as stack:

            def make(kind: str, *arguments: Any) -> c_void_p:
                made = c_void_p()
                self.require(f"cublasLt{kind}Create", byref(made), *arguments)
                stack.callback(self.require, f"cublasLt{kind}Destroy", made)
                return made

            def set_value(kind: str, where: c_void_p, attribute: int, value: Any) -> None:
                self.require(f"cublasLt{kind}SetAttribute", where, attribute, byref(value), sizeof(value))

            operation = make("MatmulDesc", _COMPUTE_32F, _SCALE_32F)
            set_value("MatmulDesc", operation, _DESC_TRANSPOSE_A, c_int32(_TRANSPOSE[transposed[0]]))
            set_value("MatmulDesc", operation, _DESC_TRANSPOSE_B, c_int32(_TRANSPOSE[transposed[1]]))
            if scales is not None:
                set_value("MatmulDesc", operation, _DESC_FAST_ACCUMULATION, c_int8(fast_accumulation))
                for attribute, scale in zip((_DESC_SCALE_A, _DESC_SCALE_B), scales, strict=True):
                    set_value("MatmulDesc", operation, attribute, c_void_p(scale.data_ptr()))
            layouts = [
                make("MatrixLayout", _TYPES[dtype], rows, columns, rows)
                for (rows, columns), dtype in zip(shapes, types, strict=True)
            ]
            preference = make("MatmulPreference")
            yield Matmul(self, operation, (*layouts, layouts[-1]), preference)


@dataclass(frozen=True)
class Matmul:
    """A product as cublasLt describes it. Its tensors are the caller's: contiguous, of these sizes and types, on one device."""

    library: CublasLt
    operation: c_void_p
    layouts: tuple[c_void_p, ...]  # of A, B, C and D
    preference: c_void_p

    def named_by_heuristic(self, count: int, workspace: int) -> list[Algorithm]:
        """Up to `count` algorithms that need no more than `workspace` bytes, the fastest by cublasLt's estimate first."""
        value = c_uint64(workspace)
        place = (self.preference, _PREFERENCE_WORKSPACE_BYTES, byref(value), sizeof(value))
        self.library.require("cublasLtMatmulPreferenceSetAttribute", *place)
        results, found = (HeuristicResult * count)(), c_int()
        problem = (self.library.handle, self.operation, *self.layouts, self.preference)
        self.library.require("cublasLtMatmulAlgoGetHeuristic", *problem, count, results, byref(found))
        return [
            Algorithm(OpaqueAlgorithm.from_buffer_copy(result.algorithm), result.workspace, f"heuristic {rank}")
            for rank, result in enumerate(results[: found.value])
            if result.state == SUCCESS
        ]

    def neighbours(self, algorithm: Algorithm, workspace: int) -> list[Algorithm]:
        """Algorithms that differ from this one in one setting, and that cublasLt says it can run in `workspace` bytes."""
        found = []
        for name, numbers in self.library.numbers(algorithm).items():
            for number in numbers:
                changed, result = self.library.with_setting(algorithm, name, number), HeuristicResult()
                if changed is None or bytes(changed) == algorithm.key:
                    continue
                problem = (self.library.handle, self.operation, *self.layouts)
                status = self.library.status("cublasLtMatmulAlgoCheck", *problem, changed, byref(result))
                if status == SUCCESS and result.workspace <= workspace:
                    found.append(Algorithm(changed, result.workspace, f"{algorithm.source}, {name} {number}"))
        return found

    def run(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, beta: float, algorithm: Algorithm, workspace: Tensor) -> int:
        """d = a b + beta c on torch's current stream; a cublasStatus_t, other than 0 where nothing was started."""
        one, factor = c_float(1.0), c_float(beta)
        layout_a, layout_b, layout_c, layout_d = self.layouts
        return self.library.status(
            "cublasLtMatmul",
            *(self.library.handle, self.operation),
            *(byref(one), a.data_ptr(), layout_a, b.data_ptr(), layout_b),
            *(byref(factor), c.data_ptr(), layout_c, d.data_ptr(), layout_d),
            *(algorithm.opaque, workspace.data_ptr(), workspace.numel(), torch.cuda.current_stream().cuda_stream),
        )


def loaded_library() -> str:
    """The file of the libcublasLt that this process has mapped; CublasLtError if it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcublasLt.so"):
            return path
    raise CublasLtError("libcublasLt is not loaded: this torch was built without CUDA, or has run no product yet")
