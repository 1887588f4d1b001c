"""Read a matrix file: the runs of an experiment, all checked before the first one starts.

A cell is one combination of the axes' values. It is an ordinary run: the base recipe with
`key=value` overrides, in its own folder. In a group, cells have names, and each cell is trained
with every combination of the group's axes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foundation.errors import InputError
from foundation.reading import load_yaml
from foundation.settings import (
    FilePath,
    PathText,
    PositiveCount,
    S,
    Settings,
    parse,
    value_from_text,
)
from pretrain.checkpoint.state import changed_keys
from pretrain.compare.fairness import in_words
from pretrain.metrics.run_folder import MATRIX_FILE
from pretrain.metrics.run_record import RunRecord, read_finished, read_run
from pretrain.plan.checks import check_launch
from pretrain.precision.settings import label
from pretrain.settings.config import (
    as_path_part,
    branch_checkpoint,
    fill_in,
    flatten,
    load_recipe,
    parse_overrides,
    settings_without,
)
from pretrain.settings.launch import with_precision
from pretrain.settings.recipe import Recipe

# Keys of a recipe, dotted or nested, with their values.
Values = dict[str, Any]
# Keys of a recipe, each with a list of values.
Axes = dict[str, Annotated[list[Any], Field(min_length=1)]]
# Key in the values of a group's cell: the name of the cell.
CELL = "cell"
# Keys that a cell's name omits, because their values are clear without them.
_WITHOUT_KEY = (CELL, "precision", "weights", "fp8_config.scope")
# Keys, and prefixes of keys, that change neither the training, nor its speed, nor its measurement.
_IDLE = (
    "name",
    "run_dir",
    "log.",
    "checkpoint.",
    "health.",
    "parity",
    "evaluate.every",
    "evaluate.samples",
)


class MatrixGroup(Settings):
    """Named cells, each trained with every combination of the axes.

    Cells vary fastest, then the last axis.
    """

    axes: Axes = Field(default_factory=dict)
    # Settings of each cell by its name.
    cells: Annotated[dict[str, Values], Field(min_length=1)]


class LaunchSettings(Settings):
    """Settings that a matrix and a search in phases have in common."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    # The base recipe.
    recipe: FilePath
    # Accelerate configuration of the runs. `precision` in a cell overrides its precision.
    accelerate: FilePath
    # Settings that override the recipe in every cell that does not set them itself.
    overrides: Values = Field(default_factory=dict)
    # Number of GPUs of this machine to distribute the runs over, one for each process. null: each
    # run sees all GPUs.
    gpus: PositiveCount | None = None
    # Number of processes of each run. null: the number in the accelerate configuration.
    processes: PositiveCount | None = None


class CellSettings(Settings):
    """Settings that a matrix and a phase have in common: the combinations to train."""

    # Keys with their values. Every combination is a cell.
    axes: Axes = Field(default_factory=dict)
    # Further cells besides the combinations.
    cells: list[Values] = Field(default_factory=list)


class MatrixSettings(LaunchSettings, CellSettings):
    """Content of a matrix file."""

    # Named cells, each trained with every combination of its group's axes.
    groups: list[MatrixGroup] = Field(default_factory=list)
    # Values of the cell that the others are compared with. null: the first cell.
    baseline: Values | None = None
    run_dir: PathText = "runs/{matrix}/{cell}"
    # Number of runs at the same time. null: one for each group of `gpus`, else one. Speeds of runs
    # that share a device cannot be compared, only their losses.
    at_once: PositiveCount | None = None


@dataclass(frozen=True)
class Cell:
    """A run of a matrix."""

    name: str
    # Values that distinguish the cell: its settings or, in a group, its name and the axes' values.
    values: Values
    # Arguments of the launcher's command line, including `run_dir`.
    overrides: tuple[str, ...]
    # The recipe that the launcher will see, with its precision resolved.
    recipe: Recipe
    run_dir: Path

    @property
    def but_for_seed(self) -> Values:
        """Return `values` without the seed. Cells that differ only in their seed share them."""
        return {key: value for key, value in self.values.items() if key != "seed"}

    @property
    def log(self) -> Path:
        """Return the file with the launcher's output of all starts."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def mark(self) -> Path:
        """Return the file that records which cell was started in the folder, and its settings."""
        return self.run_dir / MATRIX_FILE

    @property
    def settings(self) -> Values:
        """Return the settings that decide the training, its data, its measurement and its speed."""
        # If the run prepares its packs, their place follows from other settings.
        packs = ("data.packs",) if self.recipe.data.prepares else ()
        return settings_without(self.recipe, _IDLE + packs)

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ from the settings of the run in the folder.

        Each key has the current value and the value of the run. Without a run of a matrix in the
        folder there are no differences.
        """
        if not self.mark.is_file():
            return {}
        current = self.settings
        recorded = json.loads(self.mark.read_bytes())["settings"]
        changed = changed_keys(recorded, current)
        return {key: (current.get(key), recorded.get(key)) for key in changed}

    def record(self) -> RunRecord | None:
        """Return the run's record so far.

        Return None if the run has no step yet or the folder holds another training.
        """
        with contextlib.suppress(InputError):
            if self.mark.is_file() and not self.differences:
                return read_run(self.run_dir)
        return None

    def is_finished(self) -> bool:
        """Return True if the folder holds this training and the training is finished."""
        is_current = self.mark.is_file() and not self.differences
        return is_current and read_finished(self.run_dir) is not None

    def check_folder(self) -> None:
        """Raise InputError if the folder holds another finished training.

        Its launcher might take that training for this one.
        """
        if self.differences and read_finished(self.run_dir) is not None:
            raise InputError(
                f"{self.run_dir}: was trained with other settings (now, and then): "
                f"{in_words(self.differences)}; set them back, name another `run_dir`, or remove "
                f"{self.run_dir} to train it again"
            )


