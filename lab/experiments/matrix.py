"""Run all cells of an experiment and compare them: `python -m pretrain matrix MATRIX.yaml`.

A cell is one training run of the experiment.

Exit status: 0 if all cells are finished, 1 if a cell failed, 2 for invalid input, and 130, 138 or
143 if a signal stopped the command.
"""

from __future__ import annotations

import argparse
import math
from importlib.util import find_spec
from pathlib import Path

from foundation.signals import StopRequest
from lab.compare.fairness import same_held_out
from lab.compare.page import check_replaceable
from lab.compare.report import Report
from lab.experiments.matrix_file import Matrix, key_of, load_matrix
from lab.experiments.matrix_run import launch_of, report_stop, run_all, say
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import LOSS_KEY, RunRecord

NO_PAGE = (
    "The page with curves needs the package plotly: run `pip install plotly`, and then this "
    "command again."
)


def write_report(matrix: Matrix) -> str:
    """Write the report's HTML page and return the report as text for the console.

    Without the package plotly, no page is written.

    The first run in the tables is the baseline. All other finished and halted cells follow, the
    best cell first. If a halted cell were omitted, the mean over the other seeds with the same
    settings would look better than it is. If no two cells differ only in their seeds, and all were
    evaluated on the same data, the first line names the cell with the lowest held-out loss. Failed
    cells are ignored there.
    """
    baseline = matrix.baseline
    base = baseline.record()
    if base is None or not base.is_finished:
        return f"There is no report, because the baseline {baseline.name} is not finished."
    records = [cell.record() for cell in matrix.cells if cell != baseline]
    ended = [run for run in records if run and run.has_ended]
    runs = [base, *sorted(ended, key=_sort_key)]
    included = {run.path for run in runs}
    # The cells may differ in every setting that a cell overrides. Such a setting may change the
    # data, so the fingerprint of the data may differ too. If a cell sets fewer steps than the
    # schedule has, the training shortens the warm-up and the decay.
    vary = {key_of(text) for cell in matrix.cells for text in cell.overrides}
    report = Report.over(runs, [*vary, "data.fingerprint", "schedule.warmup", "schedule.decay"])
    page = page_of(matrix)
    written = NO_PAGE
    if find_spec("plotly"):
        report.write(page)
        written = f"Written: {page}"
    parts = [*report.tables(), written]
    # A failed run may have been evaluated before it failed.
    evaluated = [run for run in runs if not run.failure and "held_out_loss" in run.summary]
    has_one_seed = len(report.seeds.results) == len(runs)
    if has_one_seed and evaluated and all(same_held_out(evaluated[0], run) for run in evaluated):
        best = min(evaluated, key=lambda run: run.summary["held_out_loss"])
        parts.insert(0, f"Lowest held-out loss: {best.summary['held_out_loss']:.4f}, {best.name}.")
    missing = [cell.name for cell in matrix.cells if cell.run_dir not in included]
    if missing:
        parts.append(f"Not finished, and so not in this report: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _sort_key(run: RunRecord) -> list[float]:
    """Return the sort key of a run in the report.

    Finished runs precede halted runs. Runs are then sorted by their held-out loss, and by their
    training loss if there is no held-out loss, or if two of them are equal. An unknown loss is
    treated as infinite.
    """
    losses = [run.summary.get(key, math.inf) for key in ("held_out_loss", LOSS_KEY)]
    return [not run.is_finished, *losses]


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
        print(f"# {cell.name}\n{launch_of(matrix, cell).text}")
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
        with StopRequest(passed_on=True) as stop:
            outcomes = run_all(matrix, matrix.cells, stop)
        say(f"\n{write_report(matrix)}")
    if stop.requested:
        return report_stop(stop.requested)
    return 0 if all(outcome.is_finished for outcome in outcomes) else 1
