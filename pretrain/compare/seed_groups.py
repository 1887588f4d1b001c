"""Runs of several seeds as one comparison: grouped by all but the seed, each group held against the baseline's, seed by seed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
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

# Keys in which runs of one group may differ: seed, names, logging, saving, a microbatch found by trying, and where packs lie,
# whose fingerprint is compared instead.
_WITHIN = (
    "seed",
    "name",
    "run_dir",
    "log.",
    "checkpoint.",
    "health.",
    "parity",
    "batch.microbatch",
)
_WITHIN += ("evaluate.samples", "data.packs", "data.source", "data.tokenizer")
_SEED_IN_A_NAME = re.compile(r"(?:^|[-_.,])seed[=_-]?\d+(?=$|[-_.,])")


def grouped(runs: Sequence[RunRecord]) -> dict[str, dict[int, RunRecord]]:
    """Runs by group and seed, in the order of the groups' first runs. A group is of one training, and where a seed of it is there
    twice, of folders that are called alike. It is called as its first run without the seed."""
    groups: dict[tuple[Any, str], dict[int, RunRecord]] = {}
    trainings = [tuple(_settings(run).items()) for run in runs]
    pairs = [(training, recipe_of(run).seed) for run, training in zip(runs, trainings, strict=True)]
    repeated = {training for training, seed in pairs if pairs.count((training, seed)) > 1}
    for run, (training, seed) in zip(runs, pairs, strict=True):
        folder = str(run.path.parent / _without_seed(run)) if training in repeated else ""
        groups.setdefault((training, folder), {})[seed] = run
    firsts = [next(iter(group.values())) for group in groups.values()]
    names = [_without_seed(first) or first.name for first in firsts]
    return dict(zip(unique_names(names, firsts), groups.values(), strict=True))


def _without_seed(run: RunRecord) -> str:
    return _SEED_IN_A_NAME.sub("", run.name).strip("-_.,")


def _settings(run: RunRecord) -> dict[str, str]:
    """What runs of one group share, as text: settings, data, and what computed the products."""
    found = {
        "precision": run.precision,
        "backend": run.backend,
        "data.fingerprint": run.data_fingerprint,
    }
    flat = (
        settings_without(recipe_of(run), _WITHIN) | found | run.source_config | run.changed_settings
    )
    return {key: as_text(value) for key, value in flat.items()}


@dataclass(frozen=True)
class GroupResult:
    """Runs that differ in their seed alone, beside the baseline's. None is what is not known."""

    name: str
    runs: dict[int, RunRecord]  # by seed
    losses: dict[int, float]  # at the end, by seed
    # None of the baseline, where no seed is common, and where a run broke off
    difference: SeedDifference | None
    verdict: str

    @property
    def level(self) -> str:
        """Mean and spread over seeds of the losses that the difference is of; without one, of all."""
        by_seed = self.difference.by_seed if self.difference else self.losses
        values = [loss for seed, loss in self.losses.items() if seed in by_seed]
        spread = f" (sd {statistics.stdev(values):.4f})" if values[1:] else ""
        return f"{statistics.fmean(values):.4f}{spread}" if values else UNKNOWN


