"""What tests of Triton kernels share when they run on a CPU, under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.precision.quantizers.grid import E4M3, E5M2
from pretrain.precision.quantizers.rounding import round_to_grid


@pytest.fixture(scope="session", autouse=True)
def languages_patched_once() -> Iterator[None]:
    """At every call of a function within a kernel the interpreter looks through all of Triton's language, to replace what it has
    replaced already: a third of the time. Here once a launch."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    theirs, patched = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        languages = {name for name, language in (("tl", tl), ("core", tl.core)) if language in modules_of(function)}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = theirs(function)
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())  # a launch calls it at its end, a function within it never
        patched.update(languages)
        return scope

    interpreter._patch_lang = once
    yield
    interpreter._patch_lang = theirs


def modules_of(function: Any) -> list[ModuleType]:
    return [value for value in function.__globals__.values() if isinstance(value, ModuleType)]


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
