"""Run the cells of a matrix, several at a time, until all cells have ended or a signal arrives.

The processes of each cell form a separate process group, so the terminal delivers Ctrl-C only to
the matrix process. The matrix process passes the signal on. If the matrix process is killed, the
processes of the cells continue. If the command is run again, it first waits until they have ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InputError
from foundation.files import write_json
from foundation.gpus import visible_gpus
from foundation.signals import StopRequest
from foundation.units import duration, plural
from lab.experiments.matrix_file import Cell, Matrix
from packing.prepare import check_sources
from pretrain.launch.launcher import Launch
from pretrain.launch.processes import (
    POLL_SECONDS,
    BackgroundTraining,
    check_log,
    is_training,
    start_training,
)
from pretrain.metrics.run_folder import check_ours
from pretrain.settings.config import branch_checkpoint

# Number of log lines that are printed if a cell has failed.
SHOWN_LOG_LINES = 12


@dataclass
class Outcome:
    """Result of a cell after one call of `run_all`."""

    cell: Cell
    # "finished", "failed", "halted" or "stopped" if this call of `run_all` has started the cell.
    # "finished before" if an earlier call has finished the cell. "not started" otherwise.
    status: str
    # Seconds from the start of the cell to its end. 0 if the call has not started the cell.
    seconds: float = 0.0

    @classmethod
    def before(cls, cell: Cell) -> Outcome:
        """Return the result of a cell that this call of `run_all` has not started."""
        return cls(cell, "finished before" if cell.is_finished() else "not started")

    @property
    def is_finished(self) -> bool:
        """Return True if the status is "finished" or "finished before"."""
        return self.status.startswith("finished")


@dataclass(frozen=True)
class StartedCell:
    """A cell and its training."""

    cell: Cell
    training: BackgroundTraining
    # Index of the group of GPUs that the processes use. None if cells are not distributed over
    # GPUs.
    slot: int | None
    # Value of time.monotonic() when the cell was started.
    started: float

    def outcome(self, *, stop_requested: bool) -> Outcome:
        """Return the result of the cell, which has ended. Its status is read from the run folder.

        `stop_requested` is true if a signal has stopped the matrix.
        """
        run = self.cell.record()
        if run and run.is_finished:
            status = "finished"
        elif run and run.has_ended:
            status = "halted"
        else:
            status = "stopped" if stop_requested else "failed"
        return Outcome(self.cell, status, time.monotonic() - self.started)


def run_all(
    matrix: Matrix,
    cells: Sequence[Cell],
    stop: StopRequest,
    is_fatal: Callable[[Outcome], bool] = lambda outcome: False,
) -> list[Outcome]:
    """Run the cells that are not finished, until all cells have ended or a signal arrives.

    Cells are started in order, and at most `matrix.at_once` of them run at the same time. Raise
    InputError before any cell is started if there are fewer GPUs than `gpus`, if the data of a cell
    is missing, or if the folder of a cell is not writable, contains files that no run has written,
    or contains a run with other settings that has ended.

    Return the result of each cell in `cells`, in the same order.

    Args:
        matrix: The matrix.
        cells: The cells to run.
        stop: Request to stop, by a signal.
        is_fatal: Function that returns True for a result after which no other cell is started.
    """
    wait_for_earlier_start([cell.log for cell in cells], stop)
    outcomes = {cell.name: Outcome.before(cell) for cell in cells}
    waiting = [cell for cell in cells if not outcomes[cell.name].is_finished]
    running: list[StartedCell] = []
    at_once = min(matrix.at_once, len(waiting))
    shares_device = at_once > (matrix.slots or 1)
    check_cells(matrix, waiting)
    try:
        while True:
            while len(running) < at_once and not stop.requested:
                ready = next_of(waiting, alone=not running)
                if ready is None:
                    break
                waiting.remove(ready)
                running.append(start(matrix, ready, running, side_by_side=shares_device))
                say(f"{ready.name}: started; its output goes to {ready.log}")
            # All cells have ended, or no further cell may start. Without running cells, `next_of`
            # returns a cell that would otherwise wait for another one.
            if not running:
                break
            _pass_on_signals(running, stop)
            for started in list(running):
                if started.training.has_ended():
                    running.remove(started)
                    outcome = started.outcome(stop_requested=bool(stop.requested))
                    outcomes[started.cell.name] = outcome
                    if is_fatal(outcome):
                        waiting.clear()
                    _report_end(started, outcome, list(outcomes.values()))
            time.sleep(POLL_SECONDS)
    finally:
        # If cells are still running at this point, an exception has ended the loop. Stop these
        # cells, because no other code would wait for their end.
        for started in running:
            started.training.signal(signal.SIGTERM)
    return list(outcomes.values())


def check_cells(matrix: Matrix, waiting: Sequence[Cell]) -> None:
    """Raise InputError for the reasons that `run_all` lists. `waiting` are the cells to start."""
    gpus = matrix.settings.gpus or 0
    usable = len(visible_gpus())
    if waiting and gpus > usable:
        raise InputError(
            f"`gpus: {gpus}`: only {plural(usable, 'GPU')} can be used; either set `gpus` (--gpus) "
            "to a smaller number, or list more GPUs in CUDA_VISIBLE_DEVICES"
        )
    for cell in waiting:
        check_sources(cell.recipe.data)
        check_ours(cell.run_dir)
        cell.check_folder()


def wait_for_earlier_start(logs: Sequence[Path], stop: StopRequest | None = None) -> None:
    """Wait until no process of an earlier, killed command trains a cell any more.

    `logs` are the logs of the cells. Return at once if `stop` records a signal. Raise InputError if
    a log cannot be written.
    """
    for log in logs:
        check_log(log)
    names = [log.stem for log in logs if is_training(log)]
    if names:
        say(f"waiting until an earlier command has trained {', '.join(names)}")
    while any(map(is_training, logs)) and not (stop and stop.requested):
        time.sleep(POLL_SECONDS)


def _pass_on_signals(running: Sequence[StartedCell], stop: StopRequest) -> None:
    """Send the running cells all signals that have arrived since the last call of this function."""
    while stop.received:
        received = stop.received.pop(0)
        names = ", ".join(started.cell.name for started in running)
        say(f"{received.name}: saving a checkpoint and stopping: {names}")
        # Send SIGTERM in place of SIGUSR1, which torchrun does not handle.
        number = signal.SIGTERM if received == signal.SIGUSR1 else received
        for started in running:
            started.training.signal(number)


def _report_end(started: StartedCell, outcome: Outcome, outcomes: Sequence[Outcome]) -> None:
    """Print the result of a cell. If the cell failed or halted, also print the end of its log.

    `outcomes` are the results of all cells. They are used to print the number of finished cells.
    """
    done = sum(outcome.is_finished for outcome in outcomes)
    progress = f", {done} of {len(outcomes)} finished" if len(outcomes) > 1 else ""
    say(f"{started.cell.name}: {outcome.status} after {duration(outcome.seconds)}{progress}")
    if outcome.status in ("failed", "halted"):
        log = started.cell.log
        lines = log.read_text(errors="replace").rstrip().splitlines()[-SHOWN_LOG_LINES:]
        say("\n  | ".join([f"  last lines of {log}:", *lines]))


def say(text: str) -> None:
    """Print a line and flush it, so that it appears at once even if stdout is a pipe."""
    print(text, flush=True)


def report_stop(number: signal.Signals) -> int:
    """Print that a signal has stopped the command. Return the command's exit status.

    `number` is the signal.
    """
    say("\nstopped; run the same command again to continue")
    return 128 + number


def next_of(waiting: Sequence[Cell], *, alone: bool) -> Cell | None:
    """Return the first cell of `waiting` that may be started, or None if all must wait.

    A cell that branches from a checkpoint must wait until the checkpoint exists, because a running
    cell may still write it. If no cell is running (`alone`), no cell can write the checkpoint. In
    this case the first cell is returned. When it is started, it fails with a message about the
    missing checkpoint.
    """
    for cell in waiting:
        checkpoint = branch_checkpoint(cell.recipe)
        if checkpoint is None or checkpoint.exists():
            return cell
    return waiting[0] if waiting and alone else None


def start(
    matrix: Matrix,
    cell: Cell,
    running: Sequence[StartedCell],
    *,
    side_by_side: bool,
) -> StartedCell:
    """Start the processes of the cell, and return an object that manages them.

    The processes use the group of GPUs with the fewest running cells. Before they start, `mark`
    writes a JSON file into the cell's run folder.

    Args:
        matrix: The matrix.
        cell: The cell to start.
        running: The running cells.
        side_by_side: True if the cell shares its devices with other cells.
    """
    slot = None
    if matrix.slots:
        used = [started.slot for started in running]
        # If several groups of GPUs have equally few cells, the seed decides which group is used.
        # Otherwise a slow GPU might slow down the same settings with every seed.
        seed = cell.recipe.seed
        slots = [(seed + number) % matrix.slots for number in range(matrix.slots)]
        slot = min(slots, key=used.count)
    devices = devices_of(matrix, slot)
    mark(matrix.settings.name, cell, side_by_side=side_by_side)
    started = time.monotonic()
    environment = environment_of(matrix) | devices
    training = start_training(launch_of(matrix, cell), environment, cell.log)
    return StartedCell(cell, training, slot, started)


def launch_of(matrix: Matrix, cell: Cell) -> Launch:
    """Return the launch of the training of the cell."""
    settings = matrix.settings
    # If the matrix file does not set `processes`, Accelerate determines the number of processes.
    arguments = (str(settings.recipe), *cell.overrides)
    return Launch(settings.accelerate, arguments, settings.processes)


def environment_of(matrix: Matrix) -> dict[str, str]:
    """Return the environment variables of all cells of a matrix.

    If cells run on a CPU at the same time, each cell uses an equal share of the cores.
    """
    environment = dict(os.environ)
    if matrix.on_cpu and matrix.at_once > 1:
        threads = max(1, (os.cpu_count() or 1) // matrix.at_once)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def devices_of(matrix: Matrix, slot: int | None) -> dict[str, str]:
    """Return the environment variable that makes only one group of GPUs visible to a cell.

    `slot` is the index of the group. If it is None, return {}.
    """
    if slot is None:
        return {}
    first = slot * matrix.processes
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[first : first + matrix.processes])}


def mark(matrix: str, cell: Cell, *, side_by_side: bool) -> None:
    """Write the cell's mark into its run folder.

    The mark is a JSON file with the name of the matrix, the values of the cell and its settings.
    Its key `side_by_side` is true if the run shares its devices with other runs, or did so when the
    cell was started before. The speed of such a run is too low, so reports omit the speed.

    Args:
        matrix: Name of the matrix.
        cell: The cell.
        side_by_side: True if the cell now shares its devices with other runs.
    """
    was_shared = cell.read_mark().get("side_by_side", False)
    write_json(
        cell.mark,
        {
            "matrix": matrix,
            "cell": cell.values,
            "side_by_side": side_by_side or was_shared,
            "settings": cell.settings,
        },
    )
