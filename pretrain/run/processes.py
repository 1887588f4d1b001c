"""Processes that work at once on one machine, and measure one at a time: `python -m pretrain doctor`.

An error of CUDA's takes its whole process with it, so each precision and each training has a process of its own. All of them
import first, which is what takes the time of a small trial, and then wait for what they are to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from foundation.ending import reason_in
from pretrain.precision import transformer_engine

ROOT = Path(__file__).resolve().parents[2]
MARK, TURN = "DOCTOR ", "DOCTOR WAITS\n"  # a line that begins so is a finding; or its process wants to measure
AT_ONCE = 6  # precisions

Finding = dict[str, Any]  # part, status (passed, failed, not here), said, and figures


# ── In such a process ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def told() -> tuple[list[str], Callable[[], Any]] | None:
    """Import what trials and trainings need, then wait for the command's arguments; None: nothing is to be done after all.
    The second is the launcher's `main`."""
    transformer_engine.missing()  # imports the library, where there is one
    launcher = runpy.run_path(str(ROOT / "train_accelerate.py"))
    line = sys.stdin.readline()
    return (json.loads(line), launcher["main"]) if line else None


def wait_for_turn() -> None:
    """Returns once no other process computes."""
    sys.stdout.write(TURN)
    sys.stdout.flush()
    if not sys.stdin.readline():
        sys.exit(1)


# ── In the one that asks for it ───────────────────────────────────────────────────────────────────────────────────────────────


class Process:
    """A process that imports and waits to be told what to do. Its errors, its death and its hanging do not reach this one."""

    def __init__(self, *, cpu: bool) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
        command = [sys.executable, "-m", "pretrain", "doctor", "--wait"]
        self.waits = False  # for its turn
        self._ended = False  # by us
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | ({"ACCELERATE_USE_CPU": "true"} if cpu else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def tell(self, arguments: Sequence[str], seconds: float, found: Callable[[Finding], None] = lambda _: None) -> str | None:
        """Let it do the doctor's command with `arguments`, or measure if it waits for its turn; `found` gets each finding.

        Returns None where it came to its end or waits for its turn, else how it ended. After `seconds` it is killed. Raises
        CancelledError where the examination was broken off.
        """
        self.waits, late, said = False, threading.Event(), []
        timer = threading.Timer(seconds, lambda: (late.set(), self.end()))
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it is dead, which its status says
                self._process.stdin.write(json.dumps(list(arguments)) + "\n")
                self._process.stdin.flush()
            for line in self._process.stdout:
                if line == TURN:
                    self.waits = True
                    return None
                if line.startswith(MARK) and line.endswith("\n"):
                    found(json.loads(line.removeprefix(MARK)))
                else:
                    said.append(line)
            status = self._process.wait()
        finally:
            timer.cancel()
        if late.is_set():
            return f"took longer than {seconds:.0f} s"
        if status == 0:
            return None
        if self._ended:
            raise CancelledError
        self._errors.seek(0)
        return f"ended with status {status}: {reason_in((*said, *self._errors))}"

    def end(self) -> None:
        """Ends the process and all its children."""
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


class WorkerPool:
    """The processes at work on this machine: who works at once, and who measures alone. At its end it ends all of them."""

    def __init__(self, *, gpu: bool) -> None:
        self.gpu = gpu
        self._working = 0  # precisions that compute, but for the one that measures
        self._quiet = threading.Condition()
        self._starting = threading.Lock()
        self._processes: list[Process] | None = []  # None: it is over

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:
            processes, self._processes = self._processes or [], None
        for process in processes:
            process.end()

    def start(self) -> Process:
        """Starts one more process, which imports and then waits to be told."""
        with self._starting:
            if self._processes is None:
                raise CancelledError
            self._processes.append(process := Process(cpu=not self.gpu))
        return process

    def each(self, work: Callable[[str], None], precisions: Iterable[str]) -> None:
        """Do `work` for each precision: on a GPU at once, in threads that wait for processes, on a CPU one after the other."""
        if not self.gpu:
            for name in precisions:
                work(name)
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [pool.submit(self._work, work, name) for name in precisions]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.__exit__()
                raise

    def _work(self, work: Callable[[str], None], name: str) -> None:
        with self._quiet:
            self._working += 1
        try:
            work(name)
        finally:
            self._rest()

    def _rest(self) -> None:
        with self._quiet:
            self._working -= 1
            self._quiet.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other precision computes, and let none begin before this is left."""
        if not self.gpu:
            yield
            return
        self._rest()
        with self._quiet:
            self._quiet.wait_for(lambda: self._working == 0)
            try:
                yield
            finally:
                self._working += 1
