"""Curves and tables from what runs left behind: `python -m pretrain.report RUN [RUN ...] [--out PNG]`.

Runs are compared only where the comparison means something: the same data in the same order, and the same tokens in every step.
Then the two losses of one step differ by what is being compared and not by the text, and their paired difference is some twenty
times sharper than the curves themselves (in the reference's runs its sd is 0.005 a step, against 0.127).

Reads files only and imports no torch: it starts at once, works while a run is going, and on a machine that could not train it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packing.errors import InputError
from pretrain.curves import difference, plot_losses
from pretrain.metrics.summary import LAST_STEPS
from pretrain.metrics.units import count, memory, percent
from pretrain.run_files import Run, read_run

LATE_SHARE = 0.2  # of the common steps: where runs have grown apart, and a difference predicts the end


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise InputError naming the first difference that would make comparing the runs' losses unfair."""
    for run in runs[1:]:
        for key, what in (
            ("data_fingerprint", "the data they were trained on"),
            ("seed", "the order of the data"),
            ("tokens_per_step", "the tokens of a step"),
        ):
            ours, theirs = getattr(runs[0], key), getattr(run, key)
            if ours is None or theirs is None:
                unknown = runs[0] if ours is None else run
                raise InputError(f"{unknown.path}: its files do not say its `{key}`, so it cannot be compared with another run")
            if ours != theirs:
                raise InputError(
                    f"{runs[0].path} and {run.path} differ in {what} (`{key}`: {ours} and {theirs}), so their losses cannot be "
                    "compared; report each alone, or train one of them again"
                )


def summary_table(runs: Sequence[Run]) -> str:
    """Markdown: one row a run. The loss is the mean of the last steps, since a single step's is mostly noise."""
    header = [
        "run",
        "steps",
        "tokens",
        f"loss, last {LAST_STEPS}",
        "held-out",
        "perplexity",
        "tok/s",
        "MFU",
        "memory",
        "data wait",
    ]
    formats = {
        "steps": str,
        "tokens": count,
        f"loss_last_{LAST_STEPS}": "{:.4f}".format,
        "held_out_loss": "{:.4f}".format,
        "held_out_perplexity": "{:.4g}".format,
        "tokens_per_second": count,
        "mfu_bf16_peak": percent,
        "memory_gib": memory,
        "data_wait_share": percent,
    }
    return _markdown(header, [[run.name, *(_shown(run.summary.get(key), form) for key, form in formats.items())] for run in runs])


def comparison_table(runs: Sequence[Run]) -> str:
    """Markdown: each later run's loss minus the first's, paired by step, over all common steps and over the last fifth of them.

    sd is that of one step's difference. The mean's own uncertainty is not sd / sqrt(n): neighbouring steps are not independent.
    """
    header = ["run", f"minus {runs[0].name}, all", "sd", "steps", f"last {LATE_SHARE:.0%}", "sd", "steps"]
    rows = []
    for run in runs[1:]:
        _, differences = difference(runs[0], run)
        late = differences[len(differences) - math.ceil(len(differences) * LATE_SHARE) :]
        rows.append([run.name, *(cell for part in (differences, late) for cell in _mean_and_sd(part))])
    return _markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, 2 for a mistake in what it was given."""
    parser = argparse.ArgumentParser(prog="python -m pretrain.report", description="Loss curves and a table of run folders.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder; with several, the first is what others are compared to"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PNG",
        help="where to draw the curves (default: loss.png in the run folder, or comparison.png beside the folders)",
    )
    options = parser.parse_args(arguments)
    first = options.runs[0]
    out = options.out or (first / "loss.png" if len(options.runs) == 1 else first.parent / "comparison.png")
    try:
        runs = [read_run(path) for path in dict.fromkeys(options.runs)]
        check_comparable(runs)
        plot_losses(runs, out)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    tables = [summary_table(runs), *([comparison_table(runs)] if len(runs) > 1 else [])]
    print("\n\n".join([*tables, f"Curves: {out}"]))
    return 0


def _mean_and_sd(values: Any) -> list[str]:
    if len(values) < 2:
        return ["–", "–", str(len(values))]
    return [f"{values.mean():+.4f}", f"{values.std(ddof=1):.4f}", str(len(values))]


def _shown(value: Any, form: Any) -> str:
    return "–" if value is None else form(value)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned as plain text: names left, figures right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
            + " |"
        )

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


if __name__ == "__main__":
    sys.exit(main())
