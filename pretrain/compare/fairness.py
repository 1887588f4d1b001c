"""Which runs may be compared, what they differ in, and by how much their losses differ.

Comparable runs are the same training in all but how it was computed, and in what the user says is compared (`vary`). Runs that
see the same text in the same step are paired: the difference of their losses has little noise. In the reference's runs its
standard deviation is 0.005, where that of the loss is 0.127.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from foundation.errors import InputError
from foundation.settings import parse
from foundation.units import plural
from pretrain.checkpoint.state import changed_keys
from pretrain.compare.student import t_quantile
from pretrain.metrics.run_record import HELD_OUT_PACKS, RunRecord, is_rollback, same_measure
from pretrain.precision.schedule import is_quantized, label
from pretrain.settings.config import SOURCE, flatten, identity_of, resolved
from pretrain.settings.recipe import Recipe

# What a comparison is about: the dtypes of products, of weights, and of what is kept beside them. Where a run computes is no part
# of its identity.
COMPARED = ("precision", "weights", "fp8_config.", "optimizer.moments", "optimizer.gradients")
LAST_SHARE = 0.2  # of the common steps: where runs have grown apart, and a difference predicts the end
FEWEST_STEPS = 64  # for a standard error: eight batches of eight
CONFIDENCE = 0.95  # of every interval
# The keys that decide which tokens a step computes the loss of, and in which order: runs that differ in one cannot be paired.
SAME_TEXT = ("data.", "batch.", "seed")
# Keys of `fp8_config` that say where a precision is computed. The audit's `backend` answers that; they change no arithmetic.
_WHERE = ("backend", "on_unsupported")


def training_of(run: RunRecord) -> dict[str, Any]:
    """Returns what must be equal for two runs to be compared: a training's identity but for what is compared, and the packs
    evaluated on.

    Raises InputError naming the run whose files do not say which data it was.
    """
    if run.data_fingerprint is None:
        raise InputError(
            f"{run.path}: its files do not say its `data_fingerprint`, so it cannot be compared with another run; train it again"
        )
    recipe = recipe_of(run)
    identity = identity_of(recipe, run.data_fingerprint) | run.source_config | {"evaluate.packs": recipe.evaluate.packs}
    # Of what is compared, a run with two values one after the other is neither the one nor the other.
    return {key: value for key, value in identity.items() if not key.startswith(COMPARED)} | changed_settings(run, identity)


def changed_settings(run: RunRecord, now: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Returns for each setting that a resume has changed (`--accept-changes`) the values that it had one after the other, as in
    "42 to step 6, then 7"; `now`: the flat settings that the run has at present, by default those of its files."""
    now = _flat(run) if now is None else now
    before: dict[str, list[str]] = {}
    for change in run.past.changed:
        for key, value in change.was.items():
            before.setdefault(key, []).append(f"{_in_a_word(key, value)} to step {change.step:,}")
    return {key: ", then ".join([*values, _in_a_word(key, now.get(key))]) for key, values in before.items()}


def _flat(run: RunRecord) -> dict[str, Any]:
    """The settings of its files, flat, with what its data are and what its `model.source` said."""
    return flatten(run.config) | run.source_config | {"data.fingerprint": run.data_fingerprint}


def changes_in_words(run: RunRecord) -> str:
    """The settings that a resume has changed, with their values; empty where there are none."""
    return "; ".join(f"`{key}` was {values}" for key, values in changed_settings(run).items())


def _in_a_word(key: str, value: Any) -> str:
    return str(label(value) if key == "precision" else "not set" if value is None else value)


def recipe_of(run: RunRecord) -> Recipe:
    return parse(Recipe, run.config, str(run.path / "config.yaml"))


