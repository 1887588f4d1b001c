"""Runs of several seeds as one comparison: grouped by all but the seed, each group held against the baseline's, seed by seed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.tables import UNKNOWN, markdown, or_dash
from foundation.units import count, plural
from pretrain.compare.appearance import as_text
from pretrain.compare.comparison import on_one_kind_of_machine, own_speed, signed, unsigned
from pretrain.compare.fairness import CONFIDENCE, changed_settings, recipe_of, same_held_out, same_packs
from pretrain.compare.seeds import EQUIVALENCE, FEWEST_EVALUATIONS, FEWEST_SEEDS, MARGIN, SeedDifference, TokenSlope
from pretrain.metrics.run_record import LAST_STEPS, LOSS_KEY, RunRecord
from pretrain.optimizer.schedule import decay_begins
from pretrain.precision.schedule import is_quantized
from pretrain.settings.config import flatten, resolved

# What two runs of one group may differ in: the seed, names, what is shown and saved, what was measured to fit, and where packs
# lie, whose fingerprint says what they hold.
_WITHIN = ("seed", "name", "run_dir", "log.", "checkpoint.", "health.", "parity", "batch.microbatch")
_WITHIN += ("evaluate.samples", "data.packs", "data.source", "data.tokenizer")
_CONSTANT_KINDS = ("wsd", "constant")  # schedules of which a part has one rate
_SEED_IN_A_NAME = re.compile(r"(?:^|[-_.,])seed[=_-]?\d+(?=$|[-_.,])")


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seed alone."""

    name: str
    runs: dict[int, RunRecord]  # by seed
    repeats: bool = False  # whether it is the baseline's training once more, seed by seed


def grouped(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """The groups in the order of their first runs. Runs of equal settings and seed are repeats, in groups by their folders'
    names, or one after the other where these are the same."""
    alike: dict[tuple[Any, ...], list[RunRecord]] = {}
    told = all(run.source_config for run in runs)  # older runs do not say what their `model.source` was
    for run in runs:
        source = {key: str(value) for key, value in run.source_config.items()} if told else {}
        alike.setdefault(tuple(sorted((_settings(run) | source).items())), []).append(run)
    parts = [part for found in alike.values() for part in _told_apart(found)]
    parts.sort(key=lambda part: runs.index(next(iter(part.values()))))
    names, baseline = _names([[*part.values()] for part in parts]), next(iter(alike.values()))
    return [
        SeedGroup(name, part, repeats=place > 0 and next(iter(part.values())) in baseline)
        for place, (name, part) in enumerate(zip(names, parts, strict=True))
    ]


def _told_apart(runs: Sequence[RunRecord]) -> list[dict[int, RunRecord]]:
    """Runs of equal settings as groups in which no seed stands twice."""
    if len({_seed(run) for run in runs}) == len(runs):
        return [{_seed(run): run for run in runs}]
    groups: dict[tuple[str, int], dict[int, RunRecord]] = {}
    for run in runs:
        turn = 0
        while _seed(run) in groups.get((_without_seed(run), turn), {}):
            turn += 1
        groups.setdefault((_without_seed(run), turn), {})[_seed(run)] = run
    return [*groups.values()]


def _names(parts: Sequence[Sequence[RunRecord]]) -> list[str]:
    """A group's name: what its folders' names share beside the seed, else the settings that set it apart; no two are the same."""
    settings = [_settings(part[0]) for part in parts]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    keys = [key for key in keys if len({each[key] for each in settings if key in each}) > 1]
    folders = [{_without_seed(run) for run in part} for part in parts]
    names: list[str] = []
    for found, each, part in zip(folders, settings, parts, strict=True):
        sharing = [there for other, there in zip(folders, settings, strict=True) if other & found]
        own = len(found) == 1 and "" not in found and all(there == each for there in sharing)
        words = ", ".join(f"{key} {each[key]}" for key in keys if key in each) or part[0].name
        name = next(iter(found)) if own else words
        names.append(_numbered(name, next(n for n in range(1, len(parts) + 1) if _numbered(name, n) not in names)))
    return names


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} again" if number == 2 else f"{name} again {number - 1}"


def _without_seed(run: RunRecord) -> str:
    return _SEED_IN_A_NAME.sub("", run.name).strip("-_.,")


def _seed(run: RunRecord) -> int:
    return recipe_of(run).seed


