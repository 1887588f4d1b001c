"""Ask NVIDIA's management library (NVML) about the GPUs of this machine.

NVML answers in milliseconds. Unlike CUDA, it allocates no memory on a GPU, and a process that has
used it can still be forked. Some containers have GPUs without NVML. There, CUDA counts the GPUs.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import pynvml


def visible_gpus() -> list[str]:
    """Return the index or the UUID of each GPU that processes of this environment can use.

    CUDA_VISIBLE_DEVICES limits the GPUs. Return no GPU if the machine has no NVIDIA driver.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        count = _count_by_cuda()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(map(str, range(count)))
    names = map(str.strip, visible.split(","))
    # The number -1 is no GPU.
    return [name for name in names if name not in ("", "-1")][:count]


def used_memory() -> list[float]:
    """Return the used memory of each visible GPU in GiB, without the memory of the driver.

    Return an empty list if NVML does not know the memory of a GPU.
    """
    with suppress(pynvml.NVMLError):
        return [
            pynvml.nvmlDeviceGetMemoryInfo(_handle(name), version=pynvml.nvmlMemory_v2).used / 2**30
            for name in visible_gpus()
        ]
    return []


def _count_by_cuda() -> int:
    """Return the number of visible GPUs that CUDA's driver reports, 0 if there is no driver."""
    count = ctypes.c_int()
    with suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuInit(0)
        # If `cuInit` has failed, this call fails too, and `count` stays 0.
        cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _handle(name: str) -> pynvml.c_nvmlDevice_t:
    """Return NVML's handle of the GPU with an index or a UUID."""
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
