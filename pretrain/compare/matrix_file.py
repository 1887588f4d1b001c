"""The matrix file: which runs a comparison consists of, all of them checked before the first one starts.

A cell is one combination of the axes' values, and an ordinary run: the base recipe with `key=value` overrides. In a group, cells
have names, and each is trained under every combination of the group's axes.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from foundation.errors import InputError
from foundation.reading import load_yaml
from foundation.settings import FilePath, PathText, PositiveCount, Settings, parse, value_from_text
from pretrain.compare.fairness import in_words
from pretrain.metrics.run_record import read_finished
from pretrain.plan.checks import check_launch
from pretrain.precision.schedule import is_quantized, label
from pretrain.settings.config import (
    begin_of,
    filled_in,
    flatten,
    layered,
    load_recipe,
    parse_overrides,
    require_one_of_each,
    resolved,
)
from pretrain.settings.launch_environment import with_precision
from pretrain.settings.recipe import Recipe

Values = dict[str, Any]  # that a cell sets: keys of a recipe, dotted or nested
Axes = dict[str, Annotated[list[Any], Field(min_length=1)]]  # any keys of a recipe, each with its values
CELL = "cell"  # in the values of a run of a group: what its settings are called
_WITHOUT_KEY = (CELL, "precision", "weights", "scope")  # keys whose values need no key beside them in a run's name
# What a run took from its tokenizer where the recipe leaves it open.
_FROM_TOKENIZER = re.compile(r"model\.config\.(vocab_size|\w+_token_id)")
# Settings of names, and of what a run shows, keeps and checks: with others it is the same training, as fast and measured alike.
_IDLE = ("name", "run_dir", "log.", "checkpoint.", "health.", "parity", "evaluate.every", "evaluate.samples")


class MatrixGroup(Settings):
    """Cells by name, each under every combination of the axes; the last axis is fastest, and of all fastest go the cells."""

    axes: Axes = Field(default_factory=dict)
    cells: Annotated[dict[str, Values], Field(min_length=1)]  # the settings of each, by its name


class LaunchSettings(Settings):
    """What is trained and how: common to a matrix and to phases."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: FilePath  # the base
    accelerate: FilePath  # how the runs are launched; `precision` in a cell overrides the file's
    overrides: Values = Field(default_factory=dict)  # over the recipe, in every cell
    gpus: PositiveCount | None = None  # GPUs of this machine to spread the runs over, one for each process; none: each sees all
    processes: PositiveCount | None = None  # of each run; none: as many as the accelerate file says
    # Hours after which what is running saves and stops, and nothing else is started; the same command goes on. None: no limit.
    max_hours: float | None = Field(None, gt=0)


class CellSettings(Settings):
    """Which combinations are trained: common to a matrix and to a phase."""

    axes: Axes = Field(default_factory=dict)  # a cell for every combination
    leave_out: list[Values] = Field(default_factory=list)  # combinations that are not wanted: those with all of an entry's values
    cells: list[Values] = Field(default_factory=list)  # more cells, beside the combinations


class MatrixSettings(LaunchSettings, CellSettings):
    """What a matrix file can hold."""

    groups: list[MatrixGroup] = Field(default_factory=list)  # named cells, each under every combination of its group's axes
    baseline: Values | None = None  # the cell that the report compares the others to; none: the first
    run_dir: PathText = "runs/{matrix}/{cell}"
    # Runs side by side; none: one for each group of `gpus`, else one. Runs that share a device are for losses, never for speeds.
    at_once: PositiveCount | None = None


