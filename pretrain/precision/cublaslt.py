"""NVIDIA's cublasLt, called directly: every algorithm that its heuristic names for a product, where libraries take the first.

Names are cublasLt's: D = A B + beta C, columns first. In torch's terms, rows first: d [n, m] = b [n, k] a [m, k]^T + beta c. In
memory `a` is [m, k] if it is called transposed and [k, m] if not, and `b` is [k, n] if it is called transposed and [n, k] if not.
FP8 products before Blackwell take `a` transposed and `b` not.

Source of the signatures and numbers: cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0; they are the same in CUDA 12, to
which 12.9 added scales for blocks.
"""

from __future__ import annotations

import ctypes
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
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUCCESS = 0
ALIGNMENT = 256  # bytes, what the heuristic supposes of a tensor where it is not told
SCALE_ALIGNMENT = 16  # bytes
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType
_COMPUTE_32F, _SCALE_32F = 68, 0  # cublasComputeType_t, and cudaDataType of alpha and beta
_TRANSPOSE = {False: 0, True: 1}  # cublasOperation_t

# cublasLtMatmulDescAttributes_t
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B, _DESC_SCALE_A, _DESC_SCALE_B, _DESC_FAST_ACCUMULATION = 3, 4, 17, 18, 25
_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 31, 32
_PREFERENCE_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
_FACTORS = {number: byref(c_float(number)) for number in (0.0, 1.0)}  # alpha and beta, read by the call itself


class ScaleEach(IntEnum):
    """What of an FP8 operand has a scale of its own: cublasLtMatmulMatrixScale_t. `r` are the rows, m of a and n of b."""

    TENSOR = 0  # all of it: FP32 [1]
    VECTOR = 4  # 128 values along k: FP32 [k / 128, r]
    SQUARE = 5  # 128 x 128 values: FP32 [r / 128, k / 128], rows of scales padded to a multiple of 4; not of a and b both


class OpaqueAlgorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: one way to compute one product, 64 bytes that may be copied and kept."""

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
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, *_VALUE],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p, c_void_p, *_LAYOUTS, c_void_p, c_int, POINTER(HeuristicResult), POINTER(c_int)],
    "cublasLtMatmul": [
        *(c_void_p, c_void_p),  # handle, operation
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # alpha, A and its layout, B and its layout
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # beta, C and its layout, D and its layout
        *(POINTER(OpaqueAlgorithm), c_void_p, c_size_t, c_void_p),  # algorithm, workspace and its bytes, stream
    ],
}


class CublasLtError(RuntimeError):
    """A call that had to succeed did not."""


class CublasLt:
    """The library that torch has loaded: another could differ in version and in choices."""

    def __init__(self) -> None:
        self.path = loaded_library()
        self._library = ctypes.CDLL(self.path)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = c_int, arguments
        self.multiply = self._library.cublasLtMatmul

    @cached_property
    def handle(self) -> c_void_p:
        """cublasLt's handle on the current device, whose context must exist."""
        handle = c_void_p()
        self.require("cublasLtCreate", byref(handle))
        return handle

    def require(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CublasLtError(f"{name} of {self.path} returned status {status}")

    def matmul(
        self,
        sizes: tuple[int, int, int],
        types: tuple[torch.dtype, torch.dtype, torch.dtype],
        transposed: tuple[bool, bool],
        *,
        fast_accumulation: bool = False,
        scales: tuple[ScaleEach, ScaleEach] = (ScaleEach.TENSOR, ScaleEach.TENSOR),
    ) -> Matmul:
        """The product of `sizes` (m, n, k), of a and b into d with these `types`, c like d; accumulated and scaled in FP32. With
        other `scales` of a and b than one a tensor, no accumulation is fast.

        What describes it to cublasLt is some hundred bytes, which stay until the process ends.
        """
        m, n, k = sizes
        shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
        operation = self._make("MatmulDesc", _COMPUTE_32F, _SCALE_32F)
        self.set_value("MatmulDesc", operation, _DESC_TRANSPOSE_A, c_int32(_TRANSPOSE[transposed[0]]))
        self.set_value("MatmulDesc", operation, _DESC_TRANSPOSE_B, c_int32(_TRANSPOSE[transposed[1]]))
        if fast_accumulation:
            self.set_value("MatmulDesc", operation, _DESC_FAST_ACCUMULATION, c_int8(1))
        for attribute, each in zip((_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B), scales, strict=True):
            if each is not ScaleEach.TENSOR:  # as libraries before CUDA 12.9 have it, and say nothing of
                self.set_value("MatmulDesc", operation, attribute, c_int32(each))
        layouts = [
            self._make("MatrixLayout", _TYPES[dtype], rows, columns, rows)
            for (rows, columns), dtype in zip(shapes, types, strict=True)
        ]
        return Matmul(self, operation, (*layouts, layouts[-1]), self._make("MatmulPreference"))

    def _make(self, kind: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self.require(f"cublasLt{kind}Create", byref(made), *arguments)
        return made

    def set_value(self, kind: str, where: c_void_p, attribute: int, value: Any) -> None:
        self.require(f"cublasLt{kind}SetAttribute", where, attribute, byref(value), sizeof(value))


@dataclass
class Matmul:
    """A product as cublasLt describes it. Its tensors are the caller's: contiguous, of these sizes and types, on one device."""

    library: CublasLt
    operation: c_void_p
    layouts: tuple[c_void_p, ...]  # of A, B, C and D
    preference: c_void_p
    _scales: tuple[int, ...] = field(default=(), init=False)  # where they are, as cublasLt was last told

    def set_scales(self, *scales: Tensor) -> None:
        """Sets, for FP8, the FP32 numbers on the device that the codes of a and of b are multiplied by, shaped as `ScaleEach`
        says; blocks' begin at a multiple of SCALE_ALIGNMENT bytes. They must be where they are until the products of these scales
        are done."""
        places = tuple(scale.data_ptr() for scale in scales)
        if places == self._scales:
            return
        for attribute, place in zip((_DESC_SCALE_A, _DESC_SCALE_B), places, strict=True):
            self.library.set_value("MatmulDesc", self.operation, attribute, c_void_p(place))
        self._scales = places

    def named_by_heuristic(self, count: int, workspace: int) -> list[OpaqueAlgorithm]:
        """Returns up to `count` algorithms that need no more than `workspace` bytes, the fastest by cublasLt's estimate first.
        They take tensors that begin at a multiple of ALIGNMENT bytes."""
        self.library.set_value("MatmulPreference", self.preference, _PREFERENCE_WORKSPACE_BYTES, c_uint64(workspace))
        results, found = (HeuristicResult * count)(), c_int()
        problem = (self.library.handle, self.operation, *self.layouts, self.preference)
        self.library.require("cublasLtMatmulAlgoGetHeuristic", *problem, count, results, byref(found))
        return [
            OpaqueAlgorithm.from_buffer_copy(result.algorithm) for result in results[: found.value] if result.state == SUCCESS
        ]

    def run(
        self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, beta: float, algorithm: OpaqueAlgorithm, workspace: Tensor, stream: int
    ) -> int:
        """d = a b + beta c on `stream`, beta being 0 or 1; a cublasStatus_t, other than 0 where nothing was started."""
        layout_a, layout_b, layout_c, layout_d = self.layouts
        return self.library.multiply(
            *(self.library.handle, self.operation),
            *(_FACTORS[1.0], a.data_ptr(), layout_a, b.data_ptr(), layout_b),
            *(_FACTORS[beta], c.data_ptr(), layout_c, d.data_ptr(), layout_d),
            *(algorithm, workspace.data_ptr(), workspace.numel(), stream),
        )


def loaded_library() -> str:
    """The file of the libcublasLt that this process has mapped; CublasLtError if it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcublasLt.so"):
            return path
    raise CublasLtError("libcublasLt is not loaded: this torch was built without CUDA, or has run no product yet")
