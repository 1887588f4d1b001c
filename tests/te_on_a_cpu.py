"""Transformer Engine without a GPU: its own Python, on kernels of ours that quantize and multiply as the emulation does.

Its recipes, modules, quantizers, quantized tensors and `general_gemm` are the published package's, as they stand. In place of the
compiled extension, `_Extension` does what a B200's kernels do: of each operand it writes the directions that its quantizer asks
for, along which blocks lie, and a product reads the direction that its layout names. Values stand in the place of codes, scales
of blocks in them; so a direction that nobody wrote, or that was given up, ends in an error, and a wrong one in wrong numbers.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from foundation.overrides import overridden
from pretrain.model.fused import formulas
from pretrain.precision.emulation import Operand, multiply
from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized
from pretrain.precision.quantizers.blocks import hadamard, quantize_mx, quantize_nvfp4

PACKAGE = "transformer_engine"
# Parts whose __init__ would load what needs a GPU or other packages; of the library's modules these are imported one by one.
EXPORT = ".pytorch.export"  # wants a package that is not there
HOLLOW = (
    "",
    ".common",
    ".pytorch",
    ".pytorch.cpp_extensions",
    ".pytorch.module",
    ".pytorch.triton",
)
B200 = SimpleNamespace(major=10, minor=0, multi_processor_count=1)


class _Members(type):
    """An enumeration of the extension that nothing here asks for: any member is a number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return hash(name)


