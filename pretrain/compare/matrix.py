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
from pretrain.compare.columns import HELD_OUT, LOSS, SPEED, STEPS
from pretrain.compare.comparison import RunComparison
from pretrain.compare.fairness import in_words, of_one_text, unfair_differences
from pretrain.compare.matrix_cell import TIME_IS_UP_STATUS, StartedRun, command_of, least_busy
from pretrain.compare.matrix_file import Matrix, MatrixRun, load_matrix
from pretrain.compare.report import Report, read_runs
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import LOSS_KEY, read_run

POLL_SECONDS = 0.2
BEST = 10  # cells that are shown while others still run
HALTED = 3  # the status of a run that its health has stopped

Status = Literal["finished", "finished before", "failed", "halted", "stopped", "not started"]


@dataclass
class Outcome:
    """How a run of the matrix ended, this time."""

    run: MatrixRun
    status: Status = "not started"
    seconds: float | None = None

    @classmethod
    def of(cls, one: StartedRun, exit_status: int, *, asked_to_stop: bool) -> Outcome:
        status: Status = "halted" if exit_status == HALTED else "failed"
        if one.run.is_finished():
            status = "finished"
        elif asked_to_stop or exit_status == TIME_IS_UP_STATUS:
            status = "stopped"
        return cls(one.run, status, time.monotonic() - one.started)


def run_all(matrix: Matrix, runs: Sequence[MatrixRun], stop: StopRequest, *, by_speed: bool = False) -> list[Outcome]:
    """Run what is not finished, in its order and at most `matrix.at_once` at a time, until all have ended, a signal comes or the
    matrix's hours are over. `by_speed`: the fastest cell is the best."""
    outcomes = {run.name: Outcome(run, "finished before" if run.is_finished() else "not started") for run in runs}
    waiting = [run for run in runs if outcomes[run.name].status == "not started"]
    running: list[StartedRun] = []
    at_once, ends = min(matrix.at_once, len(waiting)), time.monotonic() + (matrix.settings.max_hours or math.inf) * 3600
    hours_are_over = False
    if done := len(runs) - len(waiting):
        say(f"{done} of {len(runs)} cells are finished already")

    def goes_on() -> bool:
        return not stop.requested and time.monotonic() < ends

    try:
        while running or (waiting and goes_on()):
            while len(running) < at_once and goes_on() and (run := next_of(waiting, [one.run for one in running])):
                waiting.remove(run)
                try:
                    run.check_folder()
                    slot = least_busy(matrix.slots, running)
                    running.append(StartedRun.start(matrix, run, slot, side_by_side=at_once > (matrix.slots or 1)))
                    say(f"{run.name}: started; its output goes to {run.log}")
                except InputError as error:
                    outcomes[run.name].status = "failed"
                    say(f"{run.name}: failed: {error}")
            signals = [*stop.take()]
            if not hours_are_over and time.monotonic() >= ends:
                hours_are_over = True
                say(f"`max_hours: {matrix.settings.max_hours:g}` are over; what runs saves and stops")
                signals.append(signal.SIGTERM)
            for received in signals:
                say(f"{received.name}: passed on to {', '.join(one.run.name for one in running)}")
                for one in running:
                    one.signal(received)
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                exit_status = one.exit_status()
                outcomes[one.run.name] = outcome = Outcome.of(one, exit_status, asked_to_stop=not goes_on())
                ended = sum(each.status.startswith("finished") for each in outcomes.values())
                say(f"{one.run.name}: {outcome.status} after {duration(outcome.seconds)}, {ended} of {len(runs)} cells done")
                if outcome.status in ("failed", "halted"):
                    say(f"  exit status {exit_status}; the last of {one.run.log}:")
                    say("\n".join(f"  | {line}" for line in one.end_of_log()))
                if running or waiting:
                    say(f"\n{ranking(matrix, matrix.runs, best=BEST, by_speed=by_speed)}\n")
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