@dataclass(frozen=True)
class SeedComparison:
    """Groups of seeds against the first one."""

    results: list[GroupResult]
    held_out: bool  # whether losses are held-out ones; else means of the last training losses
    margin: float  # of the baseline's loss
    left_out: dict[str, list[str]]  # why runs do not count, and which

    @classmethod
    def over(cls, runs: Sequence[RunRecord], margin: float = MARGIN) -> SeedComparison:
        """`runs`: comparable but for their seeds, the baseline first."""
        groups = grouped(runs)
        base = next(iter(groups.values()))
        ended = [run for run in runs if not run.broke_off and not run.is_unfinished]
        held_out = all("held_out_loss" in run.summary for run in ended)
        results, left_out = [], {}
        for name, group in groups.items():
            losses, broken_off = {}, sum(bool(run.broke_off) for run in group.values())
            for seed, run in group.items():
                loss = run.summary.get("held_out_loss" if held_out else LOSS_KEY)
                if why := _why_left_out(run, loss, base.get(seed), held_out=held_out):
                    left_out.setdefault(why, []).append(run.name)
                else:
                    losses[seed] = loss
            # Where a run of a group broke off, a mean of the others would flatter it.
            difference = (
                SeedDifference.of(losses, results[0].losses) if results and not broken_off else None
            )
            verdict = f"no {'step' if difference else 'seed'} in common" if results else "baseline"
            if difference and not held_out:  # over the same steps, of which a branch may have fewer
                steps = {
                    seed: loss_differences(base[seed], group[seed]) for seed in difference.by_seed
                }
                paired = {
                    seed: float(ends_of(each).mean())
                    for seed, each in steps.items()
                    if len(each[0])
                }
                difference = SeedDifference(paired, difference.baseline) if paired else None
            if broken_off:
                verdict = f"broke off: {plural(broken_off, 'run')} of {len(group)}"
            elif difference:
                verdict = (
                    difference.verdict(margin, len(groups) - 1)
                    or f"{plural(len(difference.by_seed), 'seed')}: no interval"
                )
            results.append(GroupResult(name, group, losses, difference, verdict))
        return cls(results, held_out, margin, left_out)

    @property
    def baseline(self) -> GroupResult:
        return self.results[0]

    @property
    def others(self) -> list[GroupResult]:
        return self.results[1:]

    def columns(self) -> list[Column]:
        base = self.baseline.name
        interval, narrow = (f"{100 * confidence:.0f} %" for confidence in (CONFIDENCE, EQUIVALENCE))

        def of(
            title: str,
            meaning: str,
            value: Callable[[SeedDifference], Any],
            form: Callable[[Any], str],
        ) -> Column:
            return Column(
                title,
                meaning,
                lambda each: value(each.difference) if each.difference else None,
                form,
            )

        paired = f"a run's loss minus that of the {base} run with its seed; the mean over seeds, in nats a token"
        over_seeds = f"half of its {interval} interval over seeds, by Student's t; fewer than {FEWEST_SEEDS} seeds have none"
        verdict = (
            f"equivalent: the {narrow} interval lies within ± {100 * self.margin:g} % of {base}'s loss (two one-sided t tests at "
            f"5 %, each row by itself). Worse, better: a {interval} interval for all rows together "
            "(Bonferroni) lies on one side of zero; within the margin, if the first holds too; by "
            "more than the margin, if the whole interval lies beyond it"
        )
        return [
            Column("runs", "", lambda each: each.name, words=True),
            Column(
                "seeds",
                "",
                lambda each: len(each.difference.by_seed if each.difference else each.losses),
            ),
            Column(
                "held-out loss" if self.held_out else "loss at the end", "", lambda each: each.level
            ),
            of(f"minus {base}", paired, lambda difference: difference.mean, signed),
            of(
                f"± {interval}",
                over_seeds,
                lambda difference: difference.half_width(),
                "{:.4f}".format,
            ),
            of(
                "in %",
                "",
                lambda difference: difference.mean / difference.baseline,
                lambda share: f"{signed(100 * share, 2)}%",
            ),
            Column("verdict", verdict, lambda each: each.verdict),
        ]

    def columns_by_seed(self) -> list[Column]:
        """Each group's difference to the baseline, a column a seed."""
        seeds = sorted({seed for each in self.results for seed in each.runs})
        name = Column(f"minus {self.baseline.name}", "", lambda each: each.name, words=True)
        return [
            name,
            *(
                Column(f"seed {s}", "", lambda each, s=s: each.difference.by_seed.get(s), signed)
                for s in seeds
            ),
        ]

    def notes(self) -> list[str]:
        return [f"Left out, {why}: {', '.join(names)}." for why, names in self.left_out.items()]

    def answer(self) -> str:
        base, seeds = self.baseline.name, plural(len(self.baseline.losses), "seed")
        verdicts = by_verdict({each.name: each.verdict for each in self.others})
        return f"Against {base} over {seeds}, within {100 * self.margin:g} %: {verdicts}."


def _why_left_out(
    run: RunRecord, loss: float | None, twin: RunRecord | None, *, held_out: bool
) -> str | None:
    """Why the end of a run does not count; None where it does. `twin`: the baseline's run of its seed."""
    if run.broke_off or run.is_unfinished or loss is None or not math.isfinite(loss):
        return "as they came to no end"
    if held_out and run.when_evaluated:
        return "as they are not evaluated at their end"
    if twin is not None and not (
        same_held_out(twin, run) if held_out else twin.data_fingerprint == run.data_fingerprint
    ):
        return f"as they were {'evaluated' if held_out else 'trained'} on other text than the baseline's run of the seed"
    return None
