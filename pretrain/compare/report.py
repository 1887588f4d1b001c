"""Curves and tables from what runs left behind: `python -m pretrain report RUN [RUN ...] [--out report.html] [--vary KEY]`.

Reads files only and imports no torch: it starts at once, works while a run is going, and on a machine that could not train it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foundation.command import CommandParser, number
from foundation.errors import InputError, shown
from foundation.files import MARKDOWN_MARK, check_replaceable, save_file
from foundation.progress import Progress, advance
from foundation.settings import load_yaml
from foundation.tables import UNKNOWN, markdown, on_screen, or_dash
from foundation.units import count, memory, percent, plural, three_digits
from pretrain.compare.appearance import as_text, unique_names
from pretrain.compare.comparison import TOLERANCE, RunComparison, other_machines, other_splits, shorter_ends, signed, with_error
from pretrain.compare.fairness import (
    FEWEST_STEPS,
    Gap,
    PairedDifference,
    Variants,
    at_the_end,
    changes_in_words,
    check_comparable,
    describe_unfairness,
    last_steps,
    loss_differences,
    of_one_text,
    setting,
    varied_keys,
    why_no_end,
    why_not_paired,
)
from pretrain.compare.figures import plot_losses
from pretrain.compare.kept_runs import read_kept
from pretrain.compare.page import render
from pretrain.compare.seed_figure import plot_seeds
from pretrain.compare.seed_groups import SeedComparison, grouped
from pretrain.compare.seeds import FEWEST_SEEDS, MARGIN
from pretrain.compare.watch import follow
from pretrain.metrics.run_record import LAST_STEPS, LOSS_KEY, RunRecord, averaged_steps, read_run
from pretrain.precision.settings import PRECISIONS, WEIGHT_DTYPES

Table = Callable[..., str]  # as `markdown`, which files have; `on_screen` fits what is printed to the terminal
TOO_FEW = "too few steps"
DAY = 86_400  # seconds
ERRORS = (
    "std. error, and ±: the standard error of the mean difference. Neighbouring steps resemble each other, so it is computed "
    "from the means of batches of floor(sqrt(n)) consecutive steps. sd is the standard deviation of one step's difference."
)
NO_ERROR = (
    f"{TOO_FEW}: a standard error needs at least eight batches, {FEWEST_STEPS} steps. Fewer may agree by chance, and it would "
    "look small."
)
EMULATED = "(emulated): computed in software; the speed says nothing of hardware that has the precision."
EACH_RUN = "--markdown FILE has the figures of each run, too."
OTHER_TEXT = "Held-out losses are of different text, so they do not say which run is better."
SIDE_BY_SIDE = f"{UNKNOWN} under tok/s: the run shared its machine with others, so its speed is not its own."


def summary_table(runs: Sequence[RunRecord], table: Table = markdown) -> str:
    """Returns a table with one row a run. The loss is the mean of the last steps, since a single step's is mostly noise."""
    variants, names = Variants(runs), names_of(runs)
    averaged = sorted({averaged_steps(run.summary) for run in runs})
    settings: dict[str, Callable[[RunRecord], str]] = {
        "run": lambda run: names[run.path],
        "precision": lambda run: or_dash(run.precision),
        "weights": lambda run: or_dash(run.config.get("weights")),
        **{key: lambda run, key=key: or_dash(variants.value(run, key)) for key in variants.options},
        **{key: lambda run, key=key: or_dash(variants.dtype(run, key)) for key in variants.dtypes},
        **{key: lambda run, key=key: or_dash(setting(run, key), as_text) for key in (varied_keys(runs) if runs[1:] else ())},
        "backend": lambda run: or_dash(run.backend),
    }
    columns = settings | {
        "steps": lambda run: str(run.summary["steps"]) + (", halted" if "halted" in run.summary else ""),
        "tokens": _figure("tokens", count),
        f"loss, last {' or '.join(map(str, averaged))}": mean_loss,
        "held-out": lambda run: _figure("held_out_loss", lambda loss: f"{loss:.4f}{run.when_evaluated}")(run),
        "perplexity": _figure("held_out_perplexity", "{:.4g}".format),
        "tok/s": speed_of,
        "MFU": _of_hardware("mfu_bf16_peak", percent),
        "memory": _figure("memory_gib", memory),
        "frozen": _figure("frozen_updates", lambda share: f"{share * 100:.2g} %"),
        "data wait": lambda run: UNKNOWN if run.side_by_side else _figure("data_wait_share", percent)(run),
    }
    if any("mfu_recipe_peak" in run.summary for run in runs):
        columns["MFU, recipe's peak"] = _of_hardware("mfu_recipe_peak", percent)
    if any("tokens_per_joule" in run.summary for run in runs):
        columns["tok/J"] = _of_hardware("tokens_per_joule", three_digits)
    return table(list(columns), [[text_of(run) for text_of in columns.values()] for run in runs], names=len(settings))


