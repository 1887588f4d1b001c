"""Read a matrix file, which describes the runs of an experiment.

The runs are called cells. A cell is an ordinary training run of the base recipe with `key=value`
overrides, in a separate run folder. The key `cells` maps the name of each cell to its overrides.
The settings of all cells are checked before the first cell is started, without the values in
`model.config`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foundation.errors import InputError
from foundation.reading import load_object, load_yaml
from foundation.settings import (
    FilePath,
    LocalPath,
    PositiveCount,
    Settings,
    flatten,
    parse,
    value_from_text,
)
from lab.compare.fairness import in_words
from pretrain.checkpoint.state import changed_keys
from pretrain.launch.environment import with_precision
from pretrain.launch.launcher import count_gpus, find_configuration, load_configuration
from pretrain.metrics.run_folder import MATRIX_FILE
from pretrain.metrics.run_record import NoStepYet, RunRecord, read_run
from pretrain.plan.checks import check_launch
from pretrain.settings.config import (
    RECORDS,
    branch_checkpoint,
    fill_in,
    load_recipe,
    parse_overrides,
    settings_without,
    with_weights,
)
from pretrain.settings.recipe import Recipe

# Map keys of a recipe, dotted or nested, to values.
Values = dict[str, Any]
# Name of a cell, which is a part of a path.
CellName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+,-]*$")]
# Keys, and prefixes of keys, that have no effect on the training, its speed or its evaluation. If
# only these keys have changed, a finished run in the run folder is accepted as the run of the cell.
_WITHOUT_EFFECT = (*RECORDS, "evaluate.every", "evaluate.samples")


class MatrixSettings(Settings):
    """Content of a matrix file."""

    # Name of the experiment, for paths and reports.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    # The base recipe.
    recipe: FilePath
    # Accelerate configuration of all runs: a path, or a name in accelerate_configs/. If a cell sets
    # `precision`, the precision of this configuration is ignored.
    accelerate: FilePath
    # Settings that override the recipe in every cell, unless the cell sets the same key.
    overrides: Values = Field(default_factory=dict)
    # Number of GPUs of this machine over which the runs are distributed. Each process uses one GPU.
    # null: each run can use all GPUs.
    gpus: PositiveCount | None = None
    # Number of processes of each run. null: the number in the Accelerate configuration.
    processes: PositiveCount | None = None
    # Map the name of each cell to its settings, which override the recipe.
    cells: Annotated[dict[CellName, Values], Field(min_length=1)]
    # Name of the cell with which all other cells are compared. null: the first cell.
    baseline: str | None = None
    # Run folder of each cell. {matrix} is replaced by `name`, and {cell} by the name of the cell.
    run_dir: LocalPath = "runs/{matrix}/{cell}"
    # Maximum number of runs at the same time. null: one run if `gpus` is not set. If `gpus` is set,
    # null means `gpus` divided by the number of processes of a run. If runs share a device, their
    # losses are comparable, but their speeds are not.
    at_once: PositiveCount | None = None


@dataclass(frozen=True)
class Cell:
    """One training run of a matrix."""

    # Name of the cell, which is also the last part of its run folder's path by default.
    name: str
    # Settings of the cell in the matrix file, by dotted key.
    values: Values
    # Settings that override the recipe, as key=value arguments of the command line. `run_dir` is
    # one of them.
    overrides: tuple[str, ...]
    # The recipe with all overrides and the resolved precision.
    recipe: Recipe
    # The run folder.
    run_dir: Path

    @property
    def log(self) -> Path:
        """Return the path of the log file. If the cell is started again, its output is appended."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def mark(self) -> Path:
        """Return the path of the cell's mark in the run folder.

        The mark is a JSON file. It is written when the cell is started, and records the values and
        the settings of the cell.
        """
        return self.run_dir / MATRIX_FILE

    @property
    def settings(self) -> Values:
        """Return the settings that affect the training, its data, its evaluation or its speed."""
        # If the run prepares its packs, `data.packs` is omitted, because it follows from other
        # settings.
        packs = ("data.packs",) if self.recipe.data.prepares else ()
        return settings_without(self.recipe, _WITHOUT_EFFECT + packs)

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Return the settings that have changed since the run in the run folder was started.

        Map the dotted key of each changed setting to its current value and its value in the run.
        The mapping is empty if the run folder has no mark.
        """
        mark = self.read_mark()
        if not mark:
            return {}
        current = self.settings
        recorded = mark["settings"]
        for section, settings in self.recipe:
            # Runs of earlier versions may have recorded keys that have no effect any more.
            removed = settings.REMOVED if isinstance(settings, Settings) else ()
            for key in removed:
                recorded.pop(f"{section}.{key}", None)
        return {
            key: (current.get(key), recorded.get(key)) for key in changed_keys(recorded, current)
        }

    def read_mark(self) -> dict[str, Any]:
        """Return the content of the cell's mark, or an empty dict if the run folder has no mark.

        Raises InputError if the file is damaged.
        """
        if not self.mark.exists():
            return {}
        return load_object(self.mark, "either restore the complete file, or move it away")

    def record(self) -> RunRecord | None:
        """Return the record of the run in the run folder.

        The run may still be training. Return None if the run has no step yet, if the run folder has
        no mark, or if it contains a run with other settings.
        """
        with contextlib.suppress(InputError):
            if self.mark.exists() and not self.differences:
                return read_run(self.run_dir)
        return None

    def is_finished(self) -> bool:
        """Return True if the run folder contains a finished run with the cell's settings."""
        run = self.record()
        return run is not None and run.is_finished

    def check_folder(self) -> None:
        """Raise InputError if the run folder contains a run with other settings that has ended.

        Without this check, that run might be reported as the run of this cell.
        """
        differences = self.differences
        if not differences:
            return
        try:
            run = read_run(self.run_dir)
        except NoStepYet:
            return
        if run.has_ended:
            raise InputError(
                f"{self.run_dir}: this folder contains a run that has ended, and whose settings "
                "differ from the settings of the cell (value of the cell and value of the run): "
                f"{in_words(differences)}; either change the settings of the cell to the values of "
                "the run, or choose another `run_dir`, or remove the folder to train the cell again"
            )


