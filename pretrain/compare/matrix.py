"""Run every cell of a comparison: `python -m pretrain matrix MATRIX.yaml [key=value ...] [--only precision=bf16] [--dry-run]`.

Exit status: 0 all finished, 1 some run failed, 2 something given cannot be used (one message says what), 130, 138 or 143 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.signals import StopRequest
from foundation.units import duration, markdown, or_dash
from pretrain.compare.comparison import TOLERANCE
from pretrain.compare.matrix_file import Cell, Matrix, load_matrix
from pretrain.compare.matrix_run import command_of, run_all, say, stopped
from pretrain.compare.output_files import check_replaceable
from pretrain.compare.report import Report
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import LOSS_KEY, RunRecord


def ranked(cells: Sequence[Cell]) -> list[RunRecord]:
    """The runs of cells that have begun, the best first: finished ones from the lowest held-out loss to the highest, then those
    without one by their training losses, then those that are not finished. Such as lie within TOLERANCE of the best among them
    are equals, and stand in the order of `cells`."""
    entries = []
    for place, cell in enumerate(cells):
        if run := cell.record():
            kind = not cell.is_finished(), "held_out_loss" not in run.summary
            entries.append(
                (
                    kind,
                    run.summary.get("held_out_loss", run.summary.get(LOSS_KEY, math.inf)),
                    place,
                    run,
                )
            )
    ranks, best = [], (None, 0.0)
    for kind, loss, place, run in sorted(entries, key=lambda entry: entry[:2]):
        best = best if kind == best[0] and loss - best[1] <= TOLERANCE else (kind, loss)
        ranks.append((*best, place, run))
    return [run for *_, run in sorted(ranks, key=lambda rank: rank[:3])]


def write_report(matrix: Matrix) -> str:
    """Write the report over all cells that have come to an end, best first; returns what to print. One that was halted is named
    in it: without it, the mean of its other seeds would flatter its cell."""
    finished = [cell for cell in matrix.cells if cell.is_finished()]
    if not finished:
        return "No cell is finished, so there is nothing to report yet."
    # Another seed of the baseline's cell, where its own came to no end: all of the cell's are what others are held against.
    own = [cell for cell in finished if cell.but_for_seed == matrix.baseline.but_for_seed]
    baseline = matrix.baseline if matrix.baseline in finished else (own or finished)[0]
    folders = {cell.run_dir for cell in finished}
    runs = [run for run in ranked(matrix.cells) if run.path in folders or "halted" in run.summary]
    vary = dict.fromkeys(text.partition("=")[0] for cell in matrix.cells for text in cell.overrides)
    report = Report.over(
        sorted(runs, key=lambda run: run.path != baseline.run_dir), [*vary, "data.fingerprint"]
    )
    report.write(page := page_of(matrix))
    parts = [*report.tables(), f"Written: {page}"]
    if not own:
        parts.append(
            f"The baseline {matrix.baseline.name} is not finished: {baseline.name} stands in its place."
        )
    if missing := len(matrix.cells) - len(runs):
        parts.append(f"{missing} of {len(matrix.cells)} cells are not finished and not in it.")
    return "\n\n".join(parts)


def page_of(matrix: Matrix) -> Path:
    return matrix.folder / f"{matrix.settings.name}.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = parse_arguments(arguments)
    changes = {
        key: value
        for key in ("at_once", "gpus", "processes")
        if (value := getattr(options, key)) is not None
    }
    matrix = load_matrix(options.matrix, options.overrides, **changes)
    cells = matrix.only(options.only)
    if options.cell is not None:
        if options.cell >= len(cells):
            raise InputError(
                f"command line: --cell {options.cell}: no such cell; they are counted from 0 to {len(cells) - 1}"
            )
        cells = [cells[options.cell]]
    if options.count:
        print(len(cells))
    elif options.dry_run:
        for cell in cells:
            print(
                f"# {cell.name}{' (finished)' if cell.is_finished() else ''}\n{shlex.join(command_of(matrix, cell))}"
            )
    else:
        return carry_out(matrix, cells, single=options.cell is not None)
    return 0


def carry_out(matrix: Matrix, cells: Sequence[Cell], *, single: bool) -> int:
    """Run `cells`, say how they ended and how the matrix's cells compare; returns the exit status. `single`: a cell by itself,
    whose matrix others may be running."""
    # Its lock: two of these would start the same runs. Single cells run beside each other, each under its own run's lock.
    lock = contextlib.nullcontext() if single else RunFolder(matrix.folder)
    with lock, StopRequest(passed_on=True) as stop:
        if not single:
            check_replaceable(page_of(matrix), f"{matrix.path}, its report")
            say(
                f"{sum(cell.is_finished() for cell in cells)} of {len(cells)} cells are finished already"
            )
        outcomes = run_all(matrix, cells, stop)
        rows = [
            [each.cell.name, each.status, or_dash(each.seconds, duration), str(each.cell.run_dir)]
            for each in outcomes
        ]
        say(f"\n{markdown(['cell', 'status', 'took', 'run folder'], rows, names=4)}\n")
        if not single:
            say(write_report(matrix))
    if stop.requested:
        return stopped(stop)
    return 0 if all(outcome.is_finished for outcome in outcomes) else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m pretrain matrix",
        description="Run every cell of a comparison and report on it.",
    )
    add = parser.add_argument
    add("matrix", type=Path, help="what is compared: a YAML file, see recipes/matrices/")
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="over the recipe's settings, in every cell",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="key=value",
        help="run these cells only; may be repeated",
    )
    add(
        "--cell",
        type=int,
        metavar="N",
        help="run one cell alone, of those picked the N-th from 0, as an array of jobs does",
    )
    add("--at-once", type=int, metavar="N", help="cells side by side")
    add("--gpus", type=int, metavar="N", help="GPUs of this machine to spread the cells over")
    add("--processes", type=int, metavar="N", help="processes of each cell")
    add("--count", action="store_true", help="print the number of cells, and stop")
    add("--dry-run", action="store_true", help="print the command of each cell, and stop")
    return parser.parse_intermixed_args(arguments)
