"""The GPUs of a machine, as NVIDIA's management library reports them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from foundation.gpus import used_memory, visible_gpus

USED = {0: 1, 1: 2, "GPU-3f5c": 3}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the answers of NVML by those of a machine with two GPUs."""

    def handle(name: int | str) -> int | str:
        if name not in USED:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return name

    def memory(name: int | str, version: int) -> SimpleNamespace:
        return SimpleNamespace(used=USED[name] << 30)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)


@pytest.mark.parametrize(
    ("variable", "names", "used"),
    [
        (None, ["0", "1"], [1, 2]),
        ("1", ["1"], [2]),
        (" GPU-3f5c ", ["GPU-3f5c"], [3]),
        ("-1", [], []),
        ("0,7", ["0", "7"], []),
    ],
)
def test_the_used_memory_of_visible_gpus_is_reported(
    variable: str | None,
    names: list[str],
    used: list[float],
    two_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == names
    assert used_memory() == used


class Driver:
    """CUDA's driver on a machine with two GPUs."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        if self.status == 0:
            count._obj.value = 2
        return self.status


def without_nvml(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """Remove NVML, and replace the driver of CUDA. None removes the driver too."""

    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("driver", "variable", "names"),
    [
        (Driver(0), None, ["0", "1"]),
        (Driver(0), "-1", []),
        (None, None, []),
        (Driver(100), None, []),
    ],
    ids=["a container", "hidden", "no driver", "no device"],
)
def test_cuda_counts_the_gpus_of_a_machine_without_nvml(
    driver: Driver | None, variable: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_nvml(monkeypatch, driver)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == names
    assert used_memory() == []