def _settings(run: RunRecord) -> dict[str, str]:
    """Returns what runs of one group share, as text: settings, data, and what computed the products."""
    recipe = recipe_of(run)
    idle = _WITHIN if is_quantized(recipe.precision) else (*_WITHIN, "fp8_config.")
    flat = {key: as_text(value) for key, value in flatten(resolved(recipe)).items() if not key.startswith(idle)}
    flat |= {"precision": str(run.precision), "backend": str(run.backend), "data.fingerprint": as_text(run.data_fingerprint)}
    return flat | changed_settings(run)


@dataclass(frozen=True)
class GroupResult:
    """A group beside the baseline's. None is what is not known."""

    group: SeedGroup
    losses: dict[int, float]  # at the end, by seed
    difference: SeedDifference | None  # None of the baseline, where no seed is common, and where a run broke off
    broken_off: list[int]  # seeds that came to no end of their own
    speedup: float | None

    @property
    def compared(self) -> dict[int, float]:
        """The losses that the difference is of; without one, all."""
        seeds = self.difference.by_seed if self.difference else self.losses
        return {seed: loss for seed, loss in self.losses.items() if seed in seeds}


@dataclass(frozen=True)
class SeedComparison:
    """Groups of seeds against the first one."""

    results: list[GroupResult]
    held_out: bool  # whether losses are held-out ones; else means of the last training losses
    slope: TokenSlope | None
    margin: float  # of the baseline's loss
    left_out: dict[str, list[str]]  # why runs do not count, and which

    @classmethod
    def over(
        cls, runs: Sequence[RunRecord], *, margin: float = MARGIN, speedups: Mapping[str, float] | None = None
    ) -> SeedComparison | None:
        """`runs`: comparable but for their seeds, the baseline first; None where its group has one seed alone. `speedups`: over
        the baseline by group, in place of those of the runs' own speeds; InputError for a name that no group has."""
        groups = grouped(runs)
        if len(groups[0].runs) < 2:
            return None
        names = [group.name for group in groups]
        if unknown := sorted((speedups or {}).keys() - names):
            raise InputError(f"--speedups: no group of runs is called {unknown[0]!r}; they are {', '.join(names)}")
        if (speedups or {}).get(names[0], 1.0) != 1.0:
            raise InputError(f"--speedups: {names[0]} is the baseline, whose speed the others are told in; leave it out")
        ended = [run for run in runs if not run.broken_off and not run.is_unfinished]
        held_out = all("held_out_loss" in run.summary for run in ended)
        base, results, left_out = groups[0], [], {}
        for group in groups:
            losses, broken_off = {}, []
            for seed, run in group.runs.items():
                loss = run.summary.get("held_out_loss" if held_out else LOSS_KEY)
                twin = base.runs.get(seed)
                if run.broken_off:
                    broken_off.append(seed)
                elif why := _why_left_out(run, loss, twin, held_out=held_out):
                    left_out.setdefault(why, []).append(run.name)
                else:
                    losses[seed] = loss
            # Where a run of a group broke off, a mean of the others would flatter it.
            difference = SeedDifference.of(losses, results[0].losses) if results and not broken_off else None
            speedup = (speedups or {}).get(group.name) or _speedup(group, base)
            results.append(GroupResult(group, losses, difference, broken_off, speedup if results else None))
        counted = [run for seed, run in base.runs.items() if seed in results[0].losses]
        return cls(results, held_out, slope_of(counted) if held_out else None, margin, left_out)

    @property
    def baseline(self) -> GroupResult:
        return self.results[0]

    @property
    def others(self) -> list[GroupResult]:
        return self.results[1:]

    def columns(self) -> dict[str, Callable[[GroupResult], str]]:
        """The table's columns by title, each with what it says of a group."""
        speeds = any(each.speedup for each in self.results)
        columns: dict[str, Callable[[GroupResult], str]] = {
            "runs": lambda each: each.group.name,
            "seeds": lambda each: str(len(each.compared)),
            "held-out loss" if self.held_out else f"loss, last {LAST_STEPS}": lambda each: _level(each.compared),
            f"minus {self.baseline.group.name}": self._of(lambda difference: signed(difference.mean)),
            f"± {whole_percent(CONFIDENCE)}": self._of(lambda difference: or_dash(difference.half_width(), unsigned)),
            "in %": self._of(lambda difference: share(difference.mean / difference.baseline)),
            "verdict": self._verdict,
        }
        if slope := self.slope:
            columns["tokens"] = self._of(lambda difference: share(slope.tokens(difference.mean)))
        if speeds:
            columns["speed"] = lambda each: or_dash(each.speedup, "{:.2f} ×".format)
        if slope and speeds:
            columns["at equal time"] = lambda each: (
                signed(slope.at_equal_time(each.difference.mean, each.speedup)) if each.difference and each.speedup else UNKNOWN
            )
        return columns

    def _of(self, form: Callable[[SeedDifference], str]) -> Callable[[GroupResult], str]:
        return lambda each: or_dash(each.difference, form)

    def _verdict(self, each: GroupResult) -> str:
        if each.broken_off:
            return f"broke off: {plural(len(each.broken_off), 'run')} of {len(each.group.runs)}"
        if each is self.baseline:
            return "baseline"
        return verdict_of(each.difference, self.margin) if each.difference else "no seed in common"

    def rows(self) -> list[list[str]]:
        return [[text_of(each) for text_of in self.columns().values()] for each in self.results]

    def by_seed(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of each group's difference to the baseline, a column a seed."""
        seeds = sorted({seed for each in self.results for seed in each.group.runs})
        rows = [
            [each.group.name, *(signed(each.difference.by_seed[s]) if s in each.difference.by_seed else UNKNOWN for s in seeds)]
            for each in self.results
            if each.difference
        ]
        return [f"minus {self.baseline.group.name}", *(f"seed {seed}" for seed in seeds)], rows

    def said(self) -> list[str]:
        """Markdown: the answer, the groups, what is to be said of them, and the differences seed by seed."""
        header, rows = self.by_seed()
        notes = "\n".join(f"* {note}" for note in self.notes())
        table = markdown([*self.columns()], self.rows()) if self.others else ""
        parts = [self.answer(), table, notes, markdown(header, rows) if rows else ""]
        return [part for part in parts if part]

    def notes(self) -> list[str]:
        base = self.baseline.group.name
        left_out = [f"Left out, {why}: {', '.join(names)}." for why, names in self.left_out.items()]
        if not self.others:
            return left_out
        notes = [
            f"Paired by seed: a run's loss minus that of the {base} run with its seed; means over seeds, in nats a token, and "
            f"the {whole_percent(CONFIDENCE)} interval over seeds by Student's t. Fewer than {FEWEST_SEEDS} seeds have none.",
            verdicts_note(base, self.margin),
        ]
        if self.slope:
            speeds = any(each.speedup for each in self.results)
            notes.append(f"{tokens_note(base, speeds=speeds)} {slope_note(self.slope, base)}")
        elif self.held_out:
            notes.append(
                f"No tokens are told for a difference: they follow from how fast {base}'s held-out loss falls at a constant "
                f"learning rate, and {_why_no_slope(next(iter(self.baseline.group.runs.values())))}."
            )
        for each in self.results:
            if each.group.repeats and each.difference:
                floor = each.difference
                notes.append(
                    f"{each.group.name} repeats {base}, with its settings and seeds. Single runs differ by "
                    f"{unsigned(floor.root_mean_square)} nats (root mean square of {len(floor.by_seed)}): a floor for all others."
                )
        if apart := [
            each.group.name
            for each in self.others
            if each.speedup is None and not _on_one_kind_of_machine(each.group, self.baseline.group)
        ]:
            notes.append(
                f"No speed of {', '.join(apart)}: not all of their runs and of {base}'s were on the same kind of machine."
            )
        return notes + left_out

    def answer(self) -> str:
        """The comparison in a sentence or two: what has a verdict, then what has none yet."""
        base, seeds = self.baseline.group.name, plural(len(self.baseline.losses), "seed")
        if not self.others:
            return f"{base} over {seeds}: loss {_level(self.baseline.losses)}."
        words: dict[str, list[str]] = {}  # each verdict, and what has it
        too_few: dict[str, list[str]] = {}  # how many seeds, and what has no more
        for each in self.others:
            if each.difference and (found := len(each.difference.by_seed)) < FEWEST_SEEDS:
                too_few.setdefault(plural(found, "seed"), []).append(each.group.name)
            else:
                words.setdefault(self._verdict(each), []).append(each.group.name)
        verdicts = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in words.items())
        waiting = "; ".join(f"{', '.join(names)} ({number})" for number, names in too_few.items())
        said = [f"Against {base} over {seeds}, within {100 * self.margin:g} %: {verdicts}."] if words else []
        said += [f"No verdict yet against {base}: {waiting}. A verdict needs {FEWEST_SEEDS} seeds."] if too_few else []
        return " ".join(said)


