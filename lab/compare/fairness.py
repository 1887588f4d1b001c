"""Check that runs can be compared fairly, and compute the loss differences of two runs.

Two runs are comparable if all settings that affect the training are equal, except for the settings
in COMPARED and the keys that the user names with `--vary`. Two comparable runs are paired step by
step if each step trains both runs on the same data. The loss difference of paired runs has little
noise: in runs of recipes/small_malaysian_lm.yaml its standard deviation is 0.005, while the loss
itself has a standard deviation of 0.127.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.units import wrap
from pretrain.checkpoint.state import changed_keys
from pretrain.metrics.run_record import (
    HELD_OUT_LABELS,
    RunRecord,
    as_text,
    kind,
    same_measure,
)
from pretrain.precision.settings import is_quantized
from pretrain.settings.config import SOURCE, identity_of

# Keys, and prefixes of keys, that tables show only if their values differ between the runs.
_SHOWN_IF_DIFFERENT = ("fp8_config.", "optimizer.moments", "optimizer.gradients")
# Keys, and prefixes of keys, that are the subject of every comparison: the dtypes of matrix
# products, weights, moments and gradients. They may differ between comparable runs.
COMPARED = ("precision", "weights", *_SHOWN_IF_DIFFERENT)
# Keys, and prefixes of keys, that determine the tokens of each step and their order. Runs that
# differ in one of these keys cannot be paired.
SAME_TEXT = ("data.", "batch.", "seed")
# Keys of `fp8_config` that choose the engine and change no arithmetic. Tables do not show these
# keys. Instead, tables show the engine that the audit has observed.
_ENGINE = ("fp8_config.backend", "fp8_config.on_unsupported")


def settings_of(run: RunRecord) -> dict[str, Any]:
    """Map the dotted key of each setting of a run to its value.

    The result also has the keys in the config.json of `model.source` and the fingerprint of the
    data. If a setting was changed when the run was resumed (`--accept-changes`), the value is a
    text with all values of the setting in order. For example, "42 to step 6, then 7" means that the
    value was 42 up to step 6, and is 7 since then.
    """
    return run.settings | run.changed_settings


def training_of(run: RunRecord) -> dict[str, Any]:
    """Return the settings of a run that must be equal in all compared runs, by dotted key.

    The result has all settings that affect the training (`identity_of`), without the settings in
    COMPARED. It also has `evaluate.packs`, and all settings that were changed when the run was
    resumed. Raises InputError if the files of the run have no fingerprint of its data.
    """
    if run.data_fingerprint is None:
        raise InputError(
            f"{run.path}: the files of this run have no `data_fingerprint`, so the run cannot be "
            "compared; train it again, or remove it from the command line"
        )
    recipe = run.recipe
    identity = {
        **identity_of(recipe, run.data_fingerprint),
        **run.source_config,
        "evaluate.packs": recipe.evaluate.packs,
    }
    training = {key: value for key, value in identity.items() if not key.startswith(COMPARED)}
    # Add every setting that was changed when the run was resumed, even if the setting is in
    # COMPARED: a run whose precision has changed is comparable neither with runs in the earlier
    # precision nor with runs in the later one.
    return training | run.changed_settings


def differing(first: RunRecord, second: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two runs and make their comparison unfair.

    Map the dotted key of each such setting to its values in the first and in the second run, as
    texts. A setting with equal values is not included, even if it has no effect on one of the runs.
    """
    first_training = training_of(first)
    second_training = training_of(second)
    changed = changed_keys(first_training, second_training)
    if "model.source" in changed:
        # The config.json files of two models differ in many keys. Report only the name of the
        # model.
        changed = [key for key in changed if not key.startswith(SOURCE)]
    # `training_of` skips settings without effect on the run, such as those of Muon with AdamW. If
    # such a setting has an effect on the other run, compare its values in both recipes.
    first_settings = settings_of(first) | first_training
    second_settings = settings_of(second) | second_training
    differences = {}
    for key in changed:
        first_value = first_settings.get(key)
        second_value = second_settings.get(key)
        if first_value != second_value:
            differences[key] = (as_text(first_value, key), as_text(second_value, key))
    return differences


