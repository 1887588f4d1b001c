"""Turn Ctrl-C, SIGTERM, a lost terminal and a scheduler's warning into a request to stop.

The training loop then finishes its step, saves a checkpoint and exits. The ranks of a training
receive a signal at different times, and sometimes only one rank receives it. So the training loop
must combine `StopRequest.requested` of all ranks at every step. Then all ranks stop after the same
step. docs/several_gpus.md describes how launchers pass on signals.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# SIGHUP means a lost ssh connection. SLURM can send SIGUSR1 as a warning before the time limit. If
# the parent process ignores one of these signals, this process ignores it too. For example, nohup
# ignores SIGHUP.
IF_NOT_IGNORED = (signal.SIGHUP, signal.SIGUSR1)
# One Ctrl-C may arrive twice, from the terminal and from the launcher. Two SIGINTs within this time
# are therefore treated as one.
REPEAT_SECONDS = 0.5
# File descriptor of stderr.
_STDERR = 2


def end_on_ctrl_c() -> None:
    """Let Ctrl-C end this process without a traceback, unless the process ignores Ctrl-C.

    Call this function before slow imports. Some packages catch an exception that interrupts their
    import, and then fail with another one.
    """
    # multiprocessing would warn about semaphores that a process left when a signal ended it. Child
    # processes inherit this setting.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def raising_on_ctrl_c() -> Iterator[None]:
    """Make a `with` statement end with KeyboardInterrupt after Ctrl-C, and with nothing else.

    A package may catch the KeyboardInterrupt that interrupts its import, and then raise another
    exception. KeyboardInterrupt replaces this exception.

    A handler that the process has set for SIGINT stays. The default handler is replaced and not
    restored, so use this function only for the last statement of a process.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if received:
            raise KeyboardInterrupt from None


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Temporarily handle SIGNALS by `handler`, and IF_NOT_IGNORED unless they are ignored."""
    not_ignored = [
        number for number in IF_NOT_IGNORED if signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, handler) for number in (*SIGNALS, *not_ignored)}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


class StopRequest(ExitStack):
    """Context manager that catches SIGNALS and IF_NOT_IGNORED and records them.

    Enter it in the main thread. The first signal is announced on stderr. A second Ctrl-C ends the
    process at once.

    Args:
        passed_on: True for a process that passes the signals on to its children. Then signals are
            only recorded: none is announced, and a second Ctrl-C does not end this process.
        announced: True to announce the first signal. Set it on one rank only.

    Attributes:
        requested: The first received signal, or None.
        received: All received signals, in order.
    """

    def __init__(self, *, passed_on: bool = False, announced: bool = True) -> None:
        super().__init__()
        self.requested: signal.Signals | None = None
        self.received: list[signal.Signals] = []
        self._passed_on = passed_on
        self._announced = announced
        self._interrupted_at: float | None = None

    def __enter__(self) -> StopRequest:
        self.enter_context(handling(self._receive))
        return self

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
                # End the process by the signal itself, so that a calling shell or make recognises
                # an interrupt and stops as well.
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            self._interrupted_at = self._interrupted_at or now
        if is_first and self._announced:
            repeat = "; a second Ctrl-C exits at once" if received == signal.SIGINT else ""
            text = f"\n{received.name}: finishing this step, then saving{repeat}\n"
            # Ignore a failure to write: the terminal may be gone, or Ctrl-C may also have ended a
            # `tee` that reads the output.
            with suppress(OSError):
                os.write(_STDERR, text.encode())
