"""The matrix file: which runs a comparison consists of, all of them checked before the first one starts.

A cell is one combination of the axes' values, and an ordinary run: the base recipe with `key=value` overrides, in a folder of its
own. In a group, cells have names, and each is trained under every combination of the group's axes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foundation.errors import InputError
from foundation.reading import load_yaml
from foundation.settings import FilePath, PathText, PositiveCount, Settings, parse, value_from_text
from pretrain.checkpoint.state import changed_keys
from pretrain.compare.fairness import in_words
from pretrain.metrics.run_folder import MATRIX_FILE
from pretrain.metrics.run_record import RunRecord, read_finished, read_run
from pretrain.plan.checks import check_launch
from pretrain.precision.settings import label
from pretrain.settings.config import (
    branch_checkpoint,
    filled_in,
    flatten,
    in_a_name,
    load_recipe,
    parse_overrides,
    settings_without,
)
from pretrain.settings.launch import with_precision
from pretrain.settings.recipe import Recipe

Values = dict[str, Any]  # that a cell sets: keys of a recipe, dotted or nested
# any keys of a recipe, each with its values
Axes = dict[str, Annotated[list[Any], Field(min_length=1)]]
CELL = "cell"  # in the values of a cell of a group: what its settings are called
# keys whose values need no key beside them in a cell's name
_WITHOUT_KEY = (CELL, "precision", "weights", "fp8_config.scope")
# Settings that change neither what is trained, nor its speed, nor how it is measured.
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
    """Cells by name, each under every combination of the axes; the last axis is fastest, and of all fastest go the cells."""

    axes: Axes = Field(default_factory=dict)
    cells: Annotated[dict[str, Values], Field(min_length=1)]  # the settings of each, by its name


class LaunchSettings(Settings):
    """What is trained and how: common to a matrix and to phases."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: FilePath  # the base
    accelerate: FilePath  # how the runs are launched; `precision` in a cell overrides the file's
    # over the recipe, in every cell that does not set the key itself
    overrides: Values = Field(default_factory=dict)
    # GPUs of this machine to spread the runs over, one for each process; none: each sees all
    gpus: PositiveCount | None = None
    processes: PositiveCount | None = None  # of each run; none: as many as the accelerate file says


class CellSettings(Settings):
    """Which combinations are trained: common to a matrix and to a phase."""

    axes: Axes = Field(default_factory=dict)  # a cell for every combination
    cells: list[Values] = Field(default_factory=list)  # more cells, beside the combinations


class MatrixSettings(LaunchSettings, CellSettings):
    """What a matrix file can hold."""

    # named cells, each under every combination of its group's axes
    groups: list[MatrixGroup] = Field(default_factory=list)
    # the cell that the report compares the others to; none: the first
    baseline: Values | None = None
    run_dir: PathText = "runs/{matrix}/{cell}"
    # Runs side by side; none: one for each group of `gpus`, else one. Runs that share a device are for losses, never for speeds.
    at_once: PositiveCount | None = None


