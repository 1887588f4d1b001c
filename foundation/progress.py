"""A line on stderr that says how far a long task is, how fast it goes and when it will be done."""

from __future__ import annotations

import sys
import time

from foundation.units import duration


def say(text: str, shown: bool = True) -> None:
    """Print to stderr, where progress goes, so that stdout stays free for results."""
    if shown:
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Rewrites one line on a terminal; elsewhere (a log file, CI) prints a line every 10 seconds.

    already_done: units that an earlier run has finished; they do not count towards this run's rate.
    """

    def __init__(self, task: str, unit: str, shown: bool, already_done: int = 0) -> None:
        self.task, self.unit, self.shown = task, unit, shown
        self._on_terminal = sys.stderr.isatty()
        self._every = 0.2 if self._on_terminal else 10.0
        self._started = self._printed = time.monotonic()
        self._first_count = already_done
        self._first_share: float | None = None
        self._latest: tuple[int, float | None, str] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.shown and self._latest is not None:
            self._print(*self._latest)
            if self._on_terminal:
                print(file=sys.stderr)

    def update(self, count: int, share: float | None, detail: str = "") -> None:
        """Report `count` units done, which are `share` (0 to 1) of all, where that is known."""
        if self._first_share is None:
            self._first_share = share if self._first_count else 0.0
        self._latest = (count, share, detail)
        if self.shown and time.monotonic() - self._printed >= self._every:
            self._print(*self._latest)

    def _print(self, count: int, share: float | None, detail: str) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        rate = (count - self._first_count) / max(elapsed, 1e-9)
        parts = [f"{self.task}: {count:,} {self.unit}", detail, f"{rate:,.0f} {self.unit}/s"]
        if share is not None:
            gained = share - (self._first_share or 0.0)
            unfinished = gained > 0 and share < 1
            parts += [f"{share:.1%}", duration(elapsed * (1 - share) / gained if unfinished else elapsed)]
            parts[-1] += " left" if unfinished else " taken"
        text = ", ".join(filter(None, parts))
        start, end = ("\r\x1b[2K", "") if self._on_terminal else ("", "\n")
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
