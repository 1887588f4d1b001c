"""What a comparison comes to: where each run stands beside the baseline, the Pareto front, and the answer in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.units import count, plural
from pretrain.compare.appearance import Look, looks_of
from pretrain.compare.fairness import (
    CONFIDENCE,
    Gap,
    changes_in_words,
    last_steps,
    loss_differences,
    of_one_text,
    same_held_out,
    same_packs,
    why_no_end,
    why_not_paired,
)
from pretrain.compare.smoothing import moving_mean
from pretrain.metrics.run_record import LAST_STEPS, LOSS_KEY, RunRecord, averaged_steps, devices_of
from pretrain.precision.schedule import phases_of
from pretrain.precision.settings import PRECISIONS

TOLERANCE = 0.01  # nats a token that a run may end above its baseline and still count as equal, unless `--gate` says otherwise
FEW = 3  # runs, which a sentence names


@dataclass(frozen=True)
class Standing:
    """A run beside the baseline. None is what is not known, or does not compare."""

    run: RunRecord
    look: Look
    is_baseline: bool
    gap: Gap | None  # of the ends of the losses, paired by step; None of the baseline, and where `not_paired` says why
    not_paired: str | None  # why there is no gap: other text, or the one or the other was broken off and came to no end
    held_out_gap: float | None  # of the last step in which both were evaluated, on the same packs
    speed: float | None  # tokens/s that the hardware computed for this run alone; None where it was emulated or shared
    speedup: float | None  # over the baseline's, on a machine of the same kind
    hours: float | None  # to the horizon that its recipe names, at its median speed
    hours_to_match: float | None  # of steps, until its smoothed loss was at the loss that all runs reached
    on_front: bool  # no other run on the baseline's kind of machine that came to a good end is both faster and lower
    loss: float | None  # its last held-out loss; where some run of the comparison has none, the mean of its last training losses

    @property
    def shown_speed(self) -> float | None:
        """Tokens/s of an emulated run too, which is marked; None where it shared its machine."""
        return None if self.run.side_by_side else self.run.summary.get("tokens_per_second")


@dataclass(frozen=True)
class RunComparison:
    standings: list[Standing]
    tolerance: float
    matched_loss: float | None  # nats a token, of the training loss, that every run with a speed of its own reached
    by_held_out: bool  # every run has a held-out loss, so that this is what they are ranked by
    same_text: bool  # whether the losses that runs are ranked by are of the same text

    @classmethod
    def over(cls, runs: Sequence[RunRecord], tolerance: float = TOLERANCE) -> RunComparison:
        """`runs`: comparable, the baseline first."""
        looks, speeds = looks_of(runs), [own_speed(run) for run in runs]
        beside = [speed if on_one_kind_of_machine((runs[0], run)) else None for run, speed in zip(runs, speeds, strict=True)]
        matched, hours_to_match = match_losses([run if speed else None for run, speed in zip(runs, speeds, strict=True)])
        by_held_out = all("held_out_loss" in run.summary for run in runs)
        ends = [run.summary.get("held_out_loss" if by_held_out else LOSS_KEY) for run in runs]
        comparable = of_one_text(runs) if by_held_out else all(same_packs(runs[0], run) for run in runs)
        rivals = [loss if comparable and not run.broken_off else None for run, loss in zip(runs, ends, strict=True)]
        front = pareto_front(beside, rivals)
        standings = []
        for place, run in enumerate(runs):
            reason = (why_not_paired(runs[0], run) or why_no_end(runs[0], run)) if place else None
            differences = loss_differences(runs[0], run)[1] if place and not reason else None
            standings.append(
                Standing(
                    run=run,
                    look=looks[place],
                    is_baseline=not place,
                    gap=None if differences is None else Gap.of(differences),
                    not_paired=reason,
                    held_out_gap=held_out_difference(runs[0], run) if place else None,
                    speed=speeds[place],
                    speedup=beside[place] / beside[0] if place and beside[place] and beside[0] else None,
                    hours=hours_to_horizon(run, speeds[place]),
                    hours_to_match=hours_to_match[place],
                    on_front=place in front,
                    loss=ends[place],
                )
            )
        return cls(standings, tolerance, matched, by_held_out, comparable)

    @property
    def baseline(self) -> Standing:
        return self.standings[0]

    @property
    def paired(self) -> list[Standing]:
        return [each for each in self.standings if each.gap is not None]

    def shorter_ends(self) -> list[str]:
        """Returns for each pair with unlike numbers of steps a sentence that says which is shorter, so that the comparison ends
        with it."""
        return shorter_ends({each.look.label: each.run for each in (self.baseline, *self.paired)})

    def over_the_gate(self) -> list[Standing]:
        """Runs that do not surely end within the tolerance above the baseline: those whose interval reaches further up, and those
        that came to no end, being broken off or unfinished. Without an interval the mean is judged."""
        return [
            each
            for each in self.standings[1:]
            if each.run.broken_off or each.run.is_unfinished or (each.gap and not each.gap.ends[1] <= self.tolerance)
        ]

    def answer(self) -> str:
        """The comparison in a sentence, from its figures alone; another one for runs that were broken off."""
        halted = [each for each in self.standings if "halted" in each.run.summary]
        lost = [each.look.label for each in self.standings if each.run.diverged and "halted" not in each.run.summary]
        said = f" The loss of {', '.join(lost)} ends as no number." if lost else ""
        said += "".join(f" {each.look.label} {each.run.broke_off}." for each in halted)
        changed = ((each.look.label, changes_in_words(each.run)) for each in self.standings)
        said += "".join(f" {name} was not trained by one recipe: {how}." for name, how in changed if how)
        if len(self.standings) == 1:
            return answer_for_one(self.baseline) + said
        kinds = {(each.run.precision, each.run.config.get("weights")) for each in self.standings}
        if len(kinds) == 1 or not self.paired:
            return self._lowest() + said
        return (self._fastest() if any(each.speedup for each in self.paired) else self._how_many_end_near()) + said

    def _fastest(self) -> str:
        """The fastest that ends no more than the tolerance above the baseline, with its whole interval; or that there is none."""
        name, fast = self.baseline.look.label, [each for each in self.paired if each.speedup]
        if faster := [each for each in fast if each.speedup > 1 and each.gap.ends[1] <= self.tolerance]:
            best = max(faster, key=lambda each: each.speedup)
            return f"{best.look.label}: {best.speedup:.2f} × the speed of {name}, {described_gap(best)}."
        fastest = max(fast, key=lambda each: each.speedup)
        perhaps = any(each.speedup > 1 and each.gap.ends[0] <= self.tolerance for each in fast)
        return (
            f"No run is both faster than {name} and {'surely ' * perhaps}within {self.tolerance:g} nats of it. The fastest "
            f"other, {fastest.look.label}, has {fastest.speedup:.2f} × its speed, {described_gap(fastest)}."
        )

    def _how_many_end_near(self) -> str:
        """Says for how many runs the whole interval is within the tolerance, and which others end above or below, or may do
        so."""
        name, sound = self.baseline.look.label, self.paired
        if len(sound) == 1:
            return f"{sound[0].look.label} against {name}: {described_gap(sound[0])}."
        places = [each.gap.place(self.tolerance) for each in sound]
        said = f"{places.count('within')} of {len(sound)} runs end within {self.tolerance:g} nats of {name}"
        for place in ("above", "below", "unknown"):
            if not (some := [each for each, found in zip(sound, places, strict=True) if found == place]):
                continue
            if place == "unknown":
                said += f"; of {self._who(some)} it cannot be told"
                continue
            sizes = sorted(abs(each.gap.mean) for each in some)
            by = unsigned(sizes[0]) if len(sizes) == 1 else f"{unsigned(sizes[0])} to {unsigned(sizes[-1])}"
            said += f"; {self._who(some)} end{'s' * (len(some) == 1)} {by} {place} it"
        short = [each for each in sound if not each.gap.has_interval]
        intervals = f" with {CONFIDENCE:.0%} intervals".replace("%", " %") if len(short) < len(sound) else ""
        too_few = f"{f'; of {self._who(short)}' * (len(short) < len(sound))}, too few for an interval" if short else ""
        return f"{said} (means of the {last_steps(each.gap for each in sound)}{intervals}{too_few})."

    def _who(self, some: Sequence[Standing]) -> str:
        """`some` of the paired runs, in words: what sets them apart, else their names where they are few, else their number."""
        names = [each.look.label for each in some]
        if shared := self._what_they_share(some):
            return shared
        if len(names) > FEW:
            return f"all {len(names)}" if len(names) == len(self.paired) else f"{len(names)} others"
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

    def _what_they_share(self, some: Sequence[Standing]) -> str:
        """Returns what sets `some` apart from all others: their weights or their precision; nothing where neither does."""
        others = [each for each in self.standings if each not in some]
        for what, value_of in (
            ("weights", lambda each: each.run.config.get("weights")),
            ("precision", lambda each: each.run.precision),
        ):
            values = {value_of(each) for each in some}
            if values.isdisjoint(map(value_of, others)):
                number = f"{len(some)} " if len(some) > 1 else "one "
                return f"the {number}with {what} {' or '.join(sorted(map(str, values)))}"
        return ""

    def why_no_speed(self) -> str:
        """Returns what to add where speeds are not compared; empty where they are."""
        if len(self.standings) == 1 or any(each.speedup for each in self.standings):
            return ""
        if all(each.run.side_by_side for each in self.standings):
            return "They shared their machine, so their speeds are not compared."
        if any(each.run.emulated for each in self.standings):
            return "What is emulated has no speed of the hardware, so no speeds are compared."
        return ""

    def _lowest(self) -> str:
        """Says which run ends lowest, for runs that are compared in other things than precision, or that cannot be paired."""
        ended = [each for each in self.standings if each.loss is not None and not each.run.broken_off]
        known = sorted((each for each in ended if math.isfinite(each.loss)), key=lambda each: each.loss)
        if not known:
            return "No run has come to a loss that counts."
        what = "held-out loss" if self.by_held_out else "training loss"
        best = known[0]
        *others, last = [named(each) for each in known if each.loss - best.loss < NOTHING]
        said = f"Lowest {what}: " + (f"{', '.join(others)} and {last}, equal," if others else last) + f" with {best.loss:.4f}"
        if not others and best.gap is not None and best.run.summary["steps"] == self.baseline.run.summary["steps"]:
            said += f"; training {described_gap(best, held_out=False)} against {self.baseline.look.label}"
        elif not others and known[1:]:
            said += f"; next is {named(known[1])}, {signed(known[1].loss - best.loss)}"
        broken = self.baseline.run.broken_off
        unpaired = [each for each in self.standings if each.not_paired and not (broken or each.run.broken_off)]
        said += "." if self.same_text else ". But these losses are of different text, so they do not say which run is better."
        return said + (f" {len(unpaired)} of {len(self.standings)} runs cannot be paired by step." if unpaired else "")


def shorter_ends(runs: Mapping[str, RunRecord]) -> list[str]:
    """Returns for each run that has not as many steps as the first a sentence that says which of the two is shorter, so that
    their comparison ends with it. `runs`: paired, by what they are called."""
    (base, first), *others = runs.items()
    notes = []
    for name, run in others:
        (short, shorter), (long, longer) = sorted(((name, run), (base, first)), key=lambda one: one[1].summary["steps"])
        steps, more = shorter.summary["steps"], longer.summary["steps"]
        if steps < more:
            unfinished = " and is not finished" if shorter.is_unfinished else ""
            notes.append(
                f"{short} has {plural(steps, 'step')}{unfinished}, {long} {more:,}: what is compared ends with step {steps:,}"
            )
    return notes


def named(standing: Standing) -> str:
    kind = standing.look.kind
    return standing.look.label + (f" ({kind})" if kind and kind not in standing.look.label else "")


def described_gap(standing: Standing, *, held_out: bool = True) -> str:
    """Returns the gap in words: "loss +0.0004 ± 0.0002 nats, held out +0.0002", where ± is half of the interval."""
    gap = standing.gap
    said = f"loss {' ± '.join(with_error(gap.mean, gap.half_width)) if gap.has_interval else signed(gap.mean)} nats"
    if not gap.has_interval:
        said += f" ({plural(gap.steps, 'step')}, too few for an interval)"
    return said + (f", held out {signed(standing.held_out_gap)}" if held_out and standing.held_out_gap is not None else "")


def signed(nats: float) -> str:
    """+0.0004, with a minus as wide as a plus; five digits of what four would call nothing."""
    return "0" if abs(nats) < NOTHING else _with_sign(nats, _digits(nats))


def unsigned(nats: float) -> str:
    return "0" if abs(nats) < NOTHING else f"{nats:.{_digits(nats)}f}"


def with_error(nats: float, error: float) -> tuple[str, str]:
    """A difference, and its error or half of its interval, with as many digits: ("+0.00034", "0.00004")."""
    if abs(nats) < NOTHING and error < NOTHING:
        return "0", "0"
    digits = max(_digits(nats), _digits(error))
    return _with_sign(nats, digits), f"{error:.{digits}f}"


NOTHING = 5e-6  # nats, which five digits call nothing too


def _with_sign(nats: float, digits: int) -> str:
    return f"{0:.{digits}f}" if abs(nats) < NOTHING else f"{nats:+.{digits}f}".replace("-", "−")


def _digits(nats: float) -> int:
    return 5 if NOTHING <= abs(nats) < 1e-4 else 4


def answer_for_one(standing: Standing) -> str:
    figures = standing.run.summary
    steps, tokens = plural(figures["steps"], "step"), count(figures["tokens"])
    parts = [f"{standing.look.label}: {steps} of {standing.run.precision}, {tokens} tokens"]
    if LOSS_KEY in figures:
        parts.append(f"training loss {figures[LOSS_KEY]:.4f} (mean of the last {plural(averaged_steps(figures), 'step')})")
    if "held_out_loss" in figures:
        parts.append(f"held-out loss {figures['held_out_loss']:.4f}{standing.run.when_evaluated}")
    if standing.shown_speed:
        parts.append(f"{count(standing.shown_speed)} tokens/s" + (", emulated" if standing.run.emulated else ""))
    return "; ".join(parts) + "."


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
    """Returns what a run's speed depends on beside settings and versions, as `kind_of_machine` does."""
    return kind_of_machine(run.environment)


