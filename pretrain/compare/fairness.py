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
from pretrain.compare.seeds import CONFIDENCE, t_quantile
from pretrain.metrics.run_record import HELD_OUT_PACKS, RunRecord, is_rollback, same_measure
from pretrain.precision.schedule import is_quantized, label
from pretrain.settings.config import SOURCE, flatten, identity_of, resolved
from pretrain.settings.recipe import Recipe

# What a comparison is about: the dtypes of products, of weights, and of what is kept beside them.
COMPARED = ("precision", "weights", "fp8_config.", "optimizer.moments", "optimizer.gradients")
LAST_SHARE = 0.2  # of the common steps: where runs have grown apart, and a difference predicts the end
FEWEST_STEPS = 64  # for a standard error: eight batches of eight
# The keys that decide which tokens a step computes the loss of, and in which order: runs that differ in one cannot be paired.
SAME_TEXT = ("data.", "batch.", "seed")
# Keys of `fp8_config` that say where a precision is computed. The audit's `backend` answers that; they change no arithmetic.
_WHERE = ("fp8_config.backend", "fp8_config.on_unsupported")


def recipe_of(run: RunRecord) -> Recipe:
    return parse(Recipe, run.config, str(run.path / "config.yaml"))


def setting(run: RunRecord, key: str) -> Any:
    """The run's value of a flat key of its recipe, of `data.fingerprint`, or of what its `model.source` said; None where it has
    none. Where a resume has changed it, all that it was."""
    return changed_settings(run).get(key, _flat(run).get(key))


def _flat(run: RunRecord) -> dict[str, Any]:
    return flatten(run.config) | run.source_config | {"data.fingerprint": run.data_fingerprint}


def training_of(run: RunRecord) -> dict[str, Any]:
    """What must be equal for two runs to be compared: a training's identity but for what is compared, and the packs evaluated on.

    Raises InputError naming the run whose files do not say which data it was.
    """
    if run.data_fingerprint is None:
        raise InputError(f"{run.path}: its files have no `data_fingerprint`, so it cannot be compared; train it again")
    recipe = recipe_of(run)
    identity = identity_of(recipe, run.data_fingerprint) | run.source_config | {"evaluate.packs": recipe.evaluate.packs}
    # Of what is compared, a run with two values one after the other is neither the one nor the other.
    return {key: value for key, value in identity.items() if not key.startswith(COMPARED)} | changed_settings(run)


def changed_settings(run: RunRecord) -> dict[str, str]:
    """For each setting that a resume has changed (`--accept-changes`) the values that it had one after the other, as in
    "42 to step 6, then 7"."""
    now, before = _flat(run), dict[str, list[str]]()
    for change in run.past.changed:
        for key, value in change.was.items():
            before.setdefault(key, []).append(f"{_in_a_word(key, value)} to step {change.step:,}")
    return {key: ", then ".join([*values, _in_a_word(key, now.get(key))]) for key, values in before.items()}


def changes_in_words(run: RunRecord) -> str:
    """The settings that a resume has changed, with their values; empty where there are none."""
    return "; ".join(f"`{key}` was {values}" for key, values in changed_settings(run).items())


def _in_a_word(key: str, value: Any) -> str:
    return str(label(value) if key == "precision" else "not set" if value is None else value)


def differing(first: RunRecord, second: RunRecord) -> dict[str, tuple[Any, Any]]:
    """The keys in which the two are other trainings, with both values."""
    ours, theirs = training_of(first), training_of(second)
    changed = set(changed_keys(ours, theirs))
    if "model.source" in changed:  # which says it in a word
        changed = {key for key in changed if not key.startswith(SOURCE)}
    both = ((first, ours), (second, theirs))
    return {
        key: tuple(values.get(key, _in_a_word(key, setting(run, key))) for run, values in both)
        for key in dict.fromkeys([*ours, *theirs])
        if key in changed
    }


def in_words(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"`{key}`: {ours} and {theirs}" for key, (ours, theirs) in differences.items())


