"""Run every cell of a comparison: `python -m pretrain matrix MATRIX.yaml [key=value ...] [--only precision=bf16] [--dry-run]`.

Each is a run of the launcher in processes of its own: one that fails is reported and does not touch the others. A run that is
finished is left alone and one that was interrupted is resumed; one that a killed matrix has left running is waited for. A table
shows the cells best first whenever one has ended. Ctrl-C and SIGTERM are passed on: what is running saves and stops, and nothing
else is started. A second Ctrl-C makes it exit at once.

Exit status: 0 all finished, 1 some run failed, 2 something given cannot be used (one message says what), 130 or 143 stopped, 138
hours are over, those of some run or of the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.files import check_replaceable
from foundation.signals import StopRequest
from foundation.tables import markdown, or_dash
from foundation.units import duration
from pretrain.checkpoint.folders import step_folders
from pretrain.compare import report
from pretrain.compare.matrix_cell import TIME_IS_UP_STATUS, StartedRun, command_of, least_busy
from pretrain.compare.matrix_file import Matrix, MatrixRun, load_matrix
from pretrain.compare.ranking import BEST, Ranking
from pretrain.metrics.run_folder import RunFolder

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 5.0
HALTED = 3  # the status of a run that its health has stopped

Status = Literal["finished", "finished before", "failed", "halted", "stopped", "not started"]


@dataclass
class Outcome:
    """Says how a run of the matrix ended, this time."""

    run: MatrixRun
    status: Status = "not started"
    seconds: float | None = None
    exit_status: int | None = None

    @classmethod
    def of(cls, one: StartedRun, *, asked_to_stop: bool) -> Outcome:
        code, seconds = one.exit_status(), time.monotonic() - one.started
        if one.run.is_finished():
            return cls(one.run, "finished", seconds, code)
        stopped = code == TIME_IS_UP_STATUS or asked_to_stop
        return cls(one.run, "stopped" if stopped else "halted" if code == HALTED else "failed", seconds, code)


def run_all(matrix: Matrix, runs: Sequence[MatrixRun], stop: StopRequest, ranking: Ranking) -> list[Outcome]:
    """Run what is not finished, in its order and at most `matrix.at_once` at a time, until all have ended, a signal comes or the
    matrix's hours are over."""
    queue = _Queue(matrix, runs, stop, ranking)
    queue.take_over()
    try:
        while queue.running or (queue.waiting and queue.may_start):
            queue.start()
            queue.pass_on_signals()
            queue.end_with_the_hours()
            queue.collect()
            queue.screen.progress(queue.running)
            time.sleep(POLL_SECONDS)
    finally:  # only after an error of our own something is running still: nothing may go on that nobody watches
        queue.signal_all(signal.SIGTERM)
    return list(queue.outcomes.values())


class _Queue:
    """The runs of a matrix: those that wait, those that are running, and how each has ended."""

    def __init__(self, matrix: Matrix, runs: Sequence[MatrixRun], stop: StopRequest, ranking: Ranking) -> None:
        self.matrix, self.stop, self.ranking = matrix, stop, ranking
        self.outcomes = {run.name: Outcome(run, "finished before" if run.is_finished() else "not started") for run in runs}
        self.waiting = [run for run in runs if self.outcomes[run.name].status == "not started"]
        self.running: list[StartedRun] = []
        self.at_once = min(matrix.at_once, len(self.waiting))
        self.screen = Screen(len(runs), len(runs) - len(self.waiting))
        self.hours = Hours(matrix.settings.max_hours)

    @property
    def may_start(self) -> bool:
        return not self.stop.requested and not self.hours.over

    def take_over(self) -> None:
        """Watch what a matrix that was killed has left running."""
        for one in filter(None, [StartedRun.found(self.matrix, run) for run in self.waiting]):
            self.running.append(one)
            self.waiting.remove(one.run)
            said = f"is running still, started by a matrix that has ended; its output goes to {one.run.log}"
            self.screen.say(f"{one.run.name}: {said}")

    def start(self) -> None:
        """Start what waits and may start, as far as there is room. One that cannot be started has failed."""
        slots = self.matrix.slots
        side_by_side = self.at_once > (slots or 1)
        while len(self.running) < self.at_once and self.may_start:
            run = next_of(self.waiting, [one.run for one in self.running])
            if run is None:
                return
            self.waiting.remove(run)
            try:
                run.check_folder()
                one = StartedRun.start(self.matrix, run, least_busy(slots, self.running), side_by_side=side_by_side)
            except InputError as error:
                self.outcomes[run.name].status = "failed"
                self.screen.say(f"{run.name}: failed: {error}")
                continue
            self.running.append(one)
            self.screen.say(f"{run.name}: started; its output goes to {run.log}")

    def pass_on_signals(self) -> None:
        for received in self.stop.take():
            self.screen.say(f"{received.name}: passed on to {', '.join(one.run.name for one in self.running)}")
            self.signal_all(received)

    def end_with_the_hours(self) -> None:
        if self.hours.just_over():
            self.screen.say(f"`max_hours: {self.matrix.settings.max_hours:g}` are over; what is running saves and stops")
            self.signal_all(signal.SIGTERM)

    def collect(self) -> None:
        """Take note of what has ended, and show how the cells compare so far unless it was the last one."""
        for one in [one for one in self.running if one.has_ended()]:
            self.running.remove(one)
            outcome = Outcome.of(one, asked_to_stop=not self.may_start)
            self.outcomes[one.run.name] = outcome
            self.screen.ended(outcome, one)
            if self.running or self.waiting:
                self.screen.say(f"\n{self.ranking.table(BEST)}\n")

    def signal_all(self, number: signal.Signals) -> None:
        for one in self.running:
            one.signal(number)


