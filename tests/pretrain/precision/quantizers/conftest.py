"""Transformer Engine's own references in Python, run on a CPU, and the values that quantizers are tried on.

TE keeps plain-torch definitions of what its kernels compute, inside a package that cannot be imported without CUDA. Only base
classes are replaced: what computes is TE's code as it stands.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

PACKAGE = "transformer_engine"
NORMALS = 2_000_000


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
def all_bf16() -> Tensor:
    """Every BF16 value there is: zeros, subnormals, infinities and all NaN among them; [65536] BF16."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(scope="session")
def finite_bf16(all_bf16: Tensor) -> Tensor:
    """Two million BF16 values [rows, 1024]: every finite one, and normal ones with outliers around them."""
    normals = torch.randn(NORMALS // 1024 * 1024 + 1024, generator=torch.Generator().manual_seed(1))
    normals[::977] *= 1000
    normals[::1013] = 0
    return torch.cat([normals.bfloat16(), all_bf16.masked_fill(~all_bf16.isfinite(), 0)]).view(-1, 1024)


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[Tensor, Tensor], None]:
    """Two FP32 tensors hold the same bits, signs of zero included; all NaN count as one."""

    def check(ours: Tensor, theirs: Tensor) -> None:
        assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape
        bits = [each.contiguous().view(torch.int32) for each in (ours, theirs)]
        if torch.equal(*bits):  # one pass over all values, not eight
            return
        differ = (bits[0] != bits[1]) & ~(ours.isnan() & theirs.isnan())
        first = differ.nonzero()[:5].tolist()
        shown = [(place, ours[tuple(place)].item(), theirs[tuple(place)].item()) for place in first]
        assert not differ.any(), f"{differ.sum()} of {differ.numel()} differ; first (place, ours, theirs): {shown}"

    return check
