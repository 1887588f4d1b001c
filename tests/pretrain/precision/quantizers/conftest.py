"""Transformer Engine's own references in Python, run on a CPU, and the values that quantizers are tried on.

TE keeps plain-torch definitions of what its kernels compute, inside a package that cannot be imported without CUDA. Only base
classes are replaced: what computes is TE's code as it stands.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

PACKAGE = "transformer_engine"
NORMALS = 10_000_000


@pytest.fixture(scope="package", autouse=True)
def memory_is_kept() -> Iterator[None]:
    """Tensors of ten million values are taken from what earlier ones have left: having the system clear 40 MB anew for each of
    them took a third of the time. For glibc; elsewhere nothing changes."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    trim_threshold, most_maps = -1, -4  # as <malloc.h> numbers them
    library.mallopt(trim_threshold, 2**31 - 1)
    library.mallopt(most_maps, 0)
    yield
    library.mallopt(trim_threshold, 128 * 1024)  # glibc's own
    library.mallopt(most_maps, 65_536)
    library.malloc_trim(0)


class _Storage:
    """In place of TE's QuantizedTensorStorage."""


class _Quantizer:
    """In place of TE's Quantizer, which only keeps which directions are wanted."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@contextmanager
def _hollow_package(sources: Path) -> Iterator[None]:
    """Let TE's reference modules be imported by their names, none of them through the package's own __init__."""
    stubs = {name: ModuleType(name) for name in (PACKAGE, *(f"{PACKAGE}.{part}" for part in _PARTS))}
    for name, stub in stubs.items():
        stub.__path__ = [str(sources.joinpath(*name.split(".")[1:]))]
    base = stubs[f"{PACKAGE}.pytorch.quantized_tensor"]
    base.QuantizedTensorStorage, base.Quantizer = _Storage, _Quantizer
    stubs[f"{PACKAGE}.pytorch.tensor.utils"].is_custom = lambda value=None: isinstance(value, _Storage | _Quantizer)

    shadowed = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE}
    for name in shadowed:
        del sys.modules[name]
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(shadowed)


_PARTS = ("pytorch", "pytorch.custom_recipes", "pytorch.quantized_tensor", "pytorch.tensor", "pytorch.tensor.utils")


@pytest.fixture(scope="session")
def te_reference(references: Path) -> Callable[[str], ModuleType]:
    """TE's module `pytorch/custom_recipes/<name>.py`, such as reference_nvfp4."""

    def load(name: str) -> ModuleType:
        with _hollow_package(references / PACKAGE):
            return importlib.import_module(f"{PACKAGE}.pytorch.custom_recipes.{name}")

    return load


@pytest.fixture(scope="session")
def te_functions(references: Path) -> Callable[..., dict[str, Any]]:
    """Single functions out of a file that cannot be imported, such as pytorch/quantization.py; decorators left off."""

    def load(path: str, *names: str) -> dict[str, Any]:
        tree = ast.parse((references / PACKAGE / path).read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
        assert {node.name for node in tree.body} == set(names), f"{path} no longer defines all of {names}"
        for node in tree.body:
            node.decorator_list = []
        functions: dict[str, Any] = {"torch": torch, "Callable": Callable}
        # Compiled under this file's own `from __future__ import annotations`: no type of TE's needs to exist.
        exec(compile(tree, path, "exec"), functions)
        return functions

    return load


def _all_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(scope="session")
def all_bf16() -> Tensor:
    """Every BF16 value there is: zeros, subnormals, infinities and all NaN among them; [65536] BF16."""
    return _all_bf16()


@pytest.fixture(scope="session")
def finite_bf16() -> Tensor:
    """More than ten million BF16 values [rows, 1024]: every finite one, and normal ones with outliers around them."""
    every = _all_bf16()
    normals = torch.randn(NORMALS // 1024 * 1024 + 1024, generator=torch.Generator().manual_seed(1))
    normals[::977] *= 1000
    normals[::1013] = 0
    return torch.cat([normals.bfloat16(), every.masked_fill(~every.isfinite(), 0)]).view(-1, 1024)


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[Tensor, Tensor], None]:
    """Two FP32 tensors hold the same bits, signs of zero included; all NaN count as one."""

    def check(ours: Tensor, theirs: Tensor) -> None:
        assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape
        bits = [each.contiguous().view(torch.int32) for each in (ours, theirs)]
        if torch.equal(*bits):  # one pass over ten million values, not eight
            return
        differ = (bits[0] != bits[1]) & ~(ours.isnan() & theirs.isnan())
        first = differ.nonzero()[:5].tolist()
        shown = [(place, ours[tuple(place)].item(), theirs[tuple(place)].item()) for place in first]
        assert not differ.any(), f"{differ.sum()} of {differ.numel()} differ; first (place, ours, theirs): {shown}"

    return check
