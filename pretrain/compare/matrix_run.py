"""Run the cells of a matrix, several at a time, until all have ended or a signal arrives.

Each cell runs in processes of its own session. So Ctrl-C on a terminal reaches them only through
the matrix, and only once. The processes survive if the matrix is killed. Until they have ended, the
lock of the run folder prevents that the cell is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from foundation.errors import InputError
from foundation.files import write_json
from foundation.signals import StopRequest
from foundation.units import duration
from packing.prepare import check_sources
from pretrain.compare.matrix_file import Cell, Matrix
from pretrain.metrics.run_folder import check_ours
from pretrain.settings.config import branch_checkpoint

POLL_SECONDS = 0.2
# Lines of the log to print for a failed cell.
SHOWN_LOG_LINES = 12
DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCHER = Path(__file__).resolve().parents[2] / "train_accelerate.py"


@dataclass
class Outcome:
    """Result of a cell in this run of the matrix."""

    cell: Cell
    # "finished", "finished before", "failed", "halted", "stopped" or "not started".
    status: str
    # 0 if the cell was not started.
    seconds: float = 0.0

    @property
    def is_finished(self) -> bool:
        """Return True if the cell is finished, now or before."""
        return self.status.startswith("finished")


class StartedCell:
    """The processes of a cell. They form a process group, and write to the cell's log.

    `slot` is the index of the group of GPUs that they use, or None.
    """

    def __init__(
        self, cell: Cell, command: Sequence[str], environment: Mapping[str, str], slot: int | None
    ) -> None:
        self.cell = cell
        self.slot = slot
        self.started = time.monotonic()
        with cell.log.open("ab") as log:
            self.log_begins = log.tell()
            self.process = subprocess.Popen(
                command, start_new_session=True, env=environment, stdout=log, stderr=log
            )

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the group.

        accelerate's launcher of a single process does not pass signals on.
        """
        with contextlib.suppress(ProcessLookupError):  # the group has just ended
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Return True if no process of the group is running.

        After a signal, the launcher ends before its trainer has saved.
        """
        launcher_has_ended = self.process.poll() is not None
        return launcher_has_ended and not any(map(self._is_running, psutil.process_iter()))

    def _is_running(self, process: psutil.Process) -> bool:
        """Return True if `process` belongs to the group and is running."""
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == self.process.pid:
                return process.status() != psutil.STATUS_ZOMBIE
        return False

    def outcome(self, *, stop_requested: bool) -> Outcome:
        """Return the result of the ended cell, from the content of its run folder."""
        run = self.cell.record()
        if self.cell.is_finished():
            status = "finished"
        elif run and "halted" in run.summary:
            status = "halted"
        else:
            status = "stopped" if stop_requested else "failed"
        return Outcome(self.cell, status, time.monotonic() - self.started)


def run_all(matrix: Matrix, cells: Sequence[Cell], stop: StopRequest) -> list[Outcome]:
    """Run the cells that are not finished until all have ended or a signal arrives.

    Cells start in order, and at most `matrix.at_once` run at a time. Raises InputError before the
    first start if the data of a cell is missing or its folder holds another training.
    """
    outcomes = {
        cell.name: Outcome(cell, "finished before" if cell.is_finished() else "not started")
        for cell in cells
    }
    waiting = [cell for cell in cells if not outcomes[cell.name].is_finished]
    running: list[StartedCell] = []
    at_once = min(matrix.at_once, len(waiting))
    for cell in waiting:
        check_sources(cell.recipe.data)
        cell.check_folder()
    try:
        while running or (waiting and not stop.requested):
            while len(running) < at_once and not stop.requested:
                ready = next_of(waiting, alone=not running)
                if ready is None:
                    break
                waiting.remove(ready)
                shares_device = at_once > (matrix.slots or 1)
                try:
                    running.append(start(matrix, ready, running, side_by_side=shares_device))
                    say(f"{ready.name}: started; its output goes to {ready.log}")
                except InputError as error:
                    outcomes[ready.name].status = "failed"
                    say(f"{ready.name}: failed: {error}")
            _pass_on_signals(running, stop)
            for started in list(running):
                if started.has_ended():
                    running.remove(started)
                    outcome = started.outcome(stop_requested=bool(stop.requested))
                    outcomes[started.cell.name] = outcome
                    _report_end(started, outcome, list(outcomes.values()))
            time.sleep(POLL_SECONDS)
    finally:
        # Cells are still running only after an error in this function. Nothing may go on
        # unattended.
        for started in running:
            started.signal(signal.SIGTERM)
    return list(outcomes.values())


def _pass_on_signals(running: Sequence[StartedCell], stop: StopRequest) -> None:
    """Pass the signals received since the last call on to the running cells."""
    while stop.received:
        received = stop.received.pop(0)
        names = ", ".join(started.cell.name for started in running)
        say(f"{received.name}: these cells save and stop: {names}")
        # torchrun does not handle SIGUSR1.
        number = signal.SIGTERM if received == signal.SIGUSR1 else received
        for started in running:
            started.signal(number)


def _report_end(started: StartedCell, outcome: Outcome, outcomes: Sequence[Outcome]) -> None:
    """Print how a cell ended, with the end of its log if it has failed or halted."""
    done = sum(outcome.is_finished for outcome in outcomes)
    progress = f", {done} of {len(outcomes)} cells done" if len(outcomes) > 1 else ""
    say(f"{started.cell.name}: {outcome.status} after {duration(outcome.seconds)}{progress}")
    if outcome.status in ("failed", "halted"):
        log = started.cell.log
        output = log.read_bytes()[started.log_begins :].decode(errors="replace")
        lines = output.rstrip().splitlines()[-SHOWN_LOG_LINES:]
        say("\n  | ".join([f"  the end of {log}:", *lines]))


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def report_stop(number: signal.Signals) -> int:
    """Print that a signal has stopped the command. Return the command's exit status."""
    say("\nstopped; the same command continues from here")
    return 128 + number


