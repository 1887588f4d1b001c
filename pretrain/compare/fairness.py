"""Which runs may be compared, and what they differ in.

Comparable runs are the same training in all but how it was computed, and in what the user says is compared (`vary`). Runs that
see the same text in the same step are paired: the difference of their losses has little noise. In the reference's runs its
standard deviation is 0.005, where that of the loss is 0.127.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.settings import parse
from pretrain.checkpoint.state import changed_keys
from pretrain.metrics.run_record import (
    HELD_OUT_PACKS,
    RunRecord,
    at_the_end,
    in_a_word,
    kind,
    same_measure,
)
from pretrain.precision.settings import is_quantized
from pretrain.settings.config import SOURCE, identity_of
from pretrain.settings.recipe import Recipe

# What a comparison is about: the dtypes of products, of weights, and of what is kept beside them.
COMPARED = ("precision", "weights", "fp8_config.", "optimizer.moments", "optimizer.gradients")
# The keys that decide which tokens a step computes the loss of, and in which order: runs that differ in one cannot be paired.
SAME_TEXT = ("data.", "batch.", "seed")
# Keys of `fp8_config` that say where a precision is computed. The audit's `backend` answers that; they change no arithmetic.
_WHERE = ("fp8_config.backend", "fp8_config.on_unsupported")


def recipe_of(run: RunRecord) -> Recipe:
    return parse(Recipe, run.config, str(run.path / "config.yaml"))


def settings_of(run: RunRecord) -> dict[str, Any]:
    """The run's recipe with flat keys, what its `model.source` said, and `data.fingerprint`. Where a resume has changed a setting
    (`--accept-changes`), all the values that it had one after the other, as in "42 to step 6, then 7"."""
    return run.settings | run.changed_settings


def training_of(run: RunRecord) -> dict[str, Any]:
    """What must be equal for two runs to be compared: a training's identity but for what is compared, and the packs evaluated on.

    Raises InputError naming the run whose files do not say which data it was.
    """
    if run.data_fingerprint is None:
        raise InputError(
            f"{run.path}: its files have no `data_fingerprint`, so it cannot be compared; train it again"
        )
    recipe = recipe_of(run)
    identity = (
        identity_of(recipe, run.data_fingerprint)
        | run.source_config
        | {"evaluate.packs": recipe.evaluate.packs}
    )
    # A run that changed its precision on a resume counts as neither.
    return {
        key: value for key, value in identity.items() if not key.startswith(COMPARED)
    } | run.changed_settings


def differing(first: RunRecord, second: RunRecord) -> dict[str, tuple[Any, Any]]:
    """The keys in which the two are other trainings, with both values."""
    trainings = [training_of(run) for run in (first, second)]
    changed = changed_keys(*trainings)
    if "model.source" in changed:  # which says it in a word
        changed = [key for key in changed if not key.startswith(SOURCE)]
    flat = [
        settings_of(run) | training
        for run, training in zip((first, second), trainings, strict=True)
    ]
    return {key: tuple(in_a_word(key, values.get(key)) for values in flat) for key in changed}


def in_words(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"`{key}`: {ours} and {theirs}" for key, (ours, theirs) in differences.items())


def is_varied(key: str, vary: Sequence[str]) -> bool:
    """Whether `vary`, keys or whole sections, names `key`."""
    return any(key == name or key.startswith(f"{name}.") for name in vary)


def check_comparable(runs: Sequence[RunRecord], vary: Sequence[str] = ()) -> None:
    """InputError naming every key in which a run differs from the first so that comparing their losses is unfair, and where
    `vary` has a name that is no key or section of a recipe."""
    keys = {key for run in runs for key in settings_of(run)}
    if unknown := [name for name in vary if not any(is_varied(key, [name]) for key in keys)]:
        raise InputError(
            f"--vary {unknown[0]}: a recipe has no such key or section; docs/settings.md has all"
        )
    for run in runs[1:]:
        if unfair := {
            key: both for key, both in differing(runs[0], run).items() if not is_varied(key, vary)
        }:
            raise InputError(
                f"{runs[0].path} and {run.path} differ in more than precision and weights: {in_words(unfair)}; report each "
                f"alone, train one again or, if that is what you compare, add {' '.join(f'--vary {key}' for key in unfair)}"
            )


def keys_told_apart_by(runs: Sequence[RunRecord]) -> list[str]:
    """The keys that have to stand beside precision and weights to tell runs apart: the optimizer's dtypes, options in which runs
    of one precision differ, and what is varied."""
    keys = dict.fromkeys(
        key
        for run in runs
        for key in settings_of(run)
        if key.startswith(COMPARED[2:]) and key not in _WHERE
    )

    def tells(key: str) -> bool:
        alike = [run.precision if key.startswith("fp8_config.") else None for run in runs]
        return len(
            {(precision, str(option(run, key))) for precision, run in zip(alike, runs, strict=True)}
        ) > len(set(alike))

    varied = (key for run in runs[1:] for key in differing(runs[0], run))
    return list(dict.fromkeys([*filter(tells, keys), *varied]))


def option(run: RunRecord, key: str) -> Any:
    """The run's value of a key, but None of an option of low precision that the run does not use."""
    unused = key.startswith("fp8_config.") and not is_quantized(run.config.get("precision"))
    return None if unused else settings_of(run).get(key)


def why_not_paired(first: RunRecord, second: RunRecord) -> str | None:
    """Why step n of one cannot be held against step n of the other; None where it can."""
    other_text = {
        key: both for key, both in differing(first, second).items() if key.startswith(SAME_TEXT)
    }
    if other_text:
        return f"their steps see other text: {in_words(other_text)}"
    (ours, our_tokens), (theirs, their_tokens) = first.curve("tokens"), second.curve("tokens")
    common, here, there = np.intersect1d(ours, theirs, return_indices=True)
    if (our_tokens[here] != their_tokens[there]).any():
        return "their steps see other text: one has gone on from a checkpoint of another `batch.tokens`"
    if len(common) and _passed_over(first, common[0]) != _passed_over(second, common[0]):
        return "their steps see other text: a rollback has passed over packs in one of them"
    return (
        None
        if len(loss_differences(first, second)[0])
        else "they have no step with a finite loss in common"
    )


def _passed_over(run: RunRecord, first_step: int) -> list[tuple[int, int]]:
    """How many steps' packs had been passed over in rollbacks by `first_step`, and at each later one."""
    rollbacks = [
        (record["step"], record["left_out"]) for record in run.metrics if kind(record) == "rollback"
    ]
    before = [
        run.past["left_out"],
        *(left_out for step, left_out in rollbacks if step <= first_step),
    ]
    return [(first_step, before[-1]), *(each for each in rollbacks if each[0] > first_step)]


def loss_differences(first: RunRecord, second: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, second's loss minus first's float64) over the steps where both are finite numbers."""
    (ours, our_losses), (theirs, their_losses) = first.curve("loss"), second.curve("loss")
    steps, here, there = np.intersect1d(ours, theirs, return_indices=True)
    differences = their_losses[there] - our_losses[here]
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


def ends_of(differences: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Of steps and values, as `loss_differences` gives them, the values of the end."""
    steps, values = differences
    return values[at_the_end(steps)]


def same_held_out(first: RunRecord, second: RunRecord) -> bool:
    """Whether both were evaluated on the same packs, cut alike, by what the last evaluation of each says."""
    last = [(run.evaluations or [{}])[-1] for run in (first, second)]
    ours, theirs = settings_of(first), settings_of(second)
    alike = all(ours.get(key) == theirs.get(key) for key in ("data.mask_boundaries", "data.length"))
    return alike and same_measure(*last, HELD_OUT_PACKS)