def verdict_of(difference: SeedDifference, margin: float) -> str:
    return difference.verdict(margin) or f"{plural(len(difference.by_seed), 'seed')}: no interval"


def verdicts_note(baseline: str, margin: float) -> str:
    return (
        f"Equivalent: the {whole_percent(EQUIVALENCE)} interval lies within ± {100 * margin:g} % of {baseline}'s loss (two "
        f"one-sided t tests at 5 %). Worse, better: it does not, and the {whole_percent(CONFIDENCE)} interval lies on one side "
        "of zero. Each row is judged by itself."
    )


def tokens_note(baseline: str, *, speeds: bool) -> str:
    """Returns what is meant by tokens and by equal time."""
    said = (
        f"Tokens: how many more or fewer {baseline} would have needed for that loss, by how fast its own held-out loss falls "
        "with the logarithm of the tokens before its rate decays. What is not annealed may fall at another rate than what is."
    )
    return said + (" At equal time: the difference after equal hours, by the speed and that slope." if speeds else "")


def slope_note(slope: TokenSlope, baseline: str) -> str:
    return (
        f"The slope of {baseline}: {signed(slope.nats)} nats for each factor e of tokens, from {count(slope.first)} to "
        f"{count(slope.last)} tokens."
    )


def share(value: float) -> str:
    """+0.12 %, with a minus as wide as a plus; more than a thousand-fold is no figure."""
    value += 0.0  # no difference has no sign
    return UNKNOWN if not abs(value) < 1e3 else f"{100 * value:+.{2 if abs(value) < 0.1 else 0}f} %".replace("-", "−")