def next_of(waiting: Sequence[Cell], *, alone: bool) -> Cell | None:
    """Return the next cell that may start, or None.

    A cell that branches from a checkpoint waits until the checkpoint exists, because a running cell
    may write it. If no cell is running (`alone`), the first cell starts and reports the missing
    checkpoint.
    """
    for cell in waiting:
        checkpoint = branch_checkpoint(cell.recipe)
        if checkpoint is None or checkpoint.exists():
            return cell
    return waiting[0] if waiting and alone else None


def start(
    matrix: Matrix, cell: Cell, running: Sequence[StartedCell], *, side_by_side: bool
) -> StartedCell:
    """Mark the cell's folder and start its launcher.

    The cell gets the GPUs that the fewest running cells use. Raises InputError, and writes nothing,
    if the folder is not the folder of a run.
    """
    check_ours(cell.run_dir)
    used = [started.slot for started in running]
    slot = min(range(matrix.slots), key=used.count) if matrix.slots else None
    environment = environment_on(matrix, slot)
    mark(matrix.settings.name, cell, side_by_side=side_by_side)
    return StartedCell(cell, command_of(matrix, cell), environment, slot)


def command_of(matrix: Matrix, cell: Cell) -> list[str]:
    """Return the command that a user would type to launch the cell.

    `--quiet` suppresses accelerate's traceback below our own error message.
    """
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--quiet",
        "--config_file",
        str(matrix.settings.accelerate),
    ]
    if matrix.settings.processes is not None:
        launch += ["--num_processes", str(matrix.processes)]
    return [*launch, os.path.relpath(LAUNCHER), str(matrix.settings.recipe), *cell.overrides]


def launch_command(accelerate: Path, recipe: Path, overrides: Sequence[str]) -> str:
    """Return the command that trains a recipe, for the user to copy."""
    launch = ["accelerate", "launch", "--config_file", str(accelerate), "train_accelerate.py"]
    return shlex.join([*launch, str(recipe), *overrides])


def environment_on(matrix: Matrix, slot: int | None) -> dict[str, str]:
    """Return the environment of a cell that sees only the GPUs of `slot`.

    With None, the cell sees all GPUs. Cells that run on a CPU at the same time share its cores.
    Raises InputError if there are fewer GPUs than `gpus`.
    """
    environment = dict(os.environ)
    if slot is not None:
        visible = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        numbers = range(slot * matrix.processes, (slot + 1) * matrix.processes)
        if visible and numbers.stop > len(visible):
            raise InputError(
                f"`gpus`: {DEVICES} names only {len(visible)} GPUs; set `gpus` to that number"
            )
        names = [visible[number] if visible else str(number) for number in numbers]
        environment[DEVICES] = ",".join(names)
    elif matrix.on_cpu and matrix.at_once > 1:
        threads = max(1, (os.cpu_count() or 1) // matrix.at_once)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def mark(matrix: str, cell: Cell, *, side_by_side: bool) -> None:
    """Write the cell's mark into its run folder.

    The mark names the matrix, the cell and its settings. `side_by_side` is true if any part of the
    run shared its machine with other runs. Then its speed does not show the speed of its precision,
    and reports omit it.
    """
    was_shared = cell.mark.exists() and json.loads(cell.mark.read_text())["side_by_side"]
    write_json(
        cell.mark,
        {
            "matrix": matrix,
            "cell": cell.values,
            "side_by_side": side_by_side or was_shared,
            "settings": cell.settings,
        },
    )
