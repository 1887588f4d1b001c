"""Tables and a page from what runs left behind: `python -m pretrain report RUN [RUN ...] [--out report.html] [--vary KEY]`.

Reads files only and imports no torch: it starts at once, works while a run is going, and on a machine that could not train it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.files import MARKDOWN_MARK, check_replaceable, save_file
from foundation.reading import load_json
from foundation.units import plural
from pretrain.compare.columns import differences_of, figures_of, meanings, signed, table_of
from pretrain.compare.comparison import TOLERANCE, RunComparison
from pretrain.compare.differences import FEWEST_SEEDS, MARGIN, last_steps
from pretrain.compare.fairness import check_comparable
from pretrain.compare.page import render
from pretrain.compare.seed_groups import SeedComparison, grouped
from pretrain.metrics.run_folder import METRICS_FILE
from pretrain.metrics.run_record import NoStepYet, RunRecord, read_finished, read_run
from pretrain.settings.config import resolved
from pretrain.settings.recipe import Recipe

DAY = 86_400  # seconds


@dataclass(frozen=True)
class Report:
    """Runs that may be compared, and where the baseline was trained with several seeds the comparison over these."""

    comparison: RunComparison
    seeds: SeedComparison | None

    @classmethod
    def over(
        cls,
        runs: Sequence[RunRecord],
        vary: Sequence[str] = (),
        *,
        tolerance: float = TOLERANCE,
        margin: float | None = None,
    ) -> Report:
        """`vary`: keys that may differ, as they are what is compared; several seeds of the baseline name `seed`. `margin`: what a
        comparison over seeds takes. InputError where a run cannot be compared fairly with the first."""
        groups = grouped(runs)
        several = len(groups[0].runs) > 1
        check_comparable(runs, [*vary, "seed"] if several and groups[1:] else vary)
        if margin is not None and not several:
            raise InputError("--margin: is for a comparison over seeds, and the baseline has one seed alone; leave it out")
        seeds = SeedComparison.over(runs, MARGIN if margin is None else margin)
        return cls(RunComparison.over(runs, tolerance), seeds)

    @property
    def by_seeds(self) -> SeedComparison | None:
        """The comparison of several groups of seeds, which then stands first."""
        return self.seeds if self.seeds and self.seeds.others else None

    @property
    def answer(self) -> str:
        return (self.seeds or self.comparison).answer()

    def tables(self, *, brief: bool = False) -> list[str]:
        """The answer, the tables and what to note, in Markdown. `brief`: over seeds without the table of single runs."""
        comparison, over_seeds = self.comparison, self.by_seeds
        parts, columns = [self.answer], []
        if over_seeds:
            of_groups, paired = over_seeds.columns(), [each for each in over_seeds.others if each.difference]
            parts += [table_of(of_groups, over_seeds.results), _bullets([*meanings(of_groups), *over_seeds.notes()])]
            parts += [table_of(over_seeds.columns_by_seed(), paired)] if paired else []
        if not (over_seeds and brief):
            parts.append(table_of(figures_of(comparison), comparison.standings))
            if not over_seeds and comparison.standings[1:]:
                columns = differences_of(comparison)
                parts.append(table_of(columns, comparison.standings[1:]))
            parts.append(_bullets([*meanings(columns[1:]), *comparison.notes(over_seeds=bool(over_seeds))]))
        return [part for part in parts if part]

    def write(self, tables_file: Path | None, page: Path | None, *, gate: bool = False, every: float | None = None) -> None:
        """Write what has a place: the Markdown file, and the page with what the `gate` says of it, which is read again `every` so
        many seconds."""
        if tables_file:
            save_file(tables_file, "\n\n".join([*self.tables(), MARKDOWN_MARK, ""]).encode())
        if page:
            failures = self.judge() if gate else None
            save_file(page, render(self.comparison, self.by_seeds, self.answer, failures=failures, every=every))

    def judge(self) -> list[str]:
        """Why the gate is not passed, a line for each run or group of seeds; InputError where there is nothing to hold it
        against."""
        if self.by_seeds:
            return list(_failed_groups(self.by_seeds, self.comparison.tolerance))
        base, others = self.comparison.baseline, self.comparison.standings[1:]
        if not others:
            raise InputError(f"--gate: {base.label} is the only run; name a baseline and at least one other")
        if base.run.broke_off or base.run.is_unfinished:
            raise InputError(f"--gate: the baseline {base.label} came to no end; name a finished run with --baseline")
        failures = []
        for each in others:
            if each.run.broke_off:
                failures.append(f"{each.label} {each.run.broke_off}")
            elif each.not_paired:
                raise InputError(f"--gate: {each.label} cannot be held against {base.label}: {each.not_paired}")
            elif each.run.is_unfinished:
                failures.append(f"{each.label} is not finished: it has {plural(each.run.summary['steps'], 'step')}")
            elif not each.gap.ends[1] <= self.comparison.tolerance:  # without an interval the mean is judged
                half = f" ± {each.gap.half_width:.5f}" if each.gap.has_interval else ""
                end = f"{signed(each.gap.mean, 5)}{half} nats from {base.label}, over the {last_steps([each.gap])}"
                failures.append(f"{each.label} ends {end}; {self.comparison.tolerance:g} are allowed")
        return failures


def _failed_groups(seeds: SeedComparison, tolerance: float) -> Iterable[str]:
    """A group passes with the upper end of its interval over seeds, where all of its runs came to their end."""
    base = seeds.baseline
    if len(base.losses) < len(base.group.runs):
        raise InputError(f"--gate: not every run of the baseline {base.group.name} came to its end; finish them, or name another")
    for each in seeds.others:
        half_width = each.difference.half_width() if each.difference else None
        if missing := len(each.group.runs) - len(each.losses):
            yield f"{each.group.name}: {plural(missing, 'run')} of {len(each.group.runs)} came to no end that counts"
        elif half_width is None:
            yield f"{each.group.name} has too few seeds in common with {base.group.name}: an interval needs {FEWEST_SEEDS}"
        elif each.difference.mean + half_width > tolerance:
            end = f"{signed(each.difference.mean)} ± {half_width:.4f} nats from {base.group.name}"
            yield f"{each.group.name} ends {end}, over {len(each.difference.by_seed)} seeds; {tolerance:g} are allowed"


def _bullets(notes: Iterable[str]) -> str:
    return "\n".join(f"* {note}" for note in notes)


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_runs(paths: Sequence[Path], baseline: Path | None = None) -> list[RunRecord]:
    """The runs of these folders, and of files that `benchmarks.collect_runs` made; the baseline first, by default the first.

    `baseline`: one of the folders, another one, or the name of a run among these.
    """
    runs: dict[Path, RunRecord] = {}  # each once, however it is named
    for path in paths:
        for run in read_kept(path) if path.is_file() else [read_run(path)]:
            runs.setdefault(run.path.resolve(), run)
    if baseline is None:
        return [*runs.values()]
    same = [run for run in runs.values() if run.name == str(baseline) or run.path.resolve() == baseline.resolve()]
    if len(same) > 1:
        raise InputError(f"--baseline {baseline}: several runs are called that; give the path of one")
    first = same[0] if same else read_run(baseline)
    return [first, *(run for run in runs.values() if run is not first)]


def read_kept(path: Path) -> list[RunRecord]:
    """The runs of a result file, each as if its folder were still called by its name: what `python -m benchmarks.collect_runs`
    kept of their files. InputError for another file."""
    try:
        return [_kept(path.with_suffix("") / name, **run) for name, run in load_json(path)["runs"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: holds no runs as `python -m benchmarks.collect_runs` keeps them ({error})") from None


def _kept(path: Path, *, config: dict, steps: dict[str, list], events: list[dict], **files: dict) -> RunRecord:
    """`steps`: the values of each key in their order, which a line of metrics.jsonl has one of."""
    lines = [dict(zip(steps, values, strict=True)) for values in zip(*steps.values(), strict=True)]
    # A recipe of today may have fewer keys than that of a run which is kept for long.
    config = resolved(Recipe.model_validate(config, extra="ignore"))
    return RunRecord(path, config, metrics=sorted([*lines, *events], key=lambda line: line["step"]), **files)


# ── The command ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = _parse(arguments)
    if options.watch is not None:
        report = watch(options)
    else:
        runs = read_runs(options.runs, options.baseline)
        report = _report_on(options, runs)
        report.write(options.out.get(".md"), options.out.get(".html"), gate=options.gate is not None)
        print("\n\n".join([*report.tables(brief=True), *(f"Written: {path}" for path in options.out.values())]))
    if options.gate is None:
        return 0
    failures = report.judge() if report else ["no run has a step yet"]
    for failure in failures:
        print(f"gate: {failure}")
    print(f"gate of {options.gate:g} nats: {f'failed by {len(failures)}' if failures else 'passed'}")
    return 1 if failures else 0


def _report_on(options: argparse.Namespace, runs: Sequence[RunRecord]) -> Report:
    tolerance = TOLERANCE if options.gate is None else options.gate
    return Report.over(runs, options.vary, tolerance=tolerance, margin=options.margin)


def watch(options: argparse.Namespace) -> Report | None:
    """Write the page whenever a run has come further, until all have ended or Ctrl-C comes; returns what stands in it."""
    report, before, going, page = None, "", True, options.out[".html"]
    print(f"following {', '.join(map(str, options.runs))} in {page}; Ctrl-C ends it", flush=True)
    try:
        while going:
            runs: list[RunRecord] = []
            try:
                if missing := [path for path in options.runs if not (path / METRICS_FILE).exists()]:
                    raise NoStepYet(missing[0])
                runs = read_runs(options.runs, options.baseline)
                now, going = (
                    ", ".join(f"{run.name} step {run.summary['steps']:,}" for run in runs),
                    not all(map(_has_ended, runs)),
                )
            except NoStepYet as none:
                now = f"waiting for the first step of {none.run_dir}"
            if now != before or not going:
                print(f"{time.strftime('%H:%M:%S')}  {now}", flush=True)
                if runs:
                    report, gate = _report_on(options, runs), options.gate is not None and not going
                    report.write(None, page, gate=gate, every=options.watch if going else None)
            before = now
            if going:
                time.sleep(options.watch)
    except KeyboardInterrupt:
        if report:
            report.write(None, page)
    if report:
        print(f"{report.answer}\n\nPage: {page}")
    return report


def _has_ended(run: RunRecord) -> bool:
    """Whether a run is halted, or has written its summary, the last thing that it does. Of a killed one nobody can tell."""
    return "halted" in run.summary or read_finished(run.path) is not None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with `out` as files by their endings."""
    parser = CommandParser(prog="python -m pretrain report", description="Run folders side by side, or one alone.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared")
    parser.add_argument("--baseline", type=Path, metavar="RUN", help="what the others are compared to (default: the first)")
    out = (
        "a page with everything (.html), the curves (.png) or tables and curves (.md); repeatable (default: loss.png in the run "
    )
    parser.add_argument("--out", action="append", default=[], type=Path, help=f"{out}folder, or comparison.png beside several)")
    vary = "a key, or section, that may differ: what is compared; repeatable"
    parser.add_argument("--vary", action="append", default=[], metavar="KEY", help=vary)
    gate = "exit with 1 if a run's loss ends further than this above the baseline's"
    parser.add_argument("--gate", type=number(0), metavar="NATS", help=gate)
    follow = "follow running runs: write the page again and again"
    parser.add_argument("--watch", nargs="?", type=number(1, DAY), const=10.0, metavar="SECONDS", help=follow)
    margin = f"over seeds: of the baseline's loss, within which a difference counts as none (default: {100 * MARGIN:g})"
    parser.add_argument("--margin", type=number(most=100), metavar="PERCENT", help=margin)
    options = parser.parse_intermixed_args(arguments)
    files = {path.suffix: path for path in options.out}
    for path in options.out:
        if path.suffix not in (".html", ".md") or files[path.suffix] != path:
            raise InputError(f"--out {path}: one file may end in .html and one in .md, which say what to write")
        check_replaceable(path)
    if options.watch is not None and list(files) != [".html"]:
        raise InputError("--watch writes a page again and again, and nothing else: give --out report.html alone")
    options.out = files
    options.margin = None if options.margin is None else options.margin / 100
    return options
