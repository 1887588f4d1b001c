"""Comparison over seeds: compare groups of runs that differ only in their seeds.

A group may have only one run, which has no verdict: another seed could change the sign of its
difference. The first group is the baseline. Each run of another group is compared with the run of
the baseline that has the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.units import UNKNOWN, plural, signed
from lab.compare.columns import Column
from lab.compare.comparison import ComparedRun
from lab.compare.differences import (
    BETTER,
    BEYOND_MARGIN,
    CANNOT_TELL,
    CONFIDENCE,
    EQUIVALENT,
    MARGIN,
    WITHIN_MARGIN,
    WORSE,
    LossDifference,
    Sample,
    error_of,
    fewest_seeds,
)
from lab.compare.fairness import same_held_out
from pretrain.metrics.run_record import LOSS_KEY, RunRecord

# Map the keys of summary.json whose values can be compared to their names in tables. The first
# loss that all runs have is compared.
LOSSES = {
    "served_loss": "held-out loss as served",
    "held_out_loss": "held-out loss",
    LOSS_KEY: "loss at the end",
}
# Map the endings of verdicts to their meanings (`LossDifference.verdict`).
MEANINGS = {
    EQUIVALENT: "no difference is shown, and a difference as large as the margin is excluded",
    WITHIN_MARGIN: "a difference is shown, and it is smaller than the margin",
    BEYOND_MARGIN: "the difference is larger than the margin",
    WORSE: "a cost is shown, and a cost above the margin is not excluded",
    BETTER: "a gain is shown, and a gain above the margin is not excluded",
    CANNOT_TELL: "no difference is shown, and a large one is not excluded: train more seeds",
}


@dataclass(frozen=True)
class GroupResult:
    """A group of runs that differ only in their seed, compared with the baseline's group."""

    # Name of the group.
    name: str
    # Map each seed to its run.
    runs: dict[int, ComparedRun]
    # Map each seed to the compared loss of its run (`SeedComparison.loss_key`). The seeds of
    # excluded runs are missing.
    losses: dict[int, float]
    # Losses of this group minus the losses of the baseline's group. None if this group is the
    # baseline, if the two groups have no seed or no step in common, or if a run of this group has
    # failed.
    difference: LossDifference | None
    # The verdict, or the reason why there is none.
    verdict: str

    @property
    def compared_seeds(self) -> Collection[int]:
        """Return the seeds that the baseline's group has too, or all seeds of the baseline."""
        return self.difference.by_seed if self.difference else self.losses

    @property
    def result(self) -> str:
        """Return the difference with its number of seeds, if there is one, and the verdict."""
        if self.difference is None:
            return self.verdict
        seeds = plural(len(self.difference.by_seed), "seed")
        return f"{signed(self.difference.mean)} over {seeds}, {self.verdict}"

    @property
    def loss_text(self) -> str:
        """Return the mean and the standard deviation of the losses over seeds, as text.

        If the group is compared with the baseline's group, only the seeds that both groups have are
        included. Return UNKNOWN if there is no loss.
        """
        sample = Sample({seed: self.losses[seed] for seed in self.compared_seeds})
        if not sample.by_seed:
            return UNKNOWN
        deviation = f" (sd {math.sqrt(sample.variance):.4f})" if len(sample.by_seed) > 1 else ""
        return f"{sample.mean:.4f}{deviation}"


