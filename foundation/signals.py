"""Ctrl-C, SIGTERM, a lost terminal and a scheduler's warning as a request to finish, save and exit cleanly.

A signal reaches the ranks of a training at different moments, or one rank alone: reduce `requested` over the ranks each step, so
that all leave after the same one. docs/scaling.md says how launchers pass signals on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A lost ssh, and SLURM's warning that time runs out. Whoever started us with these ignored, as nohup does with the first, wants
# them ignored.
IF_NOT_IGNORED = (signal.SIGHUP, signal.SIGUSR1)
# a terminal and a launcher may both deliver one Ctrl-C; nobody presses twice on purpose this fast
REPEAT_SECONDS = 0.5


class StopRequest:
    """Turns SIGNALS and IF_NOT_IGNORED into a flag for as long as the `with` block lasts. Enter it in the main thread.

    The first signal is announced on stderr unless `announced=False`, and a second Ctrl-C exits at once. With `passed_on`,
    neither happens: the signals are for processes that this one runs, and it takes them from `received`.
    """

    def __init__(self, *, passed_on: bool = False, announced: bool = True) -> None:
        self.requested: signal.Signals | None = None  # the first signal
        self.received: list[signal.Signals] = []
        self._passed_on, self._announced = passed_on, announced  # of several ranks one announces it
        self._interrupted_at: float | None = None

    def __enter__(self) -> StopRequest:
        wanted = [
            *SIGNALS,
            *(number for number in IF_NOT_IGNORED if signal.getsignal(number) != signal.SIG_IGN),
        ]
        self._previous = {number: signal.signal(number, self._receive) for number in wanted}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Runs between two bytecodes of the main thread, so it must neither lock nor print through buffered streams."""
        received, first = signal.Signals(number), self.requested is None
        self.received.append(received)
        self.requested = self.requested or received
        if self._passed_on:
            return
        if received == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > REPEAT_SECONDS:
                # Die by the signal itself: a shell, or make, then knows that the user broke off and stops as well.
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            self._interrupted_at = self._interrupted_at or now
        if first and self._announced:
            text = f"\n{received.name}: finishing this step, then saving; a second Ctrl-C exits at once\n"
            # the terminal may be gone, and Ctrl-C also ends the `tee` that reads from us
            with suppress(OSError):
                os.write(sys.__stderr__.fileno(), text.encode())
