"""Search for a fast and stable configuration in phases: `python -m pretrain phases PHASES.yaml`.

`pretrain.settings.commands.phases` describes the search.

Exit status: 0 if the search has a result, 1 if no cell of the first phase is stable, 2 for invalid
input, and 130, 138 or 143 if a signal stopped the command.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

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
from pretrain.settings.config import fill_in, flatten


class PhaseSettings(CellSettings):
    """Settings of one phase. `axes` and `cells` describe its cells as in a matrix file."""

    # Name of the phase, for paths and reports.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class PhasesSettings(LaunchSettings):
    """Content of a phases file.

    `overrides` apply to every phase. They usually make the runs short and switch checkpoints off.
    """

    # The phases in order.
    phases: Annotated[list[PhaseSettings], Field(min_length=1)]
    # Minimum gain of a phase: the speed of its fastest cell, divided by the speed of the fastest
    # cell of the earlier phases, minus 1. If the gain is smaller, the search ends.
    least_gain: Share = 0.01
    # Folder of the search, which contains the run folders of all cells. {name} is replaced by the
    # name of the search.
    run_dir: PathText = "runs/{name}"


@dataclass(frozen=True)
class Measured:
    """A cell that has ended, and the reason if the search does not use its speed."""

    # Name of the phase.
    phase: str
    cell: Cell
    # Summary of the run. Empty if the run has no step.
    figures: dict[str, Any]
    # The reason why the search does not use the speed of the cell. "" if the speed is used.
    unused_because: str

    @classmethod
    def of(cls, phase: str, outcome: Outcome) -> Measured:
        """Return the measurement of a cell that has ended. `phase` is the name of its phase."""
        run = outcome.cell.record()
        reason = ""
        if run is not None and run.broke_off:
            reason = run.broke_off
        elif run is None or not outcome.is_finished:
            reason = f"{outcome.status}: see {outcome.cell.log}"
        elif run.summary["skipped_steps"] or run.summary.get("rollbacks"):
            reason = "a step was skipped or rolled back"
        return cls(phase, outcome.cell, run.summary if run else {}, reason)

    @property
    def speed(self) -> float:
        """Return the speed of all devices together in tokens/s, or 0 if it is unused."""
        return 0.0 if self.unused_because else self.figures["tokens_per_second"]


@dataclass
class Search:
    """The state of a search."""

    # Path of the phases file.
    path: Path
    # Content of the phases file.
    settings: PhasesSettings
    # Settings from the command line that override the recipe, as key=value.
    overrides: Sequence[str]
    # All measured cells. Within each phase, the fastest cell is the first.
    measured: list[Measured] = field(default_factory=list)
    # The fastest cell of each phase, in the order of the phases. A phase that has ended the search
    # has no cell in this list.
    chosen: list[Measured] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Return the folder of the search."""
        return Path(fill_in(self.settings.run_dir, {"name": self.settings.name}))

    @property
    def values(self) -> Values:
        """Return the values of all chosen cells, by dotted key.

        If several chosen cells have the same key, the value of the cell from the latest phase is
        returned.
        """
        return {key: value for best in self.chosen for key, value in best.cell.values.items()}

    def matrix(self, phase: PhaseSettings, values: Values) -> Matrix:
        """Return `phase` as a matrix whose cells also have the settings in `values`.

        The paths of the run folders contain the names of the chosen cells of earlier phases,
        because the runs depend on these cells. Raises InputError for a mistake in the phase. The
        message names the phase.
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
        """Check all phases before the first phase starts, and return each phase as a matrix.

        Each phase is checked with settings from the earlier phases. The fastest cells of the
        earlier phases are not known yet, so the settings of their first cells are used instead.
        Raises InputError for a mistake in any phase.
        """
        matrices = []
        values: Values = {}
        for phase in self.settings.phases:
            matrix = self.matrix(phase, values)
            matrices.append(matrix)
            values |= matrix.cells[0].values
        return matrices

    def judge(self, phase: str, outcomes: Sequence[Outcome]) -> str:
        """Record the cells of a phase that has ended, and choose its fastest cell.

        Return the reason if the phase ends the search, else "". `phase` is the name of the phase.
        """
        measured = [Measured.of(phase, outcome) for outcome in outcomes]
        self.measured += sorted(measured, key=lambda cell: -cell.speed)
        best = max(measured, key=lambda cell: cell.speed)
        if not best.speed:
            return f"no cell of phase {phase} is stable"
        if self.chosen:
            gain = best.speed / self.chosen[-1].speed - 1
            if gain < self.settings.least_gain:
                return (
                    f"the gain of the fastest cell of phase {phase} is {gain:+.1%}, which is less "
                    f"than {self.settings.least_gain:+.1%}"
                )
        self.chosen.append(best)
        return ""

    def report(self, ended: str) -> str:
        """Return a Markdown text with the table of all measured cells and the result of the search.

        Cells are sorted by phase, and within each phase by speed. `ended` is the reason why the
        search has ended, or "" if all phases are measured.
        """
        best = self.chosen[-1] if self.chosen else None
        rows = [
            [
                measured.phase,
                measured.cell.name,
                or_dash(measured.speed or None, "{:,.0f}".format),
                or_dash(measured.figures.get("mfu_bf16_peak"), percent),
                or_dash(measured.figures.get("memory_gib"), memory),
                "**best**" if measured == best else measured.unused_because,
            ]
            for measured in self.measured
        ]
        header = ["phase", "cell", "tokens/s", "MFU (BF16)", "memory", ""]
        lines = [markdown(header, rows, names=2), f"Ended: {ended or 'all phases are measured'}."]
        if self.chosen:
            settings = self.settings
            arguments = [*self.overrides, *as_overrides(self.values)]
            lines += [
                "This command trains with the best configuration, but without the settings in the "
                f"section `overrides` of {self.path}:",
                f"    {launch_command(settings.accelerate, settings.recipe, arguments)}",
            ]
        return "\n\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Raises InputError for a mistake in the arguments.
    """
    settings = read_settings(PhasesSettings, options.phases, {"gpus": options.gpus})
    search = Search(options.phases, settings, options.overrides)
    matrices = search.check()
    if options.dry_run:
        for phase, matrix in zip(search.settings.phases, matrices, strict=True):
            print(f"# {phase.name}")
            print("\n".join(shlex.join(command_of(matrix, cell)) for cell in matrix.cells))
        return 0
    with RunFolder(search.folder), StopRequest(passed_on=True) as stop:
        return measure(search, stop)


def measure(search: Search, stop: StopRequest) -> int:
    """Run the phases in order until the search ends. Return the exit status of the command."""
    page = search.folder / "phases.md"
    phases = search.settings.phases
    for place, phase in enumerate(phases, start=1):
        matrix = search.matrix(phase, search.values)
        say(f"\nphase {place} of {len(phases)}, {phase.name}: {plural(len(matrix.cells), 'cell')}")
        outcomes = run_all(matrix, matrix.cells, stop)
        if stop.requested:
            return report_stop(stop.requested)
        ended = search.judge(phase.name, outcomes)
        report = search.report(ended)
        replace_file(page, f"{report}\n".encode())
        if ended:
            break
    say(f"\n{report}\n\nWritten: {page}")
    return 0 if search.chosen else 1
