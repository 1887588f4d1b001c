"""Find a fast and stable configuration in phases: `python -m pretrain phases PHASES.yaml [key=value ...] [--dry-run]`.

A phase is a small matrix over a few settings. Each is measured on top of the fastest cell of the phases before it, so that three
phases of four cells take twelve runs and not 64. It ends at the first phase that gains nothing, or that has no stable cell; the
fastest cell so far is the answer, as the command that trains with it. A cell is stable that has finished with every loss finite,
no step left out and none taken back. What is finished is left alone: the same command goes on.

Exit status: 0 an answer, 1 no cell of the first phase is stable, 2 something given cannot be used (one message says what), 130 or
143 stopped, 138 the hours are over.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.files import save_file
from foundation.reading import load_yaml
from foundation.settings import PathText, Share, parse
from foundation.signals import StopRequest
from foundation.tables import UNKNOWN, markdown, or_dash
from foundation.units import count, memory, percent, plural
from pretrain.compare.matrix import Outcome, run_all, say
from pretrain.compare.matrix_cell import TIME_IS_UP_STATUS, command_of
from pretrain.compare.matrix_file import CellSettings, LaunchSettings, Matrix, MatrixRun, MatrixSettings, Values, make_matrix
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import WARM_UP_STEPS, RunRecord, is_rollback, is_unlabelled, read_run
from pretrain.settings.config import filled_in, flatten, parse_overrides

LEAST_STEPS = WARM_UP_STEPS + 3  # for a median that means something
TOO_SHORT = f"too few steps tell no speed; set `train.steps` to {LEAST_STEPS} or more"


class PhaseSettings(CellSettings):
    """One phase: what a matrix file says of its cells."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class PhasesSettings(LaunchSettings):
    """What a phases file can hold. `overrides` are of every phase: few steps, no checkpoints; `max_hours` of the whole search."""

    phases: Annotated[list[PhaseSettings], Field(min_length=1)]
    least_gain: Share = 0.01  # in tokens/s over the phases before: with less, what is there stays and the search ends
    run_dir: PathText = "runs/{name}"  # of the whole search; each run has a folder in it


@dataclass(frozen=True)
class Candidate:
    """A cell that was run: how fast, or why that does not count."""

    phase: str
    run: MatrixRun
    record: RunRecord | None
    unstable: str  # why its speed does not count; empty where it does

    @classmethod
    def of(cls, phase: str, outcome: Outcome) -> Candidate:
        try:
            record = read_run(outcome.run.run_dir)
        except InputError as error:
            return cls(phase, outcome.run, None, str(error))
        failed = "" if outcome.status.startswith("finished") else f"{outcome.status}: see {outcome.run.log}"
        return cls(phase, outcome.run, record, why_unstable(record) or failed)

    @property
    def speed(self) -> float | None:
        """Tokens/s over all devices, median; None where it does not count."""
        timed = self.record.steps[WARM_UP_STEPS:] if self.record and not self.unstable else []
        return statistics.median(each["tokens_per_second"] for each in timed) if timed else None


