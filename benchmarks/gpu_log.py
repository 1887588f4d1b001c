"""Clock and power of the GPU while something is measured, as nvidia-smi reads them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import torch


@dataclass
class GpuLog:
    """When, SM clock in MHz and power in W, five times a second; empty where there is no nvidia-smi."""

    samples: list[tuple[datetime, float, float]] = field(default_factory=list)

    def read(self, lines: Iterable[str]) -> None:
        for text in lines:
            when, *numbers = text.split(",")
            try:
                clock, power = (float(number) for number in numbers)
                self.samples.append((datetime.strptime(when.strip(), "%Y/%m/%d %H:%M:%S.%f"), clock, power))
            except ValueError:  # a message, or "[N/A]"
                continue

    def between(self, begin: datetime, end: datetime) -> dict[str, float]:
        """Medians in this time, by this machine's local clock; nothing if nothing was read."""
        found = [sample for sample in self.samples if begin <= sample[0] <= end]
        if not found:
            return {}
        return {"sm_clock_mhz": statistics.median(s[1] for s in found), "power_w": statistics.median(s[2] for s in found)}


@contextmanager
def gpu_log() -> Iterator[GpuLog]:
    """Reads in the background, of the device that torch uses; complete when the context ends."""
    log, program = GpuLog(), shutil.which("nvidia-smi")
    if program is None:
        yield log
        return
    device = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["--query-gpu=timestamp,clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with subprocess.Popen([program, device, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        reader = threading.Thread(target=log.read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield log
        finally:
            process.terminate()
            reader.join(timeout=5)
