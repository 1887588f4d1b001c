"""Search for a fast and stable configuration in phases: `python -m pretrain phases PHASES.yaml`.

A phase is a small matrix over a few settings. It is measured on top of the fastest cell of the
phases before it, so three phases of four cells take 12 runs instead of 64. The search ends at the
first phase that gains nothing or has no stable cell. The answer is the fastest cell so far, with
the command that trains with it. A cell is stable if it has finished with a finite loss at every
step, and has neither skipped nor rolled back a step. Finished runs are not repeated: the same
command continues the search.

Exit status: 0 an answer, 1 no cell of the first phase is stable, 2 invalid input, 130, 138 or 143
stopped by a signal.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.files import replace_file
from foundation.settings import PathText, Share
from foundation.signals import StopRequest
from foundation.units import markdown, memory, or_dash, percent, plural
from pretrain.compare.matrix_file import (
    Cell,
    CellSettings,
    LaunchSettings,
    Matrix,
    MatrixSettings,
    Values,
    as_overrides,
    make_matrix,
    read_settings,
)
from pretrain.compare.matrix_run import (
    Outcome,
    command_of,
    launch_command,
    report_stop,
    run_all,
    say,
)
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import WARM_UP_STEPS
from pretrain.settings.config import fill_in, flatten

# Minimum number of steps for a meaningful median of the speed.
LEAST_STEPS = WARM_UP_STEPS + 3


class PhaseSettings(CellSettings):
    """One phase, described like the cells of a matrix file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class PhasesSettings(LaunchSettings):
    """Content of a phases file. `overrides` apply to every phase: few steps, no checkpoints."""

    phases: Annotated[list[PhaseSettings], Field(min_length=1)]
    # Minimum gain in tokens/s over the phases before. With less, the search ends.
    least_gain: Share = 0.01
    # Folder of the search, which contains the folders of all runs.
    run_dir: PathText = "runs/{name}"


@dataclass(frozen=True)
class Measured:
    """A measured cell: its summary, and whether its speed counts."""

    phase: str
    cell: Cell
    figures: dict[str, Any]
    # Reason why the speed does not count, or "".
    unstable: str

    @classmethod
    def of(cls, phase: str, outcome: Outcome) -> Measured:
        """Return the measurement of an ended cell."""
        run = outcome.cell.record()
        reason = ""
        if run is not None and run.broke_off:
            reason = run.broke_off
        elif run is None or not outcome.is_finished:
            reason = f"{outcome.status}: see {outcome.cell.log}"
        elif run.side_by_side:
            reason = "it shared its devices with another run"
        elif run.summary["skipped_steps"] or run.summary.get("rollbacks"):
            reason = "a step was skipped or rolled back"
        return cls(phase, outcome.cell, run.summary if run else {}, reason)

    @property
    def speed(self) -> float:
        """Return the tokens/s over all devices, or 0 if the speed does not count."""
        return 0.0 if self.unstable else self.figures["tokens_per_second"]