@dataclass(frozen=True)
class SeedComparison:
    """Groups of runs that differ only in their seeds, compared with the first group."""

    # Results of all groups. The first group is the baseline.
    results: list[GroupResult]
    # Key of the losses that are compared, a key of LOSSES.
    loss_key: str
    # Largest difference that counts as equivalent, as a share of the baseline's loss.
    margin: float
    # Probability that the interval of one group misses the true difference after any number of
    # seeds.
    error: float
    # One note for each reason to exclude runs.
    notes: list[str]

    @classmethod
    def over(cls, compared_runs: Sequence[ComparedRun], margin: float = MARGIN) -> SeedComparison:
        """Compare each group of runs that differ only in their seeds with the first group.

        Args:
            compared_runs: The runs, which must be comparable except for their seeds. The group of
                the first run is the baseline.
            margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
        """
        groups: dict[str, dict[int, ComparedRun]] = {}
        for compared in compared_runs:
            groups.setdefault(compared.group, {})[compared.run.config["seed"]] = compared
        error = error_of(max(1, len(groups) - 1))
        loss_key = _compared_loss([compared.run for compared in compared_runs])
        held_out = loss_key != LOSS_KEY
        results: list[GroupResult] = []
        excluded: dict[str, list[str]] = {}
        for name, group in groups.items():
            losses: dict[int, float] = {}
            for seed, compared in group.items():
                loss: Any = compared.run.summary.get(loss_key)
                if reason := _why_excluded(compared, loss, held_out=held_out):
                    excluded.setdefault(reason, []).append(compared.run.name)
                else:
                    losses[seed] = loss
            base_losses = results[0].losses if results else None
            difference, verdict = _compare(
                group, losses, base_losses, margin, error, held_out=held_out
            )
            results.append(GroupResult(name, group, losses, difference, verdict))
        notes = [f"Excluded, {reason}: {', '.join(names)}." for reason, names in excluded.items()]
        return cls(results, loss_key, margin, error, notes)

    def columns(self) -> list[Column]:
        """Return the columns of the table over seeds. Each row of the table is a GroupResult."""
        base = self.results[0].name
        confidence = f"{100 * (1 - self.error):.3g} %"
        verdicts = dict.fromkeys(group.verdict for group in self.results)
        meanings = [
            f"{verdict} ({meaning})"
            for verdict in verdicts
            for ending, meaning in MEANINGS.items()
            if verdict.endswith(ending)
        ]
        return [
            Column("runs", "", lambda group: group.name, is_text=True),
            Column("seeds", "", lambda group: len(group.compared_seeds)),
            Column(
                f"minus {base}",
                "mean difference of runs with the same seed, in nats per token",
                lambda group: group.difference and group.difference.mean,
                signed,
            ),
            Column(
                f"± {confidence}",
                "half-width of the difference's interval. All rows together have "
                f"{100 * CONFIDENCE:.0f} % confidence, after any number of seeds",
                lambda group: group.difference and group.difference.half_width(self.error),
                "{:.4f}".format,
            ),
            Column(
                "in %",
                "",
                lambda group: (
                    group.difference and group.difference.mean / group.difference.baseline
                ),
                lambda share: signed(100 * share, 2),
            ),
            Column("verdict", "; ".join(meanings), lambda group: group.verdict),
            Column(LOSSES[self.loss_key], "", lambda group: group.loss_text),
        ]

    def answer(self) -> str:
        """Return one sentence with the difference and the verdict of each group.

        If there is only one group, return its name.
        """
        base, *compared = self.results
        if not compared:
            return base.name
        results = "; ".join(f"{group.name} ({group.result})" for group in compared)
        loss = LOSSES[self.loss_key]
        return f"Against {base.name}, {loss}, margin ± {100 * self.margin:g} %: {results}."


def _compared_loss(runs: Sequence[RunRecord]) -> str:
    """Return the key of the loss that is compared, the first key in LOSSES that suits all runs.

    All finished runs must have the loss. Losses as served must have the same precision.
    """
    finished = [run for run in runs if not run.failure and not run.is_unfinished]
    served = {run.config.get("evaluate", {}).get("served") for run in finished}
    for key in LOSSES:
        is_comparable = key != "served_loss" or len(served) == 1
        if is_comparable and all(key in run.summary for run in finished):
            return key
    return LOSS_KEY


def _compare(
    group: Mapping[int, ComparedRun],
    losses: Mapping[int, float],
    base_losses: Mapping[int, float] | None,
    margin: float,
    error: float,
    *,
    held_out: bool,
) -> tuple[LossDifference | None, str]:
    """Return the loss difference between a group and the baseline, and the verdict.

    Return None and the reason if there is no difference, for example because a run of the group has
    failed. A failed run has no loss, and the mean over the other runs would make the group look
    better than it is.

    Args:
        group: The runs of the group by seed.
        losses: Compared loss by seed, without excluded runs.
        base_losses: Losses of the baseline, or None if the group is the baseline.
        margin: Largest difference that counts as equivalent, as a share of the baseline's loss.
        error: Error probability of the verdict.
        held_out: True if the losses are held-out losses.
    """
    if failed := sum(bool(compared.run.failure) for compared in group.values()):
        return None, f"broke off: {plural(failed, 'run')} of {len(group)}"
    if base_losses is None:
        return None, "baseline"
    by_seed = {seed: losses[seed] - base_losses[seed] for seed in losses if seed in base_losses}
    if not held_out:
        # The loss at the end is a mean over steps, and a branch may have fewer of these steps than
        # the baseline's run. `loss_gap` is computed from steps that both runs have.
        gaps = {seed: group[seed].loss_gap for seed in by_seed}
        by_seed = {seed: gap for seed, gap in gaps.items() if gap is not None}
    if not by_seed:
        return None, "not compared"
    baseline = statistics.fmean(base_losses[seed] for seed in by_seed)
    difference = LossDifference(by_seed, baseline)
    if difference.half_width(error) is None:
        return difference, f"no verdict: {fewest_seeds(error)} seeds are needed"
    return difference, difference.verdict(margin, error)


def _why_excluded(compared: ComparedRun, loss: float | None, *, held_out: bool) -> str | None:
    """Return the reason why a run is excluded, as a clause for a note.

    Return None if the run is included. `loss` is the compared loss of the run, or None if the loss
    is not known. `held_out` is true if `loss` is a held-out loss.
    """
    run = compared.run
    if run.failure or run.is_unfinished or loss is None:
        return "because they have not finished"
    if held_out and not run.is_evaluated_at_end:
        return "because they were not evaluated after their last step"
    if held_out and not same_held_out(compared.base, run):
        return "because they were evaluated on other data than the baseline"
    return None