def names_of(runs: Sequence[RunRecord]) -> dict[Path, str]:
    """Returns what each run is called, by its path; no two share a name."""
    return dict(zip((run.path for run in runs), unique_names(runs), strict=True))


def comparison_table(runs: Sequence[RunRecord], names: Mapping[Path, str] | None = None, table: Table = markdown) -> str:
    """Each later run's loss minus the first's, paired by step, over all common steps and at the end; what was broken off has no
    end. `names`: where others stand beside these runs."""
    first, *others = [(names or names_of(runs))[run.path] for run in runs]
    figures = ["std. error", "sd", "steps"]
    header = ["run", f"minus {first}, all", *figures, "at the end", *figures]
    rows = []
    for name, run in zip(others, runs[1:], strict=True):
        minus, none = loss_differences(runs[0], run)[1], why_no_end(runs[0], run)
        end = [run.broke_off or UNKNOWN, *[UNKNOWN] * len(figures)] if none else _four_figures(at_the_end(minus))
        rows.append([name, *_four_figures(minus), *end])
    return table(header, rows)


def grid_tables(runs: Sequence[RunRecord], table: Table = markdown) -> list[str]:
    """Weights down, precision across; in each place the paired difference to the first run at the end.

    A grid for each variant of the low precision (its scope, say) where there are several; what is not quantized stands in all.
    """
    variants = Variants(runs)
    grids = []
    for variant in variants.names or [""]:
        places: dict[tuple[str, str], list[str]] = {}
        for run in runs:
            if not variants.is_quantized(run) or variants.name(run) == variant:
                place = or_dash(run.config.get("weights")), or_dash(run.precision)
                places.setdefault(place, []).append(_compared(run, runs[0]))
        down = _in_order({weights for weights, _ in places}, WEIGHT_DTYPES)
        across = _in_order({precision for _, precision in places}, PRECISIONS)
        rows = [[weights, *("; ".join(places.get((weights, each), [UNKNOWN])) for each in across)] for weights in down]
        grids.append(table([f"weights ({variant})" if variant else "weights", *across], rows))
    return grids


def read_runs(paths: Sequence[Path], baseline: Path | None = None) -> list[RunRecord]:
    """The runs of these folders, and of files that `benchmarks.collect_runs` made; the baseline first, by default the first.

    `baseline`: one of the folders, another one, or the name of a run among these.
    """
    found: list[RunRecord] = []
    named: dict[str, Path] = {}  # each once, where it is a link too
    for path in paths:
        named.setdefault(os.path.realpath(path), path)
    with Progress("reading", "runs", total=len(named), lines_every=None):
        for path in named.values():
            found += read_kept(path) if path.is_file() else [read_run(path)]
            advance(of="runs")
    if baseline is None:
        return found
    named_so, there = not baseline.is_dir(), os.path.realpath(baseline)
    same = [run for run in found if os.path.realpath(run.path) == there or (named_so and run.name == str(baseline))]
    if len(same) > 1:
        raise InputError(f"--baseline {baseline}: several runs are called that; give the path of one")
    first = same[0] if same else read_run(baseline)
    return [first, *(run for run in found if run is not first)]


def write(paths: Sequence[Path], *, baseline: Path | None = None, **how: Any) -> str:
    """Read the runs at `paths`, the `baseline` first, and do with them what `write_runs` does."""
    return write_runs(read_runs(paths, baseline), paths[0], **how)


