"""Transformer Engine's Python references on a CPU, and values for tests of quantizers.

Transformer Engine defines the results of its kernels in plain torch, in a package that cannot be
imported without CUDA. tests/te_on_a_cpu.py makes it importable and leaves the code unchanged.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.te_on_a_cpu import PACKAGE, transformer_engine_on_a_cpu

NORMALS = 2_000_000


@pytest.fixture(scope="session")
def te_reference(references: Path) -> Callable[[str], ModuleType]:
    """Return a function that imports a module of `custom_recipes`, such as reference_nvfp4."""

    def load(name: str) -> ModuleType:
        with transformer_engine_on_a_cpu(references):
            return importlib.import_module(f"{PACKAGE}.pytorch.custom_recipes.{name}")

    return load


@pytest.fixture(scope="session")
def all_bf16() -> Tensor:
    """All BF16 values [65536], including zeros, subnormals, infinities and NaNs."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(scope="session")
def finite_bf16(all_bf16: Tensor) -> Tensor:
    """Two million BF16 values [rows, 1024]: normal ones with outliers, then all finite ones."""
    normals = torch.randn(NORMALS // 1024 * 1024 + 1024, generator=torch.Generator().manual_seed(1))
    normals[::977] *= 1000
    normals[::1013] = 0
    return torch.cat([normals.bfloat16(), all_bf16.masked_fill(~all_bf16.isfinite(), 0)]).view(
        -1, 1024
    )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert that two FP32 tensors have the same bits. Signs of zeros count. All NaN are equal."""
    assert actual.dtype == expected.dtype == torch.float32 and actual.shape == expected.shape
    bits = [tensor.contiguous().view(torch.int32) for tensor in (actual, expected)]
    if torch.equal(*bits):  # one pass over all values instead of eight
        return
    differ = (bits[0] != bits[1]) & ~(actual.isnan() & expected.isnan())
    first = differ.nonzero()[:5].tolist()
    shown = [(place, actual[tuple(place)].item(), expected[tuple(place)].item()) for place in first]
    assert not differ.any(), (
        f"{differ.sum()} of {differ.numel()} differ; first (place, actual, expected): {shown}"
    )
