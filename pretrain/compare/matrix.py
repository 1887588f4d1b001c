"""Run every cell of a comparison: `python -m pretrain matrix MATRIX.yaml [key=value ...] [--only precision=bf16] [--dry-run]`.

Each cell is a run of the launcher, in a process of its own: one that fails is reported and does not touch the others. A cell that
is finished is left alone and one that was interrupted goes on, so the same command is repeated until all is done. At the end
stand a table of the cells and, over the finished ones, the report.

Ctrl-C and SIGTERM are passed on: the cells that are running save and stop, and no other is started. A second Ctrl-C makes them
exit at once.

Exit status: 0 all finished, 1 some cell failed, 2 something given cannot be used (one message says what), 130 or 143 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.units import duration
from pretrain.compare import report
from pretrain.compare.cells import Cell, Matrix, load_matrix
from pretrain.compare.tables import markdown
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import MATRIX_FILE, read_metrics

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 5.0
SHOWN_LOG_LINES = 12
LAUNCHER = Path(__file__).resolve().parents[2] / "train_accelerate.py"

Status = Literal["finished", "finished before", "failed", "stopped", "not started"]


@dataclass
class Outcome:
    """What has become of a cell, this time."""

    cell: Cell
    status: Status = "not started"
    exit_code: int | None = None
    seconds: float | None = None


@dataclass
class RunningCell:
    """A cell's processes: accelerate's launcher and all that it starts, in a process group of their own.

    In a group of their own, a terminal's Ctrl-C reaches them through us alone, once.
    """

    cell: Cell
    process: subprocess.Popen[bytes]
    gpu: int | None
    log_begins: int  # bytes of the log before this start
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, matrix: Matrix, cell: Cell, gpu: int | None, *, side_by_side: bool) -> RunningCell:
        """Mark the cell's folder and start its launcher, which sees no other `gpu`; InputError where its folder or its log cannot
        be written."""
        try:
            mark(matrix, cell, side_by_side=side_by_side)
            with cell.log.open("ab") as log:
                begins, command = log.tell(), command_of(matrix, cell)
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment_on(gpu)
                )
        except (OSError, ValueError) as error:
            raise InputError(f"{cell.run_dir}: cannot be used as its run folder: {error}") from None
        return cls(cell, process, gpu, begins)

    def signal(self, number: int) -> None:
        """To the whole group: accelerate's launcher of a single process passes nothing on by itself."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether nothing of the group runs: a launcher that was signalled goes without waiting for its trainer to save."""
        return self.process.poll() is not None and not any(map(self._is_alive_in_group, psutil.process_iter()))

    def _is_alive_in_group(self, process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def last_words(self) -> str:
        """The end of what it has said, since it was started this time."""
        said = self.cell.log.read_bytes()[self.log_begins :].decode(errors="replace")
        return "\n".join(said.rstrip().splitlines()[-SHOWN_LOG_LINES:])

    def progress(self) -> str:
        """Where it is, from the last line of its metrics."""
        try:
            steps = [record for record in read_metrics(self.cell.run_dir) if "loss" in record]
        except InputError:  # not there yet
            steps = []
        at = f"step {steps[-1]['step']}, loss {steps[-1]['loss'] or float('nan'):.4f}" if steps else "starting"
        return f"{self.cell.name}: {at}, {duration(round(time.monotonic() - self.started))}"


class Signals:
    """Collects SIGINT and SIGTERM for as long as the `with` block lasts; whoever runs the cells passes them on."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._pending: list[int] = []

    def __enter__(self) -> Signals:
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.first = self.first or number
        self._pending.append(number)

    def take(self) -> list[int]:
        """Those that have come since the last call."""
        taken, self._pending = self._pending, []
        return taken


def command_of(matrix: Matrix, cell: Cell) -> list[str]:
    """The command that runs the cell: what one would type, with accelerate's launcher of this very Python.

    `--quiet` leaves out accelerate's own traceback under a message of ours.
    """
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(matrix.settings.accelerate)]
    return [*launch, os.path.relpath(LAUNCHER), str(matrix.settings.recipe), *cell.overrides]


def environment_on(gpu: int | None) -> dict[str, str]:
    """Ours, with the `gpu`-th of the GPUs that we see for the only one."""
    if gpu is None:
        return dict(os.environ)
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if seen and gpu >= len(seen):
        raise InputError(f"`gpus`: CUDA_VISIBLE_DEVICES names {len(seen)}, which is fewer; lower `gpus`")
    return os.environ | {"CUDA_VISIBLE_DEVICES": seen[gpu] if seen else str(gpu)}


def least_busy(gpus: int | None, running: Sequence[RunningCell]) -> int | None:
    """The GPU with the fewest cells."""
    return None if gpus is None else min(range(gpus), key=[one.gpu for one in running].count)


def run_cells(matrix: Matrix, cells: Sequence[Cell], signals: Signals) -> list[Outcome]:
    """Run what is not finished, in its order and at most `at_once` at a time, until all have ended or a signal comes."""
    outcomes = {cell.name: Outcome(cell, "finished before" if cell.is_finished() else "not started") for cell in cells}
    waiting = [cell for cell in cells if outcomes[cell.name].status == "not started"]
    at_once, gpus = min(matrix.settings.at_once, len(waiting)), matrix.settings.gpus
    screen = Screen(len(cells), len(cells) - len(waiting))
    running: list[RunningCell] = []
    try:
        while running or (waiting and signals.first is None):
            while waiting and len(running) < at_once and signals.first is None:
                cell = waiting.pop(0)
                try:
                    gpu = least_busy(gpus, running)
                    running.append(RunningCell.start(matrix, cell, gpu, side_by_side=at_once > (gpus or 1)))
                    screen.say(f"{cell.name}: started; its output goes to {cell.log}")
                except InputError as error:
                    outcomes[cell.name].status = "failed"
                    screen.say(f"{cell.name}: failed: {error}")
            for number in signals.take():
                screen.say(f"{signal.Signals(number).name}: passed on to {', '.join(one.cell.name for one in running)}")
                for one in running:
                    one.signal(number)
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                outcomes[one.cell.name] = outcome = outcome_of(one, stopped=signals.first is not None)
                screen.ended(outcome, one)
            screen.progress(running)
            time.sleep(POLL_SECONDS)
    finally:
        for one in running:  # only if something unforeseen ends us: nothing may go on that nobody watches
            one.signal(signal.SIGTERM)
    return list(outcomes.values())


def outcome_of(one: RunningCell, *, stopped: bool) -> Outcome:
    """A finished cell is one whose files say so; an exit status alone says less, as accelerate's launcher makes up its own."""
    status: Status = "finished" if one.cell.is_finished() else "stopped" if stopped else "failed"
    return Outcome(one.cell, status, one.process.returncode, time.monotonic() - one.started)


def mark(matrix: Matrix, cell: Cell, *, side_by_side: bool) -> None:
    """Leave in the run folder of which matrix it is, and whether any part of the run shared the machine with other cells.

    Its speed then says nothing of its precision, and the report leaves it out.
    """
    path = cell.run_dir / MATRIX_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    content = {
        "matrix": matrix.settings.name,
        "cell": cell.values,
        "side_by_side": side_by_side or before.get("side_by_side", False),
    }
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")


class Screen:
    """What is shown while cells run: a line as each starts and ends and, on a terminal, one that says how far they are."""

    def __init__(self, cells: int, done: int) -> None:
        self.cells, self.done = cells, done
        self._on_terminal = sys.stdout.isatty()
        self._shown = 0.0  # when the progress line was last written
        if done:
            self.say(f"{done} of {cells} cells are finished already")

    def say(self, text: str) -> None:
        print(f"\r\x1b[2K{text}" if self._on_terminal else text, flush=True)

    def ended(self, outcome: Outcome, one: RunningCell) -> None:
        self.done += outcome.status == "finished"
        took = duration(outcome.seconds or 0.0)
        self.say(f"{outcome.cell.name}: {outcome.status} after {took}, {self.done} of {self.cells} cells done")
        if outcome.status == "failed":
            self.say(f"  exit status {outcome.exit_code}; the last of {outcome.cell.log}:")
            self.say("\n".join(f"  | {line}" for line in one.last_words().splitlines()))

    def progress(self, running: Sequence[RunningCell]) -> None:
        now = time.monotonic()
        if self._on_terminal and running and now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            text = "; ".join(one.progress() for one in running)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[2K{text}", end="", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: what has become of each cell."""
    rows = [
        [
            outcome.cell.name,
            outcome.status,
            "–" if outcome.seconds is None else duration(outcome.seconds),
            str(outcome.cell.run_dir),
        ]
        for outcome in outcomes
    ]
    return markdown(["cell", "status", "took", "run folder"], rows, names=4)


def write_report(matrix: Matrix) -> str:
    """The report over all finished cells, into the matrix's folder; returns what to say of it.

    Cells that were trained differently from the baseline (an axis may be a learning rate) are named and left out.
    """
    finished = [cell.run_dir for cell in matrix.cells if cell.is_finished()]
    if not finished:
        return "No cell is finished, so there is nothing to report yet."
    baseline = matrix.baseline.run_dir if matrix.baseline.run_dir in finished else finished[0]
    name = matrix.folder / matrix.settings.name
    out, page = name.with_name(f"{name.name}.png"), name.with_name(f"{name.name}.md")
    said = report.write(finished, baseline=baseline, out=out, page=page, leave_out_unfair=True)
    missing = len(matrix.cells) - len(finished)
    return said + (f"\n{missing} of {len(matrix.cells)} cells are not finished and not in it." if missing else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        matrix = load_matrix(options.matrix, options.overrides)
        cells = matrix.only(options.only)
        if options.dry_run:
            for cell in cells:
                print(f"# {cell.name}{' (finished)' if cell.is_finished() else ''}\n{shlex.join(command_of(matrix, cell))}")
            return 0
        with RunFolder(matrix.folder), Signals() as signals:  # its lock: two of these would start the same cells
            outcomes = run_cells(matrix, cells, signals)
            print(f"\n{table(outcomes)}\n", flush=True)
            print(write_report(matrix))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if signals.first is not None:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 128 + signals.first
    return 0 if all(outcome.status in ("finished", "finished before") for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain matrix", description="Run every cell of a comparison and report on it."
    )
    parser.add_argument("matrix", type=Path, help="what is compared: a YAML file, see recipes/matrices/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, in every cell")
    parser.add_argument("--only", action="append", default=[], metavar="key=value", help="run these cells only; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each cell, and stop")
    return parser
