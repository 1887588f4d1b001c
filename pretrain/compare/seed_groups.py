"""Comparison over seeds: runs grouped by everything but the seed, and compared seed by seed."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foundation.units import UNKNOWN, plural
from pretrain.compare.columns import Column, as_text, column_of_part, signed
from pretrain.compare.comparison import by_verdict, unique_names
from pretrain.compare.differences import (
    CONFIDENCE,
    EQUIVALENCE,
    FEWEST_SEEDS,
    MARGIN,
    SeedDifference,
)
from pretrain.compare.fairness import ends_of, loss_differences, recipe_of, same_held_out
from pretrain.metrics.run_record import LOSS_KEY, RunRecord
from pretrain.settings.config import settings_without

# Keys, and prefixes of keys, in which runs of one group may differ. The fingerprint of the packs is
# compared instead of their location.
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
    """Return runs by group name and seed, in the order of the groups' first runs.

    The runs of a group are the same training except for the seed. If a training occurs twice with
    the same seed, the names of the folders without the seed separate the groups. A group is named
    after its first run without the seed.
    """
    keys = [(tuple(_settings(run).items()), run.config["seed"]) for run in runs]
    repeated = {training for (training, _), number in Counter(keys).items() if number > 1}
    groups: dict[tuple[Any, str], dict[int, RunRecord]] = {}
    for run, (training, seed) in zip(runs, keys, strict=True):
        folder = str(run.path.parent / _without_seed(run)) if training in repeated else ""
        groups.setdefault((training, folder), {})[seed] = run
    first_runs = [next(iter(group.values())) for group in groups.values()]
    names = [_without_seed(run) or run.name for run in first_runs]
    return dict(zip(unique_names(names, first_runs), groups.values(), strict=True))


def _without_seed(run: RunRecord) -> str:
    """Return the name of a run without a part such as "seed=3"."""
    return _SEED_IN_A_NAME.sub("", run.name).strip("-_.,")


def _settings(run: RunRecord) -> dict[str, str]:
    """Return the properties that the runs of a group share, as text by key."""
    values = {
        **settings_without(recipe_of(run), _WITHIN),
        "precision": run.precision,
        "backend": run.backend,
        "data.fingerprint": run.data_fingerprint,
        **run.source_config,
        **run.changed_settings,
    }
    return {key: as_text(value) for key, value in values.items()}


@dataclass(frozen=True)
class GroupResult:
    """A group of runs that differ only in their seed, compared with the baseline's group."""

    name: str
    # Runs by seed.
    runs: dict[int, RunRecord]
    # Losses at the end by seed, of the runs that count.
    losses: dict[int, float]
    # None for the baseline, without a common seed, and if a run has failed.
    difference: SeedDifference | None
    verdict: str

    @property
    def level(self) -> str:
        """Return mean and standard deviation of the losses over seeds.

        Only seeds of the difference count, if there is one.
        """
        seeds = self.difference.by_seed if self.difference else self.losses
        values = [loss for seed, loss in self.losses.items() if seed in seeds]
        if not values:
            return UNKNOWN
        deviation = f" (sd {statistics.stdev(values):.4f})" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.4f}{deviation}"


