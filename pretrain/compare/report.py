"""Tables and a page from what runs left behind: `python -m pretrain report RUN [RUN ...] [--out report.html] [--vary KEY]`.

Reads files only and imports no torch: it starts at once, works while a run is going, and on a machine that could not train it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.files import replace_file
from foundation.units import plural
from pretrain.compare.columns import differences_of, figures_of, meanings, signed, table_of
from pretrain.compare.comparison import TOLERANCE, RunComparison
from pretrain.compare.differences import FEWEST_SEEDS, MARGIN
from pretrain.compare.fairness import check_comparable
from pretrain.compare.output_files import check_replaceable
from pretrain.compare.page import render
from pretrain.compare.seed_groups import SeedComparison, grouped
from pretrain.metrics.run_record import NoStepYet, RunRecord, read_finished, read_run


@dataclass(frozen=True)
class Report:
    """Runs that may be compared, and where these are several groups of seeds the comparison over them, which stands first."""

    comparison: RunComparison
    seeds: SeedComparison | None

    @classmethod
    def over(
        cls,
        runs: Sequence[RunRecord],
        vary: Sequence[str] = (),
        *,
        tolerance: float = TOLERANCE,
        margin: float = MARGIN,
    ) -> Report:
        """`vary`: keys that may differ, as they are what is compared; several seeds of the baseline name `seed`. `margin`: what a
        comparison over seeds takes. InputError where a run cannot be compared fairly with the first."""
        first, *others = grouped(runs).values()
        over_seeds = len(first) > 1 and bool(others)
        check_comparable(runs, [*vary, "seed"] if over_seeds else vary)
        return cls(
            RunComparison.over(runs, tolerance),
            SeedComparison.over(runs, margin) if over_seeds else None,
        )

    @property
    def answer(self) -> str:
        return (self.seeds or self.comparison).answer()

    def tables(self) -> list[str]:
        """The answer, the tables and what to note, in Markdown."""
        comparison, seeds, parts = self.comparison, self.seeds, [self.answer]
        if seeds:
            columns, paired = seeds.columns(), [each for each in seeds.others if each.difference]
            parts += [
                table_of(columns, seeds.results),
                _bullets([*meanings(columns), *seeds.notes()]),
            ]
            parts += [table_of(seeds.columns_by_seed(), paired)] if paired else []
        parts.append(table_of(figures_of(comparison), comparison.standings))
        columns = [] if seeds or not comparison.standings[1:] else differences_of(comparison)
        parts += [table_of(columns, comparison.standings[1:])] if columns else []
        parts.append(_bullets([*meanings(columns), *comparison.notes(over_seeds=bool(seeds))]))
        return [part for part in parts if part]

    def write(self, page: Path, *, every: float | None = None) -> None:
        """Write the page, which is read again `every` so many seconds."""
        replace_file(page, render(self.comparison, self.seeds, self.answer, every))

    def judge(self) -> list[str]:
        """Why the gate is not passed, a line for each run or group of seeds; InputError where there is nothing to hold it
        against."""
        if self.seeds:
            return list(_failed_groups(self.seeds, self.comparison.tolerance))
        base, others = self.comparison.baseline, self.comparison.standings[1:]
        if not others:
            raise InputError(f"--gate: {base.label} is the only run; name at least one other")
        if base.run.broke_off or base.run.is_unfinished:
            raise InputError(
                f"--gate: the baseline {base.label} came to no end; name a finished run first"
            )
        failures = []
        for each in others:
            if each.run.broke_off:
                failures.append(f"{each.label} {each.run.broke_off}")
            elif each.not_paired:
                raise InputError(
                    f"--gate: {each.label} cannot be held against {base.label}: {each.not_paired}"
                )
            elif each.run.is_unfinished:
                failures.append(
                    f"{each.label} is not finished: it has {plural(each.run.summary['steps'], 'step')}"
                )
            # without an interval the mean is judged
            elif not each.gap.upper <= self.comparison.tolerance:
                half = f" ± {each.gap.half_width:.5f}" if each.gap.half_width is not None else ""
                end = f"{signed(each.gap.mean, 5)}{half} nats from {base.label}, over the last {each.gap.steps} steps"
                failures.append(
                    f"{each.label} ends {end}; {self.comparison.tolerance:g} are allowed"
                )
        return failures


def _failed_groups(seeds: SeedComparison, tolerance: float) -> Iterable[str]:
    """A group passes with the upper end of its interval over seeds, where all of its runs came to their end."""
    base = seeds.baseline
    if len(base.losses) < len(base.runs):
        raise InputError(
            f"--gate: not every run of the baseline {base.name} came to its end; finish them, or name another"
        )
    for each in seeds.others:
        half_width = each.difference.half_width() if each.difference else None
        if missing := len(each.runs) - len(each.losses):
            yield f"{each.name}: {plural(missing, 'run')} of {len(each.runs)} came to no end that counts"
        elif half_width is None:
            yield f"{each.name} has too few seeds in common with {base.name}: an interval needs {FEWEST_SEEDS}"
        elif each.difference.mean + half_width > tolerance:
            end = f"{signed(each.difference.mean)} ± {half_width:.4f} nats from {base.name}"
            yield f"{each.name} ends {end}, over {len(each.difference.by_seed)} seeds; {tolerance:g} are allowed"


def _bullets(notes: Iterable[str]) -> str:
    return "\n".join(f"* {note}" for note in notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = _parse(arguments)
    if options.watch is not None:
        report = watch(options)
    else:
        report = _report_on(options)
        if options.out:
            report.write(options.out)
        print(
            "\n\n".join([*report.tables(), *([f"Written: {options.out}"] if options.out else [])])
        )
    if options.gate is None:
        return 0
    failures = report.judge() if report else ["no run has a step yet"]
    for failure in failures:
        print(f"gate: {failure}")
    print(
        f"gate of {options.gate:g} nats: {f'failed by {len(failures)}' if failures else 'passed'}"
    )
    return 1 if failures else 0


def _report_on(options: argparse.Namespace) -> Report:
    """On the runs of the folders named, each once, in their order. Files among them, as `runs/*` has, are passed over."""
    folders = [path for path in options.runs if not path.is_file()] or options.runs
    runs = list({path.resolve(): read_run(path) for path in folders}.values())
    tolerance = TOLERANCE if options.gate is None else options.gate
    return Report.over(runs, options.vary, tolerance=tolerance, margin=options.margin / 100)


def watch(options: argparse.Namespace) -> Report | None:
    """Write the page every so many seconds, until all runs have ended or Ctrl-C comes; returns what stands in it. A run that has
    not begun is waited for."""
    report, going = None, True
    print(
        f"following {', '.join(map(str, options.runs))} in {options.out}; Ctrl-C ends it",
        flush=True,
    )
    with suppress(KeyboardInterrupt):
        while going:
            with suppress(NoStepYet):
                report = _report_on(options)
                # Until all are halted, or have written their summaries, the last thing of all. Of a killed one nobody can tell.
                going = not all(
                    "halted" in run.summary or read_finished(run.path)
                    for run in report.comparison.runs
                )
                report.write(options.out, every=options.watch)
            if going:
                time.sleep(options.watch)
    if report:
        report.write(options.out)
        print(f"{report.answer}\n\nPage: {options.out}")
    return report


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m pretrain report", description="Run folders side by side, or one alone."
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folder; others are held against the first",
    )
    add("--out", type=Path, metavar="PAGE.html", help="write everything as a page, too")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="KEY",
        help="a key, or section, that may differ; repeatable",
    )
    add(
        "--gate",
        type=float,
        metavar="NATS",
        help="exit with 1 if a run's loss ends further than this above the baseline's",
    )
    add(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="follow running runs: write the page repeatedly",
    )
    margin = f"over seeds: of the baseline's loss, within which a difference counts as none (default: {100 * MARGIN:g})"
    add("--margin", type=float, default=100 * MARGIN, metavar="PERCENT", help=margin)
    options = parser.parse_intermixed_args(arguments)
    if options.out:
        if options.out.suffix != ".html":
            raise InputError(
                f"--out {options.out}: a page is written, whose name ends in .html; `> tables.md` keeps the tables"
            )
        check_replaceable(options.out)
    elif options.watch is not None:
        raise InputError("--watch writes a page again and again: give --out report.html")
    return options