@dataclass
class Search:
    """The state of a search."""

    path: Path
    settings: PhasesSettings
    overrides: tuple[str, ...]
    measured: list[Measured] = field(default_factory=list)
    # The best cell of each phase that gained, in order.
    chosen: list[Measured] = field(default_factory=list)
    # Why the search has ended.
    ended: str = "all phases are measured"

    @property
    def folder(self) -> Path:
        """Return the folder of the search."""
        return Path(fill_in(self.settings.run_dir, {"name": self.settings.name}))

    @property
    def values(self) -> Values:
        """Return the values of the chosen cells. Later phases override earlier ones."""
        return {key: value for best in self.chosen for key, value in best.cell.values.items()}

    def matrix(self, phase: PhaseSettings, values: Values) -> Matrix:
        """Return the cells of `phase` with the chosen `values`.

        The path of the runs names the choices so far, because other choices lead to other runs.
        Raises InputError that names the phase if it has a mistake.
        """
        folder = self.folder.joinpath(phase.name, *(best.cell.name for best in self.chosen))
        settings = MatrixSettings(
            **self.settings.model_dump(include={"recipe", "accelerate", "gpus", "processes"}),
            **phase.model_dump(include={"axes", "cells"}),
            name=f"{self.settings.name}-{phase.name}",
            overrides=flatten(self.settings.overrides) | values,
            run_dir=f"{folder}/{{cell}}",
        )
        return make_matrix(f"{self.path}, phase {phase.name}", settings, self.overrides)

    def check(self) -> list[Matrix]:
        """Return every phase as a matrix, before the first phase starts.

        Each phase uses the first cells of the phases before it, because it may need their settings.
        Raises InputError for a mistake in any phase.
        """
        matrices = []
        values: Values = {}
        for phase in self.settings.phases:
            matrix = self.matrix(phase, values)
            matrices.append(matrix)
            values |= matrix.cells[0].values
            for cell in matrix.cells:
                steps = cell.recipe.train.steps
                if steps and steps < LEAST_STEPS:
                    raise InputError(
                        f"{matrix.path}, cell {cell.name}: {steps} steps are too few to measure "
                        f"the speed; set `train.steps` to {LEAST_STEPS} or more"
                    )
        return matrices

    def judge(self, phase: str, outcomes: Sequence[Outcome]) -> bool:
        """Add the cells of an ended phase, and return True if the search continues."""
        measured = [Measured.of(phase, outcome) for outcome in outcomes]
        self.measured += sorted(measured, key=lambda cell: -cell.speed)
        best = max(measured, key=lambda cell: cell.speed)
        if not best.speed:
            self.ended = f"no cell of phase {phase} is stable"
            return False
        if self.chosen:
            gain = best.speed / self.chosen[-1].speed - 1
            if gain < self.settings.least_gain:
                self.ended = (
                    f"the fastest of phase {phase} gains {gain:+.1%}, less than "
                    f"{self.settings.least_gain:+.1%}"
                )
                return False
        self.chosen.append(best)
        return True

    def report(self) -> str:
        """Return the table of all cells and the answer in Markdown.

        Cells are sorted by phase and speed.
        """
        rows = [
            [
                measured.phase,
                measured.cell.name,
                or_dash(measured.speed or None, "{:,.0f}".format),
                or_dash(measured.figures.get("mfu_bf16_peak"), percent),
                or_dash(measured.figures.get("memory_gib"), memory),
                "**best**" if measured in self.chosen[-1:] else measured.unstable,
            ]
            for measured in self.measured
        ]
        header = ["phase", "cell", "tokens/s", "MFU (BF16)", "memory", ""]
        lines = [markdown(header, rows, names=2), f"Ended: {self.ended}."]
        if self.chosen:
            settings = self.settings
            overrides = [*self.overrides, *as_overrides(self.values)]
            lines += [
                f"To train with the best configuration, without the `overrides` of {self.path}:",
                f"    {launch_command(settings.accelerate, settings.recipe, overrides)}",
            ]
        return "\n\n".join(lines)


def load_phases(path: Path, overrides: Sequence[str], **changes: Any) -> Search:
    """Read the phases file at `path`. `changes` that are not None replace keys of the file.

    Raises InputError that names the file and the key.
    """
    return Search(path, read_settings(PhasesSettings, path, changes), tuple(overrides))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises InputError for a mistake."""
    parser = CommandParser("python -m pretrain phases", __doc__)
    parser.add_argument(
        "phases", type=Path, help="the phases and their order, a YAML file; see recipes/phases/"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the recipe in every cell",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="distribute the cells of a phase over this number of GPUs",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands of all phases, based on the first cells, and exit",
    )
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Raises InputError for a mistake in the arguments.
    """
    options = parse_arguments(arguments)
    search = load_phases(options.phases, options.overrides, gpus=options.gpus)
    matrices = search.check()
    if options.dry_run:
        note = ""
        for phase, matrix in zip(search.settings.phases, matrices, strict=True):
            print(f"# {phase.name}{note}")
            print("\n".join(shlex.join(command_of(matrix, cell)) for cell in matrix.cells))
            note = ", based on the first cells; the search uses the best cells"
        return 0
    with RunFolder(search.folder), StopRequest(passed_on=True) as stop:
        return measure(search, stop)


def measure(search: Search, stop: StopRequest) -> int:
    """Run the phases until one gains nothing. Return the exit status."""
    page = search.folder / "phases.md"
    phases = search.settings.phases
    for place, phase in enumerate(phases, start=1):
        matrix = search.matrix(phase, search.values)
        say(f"\nphase {place} of {len(phases)}, {phase.name}: {plural(len(matrix.cells), 'cell')}")
        outcomes = run_all(matrix, matrix.cells, stop)
        if stop.requested:
            return report_stop(stop.requested)
        continues = search.judge(phase.name, outcomes)
        replace_file(page, f"{search.report()}\n".encode())
        if not continues:
            break
    say(f"\n{search.report()}\n\nThe table is in {page}")
    return 0 if search.chosen else 1
