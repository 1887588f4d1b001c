"""How a process ends: at once, after what has to happen; and what it says of why."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn


class Ending:
    """Ends its process as `sys.exit` does, but does not take a million objects apart for it, one by one: with torch and
    transformers imported that takes longer than a second.

    Threads are waited for and what is registered with `atexit` runs, then the streams are flushed. Made before anything is
    imported that registers something: of these, the first to be registered runs last. Where a GPU was used the process ends as
    ever: its libraries and profilers have work to do when the C library exits, which this leaves out.
    """

    def __init__(self) -> None:
        self._status: int | None = None  # None: an error or a signal ends the process, and says its status itself
        atexit.register(self._end)

    def exit(self, status: int) -> NoReturn:
        self._status = status
        sys.exit(status)

    def _end(self) -> None:
        if self._status is None or _has_used_a_gpu():
            return
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: the process began without it
            with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                stream.flush()
        os._exit(self._status)


def reason_in(output: Iterable[str]) -> str:
    """The line of a process's output that says why it ended: our own message, or an error; 400 characters at most."""
    lines = [line.strip() for line in output if line.strip()]
    own = [line for line in lines if line.startswith(("error: ", "halted: "))]
    errors = [line for line in lines if "Error" in line]
    return next(iter([*own[-1:], *errors[-1:], *lines[-1:]]), "it said nothing")[:400]


def _has_used_a_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
