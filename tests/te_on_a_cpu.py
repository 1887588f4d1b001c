"""Run Transformer Engine's Python on a CPU, with kernels that compute like the emulation.

Recipes, modules, quantizers, quantized tensors and `general_gemm` are those of the published
package. `_Extension` replaces the compiled extension and does what a B200's kernels do: it writes
an operand in the directions of its quantizer's usages, and a GEMM reads the direction of its
layout. Tensors hold dequantized values instead of codes. A direction that was not written or was
freed is an error, and a wrong direction gives wrong numbers.
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
# Imports a package that is not installed.
EXPORT = ".pytorch.export"
# Packages whose __init__ needs a GPU or other packages. They stay empty, and the modules that the
# tests need are imported one by one.
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
    """Metaclass of the extension's unused enumerations. Any member is a number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return hash(name)


class _Extension(ModuleType):
    """Replacement of the compiled module `transformer_engine_torch`."""

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
        # A class, or a function that the tests do not call.
        return _Members(name, (), {}) if name[0].isupper() else None

    def quantize(self, x: Tensor, quantizer: Any) -> Any:
        """Quantize x [rows, features] in the directions of the quantizer's usages.

        MXFP8 stores both directions in the layout of x. NVFP4 stores columns transposed, and the
        scale of the tensor instead of its amax. The result of `dequantize` is stored instead of the
        scales of blocks.
        """
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        fp4 = hasattr(quantizer, "with_rht")
        parts = {}
        for direction, is_used in (
            ("rowwise", quantizer.rowwise_usage),
            ("columnwise", quantizer.columnwise_usage),
        ):
            values = scale = dequantized = None
            if is_used:
                rows = x if direction == "rowwise" else x.t()
                if fp4:
                    quantized = self._quantize_fp4(rows, quantizer, direction)
                else:
                    assert not quantizer.with_2d_quantization
                    quantized = quantize_mx(rows, self._grid(quantizer))
                values = quantized.operand
                if direction == "columnwise" and not fp4:
                    values = values.t()
                scale = quantized.tensor_scale
                dequantized = self._dequantized(rows, quantized, quantizer)
            parts |= {f"{direction}_data": values, f"{direction}_scale_inv": dequantized}
            if fp4:
                parts[f"amax_{direction}"] = scale
        metadata = quantizer.storage_metadata(torch.bfloat16)
        return metadata["cls"](**parts, **metadata["nontensor_kwargs"])

    def _grid(self, quantizer: Any) -> Grid:
        return E4M3 if quantizer.dtype == self.DType.kFloat8E4M3 else E5M2

    def _quantize_fp4(self, rows: Tensor, quantizer: Any, direction: str) -> Quantized:
        assert not quantizer.row_scaled_nvfp4
        assert not quantizer.nvfp4_use_4over6
        if direction == "columnwise" and quantizer.with_rht:
            rows = hadamard(rows)
        uniform = None
        if quantizer.stochastic_rounding:
            uniform = torch.rand_like(rows, dtype=torch.float32)
        return quantize_nvfp4(rows, two_dimensional=quantizer.with_2d_quantization, uniform=uniform)

    def _dequantized(self, rows: Tensor, quantized: Quantized, quantizer: Any) -> Tensor:
        """Return the values of `quantized` in BF16, as the library's kernels compute them."""
        if not hasattr(quantizer, "with_rht"):
            return quantized.operand.bfloat16()
        # dequantize_fp4_kernel rounds after each of these products.
        scale = quantized.block_scale * rows.abs().max().float()
        scale = scale * torch.tensor(1 / (6 * quantizer.nvfp4_e4m3_max))
        return (quantized.codes * scale).bfloat16()

    def dequantize(self, operand: Any, dtype: Any) -> Tensor:
        """Return the row-wise form of a quantized tensor in BF16."""
        assert int(dtype) == self.DType.kBFloat16
        assert operand._rowwise_data is not None
        return operand._rowwise_scale_inv

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
        """Compute b a^T. As in cuBLAS, `a` is read by rows if `transa`, and `b` if not `transb`."""
        accumulate = rest[-2]
        left = _along_the_sum(b, rowwise=not transb)
        right = _along_the_sum(a, rowwise=transa)
        out_dtype = torch.bfloat16 if int(dtype) == self.DType.kBFloat16 else torch.float32
        # Observers must see the library's GEMM and not torch's.
        with _disable_current_modes():
            result = multiply(left, right, out_dtype, bias)
        if out is not None:
            result = out.add_(result) if accumulate else out.copy_(result)
        return result, None, None, None

    def rmsnorm_fwd(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        _: None,
        quantizer: Any,
        dtype: Any,
        margin: int,
        zero_centered: bool,
    ) -> tuple[Any, None, Tensor]:
        factors = weight.float() + zero_centered
        return self.layernorm_fwd(x, factors, None, eps, None, quantizer)

    def layernorm_fwd(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        _: None,
        quantizer: Any,
        *rest: Any,
    ) -> tuple[Any, Any, Tensor]:
        y, rstd, mean = formulas.norm(x, weight, bias, eps)
        return (y if quantizer is None else self.quantize(y, quantizer)), mean, rstd

    def rmsnorm_bwd_add(
        self,
        dy: Tensor,
        x: Tensor,
        residual: Tensor,
        rstd: Tensor,
        weight: Tensor,
        margin: int,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        factors = weight.float() + zero_centered
        dx, sums = formulas.norm_backward(dy, x, rstd, None, factors, residual, summed=False)
        return dx, sums[0].to(weight.dtype)

    def swiglu(self, hidden: Tensor, quantizer: Any) -> Any:
        y = formulas.activate(hidden, gated=True)
        return y if quantizer is None else self.quantize(y, quantizer)

    def dswiglu(self, dy: Tensor, hidden: Tensor, quantizer: Any) -> Any:
        d_hidden, *_ = formulas.activate_backward(dy, hidden, gated=True, summed=False)
        return d_hidden if quantizer is None else self.quantize(d_hidden, quantizer)


def _along_the_sum(operand: Any, *, rowwise: bool) -> Operand:
    """Return the values of a GEMM's operand with the summed axis last."""
    if isinstance(operand, Tensor):
        return Operand(operand.float() if rowwise else operand.float().t(), None)
    direction = "rowwise" if rowwise else "columnwise"
    values = getattr(operand, f"_{direction}_data")
    assert values is not None, (
        f"a GEMM reads an operand {direction}, but this direction was not written or was freed"
    )
    if hasattr(operand, "_amax_rowwise"):
        return Operand(values, getattr(operand, f"_amax_{direction}"))
    return Operand(values if rowwise else values.t(), None)


class _OnGPU(torch.Tensor):
    """Tensor that claims to be on a GPU, for a check of the library."""

    is_cuda = True


@contextmanager
def transformer_engine_on_a_cpu(references: Path) -> Iterator[None]:
    """Make `transformer_engine.pytorch` importable, as if this machine had a B200."""
    before = _remove_modules()
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
        _remove_modules()
        sys.modules.update(before)


def _remove_modules() -> dict[str, ModuleType]:
    """Remove the library's modules from `sys.modules` and return them by name."""
    names = [name for name in sys.modules if name.startswith(PACKAGE)]
    return {name: sys.modules.pop(name) for name in names}


def _import(references: Path) -> None:
    """Import the library's modules from the folder `references`."""
    hollow = {name: ModuleType(f"{PACKAGE}{name}") for name in (*HOLLOW, EXPORT)}
    for module in hollow.values():
        module.__path__ = [str(references.joinpath(*module.__name__.split(".")))]
        sys.modules[module.__name__] = module
    sys.modules["transformer_engine_torch"] = _Extension("transformer_engine_torch")
    hollow[".common"].decode_cudnn_version = lambda version: (9, 0, 0)
    hollow[EXPORT].is_in_onnx_export_mode = lambda: False
    hollow[EXPORT].assert_warmed_up = lambda module: None

    def part(name: str) -> ModuleType:
        return importlib.import_module(f"{PACKAGE}.pytorch.{name}")

    def copy_names(target: ModuleType, *sources: ModuleType) -> None:
        for source in sources:
            names = {
                name: value for name, value in vars(source).items() if not name.startswith("__")
            }
            vars(target).update(names)

    te = hollow[".pytorch"]
    te.cpp_extensions = hollow[".pytorch.cpp_extensions"]
    # These come first, because the library's modules import each other.
    copy_names(te, part("tensor"), part("quantized_tensor"))
    gemm = part("cpp_extensions.gemm")
    gemm.get_cublas_workspace = lambda *_: torch.empty(0)
    copy_names(te.cpp_extensions, gemm)
    te.Linear = part("module.linear").Linear
    te.quantization = part("quantization")
    te.distributed = part("distributed")
    te.autocast = te.quantization.autocast
    te.DType = part("constants").DType
    for storage in (te.MXFP8TensorStorage, te.NVFP4TensorStorage):
        # The library would move a tensor to the GPU before it calls `dequantize`.
        storage.to = lambda self, **_: self
    prepare = te.Linear.prepare_forward
    te.Linear.prepare_forward = lambda self, x, **options: prepare(
        self, x.as_subclass(_OnGPU), **options
    )
