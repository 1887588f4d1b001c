"""Measure the speed of trainers on one GPU.

    python -m benchmarks.speed programs --out FILE     # other trainers, as their own programs
    python -m benchmarks.speed ways --out FILE         # their libraries in our training loop
    python -m benchmarks.speed shapes --out FILE       # our speed, by model
    python -m benchmarks.speed report FILE...          # print the tables of result files

`programs` answers which trainer is faster, `ways` which settings and libraries, and how far a step
is from the limit of the machine, and `shapes` which models gain by FP8.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed import report, shapes, ways
from benchmarks.speed.programs import measure as programs
from foundation.command import run_command

TASKS = {"programs": programs, "ways": ways, "shapes": shapes}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(required=True)
    for name, module in TASKS.items():
        task = tasks.add_parser(
            name,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(task)
        task.set_defaults(run=module.measure)
    show = tasks.add_parser("report", description="Print the tables of result files.")
    show.add_argument("files", type=Path, nargs="+", metavar="FILE")
    show.set_defaults(run=lambda arguments: print(tables(arguments.files)))
    arguments = parser.parse_args()
    arguments.run(arguments)


def tables(files: Sequence[Path]) -> str:
    """Return the table of each file. Raises InputError for a file that cannot be used."""
    texts = []
    for file in files:
        result = report.read(file)
        if "rows" in result:
            texts.append(programs.table(result))
        elif "shapes" in result:
            texts.append(shapes.table(result))
        else:
            texts.append(report.section(result, str(file)))
    return "\n\n".join(texts)


if __name__ == "__main__":
    sys.exit(run_command(main))
