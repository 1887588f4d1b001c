"""Comparison over seeds: group runs that differ only in their seeds, and compare the groups.

A group may have only one run, which has no verdict: another seed could change the sign of its
difference. The first group is the baseline. Each run of another group is compared with the run of
the baseline that has the same seed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundation.units import UNKNOWN, plural, signed
from pretrain.compare.columns import Column
from pretrain.compare.comparison import unique_names
from pretrain.compare.differences import (
    CONFIDENCE,
    MARGIN,
    LossDifference,
    Sample,
    error_of,
    fewest_seeds,
)
from pretrain.compare.fairness import ends_of, loss_differences, recipe_of, same_held_out
from pretrain.metrics.run_record import LOSS_KEY, RunRecord
from pretrain.settings.config import settings_without

# Keys, and prefixes of keys, in which the runs of one group may differ. They include the keys for
# the location of the data, because the fingerprint of the packs is compared instead.
_WITHIN = (
    "seed",
    "name",
    "run_dir",
    "log.",
    "checkpoint.",
    "health.",
    "parity",
    "batch.microbatch",
    "evaluate.samples",
    "data.packs",
    "data.source",
    "data.tokenizer",
)
_SEED_IN_A_NAME = re.compile(r"(?:^|[-_.,])seed[=_-]?\d+(?=$|[-_.,])")


def grouped(runs: Sequence[RunRecord]) -> dict[str, dict[int, RunRecord]]:
    """Group runs that have the same settings except for their seed.

    Map the name of each group to a dict that maps each seed to its run. The groups are in the order
    of their first runs. The name of a group is the name of its first run without the part for the
    seed, such as "seed=3".

    A group has only one run per seed. If two runs have the same settings and the same seed, all
    runs with these settings are divided into groups by their folders: the runs of a group have the
    same folder path, except for the part for the seed.
    """
    keys = [(str(_settings(run)), run.config["seed"]) for run in runs]
    repeated = {training for (training, _), number in Counter(keys).items() if number > 1}
    groups: dict[tuple[str, str], dict[int, RunRecord]] = {}
    for run, (training, seed) in zip(runs, keys, strict=True):
        folder = str(run.path.parent / _without_seed(run)) if training in repeated else ""
        groups.setdefault((training, folder), {})[seed] = run
    first_runs = [next(iter(group.values())) for group in groups.values()]
    names = [_without_seed(run) or run.name for run in first_runs]
    return dict(zip(unique_names(names, first_runs), groups.values(), strict=True))


def _without_seed(run: RunRecord) -> str:
    """Return the name of a run without a part such as "seed=3"."""
    return _SEED_IN_A_NAME.sub("", run.name).strip("-_.,")


def _settings(run: RunRecord) -> dict[str, Any]:
    """Return the properties that must be equal in all runs of a group, by dotted key."""
    return {
        **settings_without(recipe_of(run), _WITHIN),
        "precision": run.precision,
        "backend": run.engine,
        "data.fingerprint": run.data_fingerprint,
        **run.source_config,
        **run.changed_settings,
    }


@dataclass(frozen=True)
class GroupResult:
    """A group of runs that differ only in their seed, compared with the baseline's group."""

    # Name of the group.
    name: str
    # Map each seed to its run.
    runs: dict[int, RunRecord]
    # Map each seed to the loss at the end of its run. The seeds of excluded runs are missing.
    losses: dict[int, float]
    # Losses of this group minus the losses of the baseline's group. None if this group is the
    # baseline, if the two groups have no seed or no step in common, or if a run of this group has
    # failed.
    difference: LossDifference | None
    # The verdict, or the reason why there is none.
    verdict: str

    @property
    def result(self) -> str:
        """Return the difference, if there is one, and the verdict, as text."""
        if self.difference is None:
            return self.verdict
        return f"{signed(self.difference.mean)}, {self.verdict}"

    @property
    def loss_text(self) -> str:
        """Return the mean and the standard deviation of the losses over seeds, as text.

        If the group is compared with the baseline's group, only the seeds that both groups have are
        included. Return UNKNOWN if there is no loss.
        """
        seeds = self.difference.by_seed if self.difference else self.losses
        sample = Sample({seed: loss for seed, loss in self.losses.items() if seed in seeds})
        if not sample.by_seed:
            return UNKNOWN
        deviation = f" (sd {math.sqrt(sample.variance):.4f})" if len(sample.by_seed) > 1 else ""
        return f"{sample.mean:.4f}{deviation}"