def differing(first: RunRecord, second: RunRecord) -> dict[str, tuple[Any, Any]]:
    """The keys in which the two are other trainings, with both values."""
    ours, theirs = training_of(first), training_of(second)
    changed = set(changed_keys(ours, theirs))
    if "model.source" in changed:  # which says it in a word
        changed = {key for key in changed if not key.startswith(SOURCE)}
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key in changed]
    both = ((first, ours), (second, theirs))
    return {key: tuple(values.get(key, _in_a_word(key, setting(run, key))) for run, values in both) for key in keys}


def is_varied(key: str, vary: Sequence[str]) -> bool:
    """Returns whether `vary` names `key`, or a section that it is in: `optimizer` names `optimizer.learning_rate`."""
    return any(key == name or key.startswith(f"{name}.") for name in vary)


def describe_unfairness(first: RunRecord, second: RunRecord, vary: Sequence[str] = ()) -> str | None:
    """The settings that make comparing the two unfair, with both values; None without any. `vary`: what is compared."""
    return in_words({key: both for key, both in differing(first, second).items() if not is_varied(key, vary)}) or None


def in_words(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"`{key}`: {ours} and {theirs}" for key, (ours, theirs) in differences.items())


def check_comparable(runs: Sequence[RunRecord], vary: Sequence[str] = ()) -> None:
    """Raise InputError naming every key in which a run differs from the first so that comparing their losses is unfair.

    A name in `vary` that is no key or section of a recipe is a slip, and an InputError too.
    """
    if vary and runs[1:]:
        keys = ["data.fingerprint", *(key for run in runs for key in (*flatten(resolved(recipe_of(run))), *run.source_config))]
        if unknown := [name for name in vary if not any(is_varied(key, [name]) for key in keys)]:
            raise InputError(f"--vary {unknown[0]}: no recipe of these runs has such a key or section; docs/settings.md has all")
    for run in runs[1:]:
        if differing_keys := describe_unfairness(runs[0], run, vary):
            keys = [key for key in differing(runs[0], run) if not is_varied(key, vary)]
            raise InputError(
                f"{runs[0].path} and {run.path} cannot be compared, as they differ in more than precision and weights: "
                f"{differing_keys}; report each alone, or train one of them again; if this is what you compare, add "
                f"{' '.join(f'--vary {key}' for key in keys)}"
            )


