"""What a comparison comes to: where each run stands beside the baseline, its verdict, and what to note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pretrain.compare.differences import Gap
from pretrain.compare.fairness import ends_of, loss_differences, same_held_out, why_not_paired
from pretrain.metrics.run_record import RunRecord

# Of runs in their order: ten colours that are told apart (Tableau's, and plotly's own), then the same with another line.
COLOURS = (
    "#1F77B4",
    "#FF7F0E",
    "#2CA02C",
    "#D62728",
    "#9467BD",
    "#8C564B",
    "#E377C2",
    "#7F7F7F",
    "#BCBD22",
    "#17BECF",
)
DASHES = ("solid", "dash", "dot", "dashdot")
# nats a token that a run may end above its baseline and still count as equal, unless `--gate` says
# otherwise
TOLERANCE = 0.01


@dataclass(frozen=True)
class Standing:
    """A run beside the baseline. None is what is not known, or does not compare."""

    run: RunRecord
    base: RunRecord
    label: str  # no two runs of a comparison share one
    colour: str
    dash: str  # of its line, by plotly's names
    tolerance: float
    comparisons: int  # that are made with the baseline, this one among them

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
        return (
            None
            if self.is_baseline or self.not_paired
            else Gap.over(ends_of(self.differences), self.comparisons)
        )

    @property
    def verdict(self) -> str:
        if self.run.broke_off:
            return self.run.broke_off
        return (
            self.gap.place(self.tolerance)
            if self.gap
            else "baseline"
            if self.is_baseline
            else "not paired"
        )

    @property
    def held_out_gap(self) -> float | None:
        """The held-out loss minus the baseline's, where both were evaluated last in the same step, on the same packs."""
        if self.is_baseline or self.not_paired or not same_held_out(self.base, self.run):
            return None
        (ours, our_losses), (theirs, their_losses) = (
            run.curve("held_out_loss") for run in (self.run, self.base)
        )
        at_one_step = len(ours) and len(theirs) and ours[-1] == theirs[-1]
        return float(our_losses[-1] - their_losses[-1]) if at_one_step else None

    @property
    def speedup(self) -> float | None:
        """Over the baseline's, on a machine of the same kind: else a machine's speed would pass for a precision's. Versions of
        software may differ, as what they change may be what is compared."""
        ours, theirs = own_speed(self.run), own_speed(self.base)
        known = (
            ours
            and theirs
            and not self.is_baseline
            and machine_of(self.base) == machine_of(self.run)
        )
        return ours / theirs if known else None


@dataclass(frozen=True)
class RunComparison:
    standings: list[Standing]
    tolerance: float

    @classmethod
    def over(cls, runs: Sequence[RunRecord], tolerance: float = TOLERANCE) -> RunComparison:
        """`runs`: comparable, the baseline first."""
        standings = []
        for place, (run, label) in enumerate(
            zip(runs, unique_names([run.name for run in runs], runs), strict=True)
        ):
            dash = DASHES[place // len(COLOURS) % len(DASHES)]
            standings.append(
                Standing(
                    run,
                    runs[0],
                    label,
                    COLOURS[place % len(COLOURS)],
                    dash,
                    tolerance,
                    len(runs) - 1,
                )
            )
        return cls(standings, tolerance)

    @property
    def baseline(self) -> Standing:
        return self.standings[0]

    @property
    def runs(self) -> list[RunRecord]:
        return [each.run for each in self.standings]

    def answer(self) -> str:
        """The verdicts, each with its runs; of a run alone its name."""
        others = {each.label: each.verdict for each in self.standings[1:]}
        base = self.baseline.label
        return (
            f"Against {base}, ± {self.tolerance:g} nats: {by_verdict(others)}." if others else base
        )

    def notes(self, *, over_seeds: bool = False) -> list[str]:
        """What has to be said beside the tables. `over_seeds`: runs are paired in a table of their own."""
        base, runs, notes = self.baseline.label, self.runs, []
        for each in self.standings:
            if each.run.broke_off:
                why = each.run.summary.get("halted", "its figures stand for no end")
                notes.append(f"{each.label} {each.run.broke_off}: {why}")
            elif each.not_paired and not over_seeds:
                notes.append(f"{each.label} is not paired with {base}: {each.not_paired}.")
            changes = [f"`{key}` was {values}" for key, values in each.run.changed_settings.items()]
            notes += (
                [f"{each.label} was not trained by one recipe: {'; '.join(changes)}."]
                if changes
                else []
            )
        if any(run.side_by_side for run in runs):
            notes.append("No speed stands beside a run that shared its machine with others.")
        evaluated = [run for run in runs if "held_out_loss" in run.summary]
        if not all(same_held_out(evaluated[0], run) for run in evaluated[1:]):
            notes.append(
                "Held-out losses are of different text, so they do not say which run is better."
            )
        return notes


def unique_names(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """What each of `runs` is called, or its whole path where two are called the same."""
    return [
        name if names.count(name) == 1 else str(run.path)
        for name, run in zip(names, runs, strict=True)
    ]


def by_verdict(verdicts: Mapping[str, str]) -> str:
    """Each verdict and what has it, from verdicts by name."""
    names = {
        verdict: [name for name, own in verdicts.items() if own == verdict]
        for verdict in verdicts.values()
    }
    return "; ".join(f"{verdict}: {', '.join(those)}" for verdict, those in names.items())


def own_speed(run: RunRecord) -> float | None:
    """Tokens/s that the hardware computed for this run alone; None where it was emulated or shared its machine."""
    return None if run.side_by_side or run.emulated else run.summary.get("tokens_per_second")


def machine_of(run: RunRecord) -> str:
    """What a run's speed depends on beside settings and versions: "2 × NVIDIA H200", and where there are no GPUs the cores."""
    processes, name = run.devices
    on_cpu = (
        f", {run.environment.get('cpu_cores')} cores, {run.environment.get('system')}"
        if name == "CPU"
        else ""
    )
    return f"{processes} × {name}{on_cpu}"