@dataclass(frozen=True)
class Cell:
    """A run of the matrix: a command line and a folder. `recipe` is what its launcher will see, its precision decided."""

    name: str
    # by which it is told from others: what it sets, or in a group its name and the axes' values
    values: Values
    overrides: tuple[str, ...]  # for the launcher's command line, `run_dir` among them
    recipe: Recipe
    run_dir: Path

    @property
    def but_for_seed(self) -> Values:
        """`values`, which cells share that differ in their seed alone."""
        return {key: value for key, value in self.values.items() if key != "seed"}

    @property
    def log(self) -> Path:
        """The launcher's output, of every time the cell was started."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def mark(self) -> Path:
        """The file in its run folder that says as which cell the run was started, and under which settings."""
        return self.run_dir / MATRIX_FILE

    @property
    def settings(self) -> Values:
        """The settings that decide which training this is, on which text, how it is measured and how fast it is."""
        return settings_without(
            self.recipe, (*_IDLE, "data.packs") if self.recipe.data.prepares else _IDLE
        )

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """The keys by which the run in its folder was started as another one, with our value and its; none where no matrix has
        started a run there."""
        if not self.mark.is_file():
            return {}
        ours, theirs = self.settings, json.loads(self.mark.read_bytes())["settings"]
        return {key: (ours.get(key), theirs.get(key)) for key in changed_keys(theirs, ours)}

    def record(self) -> RunRecord | None:
        """What it has trained so far; None where it has no step yet, and where its folder holds another training."""
        with contextlib.suppress(InputError):
            return read_run(self.run_dir) if self.mark.is_file() and not self.differences else None

    def is_finished(self) -> bool:
        """Whether its folder holds this very training, and it has reached its end."""
        return self.record() is not None and read_finished(self.run_dir) is not None

    def check_folder(self) -> None:
        """InputError where its folder holds the end of another training, which its launcher might take for finished."""
        if (differ := self.differences) and read_finished(self.run_dir) is not None:
            raise InputError(
                f"{self.run_dir}: was trained with other settings (now, and then): {in_words(differ)}; set them back, name "
                f"another `run_dir`, or remove {self.run_dir} to train it again"
            )


@dataclass(frozen=True)
class Matrix:
    """A matrix file read: its cells in order, and the one that the report compares the others to."""

    path: str
    settings: MatrixSettings
    cells: tuple[Cell, ...]
    baseline: Cell
    processes: int  # of each cell; 1 where accelerate will count the GPUs that it sees
    on_cpu: bool

    @property
    def slots(self) -> int | None:
        """Groups of GPUs, one for each cell at a time; None where cells are not spread over GPUs."""
        return self.settings.gpus // self.processes if self.settings.gpus else None

    @property
    def at_once(self) -> int:
        return self.settings.at_once or self.slots or 1

    @property
    def folder(self) -> Path:
        """The innermost folder that holds all runs; the report goes there."""
        return Path(os.path.commonpath([cell.run_dir.parent for cell in self.cells]))

    def only(self, filters: Sequence[str]) -> list[Cell]:
        """The cells that `key=value` filters pick: any of the values given for a key, and every key. InputError for none."""
        keys = {text.partition("=")[0] for text in filters}
        with_keys = [cell for cell in self.cells if keys <= cell.values.keys()]
        chosen = [
            cell
            for cell in with_keys
            if {f"{key}={_text(key, cell.values[key])}" for key in keys} <= {*filters}
        ]
        if not chosen:
            names = ", ".join(cell.name for cell in self.cells)
            raise InputError(
                f"command line: --only {' '.join(filters)} picks none of the cells {names}"
            )
        return chosen


def load_matrix(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> Matrix:
    """Read the matrix at `path`, with `overrides` of the command line over its own and `changes` in place of its keys, and work
    out its cells.

    Raises InputError naming the file and the key or cell.
    """
    return make_matrix(
        str(path), parse(MatrixSettings, load_yaml(path) | changes, str(path)), overrides
    )


def make_matrix(path: str, settings: MatrixSettings, overrides: Sequence[str] = ()) -> Matrix:
    """Work out the cells of `settings`, which messages call `path`."""
    file = load_yaml(settings.accelerate)
    # a bare NO is false in YAML
    several = str(file.get("distributed_type", "NO")).upper() not in ("NO", "FALSE")
    # None: accelerate will count the GPUs
    processes = settings.processes or (file.get("num_processes") if several else 1)
    if settings.gpus and settings.gpus < (processes or 1):
        raise InputError(
            f"{path}: `gpus: {settings.gpus}` are fewer than the {processes} processes of a run; lower `processes`"
        )
    # as `accelerate launch` passes it on
    precision = {"ACCELERATE_MIXED_PRECISION": str(file.get("mixed_precision", "no"))}
    precision |= {
        f"ACCELERATE_FP8_{str(key).upper()}": str(value)
        for key, value in (file.get("fp8_config") or {}).items()
    }

    combinations = _combinations(settings)
    given = dict(parse_overrides(overrides))
    if told_apart_by := [key for values, _ in combinations for key in values if key in given]:
        only = f"to run some cells only, use `--only {told_apart_by[0]}=VALUE`, once for each value"
        raise InputError(
            f"{path}: `{told_apart_by[0]}` tells cells apart, so it is no override; {only}"
        )
    common = [*as_overrides(flatten(settings.overrides)), *overrides]
    cells = []
    for values, own in combinations:
        name = _name_of(values)
        try:
            own_overrides = [*common, *as_overrides(own)]
            if any(text.startswith("run_dir=") for text in own_overrides):
                raise InputError(
                    "`run_dir`: every cell has a folder of its own; set the matrix's `run_dir`"
                )
            run_dir = filled_in(settings.run_dir, {"matrix": settings.name, "cell": name})
            # of each key
            last = {text.partition("=")[0]: text for text in [*own_overrides, f"run_dir={run_dir}"]}
            arguments = tuple(last.values())
            recipe = with_precision(load_recipe(settings.recipe, arguments), dict(precision))
            branch_checkpoint(recipe)
            check_launch(recipe, processes)
            if other := next((each for each in cells if each.run_dir == Path(run_dir)), None):
                raise InputError(
                    f"would share a run folder with {other.name}; take one out, or give it another name"
                )
        except InputError as error:
            raise InputError(
                "\n".join(f"{path}, cell {name}: {line}" for line in str(error).splitlines())
            ) from None
        cells.append(Cell(name, values, arguments, recipe, Path(run_dir)))
    if not cells:
        raise InputError(f"{path}: describes no cell; set `axes`, or list `cells`")
    baseline = _find_baseline(path, settings.baseline, cells)
    return Matrix(
        path, settings, tuple(cells), baseline, processes or 1, on_cpu=bool(file.get("use_cpu"))
    )


def _combinations(settings: MatrixSettings) -> list[tuple[Values, Values]]:
    """For each cell, with dotted keys, the values that tell it from others, and its settings: first the axes crossed, then the
    cells listed, then each group."""
    unnamed = [*filter(None, _crossed(settings.axes)), *map(flatten, settings.cells)]
    combinations = [(values, values) for values in unnamed]
    for group in settings.groups:
        for values, (name, cell) in itertools.product(_crossed(group.axes), group.cells.items()):
            combinations.append(({CELL: name, **values}, flatten(cell) | values))
    return combinations


def _crossed(axes: Axes) -> list[Values]:
    """Every combination of the axes' values, the last axis fastest; of no axes the one that sets nothing."""
    return [
        flatten(dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]


def _find_baseline(path: str, wanted: Values | None, cells: Sequence[Cell]) -> Cell:
    """The first of the cells that fit, which may differ in their seed alone."""
    wanted = flatten(wanted) if wanted else cells[0].values
    fitting = [cell for cell in cells if wanted.items() <= cell.values.items()]
    if not fitting or any(cell.but_for_seed != fitting[0].but_for_seed for cell in fitting):
        names = ", ".join(cell.name for cell in fitting or cells)
        raise InputError(
            f"{path}: `baseline`: {wanted} is {'several' if fitting else 'none'} of the cells {names}"
        )
    return fitting[0]


def _name_of(values: Values) -> str:
    """A folder's name that says what the run is: `delayed-bf16`, `mxfp8-fp32-linear+head`, `bf16-learning_rate=0.0001`."""
    parts = []
    for key, value in values.items():
        text = in_a_name(label(value, in_a_path=True) if key == "precision" else value)
        parts.append(text if key in _WITHOUT_KEY else f"{key.rpartition('.')[-1]}={text}")
    return "-".join(parts)


def as_overrides(values: Values) -> list[str]:
    return [f"{key}={_text(key, value)}" for key, value in values.items()]


def _text(key: str, value: Any) -> str:
    """`value` as the launcher's command line has to give it, to be read back as itself: bare where that will do, else as JSON."""
    if isinstance(value, str) and value.strip() and value_from_text(Recipe, key, value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
