"""What a figure was measured on, where Python's own answer is too coarse."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The processor's model; on Linux, `platform.processor()` names its architecture only."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
