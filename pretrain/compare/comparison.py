"""What a comparison comes to: where each run stands beside the baseline, its verdict, the Pareto front, and what to note."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pretrain.compare.differences import FEWEST_STEPS, Gap
from pretrain.compare.fairness import (
    changes_in_words,
    keys_told_apart_by,
    loss_differences,
    of_one_text,
    option,
    same_held_out,
    same_packs,
    why_not_paired,
)
from pretrain.compare.figures import colour_of
from pretrain.metrics.run_record import LOSS_KEY, RunRecord

# Of runs that share a precision: ten colours that are told apart (Tableau's, and plotly's own).
CYCLE = ("#1F77B4", "#FF7F0E", "#2CA02C", "#D62728", "#9467BD", "#8C564B", "#E377C2", "#7F7F7F", "#BCBD22", "#17BECF")
TOLERANCE = 0.01  # nats a token that a run may end above its baseline and still count as equal, unless `--gate` says otherwise


@dataclass(frozen=True)
class Standing:
    """A run beside the baseline. None is what is not known, or does not compare."""

    run: RunRecord
    base: RunRecord
    label: str  # no two runs of a comparison share one
    colour: str  # of its precision; where all runs have one precision, of its own
    kind: int  # its place among the comparison's kinds of weights, options and varied settings: a line and a marker for each
    tolerance: float
    loss: float | None  # its last held-out loss; where some run of the comparison has none, the mean of its last training losses

    @property
    def is_baseline(self) -> bool:
        return self.run is self.base

    @cached_property
    def other_text(self) -> str | None:
        return why_not_paired(self.base, self.run)

    @property
    def not_paired(self) -> str | None:
        """Why there is no gap: other text, or the one or the other was broken off and came to no end."""
        if self.is_baseline or self.other_text:
            return self.other_text
        ends = (("it", self.run), ("the baseline", self.base))
        return next((f"{name} {run.broke_off}" for name, run in ends if run.broke_off), None)

    @cached_property
    def differences(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Steps, and losses minus the baseline's; None where they cannot be paired."""
        return None if self.other_text else loss_differences(self.base, self.run)

    @cached_property
    def gap(self) -> Gap | None:
        """The difference of the ends of the losses, paired by step; None of the baseline, and where `not_paired` says why."""
        return None if self.is_baseline or self.not_paired else Gap.at_end(self.differences[1])

    @property
    def verdict(self) -> str:
        if self.run.broke_off:
            return self.run.broke_off
        return self.gap.place(self.tolerance) if self.gap else "baseline" if self.is_baseline else "not paired"

    @property
    def where_it_ends(self) -> str:
        """Its name, and where it ends: "delayed +0.00420", "nvfp4 was halted at step 3"."""
        end = f"{self.gap.mean:+.5f}" if self.gap else f"({self.verdict})"
        return f"{self.label} {self.run.broke_off or end}"

    @property
    def held_out_gap(self) -> float | None:
        """The held-out loss minus the baseline's, where both were evaluated last in the same step, on the same packs."""
        if self.is_baseline or self.not_paired or not same_held_out(self.base, self.run):
            return None
        (ours, our_losses), (theirs, their_losses) = (run.held_out_curve() for run in (self.run, self.base))
        at_one_step = len(ours) and len(theirs) and ours[-1] == theirs[-1]
        return float(our_losses[-1] - their_losses[-1]) if at_one_step else None

    @property
    def shown_speed(self) -> float | None:
        """Tokens/s of an emulated run too, which is marked; None where it shared its machine."""
        return None if self.run.side_by_side else self.run.summary.get("tokens_per_second")

    @property
    def speed(self) -> float | None:
        """Tokens/s that the hardware computed for this run alone; None where it was emulated or shared."""
        return own_speed(self.run)

    @property
    def speedup(self) -> float | None:
        """Over the baseline's, on a machine of the same kind."""
        ours, theirs = self.speed, own_speed(self.base)
        known = ours and theirs and not self.is_baseline and on_one_kind_of_machine((self.base, self.run))
        return ours / theirs if known else None


