"""Trainings of `which`: short trials of all candidates, and rounds of one seed each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InputError
from foundation.signals import StopRequest
from foundation.units import memory
from pretrain.compare.matrix_file import (
    CELL,
    Cell,
    Matrix,
    MatrixGroup,
    MatrixSettings,
    Values,
    make_matrix,
)
from pretrain.compare.matrix_run import DEVICES, report_stop, run_all, say
from pretrain.compare.verdicts import Protocol
from pretrain.metrics.run_folder import SUMMARY_FILE
from pretrain.metrics.run_record import read_run
from pretrain.precision.settings import PRECISIONS
from pretrain.settings.recipe import Recipe

# GiB of a GPU that may be in use before a training. The driver itself uses some memory.
GPU_IS_FREE = 2.0
# Steps of a candidate's first, short training.
TRIAL_STEPS = 12
# Suffix of a candidate whose head is quantized too.
HEAD = "+head"
# Settings of every training, over recipe and overrides.
COMMON: Values = {
    "fp8_config.on_unsupported": "emulate",
    # Evaluate all candidates in BF16.
    "fp8_config.use_autocast_during_eval": False,
    "evaluate.samples": [],
    "checkpoint.at_end": False,
    "log.trackers": [],
    "log.gap": None,
    # Do not let a candidate continue in BF16, which would make its precision look too good.
    "health.on_gap": "warn",
    # Set by --from.
    "train.begin_with": None,
}


@dataclass(frozen=True)
class Question:
    """The question, and its trainings, which are cells of matrices in `folder`."""

    # The recipe with the overrides.
    recipe: Recipe
    recipe_file: Path
    overrides: tuple[str, ...]
    accelerate: Path
    folder: Path

    def trial(self, names: Sequence[str]) -> Matrix:
        """Return the short trainings of the baseline and of the candidates in `names`.

        Candidates that the recipe does not allow are skipped with a message. Raises InputError if
        that is the baseline.
        """
        short: Values = {
            "train.steps": TRIAL_STEPS,
            "schedule.warmup": 0,
            "checkpoint.every": None,
            # Fails if there is no held-out data.
            "evaluate.every": TRIAL_STEPS,
            "evaluate.packs": 1,
        }
        cells: dict[str, Values] = {}
        for name in names:
            extended = cells | {name: self.values_of(name)}
            try:
                matrix = self._matrix("trial", short, extended)
            except InputError as error:
                if not cells:
                    raise
                say(f"skipped: {error}")
            else:
                cells = extended
        return matrix

    def round(self, protocol: Protocol, seed: int, candidates: Sequence[str]) -> Matrix:
        """Return the trainings of one seed of the baseline and of `candidates`."""
        base = protocol.base
        # Each cell fills in {seed}. So reports group the seeds of a cell.
        trunk = f"{self.folder}/rounds/{base}-seed={{seed}}/checkpoints/step-{protocol.trunk:08d}"
        branch: Values = {"train.begin_with": protocol.begin_with or trunk}
        of_base = branch if protocol.begin_with else {"checkpoint.every": protocol.trunk}
        cells = {base: self.values_of(base) | of_base}
        cells |= {name: self.values_of(name) | branch for name in candidates}
        schedule = self.recipe.schedule
        common: Values = {
            "train.steps": protocol.steps,
            "schedule.warmup": min(schedule.warmup, max(1, protocol.trunk // 2)),
            "evaluate.every": protocol.steps,
            "checkpoint.every": None,
            # Keep all checkpoints, also those of interrupted runs, so that the trunk's checkpoint
            # is never deleted to make room.
            "checkpoint.keep": protocol.steps,
            "log.fp8_statistics": None,
            # The trial has checked parity.
            "parity": False,
        }
        if protocol.begin_with:
            # Decay over the same share of the steps that are trained here.
            common["schedule.decay"] = schedule.decay * (1 - protocol.trunk / protocol.steps)
        return self._matrix("rounds", common, cells, seed=[seed])

    def values_of(self, name: str) -> Values:
        """Return the settings of a candidate such as "delayed" or "delayed+head".

        Options of the recipe that its precision does not accept are set to None.
        """
        precision = PRECISIONS[name.removesuffix(HEAD)]
        contradictions = self.recipe.fp8_config.contradictions(precision)
        return {
            "precision": precision.name,
            "fp8_config.scope": "linear+head" if name.endswith(HEAD) else "linear",
            **{f"fp8_config.{key}": None for key in contradictions},
        }

    def _matrix(
        self, name: str, common: Values, cells: Mapping[str, Values], **axes: list[int]
    ) -> Matrix:
        """Return a matrix with these cells. Values of a cell precede `common` and COMMON."""
        merged = {cell: COMMON | common | values for cell, values in cells.items()}
        settings = MatrixSettings(
            name=name,
            recipe=self.recipe_file,
            accelerate=self.accelerate,
            run_dir=f"{self.folder}/{name}/{{cell}}",
            groups=[MatrixGroup(axes=axes, cells=merged)],
        )
        return make_matrix(str(self.recipe_file), settings, self.overrides)


def train(matrix: Matrix, stop: StopRequest, *, may_fail: bool) -> dict[str, Cell]:
    """Train the cells that have not ended, one after another. Return the cells by name.

    Ends the process if a signal has stopped a training. Raises InputError, before the next cell
    starts, if the baseline fails or halts, or if a candidate fails and `may_fail` is false. A halt
    of a candidate is a result.
    """
    for cell in matrix.cells:
        if has_ended(matrix, cell):
            continue
        check_gpu_is_free(matrix)
        (outcome,) = run_all(matrix, [cell], stop)
        if stop.requested:
            sys.exit(report_stop(stop.requested))
        is_allowed = cell is not matrix.baseline and (may_fail or outcome.status == "halted")
        if not outcome.is_finished and not is_allowed:
            raise InputError(
                f"{cell.log}: this training has {outcome.status}, and there is no answer without "
                "it; see its last lines. The same command continues. To use other settings, set "
                "another --run_dir. If the checkpoint that it branches from is missing, remove all "
                f"folders of its seed in {cell.run_dir.parent}: the command trains that seed again"
            )
    return {cell.values[CELL]: cell for cell in matrix.cells}


def has_ended(matrix: Matrix, cell: Cell) -> bool:
    """Return True if the cell needs no more training. A halted candidate needs none."""
    if cell.is_finished():
        return True
    run = cell.record()
    return cell is not matrix.baseline and run is not None and "halted" in run.summary


def check_gpu_is_free(matrix: Matrix) -> None:
    """Raise InputError if other processes use the GPU, because speeds would be wrong.

    It asks nvidia-smi, because CUDA would allocate memory itself.
    """
    if matrix.on_cpu:
        return
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    devices = os.environ.get(DEVICES)
    if devices:
        command += ["-i", devices]
    # nvidia-smi may be missing, or not report the memory.
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = max(float(line) / 1024 for line in output.split()[: matrix.processes])
        if used > GPU_IS_FREE:
            raise InputError(
                f"other processes use {memory(used)} of the GPU, so speeds would be wrong; free it"
            )


def seconds_of(cell: Cell) -> float:
    """Return the seconds that the training of a cell took.

    They count from its mark, written at its last start, to its summary, its last file. A training
    that was started several times took at least the time of its steps.
    """
    summary_time = (cell.run_dir / SUMMARY_FILE).stat().st_mtime
    since_last_start = summary_time - cell.mark.stat().st_mtime
    return max(since_last_start, 3600 * read_run(cell.run_dir).summary["hours"])
