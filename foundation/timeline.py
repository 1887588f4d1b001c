"""Measure the time of each part of a startup, from the process launch to the first training step.

A part is the code inside a `with` statement, or a decorated function:

    with START.part("packs"):
        ...

    @START.part("model")
    def build_model(): ...

Parts may be nested. The time inside a nested part counts only for the nested part, so the parts add
up to the time since the launch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

# Words of the command line of a process that starts trainings, for example `accelerate launch`.
LAUNCHERS = {"launch", "accelerate.commands.launch", "train"}


class Timeline:
    """Seconds that each part of this process has taken since its launch.

    The part "launcher" is the time that `accelerate launch` took to start this process. The part
    "imports" begins with this process, and has all time that belongs to no other part.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Measure from the launch of this process. A forked process calls this method."""
        # Map each part to its seconds. The dict is empty until `end` is called.
        self.start: dict[str, float] = {}
        self._seconds = defaultdict[str, float](float)
        # The innermost part is the last one.
        self._running = ["imports"]
        process = psutil.Process()
        self._since = process.create_time()
        # Skip the part "launcher" if the parent process cannot be read, because it may belong to
        # another user.
        with suppress(psutil.Error):
            parent = process.parent()
            if parent and not LAUNCHERS.isdisjoint(parent.cmdline()):
                self._seconds["launcher"] = self._since - parent.create_time()
        # Make the launch time of this process exact. On Linux, psutil computes this time from the
        # time of the boot, rounded down to whole seconds.
        if hasattr(time, "CLOCK_BOOTTIME"):
            booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            self._since += booted - psutil.boot_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the caller's `with` statement or function for the part `name`."""
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def end(self) -> None:
        """Store the seconds of each part, and their sum as "total", in `start`."""
        self._count()
        self.start = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        self.start["total"] = round(sum(self._seconds.values()), 3)

    def _count(self) -> None:
        """Add the time since the last call to the innermost running part."""
        now = time.time()
        self._seconds[self._running[-1]] += now - self._since
        self._since = now


# Timeline of this process.
START = Timeline()
