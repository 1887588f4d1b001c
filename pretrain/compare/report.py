"""Curves and tables from what runs left behind: `python -m pretrain report RUN [RUN ...] [--baseline RUN] [--out PNG]`.

Several runs are compared with the first, or with `--baseline`; runs whose comparison would be unfair are refused
(`pretrain.compare.fairness`). A speed is shown for what it is: an emulated precision's is marked, and a run that shared its
machine with others has none.

Reads files only and imports no torch: it starts at once, works while a run is going, and on a machine that could not train it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.units import count, memory, percent
from pretrain.compare.curves import plot_losses
from pretrain.compare.fairness import LATE_SHARE, Paired, check_comparable, difference, late, unfairness
from pretrain.compare.tables import UNKNOWN, markdown, shown
from pretrain.compare.variants import Variants
from pretrain.metrics.run_record import LAST_STEPS, RunRecord, read_run
from pretrain.precision.registry import PRECISIONS, WEIGHT_DTYPES

ERRORS = (
    "± is the standard error of the mean, by batch means over floor(sqrt(n)) steps each, as neighbouring steps are not "
    "independent; sd is that of one step's difference."
)
EMULATED = "(emulated): computed in software; the speed says nothing of hardware that has the precision."
SIDE_BY_SIDE = f"{UNKNOWN} under tok/s: the run shared its machine with others, so its speed is not its own."


def summary_table(runs: Sequence[RunRecord]) -> str:
    """Markdown: one row a run. The loss is the mean of the last steps, since a single step's is mostly noise."""
    variants = Variants(runs)
    settings: dict[str, Callable[[RunRecord], str]] = {
        "run": lambda run: run.name,
        "precision": lambda run: run.precision or UNKNOWN,
        "weights": lambda run: run.config.get("weights", UNKNOWN),
        **{key: lambda run, key=key: variants.value(run, key) for key in variants.keys},
        **{key: lambda run, key=key: variants.kept_in(run, key) for key in variants.kept},
        "backend": lambda run: run.backend or UNKNOWN,
    }
    columns = settings | {
        "steps": _figure("steps", str),
        "tokens": _figure("tokens", count),
        f"loss, last {LAST_STEPS}": _figure(f"loss_last_{LAST_STEPS}", "{:.4f}".format),
        "held-out": _figure("held_out_loss", "{:.4f}".format),
        "perplexity": _figure("held_out_perplexity", "{:.4g}".format),
        "tok/s": _speed,
        "MFU": _utilisation("mfu_bf16_peak"),
        "memory": _figure("memory_gib", memory),
        "frozen": _figure("frozen_updates", lambda share: f"{share * 100:.2g} %"),
        "data wait": lambda run: UNKNOWN if run.side_by_side else _figure("data_wait_share", percent)(run),
    }
    if any("mfu_recipe_peak" in run.summary for run in runs):
        columns["MFU, recipe's peak"] = _utilisation("mfu_recipe_peak")
    return markdown(list(columns), [[cell(run) for cell in columns.values()] for run in runs], names=len(settings))


def comparison_table(runs: Sequence[RunRecord]) -> str:
    """Markdown: each later run's loss minus the first's, paired by step, over all common steps and the last fifth of them."""
    baseline = runs[0]
    header = ["run", f"minus {baseline.name}, all", "±", "sd", "steps", f"last {LATE_SHARE:.0%}", "±", "sd", "steps"]
    rows = []
    for run in runs[1:]:
        _, differences = difference(baseline, run)
        rows.append([run.name, *_cells(Paired.of(differences)), *_cells(Paired.of(late(differences)))])
    return markdown(header, rows)


def grid_tables(runs: Sequence[RunRecord]) -> list[str]:
    """Markdown: weights down, precision across; in each cell the paired difference to the first run over the last fifth.

    A grid for each variant of the low precision (its scope, say) where there are several; what is not quantized stands in all.
    """
    variants = Variants(runs)
    grids = []
    for variant in variants.found or [""]:
        chosen = [run for run in runs if not variants.is_quantized(run) or variants.name(run) == variant]
        rows = _in_order({run.config.get("weights", UNKNOWN) for run in chosen}, WEIGHT_DTYPES)
        columns = _in_order({run.precision or UNKNOWN for run in chosen}, PRECISIONS)
        cells = [[weights, *(_grid_cell(chosen, runs[0], weights, precision) for precision in columns)] for weights in rows]
        grids.append(markdown([f"weights ({variant})" if variant else "weights", *columns], cells))
    return grids


def notes(runs: Sequence[RunRecord]) -> str:
    """What a reader of the tables must know."""
    lines = [ERRORS] if len(runs) > 1 else []
    lines += [EMULATED] if any(run.emulated for run in runs) else []
    lines += [SIDE_BY_SIDE] if any(run.side_by_side for run in runs) else []
    return "\n".join(f"* {line}" for line in lines)