def next_of(waiting: Sequence[MatrixRun], running: Sequence[MatrixRun]) -> MatrixRun | None:
    """The first that may start: all but those that begin with a checkpoint of another run here, which that has still to make."""
    to_come = {run.run_dir.resolve() for run in (*waiting, *running)}
    for run in waiting:
        begin = run.begin
        if begin is None or begin.exists() or begin.parent.parent not in to_come - {run.run_dir.resolve()}:
            return run
    return waiting[0] if waiting and not running else None  # which says what it lacks


def require_beginnings(matrix: Matrix, runs: Sequence[MatrixRun], cells: Sequence[MatrixRun]) -> None:
    """InputError where one of `runs` is to begin with a checkpoint of another cell that is not there, and none of `runs` will
    make it. `cells`: of which `--cell` counts. What lies outside of the matrix the launcher itself asks for."""
    to_come = {run.run_dir.resolve() for run in runs if not run.is_finished()}
    for run in runs:
        begin, started = run.begin, step_folders(run.run_dir / "checkpoints")  # with its own it needs no other's any more
        if begin is None or begin.exists() or started or run.is_finished():
            continue
        origin = next((each for each in matrix.runs if each.run_dir.resolve() == begin.parent.parent), None)
        if origin is None or begin.parent.parent in to_come:
            continue
        lacks = f"cell {run.name}: `train.begin_with`: {begin} of cell {origin.name} is not there"
        if not origin.is_finished():
            how = f"`--cell {cells.index(origin)}`" if origin in cells else "which `--only` leaves out"
            raise InputError(f"{matrix.path}, {lacks}; train that cell first ({how}), or wait where it is training")
        kept = ", ".join(folder.name for folder in step_folders(begin.parent)) or "no checkpoint"
        raise InputError(
            f"{matrix.path}, {lacks}: it is finished, and has kept {kept}; name one of these, or train it again in an empty "
            "folder with another `checkpoint.every` or `checkpoint.keep`"
        )


