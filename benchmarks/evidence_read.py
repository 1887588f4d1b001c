"""Result files of `benchmarks.evidence`, read: losses by cell and seed, differences over seeds, and speeds of the same settings.

A scale is a model of one size; it may have several files, say of several machines. A cell is what was trained: a precision with
its options, under several seeds. A run is compared with the baseline of its seed in its own file.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import load_object
from pretrain.compare.fairness import describe_unfairness, recipe_of
from pretrain.compare.kept_runs import read_kept
from pretrain.compare.seed_groups import slope_of
from pretrain.compare.seeds import SeedDifference, TokenSlope, root_mean_square
from pretrain.metrics.run_record import RunRecord
from pretrain.precision.registry import PRECISIONS
from pretrain.settings.config import flatten, identity_of

BASELINE = "bf16"
REPEAT = "bf16_again"  # the baseline once more: how far runs of one seed and one setting end apart
BRANCH = "_branch"  # the end of a cell's name that begins with a checkpoint of the baseline's run of its seed
BRANCH_REPEAT = f"{BASELINE}{BRANCH}"  # the baseline gone on once more from there
# The cells whose equivalence is tested, which was said before any of them ran. All others are estimates.
_FP8 = ("delayed", "current", "block", "delayed_head", "mxfp8")
TESTED = (*(f"{cell}{BRANCH}" for cell in _FP8), *_FP8)
# What a control is held against. It differs from that in one thing.
CONTROLS = {
    REPEAT: BASELINE,
    BRANCH_REPEAT: BASELINE,
    "bf16_unfused": BASELINE,
    "fp32_weights": BASELINE,
    "bf16_weights": BASELINE,
    "delayed_unfused": "delayed",
    "delayed_emulated": "delayed",
    "delayed_kept": "delayed",
    "delayed_bf16_weights": "delayed",
    "mxfp8_down": "mxfp8",
    f"bf16_weights{BRANCH}": BASELINE,
    f"delayed_emulated{BRANCH}": f"delayed{BRANCH}",
    f"mxfp8_down{BRANCH}": f"mxfp8{BRANCH}",
}
# Cells that answer which precision to train in, and that change one thing of another such cell.
VARIANTS = {
    f"nvfp4_kept{BRANCH}": f"nvfp4{BRANCH}",
    f"nvfp4_then_bf16{BRANCH}": f"nvfp4{BRANCH}",
    f"delayed_kept{BRANCH}": f"delayed{BRANCH}",
}
# Cells of other learning rates, and what each is held against.
RATES = {
    "lr_low_bf16": BASELINE,
    "lr2_bf16": BASELINE,
    "lr_high_bf16": BASELINE,
    "lr2_delayed": "lr2_bf16",
    "lr2_nvfp4": "lr2_bf16",
}
IN_ITS_PRECISION = "fp8_config.use_autocast_during_eval"  # the setting by which a run evaluates so
LAST_STEPS = 100  # whose training loss is told
_KIND = "held_out_loss/"
_BEGIN = "train.begin_with"
_NAMES = ("name", "seed", "run_dir", "checkpoint.keep", _BEGIN)  # in which runs of a cell, and cells of a training, may differ

Measure = Callable[[Mapping[str, Any]], float | None]  # a figure of a run in the file; None where it has none


def final_loss(run: Mapping[str, Any]) -> float | None:
    """Held-out loss of the last weights in BF16, nats a token."""
    return run["endpoints"]["final"]["held_out_loss"]


def loss_before_decay(run: Mapping[str, Any]) -> float | None:
    """The same of the weights with which the rate began to fall."""
    return (run["endpoints"].get("before_decay") or {}).get("held_out_loss")


def loss_of_kind(kind: str) -> Measure:
    """Make a figure like `final_loss`, of one kind of text."""
    return lambda run: run["endpoints"]["final"].get(f"{_KIND}{kind}")


def trained_loss(run: Mapping[str, Any]) -> float | None:
    """Held-out loss of the last weights as the run itself evaluated them; see `Scale.trained_loss`."""
    return run["evaluations"][-1]["held_out_loss"] if run["evaluations"] else None


def training_loss(run: Mapping[str, Any]) -> float | None:
    """Mean loss of the last LAST_STEPS steps, in the precision that trained. Runs of one seed saw the same text in them."""
    last = run["losses"][-LAST_STEPS:]
    return None if None in last or not last else statistics.fmean(last)


def last_word_accuracy(run: Mapping[str, Any]) -> float | None:
    return run["endpoints"]["final"].get("last_word_accuracy")


def divergence(run: Mapping[str, Any]) -> float | None:
    """KL divergence from the baseline of its seed to it, nats a token."""
    return run["endpoints"]["final"].get("kl_to_baseline")


@dataclass(frozen=True)
class ResultFile:
    """What `benchmarks.evidence` has written: runs of one scale, with the baselines that they are held against."""

    path: Path
    content: Mapping[str, Any]
    records: Mapping[str, RunRecord]  # by a run's name

    @classmethod
    def read(cls, path: Path) -> ResultFile:
        """InputError where `path` is no such file, or holds no baseline."""
        content = load_object(path, "make it with `python -m benchmarks.evidence`")
        records = {record.name: record for record in read_kept(path)}
        try:
            file = cls(path, content, records)
            figures = (final_loss, loss_before_decay, trained_loss, training_loss, last_word_accuracy, divergence)
            for name, run in content["runs"].items():
                for measure in (*figures, *(map(loss_of_kind, file.kinds) if BASELINE in file.cells else ())):
                    if type(measure(run)) not in (int, float, type(None)):
                        raise TypeError(f"{measure.__name__} of {name}")
            _ = "".join(file.cells), sum([*file.between, content["parameters"], content["tokens"]])
            _ = content["scale"], content["command"], file.of_runs("commit"), file.of_runs("machine")
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(f"{path}: not as `benchmarks.evidence` makes it, at {error}; make it again") from None
        if BASELINE not in file.cells:
            raise InputError(f"{path}: holds no run of the cell {BASELINE}, which all others are compared with; train it")
        for cell in file.cells:
            file._check_begin(cell)
        return file

    def _check_begin(self, cell: str) -> None:
        """InputError where a run began with a checkpoint that is none of its baseline's: what chance has done to that would count
        as a cost."""
        for seed, name in self.cells[cell].items():
            begin, baseline = self.content["runs"][name].get("began_with"), self.cells[BASELINE].get(seed)
            if cell.endswith(BRANCH) and not begin:
                raise InputError(f"{self.path}: {name} is a branch and tells of no checkpoint that it began with; train it again")
            if begin and baseline and begin not in self.content["runs"][baseline]["checkpoints"].values():
                raise InputError(
                    f"{self.path}: {name} began with a checkpoint that is none of {baseline}'s, which was trained once more "
                    "since; train both on one machine into one file"
                )

    def of_runs(self, key: str) -> Counter[str]:
        """What the runs have for a key of theirs, "commit" or "machine", and how many have it."""
        return Counter(run[key] for run in self.content["runs"].values() if run.get(key))

    @cached_property
    def cells(self) -> dict[str, dict[int, str]]:
        """The names of a cell's runs by seed."""
        cells: dict[str, dict[int, str]] = {}
        for name, run in self.content["runs"].items():
            cells.setdefault(run["cell"], {})[run["seed"]] = name
        return {cell: dict(sorted(runs.items())) for cell, runs in cells.items()}

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of held-out text that the baseline's runs were measured on."""
        finals = [self.content["runs"][name]["endpoints"]["final"] for name in self.cells[BASELINE].values()]
        found = max(finals, key=len)  # of a run that was halted there are none
        return [key.partition("/")[2] for key in found if key.startswith(_KIND)]

    @cached_property
    def between(self) -> list[float]:
        """KL divergences between baselines of two seeds, nats a token."""
        return [pair["kl"] for pair in self.content.get("between_baseline_seeds", [])]

    def is_broken(self, name: str) -> bool:
        """Whether a run came to no end: it was halted, or its loss is no number."""
        loss = final_loss(self.content["runs"][name])
        return self.records[name].broken_off or loss is None or not math.isfinite(loss)

    def values(self, cell: str, measure: Measure) -> dict[int, float]:
        """Return the figure by seed, of the runs that came to their end and know it; empty for a cell that is not there."""
        found = {
            seed: measure(self.content["runs"][name])
            for seed, name in self.cells.get(cell, {}).items()
            if not self.is_broken(name)
        }
        return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}

    def above_baseline(self, cell: str, measure: Measure) -> dict[int, float]:
        """Return by seed a figure minus the baseline's."""
        ours, base = self.values(cell, measure), self.values(BASELINE, measure)
        return {seed: value - base[seed] for seed, value in ours.items() if seed in base}