@dataclass(frozen=True)
class Matrix:
    """An experiment, which consists of cells."""

    # Path of the matrix file, or another description of the matrix. Messages begin with it.
    path: str
    # Content of the matrix file.
    settings: MatrixSettings
    # All cells in order.
    cells: tuple[Cell, ...]
    # The cell with which all other cells are compared.
    baseline: Cell
    # Number of processes of each cell. 1 if Accelerate determines the number from the visible GPUs.
    processes: int
    # True if the Accelerate configuration sets `use_cpu`.
    on_cpu: bool

    @property
    def slots(self) -> int | None:
        """Return the number of groups into which the GPUs are divided. A cell uses one group.

        Return None if cells are not distributed over GPUs.
        """
        return self.settings.gpus // self.processes if self.settings.gpus else None

    @property
    def at_once(self) -> int:
        """Return the maximum number of cells that run at the same time."""
        return self.settings.at_once or self.slots or 1

    @property
    def folder(self) -> Path:
        """Return the innermost folder that contains all run folders, for the report."""
        return Path(os.path.commonpath([cell.run_dir.parent for cell in self.cells]))


def load_matrix(path: str | Path, overrides: Sequence[str], **changes: Any) -> Matrix:
    """Read the matrix file at `path` and return the matrix.

    Raises InputError for a mistake. The message names the file, and the key or the cell.

    Args:
        path: The matrix file.
        overrides: key=value arguments. They override the recipe and the `overrides` in the file.
        changes: Map keys of the matrix file to values that replace the values in the file. A None
            is ignored.
    """
    replaced = {key: value for key, value in changes.items() if value is not None}
    content = load_yaml(path)
    if "recipe" not in content:
        raise InputError(
            f"{path}: this file is no matrix, because it lacks `recipe`, the recipe of all cells; "
            "either write a matrix (recipes/matrices/ has examples), or train the file as a recipe "
            "with `python -m pretrain train`"
        )
    settings = parse(MatrixSettings, content | replaced, str(path))
    keys_of_cells = {key for values in settings.cells.values() for key in flatten(values)}
    for key in sorted(keys_of_cells & dict(parse_overrides(overrides)).keys()):
        raise InputError(
            f"{path}: cells set `{key}`, so `{key}` cannot be overridden on the command line; "
            "change its values in the file"
        )
    return make_matrix(str(path), settings, overrides)