@dataclass(frozen=True)
class Matrix:
    """An experiment: its cells in order, and the baseline."""

    path: str
    settings: MatrixSettings
    cells: tuple[Cell, ...]
    baseline: Cell
    # Number of processes of each cell. 1 if accelerate will count the GPUs that it sees.
    processes: int
    on_cpu: bool

    @property
    def slots(self) -> int | None:
        """Return the number of groups of GPUs, one for each running cell.

        Return None if cells are not distributed over GPUs.
        """
        return self.settings.gpus // self.processes if self.settings.gpus else None

    @property
    def at_once(self) -> int:
        """Return the maximum number of cells that run at the same time."""
        return self.settings.at_once or self.slots or 1

    @property
    def folder(self) -> Path:
        """Return the innermost folder that contains all runs. The report is written there."""
        return Path(os.path.commonpath([cell.run_dir.parent for cell in self.cells]))

    def only(self, filters: Sequence[str]) -> list[Cell]:
        """Return the cells that match the `key=value` filters.

        A cell matches if, for every key, its value is one of the values given for the key. Raises
        InputError if no cell matches.
        """
        keys = {key_of(text) for text in filters}
        chosen = [
            cell
            for cell in self.cells
            if keys == {key_of(text) for text in as_overrides(cell.values) if text in filters}
        ]
        if not chosen:
            names = ", ".join(cell.name for cell in self.cells)
            raise InputError(
                f"command line: --only {' '.join(filters)} matches none of the cells {names}"
            )
        return chosen


