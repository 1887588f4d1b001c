"""One cell of a matrix as processes: started, signalled, ended.

A cell's processes are a session of their own, so that a terminal's Ctrl-C reaches them only through the matrix, once. They
outlive a matrix that was killed; until they have ended, the lock of the run folder refuses to start the cell again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from foundation.errors import InputError
from foundation.files import replace_file
from pretrain.compare.matrix_file import Matrix, MatrixRun
from pretrain.metrics.run_folder import MATRIX_FILE, check_ours

SHOWN_LOG_LINES = 12
TIME_IS_UP_STATUS = 128 + signal.SIGUSR1  # the status of a run that SIGUSR1, a scheduler's warning, has ended
STATUS_FILE = "PRETRAIN_STATUS_FILE"  # in which the run leaves its exit status, as accelerate's launcher ends with one of its own
DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCHER = Path(__file__).resolve().parents[2] / "train_accelerate.py"


@dataclass
class StartedRun:
    """The processes of a run, a group of their own, on the GPUs of `slot`."""

    run: MatrixRun
    process: subprocess.Popen[bytes]
    slot: int | None
    status_file: Path
    log_begins: int  # bytes of the log before this start
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, matrix: Matrix, run: MatrixRun, slot: int | None, *, side_by_side: bool) -> StartedRun:
        """Mark the run's folder and start its launcher, which sees the GPUs of `slot`; InputError where the folder is somebody
        else's, in which nothing is written."""
        check_ours(run.run_dir)
        mark(matrix, run, side_by_side=side_by_side)
        status_file = run.log.with_suffix(".status").absolute()
        environment = environment_on(matrix, slot) | {STATUS_FILE: str(status_file)}
        with run.log.open("ab") as log:
            begins, streams = log.tell(), {"stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command_of(matrix, run), start_new_session=True, env=environment, **streams)
        return cls(run, process, slot, status_file, begins)

    def signal(self, number: int) -> None:
        """Signal the whole group: accelerate's launcher of a single process passes nothing on by itself."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether nothing of the group runs. A launcher that was signalled ends without waiting for its trainer to save."""
        return self.process.poll() is not None and not any(map(self._is_running, psutil.process_iter()))

    def _is_running(self, process: psutil.Process) -> bool:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getpgid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE
        return False

    def exit_status(self) -> int:
        """What the run has left, else its launcher's."""
        try:
            return int(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it was killed
            return self.process.returncode
        finally:
            self.status_file.unlink(missing_ok=True)

    def end_of_log(self) -> list[str]:
        """The last lines of its output since it was started this time."""
        output = self.run.log.read_bytes()[self.log_begins :].decode(errors="replace")
        return output.rstrip().splitlines()[-SHOWN_LOG_LINES:]


def command_of(matrix: Matrix, run: MatrixRun) -> list[str]:
    """The command that one would type; `--quiet` leaves out accelerate's own traceback under a message of ours."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(matrix.settings.accelerate)]
    if matrix.settings.processes is not None:
        launch += ["--num_processes", str(matrix.launch.processes)]
    return [*launch, os.path.relpath(LAUNCHER), str(matrix.settings.recipe), *run.overrides]


def environment_on(matrix: Matrix, slot: int | None) -> dict[str, str]:
    """Our environment, in which only the GPUs of `slot`, of those that we see, can be seen; None: all of them. On a CPU, runs
    share its cores. InputError where there are fewer GPUs."""
    environment, each = dict(os.environ), matrix.launch.processes
    if slot is not None:
        seen = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        numbers = range(slot * each, (slot + 1) * each)
        if seen and numbers.stop > len(seen):
            raise InputError(f"`gpus`: {DEVICES} names {len(seen)}, which is fewer; lower `gpus`")
        environment[DEVICES] = ",".join(seen[number] if seen else str(number) for number in numbers)
    elif matrix.launch.on_cpu and matrix.at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // matrix.at_once)))
    return environment


def least_busy(slots: int | None, running: Sequence[StartedRun]) -> int | None:
    return None if slots is None else min(range(slots), key=[one.slot for one in running].count)


def mark(matrix: Matrix, run: MatrixRun, *, side_by_side: bool) -> None:
    """Note in the run folder which matrix the run belongs to, and whether any part of it shared the machine with other runs.

    The speed of such a run says nothing of its precision, and the report leaves it out.
    """
    path = run.run_dir / MATRIX_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = side_by_side or (path.exists() and json.loads(path.read_text()).get("side_by_side", False))
    content = {"matrix": matrix.settings.name, "cell": run.values, "side_by_side": shared}
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")
