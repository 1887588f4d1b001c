"""Compare runs in tables and on a page: `python -m pretrain report RUN [RUN ...] [--out FILE]`.

The report only reads the files of the runs and does not import torch. So the command starts at
once, works while the runs are still training, and works on machines without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InputError, require_package
from foundation.files import replace_file
from foundation.units import wrap
from lab.compare.columns import columns_for, tables_of, with_values
from lab.compare.comparison import ComparedRun, compare, notes_on
from lab.compare.differences import MARGIN
from lab.compare.fairness import check_comparable
from lab.compare.page import check_replaceable, render
from lab.compare.seed_groups import SeedComparison
from pretrain.metrics.run_record import RunRecord, read_run


@dataclass(frozen=True)
class Report:
    """Comparison of runs with a baseline. Runs that differ only in their seeds form groups."""

    # The runs, the baseline first. Each run is compared with the baseline's run of the same seed.
    compared_runs: list[ComparedRun]
    # Comparison of the groups with the first group. A group may have only one run.
    seeds: SeedComparison

    @classmethod
    def over(
        cls,
        runs: Sequence[RunRecord],
        vary: Sequence[str] = (),
        *,
        margin: float = MARGIN,
    ) -> Report:
        """Compare each of `runs` with the baseline: the group of the first run.

        Raises InputError if a run cannot be compared fairly with the first run.

        Args:
            runs: The runs, the baseline first.
            vary: Keys and sections in which the runs may differ, because they are the subject of
                the comparison. `seed` need not be listed if the baseline has several seeds.
            margin: Largest difference that counts as equivalent over seeds, as a share of the
                baseline's loss.
        """
        compared_runs = compare(runs)
        base_runs = [compared for compared in compared_runs if compared.is_baseline]
        # Groups are compared over seeds if the baseline has several seeds and there is another
        # group. Without another group, a difference between seeds is refused like any other one.
        over_seeds = 1 < len(base_runs) < len(runs)
        check_comparable(runs, [*vary, "seed"] if over_seeds else vary)
        return cls(compared_runs, SeedComparison.over(compared_runs, margin))

    def tables(self) -> list[str]:
        """Return the answer, the tables and the notes, as paragraphs of a Markdown text."""
        results = self.seeds.results
        parts = [wrap(self.seeds.answer())]
        # If each group has a single run, the answer already has all results over seeds.
        if len(results) < len(self.compared_runs):
            columns = self.seeds.columns()
            meanings = [
                f"{column.title}: {column.meaning}"
                for column in with_values(columns, results)
                if column.meaning
            ]
            parts += [tables_of(columns, results), _bullets(meanings)]
        parts.append(tables_of(columns_for(self.compared_runs), self.compared_runs))
        parts.append(_bullets([*self.seeds.notes, *notes_on(self.compared_runs)]))
        return list(filter(None, parts))

    def write(self, page: Path) -> None:
        """Write the report as an HTML page to the path `page`."""
        replace_file(page, render(self.compared_runs, self.seeds, notes_on(self.compared_runs)))


def _bullets(notes: Iterable[str]) -> str:
    """Return a Markdown list with one item for each note, in lines of at most WIDTH columns."""
    return "\n".join(wrap(f"* {note}") for note in notes)


def main(options: argparse.Namespace) -> int:
    """Run the command and return 0. Raises InputError for a mistake in the arguments."""
    # Patterns such as runs/* also match logs and pages. A file alone is refused below.
    folders = [path for path in options.runs if not path.is_file()] or options.runs
    if options.out:
        if options.out.suffix != ".html":
            raise InputError(
                f"--out {options.out}: the name of the page must end in .html; choose such a name "
                "(to save the tables, redirect the output with `> tables.md`)"
            )
        require_package("plotly", "report", f"--out {options.out}: a page with curves")
        check_replaceable(options.out)
    # If a folder is given twice, the report contains its run only once.
    runs = list({path.resolve(): read_run(path) for path in folders}.values())
    report = Report.over(runs, options.vary, margin=options.margin / 100)
    print("\n\n".join(report.tables()))
    if options.out:
        report.write(options.out)
        print(f"\nWritten: {options.out}")
    return 0
