"""The cells of a matrix: which runs a comparison consists of, all of them checked before the first one starts.

A matrix file crosses axes over one base recipe. Every cell is an ordinary run, the base recipe with `key=value` overrides, so
that each can also be started, resumed and looked at by hand.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from foundation.errors import InputError
from foundation.settings import PositiveCount, Settings, load_yaml, parse, value_from_text
from pretrain.precision.registry import PRECISIONS
from pretrain.settings.config import flatten, identity_of, load_recipe, resolved
from pretrain.settings.launch_environment import with_precision
from pretrain.settings.recipe import Recipe

Values = dict[str, Any]  # of a cell: keys of a recipe, dotted or nested
_BARE = ("precision", "weights", "scope")  # keys whose values say in a cell's name what they are


class MatrixSettings(Settings):
    """What a matrix file can hold."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: Path  # the base
    accelerate: Path  # where the cells run; `precision` in a cell overrides the file's
    overrides: Values = Field(default_factory=dict)  # over the recipe, in every cell
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)  # a cell for every combination
    leave_out: list[Values] = Field(default_factory=list)  # those of the combinations in which all these values meet
    cells: list[Values] = Field(default_factory=list)  # beside the combinations
    baseline: Values | None = None  # the cell that the report compares the others to; none: the first
    run_dir: str = "runs/{matrix}/{cell}"
    at_once: PositiveCount = 1  # cells that run side by side. Two that share a device are for losses, never for speeds
    gpus: PositiveCount | None = None  # GPUs of this machine to spread the cells over, one GPU a cell; none: all see what we see


@dataclass(frozen=True)
class Cell:
    """One run of a matrix. `recipe` is what its launcher will see, its precision settled."""

    name: str
    values: Values
    overrides: tuple[str, ...]  # for the launcher's command line, `run_dir` among them
    recipe: Recipe
    run_dir: Path

    @property
    def log(self) -> Path:
        """What the launcher says, of every time the cell was started."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def is_finished(self) -> bool:
        """Whether the run folder holds this very training, done.

        The launcher writes config.yaml as it starts and summary.json when it has reached the end of that: a summary that is
        older belongs to a shorter run, which has been prolonged and is not there yet.
        """
        config, summary = self.run_dir / "config.yaml", self.run_dir / "summary.json"
        if not (config.is_file() and summary.is_file()) or summary.stat().st_mtime_ns < config.stat().st_mtime_ns:
            return False
        try:
            there = parse(Recipe, load_yaml(config), str(config))
        except InputError:  # damaged, or of another version: whether the run can go on is for its launcher to say
            return False
        return identity_of(there, "") == identity_of(self.recipe, "")


@dataclass(frozen=True)
class Matrix:
    path: Path
    settings: MatrixSettings
    cells: tuple[Cell, ...]
    baseline: Cell

    @property
    def folder(self) -> Path:
        """The innermost folder that holds all cells; the report goes there."""
        return Path(os.path.commonpath([cell.run_dir.parent for cell in self.cells]))

    def only(self, filters: Sequence[str]) -> list[Cell]:
        """The cells that `key=value` filters pick: any of the values given for a key, and every key.

        Raises InputError for a key that no cell sets, and for filters that pick none.
        """
        wanted: dict[str, set[str]] = {}
        for text in filters:
            key, equals, value = text.partition("=")
            if not equals or not any(key in cell.values for cell in self.cells):
                keys = sorted({key for cell in self.cells for key in cell.values})
                raise InputError(
                    f"command line: --only {text}: a key of the cells and its value are wanted; keys: {', '.join(keys)}"
                )
            wanted.setdefault(key, set()).add(value)
        chosen = [c for c in self.cells if all(key in c.values and _text(key, c.values[key]) in wanted[key] for key in wanted)]
        if not chosen:
            raise InputError(
                f"command line: --only {' '.join(filters)} picks none of the cells {', '.join(cell.name for cell in self.cells)}"
            )
        return chosen


def load_matrix(path: str | Path, overrides: Sequence[str] = ()) -> Matrix:
    """Read the matrix at `path`, with `overrides` of the command line over its own, and work out its cells.

    Raises InputError naming the file and the key or cell: for what no recipe can have, for cells that would be one run or share a
    run folder, for a `leave_out` or `baseline` that no cell answers to.
    """
    settings = parse(MatrixSettings, load_yaml(path), str(path))
    environment = _launch_environment(settings.accelerate)
    common = [*_as_overrides(flatten(settings.overrides)), *overrides]
    _check_common(path, settings, common)
    cells = [_make_cell(path, settings, values, common, environment) for values in _combinations(path, settings)]
    if not cells:
        raise InputError(f"{path}: describes no cell; set `axes`, or list `cells`")
    _check_distinct(path, cells)
    return Matrix(Path(path), settings, tuple(cells), _find_baseline(path, settings.baseline, cells))


def _combinations(path: str | Path, settings: MatrixSettings) -> list[Values]:
    """The values of every cell, with dotted keys: the axes crossed, the last one fastest, then the cells listed."""
    crossed = [dict(zip(settings.axes, values, strict=True)) for values in itertools.product(*settings.axes.values())]
    crossed = [flatten(values) for values in crossed if values]
    for entry in map(flatten, settings.leave_out):
        kept = [values for values in crossed if not _matches(values, entry)]
        if not entry or len(kept) == len(crossed):
            raise InputError(
                f"{path}: `leave_out`: {_described(entry)} matches no combination of the axes; take it out or mend it"
            )
        crossed = kept
    return [*crossed, *map(flatten, settings.cells)]


def _make_cell(
    path: str | Path, settings: MatrixSettings, values: Values, common: Sequence[str], environment: Mapping[str, str]
) -> Cell:
    name = _name_of(values)
    if "run_dir" in values:
        raise InputError(
            f"{path}, cell {name}: `run_dir` is set for all cells at once: a key of the matrix, such as {{cell}} in it"
        )
    try:
        run_dir = settings.run_dir.format(matrix=settings.name, cell=name)
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(
            f"{path}: `run_dir`: {settings.run_dir!r} cannot be filled in ({error}); known fields: matrix, cell"
        ) from None
    overrides = (*common, *_as_overrides(values), f"run_dir={run_dir}")
    try:
        recipe = with_precision(load_recipe(settings.recipe, overrides), dict(environment))
    except InputError as error:
        lines = (
            line.removeprefix("command line, over ").removeprefix(f"{settings.recipe}: ").removeprefix("command line: ")
            for line in str(error).splitlines()
        )
        raise InputError("\n".join(f"{path}, cell {name}: {line}" for line in lines)) from None
    return Cell(name, values, overrides, recipe, Path(run_dir))


def _launch_environment(accelerate: Path) -> dict[str, str]:
    """The variables by which `accelerate launch` hands the file's precision over, as far as the file sets them."""
    file = load_yaml(accelerate)
    environment = {"ACCELERATE_MIXED_PRECISION": str(file.get("mixed_precision", "no"))}
    return environment | {f"ACCELERATE_FP8_{key.upper()}": str(value) for key, value in (file.get("fp8_config") or {}).items()}