@dataclass(frozen=True)
class MatrixRun:
    """One cell of a matrix, as the run that it is. `recipe` is what its launcher will see, its precision decided."""

    name: str
    values: Values  # by which it is told from others: what its cell sets, or in a group the cell's name and the axes' values
    settings: Values  # of the recipe, that its cell sets, with dotted keys
    overrides: tuple[str, ...]  # for the launcher's command line, `run_dir` among them
    recipe: Recipe
    run_dir: Path

    @property
    def begin(self) -> Path | None:
        """The checkpoint of another run with which it begins, by its real path; None where it begins with none."""
        begin = begin_of(self.recipe)
        return begin and begin.resolve()

    @property
    def but_for_seed(self) -> Values:
        """`values`, which runs of one cell share that differ in their seed alone."""
        return {key: value for key, value in self.values.items() if key != "seed"}

    def value(self, key: str) -> str:
        """What the run has for `key`, set by its cell or not, as a command line gives it."""
        return _text(key, self.values[key] if key in self.values else flatten(resolved(self.recipe)).get(key))

    @property
    def log(self) -> Path:
        """The launcher's output, of every time the run was started."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def is_finished(self) -> bool:
        """Whether the run folder holds this very training, and it has reached its end."""
        return self.is_in_its_folder() and read_finished(self.run_dir) is not None

    def is_in_its_folder(self) -> bool:
        try:
            return not self.unlike_in_its_folder()
        except InputError:  # not begun, or damaged: its launcher decides whether it can go on
            return False

    def check_folder(self) -> None:
        """InputError where the run folder holds the end of another training, which its launcher would take for finished."""
        if read_finished(self.run_dir) is not None and (differ := self.unlike_in_its_folder()):
            raise InputError(
                f"{self.run_dir}: was trained with other settings (now, and then): {in_words(differ)}; set them back, name "
                f"another `run_dir`, or remove {self.run_dir} to train it again"
            )

    def unlike_in_its_folder(self) -> dict[str, tuple[Any, Any]]:
        """The keys by which the run in the run folder was another one, with our value and its. InputError where no readable
        config.yaml is there."""
        config = self.run_dir / "config.yaml"
        ours, theirs = (_settings_of(recipe) for recipe in (self.recipe, parse(Recipe, load_yaml(config), str(config))))
        keys = [key for key in dict.fromkeys([*ours, *theirs]) if key in ours or not _FROM_TOKENIZER.fullmatch(key)]
        measured = {key for key in keys if ours.get(key) == "auto"}  # the launcher has found a value for it
        return {key: (ours.get(key), theirs.get(key)) for key in keys if key not in measured and ours.get(key) != theirs.get(key)}


def _settings_of(recipe: Recipe) -> Values:
    """The settings that decide which training this is, on which text, how it is measured and how fast it is."""
    idle = (*_IDLE, "data.packs" if recipe.data.prepares else "data.tokenizer")
    idle = idle if is_quantized(recipe.precision) else (*idle, "fp8_config.")
    return {key: value for key, value in flatten(resolved(recipe)).items() if not key.startswith(idle)}


@dataclass(frozen=True)
class LaunchFile:
    """What the accelerate file says of how a run is started."""

    environment: Mapping[str, str]  # through which `accelerate launch` passes the file's precision on
    processes: int  # of each run, the matrix's own number before the file's
    on_cpu: bool
    knows_processes: bool  # false where accelerate will count the GPUs, and `processes` is 1


@dataclass(frozen=True)
class Matrix:
    """A matrix file read: its runs in order, and the one that the report compares the others to."""

    path: str
    settings: MatrixSettings
    runs: tuple[MatrixRun, ...]
    baseline: MatrixRun
    launch: LaunchFile

    @property
    def slots(self) -> int | None:
        """Groups of GPUs, one for each run at a time; None where runs are not spread over GPUs."""
        return self.settings.gpus // self.launch.processes if self.settings.gpus else None

    @property
    def at_once(self) -> int:
        return self.settings.at_once or self.slots or 1

    @property
    def varied(self) -> list[str]:
        """The keys in which cells differ, in the order in which the file names them."""
        keys = dict.fromkeys(key for run in self.runs for key in run.values)
        return [key for key in keys if len({run.value(key) for run in self.runs}) > 1]

    @property
    def folder(self) -> Path:
        """The innermost folder that holds all runs; the report goes there."""
        return Path(os.path.commonpath([run.run_dir.parent for run in self.runs]))

    def only(self, filters: Sequence[str]) -> list[MatrixRun]:
        """The runs that `key=value` filters pick: any of the values given for a key, and every key. InputError for none."""
        wanted: dict[str, set[str]] = {}
        for key, _, value in (text.partition("=") for text in filters):
            wanted.setdefault(key, set()).add(value)
        chosen = [r for r in self.runs if all(key in r.values and _text(key, r.values[key]) in wanted[key] for key in wanted)]
        if not chosen:
            names = ", ".join(run.name for run in self.runs)
            keys = ", ".join(dict.fromkeys(key for run in self.runs for key in run.values))
            raise InputError(f"command line: --only {' '.join(filters)} picks none of the cells {names}; their keys are {keys}")
        return chosen


def load_matrix(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> Matrix:
    """Read the matrix at `path`, with `overrides` of the command line over its own and `changes` in place of its keys, and work
    out its runs.

    Raises InputError naming the file and the key or cell.
    """
    return make_matrix(str(path), parse(MatrixSettings, load_yaml(path) | changes, str(path)), overrides)


def make_matrix(path: str, settings: MatrixSettings, overrides: Sequence[str] = ()) -> Matrix:
    """Work out the runs of `settings`, which messages call `path`."""
    launch = _launch_file(path, settings)
    parse_overrides(overrides)  # which refuses a key that is given twice
    common = [*_as_overrides(flatten(settings.overrides)), *overrides]
    keys = {text.partition("=")[0].strip() for text in common}
    if "run_dir" in keys:
        raise InputError(f"{path}: `overrides`: every cell has a run folder of its own; set the matrix's `run_dir`")
    axes = [axis for each in (settings.axes, *(group.axes for group in settings.groups)) for axis in each]
    if twice := [key for key in [*axes, CELL] if key in keys]:
        only = f"to run some cells only, use `--only {twice[0]}=VALUE`, once for each value"
        raise InputError(f"{path}: `{twice[0]}` tells cells apart, so it is no override; {only}")
    runs = [_make_run(path, settings, values, own, common, launch) for values, own in _combinations(path, settings)]
    if not runs:
        raise InputError(f"{path}: describes no cell; set `axes`, or list `cells`")
    _check_distinct(path, runs)
    return Matrix(path, settings, tuple(runs), _find_baseline(path, settings.baseline, runs), launch)


def _combinations(path: str, settings: MatrixSettings) -> list[tuple[Values, Values]]:
    """For each cell, with dotted keys, the values that tell it from others, and its settings: first the axes crossed, then the
    cells listed, then each group."""
    crossed = [values for values in _crossed(settings.axes) if values]
    for entry in map(flatten, settings.leave_out):
        left = [values for values in crossed if not _matches(values, entry)]
        if not entry or len(left) == len(crossed):
            raise InputError(f"{path}: `leave_out`: {_described(entry)} matches no combination of the axes; correct it")
        crossed = left
    cells = [(values, values) for values in [*crossed, *map(flatten, settings.cells)]]
    for group in settings.groups:
        for values, (name, cell) in itertools.product(_crossed(group.axes), group.cells.items()):
            own = flatten(cell)
            if both := own.keys() & values.keys():
                raise InputError(
                    f"{path}: `groups`: cell {name} sets `{min(both)}`, which is an axis of its group; leave one out"
                )
            cells.append(({CELL: name, **values}, own | values))
    return cells


def _crossed(axes: Axes) -> list[Values]:
    """Every combination of the axes' values, the last axis fastest; of no axes the one that sets nothing."""
    return [flatten(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _make_run(
    path: str, settings: MatrixSettings, values: Values, own: Values, common: Sequence[str], launch: LaunchFile
) -> MatrixRun:
    name = _name_of(values)
    if "run_dir" in own:
        raise InputError(f"{path}, cell {name}: `run_dir` is set for all cells at once, as a key of the matrix")
    try:
        require_one_of_each(own, "it")
        run_dir = filled_in(settings.run_dir, {"matrix": settings.name, "cell": name})
        overrides = layered([*common, *_as_overrides(own), f"run_dir={run_dir}"])
        recipe = with_precision(load_recipe(settings.recipe, overrides), dict(launch.environment))
        begin_of(recipe)
        check_launch(recipe, launch.processes if launch.knows_processes else None)
    except InputError as error:
        said = str(error).replace(f"command line, over {settings.recipe}: ", "").replace("command line: ", "")
        raise InputError("\n".join(f"{path}, cell {name}: {line}" for line in said.splitlines())) from None
    return MatrixRun(name, values, own, overrides, recipe, Path(run_dir))


def _launch_file(path: str, settings: MatrixSettings) -> LaunchFile:
    file, gpus = load_yaml(settings.accelerate), settings.gpus
    environment = {"ACCELERATE_MIXED_PRECISION": str(file.get("mixed_precision", "no"))}
    environment |= {f"ACCELERATE_FP8_{str(key).upper()}": str(value) for key, value in (file.get("fp8_config") or {}).items()}
    several = str(file.get("distributed_type", "NO")).upper() not in ("NO", "FALSE")  # a bare NO is false in YAML
    named = file.get("num_processes")
    counted = several and not isinstance(named, int) and settings.processes is None
    processes = settings.processes or (named if several and not counted else 1)
    if processes > 1 and not several:
        one = f"but {settings.accelerate} starts one; name a file for several, as ddp.yaml"
        raise InputError(f"{path}: `processes: {processes}`, {one}")
    if gpus is not None and gpus < processes:
        raise InputError(f"{path}: `gpus: {gpus}` are fewer than the {processes} processes of a run; lower `processes`")
    return LaunchFile(environment, processes, on_cpu=bool(file.get("use_cpu")), knows_processes=not counted)


def _check_distinct(path: str, runs: Sequence[MatrixRun]) -> None:
    """InputError where two cells are one run, in all that changes what is computed but its folder, or share a folder."""
    computed = []
    for run in runs:
        unused = {"run_dir"} if is_quantized(run.recipe.precision) else {"run_dir", "fp8_config"}
        computed.append({key: value for key, value in resolved(run.recipe).items() if key not in unused})
    for (first, ours), (second, theirs) in itertools.combinations(zip(runs, computed, strict=True), 2):
        both = f"{path}: cells {first.name} and {second.name}"
        if ours == theirs:
            raise InputError(f"{both} are the same run; take one of them out")
        if first.run_dir == second.run_dir:
            raise InputError(f"{both} would share a run folder; give one of them another name, or put {{cell}} into `run_dir`")


def _find_baseline(path: str, wanted: Values | None, runs: Sequence[MatrixRun]) -> MatrixRun:
    """The first of the cells that fit, which may differ in their seed alone."""
    if wanted is None:
        return runs[0]
    fitting = [run for run in runs if _matches(run.values, flatten(wanted))]
    if not fitting or any(run.but_for_seed != fitting[0].but_for_seed for run in fitting):
        names = ", ".join(run.name for run in fitting or runs)
        what = "fits several cells" if fitting else "is none of the cells"
        raise InputError(f"{path}: `baseline`: {_described(flatten(wanted))} {what}: {names}")
    return fitting[0]


def _matches(values: Values, entry: Values) -> bool:
    return all(key in values and values[key] == value for key, value in entry.items())


def _name_of(values: Values) -> str:
    """A folder's name that says what the run is: `delayed-bf16`, `mxfp8-fp32-linear+head`, `bf16-learning_rate=0.0001`. A
    key stands there whole where another ends alike: `schedule.kind=cosine`."""
    parts, short = [], {key: key.rpartition(".")[-1] for key in values}
    for key, value in values.items():
        last = short[key] if [*short.values()].count(short[key]) == 1 else key
        value = label(value, in_a_path=True) if key == "precision" and isinstance(value, list) else value
        text = value if isinstance(value, str) else _text(key, value)
        parts.append(text if last in _WITHOUT_KEY else f"{last}={text}")
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "_", "-".join(parts)).strip("_")


def _as_overrides(values: Values) -> list[str]:
    return [f"{key}={_text(key, value)}" for key, value in values.items()]


def _text(key: str, value: Any) -> str:
    """`value` as the launcher's command line has to give it, to be read back as itself: bare where that will do, else as YAML."""
    if isinstance(value, str) and value.strip() and value_from_text(Recipe, key, value) == value:
        return value
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def _described(values: Values) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"