def unfair_differences(first: RunRecord, second: RunRecord, vary: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """The keys that make comparing the two unfair, with both values. `vary`: what is compared, keys or whole sections."""
    return {key: both for key, both in differing(first, second).items() if not is_varied(key, vary)}


def is_varied(key: str, vary: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in vary)


def check_comparable(runs: Sequence[RunRecord], vary: Sequence[str] = ()) -> None:
    """InputError naming every key in which a run differs from the first so that comparing their losses is unfair, and where
    `vary` has a name that is no key or section of a recipe."""
    keys = {"data.fingerprint", *flatten(resolved(recipe_of(runs[0]))), *(key for run in runs for key in run.source_config)}
    if unknown := [name for name in vary if not any(is_varied(key, [name]) for key in keys)]:
        raise InputError(f"--vary {unknown[0]}: a recipe has no such key or section; docs/settings.md has all")
    for run in runs[1:]:
        if unfair := unfair_differences(runs[0], run, vary):
            raise InputError(
                f"{runs[0].path} and {run.path} cannot be compared, as they differ in more than precision and weights: "
                f"{in_words(unfair)}; report each alone, or train one of them again; if this is what you compare, add "
                f"{' '.join(f'--vary {key}' for key in unfair)}"
            )


def varied_keys(runs: Sequence[RunRecord]) -> list[str]:
    """The keys by which some run is another training than the first: what they are compared in, beside precision."""
    return list(dict.fromkeys(key for run in runs[1:] for key in differing(runs[0], run)))


def keys_told_apart_by(runs: Sequence[RunRecord]) -> list[str]:
    """The keys that have to stand beside precision and weights to tell runs apart: the optimizer's dtypes, options in which runs
    of one precision differ, and what is varied."""
    keys = dict.fromkeys(key for run in runs for key in _flat(run) if key.startswith(COMPARED[2:]) and key not in _WHERE)

    def tells(key: str) -> bool:
        alike = (run.precision if key.startswith("fp8_config.") else None for run in runs)
        values = {(precision, str(option(run, key))) for precision, run in zip(alike, runs, strict=True)}
        return len(values) > len({precision for precision, _ in values})

    return list(dict.fromkeys([*filter(tells, keys), *varied_keys(runs)]))


def option(run: RunRecord, key: str) -> Any:
    """`setting`, but None of an option of low precision that the run does not use."""
    return None if key.startswith("fp8_config.") and not is_quantized(run.config.get("precision")) else setting(run, key)


def why_not_paired(first: RunRecord, second: RunRecord) -> str | None:
    """Why step n of one cannot be held against step n of the other; None where it can."""
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


def _passed_over(run: RunRecord, steps: np.ndarray) -> np.ndarray:
    """int64 [steps]: of how many steps the packs had been passed over by then, in rollbacks."""
    rollbacks = [(record["step"], record.get("left_out", 0)) for record in run.metrics if is_rollback(record)]
    if not rollbacks and run.summary.get("rollbacks"):  # kept without its events: no step of it can be relied upon
        return np.full(len(steps), -1)
    places = np.searchsorted([step for step, _ in rollbacks], steps, side="right")
    return np.array([run.past.left_out, *(left_out for _, left_out in rollbacks)], dtype=np.int64)[places]


def why_no_end(first: RunRecord, second: RunRecord) -> str | None:
    """Why one of the two has no end to be held against the other's; None where both came to one."""
    return next((f"{name} {run.broke_off}" for name, run in (("it", second), ("the baseline", first)) if run.broke_off), None)


def same_held_out(first: RunRecord, second: RunRecord) -> bool:
    """Whether both were evaluated on the same packs, by what the last evaluation of each says; of kept runs, whose evaluations
    do not say it, by their settings."""
    last = [(run.evaluations or [{}])[-1] for run in (first, second)]
    keys = ["data.mask_boundaries", "data.length"]
    if not all(key in each for each in last for key in HELD_OUT_PACKS):
        keys += ["evaluate.packs", "data.fingerprint", "data.held_out", "data.validation"]
    return same_measure(*last, HELD_OUT_PACKS) and all(setting(first, key) == setting(second, key) for key in keys)


def of_one_text(runs: Sequence[RunRecord]) -> bool:
    """Whether the held-out losses of all are of the same packs, so that they say which run is better."""
    return all(same_held_out(runs[0], run) for run in runs[1:])


def same_packs(first: RunRecord, second: RunRecord) -> bool:
    """Whether both were trained on the same packs."""
    return setting(first, "data.fingerprint") == setting(second, "data.fingerprint")


def loss_differences(first: RunRecord, second: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, second's loss minus first's float64) over the steps where both are finite numbers."""
    (ours, our_losses), (theirs, their_losses) = first.curve("loss"), second.curve("loss")
    steps, here, there = np.intersect1d(ours, theirs, return_indices=True)
    differences = their_losses[there] - our_losses[here]
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


def at_the_end(differences: np.ndarray) -> np.ndarray:
    """Those of the end: the last fifth, or the last FEWEST_STEPS where these are more, as fewer have no interval.

    This is the one definition of where runs end. Tables, pictures, the page and the gate take the same steps.
    """
    steps = max(math.ceil(len(differences) * LAST_SHARE), FEWEST_STEPS)
    return differences[-steps:]


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


Place = Literal["within", "above", "below", "cannot tell"]


@dataclass(frozen=True)
class Gap:
    """Step-by-step differences of two losses, in nats a token. A figure is NaN where there are too few steps for it."""

    mean: float
    sd: float  # of single steps
    standard_error: float  # of the mean
    steps: int

    @classmethod
    def over(cls, differences: np.ndarray) -> Gap:
        steps = len(differences)
        mean = float(differences.mean()) if steps else math.nan
        sd = float(differences.std(ddof=1)) if steps > 1 else math.nan
        return cls(mean, sd, batch_means_error(differences), steps)

    @classmethod
    def at_end(cls, differences: np.ndarray) -> Gap:
        return cls.over(at_the_end(differences))

    @property
    def half_width(self) -> float:
        """Half of the mean's interval at CONFIDENCE, by Student's t over the means of batches; NaN below FEWEST_STEPS."""
        if not self.has_interval:
            return math.nan
        return t_quantile(self.steps // math.isqrt(self.steps) - 1, CONFIDENCE) * self.standard_error

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.standard_error)

    @property
    def ends(self) -> tuple[float, float]:
        """The two ends of its interval; both are the mean where it has none."""
        half = self.half_width if self.has_interval else 0.0
        return self.mean - half, self.mean + half

    def place(self, tolerance: float) -> Place:
        """Where the whole interval lies: within ± `tolerance`, above or below that; "cannot tell" where it lies across an end."""
        low, high = self.ends
        if -tolerance <= low and high <= tolerance:
            return "within"
        return "above" if low > tolerance else "below" if high < -tolerance else "cannot tell"


def last_steps(gaps: Iterable[Gap]) -> str:
    """Over which steps these are the means: "last 64 steps", or "last 20 to 64 steps" where they have not as many."""
    numbers = sorted({gap.steps for gap in gaps})
    return "last " + (f"{numbers[0]:,} to " if len(numbers) > 1 else "") + plural(numbers[-1], "step")
