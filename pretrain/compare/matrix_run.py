"""Running the cells of a matrix: each in processes of its own, some side by side, until all have ended or the time is up.

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
SHOWN_LOG_LINES = 12
DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCHER = Path(__file__).resolve().parents[2] / "train_accelerate.py"


@dataclass
class Outcome:
    """How a cell ended, this time."""

    cell: Cell
    status: str  # finished, finished before, failed, halted, stopped, not started
    seconds: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.status.startswith("finished")


class StartedCell:
    """The processes of a cell, a group of their own, on the GPUs of `slot`. Its output goes to the cell's log."""

    def __init__(
        self, cell: Cell, command: Sequence[str], environment: Mapping[str, str], slot: int | None
    ) -> None:
        self.cell, self.slot, self.started = cell, slot, time.monotonic()
        with cell.log.open("ab") as log:
            self.log_begins = log.tell()
            self.process = subprocess.Popen(
                command, start_new_session=True, env=environment, stdout=log, stderr=log
            )

    def signal(self, number: int) -> None:
        """Signal the whole group: accelerate's launcher of a single process passes nothing on by itself."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether nothing of the group runs. A launcher that was signalled ends without waiting for its trainer to save."""
        return self.process.poll() is not None and not any(
            map(self._is_running, psutil.process_iter())
        )

    def _is_running(self, process: psutil.Process) -> bool:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            return (
                os.getpgid(process.pid) == self.process.pid
                and process.status() != psutil.STATUS_ZOMBIE
            )
        return False

    def outcome(self, *, asked_to_stop: bool) -> Outcome:
        """How it has ended, by what its run folder holds."""
        status = "stopped" if asked_to_stop else "failed"
        if self.cell.is_finished():
            status = "finished"
        elif (run := self.cell.record()) and "halted" in run.summary:
            status = "halted"
        return Outcome(self.cell, status, time.monotonic() - self.started)

    def end_of_log(self) -> list[str]:
        """The last lines of its output since it was started this time."""
        output = self.cell.log.read_bytes()[self.log_begins :].decode(errors="replace")
        return output.rstrip().splitlines()[-SHOWN_LOG_LINES:]


def run_all(matrix: Matrix, cells: Sequence[Cell], stop: StopRequest) -> list[Outcome]:
    """Run what is not finished, in its order and at most `matrix.at_once` at a time, until all have ended or a signal comes."""
    outcomes = {
        cell.name: Outcome(cell, "finished before" if cell.is_finished() else "not started")
        for cell in cells
    }
    waiting, running = (
        [cell for cell in cells if not outcomes[cell.name].is_finished],
        list[StartedCell](),
    )
    at_once = min(matrix.at_once, len(waiting))
    # what lacks its data, or has another training in its folder, fails here, and not one after
    # another
    for cell in waiting:
        check_sources(cell.recipe.data)
        cell.check_folder()
    try:
        while running or (waiting and not stop.requested):
            while (
                len(running) < at_once
                and not stop.requested
                and (cell := next_of(waiting, alone=not running))
            ):
                waiting.remove(cell)
                try:
                    running.append(
                        start(matrix, cell, running, side_by_side=at_once > (matrix.slots or 1))
                    )
                    say(f"{cell.name}: started; its output goes to {cell.log}")
                except InputError as error:
                    outcomes[cell.name].status = "failed"
                    say(f"{cell.name}: failed: {error}")
            while stop.received:
                received = stop.received.pop(0)
                say(
                    f"{received.name}: these save and stop: {', '.join(one.cell.name for one in running)}"
                )
                for one in running:
                    # of which torchrun knows nothing
                    one.signal(signal.SIGTERM if received == signal.SIGUSR1 else received)
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                outcomes[one.cell.name] = outcome = one.outcome(asked_to_stop=bool(stop.requested))
                done = sum(each.is_finished for each in outcomes.values())
                of_all = f", {done} of {len(cells)} cells done" if len(cells) > 1 else ""
                say(f"{one.cell.name}: {outcome.status} after {duration(outcome.seconds)}{of_all}")
                if outcome.status in ("failed", "halted"):
                    say(f"  the last of {one.cell.log}:")
                    say("\n".join(f"  | {line}" for line in one.end_of_log()))
            time.sleep(POLL_SECONDS)
    # only after an error of our own something is running still: nothing may go on that nobody
    # watches
    finally:
        for one in running:
            one.signal(signal.SIGTERM)
    return list(outcomes.values())


def say(text: str) -> None:
    print(text, flush=True)


def stopped(stop: StopRequest) -> int:
    """The exit status of a command that a signal has stopped, which it says."""
    say("\nstopped; the same command goes on from here")
    return 128 + stop.requested


def next_of(waiting: Sequence[Cell], *, alone: bool) -> Cell | None:
    """The first that may start: one that begins with a checkpoint which is not there yet waits for the cells that are running,
    of which one may make it. Where none is (`alone`), it says what it lacks."""
    ready = (
        cell
        for cell in waiting
        if (branch_from := branch_checkpoint(cell.recipe)) is None or branch_from.exists()
    )
    return next(ready, waiting[0] if waiting and alone else None)


def start(
    matrix: Matrix, cell: Cell, running: Sequence[StartedCell], *, side_by_side: bool
) -> StartedCell:
    """Mark the cell's folder and start its launcher, on the GPUs that fewest of the `running` ones use; InputError where the
    folder is somebody else's, in which nothing is written."""
    check_ours(cell.run_dir)
    slots = matrix.slots
    slot = None if slots is None else min(range(slots), key=[one.slot for one in running].count)
    environment = environment_on(matrix, slot)
    mark(matrix.settings.name, cell, side_by_side=side_by_side)
    return StartedCell(cell, command_of(matrix, cell), environment, slot)


def command_of(matrix: Matrix, cell: Cell) -> list[str]:
    """The command that one would type; `--quiet` leaves out accelerate's own traceback under a message of ours."""
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


def environment_on(matrix: Matrix, slot: int | None) -> dict[str, str]:
    """Our environment, in which only the GPUs of `slot`, of those that we see, can be seen; None: all of them. On a CPU, cells
    share its cores. InputError where there are fewer GPUs."""
    environment, each = dict(os.environ), matrix.processes
    if slot is not None:
        seen = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        numbers = range(slot * each, (slot + 1) * each)
        if seen and numbers.stop > len(seen):
            raise InputError(f"`gpus`: {DEVICES} names {len(seen)}, which is fewer; lower `gpus`")
        environment[DEVICES] = ",".join(seen[number] if seen else str(number) for number in numbers)
    elif matrix.on_cpu and matrix.at_once > 1:
        environment.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // matrix.at_once))
        )
    return environment


def mark(matrix: str, cell: Cell, *, side_by_side: bool) -> None:
    """Note in the run folder which cell of the `matrix` it is, under which settings it trains, and whether any part of it shared
    the machine with other runs: then its speed says nothing of its precision, and the report leaves it out."""
    shared = side_by_side or (
        cell.mark.exists() and json.loads(cell.mark.read_text())["side_by_side"]
    )
    write_json(
        cell.mark,
        {"matrix": matrix, "cell": cell.values, "side_by_side": shared, "settings": cell.settings},
    )
