"""Running the real commands: shown as typed, their output untouched, their exit code passed on, Ctrl-C left to them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

LONGEST_SAVE = 120  # seconds that an interrupted trainer is given to write its checkpoint before we stop waiting for it


class CommandFailed(Exception):
    """A command ended with a status other than 0; it has printed why."""

    def __init__(self, command: str, exit_code: int) -> None:
        super().__init__(f"`{command}` ended with exit code {exit_code}")
        self.exit_code = exit_code


def script(name: str) -> str:
    """The command `name` that is installed beside this Python, relative to the current folder where it lies below it."""
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def shown(command: Sequence[str], settings: Mapping[str, str] | None = None) -> str:
    """`command` as one would type it, with the environment variables `settings` before it."""
    return " ".join([*(f"{key}={value}" for key, value in (settings or {}).items()), shlex.join(command)])


def run(command: Sequence[str], settings: Mapping[str, str] | None = None, *, shows: bool = True) -> str:
    """Print and run `command`, with `settings` added to its environment, until it and what it started have ended. Returns what it
    printed where it `shows` nothing, else nothing.

    Ctrl-C reaches every process of a terminal at once. The trainer then saves a checkpoint, but the launcher between may go
    without waiting for it; we wait, so that a second `make demo` does not meet the first one's trainer in the run folder.
    Raises KeyboardInterrupt after such an end, and CommandFailed for any other exit code than 0.
    """
    print(f"$ {shown(command, settings)}", flush=True)
    output = None if shows else subprocess.PIPE
    process = subprocess.Popen(command, env={**os.environ, **(settings or {})}, stdout=output, text=True)
    still_saving: list[psutil.Process] = []
    interrupted = False

    def note_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        with contextlib.suppress(psutil.NoSuchProcess):
            still_saving.extend(psutil.Process(process.pid).children(recursive=True))

    previous = signal.signal(signal.SIGINT, note_interrupt)
    try:
        printed, _ = process.communicate()
        psutil.wait_procs(still_saving, timeout=LONGEST_SAVE)
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt
    if code := process.returncode:
        raise CommandFailed(shown(command), code if code > 0 else 128 - code)  # -9 is how Popen says "killed"
    return printed or ""