def write(
    paths: Sequence[Path],
    *,
    baseline: Path | None = None,
    out: Path | None = None,
    page: Path | None = None,
    leave_out_unfair: bool = False,
) -> str:
    """Draw the runs' curves into the PNG `out`, write the tables to the Markdown file `page`, and return what to print.

    baseline: the run that the others are compared to, one of `paths` or another; none: the first. out: by default loss.png in the
    folder of a single run, or comparison.png beside the first of several. Raises InputError where a run cannot be read, and where
    one cannot be compared fairly unless `leave_out_unfair` leaves it out, saying so.
    """
    runs = [read_run(path) for path in dict.fromkeys([*([baseline] if baseline else []), *paths])]
    out = out or (paths[0] / "loss.png" if len(runs) == 1 else paths[0].parent / "comparison.png")
    left_out: list[str] = []
    if leave_out_unfair:
        found = {run.path: unfairness(runs[0], run) for run in runs[1:]}
        left_out = [f"{path.name} is left out: it differs from {runs[0].name} in {why}" for path, why in found.items() if why]
        runs = [run for run in runs if not found.get(run.path)]
    check_comparable(runs)
    plot_losses(runs, out)
    parts = [summary_table(runs)]
    if len(runs) > 1:
        parts.append(comparison_table(runs))
    if _spans_a_grid(runs):
        parts += [
            f"Loss minus that of {runs[0].name}, paired by step, over the last {LATE_SHARE:.0%} of the steps:",
            *grid_tables(runs),
        ]
    parts += filter(None, [notes(runs), "\n".join(left_out)])
    if page is not None:
        _write_page(page, parts, out)
    return "\n\n".join([*parts, f"Curves: {out}" + (f"\nTables: {page}" if page else "")])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, 2 for a mistake in what it was given."""
    parser = argparse.ArgumentParser(prog="python -m pretrain report", description="Loss curves and tables of run folders.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared")
    parser.add_argument("--baseline", type=Path, metavar="RUN", help="what the others are compared to (default: the first)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PNG",
        help="where to draw the curves (default: loss.png in the run folder, or comparison.png beside the folders)",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    options = parser.parse_intermixed_args(arguments)
    try:
        print(write(options.runs, baseline=options.baseline, out=options.out, page=options.markdown))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _figure(key: str, form: Callable[[Any], str]) -> Callable[[RunRecord], str]:
    return lambda run: shown(run.summary.get(key), form)


def _speed(run: RunRecord) -> str:
    speed = None if run.side_by_side else run.summary.get("tokens_per_second")
    return shown(speed, count) + (" (emulated)" if run.emulated and speed is not None else "")


def _utilisation(key: str) -> Callable[[RunRecord], str]:
    """Of hardware that computes the precision itself, and that the run had for itself."""
    return lambda run: UNKNOWN if run.side_by_side or run.emulated else _figure(key, percent)(run)


def _cells(paired: Paired) -> list[str]:
    if paired.steps < 2:
        return [UNKNOWN, UNKNOWN, UNKNOWN, str(paired.steps)]
    return [f"{paired.mean:+.4f}", _error(paired), f"{paired.sd:.4f}", str(paired.steps)]


def _grid_cell(runs: Sequence[RunRecord], baseline: RunRecord, weights: str, precision: str) -> str:
    """Several runs of one place stand beside each other, in their order."""
    here = [run for run in runs if run.config.get("weights", UNKNOWN) == weights and (run.precision or UNKNOWN) == precision]
    return "; ".join(_compared(run, baseline) for run in here) or UNKNOWN


def _compared(run: RunRecord, baseline: RunRecord) -> str:
    if run.path == baseline.path:
        return "baseline"
    paired = Paired.of(late(difference(baseline, run)[1]))
    return UNKNOWN if paired.steps < 2 else f"{paired.mean:+.4f} ± {_error(paired)} (sd {paired.sd:.4f})"


def _error(paired: Paired) -> str:
    return f"{paired.standard_error:.4f}" if paired.standard_error == paired.standard_error else UNKNOWN  # NaN: too few steps


def _spans_a_grid(runs: Sequence[RunRecord]) -> bool:
    return len({run.config.get("weights") for run in runs}) > 1 and len({run.precision for run in runs}) > 1


def _in_order(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """In the registry's order; what is not in it (a fallback's name) after the entry that it begins with."""
    order = list(known)
    return sorted(names, key=lambda name: (next((i for i, k in enumerate(order) if name.split()[0] == k), len(order)), name))


def _write_page(page: Path, parts: Sequence[str], picture: Path) -> None:
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        drawn = f"![curves]({os.path.relpath(picture, page.parent)})"
        replace_file(page, "\n\n".join([*parts, drawn]).encode() + b"\n")
    except OSError as error:
        raise InputError(f"{page}: cannot be written: {error.strerror}; name another file") from None
