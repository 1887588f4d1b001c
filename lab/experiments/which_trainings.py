"""Training runs of `which`: short trials of all precisions, and rounds with one seed each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foundation.errors import InputError
from foundation.gpus import used_memory
from foundation.signals import StopRequest
from foundation.units import memory
from lab.experiments.matrix_file import (
    Cell,
    Matrix,
    MatrixSettings,
    Values,
    make_matrix,
)
from lab.experiments.matrix_run import Outcome, report_stop, run_all, say
from lab.experiments.protocol import Protocol
from pretrain.metrics.run_folder import MATRIX_FILE, SUMMARY_FILE
from pretrain.metrics.run_record import RunRecord
from pretrain.precision.settings import PRECISIONS, phases_of, shortest_phases
from pretrain.settings.recipe import Recipe

# Largest amount of GPU memory, in GiB, that may be in use before a run. It is above 0 because the
# driver itself uses some memory.
MOST_USED_GIB = 2.0
# Number of steps of a trial, which is a short run of a precision before the first round.
TRIAL_STEPS = 12
# Suffix in the name of a candidate whose head is quantized too.
HEAD = "+head"
# Settings of every run. They replace the settings in the recipe and on the command line.
DEFAULT_SETTINGS: Values = {
    "fp8_config.on_unsupported": "emulate",
    # Evaluate all candidates in BF16.
    "fp8_config.use_autocast_during_eval": False,
    "evaluate.samples": [],
    "evaluate.merge": 1,
    "checkpoint.at_end": False,
    "log.trackers": [],
    # The option --from replaces this setting.
    "train.begin_with": None,
}


# Settings of every trial. Twelve steps may be too few for several checkpoints.
TRIAL_SETTINGS: Values = {
    "train.steps": TRIAL_STEPS,
    "schedule.warmup": 0,
    "checkpoint.every": None,
    # Evaluate, so that the trial fails if there is no held-out data.
    "evaluate.every": TRIAL_STEPS,
    "evaluate.packs": 1,
    "evaluate.merge": 1,
}


@dataclass(frozen=True)
class WhichTrainings:
    """The recipe and settings of one answer of the command `which`.

    The command finds the fastest precision at equal loss. The methods return its trials and its
    rounds as matrices.
    """

    # The recipe, with the overrides applied. Its `evaluate.served` is the option --served.
    recipe: Recipe
    # The file of the recipe.
    recipe_file: Path
    # Settings from the command line that override the recipe, as key=value.
    overrides: tuple[str, ...]
    # The Accelerate configuration.
    accelerate: Path
    # Folder that contains the run folders of all runs.
    folder: Path
    # Number of GPUs over which trainings are distributed. If it is None, the trainings run one
    # after another on the GPUs of the Accelerate configuration.
    gpus: int | None = None
    # Settings of the baseline and each candidate, by dotted key (--candidates).
    candidates: Mapping[str, Values] = field(default_factory=dict)

    def trials(self, names: Sequence[str]) -> Matrix:
        """Return the trials, which are short runs, as a matrix.

        `names` are the names of the baseline and the candidates, the baseline first. Candidates
        that the recipe does not allow are skipped with a message. Raises InputError if the recipe
        does not allow the baseline, or a candidate of --candidates.
        """
        cells: dict[str, Values] = {}
        for name in names:
            values = self.values_of(name)
            # Twelve steps may be too few for the phases of a schedule.
            precisions = [precision for _, precision in phases_of(values["precision"])]
            trial = values | TRIAL_SETTINGS | {"precision": shortest_phases(precisions)}
            is_baseline = name == names[0]
            try:
                self._matrix("trial", {name: trial})  # only to check that the recipe allows it
            except InputError as error:
                if is_baseline or self.candidates:
                    raise
                say(f"skipped: {error}")
            else:
                cells[name] = trial
        return self._matrix("trial", cells)

    def rounds(self, protocol: Protocol, seeds: Sequence[int], candidates: Sequence[str]) -> Matrix:
        """Return the runs of the baseline and of `candidates` with each of `seeds`, as a matrix.

        The runs of the baseline are the first ones, because the candidates branch from them.
        """
        # Path of the checkpoint from which the candidates branch. It contains "{seed}", which each
        # run replaces by its seed. So the setting has the same value for all seeds, and reports can
        # group the runs of different seeds.
        base_run = f"{self.folder}/rounds/{protocol.base}-seed={{seed}}"
        branch_from = f"{base_run}/checkpoints/step-{protocol.trunk:08d}"
        schedule = self.recipe.schedule
        # Let the baseline train for some steps after the warm-up before the candidates branch.
        longest_warmup = max(1, protocol.trunk // 2)
        common: Values = {
            "train.steps": protocol.steps,
            "schedule.warmup": min(schedule.warmup, longest_warmup),
            "evaluate.every": protocol.steps,
            "checkpoint.every": None,
            "log.fp8_statistics": None,
            # The trial has already run the parity check.
            "parity": False,
        }
        cells: dict[str, Values] = {}
        for name in (protocol.base, *candidates):
            values = common | self.values_of(name)
            if protocol.begin_with:
                values["train.begin_with"] = protocol.begin_with
                # `schedule.decay` is a share of all steps, but the runs only train the steps after
                # the checkpoint. Reduce it, so that the requested value is the share of the trained
                # steps.
                decay = values.get("schedule.decay", schedule.decay)
                values["schedule.decay"] = decay * (1 - protocol.trunk / protocol.steps)
            elif name == protocol.base:
                values["checkpoint.every"] = protocol.trunk
            else:
                values["train.begin_with"] = branch_from
            # Keep all checkpoints, so that none is deleted from which candidates branch, or which
            # `evaluate.merge` averages. An interrupted run saves additional checkpoints.
            values["checkpoint.keep"] = protocol.steps
            for seed in seeds:
                cells[f"{name}-seed={seed}"] = values | {"seed": seed}
        return self._matrix("rounds", cells)

    def values_of(self, name: str) -> Values:
        """Return the settings of the candidate `name`, or of the baseline.

        Without --candidates, `name` is a precision such as "delayed" or "delayed+head". If the
        recipe sets options of `fp8_config` that this precision does not accept, they are set to
        None.
        """
        if self.candidates:
            return dict(self.candidates[name])
        precision = PRECISIONS[name.removesuffix(HEAD)]
        contradictions = self.recipe.fp8_config.options_set.keys() - precision.options.keys()
        return {
            "precision": precision.name,
            "fp8_config.scope": "linear+head" if name.endswith(HEAD) else "linear",
            **{f"fp8_config.{key}": None for key in contradictions},
        }

    def _matrix(self, name: str, cells: Mapping[str, Values]) -> Matrix:
        """Return the matrix of the trials or of rounds.

        Args:
            name: Name of the matrix, which is also the folder that contains its run folders.
            cells: Settings of each cell by its name. They replace DEFAULT_SETTINGS.
        """
        defaults = DEFAULT_SETTINGS | {"evaluate.served": self.recipe.evaluate.served}
        with_defaults = {cell: defaults | values for cell, values in cells.items()}
        settings = MatrixSettings(
            name=name,
            recipe=self.recipe_file,
            accelerate=self.accelerate,
            # The matrix replaces the text `{cell}` by the name of each cell.
            run_dir=f"{self.folder}/{name}/{{cell}}",
            gpus=self.gpus,
            cells=with_defaults,
        )
        return make_matrix(str(self.recipe_file), settings, self.overrides)


def train(matrix: Matrix, *, may_fail: bool) -> None:
    """Train the cells of a matrix that have not ended.

    If a signal arrives, stop the trainings and end the process. If the baseline fails or halts,
    start no other cell, and raise InputError when the running cells have ended. If a candidate
    fails and `may_fail` is false, do the same. A candidate that halts is a valid result.
    """
    waiting = [cell for cell in matrix.cells if not has_ended(matrix, cell)]
    if not waiting:
        return

    def is_fatal(outcome: Outcome) -> bool:
        if is_candidate(matrix, outcome.cell):
            return outcome.status == "failed" and not may_fail
        return outcome.status in ("failed", "halted")

    check_gpu_is_free(matrix)
    with StopRequest(passed_on=True) as stop:
        outcomes = run_all(matrix, waiting, stop, is_fatal)
    if stop.requested:
        raise SystemExit(report_stop(stop.requested))
    for outcome in filter(is_fatal, outcomes):
        cell = outcome.cell
        raise InputError(
            f"{cell.log}: this training has {outcome.status}, and there is no result without it; "
            "read the last lines of this log, fix the cause, and run the same command again to "
            "continue. To change settings, use another --run_dir. If the log says that the "
            "checkpoint to branch from is missing, remove all folders of this seed in "
            f"{cell.run_dir.parent}, and the command trains the seed again"
        )


def candidate_of(cell: Cell) -> str:
    """Return the name of the precision that the cell trains, which may be the baseline's.

    The name of a cell of a round ends with its seed.
    """
    return cell.name.removesuffix(f"-seed={cell.recipe.seed}")


def runs_of(cells: Iterable[Cell]) -> dict[str, RunRecord]:
    """Map the precision of each cell to its run. A cell that failed before its first step has none.

    The cells must have the same seed.
    """
    return {candidate_of(cell): run for cell in cells if (run := cell.record())}


def is_candidate(matrix: Matrix, cell: Cell) -> bool:
    """Return True if the cell trains a candidate, and False if it trains the baseline."""
    return candidate_of(cell) != candidate_of(matrix.baseline)


def has_ended(matrix: Matrix, cell: Cell) -> bool:
    """Return True if the cell need not be trained any further.

    This is the case if the cell is finished, or if it is a candidate that was halted.
    """
    run = cell.record()
    if run is None:
        return False
    return run.has_ended if is_candidate(matrix, cell) else run.is_finished


def check_gpu_is_free(matrix: Matrix) -> None:
    """Raise InputError if other processes use a GPU of the matrix, because speeds would be wrong.

    Do nothing if the matrix is trained on a CPU, or if the used memory is not known.
    """
    if matrix.on_cpu:
        return
    most_used = max(used_memory()[: matrix.settings.gpus or matrix.processes], default=0.0)
    if most_used > MOST_USED_GIB:
        raise InputError(
            f"other processes use {memory(most_used)} of a GPU, so the measured speeds would "
            "be wrong; stop these processes, or choose another GPU with CUDA_VISIBLE_DEVICES"
        )


def seconds_of(run: RunRecord) -> float:
    """Return the number of seconds that a finished run took.

    matrix.json is written whenever the run is started, and summary.json is written last when the
    run finishes. So the difference between the times of these two files is the duration since the
    run was last started. If the run was interrupted and continued, this duration is too short. In
    this case, return the total time of its steps, which is longer.
    """
    started = (run.path / MATRIX_FILE).stat().st_mtime
    finished = (run.path / SUMMARY_FILE).stat().st_mtime
    return max(finished - started, 3600 * run.summary["hours"])
