"""The energy that a run's GPUs take, by the counters that their drivers keep (NVML); nothing where there is none.

NVIDIA counts millijoules since the driver was loaded, of the whole board, memory and voltage regulators among it, from Volta on
(nvmlDeviceGetTotalEnergyConsumption). The counter moves every 20 to 100 ms, so a short step's figure is coarse, and the sum over
many steps is not. Parts of a GPU (MIG) have no counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

MILLI = 1e-3


def joules_of(device: torch.device) -> Callable[[], float] | None:
    """A reading of the counter of `device`, in joules since its driver was loaded, NaN where it cannot be read any more; None
    where there is no counter, or no `nvidia-ml-py` to ask it."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By its identity: NVML's numbers know nothing of CUDA_VISIBLE_DEVICES.
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except (pynvml.NVMLError, AttributeError):  # AttributeError: of a torch that tells no identity, as on other makers' GPUs
        return None

    def read() -> float:
        try:
            return MILLI * pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        except pynvml.NVMLError:
            return math.nan

    return read


@dataclass
class EnergyMeter:
    """What all devices of a run take together between `begin` and `taken`; made by `of`, where every rank has a counter.

    Between two steps, when the device waits anyway, it costs two readings and, on several ranks, one exchange of a number.
    """

    accelerator: Accelerator
    read: Callable[[], float]
    _began: float = field(default=math.nan, init=False)

    @classmethod
    def of(cls, accelerator: Accelerator) -> EnergyMeter | None:
        """Collective."""
        read = joules_of(accelerator.device)
        able = torch.tensor([float(read is not None)], device=accelerator.device)
        return cls(accelerator, read) if bool(accelerator.gather(able).all()) else None

    def begin(self) -> None:
        self._began = self.read()

    def taken(self) -> float:
        """Joules of all ranks' devices since `begin`; NaN where a counter has failed. Collective."""
        own = self.read() - self._began
        if self.accelerator.num_processes == 1:
            return own
        return self.accelerator.reduce(torch.tensor(own, device=self.accelerator.device), reduction="sum").item()