@dataclass(frozen=True)
class SeedComparison:
    """Groups of seeds compared with the first group."""

    results: list[GroupResult]
    # Losses are held-out losses. Otherwise they are means of the last training losses.
    held_out: bool
    # Share of the baseline's loss.
    margin: float
    # Names of runs that do not count, by reason.
    excluded: dict[str, list[str]]

    @classmethod
    def over(cls, runs: Sequence[RunRecord], margin: float = MARGIN) -> SeedComparison:
        """Compare runs that are comparable except for their seeds with the group of the first."""
        groups = grouped(runs)
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
                comparisons=len(groups) - 1,
            )
            results.append(GroupResult(name, group, losses, difference, verdict))
        return cls(results, held_out, margin, excluded)

    @property
    def baseline(self) -> GroupResult:
        """Return the group that the others are compared with."""
        return self.results[0]

    @property
    def compared(self) -> list[GroupResult]:
        """Return all groups except the baseline."""
        return self.results[1:]

    def columns(self) -> list[Column]:
        """Return the columns of the table over seeds. Its rows are GroupResults."""
        base = self.baseline.name
        confidence = f"{100 * CONFIDENCE:.0f} %"
        difference_column = partial(column_of_part, "difference")
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
                lambda group: group.level,
            ),
            difference_column(
                f"minus {base}",
                f"a run's loss minus that of the {base} run with its seed; mean over seeds, in "
                "nats per token",
                lambda difference: difference.mean,
                signed,
            ),
            difference_column(
                f"± {confidence}",
                f"half of its {confidence} interval over seeds, by Student's t; fewer than "
                f"{FEWEST_SEEDS} seeds have none",
                lambda difference: difference.half_width(),
                "{:.4f}".format,
            ),
            difference_column(
                "in %",
                "",
                lambda difference: difference.mean / difference.baseline,
                lambda share: f"{signed(100 * share, 2)}%",
            ),
            Column(
                "verdict",
                f"equivalent: the {100 * EQUIVALENCE:.0f} % interval lies within ± "
                f"{100 * self.margin:g} % of {base}'s loss (two one-sided t tests at 5 %, each row "
                f"by itself). Worse, better: a {confidence} interval for all rows together "
                "(Bonferroni) lies on one side of zero; within the margin, if the first holds too; "
                "by more than the margin, if the whole interval lies beyond it",
                lambda group: group.verdict,
            ),
        ]

    def columns_by_seed(self) -> list[Column]:
        """Return columns with each group's difference from the baseline, one column per seed."""

        def seed_column(seed: int) -> Column:
            return Column(
                f"seed {seed}", "", lambda group: group.difference.by_seed.get(seed), signed
            )

        name = Column(f"minus {self.baseline.name}", "", lambda group: group.name, is_text=True)
        seeds = sorted({seed for group in self.results for seed in group.runs})
        return [name, *map(seed_column, seeds)]

    def notes(self) -> list[str]:
        """Return a note for each reason why runs do not count."""
        return [
            f"Not counted, {reason}: {', '.join(names)}." for reason, names in self.excluded.items()
        ]

    def answer(self) -> str:
        """Return the verdicts with their groups in one sentence."""
        seeds = plural(len(self.baseline.losses), "seed")
        verdicts = by_verdict({group.name: group.verdict for group in self.compared})
        return (
            f"Against {self.baseline.name} over {seeds}, within {100 * self.margin:g} %: "
            f"{verdicts}."
        )


def _compare(
    group: Mapping[int, RunRecord],
    losses: Mapping[int, float],
    base: GroupResult | None,
    *,
    held_out: bool,
    margin: float,
    comparisons: int,
) -> tuple[SeedDifference | None, str]:
    """Return the difference of a group from the baseline, and its verdict.

    If a run of the group has failed, there is no difference, because the mean of the other runs
    would make the group look too good. `base` is None for the baseline itself.
    """
    if failed := sum(bool(run.broke_off) for run in group.values()):
        return None, f"broke off: {plural(failed, 'run')} of {len(group)}"
    if base is None:
        return None, "baseline"
    difference = SeedDifference.of(losses, base.losses)
    if difference is None:
        return None, "no seed in common"
    if not held_out:
        # A branch may have fewer steps than the baseline's run. Only common steps count.
        gaps = {seed: loss_differences(base.runs[seed], group[seed]) for seed in difference.by_seed}
        by_seed = {seed: float(ends_of(gap).mean()) for seed, gap in gaps.items() if len(gap[0])}
        if not by_seed:
            return None, "no step in common"
        difference = replace(difference, by_seed=by_seed)
    if difference.half_width() is None:
        return difference, f"{plural(len(difference.by_seed), 'seed')}: no interval"
    return difference, difference.verdict(margin, comparisons)


def _why_excluded(
    run: RunRecord, loss: float | None, base_run: RunRecord | None, *, held_out: bool
) -> str | None:
    """Return why the loss of a run does not count, else None.

    `base_run` is the baseline's run with the same seed.
    """
    if run.broke_off or run.is_unfinished or loss is None:
        return "because they have not finished"
    if held_out and run.when_evaluated:
        return "because they are not evaluated at their end"
    if held_out and base_run and not same_held_out(base_run, run):
        return "because they were evaluated on other data than the baseline's run of the seed"
    if not held_out and base_run and base_run.data_fingerprint != run.data_fingerprint:
        return "because they were trained on other data than the baseline's run of the seed"
    return None
