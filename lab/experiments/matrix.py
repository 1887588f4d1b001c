"""Run all cells of an experiment and compare them: `python -m pretrain matrix MATRIX.yaml`.

A cell is one training run of the experiment.

Exit status: 0 if all cells are finished, 1 if a cell failed, 2 for invalid input, and 130, 138 or
143 if a signal stopped the command.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from foundation.signals import StopRequest
from foundation.units import duration, markdown, or_dash
from lab.compare.differences import MARGIN
from lab.compare.fairness import same_held_out
from lab.compare.page import check_replaceable
from lab.compare.report import Report
from lab.experiments.matrix_file import Matrix, key_of, load_matrix
from lab.experiments.matrix_run import launch_of, report_stop, run_all, say
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import LOSS_KEY, RunRecord


def write_report(matrix: Matrix) -> str:
    """Write the report's HTML page and return the report as text for the console.

    The first run in the tables is the baseline. All other finished and halted cells follow, the
    best cell first. If a halted cell were omitted, the mean over the other seeds with the same
    settings would look better than it is. If no two cells differ only in their seeds, and all were
    evaluated on the same data, the first line names the cell with the lowest held-out loss.
    """
    baseline = matrix.baseline
    base = baseline.record()
    if base is None or not base.is_finished:
        return f"There is no report, because the baseline {baseline.name} is not finished."
    records = [cell.record() for cell in matrix.cells if cell != baseline]
    ended = [run for run in records if run and run.has_ended]
    runs = [base, *sorted(ended, key=_place)]
    # The cells may differ in every setting that a cell overrides. Such a setting may change the
    # data, so the fingerprint of the data may differ too.
    vary = {key_of(text) for cell in matrix.cells for text in cell.overrides}
    report = Report.over(runs, [*vary, "data.fingerprint"])
    page = page_of(matrix)
    report.write(page)
    parts = [*report.tables(), f"Written: {page}"]
    evaluated = [run for run in runs if "held_out_loss" in run.summary]
    has_one_seed = len(report.seeds.results) == len(runs)
    if has_one_seed and evaluated and all(same_held_out(evaluated[0], run) for run in evaluated):
        parts.insert(0, lowest_loss(evaluated))
    if missing := len(matrix.cells) - len(runs):
        parts.append(
            f"{missing} of {len(matrix.cells)} cells are not finished, so this report does not "
            "include them."
        )
    return "\n\n".join(parts)


def _place(run: RunRecord) -> list[float]:
    """Return the sort key of a run. Runs without a held-out loss are the last ones."""
    losses = [run.summary.get(key, math.inf) for key in ("held_out_loss", LOSS_KEY)]
    return [not run.is_finished, *losses]


def lowest_loss(runs: Sequence[RunRecord]) -> str:
    """Return a line with the lowest held-out loss, and the runs that may be as good.

    Another seed may change the order of losses that differ by less than MARGIN.
    """
    losses = {run.name: run.summary["held_out_loss"] for run in runs}
    best = min(losses, key=losses.__getitem__)
    lowest = losses.pop(best)
    line = f"Lowest held-out loss: {lowest:.4f}, {best}."
    close = [name for name, loss in losses.items() if loss < (1 + MARGIN) * lowest]
    if close:
        line += (
            f" Another seed may change the order of {best} and {', '.join(close)}, because their "
            f"losses differ by less than {100 * MARGIN:g} %."
        )
    return line


def page_of(matrix: Matrix) -> Path:
    """Return the path of the report's HTML page."""
    return matrix.folder / f"{matrix.settings.name}.html"


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Raises InputError for a mistake in the arguments or in the matrix file.
    """
    matrix = load_matrix(
        options.matrix, options.overrides, at_once=options.at_once, gpus=options.gpus
    )
    if not options.dry_run:
        return run_cells(matrix)
    for cell in matrix.cells:
        launch = launch_of(matrix, cell)
        command = ["python", "-m", "pretrain", "train", *launch.script_arguments]
        command += ["--config", str(launch.configuration)]
        if launch.processes is not None:
            command += ["--processes", str(launch.processes)]
        print(f"# {cell.name}\n{shlex.join(command)}")
    return 0


def run_cells(matrix: Matrix) -> int:
    """Run the cells of the matrix, print their results and the report, and return the exit status.

    The lock of the matrix folder prevents two commands from starting the same runs.
    """
    with RunFolder(
        matrix.folder,
        remedy="set --at-once of one command, so that it trains more cells at the same time",
    ):
        check_replaceable(page_of(matrix), f"{matrix.path}: report")
        finished = sum(cell.is_finished() for cell in matrix.cells)
        say(f"{finished} of {len(matrix.cells)} cells are already finished")
        with StopRequest(passed_on=True) as stop:
            outcomes = run_all(matrix, matrix.cells, stop)
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
        say(write_report(matrix))
    if stop.requested:
        return report_stop(stop.requested)
    return 0 if all(outcome.is_finished for outcome in outcomes) else 1