@dataclass(frozen=True)
class SeedComparison:
    """Groups of runs that differ only in their seeds, compared with the first group."""

    # Results of all groups. The first group is the baseline.
    results: list[GroupResult]
    # True if held-out losses are compared, False if training losses at the end are compared.
    held_out: bool
    # Largest difference that counts as equivalent, as a share of the baseline's loss.
    margin: float
    # Probability that the interval of one group misses the true difference after any number of
    # seeds.
    error: float
    # One note for each reason to exclude runs.
    notes: list[str]

    @classmethod
    def over(cls, runs: Sequence[RunRecord], margin: float = MARGIN) -> SeedComparison:
        """Group runs that differ only in their seeds, and compare each group with the first one.

        Held-out losses are compared if all finished runs have a held-out loss. Otherwise the
        training losses are compared.

        Args:
            runs: The runs, which must be comparable except for their seeds. The group of the first
                run is the baseline.
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
        """
        groups = grouped(runs)
        error = error_of(max(1, len(groups) - 1))
        base_runs = next(iter(groups.values()))
        finished = [run for run in runs if not run.broke_off and not run.is_unfinished]
        held_out = all("held_out_loss" in run.summary for run in finished)
        results: list[GroupResult] = []
        excluded: dict[str, list[str]] = {}
        for name, group in groups.items():
            losses: dict[int, float] = {}
            for seed, run in group.items():
                loss: Any = run.summary.get("held_out_loss" if held_out else LOSS_KEY)
                reason = _why_excluded(run, loss, base_runs.get(seed), held_out=held_out)
                if reason:
                    excluded.setdefault(reason, []).append(run.name)
                else:
                    losses[seed] = loss
            difference, verdict = _compare(
                group,
                losses,
                results[0] if results else None,
                held_out=held_out,
                margin=margin,
                error=error,
            )
            results.append(GroupResult(name, group, losses, difference, verdict))
        notes = [f"Excluded, {reason}: {', '.join(names)}." for reason, names in excluded.items()]
        return cls(results, held_out, margin, error, notes)

    @property
    def baseline(self) -> GroupResult:
        """Return the group that is the baseline."""
        return self.results[0]

    def columns(self) -> list[Column]:
        """Return the columns of the table over seeds. Each row of the table is a GroupResult."""
        base = self.baseline.name
        confidence = f"{100 * (1 - self.error):.3g} %"
        return [
            Column("runs", "", lambda group: group.name, is_text=True),
            Column(
                "seeds",
                "",
                lambda group: len(group.difference.by_seed if group.difference else group.losses),
            ),
            Column(
                "held-out loss" if self.held_out else "loss at the end",
                "",
                lambda group: group.loss_text,
            ),
            Column(
                f"minus {base}",
                f"loss of a run minus the loss of the {base} run with the same seed, averaged over "
                "seeds, in nats per token",
                lambda group: group.difference and group.difference.mean,
                signed,
            ),
            Column(
                f"± {confidence}",
                f"half-width of the {confidence} interval of the difference over seeds. All rows "
                f"together have a confidence of {100 * CONFIDENCE:.0f} %, after any number of "
                f"seeds; at least {fewest_seeds(self.error)} seeds are needed",
                lambda group: group.difference and group.difference.half_width(self.error),
                "{:.4f}".format,
            ),
            Column(
                "in %",
                "",
                lambda group: (
                    group.difference and group.difference.mean / group.difference.baseline
                ),
                lambda share: f"{signed(100 * share, 2)}%",
            ),
            Column(
                "verdict",
                f"equivalent: the narrower {100 * (1 - 2 * self.error):.3g} % interval of the "
                f"difference lies within the margin of ± {100 * self.margin:g} % of {base}'s loss "
                f"(two one-sided tests). Worse or better: the {confidence} interval lies on one "
                "side of zero. Worse or better, within the margin: the narrower interval also lies "
                "within the margin. Worse or better by more than the margin: the whole "
                f"{confidence} interval lies beyond the margin. `python -m pretrain which` gives "
                "the same verdicts",
                lambda group: group.verdict,
            ),
        ]

    def answer(self) -> str:
        """Return one sentence with the difference and the verdict of each group.

        If there is only one group, return its name.
        """
        base, *compared = self.results
        if not compared:
            return base.name
        results = "; ".join(f"{group.name} ({group.result})" for group in compared)
        return (
            f"Against {base.name} over {plural(len(base.losses), 'seed')}, margin ± "
            f"{100 * self.margin:g} %: {results}."
        )


