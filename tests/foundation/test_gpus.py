"""The GPUs of a machine, as NVIDIA's management library or the driver of CUDA reports them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from foundation.gpus import used_memory, visible_gpus

USED = {0: 1, 1: 2, "GPU-3f5c": 3}
HERE = pynvml.NVML_SUCCESS
MISSING = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND


@pytest.mark.parametrize(
    ("nvml", "driver", "variable", "names", "used"),
    [
        (HERE, 0, None, ["0", "1"], [1, 2]),
        (HERE, 0, "1", ["1"], [2]),
        (HERE, 0, " GPU-3f5c ", ["GPU-3f5c"], [3]),
        (HERE, 0, "-1", [], []),
        (HERE, 0, "0,7", ["0", "7"], []),
        # A container has no NVML. A machine without a GPU has no driver, or one without a device.
        (MISSING, 0, None, ["0", "1"], []),
        (MISSING, 0, "-1", [], []),
        (MISSING, None, None, [], []),
        (MISSING, 100, None, [], []),
    ],
)
def test_visible_gpus_and_their_used_memory_are_reported(
    nvml: int, driver: int | None, variable: str | None, names: list, used: list, monkeypatch
) -> None:
    """NVML and the driver are those of a machine with two GPUs. `driver` is its status."""

    def init() -> None:
        if nvml != HERE:
            raise pynvml.NVMLError(nvml)

    def handle(name: int | str) -> int | str:
        init()
        if name not in USED:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return name

    def count(number: Any) -> int | None:
        number._obj.value = 0 if driver else 2
        return driver

    def load(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(name)
        return SimpleNamespace(cuInit=lambda flags: driver, cuDeviceGetCount=count)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    for name in ("Index", "UUID"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGetHandleBy{name}", handle)
    memory = lambda name, version: SimpleNamespace(used=USED[name] << 30)  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert (visible_gpus(), used_memory()) == (names, used)