def write_runs(
    runs: Sequence[RunRecord],
    named_first: Path,
    *,
    out: Path | None = None,
    tables_file: Path | None = None,
    page: Path | None = None,
    vary: Sequence[str] = (),
    leave_out_unfair: bool = False,
    margin: float | None = None,
    speedups: Mapping[str, float] | None = None,
) -> str:
    """Draw the runs into the PNG `out`, write the tables to the Markdown file `tables_file`, and return what to print.

    Without `out`, the picture goes beside `named_first`, or into it where it is the only run. `page`: where the page with
    everything goes. `vary`: keys that may differ, as they are what is compared. `margin` and `speedups`: what a comparison over
    seeds takes.

    Raises InputError where a run cannot be compared fairly with the first, which is the baseline, unless `leave_out_unfair`
    leaves it out, saying so.
    """
    beside = named_first.with_suffix(".png") if named_first.is_file() else named_first.parent / "comparison.png"
    if in_run := out is None and len(runs) == 1 and named_first.is_dir():
        out = named_first / "loss.png"
    elif out is None:
        check_replaceable(beside, "without --out,")
    out = out or beside
    left_out: list[str] = []
    if leave_out_unfair:
        found = {run.path: describe_unfairness(runs[0], run, vary) for run in runs[1:]}
        left_out = [f"{path.name} is left out: it differs from {runs[0].name} in {why}" for path, why in found.items() if why]
        runs = [run for run in runs if not found.get(run.path)]
    seeds = over_seeds(runs, vary, margin, speedups)
    brief = seeds is not None and bool(seeds.others)
    if brief:
        plot_seeds(seeds, out)
    else:
        plot_losses(runs, out, asked_for=not in_run)
    if tables_file is not None:
        drawn = f"![{'differences over seeds' if brief else 'curves'}]({os.path.relpath(out, tables_file.parent)})"
        _save_tables(tables_file, [*tables(runs, seeds), *left_out, drawn])
    if page is not None:
        save_file(page, render(RunComparison.over(runs), seeds=seeds), asked_for=True)
    places = {"Differences" if brief else "Curves": out, "Tables": tables_file, "Everything": page}
    shown = [*seeds.said(), *([] if tables_file else [EACH_RUN])] if brief else tables(runs, seeds, on_screen)
    return "\n\n".join([*shown, *left_out, "\n".join(f"{what}: {place}" for what, place in places.items() if place)])


def over_seeds(
    runs: Sequence[RunRecord], vary: Sequence[str], margin: float | None, speedups: Mapping[str, float] | None
) -> SeedComparison | None:
    """The comparison over seeds, where the baseline was trained with several; else None.

    Raises InputError where runs differ in more than `vary` names: several seeds of the baseline name `seed`.
    """
    groups = grouped(runs)
    several = len(groups[0].runs) > 1
    check_comparable(runs, [*vary, "seed"] if several and groups[1:] else vary)
    told = [option for option, value in (("--speedups", speedups), ("--margin", margin)) if value is not None]
    if told and not several:
        raise InputError(f"{told[0]}: is for a comparison over seeds, and the baseline has one seed alone; leave it out")
    return SeedComparison.over(runs, margin=MARGIN if margin is None else margin, speedups=speedups)