def _compare(
    group: Mapping[int, RunRecord],
    losses: Mapping[int, float],
    base: GroupResult | None,
    *,
    held_out: bool,
    margin: float,
    error: float,
) -> tuple[LossDifference | None, str]:
    """Return the loss difference between a group and the baseline, and the verdict of the group.

    Return None and the reason if there is no difference, for example because a run of the group has
    failed. A failed run has no loss, and the mean over the other runs would make the group look
    better than it is.

    Args:
        group: The runs of the group by seed.
        losses: Loss at the end by seed, without excluded runs.
        base: The result of the baseline, or None if the group is the baseline.
        held_out: True if `losses` are held-out losses.
        margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
        error: Error probability of the interval of one group.
    """
    if failed := sum(bool(run.broke_off) for run in group.values()):
        return None, f"broke off: {plural(failed, 'run')} of {len(group)}"
    if base is None:
        return None, "baseline"
    difference = LossDifference.of(losses, base.losses)
    if difference is None:
        return None, "not compared"
    if not held_out:
        # The loss at the end is a mean over steps. A run that has branched from a checkpoint may
        # have fewer of these steps than the baseline's run. So compute the difference again, only
        # from steps that both runs have.
        gaps = {seed: loss_differences(base.runs[seed], group[seed]) for seed in difference.by_seed}
        by_seed = {seed: float(ends_of(gap).mean()) for seed, gap in gaps.items() if len(gap[0])}
        if not by_seed:
            return None, "not compared"
        difference = replace(difference, by_seed=by_seed)
    if difference.half_width(error) is None:
        seeds = plural(len(difference.by_seed), "seed")
        return difference, f"{seeds}: no verdict, {fewest_seeds(error)} are needed"
    return difference, difference.verdict(margin, error)


def _why_excluded(
    run: RunRecord, loss: float | None, base_run: RunRecord | None, *, held_out: bool
) -> str | None:
    """Return the reason why a run is excluded, as a clause for a note.

    Return None if the run is included. `loss` is the loss at the end of the run, or None if the
    loss is not known. `base_run` is the baseline's run with the same seed, or None if there is no
    such run. `held_out` is true if `loss` is a held-out loss.
    """
    other_data = "on other data than the baseline's run of the same seed"
    has_other_data = base_run and base_run.data_fingerprint != run.data_fingerprint
    has_other_held_out = base_run and not same_held_out(base_run, run)
    # Map each reason to True if it applies. The first reason that applies is returned.
    reasons = {
        "because they have not finished": run.broke_off or run.is_unfinished or loss is None,
        "because they were not evaluated after their last step": held_out and run.when_evaluated,
        f"because they were evaluated {other_data}": held_out and has_other_held_out,
        f"because they were trained {other_data}": not held_out and has_other_data,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
