"""Turn Ctrl-C, SIGTERM, a lost terminal and a scheduler's warning into a request to stop.

The training loop finishes its step, saves and exits. Signals reach the ranks of a training at
different moments, or one rank alone. Reduce `StopRequest.requested` over the ranks at every step,
so that all of them stop after the same step. docs/scaling.md describes how launchers pass on
signals.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A lost ssh connection, and SLURM's warning before the time limit. They stay ignored if the parent
# process ignored them, as nohup does with SIGHUP.
IF_NOT_IGNORED = (signal.SIGHUP, signal.SIGUSR1)
# Two SIGINTs within this time are one Ctrl-C, delivered by the terminal and by the launcher.
REPEAT_SECONDS = 0.5
_STDERR = 2  # file descriptor


class StopRequest:
    """Context manager that catches SIGNALS and IF_NOT_IGNORED and records them.

    Enter it in the main thread. The first signal is announced on stderr, and a second Ctrl-C ends
    the process at once.

    Args:
        passed_on: Only record the signals, in `received`. For a process that passes the signals on
            to its children.
        announced: Announce the first signal. Set on one rank only.

    Attributes:
        requested: The first signal, or None.
        received: All signals in order.
    """

    def __init__(self, *, passed_on: bool = False, announced: bool = True) -> None:
        self.requested: signal.Signals | None = None
        self.received: list[signal.Signals] = []
        self._passed_on = passed_on
        self._announced = announced
        self._interrupted_at: float | None = None

    def __enter__(self) -> StopRequest:
        not_ignored = [
            number for number in IF_NOT_IGNORED if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._previous = {
            number: signal.signal(number, self._receive) for number in (*SIGNALS, *not_ignored)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Python calls this between two bytecodes of the main thread, so it must neither take a lock
        nor print through a buffered stream.
        """
        received = signal.Signals(number)
        is_first = self.requested is None
        self.received.append(received)
        self.requested = self.requested or received
        if self._passed_on:
            return
        if received == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > REPEAT_SECONDS:
                # Die by the signal itself, so that a calling shell or make sees an interrupt and
                # stops as well.
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            self._interrupted_at = self._interrupted_at or now
        if is_first and self._announced:
            text = f"{received.name}: finishing this step, then saving"
            # The terminal may be gone, and Ctrl-C also ends a `tee` that reads our output.
            with suppress(OSError):
                os.write(_STDERR, f"\n{text}; a second Ctrl-C exits at once\n".encode())
