"""Comparison over seeds: runs grouped by everything but the seed, and compared seed by seed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.units import UNKNOWN, plural
from pretrain.compare.columns import Column, as_text, signed
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
    trainings = [tuple(_settings(run).items()) for run in runs]
    seeds = [recipe_of(run).seed for run in runs]
    pairs = list(zip(trainings, seeds, strict=True))
    repeated = {training for training, seed in pairs if pairs.count((training, seed)) > 1}
    groups: dict[tuple[Any, str], dict[int, RunRecord]] = {}
    for run, training, seed in zip(runs, trainings, seeds, strict=True):
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
    observed = {
        "precision": run.precision,
        "backend": run.backend,
        "data.fingerprint": run.data_fingerprint,
    }
    settings = settings_without(recipe_of(run), _WITHIN)
    values = settings | observed | run.source_config | run.changed_settings
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

    @property
    def number_of_seeds(self) -> int:
        """Return the number of seeds of the difference, or of the losses without a difference."""
        return len(self.difference.by_seed if self.difference else self.losses)


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
            losses = {}
            for seed, run in group.items():
                loss = run.summary.get("held_out_loss" if held_out else LOSS_KEY)
                reason = _why_excluded(run, loss, base_runs.get(seed), held_out=held_out)
                if reason:
                    excluded.setdefault(reason, []).append(run.name)
                else:
                    losses[seed] = loss
            difference = None
            verdict = "baseline"
            if results:
                difference, verdict = _compare(
                    group,
                    losses,
                    base_runs,
                    results[0].losses,
                    held_out=held_out,
                    margin=margin,
                    comparisons=len(groups) - 1,
                )
            elif failed := _failed(group):
                verdict = failed
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
        equivalence = f"{100 * EQUIVALENCE:.0f} %"
        paired = (
            f"a run's loss minus that of the {base} run with its seed; mean over seeds, in nats "
            "per token"
        )
        interval = (
            f"half of its {confidence} interval over seeds, by Student's t; fewer than "
            f"{FEWEST_SEEDS} seeds have none"
        )
        verdict = (
            f"equivalent: the {equivalence} interval lies within ± {100 * self.margin:g} % of "
            f"{base}'s loss (two one-sided t tests at 5 %, each row by itself). Worse, better: a "
            f"{confidence} interval for all rows together (Bonferroni) lies on one side of zero; "
            "within the margin, if the first holds too; by more than the margin, if the whole "
            "interval lies beyond it"
        )
        return [
            Column("runs", "", lambda group: group.name, is_text=True),
            Column("seeds", "", lambda group: group.number_of_seeds),
            Column(
                "held-out loss" if self.held_out else "loss at the end",
                "",
                lambda group: group.level,
            ),
            _difference_column(f"minus {base}", paired, lambda difference: difference.mean, signed),
            _difference_column(
                f"± {confidence}",
                interval,
                lambda difference: difference.half_width(),
                "{:.4f}".format,
            ),
            _difference_column(
                "in %",
                "",
                lambda difference: difference.mean / difference.baseline,
                lambda share: f"{signed(100 * share, 2)}%",
            ),
            Column("verdict", verdict, lambda group: group.verdict),
        ]

    def columns_by_seed(self) -> list[Column]:
        """Return columns with each group's difference from the baseline, one column per seed."""
        seeds = sorted({seed for group in self.results for seed in group.runs})
        name = Column(f"minus {self.baseline.name}", "", lambda group: group.name, is_text=True)
        columns = [name]
        for seed in seeds:

            def get(group: GroupResult, seed: int = seed) -> float | None:
                return group.difference.by_seed.get(seed)

            columns.append(Column(f"seed {seed}", "", get, signed))
        return columns

    def notes(self) -> list[str]:
        """Return a note for each reason why runs do not count."""
        return [
            f"Not counted, {reason}: {', '.join(names)}." for reason, names in self.excluded.items()
        ]

    def answer(self) -> str:
        """Return the verdicts with their groups in one sentence."""
        base = self.baseline.name
        seeds = plural(len(self.baseline.losses), "seed")
        verdicts = by_verdict({group.name: group.verdict for group in self.compared})
        return f"Against {base} over {seeds}, within {100 * self.margin:g} %: {verdicts}."


def _compare(
    group: Mapping[int, RunRecord],
    losses: Mapping[int, float],
    base_runs: Mapping[int, RunRecord],
    base_losses: Mapping[int, float],
    *,
    held_out: bool,
    margin: float,
    comparisons: int,
) -> tuple[SeedDifference | None, str]:
    """Return the difference of a group from the baseline, and its verdict.

    If a run of the group has failed, there is no difference, because the mean of the other runs
    would make the group look too good.
    """
    if failed := _failed(group):
        return None, failed
    difference = SeedDifference.of(losses, base_losses)
    if difference is None:
        return None, "no seed in common"
    if not held_out:
        difference = _over_common_steps(difference, group, base_runs)
        if difference is None:
            return None, "no step in common"
    verdict = difference.verdict(margin, comparisons)
    if verdict is None:
        verdict = f"{plural(len(difference.by_seed), 'seed')}: no interval"
    return difference, verdict


def _failed(group: Mapping[int, RunRecord]) -> str:
    """Return a verdict if runs of the group have failed, else ""."""
    number = sum(bool(run.broke_off) for run in group.values())
    return f"broke off: {plural(number, 'run')} of {len(group)}" if number else ""


def _over_common_steps(
    difference: SeedDifference,
    group: Mapping[int, RunRecord],
    base_runs: Mapping[int, RunRecord],
) -> SeedDifference | None:
    """Return the difference of training losses over the steps that both runs of a seed have.

    A branch may have fewer steps than the baseline. Return None without a common step.
    """
    by_seed = {}
    for seed in difference.by_seed:
        steps, values = loss_differences(base_runs[seed], group[seed])
        if len(steps):
            by_seed[seed] = float(ends_of((steps, values)).mean())
    return SeedDifference(by_seed, difference.baseline) if by_seed else None


def _difference_column(
    title: str,
    meaning: str,
    value: Callable[[SeedDifference], Any],
    form: Callable[[Any], str],
) -> Column:
    """Return a column of a group's difference, which is empty without a difference."""

    def get(group: GroupResult) -> Any:
        return value(group.difference) if group.difference else None

    return Column(title, meaning, get, form)


def _why_excluded(
    run: RunRecord, loss: float | None, base_run: RunRecord | None, *, held_out: bool
) -> str | None:
    """Return why the loss of a run does not count, else None.

    `base_run` is the baseline's run with the same seed.
    """
    if run.broke_off or run.is_unfinished or loss is None or not math.isfinite(loss):
        return "because they have not finished"
    if held_out and run.when_evaluated:
        return "because they are not evaluated at their end"
    if base_run is None:
        return None
    if held_out and not same_held_out(base_run, run):
        return "because they were evaluated on other data than the baseline's run of the seed"
    if not held_out and base_run.data_fingerprint != run.data_fingerprint:
        return "because they were trained on other data than the baseline's run of the seed"
    return None
