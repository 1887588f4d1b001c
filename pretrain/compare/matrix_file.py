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

from foundation.errors import InputError, shown
from foundation.settings import FilePath, PathText, PositiveCount, Settings, load_yaml, parse, value_from_text
from pretrain.compare.fairness import in_words
from pretrain.metrics.run_record import read_finished, read_run
from pretrain.plan.checks import check_launch
from pretrain.precision.schedule import in_a_path, is_quantized
from pretrain.settings.config import (
    begin_of,
    filled_in,
    flatten,
    identity_of,
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
_FROM_TOKENIZER = re.compile(r"model\.config\.(vocab_size|\w+_token_id)")
_WITHOUT_KEY = (CELL, "precision", "weights", "scope")  # keys whose values need no key beside them in a run's name
# Settings that decide how fast a training runs and not which it is.
_SPEED = ("batch.microbatch", "loss.kind", "loss.chunk", "deterministic", "fp8_config.backend", "model.attention")
_SPEED += ("model.compile", "model.fused", "model.gradient_checkpointing", "log.gradient_statistics", "log.fp8_statistics")


class MatrixGroup(Settings):
    """Cells by name, each under every combination of the axes; the last axis is fastest, and of all fastest go the cells."""

    axes: Axes = Field(default_factory=dict)
    cells: Annotated[dict[str, Values], Field(min_length=1)]  # the settings of each, by its name


class MatrixSettings(Settings):
    """What a matrix file can hold."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: FilePath  # the base
    accelerate: FilePath  # how the runs are launched; `precision` in a cell overrides the file's
    overrides: Values = Field(default_factory=dict)  # over the recipe, in every cell
    axes: Axes = Field(default_factory=dict)  # a cell for every combination
    leave_out: list[Values] = Field(default_factory=list)  # combinations that are not wanted: those with all of an entry's values
    cells: list[Values] = Field(default_factory=list)  # more cells, beside the combinations
    groups: list[MatrixGroup] = Field(default_factory=list)  # named cells, each under every combination of its group's axes
    baseline: Values | None = None  # the cell that the report compares the others to; none: the first
    run_dir: PathText = "runs/{matrix}/{cell}"
    # Runs side by side; none: one for each group of `gpus`, else one. Runs that share a device are for losses, never for speeds.
    at_once: PositiveCount | None = None
    gpus: PositiveCount | None = None  # GPUs of this machine to spread the runs over, one for each process; none: each sees all
    processes: PositiveCount | None = None  # of each run; none: as many as the accelerate file says
    # Hours after which what is running saves and stops, and nothing else is started; the same command goes on. None: no limit.
    max_hours: float | None = Field(None, gt=0)


@dataclass(frozen=True)
class MatrixRun:
    """One cell of a matrix, as the run that it is. `recipe` is what its launcher will see, its precision decided."""

    name: str
    values: Values  # by which it is told from others: what its cell sets, or in a group the cell's name and the axes' values
    settings: Values  # of the recipe, that its cell sets, with dotted keys
    overrides: tuple[str, ...]  # for the launcher's command line, `run_dir` among them
    recipe: Recipe
    run_dir: Path
    timed: bool = False  # its speed is what is looked for, so settings that decide it tell it from another run

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
        """Returns what the run has for `key`, set by its cell or not, as a command line gives it."""
        return _text(key, self.values[key] if key in self.values else flatten(resolved(self.recipe)).get(key))

    @property
    def log(self) -> Path:
        """The launcher's output, of every time the run was started."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def is_finished(self) -> bool:
        """Returns whether the run folder holds this very training, and it has reached its end."""
        return self.is_in_its_folder() and read_finished(self.run_dir) is not None

    def has_halted(self) -> bool:
        """Returns whether the run folder holds this very training, and its health has stopped it."""
        try:
            return "halted" in read_run(self.run_dir).summary and self.is_in_its_folder()
        except InputError:  # not begun, or damaged
            return False

    def is_in_its_folder(self) -> bool:
        """Returns whether what the run folder holds is of this very training."""
        try:
            return not self.unlike_in_its_folder()
        except InputError:  # not begun, or damaged: its launcher decides whether it can go on
            return False

    def check_folder(self) -> None:
        """InputError where the run folder holds the end of a training on other text, or of one that was measured otherwise: its
        launcher would take it for finished. Of what else differs, the launcher says whether it can go on."""
        if read_finished(self.run_dir) is None:
            return
        differ = self.unlike_in_its_folder()
        if any(key.startswith(("data.", "evaluate.", "fp8_config.use_autocast_during_eval", *_SPEED)) for key in differ):
            raise InputError(
                f"{self.run_dir}: was trained with other settings (now, and then): {in_words(differ)}; set them back, name "
                f"another `run_dir`, or remove {self.run_dir} to train it again"
            )

    def unlike_in_its_folder(self) -> dict[str, tuple[Any, Any]]:
        """The keys by which the run in the run folder was another training, on other text or measured otherwise, with our value
        and its. InputError where no readable config.yaml is there.

        What the recipe leaves open of a model's vocabulary, its launcher took from the tokenizer.
        """
        config = self.run_dir / "config.yaml"
        found = parse(Recipe, load_yaml(config), str(config))
        ours, theirs = (_identity(each, timed=self.timed) for each in (self.recipe, found))
        keys = [key for key in dict.fromkeys([*ours, *theirs]) if key in ours or not _FROM_TOKENIZER.fullmatch(key)]
        return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


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

    path: Path
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
        for text in filters:
            key, equals, value = text.partition("=")
            keys = sorted({key for run in self.runs for key in run.values})
            if not equals or key not in keys:
                raise InputError(f"command line: --only {text}: give KEY=VALUE; the keys of the cells are {', '.join(keys)}")
            wanted.setdefault(key, set()).add(value)
        chosen = [r for r in self.runs if all(key in r.values and _text(key, r.values[key]) in wanted[key] for key in wanted)]
        if not chosen:
            names = ", ".join(run.name for run in self.runs)
            raise InputError(f"command line: --only {' '.join(filters)} picks none of the cells {names}")
        return chosen


def load_matrix(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> Matrix:
    """Read the matrix at `path`, with `overrides` of the command line over its own and `changes` in place of its keys, and work
    out its runs.

    Raises InputError naming the file and the key or cell.
    """
    return make_matrix(path, parse(MatrixSettings, load_yaml(path) | changes, str(path)), overrides)


def make_matrix(path: str | Path, settings: MatrixSettings, overrides: Sequence[str] = (), *, timed: bool = False) -> Matrix:
    """Work out the runs of `settings`, which messages call `path`; `timed`: for the sake of their speed."""
    launch = _launch_file(path, settings)
    given = parse_overrides(overrides)
    common = [*_as_overrides(flatten(settings.overrides)), *overrides]
    _check_common(path, settings, common)
    runs = [_make_run(path, settings, *found, common, launch, timed=timed) for found in _combinations(path, settings)]
    if not runs:
        raise InputError(f"{path}: describes no cell; set `axes`, or list `cells`")
    _check_distinct(path, runs)
    if idle := [key for key in given if all(key in run.settings for run in runs)]:
        raise InputError(f"command line: `{idle[0]}` is set by every cell of {path} itself, so it changes nothing; leave it out")
    return Matrix(Path(path), settings, tuple(runs), _find_baseline(path, settings.baseline, runs), launch)


def _combinations(path: str | Path, settings: MatrixSettings) -> list[tuple[Values, Values]]:
    """Returns for each cell, with dotted keys, the values that tell it from others, and its settings: first the axes crossed,
    then the cells listed, then each group."""
    crossed = [values for values in _crossed(path, settings.axes) if values]
    for entry in map(flatten, settings.leave_out):
        kept = [values for values in crossed if not _matches(values, entry)]
        if not entry or len(kept) == len(crossed):
            raise InputError(f"{path}: `leave_out`: {_described(entry)} matches no combination of the axes; correct it")
        crossed = kept
    alone = [(values, values) for values in [*crossed, *(_dotted(path, cell) for cell in settings.cells)]]
    return [*alone, *_grouped(path, settings.groups)]


def _grouped(path: str | Path, groups: Sequence[MatrixGroup]) -> list[tuple[Values, Values]]:
    """Returns the same for the cells of the groups. Raises InputError where a cell sets an axis of its group, or is called as
    another one is."""
    found, called = [], dict[str, Values]()
    for group in groups:
        crossed, cells = _crossed(path, group.axes), {name: _dotted(path, cell) for name, cell in group.cells.items()}
        axes = {key for values in crossed for key in values}
        for name, cell in cells.items():
            if both := [key for key in cell if key in axes]:
                raise InputError(
                    f"{path}: `groups`: cell {name} sets `{both[0]}`, which is an axis of its group; leave it out of one of them"
                )
            if called.setdefault(name, cell) != cell:
                two = f"{_described(called[name])} in one group and {_described(cell)} in another"
                raise InputError(f"{path}: `groups`: cell {name} is {two}; give them two names")
        found += [({CELL: name, **values}, cell | values) for values in crossed for name, cell in cells.items()]
    return found


def _crossed(path: str | Path, axes: Axes) -> list[Values]:
    """Every combination of the axes' values, the last axis fastest; of no axes the one that sets nothing."""
    return [_dotted(path, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _dotted(path: str | Path, values: Values) -> Values:
    """Returns what a cell sets, with dotted keys. InputError where it says a key twice, by itself and in its section."""
    flat: Values = {}
    for key, value in values.items():
        inside = flatten({key: value})
        if twice := sorted(flat.keys() & inside.keys()):
            raise InputError(f"{path}: {_described(values)} sets `{twice[0]}` twice; leave one of the two out")
        flat |= inside
    return flat


def _make_run(
    path: str | Path,
    settings: MatrixSettings,
    values: Values,
    own: Values,
    common: Sequence[str],
    launch: LaunchFile,
    *,
    timed: bool,
) -> MatrixRun:
    name = _name_of(values)
    if "run_dir" in own:
        raise InputError(f"{path}, cell {name}: `run_dir` is set for all cells at once, as a key of the matrix")
    require_one_of_each(own, f"{path}, cell {name}")
    try:
        run_dir = filled_in(settings.run_dir, {"matrix": settings.name, "cell": name})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    try:
        overrides = layered([*common, *_as_overrides(own), f"run_dir={run_dir}"])
        recipe = with_precision(load_recipe(settings.recipe, overrides), dict(launch.environment))
        begin_of(recipe)
        check_launch(recipe, launch.processes if launch.knows_processes else None)
    except InputError as error:
        lines = (  # what the recipe itself says wrongly stands under its own name
            line.removeprefix(f"command line, over {settings.recipe}: ").removeprefix("command line: ")
            for line in str(error).splitlines()
        )
        raise InputError("\n".join(f"{path}, cell {name}: {line}" for line in lines)) from None
    return MatrixRun(name, values, own, overrides, recipe, Path(run_dir), timed)


def _launch_file(path: str | Path, settings: MatrixSettings) -> LaunchFile:
    accelerate, gpus = settings.accelerate, settings.gpus
    file = load_yaml(accelerate)
    environment = {"ACCELERATE_MIXED_PRECISION": str(file.get("mixed_precision", "no"))}
    fp8_config = file.get("fp8_config") or {}
    if not isinstance(fp8_config, dict):
        raise InputError(f"{accelerate}: `fp8_config` is {shown(fp8_config, repr)}; a mapping of keys to values is wanted")
    environment |= {f"ACCELERATE_FP8_{str(key).upper()}": str(value) for key, value in fp8_config.items()}
    several = str(file.get("distributed_type", "NO")).upper() not in ("NO", "FALSE")  # a bare NO is false in YAML
    named = file.get("num_processes")
    counted = several and not isinstance(named, int) and settings.processes is None
    processes = settings.processes or (named if several and not counted else 1)
    if processes > 1 and not several:
        raise InputError(f"{path}: `processes: {processes}`, but {accelerate} starts one; name a file for several, as ddp.yaml")
    if gpus is not None and gpus < processes:
        raise InputError(f"{path}: `gpus: {gpus}` are fewer than the {processes} processes of a run; lower `processes`")
    return LaunchFile(environment, processes, on_cpu=bool(file.get("use_cpu")), knows_processes=not counted)


def _check_common(path: str | Path, settings: MatrixSettings, common: Sequence[str]) -> None:
    keys = {text.partition("=")[0].strip() for text in common}
    if "run_dir" in keys:
        raise InputError(f"{path}: `overrides`: every cell has a run folder of its own; set the matrix's `run_dir`")
    axes = {axis: "is an axis" for each in (settings.axes, *(group.axes for group in settings.groups)) for axis in each}
    if settings.groups:
        axes[CELL] = "is the name of a group's cell"
    if twice := [key for key in axes if key in keys]:
        only = f"to run some cells only, use `--only {twice[0]}=VALUE`, once for each value"
        raise InputError(f"{path}: `{twice[0]}` {axes[twice[0]]}, and an override too; {only}")


def _check_distinct(path: str | Path, runs: Sequence[MatrixRun]) -> None:
    computed = [_computed(run.recipe) for run in runs]
    for (first, ours), (second, theirs) in itertools.combinations(zip(runs, computed, strict=True), 2):
        both = f"{path}: cells {first.name} and {second.name}"
        if ours == theirs:
            raise InputError(f"{both} are the same run; take one of them out")
        if first.run_dir == second.run_dir:
            remedy = "put {cell} into the matrix's `run_dir`" if first.name != second.name else "give one of them another name"
            raise InputError(f"{both} would share a run folder; {remedy}")


def _computed(recipe: Recipe) -> Values:
    """All settings that change what is computed: not where the run is kept, nor options of a low precision that is not used."""
    unused = {"run_dir"} if is_quantized(recipe.precision) else {"run_dir", "fp8_config"}
    return {key: value for key, value in resolved(recipe).items() if key not in unused}


def _identity(recipe: Recipe, *, timed: bool) -> Values:
    """The settings that decide which training this is, on which text, and which held-out loss is measured of it; where it is
    `timed`, how fast it is too."""
    flat = flatten(resolved(recipe))
    text = {key: value for key, value in flat.items() if key.startswith("data.")}
    text.pop("data.packs" if recipe.data.prepares else "data.tokenizer", None)
    measure = ["evaluate.packs", *(["fp8_config.use_autocast_during_eval"] if is_quantized(recipe.precision) else [])]
    speed = [key for key in flat if timed and key.startswith(_SPEED) and flat[key] != "auto"]
    return identity_of(recipe, "") | text | {key: flat[key] for key in (*measure, *speed)}


def _find_baseline(path: str | Path, wanted: Values | None, runs: Sequence[MatrixRun]) -> MatrixRun:
    if wanted is None:
        return runs[0]
    found = [run for run in runs if _matches(run.values, flatten(wanted))]
    if not found or any(run.but_for_seed != found[0].but_for_seed for run in found):
        names = ", ".join(run.name for run in found or runs)
        what = "fits several cells" if found else "is none of the cells"
        raise InputError(f"{path}: `baseline`: {_described(flatten(wanted))} {what}: {names}")
    return found[0]


def _matches(values: Values, entry: Values) -> bool:
    return all(key in values and values[key] == value for key, value in entry.items())


def _name_of(values: Values) -> str:
    """A folder's name that says what the run is: `delayed-bf16`, `mxfp8-fp32-linear+head`, `bf16-learning_rate=0.0001`. A
    key stands there whole where another ends alike: `loss.kind=cce-schedule.kind=cosine`."""
    parts, short = [], {key: key.rpartition(".")[-1] for key in values}
    for key, value in values.items():
        last = short[key] if [*short.values()].count(short[key]) == 1 else key
        value = in_a_path(value) if key == "precision" and isinstance(value, list) else value
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