class Hours:
    """Whether the matrix's own hours are over."""

    def __init__(self, most: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if most is None else clock() + most * 3600
        self._told = False

    @property
    def over(self) -> bool:
        return self._end is not None and self._clock() >= self._end

    def just_over(self) -> bool:
        """True once."""
        told, self._told = self._told, self.over
        return self._told and not told


class Screen:
    """What is printed meanwhile: a line as each run starts and ends and, on a terminal, one that says how far they are."""

    def __init__(self, runs: int, done: int) -> None:
        self.runs, self.done = runs, done
        self._on_terminal = sys.stdout.isatty()
        self._progress_at = 0.0  # when the progress line was last written
        if done:
            self.say(f"{done} of {runs} cells are finished already")

    def say(self, text: str) -> None:
        print(f"\r\x1b[2K{text}" if self._on_terminal else text, flush=True)

    def ended(self, outcome: Outcome, one: StartedRun) -> None:
        self.done += outcome.status == "finished"
        took = duration(outcome.seconds or 0.0)
        self.say(f"{one.run.name}: {outcome.status} after {took}, {self.done} of {self.runs} cells done")
        if outcome.status == "failed" and outcome.exit_status == 0:  # a run that we did not start, from other settings
            self.say(f"  {one.run.why_not_of_its_folder()}")
        elif outcome.status in ("failed", "halted"):
            self.say(f"  exit status {or_dash(outcome.exit_status)}; the last of {one.run.log}:")
            self.say("\n".join(f"  | {line}" for line in one.end_of_log()))

    def progress(self, running: Sequence[StartedRun]) -> None:
        now = time.monotonic()
        if self._on_terminal and running and now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            text = "; ".join(one.progress() for one in running)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[2K{text}", end="", flush=True)


def write_report(matrix: Matrix) -> str:
    """Write the report over all runs that have come to an end and are comparable (an axis may be a learning rate); returns what
    to print. A run that was halted is named in it: without it, the mean of its other seeds would flatter its cell."""
    finished = [run.run_dir for run in matrix.runs if run.is_finished()]
    if not finished:
        return "No cell is finished, so there is nothing to report yet."
    # Another seed of the baseline's cell, where its own came to no end: all of the cell's are what others are held against.
    seeds = [run.run_dir for run in matrix.runs if run.but_for_seed == matrix.baseline.but_for_seed]
    own = [folder for folder in [matrix.baseline.run_dir, *seeds] if folder in finished]
    baseline = next(iter(own or finished))
    halted = {run.run_dir for run in matrix.runs if run.run_dir not in finished and run.has_halted()}
    ended = [run.run_dir for run in matrix.runs if run.run_dir in halted or run.run_dir in finished]
    vary = list(dict.fromkeys(key for run in matrix.runs for key in run.settings))
    text = report.write(ended, baseline=baseline, **report_files(matrix), vary=vary, leave_out_unfair=True)
    if not own:
        text += f"\nThe baseline {matrix.baseline.name} is not finished: {baseline.name} stands in its place."
    missing = len(matrix.runs) - len(ended)
    return text + (f"\n{missing} of {len(matrix.runs)} cells are not finished and not in it." if missing else "")


def report_files(matrix: Matrix) -> dict[str, Path]:
    """Where the report goes, by what `report.write` calls it."""
    endings = {"out": "png", "tables_file": "md", "page": "html"}
    return {what: matrix.folder / f"{matrix.settings.name}.{ending}" for what, ending in endings.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = parse_arguments(arguments)
    changes = {key: getattr(options, key) for key in ("at_once", "gpus", "processes", "max_hours")}
    matrix = load_matrix(options.matrix, options.overrides, **{key: value for key, value in changes.items() if value is not None})
    runs = cells = matrix.only(options.only)
    if options.count:
        print(len(runs))
        return 0
    if options.cell is not None:
        if options.cell >= len(runs):
            raise InputError(f"command line: --cell {options.cell}: no such cell; they are counted from 0 to {len(runs) - 1}")
        runs = [runs[options.cell]]
    if options.dry_run:
        for run in runs:
            print(f"# {run.name}{' (finished)' if run.is_finished() else ''}\n{shlex.join(command_of(matrix, run))}")
        return 0
    if options.table:
        print(Ranking(matrix, runs).table())
        return 0
    require_beginnings(matrix, runs, cells)
    return carry_out(matrix, runs, single=options.cell is not None)


def carry_out(matrix: Matrix, runs: Sequence[MatrixRun], *, single: bool) -> int:
    """Run `runs`, say how they ended and how the matrix's cells compare; returns the exit status. `single`: a cell by itself,
    whose matrix others may be running."""
    ranking = Ranking(matrix)
    # Its lock: two of these would start the same runs. Single cells run beside each other, each under its own run's lock.
    lock = contextlib.nullcontext() if single else RunFolder(matrix.folder)
    with lock, StopRequest(passed_on=True) as stop:
        for file in () if single else report_files(matrix).values():
            check_replaceable(file, f"{matrix.path}, its report")
        outcomes = run_all(matrix, runs, stop, ranking)
        rows = [[each.run.name, each.status, or_dash(each.seconds, duration), str(each.run.run_dir)] for each in outcomes]
        print(f"\n{markdown(['cell', 'status', 'took', 'run folder'], rows, names=4)}\n", flush=True)
        if not single:
            by_cell = True
            try:
                print(f"{write_report(matrix)}\n")
                by_cell = "seed" not in matrix.varied or matrix.varied == ["seed"]  # else the report ranks by seeds together
            finally:  # where the report cannot be written, what the cells have come to is said all the same
                if by_cell:
                    print(f"Best first:\n\n{ranking.table()}", flush=True)
    if stop.requested:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 128 + stop.requested
    if any(outcome.status in ("stopped", "not started") for outcome in outcomes):
        print("\nhours are over; the same command goes on from here", file=sys.stderr)
        return TIME_IS_UP_STATUS
    return 0 if all(outcome.status in ("finished", "finished before") for outcome in outcomes) else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m pretrain matrix", description="Run every cell of a comparison and report on it.")
    count = number(1, whole=True)
    parser.add_argument("matrix", type=Path, help="what is compared: a YAML file, see recipes/matrices/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, in every cell")
    parser.add_argument("--only", action="append", default=[], metavar="key=value", help="run these cells only; may be repeated")
    alone = "run one cell alone, of those picked the N-th from 0, as an array of jobs does"
    parser.add_argument("--cell", type=number(0, whole=True), metavar="N", help=alone)
    parser.add_argument("--at-once", type=count, metavar="N", help="cells side by side")
    parser.add_argument("--gpus", type=count, metavar="N", help="GPUs of this machine to spread the cells over")
    parser.add_argument("--processes", type=count, metavar="N", help="processes of each cell")
    parser.add_argument("--max-hours", type=number(), metavar="H", help="after these, what is running saves and all stops")
    parser.add_argument("--count", action="store_true", help="print the number of cells, and stop")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each cell, and stop")
    parser.add_argument("--table", action="store_true", help="print the cells best first, as far as they are, and stop")
    return parser.parse_intermixed_args(arguments)