def varied_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the keys by which some run is another training than the first: what a comparison of them is about, beside
    precision."""
    return list(dict.fromkeys(key for run in runs[1:] for key in differing(runs[0], run)))


def setting(run: RunRecord, key: str) -> Any:
    """The run's value of a flat key of its recipe, of `data.fingerprint`, or of what its `model.source` said; None where it has
    none. Where a resume has changed it, all that it was."""
    return changed_settings(run).get(key, _flat(run).get(key))


def why_not_paired(first: RunRecord, second: RunRecord) -> str | None:
    """Returns why step n of one cannot be held against step n of the other; None where it can."""
    other_text = {key: both for key, both in differing(first, second).items() if key.startswith(SAME_TEXT)}
    if other_text:
        return f"their steps see other text: {in_words(other_text)}"
    (ours, our_tokens), (theirs, their_tokens) = first.curve("tokens"), second.curve("tokens")
    common, here, there = np.intersect1d(ours, theirs, return_indices=True)
    if (our_tokens[here] != their_tokens[there]).any():
        return "their steps see other text: one has gone on from a checkpoint of another `batch.tokens`"
    if len(apart := common[_passed_over(first, common) != _passed_over(second, common)]):
        return f"their steps see other text from step {apart[0]:,} on: a rollback has passed over packs in one of them"
    return None if len(loss_differences(first, second)[0]) else "they have no step with a finite loss in common"


def why_no_end(first: RunRecord, second: RunRecord) -> str | None:
    """Returns why one of the two has no end to be held against the other's, so that there is no gap; None where both came to
    one."""
    return next((f"{name} {run.broke_off}" for name, run in (("it", second), ("the baseline", first)) if run.broken_off), None)


def _passed_over(run: RunRecord, steps: np.ndarray) -> np.ndarray:
    """int64 [steps]: of how many steps the packs had been passed over by then, in rollbacks."""
    told = [(record["step"], record.get("left_out", 0)) for record in run.metrics if is_rollback(record)]
    if not told and run.summary.get("rollbacks"):  # kept without its events: no step of it can be relied upon
        return np.full(len(steps), -1)
    places = np.searchsorted([step for step, _ in told], steps, side="right")
    return np.array([run.past.left_out, *(left_out for _, left_out in told)], dtype=np.int64)[places]


def same_held_out(first: RunRecord, second: RunRecord) -> bool:
    """Returns whether both were evaluated on the same packs, whatever they were trained on, by what the last evaluation of each
    says; of older runs by their environment, or their settings and what they were trained on."""
    last = [(run.evaluations or [{}])[-1] for run in (first, second)]
    told_packs = all("held_out_packs" in each for each in last)
    keys = ("data.mask_boundaries", "data.length", *(() if told_packs else ("evaluate.packs",)))
    if not all(setting(first, key) == setting(second, key) for key in keys) or not same_measure(*last, HELD_OUT_PACKS):
        return False
    of_environment = [run.environment.get("held_out_fingerprint") for run in (first, second)]
    told = [each.get("held_out_fingerprint", known) for each, known in zip(last, of_environment, strict=True)]
    if all(told):
        return str(told[0])[:16] == str(told[1])[:16]
    if not same_packs(first, second) or setting(first, "data.held_out") != setting(second, "data.held_out"):
        return False
    ours, theirs = (resolved(recipe_of(run))["data"]["validation"] for run in (first, second))  # which older runs left to be told
    return ours == theirs


def of_one_text(runs: Sequence[RunRecord]) -> bool:
    """Returns whether the held-out losses of all are of the same packs, so that they say which run is better."""
    return all(same_held_out(runs[0], run) for run in runs[1:])


def same_packs(first: RunRecord, second: RunRecord) -> bool:
    """Returns whether both were trained on the same packs."""
    return setting(first, "data.fingerprint") == setting(second, "data.fingerprint")


def loss_differences(first: RunRecord, second: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, second's loss minus first's float64) over the steps where both are finite numbers."""
    (ours, our_losses), (theirs, their_losses) = first.curve("loss"), second.curve("loss")
    steps, here, there = np.intersect1d(ours, theirs, return_indices=True)
    differences = their_losses[there] - our_losses[here]
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


def at_the_end(differences: np.ndarray) -> np.ndarray:
    """Returns those of the end: the last fifth, or the last FEWEST_STEPS where these are more, as fewer have no interval.

    This is the one definition of where runs end. Tables, pictures, the page, its answer and the gate take the same steps.
    """
    steps = max(math.ceil(len(differences) * LAST_SHARE), FEWEST_STEPS)
    return differences[-steps:]


@dataclass(frozen=True)
class PairedDifference:
    """Step-by-step differences of two losses in nats per token; a figure is NaN where there are too few steps for it."""

    mean: float
    sd: float
    standard_error: float
    steps: int

    @classmethod
    def of(cls, differences: np.ndarray) -> PairedDifference:
        steps = len(differences)
        return cls(
            mean=float(differences.mean()) if steps else math.nan,
            sd=float(differences.std(ddof=1)) if steps > 1 else math.nan,
            standard_error=batch_means_error(differences),
            steps=steps,
        )


def batch_means_error(values: np.ndarray) -> float:
    """Standard error of the mean of correlated `values`, by non-overlapping batch means; NaN below FEWEST_STEPS values.

    Neighbouring steps share their past, so sd / sqrt(n) would be too small. The n values are cut into batches of
    b = floor(sqrt(n)) consecutive ones, the first n mod b left out: SE² = Var(batch means) · b / n (Flegal and Jones 2010, Annals
    of Statistics 38(2)). A trend makes it too large, a correlation longer than a batch too small, and of a few batches it is a
    matter of luck.
    """
    n = len(values)
    if n < FEWEST_STEPS:
        return math.nan
    size = math.isqrt(n)
    batches = values[n % size :].reshape(-1, size).mean(axis=1)
    return float(math.sqrt(batches.var(ddof=1) * size / n))


