"""Find a fast and stable configuration in phases: `python -m pretrain phases PHASES.yaml [key=value ...] [--dry-run]`.

A phase is a small matrix over a few settings. Each is measured on top of the fastest cell of the phases before it, so that three
phases of four cells take twelve runs and not 64. It ends at the first phase that gains nothing, or that has no stable cell; the
fastest cell so far is the answer, as the command that trains with it. A cell is stable that has finished with every loss finite,
no step left out and none taken back. What is finished is left alone: the same command goes on.

Exit status: 0 found, 1 no cell of the first phase is stable, 2 something given cannot be used (one message says what), 130 or 143
stopped, 138 the hours are over.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.files import save_file
from foundation.settings import FilePath, PathText, PositiveCount, Settings, Share, load_yaml, parse
from foundation.signals import StopRequest
from foundation.tables import UNKNOWN, markdown, or_dash
from foundation.units import count, duration, memory, percent, plural
from pretrain.compare.matrix import Outcome, run_all
from pretrain.compare.matrix_cell import TIME_IS_UP_STATUS, command_of
from pretrain.compare.matrix_file import Axes, Matrix, MatrixRun, MatrixSettings, Values, make_matrix
from pretrain.compare.ranking import Ranking
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import WARM_UP_STEPS, RunRecord, is_rollback, is_unlabelled, read_run
from pretrain.settings.config import filled_in, flatten, parse_overrides

LEAST_STEPS = 3  # after those that warm up, for a median that means something


class PhaseSettings(Settings):
    """One phase: what a matrix file says of its cells."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    axes: Axes = Field(default_factory=dict)  # a cell for every combination
    leave_out: list[Values] = Field(default_factory=list)  # combinations that are not wanted
    cells: list[Values] = Field(default_factory=list)  # more cells, beside the combinations


