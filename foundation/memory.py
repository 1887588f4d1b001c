"""The host memory that a process may still take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")  # of Linux's control groups, version 2


def free_memory() -> int:
    """Bytes that are free on this machine, or that a control group of this process leaves, where these are fewer. SLURM, Docker
    and Kubernetes limit a job so, and kill what takes more."""
    free = psutil.virtual_memory().available
    with suppress(OSError):  # no Linux
        group = GROUPS / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        for folder in (group, *group.parents):  # the groups around it hold it, too; a container sees the last as its own
            with suppress(OSError, ValueError):  # without a limit
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                given_back = int(statistics["active_file"]) + int(statistics["inactive_file"])  # by the kernel, before it kills
                used = int((folder / "memory.current").read_text()) - given_back
                free = min(free, int((folder / "memory.max").read_text()) - used)
    return free
