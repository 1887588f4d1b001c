"""What a comparison comes to: where each run stands beside the baseline, its verdict, the Pareto front, and what to note."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pretrain.compare.appearance import Look, looks_of
from pretrain.compare.fairness import (
    FEWEST_STEPS,
    Gap,
    changes_in_words,
    loss_differences,
    of_one_text,
    same_held_out,
    same_packs,
    why_no_end,
    why_not_paired,
)
from pretrain.metrics.run_record import LOSS_KEY, RunRecord

TOLERANCE = 0.01  # nats a token that a run may end above its baseline and still count as equal, unless `--gate` says otherwise
SMOOTHED_SHARE = 1 / 50  # of a run's steps in each mean of a smoothed curve


@dataclass(frozen=True)
class Standing:
    """A run beside the baseline. None is what is not known, or does not compare."""

    run: RunRecord
    base: RunRecord
    look: Look
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
        return None if self.is_baseline else self.other_text or why_no_end(self.base, self.run)

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
    def held_out_gap(self) -> float | None:
        """In the last step in which both were evaluated, on the same packs."""
        return None if self.not_paired or self.is_baseline else held_out_difference(self.base, self.run)

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
        looks = zip(runs, looks_of(runs), strict=True)
        standings = [Standing(run, runs[0], look, tolerance, run.summary.get(key)) for run, look in looks]
        return cls(standings, tolerance, by_held_out, same_text)

    @cached_property
    def front(self) -> list[Standing]:
        """The runs on the baseline's kind of machine, come to a good end on one text, that no other beats in speed and loss."""
        ended = [each for each in self.standings if self.same_text and not each.run.broke_off and each.loss is not None]
        base = self.baseline.run
        able = [each for each in ended if each.speed is not None and on_one_kind_of_machine((base, each.run))]
        places = pareto_front([each.speed for each in able], [each.loss for each in able])
        return sorted((able[place] for place in places), key=lambda each: each.speed)

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
        others = {each.look.label: each.verdict for each in self.standings[1:]}
        parts = [f"Against {self.baseline.look.label}, ± {self.tolerance:g} nats: {by_verdict(others)}."] if others else []
        ended = [each for each in self.standings if not each.run.broke_off and math.isfinite(each.loss or math.nan)]
        if ended and self.same_text:
            best = min(ended, key=lambda each: each.loss)
            loss = "held-out loss" if self.by_held_out else "training loss"
            parts.append(f"Lowest {loss}: {best.look.label}, {best.loss:.4f}{best.run.when_evaluated}.")
        return " ".join(parts) or "No run has come to a loss that compares."

    def notes(self, *, over_seeds: bool = False) -> list[str]:
        """What has to be said beside the tables. `over_seeds`: runs are paired in a table of their own."""
        base, runs, notes = self.baseline.look.label, self.runs, []
        for each in self.standings:
            label, run = each.look.label, each.run
            if run.broke_off:
                notes.append(f"{label} {run.broke_off}: {run.summary.get('halted', 'its figures stand for no end')}")
            elif each.not_paired and not over_seeds:
                notes.append(f"{label} is not paired with {base}: {each.not_paired}.")
            if changes := changes_in_words(run):
                notes.append(f"{label} was not trained by one recipe: {changes}.")
        if any(not each.gap.has_interval for each in self.paired) and not over_seeds:
            notes.append(f"Too few steps: an error and an interval need {FEWEST_STEPS}. Without an interval the mean is judged.")
        if any(run.emulated for run in runs):
            notes.append("(emulated): computed in software; the speed says nothing of hardware that has the precision.")
        if any(run.side_by_side for run in runs):
            notes.append("No speed stands beside a run that shared its machine with others.")
        if not of_one_text([run for run in runs if "held_out_loss" in run.summary]):
            notes.append("Held-out losses are of different text, so they do not say which run is better.")
        return [*notes, *filter(None, [other_machines(runs)])]


def by_verdict(verdicts: Mapping[str, str]) -> str:
    """Each verdict and what has it, from verdicts by name."""
    names: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        names.setdefault(verdict, []).append(name)
    return "; ".join(f"{verdict}: {', '.join(those)}" for verdict, those in names.items())


def held_out_difference(baseline: RunRecord, run: RunRecord) -> float | None:
    """`run`'s held-out loss minus the baseline's in the last step in which both were evaluated; None where there is none that
    both have trained, or where they were evaluated on different packs."""
    if not same_held_out(baseline, run):
        return None
    here, there = (dict(zip(*each.held_out_curve(), strict=True)) for each in (baseline, run))
    trained = max(each.summary.get("first_step", 1) for each in (baseline, run))  # what stands before says nothing of a training
    common = [step for step in here if step >= trained and step in there and math.isfinite(there[step] - here[step])]
    return float(there[max(common)] - here[max(common)]) if common else None


def own_speed(run: RunRecord) -> float | None:
    return None if run.side_by_side or run.emulated else run.summary.get("tokens_per_second")


def machine_of(run: RunRecord) -> str:
    """What a run's speed depends on beside settings and versions: "2 × NVIDIA H200", and where there are no GPUs the cores, with
    the processes where they are several. Empty where that is not known."""
    processes, name = run.devices
    if name != "CPU":
        return f"{processes} × {name}"
    cores, several = run.environment.get("cpu_cores"), "" if processes == 1 else f"{processes} processes"
    return ", ".join(filter(None, [several, f"{cores} CPU cores" if cores else "", run.environment.get("system")]))


def on_one_kind_of_machine(runs: Iterable[RunRecord]) -> bool:
    """Whether speeds may be divided: else a machine's speed would pass for a precision's. Versions of software may differ, as
    what they change may be what is compared."""
    return len(set(map(machine_of, runs))) == 1


def other_machines(runs: Sequence[RunRecord]) -> str:
    """What to say where speeds are not held against the first run's, which had another kind of machine; empty where all had
    one."""
    if on_one_kind_of_machine(runs):
        return ""
    machines = by_verdict({run.name: machine_of(run) or "a machine that is not known" for run in runs})
    return f"Speeds are compared on one kind of machine alone, that of {runs[0].name}. {machines}."


def window_of(steps: int) -> int:
    """How many of a run's steps go into each smoothed value: an odd number, so that as many lie before a step as after it."""
    return round(steps * SMOOTHED_SHARE) // 2 * 2 + 1


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite `values` in the `window` (odd) centred on each; NaN where none is finite. At the ends it is cut off."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    middle = slice(window // 2, window // 2 + len(values))
    sums, counts = (np.convolve(each, np.ones(window))[middle] for each in (np.where(finite, values, 0.0), finite))
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)


def pareto_front(speeds: Sequence[float], losses: Sequence[float]) -> set[int]:
    """The places of those that no other beats in speed and loss at once."""
    points = list(zip(speeds, losses, strict=True))
    beaten = {(s, x) for s, x in points if any(t >= s and y <= x and (t > s or y < x) for t, y in points)}
    return {place for place, point in enumerate(points) if point not in beaten}