def load_matrix(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> Matrix:
    """Read the matrix file at `path` and return its cells.

    `overrides` of the command line precede the file's. `changes` that are not None replace keys of
    the file. Raises InputError that names the file and the key or cell.
    """
    return make_matrix(str(path), read_settings(MatrixSettings, path, changes), overrides)


def read_settings(cls: type[S], path: str | Path, changes: Mapping[str, Any]) -> S:
    """Read the file at `path`. `changes` that are not None replace keys of the file.

    Raises InputError that names the file and the key.
    """
    replaced = {key: value for key, value in changes.items() if value is not None}
    return parse(cls, load_yaml(path) | replaced, str(path))


def make_matrix(path: str, settings: MatrixSettings, overrides: Sequence[str] = ()) -> Matrix:
    """Return the cells of `settings`. Messages call them `path`."""
    accelerate = load_yaml(settings.accelerate)
    processes = _processes_of(settings, accelerate)
    if settings.gpus and settings.gpus < (processes or 1):
        raise InputError(
            f"{path}: `gpus: {settings.gpus}` is less than the {processes} processes of a run; "
            "lower `processes`"
        )
    combinations = _combinations(settings)
    overridden = dict(parse_overrides(overrides))
    for key in itertools.chain.from_iterable(values for values, _ in combinations):
        if key in overridden:
            raise InputError(
                f"{path}: `{key}` distinguishes the cells, so it cannot be overridden; to run "
                f"only some cells, use `--only {key}=VALUE`, once for each value"
            )
    environment = _precision_environment(accelerate)
    common = [*as_overrides(flatten(settings.overrides)), *overrides]
    cells: list[Cell] = []
    for values, cell_settings in combinations:
        name = _name_of(values)
        try:
            arguments = [*common, *as_overrides(cell_settings)]
            cell = _make_cell(settings, environment, name, values, arguments)
            # Raises InputError if the path cannot be filled in.
            branch_checkpoint(cell.recipe)
            check_launch(cell.recipe, processes)
            for other in cells:
                if other.run_dir == cell.run_dir:
                    raise InputError(
                        f"would share a run folder with {other.name}; remove one of them, or give "
                        "it another name"
                    )
        except InputError as error:
            lines = str(error).splitlines()
            raise InputError("\n".join(f"{path}, cell {name}: {line}" for line in lines)) from None
        cells.append(cell)
    if not cells:
        raise InputError(f"{path}: describes no cell; set `axes`, or list `cells`")
    return Matrix(
        path,
        settings,
        tuple(cells),
        baseline=_find_baseline(path, settings.baseline, cells),
        processes=processes or 1,
        on_cpu=bool(accelerate.get("use_cpu")),
    )


def _processes_of(settings: MatrixSettings, accelerate: Values) -> int | None:
    """Return the number of processes of a run, or None if accelerate will count the GPUs."""
    if settings.processes:
        return settings.processes
    # YAML reads a bare NO as false.
    is_single = str(accelerate.get("distributed_type", "NO")).upper() in ("NO", "FALSE")
    return 1 if is_single else accelerate.get("num_processes")


def _precision_environment(accelerate: Values) -> dict[str, str]:
    """Return the precision variables that `accelerate launch` sets for a configuration."""
    fp8_config = accelerate.get("fp8_config") or {}
    return {"ACCELERATE_MIXED_PRECISION": str(accelerate.get("mixed_precision", "no"))} | {
        f"ACCELERATE_FP8_{str(key).upper()}": str(value) for key, value in fp8_config.items()
    }


def _make_cell(
    settings: MatrixSettings,
    environment: Mapping[str, str],
    name: str,
    values: Values,
    overrides: Sequence[str],
) -> Cell:
    """Return a cell.

    `environment` has the precision variables of its launch. If a key occurs several times in
    `overrides`, the last value counts.
    """
    if any(text.startswith("run_dir=") for text in overrides):
        raise InputError("`run_dir`: every cell has its own folder; set the matrix's `run_dir`")
    run_dir = fill_in(settings.run_dir, {"matrix": settings.name, "cell": name})
    last = {key_of(text): text for text in [*overrides, f"run_dir={run_dir}"]}
    arguments = tuple(last.values())
    recipe = with_precision(load_recipe(settings.recipe, arguments), dict(environment))
    return Cell(name, values, arguments, recipe, Path(run_dir))


def _combinations(settings: MatrixSettings) -> list[tuple[Values, Values]]:
    """Return the values that distinguish each cell, and its settings, with dotted keys.

    The combinations of the axes come first, then the listed cells, then the groups.
    """
    combinations = [
        (values, values)
        for values in [*filter(None, _crossed(settings.axes)), *map(flatten, settings.cells)]
    ]
    for group in settings.groups:
        for values, (name, cell) in itertools.product(_crossed(group.axes), group.cells.items()):
            combinations.append(({CELL: name, **values}, flatten(cell) | values))
    return combinations


def _crossed(axes: Axes) -> list[Values]:
    """Return every combination of the axes' values. The last axis varies fastest.

    Without axes there is one empty combination.
    """
    return [
        flatten(dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]


def _find_baseline(path: str, baseline: Values | None, cells: Sequence[Cell]) -> Cell:
    """Return the first cell with the values of `baseline`, or the first cell without `baseline`.

    Raises InputError unless the cells with these values differ only in their seed.
    """
    values = flatten(baseline) if baseline else cells[0].values
    matching = [cell for cell in cells if values.items() <= cell.values.items()]
    if not matching or any(cell.but_for_seed != matching[0].but_for_seed for cell in matching):
        names = ", ".join(cell.name for cell in matching or cells)
        number = "several" if matching else "none"
        raise InputError(f"{path}: `baseline`: {values} matches {number} of the cells {names}")
    return matching[0]


def _name_of(values: Values) -> str:
    """Return a name for a cell that is also its folder's name.

    Examples: `delayed-bf16`, `mxfp8-fp32-linear+head`, `bf16-learning_rate=0.0001`.
    """
    parts = []
    for key, value in values.items():
        text = as_path_part(label(value, in_a_path=True) if key == "precision" else value)
        parts.append(text if key in _WITHOUT_KEY else f"{key.rpartition('.')[-1]}={text}")
    return "-".join(parts)


def key_of(override: str) -> str:
    """Return the key of a key=value argument."""
    return override.partition("=")[0]


def as_overrides(values: Values) -> list[str]:
    """Return values as key=value arguments."""
    return [f"{key}={_text(key, value)}" for key, value in values.items()]


def _text(key: str, value: Any) -> str:
    """Return the text on a command line that is read back as `value`.

    A string that needs no quotes is returned unchanged, and other values as JSON.
    """
    if isinstance(value, str) and value.strip() and value_from_text(Recipe, key, value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