class _Extension(ModuleType):
    """transformer_engine_torch."""

    DType = enum.IntEnum(
        "DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
    )
    FP8FwdTensors = enum.IntEnum(
        "FP8FwdTensors",
        [f"GEMM{number}_{kind}" for number in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
        start=0,
    )
    FP8BwdTensors = enum.IntEnum(
        "FP8BwdTensors",
        [f"{kind}{number}" for number in (1, 2, 3) for kind in ("GRAD_OUTPUT", "GRAD_INPUT")],
        start=0,
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # a class, or a function that nothing here calls
        return _Members(name, (), {}) if name[0].isupper() else None

    def quantize(self, x: Tensor, quantizer: Any) -> Any:
        """x [rows, features] in what the quantizer's usages say. MXFP8 holds both directions as x lies, NVFP4 the transpose, and
        the tensor's scale in the place of its amax."""
        assert x.is_contiguous() and x.dtype == torch.bfloat16
        fp4, parts = hasattr(quantizer, "with_rht"), {}
        for way, wanted in (
            ("rowwise", quantizer.rowwise_usage),
            ("columnwise", quantizer.columnwise_usage),
        ):
            values = scale = None
            if wanted:
                rows = x if way == "rowwise" else x.t()
                quantized = (
                    self._quantize_fp4(rows, quantizer, way)
                    if fp4
                    else quantize_mx(rows, self._grid(quantizer))
                )
                values = quantized.operand if way == "rowwise" or fp4 else quantized.operand.t()
                scale = quantized.tensor_scale
            parts |= {f"{way}_data": values, f"{way}_scale_inv": values} | (
                {f"amax_{way}": scale} if fp4 else {}
            )
        metadata = quantizer.storage_metadata(torch.bfloat16)
        return metadata["cls"](**parts, **metadata["nontensor_kwargs"])

    def _grid(self, quantizer: Any) -> Grid:
        return E4M3 if quantizer.dtype == self.DType.kFloat8E4M3 else E5M2

    def _quantize_fp4(self, rows: Tensor, quantizer: Any, way: str) -> Quantized:
        rows = hadamard(rows) if way == "columnwise" and quantizer.with_rht else rows
        uniform = (
            torch.rand_like(rows, dtype=torch.float32) if quantizer.stochastic_rounding else None
        )
        return quantize_nvfp4(rows, two_dimensional=quantizer.with_2d_quantization, uniform=uniform)

    def generic_gemm(
        self,
        a: Any,
        transa: bool,
        b: Any,
        transb: bool,
        out: Any,
        _: Any,
        dtype: Any,
        bias: Any,
        *rest: Any,
        **options: Any,
    ) -> tuple[Any, ...]:
        """b a^T, as cuBLAS counts: `a` is read by rows where `transa`, `b` where not `transb`."""
        accumulate = rest[-2]
        left, right = _along_the_sum(b, rowwise=not transb), _along_the_sum(a, rowwise=transa)
        wanted = torch.bfloat16 if int(dtype) == self.DType.kBFloat16 else torch.float32
        # who looks on sees the library's product, and not torch's in its place
        with _disable_current_modes():
            result = multiply(left, right, wanted, bias)
        if out is not None:
            result = out.add_(result) if accumulate else out.copy_(result)
        return result, None, None, None

    def rmsnorm_fwd(
        self, x: Tensor, weight: Tensor, eps: float, _: None, quantizer: Any, *rest: Any
    ) -> tuple[Any, None, Tensor]:
        y, rstd = formulas.rms_norm(x, weight, eps)
        return (y if quantizer is None else self.quantize(y, quantizer)), None, rstd

    def rmsnorm_bwd_add(
        self, dy: Tensor, x: Tensor, residual: Tensor, rstd: Tensor, weight: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor]:
        dx, of_weight = formulas.rms_norm_backward(dy, x, rstd, weight, residual)
        return dx, of_weight.to(weight.dtype)

    def swiglu(self, hidden: Tensor, quantizer: Any) -> Any:
        y = formulas.swiglu(hidden)
        return y if quantizer is None else self.quantize(y, quantizer)

    def dswiglu(self, dy: Tensor, hidden: Tensor, quantizer: Any) -> Any:
        d_hidden, _ = formulas.swiglu_backward(dy, hidden)
        return d_hidden if quantizer is None else self.quantize(d_hidden, quantizer)


def _along_the_sum(operand: Any, *, rowwise: bool) -> Operand:
    """The values of a GEMM's operand, the axis of its sum last."""
    if isinstance(operand, Tensor):
        return Operand(operand.float() if rowwise else operand.float().t(), None)
    way = "rowwise" if rowwise else "columnwise"
    values = getattr(operand, f"_{way}_data")
    assert values is not None, (
        f"a product reads an operand {way}, which was not written or was given up"
    )
    fp4 = hasattr(operand, "_amax_rowwise")
    return Operand(
        values if rowwise or fp4 else values.t(), getattr(operand, f"_amax_{way}") if fp4 else None
    )


class _OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU, for the library's own check."""

    is_cuda = True


@contextmanager
def transformer_engine_on_a_cpu(references: Path) -> Iterator[None]:
    """While entered, `transformer_engine.pytorch` can be imported, and thinks that it is on a B200."""
    before = _taken_away()
    cuda = {"is_available": lambda: True, "current_device": lambda: "cpu", "device": nullcontext}
    cuda |= {
        "get_device_capability": lambda *_: (B200.major, B200.minor),
        "get_device_properties": lambda *_: B200,
    }
    try:
        with overridden(torch.cuda, **cuda):
            _import(references)
            yield
    finally:
        _taken_away()
        sys.modules.update(before)


def _taken_away() -> dict[str, ModuleType]:
    return {
        name: sys.modules.pop(name)
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]
    }


def _import(references: Path) -> None:
    hollow = {name: ModuleType(f"{PACKAGE}{name}") for name in (*HOLLOW, EXPORT)}
    for module in hollow.values():
        module.__path__ = [str(references.joinpath(*module.__name__.split(".")))]
        sys.modules[module.__name__] = module
    sys.modules["transformer_engine_torch"] = _Extension("transformer_engine_torch")
    hollow[".common"].decode_cudnn_version = lambda version: (9, 0, 0)
    hollow[EXPORT].is_in_onnx_export_mode, hollow[EXPORT].assert_warmed_up = (
        (lambda: False),
        (lambda module: None),
    )

    def part(name: str) -> ModuleType:
        return importlib.import_module(f"{PACKAGE}.pytorch.{name}")

    def give(module: ModuleType, *parts: ModuleType) -> None:
        vars(module).update(
            {
                name: value
                for each in parts
                for name, value in vars(each).items()
                if not name.startswith("__")
            }
        )

    te, extensions = hollow[".pytorch"], hollow[".pytorch.cpp_extensions"]
    # first, as the library's modules import each other
    give(te, part("tensor"), part("quantized_tensor"))
    gemm = part("cpp_extensions.gemm")
    gemm.get_cublas_workspace = lambda *_: torch.empty(0)
    give(extensions, gemm)
    te.Linear, te.quantization, te.distributed = (
        part("module.linear").Linear,
        part("quantization"),
        part("distributed"),
    )
    te.autocast, te.DType, te.cpp_extensions = (
        te.quantization.autocast,
        part("constants").DType,
        extensions,
    )
    prepare = te.Linear.prepare_forward
    te.Linear.prepare_forward = lambda self, x, **options: prepare(
        self, x.as_subclass(_OnGPU), **options
    )