def why_unstable(record: RunRecord) -> str:
    steps = record.steps
    losses = {each["step"]: each["loss"] for each in steps if not is_unlabelled(each)}
    lost = [step for step, loss in losses.items() if loss is None or not math.isfinite(loss)]
    skipped = [each["step"] for each in steps if each.get("skipped")]
    reasons = {
        f"halted at step {record.summary['steps']}: {record.summary.get('halted')}": "halted" in record.summary,
        TOO_SHORT: len(steps) < LEAST_STEPS,
        "it shared its devices with another run": record.side_by_side,
        f"the loss of step {lost[:1]} is not finite": lost,
        f"step {skipped[:1]} was left out": skipped,
        "it went back to a checkpoint": any(map(is_rollback, record.metrics)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@dataclass
class Search:
    """The phases as far as they are."""

    path: Path
    settings: PhasesSettings
    overrides: tuple[str, ...]
    folder: Path
    tried: list[Candidate] = field(default_factory=list)
    chosen: list[Candidate] = field(default_factory=list)  # the best cell of each phase that gained, in order
    ended: str = "all phases are measured"
    began: float = field(default_factory=time.monotonic)

    @property
    def best(self) -> Candidate | None:
        return self.chosen[-1] if self.chosen else None

    @property
    def values(self) -> Values:
        """What the chosen cells set, the later ones over the earlier."""
        return {key: value for each in self.chosen for key, value in each.run.values.items()}

    @property
    def names(self) -> list[str]:
        return [each.run.name for each in self.chosen]

    def matrix(self, number: int, chosen: Values) -> Matrix:
        """Phase `number`, from 1, on the `chosen` values. Its runs lie in a folder of the choices so far, as others would give
        other runs. InputError for a mistake in it, which names the phase."""
        settings, phase = self.settings, self.settings.phases[number - 1]
        below, axes = flatten(settings.overrides) | chosen, flatten(phase.axes)
        beside = {key: value for key, value in below.items() if key in axes}  # a matrix has no override of an axis; its cells do
        place = self.folder.joinpath(f"{number}-{phase.name}", *self.names)
        cells = {"axes": phase.axes, "leave_out": phase.leave_out, "cells": [beside | flatten(cell) for cell in phase.cells]}
        matrix = MatrixSettings(
            **settings.model_dump(include=set(LaunchSettings.model_fields) - {"name", "overrides", "max_hours"}),
            **cells,
            name=f"{settings.name}-{phase.name}",
            overrides={key: value for key, value in below.items() if key not in axes},
            run_dir=f"{place}/{{cell}}",
            max_hours=settings.max_hours and max(settings.max_hours - (time.monotonic() - self.began) / 3600, 1e-3),
        )
        return make_matrix(f"{self.path}, phase {phase.name}", matrix, self.overrides)

    def check(self) -> list[Matrix]:
        """Every phase as a matrix, before the first is begun: on the base, or where that does not take it, on a cell of the phase
        before, which may set what it needs. InputError for a mistake in any."""
        matrices: list[Matrix] = []
        for place in range(1, len(self.settings.phases) + 1):
            bases = [*(run.values for matrix in matrices[-1:] for run in matrix.runs), {}]
            while True:
                try:
                    matrices.append(self.matrix(place, bases.pop()))
                    break
                except InputError:
                    if not bases:
                        raise
            for run in matrices[-1].runs:
                if (steps := run.recipe.train.steps) is not None and steps < LEAST_STEPS:
                    raise InputError(f"{matrices[-1].path}, cell {run.name}: {TOO_SHORT}")
        return matrices

    def judge(self, phase: str, outcomes: Sequence[Outcome]) -> bool:
        """Judge the cells of a phase that has ended; whether the next one is to be measured."""
        candidates = [Candidate.of(phase, outcome) for outcome in outcomes]
        self.tried += candidates
        fastest = max(candidates, key=lambda each: each.speed or 0.0)
        if fastest.speed is None:
            self.ended = f"no cell of phase {phase} is stable"
            return False
        gain = fastest.speed / self.best.speed - 1 if self.best else math.inf
        if gain < self.settings.least_gain:
            wanted = f"{self.settings.least_gain:+.1%}"
            self.ended = f"the fastest of phase {phase} gains {gain:+.1%} over what it stands on, less than {wanted}"
            return False
        self.chosen.append(fastest)
        return True

    def report(self) -> str:
        """The table of all cells, phase by phase, the fastest first, and the answer, in Markdown."""
        rows, before = [], None
        for phase in dict.fromkeys(each.phase for each in self.tried):
            own = sorted((each for each in self.tried if each.phase == phase), key=lambda each: -(each.speed or 0.0))
            for each in own:
                figures = each.record.summary if each.record else {}
                gain = f"{each.speed / before - 1:+.1%}" if each.speed and before else UNKNOWN
                row = [phase, each.run.name, or_dash(each.speed, "{:,.0f}".format), gain]
                row += [or_dash(figures.get("mfu_bf16_peak"), percent), or_dash(figures.get("memory_gib"), memory)]
                row.append(or_dash(figures.get("loss"), "{:.3f}".format))
                rows.append([*row, "**best**" if each is self.best else each.unstable])
            before = max([before or 0.0, *(each.speed or 0.0 for each in own)]) or None
        header = ["phase", "cell", "tokens/s", "gain", "MFU (BF16)", "memory", "last loss", ""]
        lines = [markdown(header, rows, names=2), f"Ended: {self.ended}."]
        if self.best is not None:
            command = ["accelerate", "launch", "--config_file", str(self.settings.accelerate), "train_accelerate.py"]
            keys = {*self.values, *parse_overrides(self.overrides)}
            own = [text for text in self.best.run.overrides if text.partition("=")[0].strip() in keys]
            lines += [
                f"Fastest and stable: {' + '.join(self.names)}, {count(self.best.speed)} tokens/s. To train with it, without the "
                f"`overrides` of {self.path}:",
                f"    {shlex.join([*command, str(self.settings.recipe), *own])}",
            ]
        return "\n\n".join(lines)


def load_phases(path: Path, overrides: Sequence[str], **changes: float) -> Search:
    """The search that the file at `path` describes, `changes` in place of its keys. InputError names the file and the key."""
    settings = parse(PhasesSettings, load_yaml(path) | changes, str(path))
    names = [phase.name for phase in settings.phases]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: `phases`: two are named {max(names, key=names.count)}; each has a name of its own")
    return Search(path, settings, tuple(overrides), Path(filled_in(settings.run_dir, {"name": settings.name})))


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
    page, phases = search.folder / "phases.md", search.settings.phases
    with StopRequest(passed_on=True) as stop:
        for place, phase in enumerate(phases, start=1):
            matrix = search.matrix(place, search.values)
            for run in matrix.runs:
                run.check_folder()
            on = f", on {' + '.join(search.names)}" if search.chosen else ""
            say(f"\nphase {place} of {len(phases)}, {phase.name}: {plural(len(matrix.runs), 'cell')}{on}")
            outcomes = run_all(matrix, matrix.runs, stop, by_speed=True)
            if stop.requested or any(each.status in ("stopped", "not started") for each in outcomes):
                print("\nstopped; the same command goes on from here", file=sys.stderr)
                return 128 + stop.requested if stop.requested else TIME_IS_UP_STATUS
            gained = search.judge(phase.name, outcomes)
            save_file(page, f"{search.report()}\n".encode())
            if not gained:
                break
    say(f"\n{search.report()}\n\nThe table is in {page}")
    return 0 if search.best else 1