def in_words(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """Return `differences`, which maps each key to two values, as text for a message."""
    return "; ".join(
        f"`{key}`: {first} and {second}" for key, (first, second) in differences.items()
    )


def check_comparable(runs: Sequence[RunRecord], vary: Sequence[str]) -> None:
    """Raise InputError if one of `runs` cannot be compared fairly with the first run.

    The runs may differ in the keys and sections that `vary` lists. The message names all other keys
    whose values differ.
    """
    # With a dot, the name of a section is the beginning of its keys, and of no other keys.
    varied = tuple(f"{name}." for name in vary)
    base, *compared = runs
    for run in compared:
        unfair = {
            key: values
            for key, values in differing(base, run).items()
            if not f"{key}.".startswith(varied)
        }
        if unfair:
            raise InputError(
                wrap(
                    f"{base.path} and {run.path} differ in more than precision and weights: "
                    f"{in_words(unfair)}; either report each run alone, or train one of the two "
                    "runs again with the settings of the other run, or, if you want to compare "
                    "these settings, add `--vary KEY` for each key or for its section"
                )
            )


def distinguishing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys of the settings that distinguish the runs in a table.

    `precision` and `weights` are not included, because tables always show them. The result has

    * the dtypes of the optimizer that differ between runs,
    * the options in `fp8_config` that differ between runs of the same precision, and
    * all other settings in which any run differs from the first run.
    """
    candidates = dict.fromkeys(
        key
        for run in runs
        for key in settings_of(run)
        if key.startswith(_SHOWN_IF_DIFFERENT) and key not in _ENGINE
    )
    keys = [key for key in candidates if _distinguishes(key, runs)]
    for run in runs[1:]:
        keys += differing(runs[0], run)
    return list(dict.fromkeys(keys))


def _distinguishes(key: str, runs: Sequence[RunRecord]) -> bool:
    """Return True if `key` has different values in `runs`.

    An option of `fp8_config` must differ between two runs of the same precision, because precisions
    have different defaults.
    """
    is_option = key.startswith("fp8_config.")
    values: dict[str | None, set[str]] = defaultdict(set)
    for run in runs:
        precision = run.precision if is_option else None
        values[precision].add(str(effective_value(run, key)))
    return any(len(of_precision) > 1 for of_precision in values.values())


def effective_value(run: RunRecord, key: str) -> Any:
    """Return the value of the setting `key` in a run, or None if the run does not have the key.

    Return None for a key of `fp8_config` if the run is not quantized, because the key has no effect
    on such a run.
    """
    if key.startswith("fp8_config.") and not is_quantized(run.config.get("precision")):
        return None
    return settings_of(run).get(key)


def why_not_paired(first: RunRecord, second: RunRecord) -> str | None:
    """Return the reason why the two runs cannot be compared step by step.

    Return None if they can be compared, because each step trains both runs on the same data.
    """
    differences = differing(first, second).items()
    if data_keys := {key: values for key, values in differences if key.startswith(SAME_TEXT)}:
        return f"their steps are trained on different data: {in_words(data_keys)}"
    steps, first_tokens, second_tokens = _common_steps(first, second, "tokens")
    if (first_tokens != second_tokens).any():
        return (
            "their steps are trained on different data: one run has continued from a checkpoint "
            "whose steps were trained with a different value of `batch.tokens`"
        )
    if len(steps) and _discarded_steps(first, steps[0]) != _discarded_steps(second, steps[0]):
        return "their steps are trained on different data: a rollback of one run has skipped packs"
    if not len(loss_differences(first, second)[0]):
        return "they have no step with a finite loss in common"
    return None


def _common_steps(
    first: RunRecord, second: RunRecord, key: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of the steps that both runs have, and the values of `key` in each run.

    The results are an int64 array and two float64 arrays, all [step].
    """
    first_steps, first_values = first.curve(key)
    second_steps, second_values = second.curve(key)
    steps, in_first, in_second = np.intersect1d(first_steps, second_steps, return_indices=True)
    return steps, first_values[in_first], second_values[in_second]


def _discarded_steps(run: RunRecord, first_step: int) -> dict[int, int]:
    """Count the steps that the rollbacks of a run have discarded.

    Return a dict. Its keys are `first_step` and the step of each later rollback. Its values are the
    total numbers of steps that all rollbacks until this step have discarded. The packs of discarded
    steps are not used again.
    """
    skipped = {first_step: run.past["left_out"]}
    for line in run.metrics:
        if kind(line) == "rollback":
            skipped[max(line["step"], first_step)] = line["left_out"]
    return skipped


def loss_differences(first: RunRecord, second: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return step numbers (int64) and the second run's losses minus the first run's (float64).

    Losses are training losses. Only steps at which both runs have a finite loss are included.
    """
    steps, first_losses, second_losses = _common_steps(first, second, "loss")
    differences = second_losses - first_losses
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


def same_held_out(first: RunRecord, second: RunRecord) -> bool:
    """Return True if the last evaluations of both runs used the same packs with the same labels."""
    return same_measure(first.last_evaluation, second.last_evaluation, HELD_OUT_LABELS)
