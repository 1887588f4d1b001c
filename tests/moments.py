"""The launcher in processes of its own that stop, or are signalled, at moments a test names, however fast the machine is.

A moment is named by what the process does there: it is about to open, rename or import something, or it has logged a step. The
processes are forked from one that has imported the launcher (tests/forked.py): of a small run nine tenths of the time are that
import.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

# `sitecustomize.py`, found by every Python that has its folder in PYTHONPATH: who is about to name step 4's checkpoint waits.
WAIT_IN_SAVING = """
import os, sys, time
from pathlib import Path
here = Path(__file__).parent
def watch(event, values):
    if event == "os.rename" and str(values[1]).endswith("step-00000004"):
        (here / f"waits-{os.getpid()}").touch()
        while not (here / "go_on").exists():
            time.sleep(0.01)
sys.addaudithook(watch)
"""

_SPAWN = util.spawnv_passfds
fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["tests.forked"])


def start_server() -> None:
    """Start the process that `fork_context` forks others from, as a fork of this one, which has collected tests and computed
    nothing. multiprocessing would start a new Python, which takes six seconds of a core, in each worker, to import the same."""
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _fork_server):
        forkserver.ensure_running()


def _fork_server(python: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """In place of `spawnv_passfds`: a process that runs the command's code, with no files but stderr and those `passed`."""
    if pid := os.fork():
        return pid
    try:
        util.spawnv_passfds = _SPAWN  # what is forked from here starts other processes as ever
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        kept = [0, 1, 2, *sorted(passed), os.sysconf("SC_OPEN_MAX")]
        for below, above in itertools.pairwise(kept):
            os.closerange(below + 1, above)
        # transformers' too write to pytest's files, which are closed here
        for name in (None, *logging.root.manager.loggerDict):
            logging.getLogger(name).handlers.clear()
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, closefd=False)  # noqa: SIM115
            for fd, mode in enumerate("rww")
        )
        exec(arguments[-1])
    finally:
        os._exit(0)


@dataclass(frozen=True)
class Moment:
    """When `event` happens with an argument that `what`, a regular expression, is found in: send `signal` to the own process, or,
    without one, wait there until the test says to go on.

    `event` is one of Python's audit events, which come just before what they name (`open`, `os.rename`, `import`), or `logged`,
    which comes just after the line of step `what` was written to metrics.jsonl.
    """

    event: str
    what: str
    signal: signal.Signals | None = None


class LauncherProcess:
    """The launcher with these arguments in a process of its own, which writes to `log`."""

    def __init__(self, arguments: Sequence[str], log: Path, *moments: Moment) -> None:
        self._connection, theirs = fork_context.Pipe()
        self._process = fork_context.Process(
            target=_launch, args=(arguments, log, moments, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def wait_until_it_waits(self) -> None:
        """Return once the process is at its next moment without a signal; EOFError if it ends before."""
        self._connection.recv()

    def go_on(self) -> None:
        self._connection.send(None)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds, which the process is to bring about; fails where it ends before or waits for good."""
        end = time.monotonic() + 120
        while not condition():
            assert self._process.is_alive() and time.monotonic() < end, (
                "the process ended before, or stands still"
            )
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for the process to end; returns its exit status, or minus the signal that killed it."""
        self._process.join()
        return self._process.exitcode


def become_launcher(
    arguments: Sequence[str],
    logs: tuple[Path, Path],
    environment: dict[str, str],
    main: Callable[[], int | None] | None = None,
) -> None:
    """What a forked process does: run the launcher, or `main` in its place, on a CPU, and exit with its status. `logs`: what it
    appends stdout and stderr to."""
    for stream, log in zip((1, 2), logs, strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    import torch

    import train_accelerate

    train_accelerate.picture_of_run = lambda run: b""  # drawing takes longer than such a run
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[key]
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | environment
    torch.set_num_threads(1)
    sys.argv = ["train_accelerate.py", *arguments]
    sys.exit((main or train_accelerate.main)())


def _launch(
    arguments: Sequence[str], log: Path, moments: Sequence[Moment], connection: Connection
) -> None:
    waiting = list(moments)

    def watch(event: str, values: tuple[Any, ...]) -> None:
        for moment in waiting:
            if event == moment.event and any(
                isinstance(v, str | Path) and re.search(moment.what, str(v)) for v in values
            ):
                waiting.remove(moment)
                if moment.signal is not None:
                    os.kill(os.getpid(), moment.signal)
                else:
                    connection.send(None)
                    connection.recv()
                return

    from pretrain.metrics.trackers import JsonlTracker

    write = JsonlTracker.log

    def log_and_tell(
        tracker: JsonlTracker, values: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        write(tracker, values, *args, **options)
        if "loss" in values:
            sys.audit("logged", str(values["step"]))

    JsonlTracker.log = log_and_tell
    sys.addaudithook(watch)
    become_launcher(arguments, (log, log), {})
