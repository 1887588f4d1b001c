"""Rules for a fair comparison: which runs may be compared and paired, and their differences.

Runs are comparable if they are the same training except for how it was computed and for the keys
that the user names with `--vary`. Runs that see the same data in each step are paired. The
difference of their losses has little noise: in runs of the reference its standard deviation is
0.005, compared with 0.127 for the loss itself.
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

# The subject of every comparison: dtypes of products, weights, moments and gradients.
COMPARED = ("precision", "weights", "fp8_config.", "optimizer.moments", "optimizer.gradients")
# Keys that decide which tokens a step is trained on, and their order. Runs that differ in one of
# them cannot be paired.
SAME_TEXT = ("data.", "batch.", "seed")
# Keys of `fp8_config` that choose the engine and change no arithmetic. Reports show the engine that
# the audit has observed.
_ENGINE = ("fp8_config.backend", "fp8_config.on_unsupported")


def recipe_of(run: RunRecord) -> Recipe:
    """Return the recipe in a run's config.yaml."""
    return parse(Recipe, run.config, str(run.path / "config.yaml"))


def settings_of(run: RunRecord) -> dict[str, Any]:
    """Return a run's settings by dotted key, with the source's config and the data's fingerprint.

    A setting that a resume has changed (`--accept-changes`) has all its values in order, for
    example "42 to step 6, then 7".
    """
    return run.settings | run.changed_settings


def training_of(run: RunRecord) -> dict[str, Any]:
    """Return the settings that must be equal for two runs to be compared.

    They are the identity of the training without the subject of the comparison, and the packs for
    evaluation. Raises InputError if the files of the run do not identify its data.
    """
    if run.data_fingerprint is None:
        raise InputError(
            f"{run.path}: its files have no `data_fingerprint`, so it cannot be compared; train it "
            "again"
        )
    recipe = recipe_of(run)
    identity = identity_of(recipe, run.data_fingerprint) | run.source_config
    identity |= {"evaluate.packs": recipe.evaluate.packs}
    training = {key: value for key, value in identity.items() if not key.startswith(COMPARED)}
    # A run that changed its precision on a resume belongs to neither of the two precisions.
    return training | run.changed_settings


