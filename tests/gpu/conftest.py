"""What GPU tests share; most of it for those of Triton kernels on a CPU, under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.precision.quantizers import E4M3, E5M2
from pretrain.precision.quantizers.tensor import round_to_grid
from tests.gpu.interpreted import INTERPRETED


class WithoutGPU(pytest.Module):
    """A file that is skipped as a whole: to skip a thousand tests one by one took ten seconds of a core."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"{self.path.name} needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if INTERPRETED or torch.cuda.is_available() else WithoutGPU.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def transformer_engine_is_imported_first() -> None:
    """As in a run. Where the system has a cuDNN of another version than torch's, it cannot be once torch has used its own."""
    with suppress(ImportError):
        importlib.import_module("transformer_engine.pytorch")


@pytest.fixture(scope="session", autouse=True)
def interpreter_without_detours() -> Iterator[None]:
    """What the interpreter does again and again to the same end: half of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_lang, patched, languages = interpreter._patch_lang, set(), {}

    def patch_once(function: Any) -> Any:
        """Theirs, once a launch and not at every call of a function within the kernel: it replaces all of Triton's language."""
        there = function.__globals__
        if id(there) not in languages:
            languages[id(there)] = {name for name, language in (("tl", tl), ("core", tl.core)) if language in modules_of(there)}
        if languages[id(there)] <= patched:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())  # a launch calls it at its end, a function within it never
        patched.update(languages[id(there)])
        return scope

    def check_overflow(semantic: TritonSemantic, a: Any, b: Any, operation: Any) -> None:
        """Theirs, with two operations of NumPy in place of a dozen of the interpreter's."""
        kind = a.type.scalar
        if kind.int_bitwidth < 64 and semantic.builder.options.sanitize_overflow:
            compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
            exact = compute(a.handle.data, b.handle.data, dtype=np.int64)
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"int{kind.int_bitwidth} overflow in {operation.__name__}"

    dtype_of = interpreter._get_np_dtype
    of_scalars = functools.cache(dtype_of)  # theirs makes a table of all dtypes at each call

    def numpys(dtype: Any) -> np.dtype:
        return dtype_of(dtype) if isinstance(dtype.scalar, tl.pointer_type) else of_scalars(dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", numpys)
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)
        yield


def modules_of(names: dict[str, Any]) -> list[ModuleType]:
    return [value for value in names.values() if isinstance(value, ModuleType)]


@pytest.fixture(scope="module")
def conversions_that_round() -> Iterator[None]:
    """The interpreter's conversions to BF16 and FP8 do not round to nearest, nor saturate; these do, as the GPU's."""
    if os.environ.get("TRITON_INTERPRET") != "1":
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

    interpreter._convert_float = convert
    yield
    interpreter._convert_float = theirs