def _check_common(path: str | Path, settings: MatrixSettings, common: Sequence[str]) -> None:
    keys = {text.partition("=")[0].strip() for text in common}
    if "run_dir" in keys:
        raise InputError(f"{path}: `overrides`: every cell has a run folder of its own; set the matrix's `run_dir`")
    if twice := [axis for axis in settings.axes if axis in keys]:
        raise InputError(
            f"{path}: `{twice[0]}` is an axis, and an override too; to run some cells only, use `--only {twice[0]}=VALUE`"
        )


def _check_distinct(path: str | Path, cells: Sequence[Cell]) -> None:
    def apart(key: Callable[[Cell], Any], mistake: str) -> None:
        for first, second in itertools.combinations(cells, 2):
            if key(first) == key(second):
                raise InputError(f"{path}: cells {first.name} and {second.name} {mistake}")

    apart(lambda cell: _computed(cell.recipe), "are the same run; take one of them out")
    apart(lambda cell: cell.run_dir, "would share a run folder; put {cell} into the matrix's `run_dir`")


def _computed(recipe: Recipe) -> Values:
    """All settings but where the run is kept, and but those of a low precision that is not used."""
    idle = {"run_dir"} if PRECISIONS[recipe.precision].quantized else {"run_dir", "fp8_config"}
    return {key: value for key, value in resolved(recipe).items() if key not in idle}


def _find_baseline(path: str | Path, wanted: Values | None, cells: Sequence[Cell]) -> Cell:
    if wanted is None:
        return cells[0]
    found = [cell for cell in cells if _matches(cell.values, flatten(wanted))]
    if len(found) != 1:
        names = ", ".join(cell.name for cell in found or cells)
        what = "fits several cells" if found else "is none of the cells"
        raise InputError(f"{path}: `baseline`: {_described(flatten(wanted))} {what}: {names}")
    return found[0]


def _matches(values: Values, entry: Values) -> bool:
    return all(key in values and values[key] == value for key, value in entry.items())


def _name_of(values: Values) -> str:
    """A folder's name that says what the cell is: `delayed-bf16`, `mxfp8-fp32-linear+head`, `bf16-learning_rate=0.0001`."""
    parts = []
    for key, value in values.items():
        last = key.rpartition(".")[-1]
        parts.append(_text(key, value) if last in _BARE else f"{last}={_text(key, value)}")
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "_", "-".join(parts)).strip("_")


def _as_overrides(values: Values) -> list[str]:
    return [f"{key}={_text(key, value)}" for key, value in values.items()]


def _text(key: str, value: Any) -> str:
    """`value` as it has to stand on the launcher's command line to be read back as itself: bare where that will do, else YAML."""
    if isinstance(value, str) and value_from_text(Recipe, key, value) == value:
        return value
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def _described(values: Values) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"