def differing(first: RunRecord, second: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Return the keys that make two runs different trainings, with both values."""
    trainings = [training_of(run) for run in (first, second)]
    changed = changed_keys(*trainings)
    if "model.source" in changed:
        # The configs of two sources differ in many keys. The name of the source is enough.
        changed = [key for key in changed if not key.startswith(SOURCE)]
    first_values, second_values = (
        settings_of(run) | training
        for run, training in zip((first, second), trainings, strict=True)
    )
    return {
        key: (in_a_word(key, first_values.get(key)), in_a_word(key, second_values.get(key)))
        for key in changed
    }


def in_words(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the keys and values of `differing` as text for a message."""
    texts = [f"`{key}`: {first} and {second}" for key, (first, second) in differences.items()]
    return "; ".join(texts)


def is_varied(key: str, vary: Sequence[str]) -> bool:
    """Return True if `vary`, a list of keys and sections, includes `key`."""
    return any(key == name or key.startswith(f"{name}.") for name in vary)


def check_comparable(runs: Sequence[RunRecord], vary: Sequence[str] = ()) -> None:
    """Raise InputError if a run cannot be compared fairly with the first run.

    The message names all differing keys that `vary` does not include. A name in `vary` that is not
    a key or section of a recipe is an error too.
    """
    keys = {key for run in runs for key in settings_of(run)}
    for name in vary:
        if not any(is_varied(key, [name]) for key in keys):
            raise InputError(
                f"--vary {name}: a recipe has no such key or section; docs/settings.md lists them"
            )
    base, *compared = runs
    for run in compared:
        differences = differing(base, run)
        unfair = {key: both for key, both in differences.items() if not is_varied(key, vary)}
        if unfair:
            options = " ".join(f"--vary {key}" for key in unfair)
            raise InputError(
                f"{base.path} and {run.path} differ in more than precision and weights: "
                f"{in_words(unfair)}; report each alone, train one again or, if that is what you "
                f"compare, add {options}"
            )


def distinguishing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys that tables must show besides precision and weights to distinguish runs.

    These are the optimizer's dtypes, options that differ between runs of the same precision, and
    the varied keys.
    """
    candidates = dict.fromkeys(
        key
        for run in runs
        for key in settings_of(run)
        if key.startswith(COMPARED[2:]) and key not in _ENGINE
    )
    keys = [key for key in candidates if _distinguishes(key, runs)]
    for run in runs[1:]:
        keys += differing(runs[0], run)
    return list(dict.fromkeys(keys))


def _distinguishes(key: str, runs: Sequence[RunRecord]) -> bool:
    """Return True if runs differ in `key`. An option of `fp8_config` counts within a precision."""
    is_option = key.startswith("fp8_config.")
    precisions = [run.precision if is_option else None for run in runs]
    values = [str(option(run, key)) for run in runs]
    return len(set(zip(precisions, values, strict=True))) > len(set(precisions))


def option(run: RunRecord, key: str) -> Any:
    """Return a run's value of `key`, or None for `fp8_config` if the run is not quantized."""
    if key.startswith("fp8_config.") and not is_quantized(run.config.get("precision")):
        return None
    return settings_of(run).get(key)


def why_not_paired(first: RunRecord, second: RunRecord) -> str | None:
    """Return why step n of one run cannot be compared with step n of the other, else None."""
    differences = differing(first, second).items()
    if data_keys := {key: both for key, both in differences if key.startswith(SAME_TEXT)}:
        return f"their steps see different data: {in_words(data_keys)}"
    steps, first_tokens, second_tokens = _common_steps(first, second, "tokens")
    if (first_tokens != second_tokens).any():
        return (
            "their steps see different data: one has continued from a checkpoint with another "
            "`batch.tokens`"
        )
    if len(steps) and _skipped_packs(first, steps[0]) != _skipped_packs(second, steps[0]):
        return "their steps see different data: a rollback of one run has skipped packs"
    if not len(loss_differences(first, second)[0]):
        return "they have no step with a finite loss in common"
    return None


def _common_steps(
    first: RunRecord, second: RunRecord, key: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps that both runs have, and their values of `key`."""
    first_steps, first_values = first.curve(key)
    second_steps, second_values = second.curve(key)
    steps, in_first, in_second = np.intersect1d(first_steps, second_steps, return_indices=True)
    return steps, first_values[in_first], second_values[in_second]


def _skipped_packs(run: RunRecord, first_step: int) -> dict[int, int]:
    """Return the number of steps whose packs rollbacks have skipped, by step.

    A number holds from its step on. The steps are `first_step` and those of later rollbacks.
    """
    skipped = {first_step: run.past["left_out"]}
    for record in run.metrics:
        if kind(record) == "rollback":
            skipped[max(record["step"], first_step)] = record["left_out"]
    return skipped


def loss_differences(
    first: RunRecord, second: RunRecord, key: str = "loss"
) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (int64) and the second run's loss minus the first's (float64).

    Only steps with two finite losses are included. `key` may be "held_out_loss".
    """
    steps, first_losses, second_losses = _common_steps(first, second, key)
    differences = second_losses - first_losses
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


def ends_of(differences: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return the values at the end of a run, from the result of `loss_differences`."""
    steps, values = differences
    return values[at_the_end(steps)]


def same_held_out(first: RunRecord, second: RunRecord) -> bool:
    """Return True if the last evaluations of both runs used the same packs with the same labels."""
    first_settings = settings_of(first)
    second_settings = settings_of(second)
    labels = ("data.mask_boundaries", "data.length")
    return same_measure(first.last_evaluation, second.last_evaluation, HELD_OUT_PACKS) and all(
        first_settings.get(key) == second_settings.get(key) for key in labels
    )