def make_matrix(path: str, settings: MatrixSettings, overrides: Sequence[str] = ()) -> Matrix:
    """Return the matrix that `settings` describes, with all cells checked.

    Raises InputError for a mistake.

    Args:
        path: Path of the matrix file, or another description of the matrix. Messages begin with it.
        settings: Content of the matrix file.
        overrides: key=value arguments. They override the recipe and `settings.overrides`.
    """
    configuration = find_configuration(str(settings.accelerate))
    settings = settings.model_copy(update={"accelerate": configuration})
    accelerate = load_configuration(configuration)
    on_cpu = bool(accelerate.get("use_cpu"))
    processes = _processes_of(settings, accelerate)
    if settings.gpus and settings.gpus < (processes or 1):
        raise InputError(
            f"{path}: `gpus: {settings.gpus}` is less than the {processes} processes of a run, and "
            f"each process needs one GPU; either set `processes` to {settings.gpus} or less, or "
            f"set `gpus` to {processes} or more"
        )
    if settings.gpus and on_cpu:
        raise InputError(
            f"{path}: `gpus: {settings.gpus}` has no effect on a CPU, and {settings.accelerate} "
            "trains on a CPU; either remove `gpus` (--gpus), or choose another Accelerate file"
        )
    baseline = settings.baseline or next(iter(settings.cells))
    if baseline not in settings.cells:
        raise InputError(
            f"{path}: `baseline: {baseline}` is none of the cells {', '.join(settings.cells)}; set "
            "`baseline` to the name of a cell"
        )
    environment = _precision_environment(accelerate)
    on_gpu = not on_cpu and count_gpus() > 0
    common = [*as_overrides(flatten(settings.overrides)), *overrides]
    # Map each run folder to its cell.
    cells: dict[Path, Cell] = {}
    for name, nested in settings.cells.items():
        values = flatten(nested)
        try:
            cell = _make_cell(settings, environment, name, values, common, on_gpu=on_gpu)
            # Check that each key in braces in `train.begin_with` is a key of the recipe.
            branch_checkpoint(cell.recipe)
            check_launch(cell.recipe, processes, cell.overrides)
            if cell.run_dir in cells:
                raise InputError(
                    f"this cell has the same run folder as cell {cells[cell.run_dir].name}; add "
                    "{cell} to `run_dir`"
                )
        except InputError as error:
            lines = str(error).splitlines()
            raise InputError("\n".join(f"{path}, cell {name}: {line}" for line in lines)) from None
        cells[cell.run_dir] = cell
    by_name = {cell.name: cell for cell in cells.values()}
    return Matrix(
        path,
        settings,
        tuple(cells.values()),
        baseline=by_name[baseline],
        processes=processes or 1,
        on_cpu=on_cpu,
    )


def _processes_of(settings: MatrixSettings, accelerate: Values) -> int | None:
    """Return the number of processes of each run.

    `accelerate` is the content of the Accelerate configuration. Return None if it does not set the
    number, so that Accelerate starts one process for each visible GPU.
    """
    if settings.processes:
        return settings.processes
    # YAML reads NO without quotation marks as false.
    is_single = str(accelerate.get("distributed_type", "NO")).upper() in ("NO", "FALSE")
    return 1 if is_single else accelerate.get("num_processes")


def _precision_environment(accelerate: Values) -> dict[str, str]:
    """Return the environment variables of `accelerate launch` that set the precision.

    `accelerate` is the content of the Accelerate configuration.
    """
    environment = {"ACCELERATE_MIXED_PRECISION": str(accelerate.get("mixed_precision", "no"))}
    for key, value in (accelerate.get("fp8_config") or {}).items():
        environment[f"ACCELERATE_FP8_{str(key).upper()}"] = str(value)
    return environment


def _make_cell(
    settings: MatrixSettings,
    environment: Mapping[str, str],
    name: str,
    values: Values,
    common: Sequence[str],
    *,
    on_gpu: bool,
) -> Cell:
    """Load the recipe of the cell `name`, and return the cell.

    Raises InputError for a mistake in the settings of the cell.

    Args:
        settings: Content of the matrix file.
        environment: Environment variables for the precision, from `_precision_environment`.
        name: Name of the cell.
        values: Settings of the cell, by dotted key. They override the recipe and `common`.
        common: Settings of all cells, as key=value. They override the recipe. If a key occurs
            several times, its last value is used.
        on_gpu: True if the cell trains on a GPU.
    """
    overrides = [*common, *as_overrides(values)]
    if any(text.startswith("run_dir=") for text in overrides):
        raise InputError(
            "`run_dir`: the run folder of a cell cannot be overridden; set `run_dir` at the top of "
            "the matrix file"
        )
    run_dir = fill_in(settings.run_dir, {"matrix": settings.name, "cell": name})
    by_key = {key_of(text): text for text in [*overrides, f"run_dir={run_dir}"]}
    recipe = load_recipe(settings.recipe, [*by_key.values()])
    recipe = with_precision(recipe, dict(environment))
    recipe = with_weights(recipe, on_gpu=on_gpu)
    return Cell(name, values, tuple(by_key.values()), recipe, Path(run_dir))


def key_of(override: str) -> str:
    """Return the key of a key=value argument."""
    return override.partition("=")[0]


def as_overrides(values: Values) -> list[str]:
    """Return `values`, which maps dotted keys to values, as key=value arguments."""
    return [f"{key}={_text(key, value)}" for key, value in values.items()]


def _text(key: str, value: Any) -> str:
    """Return `value` as the text that follows `key=` on the command line.

    A string is returned unchanged if the command line reads it as the same string. Any other value
    is returned as JSON.
    """
    if isinstance(value, str) and value.strip() and value_from_text(Recipe, key, value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