Place = Literal["within", "above", "below", "unknown"]


@dataclass(frozen=True)
class Gap:
    """Says how far a run's loss ends from another's: the mean difference over the last common steps, in nats a token.

    `half_width`: half of its interval at CONFIDENCE; NaN where there are fewer than FEWEST_STEPS steps. Every picture, page and
    sentence that says where a run ends has this figure, so that none contradicts another.
    """

    mean: float
    half_width: float
    steps: int

    @classmethod
    def of(cls, differences: np.ndarray) -> Gap:
        """Returns the gap `at_the_end` of `differences`."""
        last = at_the_end(differences)
        paired, batches = PairedDifference.of(last), len(last) // max(math.isqrt(len(last)), 1)
        wide = math.isnan(paired.standard_error)
        return cls(paired.mean, math.nan if wide else t_quantile(batches - 1, CONFIDENCE) * paired.standard_error, len(last))

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.half_width)

    @property
    def ends(self) -> tuple[float, float]:
        """The two ends of its interval; both are the mean where it has none."""
        half = self.half_width if self.has_interval else 0.0
        return self.mean - half, self.mean + half

    def place(self, tolerance: float) -> Place:
        """Returns where the whole interval lies: within ± `tolerance`, above or below that; unknown where it lies across an end
        of it."""
        low, high = self.ends
        if -tolerance <= low and high <= tolerance:
            return "within"
        return "above" if low > tolerance else "below" if high < -tolerance else "unknown"


def last_steps(gaps: Iterable[Gap]) -> str:
    """Says over which steps these are the means: "last 64 steps", or "last 20 to 64 steps" where they have not as many."""
    numbers = sorted({gap.steps for gap in gaps})
    return "last " + (f"{numbers[0]:,} to " if len(numbers) > 1 else "") + plural(numbers[-1], "step")


class Variants:
    """What the runs of one precision differ in, and so has to stand beside the precision's name.

    `options`: keys of `fp8_config` in which two runs of the same precision differ. `dtypes`: of the optimizer's `moments` and
    `gradients`, those whose dtype differs between any runs. `names`: the variants' names, in the order of the runs.
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        quantized = [run for run in runs if self.is_quantized(run)]
        values: dict[tuple[str, str], set[str]] = {}
        for run in quantized:
            for key, value in _options(run).items():
                values.setdefault((key, run.precision), set()).add(str(value))
        self.options = list(dict.fromkeys(key for (key, _), found in values.items() if len(found) > 1))
        self.dtypes = [key for key in ("moments", "gradients") if len({self.dtype(run, key) for run in runs}) > 1]
        self.names = list(dict.fromkeys(self.name(run) for run in quantized))

    @staticmethod
    def is_quantized(run: RunRecord) -> bool:
        return is_quantized(run.config.get("precision"))

    def value(self, run: RunRecord, option: str) -> str | None:
        """The run's value of an option; None where its precision has no such option."""
        value = _options(run).get(option) if self.is_quantized(run) else None
        return None if value is None else str(value)

    @staticmethod
    def dtype(run: RunRecord, key: str) -> str | None:
        """The dtype that the run's recipe names for its moments or gradients; None where it names none."""
        return (run.config.get("optimizer") or {}).get(key)

    def name(self, run: RunRecord, *, keys: bool = True) -> str:
        """`scope linear+head, margin 1`, or without keys `linear+head, 1`. Empty where runs of a precision do not differ."""
        values = {option: self.value(run, option) for option in self.options}
        return ", ".join(f"{key} {value}" if keys else value for key, value in values.items() if value is not None)


def _options(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in flatten(run.config.get("fp8_config") or {}).items() if key not in _WHERE}