def tables(runs: Sequence[RunRecord], seeds: SeedComparison | None = None, table: Table = markdown) -> list[str]:
    """The summary, the paired differences, and what is to be said of them; of several `seeds`, these first."""
    parts, names = [*(seeds.said() if seeds else []), summary_table(runs, table)], names_of(runs)
    reasons = {} if seeds else {run.path: why_not_paired(runs[0], run) for run in runs[1:]}
    paired = [] if seeds else [runs[0], *(run for run in runs[1:] if not reasons[run.path])]
    if len(paired) > 1:
        parts.append(comparison_table(paired, names, table))
    if len({run.config.get("weights") for run in paired}) > 1 and len({run.precision for run in paired}) > 1:
        gaps = [Gap.of(loss_differences(runs[0], run)[1]) for run in paired[1:]]
        heading = f"Loss minus that of {runs[0].name}, paired by step, mean of the {last_steps(gaps)}:"
        parts += [heading, *grid_tables(paired, table)]
    notes = {ERRORS: len(paired) > 1, NO_ERROR: any(TOO_FEW in part for part in parts)}
    notes |= {EMULATED: any(run.emulated for run in runs), SIDE_BY_SIDE: any(run.side_by_side for run in runs)}
    notes |= {OTHER_TEXT: not of_one_text([run for run in runs if "held_out_loss" in run.summary])}
    notes |= {note: True for note in [other_machines(runs), other_splits(runs)] if note}
    ended = {names[run.path]: run for run in paired if run is runs[0] or not run.broken_off}
    ends = shorter_ends(ended) if ended else []
    notes |= {f"{end}. The first table has each run's own end.": True for end in ends}
    first = names[runs[0].path]
    notes |= {f"{names[path]} is not paired with {first}: {why}.": True for path, why in reasons.items() if why}
    changed = {names[run.path]: changes_in_words(run) for run in runs}
    notes |= {f"{name} was not trained by one recipe: {how}.": True for name, how in changed.items() if how}
    broken = [(f"{names[run.path]} {run.broke_off}", run.summary.get("halted")) for run in runs if run.broken_off]
    notes |= {f"{how}: {why}" if why else f"{how}.": True for how, why in broken}
    return [*parts, *filter(None, ["\n".join(f"* {note}" for note, due in notes.items() if due)])]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = _parse(arguments)
    if options.watch is not None:
        comparison = follow(options.runs, options.page, lambda every: _write_page(options, every)[0], options.watch)
    elif options.page:
        comparison = _show_page(options)
    else:
        runs = read_runs(options.runs, options.baseline)
        files = {"out": options.out, "tables_file": options.markdown}
        of_seeds = {"margin": options.margin, "speedups": options.speedups}
        print(write_runs(runs, options.runs[0], **files, vary=options.vary, **of_seeds))
        comparison = None if options.gate is None else RunComparison.over(runs, options.gate)
    if options.gate is None:
        return 0
    if comparison is not None:
        runs = [each.run for each in comparison.standings]
        seeds = over_seeds(runs, options.vary, options.margin, options.speedups)
        if seeds is not None and seeds.others:
            return _judge_seeds(seeds, options.gate)
    if comparison is None:
        raise InputError("--gate: nothing is compared yet; give the command again when every run has a step")
    return _judge(comparison)


def _write_page(options: argparse.Namespace, every: float | None = None) -> tuple[RunComparison, SeedComparison | None]:
    """Write the page; returns what stands in it. `every`: seconds until it is read again."""
    runs = read_runs(options.runs, options.baseline)
    seeds = over_seeds(runs, options.vary, options.margin, options.speedups)
    comparison = RunComparison.over(runs, TOLERANCE if options.gate is None else options.gate)
    html = render(comparison, seeds=seeds, gate=options.gate is not None, every=every)
    save_file(options.page, html, asked_for=True)
    return comparison, seeds


def _save_tables(path: Path, parts: Sequence[str]) -> None:
    save_file(path, "\n\n".join([*parts, MARKDOWN_MARK]).encode() + b"\n", asked_for=True)


def _show_page(options: argparse.Namespace) -> RunComparison:
    """Write the page, print what it says, and write the tables where they are asked for; returns what stands in the page."""
    comparison, seeds = _write_page(options)
    runs, answer = [each.run for each in comparison.standings], f"{comparison.answer()} {comparison.why_no_speed()}".strip()
    shown = seeds.said() if seeds and seeds.others else [answer, *tables(runs, seeds, on_screen)]
    print("\n\n".join([*shown, f"Page: {options.page}"]))
    if options.markdown:
        _save_tables(options.markdown, tables(runs, seeds))
    return comparison


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with what their files hold in the files' place; `page`: where it goes, None: nowhere."""
    parser = CommandParser(prog="python -m pretrain report", description="Run folders side by side, or one alone.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared")
    parser.add_argument("--baseline", type=Path, metavar="RUN", help="what the others are compared to (default: the first)")
    default = "loss.png in the run folder, or comparison.png beside several"
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"a page with everything (.html), the curves (.png) or tables and curves (.md) (default: {default})",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too (.md)")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY",
        help="a key, or section, that may differ: what is compared; repeatable",
    )
    parser.add_argument(
        "--gate", type=number(0), metavar="NATS", help="exit with 1 if a run's loss ends further than this above the baseline's"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=number(1, DAY),
        const=10.0,
        metavar="SECONDS",
        help="follow running runs: write the page again and again",
    )
    parser.add_argument(
        "--margin",
        type=number(most=100),
        metavar="PERCENT",
        help=f"over seeds: of the baseline's loss, within which a difference counts as none (default: {100 * MARGIN:g})",
    )
    parser.add_argument(
        "--speedups",
        type=Path,
        metavar="FILE",
        help="over seeds: YAML, `name: factor` over the baseline's speed, in place of the runs' own speeds",
    )
    options = parser.parse_intermixed_args(arguments)
    options.page = options.out if options.out and options.out.suffix == ".html" else None
    _check(options)
    if options.out and options.out.suffix == ".md":
        options.out, options.markdown = options.out.with_suffix(".png"), options.out
    options.margin = None if options.margin is None else options.margin / 100
    options.speedups = read_speedups(options.speedups) if options.speedups else None
    return options