def kind_of_machine(environment: Mapping[str, Any]) -> str:
    """Returns "2 × NVIDIA H200", and where there are no GPUs the cores, with the processes where they are several. Empty where
    that is not known."""
    processes, name = devices_of(environment)
    if name != "CPU":
        return f"{processes} × {name}"
    cores, several = environment.get("cpu_cores"), "" if processes == 1 else f"{processes} processes"
    return ", ".join(filter(None, [several, f"{cores} CPU cores" if cores else "", environment.get("system")]))


def on_one_kind_of_machine(runs: Iterable[RunRecord]) -> bool:
    """Returns whether speeds may be divided, as all timed steps of all runs were on one kind: else a machine's speed would pass
    for a precision's. Versions of software may differ, as what they change may be what is compared."""
    return len({machine_of(run) for run in runs}) == 1


def other_machines(runs: Sequence[RunRecord]) -> str:
    """Returns what to say where speeds are not held against the first run's, which had another kind of machine; empty where all
    had one."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(machine_of(run) or "a machine that is not known", []).append(run.name)
    told = "; ".join(f"{', '.join(found)} on {machine}" for machine, found in names.items())
    if on_one_kind_of_machine(runs):
        return ""
    baseline = f"that of {runs[0].name}" if on_one_kind_of_machine(runs[:1]) else f"and {runs[0].name} has had several"
    return f"Speeds are compared on one kind of machine alone, {baseline}: {told}."


def other_splits(runs: Sequence[RunRecord]) -> str:
    """Returns what to say where runs whose scales are of whole tensors split a step in several ways; empty where all that are
    known split it alike."""
    ways: dict[tuple[int, int], list[str]] = {}
    for run in runs:
        packs = (run.audit.get("memory") or {}).get("microbatch", (run.config.get("batch") or {}).get("microbatch"))
        precisions = (PRECISIONS.get(use) for _, use in phases_of(run.config.get("precision")))  # a later version may have others
        if isinstance(packs, int) and any(each and each.quantized and each.tensor_scaled for each in precisions):
            ways.setdefault((packs, run.devices[0]), []).append(run.name)
    told = (f"{', '.join(names)} ({plural(packs, 'pack')} x {plural(ranks, 'rank')})" for (packs, ranks), names in ways.items())
    said = "Scales of whole tensors are a microbatch's, so losses depend a little on how a step is split into these"
    return f"{said}: {'; '.join(told)}." if len(ways) > 1 else ""


def hours_to_horizon(run: RunRecord, speed: float | None) -> float | None:
    """Returns the hours that the whole of a run's recipe, be it in `train.steps`, `tokens` or `epochs`, takes at `speed`
    tokens/s."""
    train = run.config.get("train") or {}
    steps, tokens, epochs = (train.get(key) for key in ("steps", "tokens", "epochs"))
    if steps and run.tokens_per_step:
        tokens = steps * run.tokens_per_step
    elif epochs and run.summary.get("epoch"):
        tokens = run.summary["tokens"] * epochs / run.epochs
    return (tokens or run.summary["tokens"]) / speed / 3600 if speed else None


def match_losses(runs: Sequence[RunRecord | None]) -> tuple[float | None, list[float | None]]:
    """(the lowest training loss that all reached, hours of steps until each was there first); None is left out.

    Of means over some 50 steps, so that a lucky one is no arrival. Nothing where fewer than two runs have times of steps. A run
    that began with another's checkpoint has no times of the steps before, and is left out too.
    """
    curves = []
    for run in runs:
        steps = run.steps if run and "first_step" not in run.summary else []
        if not steps or "step_ms" not in steps[0]:
            curves.append(None)
            continue
        losses = run.curve("loss")[1]
        losses = moving_mean(losses, min(LAST_STEPS, len(losses) // 5) | 1)
        curves.append((losses, np.cumsum([record["step_ms"] or 0.0 for record in steps]) / 3.6e6))
    known = [losses for losses, _ in filter(None, curves) if np.isfinite(losses).any()]
    if len(known) < 2:
        return None, [None] * len(runs)
    target = max(float(np.nanmin(losses)) for losses in known)
    reached: list[float | None] = []
    for curve in curves:
        arrived = np.flatnonzero(curve[0] <= target) if curve else ()
        reached.append(float(curve[1][arrived[0]]) if len(arrived) else None)
    return target, reached


def pareto_front(speeds: Sequence[float | None], losses: Sequence[float | None]) -> set[int]:
    """The places of those that no other beats in speed and loss at once."""
    known = [(s, x, place) for place, (s, x) in enumerate(zip(speeds, losses, strict=True)) if s is not None and x is not None]
    return {
        place
        for speed, loss, place in known
        if not any(s >= speed and x <= loss and (s > speed or x < loss) for s, x, _ in known)
    }