@dataclass(frozen=True)
class RunComparison:
    standings: list[Standing]
    tolerance: float
    by_held_out: bool  # every run has a held-out loss, so that this is what they are ranked by
    same_text: bool  # whether the losses that runs are ranked by are of the same text

    @classmethod
    def over(cls, runs: Sequence[RunRecord], tolerance: float = TOLERANCE) -> RunComparison:
        """`runs`: comparable, the baseline first."""
        by_held_out = all("held_out_loss" in run.summary for run in runs)
        same_text = of_one_text(runs) if by_held_out else all(same_packs(runs[0], run) for run in runs)
        key = "held_out_loss" if by_held_out else LOSS_KEY
        labels, kinds, colours = unique_names(runs), kinds_of(runs), [colour_of(run.precision) for run in runs]
        if len(runs) > 1 and len(set(colours)) == 1:
            colours = [CYCLE[place % len(CYCLE)] for place in range(len(runs))]
        standings = [
            Standing(run, runs[0], label, colour, kind, tolerance, run.summary.get(key))
            for run, label, colour, kind in zip(runs, labels, colours, kinds, strict=True)
        ]
        return cls(standings, tolerance, by_held_out, same_text)

    @property
    def baseline(self) -> Standing:
        return self.standings[0]

    @property
    def runs(self) -> list[RunRecord]:
        return [each.run for each in self.standings]

    @property
    def paired(self) -> list[Standing]:
        return [each for each in self.standings if each.gap is not None]

    def answer(self) -> str:
        """The verdicts, each with its runs, and the run that ends lowest."""
        others = {each.label: each.verdict for each in self.standings[1:]}
        parts = [f"Against {self.baseline.label}, ± {self.tolerance:g} nats: {by_verdict(others)}."] if others else []
        ended = [each for each in self.standings if not each.run.broke_off and math.isfinite(each.loss or math.nan)]
        if ended and self.same_text:
            best = min(ended, key=lambda each: each.loss)
            loss = "held-out loss" if self.by_held_out else "training loss"
            parts.append(f"Lowest {loss}: {best.label}, {best.loss:.4f}{best.run.when_evaluated}.")
        return " ".join(parts) or "No run has come to a loss that compares."

    def notes(self, *, over_seeds: bool = False) -> list[str]:
        """What has to be said beside the tables. `over_seeds`: runs are paired in a table of their own."""
        base, runs, notes = self.baseline.label, self.runs, []
        for each in self.standings:
            if each.run.broke_off:
                why = each.run.summary.get("halted", "its figures stand for no end")
                notes.append(f"{each.label} {each.run.broke_off}: {why}")
            elif each.not_paired and not over_seeds:
                notes.append(f"{each.label} is not paired with {base}: {each.not_paired}.")
            if changes := changes_in_words(each.run):
                notes.append(f"{each.label} was not trained by one recipe: {changes}.")
        if any(not each.gap.has_interval for each in self.paired) and not over_seeds:
            notes.append(f"Too few steps: an error and an interval need {FEWEST_STEPS}. Without an interval the mean is judged.")
        if any(run.emulated for run in runs):
            notes.append("(emulated): computed in software; the speed says nothing of hardware that has the precision.")
        if any(run.side_by_side for run in runs):
            notes.append("No speed stands beside a run that shared its machine with others.")
        if not of_one_text([run for run in runs if "held_out_loss" in run.summary]):
            notes.append("Held-out losses are of different text, so they do not say which run is better.")
        return notes


def unique_names(runs: Sequence[RunRecord]) -> list[str]:
    """Each run's folder, or its whole path where two folders are called the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def kinds_of(runs: Sequence[RunRecord]) -> list[int]:
    """Numbers, equal where runs have the same kind of weights, options and varied settings, whatever their precision."""
    keys = ["weights", *(key for key in keys_told_apart_by(runs) if not key.startswith("data."))]
    kinds = [tuple(str(option(run, key)) for key in keys) for run in runs]
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    return [places[kind] for kind in kinds]


def by_verdict(verdicts: Mapping[str, str]) -> str:
    """Each verdict and what has it, from verdicts by name."""
    names: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        names.setdefault(verdict, []).append(name)
    return "; ".join(f"{verdict}: {', '.join(those)}" for verdict, those in names.items())


def own_speed(run: RunRecord) -> float | None:
    return None if run.side_by_side or run.emulated else run.summary.get("tokens_per_second")


def machine_of(run: RunRecord) -> str:
    """What a run's speed depends on beside settings and versions: "2 × NVIDIA H200", and where there are no GPUs the cores."""
    processes, name = run.devices
    on_cpu = f", {run.environment.get('cpu_cores')} cores, {run.environment.get('system')}" if name == "CPU" else ""
    return f"{processes} × {name}{on_cpu}"


def on_one_kind_of_machine(runs: Iterable[RunRecord]) -> bool:
    """Whether speeds may be divided: else a machine's speed would pass for a precision's. Versions of software may differ, as
    what they change may be what is compared."""
    return len(set(map(machine_of, runs))) == 1