@dataclass(frozen=True)
class Scale:
    """All files of a scale. A seed that several of them have counts once, by the mean of its runs."""

    files: tuple[ResultFile, ...]

    @classmethod
    def read(cls, *paths: Path) -> Scale:
        """InputError where one is no such file, or they do not fit together."""
        return cls.of(map(ResultFile.read, paths))

    @classmethod
    def of(cls, files: Iterable[ResultFile]) -> Scale:
        """InputError where they do not fit together."""
        scale = cls(tuple(files))
        first, *others = scale.files
        for other in others:
            if first.content.get("held_out") != other.content.get("held_out"):
                raise InputError(f"{first.path} and {other.path} were measured on other held-out text; name one of them")
        for cell in scale.cells:
            scale._check_alike(cell)
        return scale

    def _check_alike(self, cell: str) -> None:
        """InputError where runs of a cell were trained otherwise than its first one: their mean would be of two recipes."""
        first, *others = ((file.path, name, _trained(file.records[name])) for file, name in self._runs(cell))
        for path, name, settings in others:
            keys = [key for key in dict.fromkeys([*first[2], *settings]) if first[2].get(key) != settings.get(key)]
            if keys:
                told = f"`{keys[0]}`: {first[2].get(keys[0])} and {settings.get(keys[0])}"
                where = f"{first[1]} and {name}" if path == first[0] else f"{first[1]} and {path}: {name}"
                raise InputError(f"{first[0]}: {where} are of one cell and differ in {told}; train one of them again")

    def unlike(self, cell: str) -> str | None:
        """Say which settings beside those that a cell is about differ from the baseline's, with both values, so that a difference
        is no cost of a precision; None where none do."""
        about = ["seed", _BEGIN, *(["optimizer.learning_rate"] if cell in RATES else [])]
        return describe_unfairness(self.record(BASELINE), self.record(cell), about)

    def of_runs(self, key: str) -> Counter[str]:
        return sum((file.of_runs(key) for file in self.files), Counter())

    @property
    def content(self) -> Mapping[str, Any]:
        """The first file's; `scale`, `parameters` and `tokens` are those of all."""
        return self.files[0].content

    @cached_property
    def cells(self) -> list[str]:
        """The cells in the files' order. The baseline of a second file is the first one's repeated."""
        repeated = [REPEAT] if self._repeated(final_loss) else []
        return list(dict.fromkeys([cell for file in self.files for cell in file.cells] + repeated))

    @property
    def kinds(self) -> list[str]:
        return self.files[0].kinds

    @cached_property
    def between(self) -> list[float]:
        return [kl for file in self.files for kl in file.between]

    @property
    def trained_loss(self) -> Measure:
        """Held-out loss of the last weights in the precision that trained them; None where runs evaluated in BF16."""
        return trained_loss if self.content["settings"].get(IN_ITS_PRECISION) else lambda run: None

    @property
    def precisions(self) -> list[str]:
        """The cells that answer which precision to train in, in the files' order, the baseline left out."""
        return [cell for cell in self.cells if cell not in (BASELINE, *CONTROLS, *RATES)]

    def _runs(self, cell: str) -> list[tuple[ResultFile, str]]:
        """Its runs; to those that repeat the baseline belong the baselines of later files."""
        runs = [(file, name) for file in self.files for name in file.cells.get(cell, {}).values()]
        again = self.files[1:] if cell == REPEAT else ()
        return runs + [(file, name) for file in again for name in file.cells[BASELINE].values()]

    def number_of_runs(self, cell: str) -> int:
        return len(self._runs(cell))

    def record(self, cell: str) -> RunRecord:
        """The record of the cell's first seed."""
        file, name = self._runs(cell)[0]
        return file.records[name]

    def broken_off(self, cell: str) -> list[str]:
        """Runs that came to no end: halted, or their loss is no number."""
        return [name for file, name in self._runs(cell) if file.is_broken(name)]

    def every(self, cell: str, measure: Measure) -> list[float]:
        """Return the figure of each run that came to its end."""
        return [value for file in self.files for value in file.values(cell, measure).values()]

    def values(self, cell: str, measure: Measure) -> dict[int, float]:
        """Return the figure by seed, of the runs that came to their end and know it; empty for a cell that is not there."""
        return _means(file.values(cell, measure) for file in self.files)

    def mean(self, cell: str, measure: Measure) -> float | None:
        """Return the mean over seeds. None too for a cell but the baseline of which a run broke off: see `difference`."""
        if cell != BASELINE and self.broken_off(cell):
            return None
        values = self.values(cell, measure)
        return statistics.fmean(values.values()) if values else None

    def difference(self, cell: str, measure: Measure = final_loss, against: str = BASELINE) -> SeedDifference | None:
        """A cell's figure above the baseline's minus another cell's above it. None where they have no seed in common, and where a
        run of the cell broke off: the mean of the others would flatter it."""
        if self.broken_off(cell):
            return None
        ours, theirs = (self._above_baseline(each, measure) for each in (cell, against))
        level = self.values(BASELINE, measure)
        found = SeedDifference.of(ours, theirs)
        return found and replace(found, baseline=statistics.fmean(level[seed] + theirs[seed] for seed in found.by_seed))

    def _above_baseline(self, cell: str, measure: Measure) -> dict[int, float]:
        """Return by seed a figure minus the baseline's of the same file."""
        found = [file.above_baseline(cell, measure) for file in self.files]
        return _means([*found, *(self._repeated(measure) if cell == REPEAT else ())])

    def _repeated(self, measure: Measure) -> list[dict[int, float]]:
        """The baseline's figures of each later file minus those of the first one that has the seed."""
        first: dict[int, float] = {}
        found = []
        for values in (file.values(BASELINE, measure) for file in self.files):
            found.append({seed: value - first[seed] for seed, value in values.items() if seed in first})
            first = values | first
        return [each for each in found if each]

    @cached_property
    def slope(self) -> TokenSlope | None:
        return slope_of([file.records[name] for file, name in self._runs(BASELINE) if not file.is_broken(name)])

    def apart(self, repeat: str) -> list[float]:
        """Return how far baselines end apart from their twins, nats a token, a number for each pair; `repeat`: REPEAT or
        BRANCH_REPEAT. Empty where one of those runs broke off."""
        if self.broken_off(repeat):
            return []
        found = [value for file in self.files for value in file.above_baseline(repeat, final_loss).values()]
        if repeat == REPEAT:
            baselines = [file.values(BASELINE, final_loss) for file in self.files]
            for one, other in itertools.combinations(baselines, 2):
                found += [other[seed] - one[seed] for seed in one if seed in other]
        return found

    def floor(self, repeat: str) -> float | None:
        """The root mean square of `apart`; None where there is no pair."""
        apart = self.apart(repeat)
        return root_mean_square(apart) if apart else None

    def settings(self, cell: str) -> dict[str, str]:
        """Precision and weights of a cell, and what else it sets differently from the baseline, as a command line has them:
        without the options that a run writes down as its precision's defaults."""
        ours, base = (_without_defaults(flatten(self.record(each).config)) for each in (cell, BASELINE))
        keys = [key for key in dict.fromkeys([*ours, *base]) if ours.get(key) != base.get(key) and key not in _NAMES]
        return {key: str(ours.get(key)) for key in ("precision", "weights", *keys)}


