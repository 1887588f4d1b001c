"""Run all cells of an experiment and compare them: `python -m pretrain matrix MATRIX.yaml`.

A cell is one training run of the experiment.

Exit status: 0 if all cells are finished, 1 if a cell failed, 2 for invalid input, and 130, 138 or
143 if a signal stopped the command.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.signals import StopRequest
from foundation.units import duration, markdown, or_dash
from pretrain.compare.comparison import TOLERANCE
from pretrain.compare.matrix_file import Cell, Matrix, key_of, load_matrix
from pretrain.compare.matrix_run import command_of, report_stop, run_all, say
from pretrain.compare.output_files import check_replaceable
from pretrain.compare.report import Report
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import LOSS_KEY, RunRecord


def ranked(cells: Sequence[Cell]) -> list[RunRecord]:
    """Sort the runs of all cells that have at least one step, the best run first.

    Finished runs are placed before unfinished runs. Among both, runs with a held-out loss are
    placed before runs without one, which are sorted by their training loss. Within each of these
    four classes, lower losses are placed first, but small differences are ignored: the best run and
    all runs within TOLERANCE of its loss have the same rank. The next worse run and all runs within
    TOLERANCE of that run's loss have the next rank. Runs of the same rank are in the order of
    `cells`.
    """
    entries = []
    for cell in cells:
        if run := cell.record():
            run_class = (not cell.is_finished(), "held_out_loss" not in run.summary)
            training_loss = run.summary.get(LOSS_KEY, math.inf)
            entries.append((run_class, run.summary.get("held_out_loss", training_loss), run))
    # Map the path of each run to its rank: its class and the lowest loss of the runs of that rank.
    ranks = {}
    best: tuple[Any, float] = (None, 0.0)
    for run_class, loss, run in sorted(entries, key=lambda entry: entry[:2]):
        if run_class != best[0] or loss - best[1] > TOLERANCE:
            best = (run_class, loss)
        ranks[run.path] = best
    return sorted((run for *_, run in entries), key=lambda run: ranks[run.path])


def write_report(matrix: Matrix) -> str:
    """Write the report's HTML page and return the report as text for the console.

    The report has the baseline first, and then all finished and halted cells, the best first.
    Halted cells are included, because the mean over the other seeds of a halted cell would look too
    good.
    """
    finished = [cell for cell in matrix.cells if cell.is_finished()]
    if not finished:
        return "No cell is finished, so there is no report yet."
    # If the baseline is not finished, the cell with the same settings and another seed replaces it,
    # or else the first finished cell.
    seeds = [cell for cell in finished if cell.but_for_seed == matrix.baseline.but_for_seed]
    baseline = matrix.baseline if matrix.baseline in finished else (seeds or finished)[0]
    folders = {cell.run_dir for cell in finished}
    runs = [run for run in ranked(matrix.cells) if run.path in folders or "halted" in run.summary]
    vary = {key_of(text) for cell in matrix.cells for text in cell.overrides}
    vary.add("data.fingerprint")
    report = Report.over(sorted(runs, key=lambda run: run.path != baseline.run_dir), [*vary])
    page = page_of(matrix)
    report.write(page)
    parts = [*report.tables(), f"Written: {page}"]
    if not seeds:
        parts.append(
            f"The baseline {matrix.baseline.name} is not finished, so this report uses "
            f"{baseline.name} as the baseline."
        )
    if missing := len(matrix.cells) - len(runs):
        parts.append(
            f"{missing} of {len(matrix.cells)} cells are not finished and are not included."
        )
    return "\n\n".join(parts)


def page_of(matrix: Matrix) -> Path:
    """Return the path of the report's HTML page."""
    return matrix.folder / f"{matrix.settings.name}.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Raises InputError for a mistake in the arguments or in the matrix file.
    """
    options = parse_arguments(arguments)
    matrix = load_matrix(
        options.matrix,
        options.overrides,
        at_once=options.at_once,
        gpus=options.gpus,
        processes=options.processes,
    )
    cells = matrix.only(options.only)
    if options.cell is not None:
        if options.cell >= len(cells):
            raise InputError(
                f"command line: --cell {options.cell}: there is no such cell; choose a number from "
                f"0 to {len(cells) - 1}"
            )
        cells = [cells[options.cell]]
    if options.count:
        print(len(cells))
    elif options.dry_run:
        for cell in cells:
            finished = " (finished)" if cell.is_finished() else ""
            print(f"# {cell.name}{finished}\n{shlex.join(command_of(matrix, cell))}")
    else:
        return run_cells(matrix, cells, single=options.cell is not None)
    return 0


def run_cells(matrix: Matrix, cells: Sequence[Cell], *, single: bool) -> int:
    """Run `cells` of the matrix, print their results and the report, and return the exit status.

    `single` is true if `cells` has only the cell that `--cell` selects. Then no report is written,
    because other jobs of the same job array may still run the other cells.
    """
    # The lock of the matrix folder prevents two commands from starting the same runs. `--cell` does
    # not lock it, so that several jobs can each run one cell. The run of the cell locks its own
    # folder.
    lock = contextlib.nullcontext() if single else RunFolder(matrix.folder)
    with lock, StopRequest(passed_on=True) as stop:
        if not single:
            check_replaceable(page_of(matrix), f"{matrix.path}: report")
            finished = sum(cell.is_finished() for cell in cells)
            say(f"{finished} of {len(cells)} cells are already finished")
        outcomes = run_all(matrix, cells, stop)
        rows = [
            [
                outcome.cell.name,
                outcome.status,
                or_dash(outcome.seconds or None, duration),
                str(outcome.cell.run_dir),
            ]
            for outcome in outcomes
        ]
        say(f"\n{markdown(['cell', 'status', 'took', 'run folder'], rows, names=4)}\n")
        if not single:
            say(write_report(matrix))
    if stop.requested:
        return report_stop(stop.requested)
    return 0 if all(outcome.is_finished for outcome in outcomes) else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises InputError for a mistake."""
    parser = CommandParser(
        prog="python -m pretrain matrix",
        description="Run all cells of an experiment and compare them. A cell is one training run "
        "of the experiment. Finished cells are not run again.",
    )
    parser.add_argument(
        "matrix",
        type=Path,
        help="YAML file that describes the experiment; examples are in recipes/matrices/",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the recipe in every cell",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="key=value",
        help="run only the cells in which this setting has this value; may be repeated",
    )
    parser.add_argument(
        "--cell",
        type=int,
        metavar="N",
        help="run only the selected cell with this number, counted from 0; for job arrays",
    )
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="maximum number of cells that run at the same time"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs of this machine over which the cells are distributed",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes that train each cell"
    )
    parser.add_argument("--count", action="store_true", help="print the number of cells and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command that runs each cell, and exit"
    )
    return parser.parse_intermixed_args(arguments)