def ranking(matrix: Matrix, runs: Sequence[MatrixRun], *, best: int | None = None, by_speed: bool = False) -> str:
    """Markdown: finished cells from the lowest held-out loss to the highest, then those without one by the mean of their last
    training losses, then those that are not finished; the `best` first ones only, or all. `by_speed`: the fastest first. A folder
    that holds another training, of other settings, is named in its place."""
    ranked, strange = [], []
    for run in runs:
        try:
            record = read_run(run.run_dir)
        except InputError:  # not begun, or its first step is still to come
            continue
        if not run.is_in_its_folder():
            strange.append(run)
            continue
        speed, losses = record.summary.get("tokens_per_second", 0.0), map(record.summary.get, ("held_out_loss", LOSS_KEY))
        order = [-speed] if by_speed else [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
        ranked.append(([not run.is_finished(), *order], run, RunComparison.over([record]).baseline))
    ranked.sort(key=lambda entry: entry[0])
    varied, columns = matrix.varied, (HELD_OUT, LOSS, STEPS, SPEED)
    rows = [
        [str(place), *(run.value(key) for key in varied), *(column.text(standing) for column in columns)]
        for place, (_, run, standing) in enumerate(ranked[:best], start=1)
    ]
    records = [standing.run for _, _, standing in ranked]
    notes = [f"{len(ranked) - len(rows)} more"] if len(rows) < len(ranked) else []
    if (left := len(runs) - len(ranked) - len(strange)) and best is None:
        notes.append(f"{left} of {len(runs)} cells have not begun")
    if strange:
        differ, names = strange[0].unlike_in_its_folder(), ", ".join(run.name for run in strange)
        notes.append(
            f"Left out, since their run folders hold trainings of other settings: {names}. {strange[0].run_dir} (now, and then): "
            f"{in_words(differ)}; give the `key=value` that they were trained with, or name another `run_dir`"
        )
    if not of_one_text([record for record in records if "held_out_loss" in record.summary]):
        notes.append("The cells were evaluated on different text, so their held-out losses do not say which is better.")
    table = markdown(["#", *varied, *(column.title for column in columns)], rows, names=1 + len(varied)) if rows else ""
    return "\n\n".join(filter(None, [table, *notes])) or "No cell has trained a step yet."


def write_report(matrix: Matrix) -> str:
    """Write the report over all runs that have come to an end and are comparable (an axis may be a learning rate); returns what
    to print. A run that was halted is named in it: without it, the mean of its other seeds would flatter its cell."""
    finished = [run for run in matrix.runs if run.is_finished()]
    if not finished:
        return "No cell is finished, so there is nothing to report yet."
    # Another seed of the baseline's cell, where its own came to no end: all of the cell's are what others are held against.
    own = [run for run in finished if run.but_for_seed == matrix.baseline.but_for_seed]
    baseline = matrix.baseline if matrix.baseline in finished else (own or finished)[0]
    ended = [run for run in matrix.runs if run in finished or has_halted(run)]
    vary = list(dict.fromkeys(key for run in matrix.runs for key in run.settings))
    first, *others = read_runs([run.run_dir for run in ended], baseline.run_dir)
    unfair = {run.name: unfair_differences(first, run, vary) for run in others}
    report = Report.over([first, *(run for run in others if not unfair[run.name])], vary)
    report.write(**report_files(matrix))
    parts = report.tables(brief=True)
    parts += [f"{name} is left out: it differs from {first.name} in {in_words(why)}" for name, why in unfair.items() if why]
    parts.append(f"Written: {', '.join(map(str, report_files(matrix).values()))}")
    if not own:
        parts.append(f"The baseline {matrix.baseline.name} is not finished: {baseline.name} stands in its place.")
    if missing := len(matrix.runs) - len(ended):
        parts.append(f"{missing} of {len(matrix.runs)} cells are not finished and not in it.")
    return "\n\n".join(parts)


def has_halted(run: MatrixRun) -> bool:
    """Whether the run folder holds this very training, and its health has stopped it."""
    try:
        return "halted" in read_run(run.run_dir).summary and run.is_in_its_folder()
    except InputError:  # not begun, or damaged
        return False


def report_files(matrix: Matrix) -> dict[str, Path]:
    """Where the report goes, by what `Report.write` calls it."""
    endings = {"picture": "png", "tables_file": "md", "page": "html"}
    return {what: matrix.folder / f"{matrix.settings.name}.{ending}" for what, ending in endings.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = parse_arguments(arguments)
    changes = {key: getattr(options, key) for key in ("at_once", "gpus", "processes", "max_hours")}
    matrix = load_matrix(options.matrix, options.overrides, **{key: value for key, value in changes.items() if value is not None})
    runs = matrix.only(options.only)
    if options.cell is not None:
        if options.cell >= len(runs):
            raise InputError(f"command line: --cell {options.cell}: no such cell; they are counted from 0 to {len(runs) - 1}")
        runs = [runs[options.cell]]
    if options.count:
        print(len(runs))
    elif options.dry_run:
        for run in runs:
            print(f"# {run.name}{' (finished)' if run.is_finished() else ''}\n{shlex.join(command_of(matrix, run))}")
    elif options.table:
        print(ranking(matrix, runs))
    else:
        return carry_out(matrix, runs, single=options.cell is not None)
    return 0


def carry_out(matrix: Matrix, runs: Sequence[MatrixRun], *, single: bool) -> int:
    """Run `runs`, say how they ended and how the matrix's cells compare; returns the exit status. `single`: a cell by itself,
    whose matrix others may be running."""
    # Its lock: two of these would start the same runs. Single cells run beside each other, each under its own run's lock.
    lock = contextlib.nullcontext() if single else RunFolder(matrix.folder)
    with lock, StopRequest(passed_on=True) as stop:
        for file in () if single else report_files(matrix).values():
            check_replaceable(file, f"{matrix.path}, its report")
        outcomes = run_all(matrix, runs, stop)
        rows = [[each.run.name, each.status, or_dash(each.seconds, duration), str(each.run.run_dir)] for each in outcomes]
        say(f"\n{markdown(['cell', 'status', 'took', 'run folder'], rows, names=4)}\n")
        if not single:
            if "seed" not in matrix.varied or matrix.varied == ["seed"]:  # else the report ranks by seeds together
                say(f"Best first:\n\n{ranking(matrix, matrix.runs)}\n")
            say(write_report(matrix))
    if stop.requested:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 128 + stop.requested
    if any(outcome.status in ("stopped", "not started") for outcome in outcomes):
        print("\nhours are over; the same command goes on from here", file=sys.stderr)
        return TIME_IS_UP_STATUS
    return 0 if all(outcome.status.startswith("finished") for outcome in outcomes) else 1


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
