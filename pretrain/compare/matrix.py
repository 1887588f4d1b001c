"""Run every cell of a comparison: `python -m pretrain matrix MATRIX.yaml [key=value ...] [--only precision=bf16] [--dry-run]`.

Each is a run of the launcher in processes of its own: one that fails is reported and does not touch the others. A run that is
finished is left alone and one that was interrupted is resumed. A table shows the cells best first whenever one has ended. Ctrl-C
and SIGTERM are passed on: what is running saves and stops, and nothing else is started. A second Ctrl-C makes it exit at once.

Exit status: 0 all finished, 1 some run failed, 2 something given cannot be used (one message says what), 130 or 143 stopped, 138
hours are over, those of some run or of the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
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
    outcomes = {run.name: Outcome(run, "finished before" if run.is_finished() else "not started") for run in runs}
    waiting = [run for run in runs if outcomes[run.name].status == "not started"]
    running: list[StartedRun] = []
    at_once, slots = min(matrix.at_once, len(waiting)), matrix.slots
    ends, told = time.monotonic() + (matrix.settings.max_hours or math.inf) * 3600, False
    if done := len(runs) - len(waiting):
        say(f"{done} of {len(runs)} cells are finished already")

    def goes_on() -> bool:
        return not stop.requested and time.monotonic() < ends

    def signal_all(number: signal.Signals, why: str) -> None:
        say(f"{why} {', '.join(one.run.name for one in running)}")
        for one in running:
            one.signal(number)

    try:
        while running or (waiting and goes_on()):
            while len(running) < at_once and goes_on() and (run := next_of(waiting, [one.run for one in running])):
                waiting.remove(run)
                try:
                    run.check_folder()
                    slot = least_busy(slots, running)
                    running.append(StartedRun.start(matrix, run, slot, side_by_side=at_once > (slots or 1)))
                    say(f"{run.name}: started; its output goes to {run.log}")
                except InputError as error:
                    outcomes[run.name].status = "failed"
                    say(f"{run.name}: failed: {error}")
            for received in stop.take():
                signal_all(received, f"{received.name}: passed on to")
            if not told and time.monotonic() >= ends:
                told = True
                signal_all(signal.SIGTERM, f"`max_hours: {matrix.settings.max_hours:g}` are over; what runs saves and stops:")
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                outcomes[one.run.name] = outcome = Outcome.of(one, asked_to_stop=not goes_on())
                ended = sum(each.status.startswith("finished") for each in outcomes.values())
                say(f"{one.run.name}: {outcome.status} after {duration(outcome.seconds)}, {ended} of {len(runs)} cells done")
                if outcome.status in ("failed", "halted"):
                    say(f"  exit status {outcome.exit_status}; the last of {one.run.log}:")
                    say("\n".join(f"  | {line}" for line in one.end_of_log()))
                if running or waiting:
                    say(f"\n{ranking.table(BEST)}\n")
            time.sleep(POLL_SECONDS)
    finally:  # only after an error of our own something is running still: nothing may go on that nobody watches
        for one in running:
            one.signal(signal.SIGTERM)
    return list(outcomes.values())


def say(text: str) -> None:
    print(text, flush=True)


def next_of(waiting: Sequence[MatrixRun], running: Sequence[MatrixRun]) -> MatrixRun | None:
    """The first that may start: all but those that begin with a checkpoint of another run here, which that has still to make."""
    to_come = {run.run_dir.resolve() for run in (*waiting, *running)}
    for run in waiting:
        begin = run.begin
        if begin is None or begin.exists() or begin.parent.parent not in to_come - {run.run_dir.resolve()}:
            return run
    return waiting[0] if waiting and not running else None  # which says what it lacks


def require_beginnings(matrix: Matrix, runs: Sequence[MatrixRun]) -> None:
    """InputError where one of `runs` is to begin with a checkpoint of another cell that is not there, and none of `runs` will
    make it. What lies outside of the matrix the launcher itself asks for."""
    to_come = {run.run_dir.resolve() for run in runs if not run.is_finished()}
    for run in runs:
        begin, started = run.begin, step_folders(run.run_dir / "checkpoints")  # with its own it needs no other's any more
        if begin is None or begin.exists() or started or run.is_finished() or begin.parent.parent in to_come:
            continue
        for origin in matrix.runs:
            if origin.run_dir.resolve() == begin.parent.parent:
                has = ", ".join(folder.name for folder in step_folders(begin.parent)) or "no checkpoint"
                raise InputError(
                    f"{matrix.path}, cell {run.name}: `train.begin_with`: {begin} is not there; cell {origin.name} has {has}: "
                    "train that cell first, or name what it keeps (`checkpoint.every`, `checkpoint.keep`)"
                )


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
    runs = matrix.only(options.only)
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
    require_beginnings(matrix, runs)
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