class PhasesSettings(Settings):
    """What a phases file can hold."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: FilePath  # the base
    accelerate: FilePath  # how the runs are launched
    overrides: Values = Field(default_factory=dict)  # over the recipe, in every phase: few steps, no checkpoints
    phases: Annotated[list[PhaseSettings], Field(min_length=1)]
    least_gain: Share = 0.01  # in tokens/s over the phases before: with less, what is there stays and the search ends
    run_dir: PathText = "runs/{name}"  # of the whole search; each run has a folder in it
    gpus: PositiveCount | None = None  # as in a matrix: GPUs to spread a phase's cells over
    processes: PositiveCount | None = None  # as in a matrix
    max_hours: float | None = Field(None, gt=0)  # of the whole search; what is running then saves and stops


@dataclass(frozen=True)
class Candidate:
    """A cell that was run: how fast, or why that does not count."""

    phase: str
    run: MatrixRun
    tokens_per_second: float | None = None  # median, over all devices; None: `because`
    because: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, phase: str, outcome: Outcome) -> Candidate:
        """Judges a run that has ended."""
        run = outcome.run
        try:
            record = read_run(run.run_dir)
        except InputError as error:
            return cls(phase, run, because=f"{outcome.status}: see {run.log}" if outcome.status == "failed" else str(error))
        because = _unstable(record)
        if because is None and not outcome.status.startswith("finished"):
            because = f"{outcome.status}: see {run.log}"
        speed = statistics.median(each["tokens_per_second"] for each in record.steps[WARM_UP_STEPS:]) if because is None else None
        return cls(phase, run, speed, because, record.summary)


def _unstable(record: RunRecord) -> str | None:
    steps = record.steps
    if "halted" in record.summary:
        return f"unstable: halted at step {record.summary['steps']}: {record.summary['halted'].partition('. ')[0]}"
    if len(steps) < WARM_UP_STEPS + LEAST_STEPS:
        least = WARM_UP_STEPS + LEAST_STEPS
        return f"of {plural(len(steps), 'step')} no speed can be told; set `train.steps` to {least} or more"
    if record.side_by_side:
        return "it shared its devices with another run"
    told = [each for each in steps if not is_unlabelled(each)]
    if strange := [each["step"] for each in told if each["loss"] is None or not math.isfinite(each["loss"])]:
        return f"unstable: the loss of step {strange[0]} is not finite"
    if skipped := [each["step"] for each in steps if each.get("skipped")]:
        return f"unstable: step {skipped[0]} was left out"
    if any(map(is_rollback, record.metrics)):
        return "unstable: it went back to a checkpoint"
    return None


@dataclass
class Search:
    """The phases as far as they are."""

    path: Path
    settings: PhasesSettings
    overrides: tuple[str, ...]
    folder: Path
    tried: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None
    chosen: list[MatrixRun] = field(default_factory=list)  # the best cell of each phase that gained, in order
    ended: str = "all phases are measured"
    began: float = field(default_factory=time.monotonic)

    @property
    def values(self) -> Values:
        """What the chosen cells set, the later ones over the earlier."""
        return {key: value for run in self.chosen for key, value in run.values.items()}

    @property
    def names(self) -> list[str]:
        """The names of the chosen cells; two of them may be called alike."""
        return [run.name for run in self.chosen]

    def matrix(self, number: int, chosen: Values) -> Matrix:
        """Phase `number`, from 1, on the `chosen` values. Its runs lie in a folder of the choices so far, as others would give
        other runs. InputError for a mistake in it, which names the phase."""
        settings, phase = self.settings, self.settings.phases[number - 1]
        below, axes = flatten(settings.overrides) | chosen, flatten(phase.axes)
        beside = {key: value for key, value in below.items() if key in axes}  # a matrix has no override of an axis; its cells do
        place = self.folder.joinpath(f"{number}-{phase.name}", *self.names)
        content = {
            "name": f"{settings.name}-{phase.name}",
            "recipe": str(settings.recipe),
            "accelerate": str(settings.accelerate),
            "overrides": {key: value for key, value in below.items() if key not in axes},
            "axes": phase.axes,
            "leave_out": phase.leave_out,
            "cells": [beside | flatten(cell) for cell in phase.cells],
            "run_dir": f"{place}/{{cell}}",
            "gpus": settings.gpus,
            "processes": settings.processes,
            "max_hours": self._hours_left(),
        }
        origin = f"{self.path}, phase {phase.name}"
        return make_matrix(origin, parse(MatrixSettings, content, origin), self.overrides, timed=True)

    def check(self) -> list[Matrix]:
        """Every phase as a matrix, before the first is begun: on the base, or where that takes it not, on a cell of the phase
        before, which may set what it needs. InputError for a mistake in any."""
        matrices: list[Matrix] = []
        for place in range(1, len(self.settings.phases) + 1):
            refused = None
            for base in ({}, *(run.values for run in matrices[-1].runs)) if matrices else ({},):
                try:
                    matrices.append(self.matrix(place, base))
                    break
                except InputError as error:
                    refused = refused or error
            else:
                raise refused
        least = WARM_UP_STEPS + LEAST_STEPS
        for run in (run for matrix in matrices for run in matrix.runs):
            if (steps := run.recipe.train.steps) is not None and steps < least:
                few = f"of {plural(steps, 'step')} no speed can be told; set `train.steps` to {least} or more"
                raise InputError(f"{self.path}: {run.name}: {few}")
        return matrices

    def _hours_left(self) -> float | None:
        most = self.settings.max_hours
        return None if most is None else max(most - (time.monotonic() - self.began) / 3600, 1e-3)

    def take(self, number: int, outcomes: Sequence[Outcome]) -> bool:
        """Judge the cells of a phase that has ended; whether the next one is to be measured."""
        name = self.settings.phases[number - 1].name
        found = [Candidate.of(name, outcome) for outcome in outcomes]
        self.tried += found
        stable = [each for each in found if each.tokens_per_second]
        if not stable:
            self.ended = f"no cell of phase {name} is stable"
            return False
        fastest = max(stable, key=lambda each: each.tokens_per_second)
        gain = None if self.best is None else fastest.tokens_per_second / self.best.tokens_per_second - 1
        if gain is not None and gain < self.settings.least_gain:
            wanted = f"{self.settings.least_gain:+.1%}"
            self.ended = f"the fastest of phase {name} is at {gain:+.1%} of what it stands on; less than {wanted} ends the search"
            return False
        self.best = fastest
        self.chosen.append(fastest.run)
        return True


def load_phases(path: Path, overrides: Sequence[str], **changes: Any) -> Search:
    """The search that the file at `path` describes, `changes` in place of its keys. InputError names the file and the key."""
    settings = parse(PhasesSettings, load_yaml(path) | changes, lambda key, _: "command line" if key in changes else str(path))
    names = [phase.name for phase in settings.phases]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: `phases`: two are named {max(names, key=names.count)}; each has a name of its own")
    try:
        folder = Path(filled_in(settings.run_dir, {"name": settings.name}))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    load_yaml(settings.recipe)  # which has a message of its own where it is not there
    return Search(path, settings, tuple(overrides), folder)


def rows(search: Search) -> Iterator[list[str]]:
    """A line for each cell that was run, phase by phase, fastest first; how much faster it is than what its phase stood on."""
    names = [phase.name for phase in search.settings.phases]
    baseline: float | None = None
    for name in names:
        own = [each for each in search.tried if each.phase == name]
        for each in sorted(own, key=lambda each: -(each.tokens_per_second or 0)):
            speed, figures = each.tokens_per_second, each.figures
            gain = f"{speed / baseline - 1:+.1%}" if speed and baseline else UNKNOWN
            line = [name, each.run.name, or_dash(speed, "{:,.0f}".format), gain, or_dash(figures.get("mfu_bf16_peak"), percent)]
            line += [or_dash(figures.get("memory_gib"), memory), or_dash(figures.get("loss"), "{:.3f}".format)]
            yield [*line, "**best**" if each is search.best else each.because or ""]
        baseline = max([baseline or 0, *(each.tokens_per_second or 0 for each in own)]) or None


def report(search: Search) -> str:
    """The table of all cells and the answer, in Markdown."""
    header = ["phase", "cell", "tokens/s", "gain", "MFU (BF16)", "memory", "last loss", ""]
    lines = [markdown(header, list(rows(search)), names=2), "", f"Ended: {search.ended}."]
    if search.best is None:
        return "\n".join(lines)
    command = ["accelerate", "launch", "--config_file", str(search.settings.accelerate), "train_accelerate.py"]
    asked = {*search.values, *parse_overrides(search.overrides)}
    given = [text for text in search.best.run.overrides if text.partition("=")[0].strip() in asked]
    lines += [
        f"Fastest and stable: {' + '.join(search.names)}, {count(search.best.tokens_per_second)} tokens/s. To train with it, "
        f"without the `overrides` of {search.path}:",
        "",
        f"    {shlex.join([*command, str(search.settings.recipe), *given])}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    parser = CommandParser(
        prog="python -m pretrain phases", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", type=Path, help="what is tried, and in which order: a YAML file, see recipes/phases/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, in every cell")
    parser.add_argument("--gpus", type=number(1, whole=True), metavar="N", help="GPUs of this machine for a phase's cells")
    parser.add_argument("--max-hours", type=number(), metavar="H", help="after these, what is running saves and all stops")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of all phases on the base, and stop")
    options = parser.parse_intermixed_args(arguments)
    changes = {key: value for key in ("gpus", "max_hours") if (value := getattr(options, key)) is not None}
    search = load_phases(options.phases, options.overrides, **changes)
    matrices = search.check()
    if options.dry_run:
        for phase, matrix in zip(search.settings.phases, matrices, strict=True):
            print(f"# {phase.name}" + ("" if matrix is matrices[0] else ", as if on the base; in the search, on the best before"))
            print("\n".join(shlex.join(command_of(matrix, run)) for run in matrix.runs))
        return 0
    with RunFolder(search.folder):
        return measure(search)


def measure(search: Search) -> int:
    """Run phase after phase, until one gains nothing; returns the exit status."""
    page = search.folder / "phases.md"
    with StopRequest(passed_on=True) as stop:
        for place, phase in enumerate(search.settings.phases, start=1):
            matrix = search.matrix(place, search.values)
            for run in matrix.runs:
                run.check_folder()
            on = f", on {' + '.join(search.names)}" if search.chosen else ""
            print(
                f"\nphase {place} of {len(search.settings.phases)}, {phase.name}: {plural(len(matrix.runs), 'cell')}{on}",
                flush=True,
            )
            outcomes = run_all(matrix, matrix.runs, stop, Ranking(matrix, by_speed=True))
            if stop.requested or any(each.status in ("stopped", "not started") for each in outcomes):
                print("\nstopped; the same command goes on from here", file=sys.stderr)
                return 128 + stop.requested if stop.requested else TIME_IS_UP_STATUS
            goes_on = search.take(place, outcomes)
            save_file(page, f"{report(search)}\n".encode(), "put that right, and start again")
            if not goes_on:
                break
    print(f"\n{report(search)}\n\nmeasured in {duration(time.monotonic() - search.began)}; the table is in {page}")
    return 0 if search.best else 1
