"""Comparison of single runs with a baseline: differences, verdicts, and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pretrain.compare.differences import Gap
from pretrain.compare.fairness import ends_of, loss_differences, same_held_out, why_not_paired
from pretrain.metrics.run_record import RunRecord

# Colours of runs in their order: ten colours that are easy to distinguish (Tableau's and plotly's).
# The next ten runs have the same colours with another dash.
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
# Default of `--gate`: nats per token by which a run may end above its baseline and still pass.
TOLERANCE = 0.01


@dataclass(frozen=True)
class ComparedRun:
    """A run compared with the baseline. Properties are None if they are unknown."""

    run: RunRecord
    base: RunRecord
    # Name of the run, unique within a comparison.
    label: str
    colour: str
    # Dash of the run's line, by plotly's names.
    dash: str
    tolerance: float
    # Number of runs that are compared with the baseline, this one included.
    comparisons: int

    @property
    def is_baseline(self) -> bool:
        """Return True if this run is the baseline."""
        return self.run is self.base

    @cached_property
    def pairing_obstacle(self) -> str | None:
        """Return why the run's steps cannot be paired with the baseline's, else None."""
        return why_not_paired(self.base, self.run)

    @property
    def not_paired(self) -> str | None:
        """Return why there is no difference at the end, or None if there is one.

        The steps cannot be paired, or one of the two runs has failed.
        """
        if self.is_baseline or self.pairing_obstacle:
            return self.pairing_obstacle
        if self.run.broke_off:
            return f"it {self.run.broke_off}"
        if self.base.broke_off:
            return f"the baseline {self.base.broke_off}"
        return None

    @cached_property
    def differences(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return steps, and losses minus the baseline's. Return None if they cannot be paired."""
        return None if self.pairing_obstacle else loss_differences(self.base, self.run)

    @cached_property
    def gap(self) -> Gap | None:
        """Return the difference at the end of the run, paired by step.

        Return None for the baseline and if `not_paired` gives a reason.
        """
        if self.is_baseline or self.not_paired or self.differences is None:
            return None
        return Gap.over(ends_of(self.differences), self.comparisons)

    @property
    def verdict(self) -> str:
        """Return the verdict: "within", "above", "below", "cannot tell", or why there is none."""
        if self.run.broke_off:
            return self.run.broke_off
        if self.gap:
            return self.gap.verdict(self.tolerance)
        return "baseline" if self.is_baseline else "not paired"

    @property
    def held_out_gap(self) -> float | None:
        """Return the held-out loss minus the baseline's.

        Return None unless both were last evaluated after the same step on the same packs.
        """
        if self.is_baseline or self.not_paired or not same_held_out(self.base, self.run):
            return None
        steps, differences = loss_differences(self.base, self.run, "held_out_loss")
        last_steps = {run.last_evaluation.get("step") for run in (self.base, self.run)}
        return float(differences[-1]) if last_steps == set(steps[-1:]) else None

    @property
    def speedup(self) -> float | None:
        """Return the speed divided by the baseline's, on the same kind of machine, else None.

        Otherwise the speed of a machine would be attributed to a precision. Software versions may
        differ, because their effect may be the subject of the comparison.
        """
        if self.is_baseline or machine_of(self.base) != machine_of(self.run):
            return None
        return speed_ratio(self.base, self.run)


@dataclass(frozen=True)
class RunComparison:
    """Runs compared with the first of them."""

    compared_runs: list[ComparedRun]
    tolerance: float

    @classmethod
    def over(cls, runs: Sequence[RunRecord], tolerance: float = TOLERANCE) -> RunComparison:
        """Compare `runs`, which must be comparable, with the first run."""
        labels = unique_names([run.name for run in runs], runs)
        compared_runs = [
            ComparedRun(
                run,
                base=runs[0],
                label=label,
                colour=COLOURS[place % len(COLOURS)],
                dash=DASHES[place // len(COLOURS) % len(DASHES)],
                tolerance=tolerance,
                comparisons=len(runs) - 1,
            )
            for place, (run, label) in enumerate(zip(runs, labels, strict=True))
        ]
        return cls(compared_runs, tolerance)

    @property
    def baseline(self) -> ComparedRun:
        """Return the run that the others are compared with."""
        return self.compared_runs[0]

    @property
    def runs(self) -> list[RunRecord]:
        """Return the records of all runs."""
        return [compared.run for compared in self.compared_runs]

    def answer(self) -> str:
        """Return the verdicts with their runs in one sentence, or the name of a single run."""
        base = self.baseline.label
        verdicts = {compared.label: compared.verdict for compared in self.compared_runs[1:]}
        if not verdicts:
            return base
        return f"Against {base}, ± {self.tolerance:g} nats: {by_verdict(verdicts)}."

    def notes(self, *, over_seeds: bool = False) -> list[str]:
        """Return remarks for the reader of the tables.

        With `over_seeds`, the comparison over seeds pairs the runs, so single runs need no note
        about pairing.
        """
        notes = []
        for compared in self.compared_runs:
            run = compared.run
            if run.broke_off:
                reason = run.summary.get("halted", "its results do not count as an end")
                notes.append(f"{compared.label} {run.broke_off}: {reason}")
            elif compared.not_paired and not over_seeds:
                notes.append(
                    f"{compared.label} is not paired with {self.baseline.label}: "
                    f"{compared.not_paired}."
                )
            if run.changed_settings:
                changes = [f"`{key}` was {text}" for key, text in run.changed_settings.items()]
                notes.append(
                    f"{compared.label} changed its settings during training: {'; '.join(changes)}."
                )
        if any(run.side_by_side for run in self.runs):
            notes.append("Runs that shared their machine with other runs have no speed.")
        evaluated = [run for run in self.runs if "held_out_loss" in run.summary]
        if not all(same_held_out(evaluated[0], run) for run in evaluated[1:]):
            notes.append(
                "Held-out losses are from different data, so they do not show which run is better."
            )
        return notes


def unique_names(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run: its name in `names`, or its path if that name is not unique."""
    return [
        name if names.count(name) == 1 else str(run.path)
        for name, run in zip(names, runs, strict=True)
    ]


def by_verdict(verdicts: Mapping[str, str]) -> str:
    """Return the verdicts, each with the names that have it, from verdicts by name."""
    names: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        names.setdefault(verdict, []).append(name)
    return "; ".join(f"{verdict}: {', '.join(group)}" for verdict, group in names.items())


def own_speed(run: RunRecord) -> float | None:
    """Return the tokens/s that hardware has computed for this run alone.

    Return None if the precision was emulated or the run shared its machine.
    """
    if run.side_by_side or run.emulated:
        return None
    return run.summary.get("tokens_per_second")


def speed_ratio(base: RunRecord, run: RunRecord) -> float | None:
    """Return the speed of `run` divided by that of `base`, or None if `own_speed` lacks one."""
    base_speed = own_speed(base)
    speed = own_speed(run)
    return speed / base_speed if speed and base_speed else None


def machine_of(run: RunRecord) -> str:
    """Return the machine of a run: "2 × NVIDIA H200", or a CPU with its number of cores."""
    processes, name = run.devices
    machine = f"{processes} × {name}"
    if name == "CPU":
        machine += f", {run.environment.get('cpu_cores')} cores, {run.environment.get('system')}"
    return machine