def _check(options: argparse.Namespace) -> None:
    """InputError for options that do not go together, before anything is read or written."""
    if options.out and options.out.suffix not in (".html", ".png", ".md"):
        raise InputError(f"--out {options.out}: ends in none of .html, .png and .md, which say what to write")
    if options.markdown and options.markdown.suffix != ".md":
        raise InputError(f"--markdown {options.markdown}: the tables are written as .md; end its name so")
    if options.out and options.out.suffix == ".md" and options.markdown:
        raise InputError(
            f"--out {options.out} and --markdown {options.markdown}: both are for the tables; leave one of the two out"
        )
    for option, path in (("--out", options.out), ("--markdown", options.markdown)):
        if path:
            check_replaceable(path, option)
    if options.out and options.out.suffix == ".md":
        check_replaceable(options.out.with_suffix(".png"))
    if options.watch is not None and not options.page:
        raise InputError("--watch writes a page again and again: add --out report.html")
    if options.watch is not None and options.markdown:
        raise InputError("--watch writes the page alone: leave --markdown out")
    if options.watch is not None and (kept := [path for path in options.runs if path.is_file()]):
        raise InputError(f"--watch follows run folders; {kept[0]} is a file, which no run goes on writing")
    if options.gate is not None and len(options.runs) + bool(options.baseline) < 2 and not options.runs[0].is_file():
        raise InputError("--gate compares runs: name a baseline and at least one other")


def read_speedups(path: Path) -> dict[str, float]:
    """Speed over the baseline's by a group's name; InputError naming what is no factor."""
    speedups = load_yaml(path)
    for name, factor in speedups.items():
        if type(factor) not in (int, float) or not 0 < factor < math.inf:
            raise InputError(f"{path}: `{name}`: {shown(factor, repr)} is no factor over the baseline's speed, as 1.3 is")
    return {str(name): float(factor) for name, factor in speedups.items()}


def _judge(comparison: RunComparison) -> int:
    """Say whether the gate is passed, and by how much it is not; the exit status. InputError where a run cannot be paired."""
    base = comparison.baseline.look.label
    if len(comparison.standings) < 2:
        raise InputError(
            f"--gate: {base} is the only run, which is compared with nothing; name a baseline and at least one other"
        )
    if comparison.baseline.run.broken_off or comparison.baseline.run.is_unfinished:
        raise InputError(f"--gate: the baseline {base} came to no end of its own; name a finished run with --baseline")
    for each in comparison.standings:
        if each.not_paired and not each.run.broken_off:
            raise InputError(f"--gate: {each.look.label} cannot be held against {base}: {each.not_paired}")
    for note in comparison.shorter_ends():
        print(f"gate: {note}")
    if short := [each.look.label for each in comparison.paired if not each.gap.has_interval]:
        print(f"gate: {', '.join(short)}: fewer than {FEWEST_STEPS} steps have no interval, so their means alone are judged")
    failed = comparison.over_the_gate()
    for each in failed:
        gap = each.gap
        if each.run.broken_off:
            print(f"gate: {each.look.label} {each.run.broke_off}")
            continue
        if each.run.is_unfinished:
            print(f"gate: {each.look.label} is not finished: it has {plural(each.run.summary['steps'], 'step')}")
            continue
        apart = " ± ".join(with_error(gap.mean, gap.half_width)) if gap.has_interval else signed(gap.mean)
        print(
            f"gate: {each.look.label} ends {apart} nats from {base}, over the {last_steps([gap])}; "
            f"{comparison.tolerance:g} are allowed"
        )
    print(
        f"gate of {comparison.tolerance:g} nats: "
        + (f"failed by {len(failed)} of {plural(len(comparison.standings) - 1, 'run')}" if failed else "passed")
    )
    return 1 if failed else 0


