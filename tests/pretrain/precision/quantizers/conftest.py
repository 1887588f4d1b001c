"""Transformer Engine's own references in Python, run on a CPU, and the values that quantizers are tried on.

TE keeps plain-torch definitions of what its kernels compute, inside a package that cannot be imported without CUDA: what computes
is TE's code as it stands (tests/te_on_a_cpu.py).
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
    """TE's module `pytorch/custom_recipes/<name>.py`, such as reference_nvfp4."""

    def load(name: str) -> ModuleType:
        with transformer_engine_on_a_cpu(references):
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
    return torch.cat([normals.bfloat16(), all_bf16.masked_fill(~all_bf16.isfinite(), 0)]).view(
        -1, 1024
    )


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
        assert not differ.any(), (
            f"{differ.sum()} of {differ.numel()} differ; first (place, ours, theirs): {shown}"
        )

    return check
