"""What the user waits for: each second from the start of the command to its end belongs to one part, so the parts add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from foundation.progress import Progress
from foundation.units import duration


class Waited:
    """A clock of parts, of which one runs at any time; `shown=False`, as on all processes but the main one, shows no progress.

    Parts in use: start, packs, checks, training, evaluation, saves, end. `already`: seconds that have passed, in `start`.
    """

    def __init__(self, *, shown: bool = True, already: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown
        self._clock = clock
        self._part, self._since = "start", clock() - already
        self._seconds: dict[str, float] = {}

    def go_on_to(self, part: str) -> str:
        """Counts time to `part` from now on; returns the part that it belonged to."""
        before, now = self._part, self._clock()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._part, self._since = part, now
        return before

    @contextmanager
    def on(self, part: str, task: str, unit: str = "", **progress: object) -> Iterator[Progress]:
        """Counts the time of the block to `part`, and a terminal shows how far `task` is (`foundation.progress`)."""
        before = self.go_on_to(part)
        try:
            with Progress(task, unit, self.shown, in_logs=False, **progress) as shown:
                yield shown
        finally:
            self.go_on_to(before)

    def describe(self) -> str:
        """`1 m 48 s: start 8.1 s, checks 2.3 s, ...`; what took less than a twentieth of a second is left out."""
        self.go_on_to(self._part)
        listed = ", ".join(f"{part} {duration(seconds)}" for part, seconds in self._seconds.items() if seconds >= 0.05)
        return f"{duration(sum(self._seconds.values()))}: {listed}"


def since_the_command() -> float:
    """Seconds since this process began, whose imports take long."""
    return time.time() - psutil.Process().create_time()