def whole_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _level(losses: Mapping[int, float]) -> str:
    """Mean over seeds, and how far seeds lie apart."""
    values = [*losses.values()]
    spread = f" (sd {statistics.stdev(values):.4f})" if values[1:] else ""
    return f"{statistics.fmean(values):.4f}{spread}" if values else UNKNOWN


def _why_left_out(run: RunRecord, loss: float | None, twin: RunRecord | None, *, held_out: bool) -> str | None:
    """Returns why the end of a run does not count; None where it does. `twin`: the baseline's run of its seed."""
    if run.is_unfinished:
        return "not finished"
    if loss is None or not math.isfinite(loss):
        return "no loss at the end"
    if held_out and run.summary["steps"] not in run.held_out_curve()[0][-1:]:
        return "not evaluated at its end yet"
    if twin is not None and not (same_held_out if held_out else same_packs)(twin, run):
        return f"{'evaluated' if held_out else 'trained'} on other text than the baseline's run of the seed"
    return None


def _speedup(group: SeedGroup, base: SeedGroup) -> float | None:
    """Returns the ratio of the runs' median tokens/s, where each had its machine for itself and computed in hardware, all on one
    kind of machine; else None."""
    if not _on_one_kind_of_machine(group, base):
        return None
    ours, theirs = ([own_speed(run) for run in each.runs.values()] for each in (group, base))
    return statistics.median(ours) / statistics.median(theirs) if all(ours) and all(theirs) else None


def _on_one_kind_of_machine(*groups: SeedGroup) -> bool:
    return on_one_kind_of_machine(run for group in groups for run in group.runs.values())


def _why_no_slope(run: RunRecord) -> str:
    """Returns why there is no slope of runs that differ from `run` in their seed alone."""
    recipe = recipe_of(run)
    if source := recipe.model.weights_source:
        return f"its weights are those of {source}, trained on tokens that are not in its count"
    if recipe.schedule.kind not in _CONSTANT_KINDS:
        return f"its rate never stays constant (setting schedule.kind: {recipe.schedule.kind}; wsd and constant have such a part)"
    return (
        f"in the second half of the tokens before its rate decays there are no {FEWEST_EVALUATIONS} evaluations by which it "
        "falls (setting evaluate.every)"
    )


def slope_of(base: Sequence[RunRecord]) -> TokenSlope | None:
    """Returns the slope of finished runs that differ in their seed alone. None where it is not known, where their rate never
    stays where it is, and where they began with trained weights, whose tokens are not in the count."""
    if not base or not base[0].tokens_per_step or recipe_of(base[0]).model.weights_source:
        return None
    schedule, tokens, steps = recipe_of(base[0]).schedule, base[0].tokens_per_step, base[0].summary["steps"]
    if schedule.kind not in _CONSTANT_KINDS:
        return None
    begins, warm = decay_begins(schedule, steps), schedule.warmup
    curves = [(np.asarray(at) * tokens, losses) for at, losses in (run.held_out_curve() for run in base)]
    return TokenSlope.before((steps if begins is None else begins) * tokens, curves, warm * tokens)
