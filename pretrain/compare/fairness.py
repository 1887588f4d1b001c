"""Which runs may be compared, and by how much two of them differ.

Two runs are comparable where they are one training in all but how it was computed: the same model, data, order, tokens, seed and
rule of learning. Then the losses of one step differ by what is being compared and not by the text, and their paired difference is
some twenty times sharper than the curves themselves (in the reference's runs its sd is 0.005 a step, against 0.127).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.settings import parse
from pretrain.metrics.run_record import RunRecord
from pretrain.settings.config import identity_of
from pretrain.settings.recipe import Recipe

# What a comparison is about: the dtypes of products, of weights, and of what is kept beside them. Where a run computes is no part
# of its identity.
COMPARED = ("precision", "weights", "fp8_config.", "optimizer.moments", "optimizer.gradients")
LATE_SHARE = 0.2  # of the common steps: where runs have grown apart, and a difference predicts the end


def training_of(run: RunRecord) -> dict[str, Any]:
    """What must be equal for two runs to be compared: flat settings, and the fingerprint of the packs.

    All of a training's identity but what is compared; and the packs that it is evaluated on, so that held-out losses mean the
    same. Raises InputError naming the run's file that does not say it.
    """
    if run.data_fingerprint is None:
        raise InputError(
            f"{run.path}: its files do not say its `data_fingerprint`, so it cannot be compared with another run; train it again"
        )
    recipe = parse(Recipe, run.config, str(run.path / "config.yaml"))
    identity = identity_of(recipe, run.data_fingerprint) | {"evaluate.packs": recipe.evaluate.packs}
    return {key: value for key, value in identity.items() if not key.startswith(COMPARED)}


def unfairness(first: RunRecord, second: RunRecord) -> str | None:
    """What makes comparing the two unfair, with keys and both values; None where nothing does. InputError as `training_of`."""
    ours, theirs = training_of(first), training_of(second)
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    return "; ".join(f"`{key}`: {_value(ours, key)} and {_value(theirs, key)}" for key in keys) or None


def check_comparable(runs: Sequence[RunRecord]) -> None:
    """Raise InputError naming every key in which a run differs from the first so that comparing their losses is unfair."""
    for run in runs[1:]:
        if differing := unfairness(runs[0], run):
            raise InputError(
                f"{runs[0].path} and {run.path} cannot be compared, as they differ in more than precision and weights: "
                f"{differing}; report each alone, or train one of them again"
            )


def difference(first: RunRecord, second: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, second's loss minus first's float64) over the steps where both are finite numbers."""
    (ours, our_losses), (theirs, their_losses) = first.curve("loss"), second.curve("loss")
    steps, here, there = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    differences = their_losses[there] - our_losses[here]
    finite = np.isfinite(differences)
    return steps[finite], differences[finite]


@dataclass(frozen=True)
class Paired:
    """A paired difference in nats per token: its mean, the sd of one step's, the standard error of the mean, and of how many.

    sd and standard error are NaN where there are too few steps to tell.
    """

    mean: float
    sd: float
    standard_error: float
    steps: int

    @classmethod
    def of(cls, differences: np.ndarray) -> Paired:
        steps = len(differences)
        return cls(
            mean=float(differences.mean()) if steps else math.nan,
            sd=float(differences.std(ddof=1)) if steps > 1 else math.nan,
            standard_error=batch_means_error(differences),
            steps=steps,
        )


def late(differences: np.ndarray) -> np.ndarray:
    """The last fifth of them, rounded up."""
    return differences[len(differences) - math.ceil(len(differences) * LATE_SHARE) :]


def batch_means_error(values: np.ndarray) -> float:
    """Standard error of the mean of correlated `values`, by non-overlapping batch means; NaN below four values.

    Neighbouring steps share their past, so sd / sqrt(n) would claim too much. The n values are cut into batches of
    b = floor(sqrt(n)) in a row; these are nearly independent of each other where single values are not, so the variance of their
    means tells that of the whole mean: SE² = Var(batch means) · b / n (Flegal and Jones 2010, Annals of Statistics 38(2)). The
    first n mod b values are in no batch. A trend counts as spread, which errs on the side of caution; a correlation longer than
    a batch is missed, which errs on the other, so a fifth of a short run deserves distrust.
    """
    n = len(values)
    if n < 4:
        return math.nan
    size = math.isqrt(n)
    batches = values[n % size :].reshape(-1, size).mean(axis=1)
    return float(math.sqrt(batches.var(ddof=1) * size / n))


def _value(values: dict[str, Any], key: str) -> Any:
    return values.get(key, "not set")