def read_scales(paths: Sequence[Path]) -> list[Scale]:
    """The files, put together by scale, in the order in which the scales come. InputError for one that cannot be used."""
    by_scale: dict[str, list[ResultFile]] = {}
    for file in map(ResultFile.read, paths):
        by_scale.setdefault(file.content["scale"], []).append(file)
    return [Scale.of(files) for files in by_scale.values()]


def _means(found: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Return by seed the mean of what is `found` for it."""
    values: dict[int, list[float]] = {}
    for each in found:
        for seed, value in each.items():
            values.setdefault(seed, []).append(value)
    return {seed: statistics.fmean(each) for seed, each in sorted(values.items())}


def _trained(record: RunRecord) -> dict[str, Any]:
    identity = identity_of(recipe_of(record), record.data_fingerprint or "")
    keys = {"precision": record.precision, "backend": record.backend, "evaluate.packs": recipe_of(record).evaluate.packs}
    return {key: value for key, value in identity.items() if key != "seed"} | keys


def _without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    precision = PRECISIONS.get(str(settings["precision"]))
    defaults = {f"fp8_config.{name}": option.default for name, option in precision.options.items()} if precision else {}
    return {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}


class Speeds:
    """Speeds over BF16 of a larger model on the hardware, from a result file of `benchmarks.throughput`."""

    def __init__(self, path: Path) -> None:
        """InputError where `path` is no such file."""
        content = load_object(path, "make it with `python -m benchmarks.throughput --out FILE`")
        self.path = path
        try:
            ours = [way for way in content["ways"].values() if way["ours"] and way["status"] == "ok"]
            self._speeds = {
                frozenset(text.partition("=")[::2] for text in way["overrides"]): way["tokens_per_second"]["median"]
                for way in ours
            }
            if strange := [
                speed for speed in self._speeds.values() if type(speed) not in (int, float) or not 0 < speed < math.inf
            ]:
                raise TypeError(f"a speed of {strange[0]!r}")
            self.model: str = content["settings"]["model"]
            self.device: str = content["environment"]["gpus"][0]
            self.on_one_gpu = content["settings"]["gpus"] == "1"  # one way after another; else each on a GPU of its own
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(f"{path}: not as `benchmarks.throughput` makes it, at {error}; measure again") from None

    def over_baseline(self, scale: Scale, cell: str) -> float | None:
        """Tokens/s of a cell's settings over those of the baseline's; None where either was not measured, or was emulated."""
        ours, base = (self._speeds.get(frozenset(scale.settings(each).items())) for each in (cell, BASELINE))
        return None if scale.record(cell).emulated or not ours or not base else ours / base