def _judge_seeds(seeds: SeedComparison, tolerance: float) -> int:
    """Say which groups of seeds pass the gate; the exit status. A group passes with the upper end of its interval over seeds.
    InputError where not every seed of the baseline came to its end."""
    base = seeds.baseline
    if base.broken_off or len(base.losses) < len(base.group.runs):
        raise InputError(f"--gate: not every run of the baseline {base.group.name} came to its end; finish them, or name another")
    failed = 0
    for each in seeds.others:
        without_end = len(each.group.runs) - len(each.losses)
        half_width = each.difference.half_width() if each.difference else None
        if without_end:
            why = f"{plural(without_end, 'run')} of {len(each.group.runs)} came to no end that counts"
        elif each.difference is None or half_width is None:
            why = f"has too few seeds in common with {base.group.name}: an interval needs {FEWEST_SEEDS}"
        elif each.difference.mean + half_width <= tolerance:
            continue
        else:
            apart = " ± ".join(with_error(each.difference.mean, half_width))
            why = f"ends {apart} nats from {base.group.name}, over {len(each.difference.by_seed)} seeds; {tolerance:g} allowed"
        failed += 1
        print(f"gate: {each.group.name} {why}")
    print(f"gate of {tolerance:g} nats over seeds: " + (f"failed by {failed} of {len(seeds.others)}" if failed else "passed"))
    return 1 if failed else 0


def _figure(key: str, form: Callable[[Any], str]) -> Callable[[RunRecord], str]:
    return lambda run: or_dash(run.summary.get(key), form)


def mean_loss(run: RunRecord) -> str:
    """The mean of its last training losses; where a run that began with another's checkpoint has too few, with the first."""
    first = run.summary.get("first_step", 1)
    late = f" (from step {first:,})" if first > max(1, run.summary["steps"] - LAST_STEPS + 1) else ""
    return _figure(LOSS_KEY, lambda loss: f"{loss:.4f}{late}")(run)


def speed_of(run: RunRecord) -> str:
    """Tokens/s, marked where they are not the hardware's; a dash where the run shared its machine."""
    speed = None if run.side_by_side else run.summary.get("tokens_per_second")
    return or_dash(speed, count) + (" (emulated)" if run.emulated and speed is not None else "")


def _of_hardware(key: str, form: Callable[[Any], str]) -> Callable[[RunRecord], str]:
    """A figure of hardware that computes the precision itself, and that the run had for itself."""
    return lambda run: UNKNOWN if run.side_by_side or run.emulated else _figure(key, form)(run)


def _four_figures(differences: np.ndarray) -> list[str]:
    """Mean, standard error, sd and number of steps."""
    paired = PairedDifference.of(differences)
    if paired.steps < 2:
        return [UNKNOWN, UNKNOWN, UNKNOWN, str(paired.steps)]
    known = not math.isnan(paired.standard_error)
    mean, error = with_error(paired.mean, paired.standard_error) if known else (signed(paired.mean), TOO_FEW)
    return [mean, error, f"{paired.sd:.4f}", str(paired.steps)]


def _compared(run: RunRecord, baseline: RunRecord) -> str:
    """A run's place in the grid."""
    if run.path == baseline.path:
        return "baseline"
    if why_no_end(baseline, run):
        return run.broke_off or UNKNOWN
    mean, error, sd, _ = _four_figures(at_the_end(loss_differences(baseline, run)[1]))
    return UNKNOWN if mean == UNKNOWN else f"{mean} (sd {sd}; {TOO_FEW})" if error == TOO_FEW else f"{mean} ± {error} (sd {sd})"


def _in_order(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Returns `names` in the registry's order; what is not in it (a fallback's name) stands after the entry that it begins
    with."""
    order = list(known)
    return sorted(names, key=lambda name: (next((i for i, k in enumerate(order) if name.split()[0] == k), len(order)), name))
