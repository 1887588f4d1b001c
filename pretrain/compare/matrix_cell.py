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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import load_object
from pretrain.compare.matrix_file import Matrix, MatrixRun
from pretrain.metrics.run_folder import MATRIX_FILE, check_ours

SHOWN_LOG_LINES = 12
TIME_IS_UP_STATUS = 128 + signal.SIGUSR1  # the status of a run that SIGUSR1, a scheduler's warning, has ended
STATUS_FILE = "PRETRAIN_STATUS_FILE"
DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCHER = Path(__file__).resolve().parents[2] / "train_accelerate.py"


@dataclass
class StartedRun:
    """The processes of a run: the group `group`, on the GPUs of `slot`."""

    run: MatrixRun
    group: int
    process: subprocess.Popen[bytes]
    slot: int | None
    log_begins: int  # bytes of the log before this start
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, matrix: Matrix, run: MatrixRun, slot: int | None, *, side_by_side: bool) -> StartedRun:
        """Mark the run's folder and start its launcher, which sees the GPUs of `slot`; InputError where that cannot be done, and
        where the folder is somebody else's, in which nothing is written."""
        check_ours(run.run_dir)
        try:
            mark(matrix, run, side_by_side=side_by_side)
            with run.log.open("ab") as log:
                streams = {"stdout": log, "stderr": subprocess.STDOUT}
                begins, command, environment = log.tell(), command_of(matrix, run), environment_on(matrix, slot)
                environment[STATUS_FILE] = str(status_file(run))
                process = subprocess.Popen(command, start_new_session=True, env=environment, **streams)
        except (OSError, ValueError) as error:
            raise InputError(f"{run.run_dir}: cannot be used as its run folder: {error}") from None
        return cls(run, process.pid, process, slot, begins)

    def signal(self, number: int) -> None:
        """Signal the whole group: accelerate's launcher of a single process passes nothing on by itself."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.group, number)

    def has_ended(self) -> bool:
        """Returns whether nothing of the group runs. A launcher that was signalled ends without waiting for its trainer to
        save."""
        return self.process.poll() is not None and not any(members(self.group))

    def exit_status(self) -> int:
        """Returns what the run has left, else its launcher's."""
        file = status_file(self.run)
        try:
            return int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it was killed
            return self.process.returncode
        finally:
            file.unlink(missing_ok=True)

    def end_of_log(self) -> list[str]:
        """The last lines of its output since it was started this time."""
        output = self.run.log.read_bytes()[self.log_begins :].decode(errors="replace") if self.run.log.exists() else ""
        return output.rstrip().splitlines()[-SHOWN_LOG_LINES:]


def members(group: int) -> Iterator[psutil.Process]:
    """The processes of a group that have not ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def command_of(matrix: Matrix, run: MatrixRun) -> list[str]:
    """The command that one would type; `--quiet` leaves out accelerate's own traceback under a message of ours."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(matrix.settings.accelerate)]
    if matrix.settings.processes is not None:
        launch += ["--num_processes", str(matrix.launch.processes)]
    return [*launch, os.path.relpath(LAUNCHER), str(matrix.settings.recipe), *run.overrides]


def environment_on(matrix: Matrix, slot: int | None) -> dict[str, str]:
    """Our environment, in which only the GPUs of `slot` can be seen; None: all of them. On a CPU, runs share its cores."""
    environment = dict(os.environ)
    if slot is not None:
        environment[DEVICES] = devices_of(matrix, slot)
    elif matrix.launch.on_cpu and matrix.at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // matrix.at_once)))
    return environment


def devices_of(matrix: Matrix, slot: int) -> str:
    """The GPUs of `slot`, of those that we see, as CUDA_VISIBLE_DEVICES names them; InputError where there are fewer."""
    each = matrix.launch.processes
    seen = [name for name in os.environ.get(DEVICES, "").split(",") if name]
    if seen and (slot + 1) * each > len(seen):
        raise InputError(f"`gpus`: {DEVICES} names {len(seen)}, which is fewer; lower `gpus`")
    return ",".join(seen[slot * each : (slot + 1) * each] or map(str, range(slot * each, (slot + 1) * each)))


def least_busy(slots: int | None, running: Sequence[StartedRun]) -> int | None:
    return None if slots is None else min(range(slots), key=[one.slot for one in running].count)


def status_file(run: MatrixRun) -> Path:
    """Returns the file in which the run leaves its exit status, as accelerate's launcher ends with one of its own."""
    return run.log.with_suffix(".status").absolute()


def mark(matrix: Matrix, run: MatrixRun, *, side_by_side: bool) -> None:
    """Note in the run folder which matrix the run belongs to, and whether any part of it shared the machine with other runs.

    The speed of such a run says nothing of its precision, and the report leaves it out.
    """
    path = run.run_dir / MATRIX_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    before = load_object(path, "remove it to run the cell again") if path.exists() else {}
    shared = side_by_side or before.get("side_by_side", False)
    content = {"matrix": matrix.settings.name, "cell": run.values, "side_by_side": shared}
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")
