"""The host memory that a process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# By the controller that a line of /proc/self/cgroup names (none: version 2): the files that have a group's limit and what it
# uses, and the names in memory.stat of the two parts of its cache of files.
_FILES = {
    "": ("memory.max", "memory.current", "{}_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file"),
}


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are free on this machine, or that a control group of this process leaves, where these are fewer. SLURM, Docker
    and Kubernetes limit a job so, and kill what takes more. `root`: the folder that has `proc` and `sys`."""
    return min([psutil.virtual_memory().available, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    with suppress(OSError):  # no Linux
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controller, name = line.split(":", 2)
            if controller in _FILES:
                group = Path(name.lstrip("/"))
                for each in (group, *group.parents):  # the groups around it hold it, too; a container sees the last as its own
                    yield from _left_in(root / "sys/fs/cgroup" / controller / each, *_FILES[controller])


def _left_in(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # not seen from here, or without a limit
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        given_back = sum(int(statistics[cache.format(kind)]) for kind in ("active", "inactive"))  # by the kernel, before it kills
        yield int((group / limit).read_text()) - int((group / used).read_text()) + given_back
