"""Helpers and fixtures of the GPU tests.

Tests of Triton kernels also run on a CPU, under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from pretrain.precision import transformer_engine
from pretrain.precision.quantizers import E4M3, E5M2
from pretrain.precision.quantizers.tensor import round_to_grid
from pretrain.precision.selection import support_check_on
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.conftest import on_a

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
cuda_only = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def needs(name: str) -> str:
    """Return the precision's name. Skip the test if this machine cannot run the precision."""
    precision = PRECISIONS[name]
    if precision.quantized and (reason := support_check_on("cuda")(precision)):
        pytest.skip(f"{name} {reason}")
    return name


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of `expected`, in FP64."""
    difference = float((actual.detach().double() - expected.double()).norm())
    return difference and difference / float(expected.double().norm())


class WithoutGPU(pytest.Module):
    """Test file that is skipped at once. Skipping a thousand tests one by one takes ten seconds."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(
            f"{self.path.name} needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True
        )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if INTERPRETED or torch.cuda.is_available():
        return None
    return WithoutGPU.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def transformer_engine_is_imported_first() -> None:
    """Import Transformer Engine before torch uses cuDNN, as a run does.

    If the system's cuDNN has another version than torch's, the import fails after torch has used
    its own.
    """
    with suppress(ImportError):
        transformer_engine.library()


@pytest.fixture
def te() -> ModuleType:
    """Transformer Engine. Tests that need it are skipped without it."""
    return pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")


def te_dtype(te: ModuleType, dtype: torch.dtype) -> Any:
    """Return Transformer Engine's name of an FP8 dtype."""
    return te.DType.kFloat8E4M3 if dtype == torch.float8_e4m3fn else te.DType.kFloat8E5M2


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with on_a("cuda") as accelerator:
        yield accelerator


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def inline_assembly_in_python() -> Iterator[None]:
    """Compute inline assembly in Python, because the interpreter does not support it."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl

    def computed(instructions: str, constraints: str, operands: Any, **_: Any) -> Any:
        (x,) = operands
        if "ex2.approx" in instructions:
            return tl.exp2(x)
        if "rcp.approx" in instructions:
            return 1 / x
        if "cvt.rn.bf16x2" in instructions:
            return x.to(tl.bfloat16).to(tl.float32)
        assert instructions == "mov.b32 $0, $1;"
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl, "inline_asm_elementwise", computed)
        yield


@pytest.fixture(scope="session", autouse=True)
def conversions_that_round() -> Iterator[None]:
    """Make the interpreter convert to BF16 and FP8 as the GPU does.

    The interpreter's own conversions neither round to nearest nor saturate.
    """
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    fp8 = {tl.float8e4nv: (E4M3, torch.float8_e4m3fn), tl.float8e5: (E5M2, torch.float8_e5m2)}

    def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return values.view(np.uint16).astype(np.uint32) << 16
        if source != tl.float32 or target not in (*fp8, tl.bfloat16):
            return original(values, source, target, mode)
        x = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        if target == tl.bfloat16:
            return x.bfloat16().view(torch.int16).numpy().view(np.uint16)
        grid, dtype = fp8[target]
        return round_to_grid(x, grid).to(dtype).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield
