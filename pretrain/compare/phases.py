"""Find a fast and stable configuration in phases: `python -m pretrain phases PHASES.yaml [key=value ...] [--dry-run]`.

A phase is a small matrix over a few settings. Each is measured on top of the fastest cell of the phases before it, so that three
phases of four cells take twelve runs and not 64. It ends at the first phase that gains nothing, or that has no stable cell; the
fastest cell so far is the answer, as the command that trains with it. A cell is stable that has finished with every loss finite,
no step left out and none taken back. What is finished is left alone: the same command goes on.

Exit status: 0 an answer, 1 no cell of the first phase is stable, 2 something given cannot be used (one message says what), 130,
138 or 143 stopped.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import load_yaml
from foundation.settings import PathText, Share, parse
from foundation.signals import StopRequest
from foundation.units import markdown, memory, or_dash, percent, plural
from pretrain.compare.matrix_file import (
    Cell,
    CellSettings,
    LaunchSettings,
    Matrix,
    MatrixSettings,
    Values,
    make_matrix,
)
from pretrain.compare.matrix_run import Outcome, command_of, run_all, say, stopped
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import WARM_UP_STEPS
from pretrain.settings.config import fill_in, flatten, parse_overrides

LEAST_STEPS = WARM_UP_STEPS + 3  # for a median that means something


class PhaseSettings(CellSettings):
    """One phase: what a matrix file says of its cells."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class PhasesSettings(LaunchSettings):
    """What a phases file can hold. `overrides` are of every phase: few steps, no checkpoints."""

    phases: Annotated[list[PhaseSettings], Field(min_length=1)]
    # in tokens/s over the phases before: with less, what is there stays and the search ends
    least_gain: Share = 0.01
    run_dir: PathText = "runs/{name}"  # of the whole search; each run has a folder in it


@dataclass(frozen=True)
class Measured:
    """A cell that was run: the figures of its summary, and why its speed does not count."""

    phase: str
    cell: Cell
    figures: dict[str, Any]
    unstable: str  # empty where its speed counts

    @classmethod
    def of(cls, phase: str, outcome: Outcome) -> Measured:
        run = outcome.cell.record()
        why = ""
        if run is None or run.broke_off or not outcome.is_finished:
            why = (run and run.broke_off) or f"{outcome.status}: see {outcome.cell.log}"
        elif run.side_by_side:
            why = "it shared its devices with another run"
        elif run.summary["skipped_steps"] or run.summary.get("rollbacks"):
            why = "a step was left out or taken back"
        return cls(phase, outcome.cell, run.summary if run else {}, why)

    @property
    def speed(self) -> float:
        """Tokens/s over all devices; 0 where it does not count."""
        return 0.0 if self.unstable else self.figures["tokens_per_second"]


@dataclass
class Search:
    """The phases as far as they are."""

    path: Path
    settings: PhasesSettings
    overrides: tuple[str, ...]
    measured: list[Measured] = field(default_factory=list)
    # the best cell of each phase that gained, in order
    chosen: list[Measured] = field(default_factory=list)
    ended: str = "all phases are measured"

    @property
    def folder(self) -> Path:
        return Path(fill_in(self.settings.run_dir, {"name": self.settings.name}))

    @property
    def values(self) -> Values:
        """What the chosen cells set, the later ones over the earlier."""
        return {key: value for each in self.chosen for key, value in each.cell.values.items()}

    def matrix(self, phase: PhaseSettings, values: Values) -> Matrix:
        """`phase` on the chosen `values`. Its runs lie in a folder of the choices so far, as others would give other runs.
        InputError for a mistake in it, which names the phase."""
        place = self.folder.joinpath(phase.name, *(each.cell.name for each in self.chosen))
        matrix = MatrixSettings(
            **self.settings.model_dump(include={"recipe", "accelerate", "gpus", "processes"}),
            **phase.model_dump(include={"axes", "cells"}),
            name=f"{self.settings.name}-{phase.name}",
            overrides=flatten(self.settings.overrides) | values,
            run_dir=f"{place}/{{cell}}",
        )
        return make_matrix(f"{self.path}, phase {phase.name}", matrix, self.overrides)

    def check(self) -> list[Matrix]:
        """Every phase as a matrix, before the first begins: each on the first cells of those before it, which may set what it
        needs. InputError for a mistake in any."""
        matrices, values = [], {}
        for phase in self.settings.phases:
            matrices.append(matrix := self.matrix(phase, values))
            values |= matrix.cells[0].values
            for cell in matrix.cells:
                if (cell.recipe.train.steps or LEAST_STEPS) < LEAST_STEPS:
                    few = f"too few steps tell no speed; set `train.steps` to {LEAST_STEPS} or more"
                    raise InputError(f"{matrix.path}, cell {cell.name}: {few}")
        return matrices

    def judge(self, phase: str, outcomes: Sequence[Outcome]) -> bool:
        """Judge the cells of a phase that has ended; whether the next one is to be measured."""
        own = sorted(
            (Measured.of(phase, outcome) for outcome in outcomes), key=lambda each: -each.speed
        )
        self.measured += own
        if not own[0].speed:
            self.ended = f"no cell of phase {phase} is stable"
        elif (
            self.chosen
            and (gain := own[0].speed / self.chosen[-1].speed - 1) < self.settings.least_gain
        ):
            self.ended = f"the fastest of phase {phase} gains {gain:+.1%}, less than {self.settings.least_gain:+.1%}"
        else:
            self.chosen.append(own[0])
            return True
        return False

    def report(self) -> str:
        """The table of all cells, phase by phase, the fastest first, and the answer, in Markdown."""
        rows = []
        for each in self.measured:
            row = [each.phase, each.cell.name, or_dash(each.speed or None, "{:,.0f}".format)]
            row += [
                or_dash(each.figures.get("mfu_bf16_peak"), percent),
                or_dash(each.figures.get("memory_gib"), memory),
            ]
            rows.append([*row, "**best**" if each in self.chosen[-1:] else each.unstable])
        lines = [
            markdown(["phase", "cell", "tokens/s", "MFU (BF16)", "memory", ""], rows, names=2),
            f"Ended: {self.ended}.",
        ]
        if self.chosen:
            command = [
                "accelerate",
                "launch",
                "--config_file",
                str(self.settings.accelerate),
                "train_accelerate.py",
            ]
            keys = {*self.values, *parse_overrides(self.overrides)}
            own = [
                text for text in self.chosen[-1].cell.overrides if text.partition("=")[0] in keys
            ]
            lines.append(f"To train with the best, without the `overrides` of {self.path}:")
            lines.append(f"    {shlex.join([*command, str(self.settings.recipe), *own])}")
        return "\n\n".join(lines)


def load_phases(path: Path, overrides: Sequence[str], **changes: float) -> Search:
    """The search that the file at `path` describes, `changes` in place of its keys. InputError names the file and the key."""
    return Search(
        path, parse(PhasesSettings, load_yaml(path) | changes, str(path)), tuple(overrides)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    parser = CommandParser("python -m pretrain phases", __doc__)
    parser.add_argument(
        "phases",
        type=Path,
        help="what is tried, and in which order: a YAML file, see recipes/phases/",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="over the recipe's settings, in every cell",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of this machine for a phase's cells"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands of all phases, on first cells, and stop",
    )
    options = parser.parse_intermixed_args(arguments)
    changes = {} if options.gpus is None else {"gpus": options.gpus}
    search = load_phases(options.phases, options.overrides, **changes)
    matrices = search.check()
    if options.dry_run:
        for phase, matrix in zip(search.settings.phases, matrices, strict=True):
            print(
                f"# {phase.name}"
                + (
                    ""
                    if matrix is matrices[0]
                    else ", on first cells; in the search, on the best before"
                )
            )
            print("\n".join(shlex.join(command_of(matrix, cell)) for cell in matrix.cells))
        return 0
    with RunFolder(search.folder), StopRequest(passed_on=True) as stop:
        return measure(search, stop)


def measure(search: Search, stop: StopRequest) -> int:
    """Run phase after phase, until one gains nothing; returns the exit status."""
    page, phases = search.folder / "phases.md", search.settings.phases
    for place, phase in enumerate(phases, start=1):
        matrix = search.matrix(phase, search.values)
        say(f"\nphase {place} of {len(phases)}, {phase.name}: {plural(len(matrix.cells), 'cell')}")
        outcomes = run_all(matrix, matrix.cells, stop)
        if stop.requested:
            return stopped(stop)
        gained = search.judge(phase.name, outcomes)
        replace_file(page, f"{search.report()}\n".encode())
        if not gained:
            break
    say(f"\n{search.report()}\n\nThe table is in {page}")
    return 0 if search.chosen else 1
