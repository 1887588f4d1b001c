"""What GPU tests share; most of it for those of Triton kernels on a CPU, under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from pretrain.precision.quantizers import E4M3, E5M2
from pretrain.precision.quantizers.tensor import round_to_grid
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import precision_called
from tests.pretrain.conftest import on_a

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# of an exact result: BF16 keeps 8 bits and rounds, the interpreter cuts off
ROUNDED = 2**-7 if INTERPRETED else 2**-8
cuda_only = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def needs(name: str) -> str:
    """`name` of a precision, or the test is skipped where this machine cannot run it."""
    precision = precision_called(name)
    if precision.quantized and (missing := missing_on("cuda")(precision)):
        pytest.skip(f"{name} {missing}")
    return name


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """By norms, in FP64. Zero of two tensors that are wholly zero."""
    difference = float((actual.detach().double() - expected.double()).norm())
    return difference and difference / float(expected.double().norm())


class WithoutGPU(pytest.Module):
    """A file that is skipped as a whole: to skip a thousand tests one by one took ten seconds of a core."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(
            f"{self.path.name} needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True
        )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return (
        None
        if INTERPRETED or torch.cuda.is_available()
        else WithoutGPU.from_parent(parent, path=module_path)
    )


@pytest.fixture(scope="session", autouse=True)
def transformer_engine_is_imported_first() -> None:
    """As in a run. Where the system has a cuDNN of another version than torch's, it cannot be once torch has used its own."""
    with suppress(ImportError):
        importlib.import_module("transformer_engine.pytorch")


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with on_a("cuda") as accelerator:
        yield accelerator


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def conversions_that_round() -> Iterator[None]:
    """The interpreter's conversions to BF16 and FP8 do not round to nearest, nor saturate; these do, as the GPU's."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    theirs = interpreter._convert_float
    fp8 = {tl.float8e4nv: (E4M3, torch.float8_e4m3fn), tl.float8e5: (E5M2, torch.float8_e5m2)}

    def convert(values: np.ndarray, of: tl.dtype, to: tl.dtype, mode: Any) -> np.ndarray:
        if (of, to) == (tl.bfloat16, tl.float32):
            return values.view(np.uint16).astype(np.uint32) << 16
        if of != tl.float32 or to not in (*fp8, tl.bfloat16):
            return theirs(values, of, to, mode)
        x = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        if to == tl.bfloat16:
            return x.bfloat16().view(torch.int16).numpy().view(np.uint16)
        grid, dtype = fp8[to]
        return round_to_grid(x, grid).to(dtype).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield
