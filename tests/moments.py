"""Launcher processes that wait, or get a signal, at a given moment, however fast the machine is.

A moment is defined by an action of the process: it is about to open, rename or import something, or
it has logged a step. The processes are forked from a server that has imported the launcher
(tests/forked.py), because a small run spends nine tenths of its time on this import.
"""

from __future__ import annotations

import atexit
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

# A `sitecustomize.py`, which runs in every Python with its folder in PYTHONPATH. A process that is
# about to rename step 4's checkpoint to its final name waits for the file `go_on`.
WAIT_IN_SAVING = """
import os, sys, time
from pathlib import Path
folder = Path(__file__).parent
def watch(event, values):
    if event == "os.rename" and str(values[1]).endswith("step-00000004"):
        (folder / f"waits-{os.getpid()}").touch()
        while not (folder / "go_on").exists():
            time.sleep(0.01)
sys.addaudithook(watch)
"""

_SPAWN = util.spawnv_passfds
fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["tests.forked"])


def start_server() -> None:
    """Fork the server of `fork_context` from this process, which has computed nothing yet.

    Without this, multiprocessing starts a new Python in every worker, which takes six seconds to
    import the modules that collection has already imported in this process.
    """
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _fork_server):
        forkserver.ensure_running()


def _fork_server(python: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Replace `spawnv_passfds`: fork a process that runs the code of the command.

    The process keeps stderr and the files `passed`.
    """
    if pid := os.fork():
        return pid
    try:
        # Processes forked from the server start other processes in the usual way.
        util.spawnv_passfds = _SPAWN
        # The fork has copied a lock that this process holds, so no process could start a server.
        forkserver._forkserver.__init__()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        kept = [0, 1, 2, *sorted(passed), os.sysconf("SC_OPEN_MAX")]
        for below, above in itertools.pairwise(kept):
            os.closerange(below + 1, above)
        # An exit function of pytest's worker would end each forked process with status 0.
        atexit._clear()
        # Logging handlers, also of transformers, write to pytest's files, which are closed now.
        for name in (None, *logging.root.manager.loggerDict):
            logging.getLogger(name).handlers.clear()
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, buffering=1, closefd=False)  # noqa: SIM115
            for fd, mode in enumerate("rww")
        )
        exec(arguments[-1])
    finally:
        os._exit(0)


class ForkedWorker:
    """Replacement of `packing.workers.start_worker`, because starting Python takes longer."""

    def __init__(self, descriptor: int) -> None:
        from packing.workers import serve

        connection = Connection(os.dup(descriptor))
        process = fork_context.Process(target=serve, args=(connection,), daemon=True)
        process.start()
        self.kill = process.kill
        self.wait = process.join


@dataclass(frozen=True)
class Moment:
    """Moment in which a process waits until the test calls `go_on`, or sends itself `signal`.

    The moment comes when `event` happens with an argument that matches the regular expression
    `what`. `event` is one of Python's audit events, which happen just before the action (`open`,
    `os.rename`, `import`), or `logged`, which happens just after step `what` was written to
    metrics.jsonl.
    """

    event: str
    what: str
    signal: signal.Signals | None = None


class LauncherProcess:
    """Launcher in a separate process that writes its output to `log`.

    With `environment`, it has these variables, and the folder of `log` is its current directory.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, *moments: Moment, **environment: str
    ) -> None:
        self._connection, process_end = fork_context.Pipe()
        self._process = fork_context.Process(
            target=_launch, args=(arguments, log, moments, process_end, environment), daemon=True
        )
        self._process.start()
        process_end.close()
        self.pid: int = self._process.pid

    def wait_until_it_waits(self) -> None:
        """Return once the process waits at a moment. Raises EOFError if it ends before."""
        self._connection.recv()

    def go_on(self) -> None:
        self._connection.send(None)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds. Fails if the process ends before, or after two minutes."""
        end = time.monotonic() + 120
        while not condition():
            assert self._process.is_alive(), "the process ended before the condition held"
            assert time.monotonic() < end, "the condition does not hold after two minutes"
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for the end of the process. Returns its exit status, or minus a signal's number."""
        self._process.join()
        return self._process.exitcode


def become_launcher(
    arguments: Sequence[str],
    logs: tuple[Path, Path],
    environment: dict[str, str],
    main: Callable[[], int | None] | None = None,
) -> None:
    """Run the launcher, or `main`, on a CPU in this forked process, and exit with its status.

    Stdout and stderr are appended to the two `logs`.
    """
    for stream, log in zip((1, 2), logs, strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    import torch

    import train_accelerate

    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[key]
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | environment
    torch.set_num_threads(1)
    sys.argv = ["train_accelerate.py", *arguments]
    sys.exit((main or train_accelerate.main)())


def _launch(
    arguments: Sequence[str],
    log: Path,
    moments: Sequence[Moment],
    connection: Connection,
    environment: dict[str, str],
) -> None:
    """Run the launcher and stop it at the moments. `connection` leads to a LauncherProcess."""
    pending = list(moments)

    def watch(event: str, values: tuple[Any, ...]) -> None:
        for moment in pending:
            if event == moment.event and any(
                isinstance(value, str | Path) and re.search(moment.what, str(value))
                for value in values
            ):
                pending.remove(moment)
                if moment.signal is not None:
                    os.kill(os.getpid(), moment.signal)
                else:
                    connection.send(None)
                    connection.recv()
                return

    from pretrain.metrics.trackers import JsonlTracker

    log_values = JsonlTracker.log

    def log_and_audit(
        tracker: JsonlTracker, values: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        log_values(tracker, values, *args, **options)
        if "loss" in values:
            sys.audit("logged", str(values["step"]))

    JsonlTracker.log = log_and_audit
    sys.addaudithook(watch)
    if environment:
        os.chdir(log.parent)
    become_launcher(arguments, (log, log), environment)
