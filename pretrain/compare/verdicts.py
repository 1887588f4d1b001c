"""Verdict, gain at equal loss and advice for each candidate of `which`, and their table.

Held-out losses are compared within a margin that is fixed before the first round. The intervals
hold after every round. A candidate is done when it is known whether its loss lies within the
margin, or that it is better than the baseline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foundation.units import UNKNOWN, duration, markdown, memory, or_dash
from pretrain.compare.columns import signed
from pretrain.compare.comparison import own_speed
from pretrain.compare.differences import (
    BEYOND_MARGIN,
    CANNOT_TELL,
    CONFIDENCE,
    FEWEST_SEEDS,
    WORSE,
    SeedDifference,
)
from pretrain.compare.fairness import recipe_of
from pretrain.metrics.run_record import LOSS_KEY, RunRecord
from pretrain.optimizer import schedule

MOST_SEEDS = 20
# of the tokens, for equal loss: beyond, a loss that hardly falls tells nothing of them
MOST_FOLD = math.log(1000)
POWERS = np.arange(0.05, 1.5, 0.05)  # exponents of the power laws that are fitted to a loss
USE, NO_GAIN = "use this", "no gain at equal loss is shown"


@dataclass(frozen=True)
class Protocol:
    """What is fixed before the first round, and kept in which.json."""

    begin_with: str | None  # a checkpoint with which all begin, the baseline too
    margin: float  # a share of the baseline's loss
    precisions: list[str]  # that were asked for, the baseline first
    # that a step took in the trial, of those that ran in it: the baseline, then the candidates
    seconds: dict[str, float]
    start: float  # seconds that a training takes beside its steps
    seeds: int  # rounds that are planned
    steps: int  # of a training
    trunk: int  # the first of these, which candidates share with the baseline

    @property
    def base(self) -> str:
        return next(iter(self.seconds))

    @property
    def candidates(self) -> list[str]:
        return list(self.seconds)[1:]

    @property
    def error(self) -> float:
        """Of one candidate's interval, so that all of them hold together (Bonferroni)."""
        return (1 - CONFIDENCE) / len(self.candidates)


@dataclass
class Verdict:
    """What is known of a candidate. None is what is not known."""

    name: str
    served: SeedDifference | None = None  # held-out loss in BF16 above the baseline's
    # loss of the last steps, in the candidate's own precision
    trained: SeedDifference | None = None
    tokens_per_second: float | None = None  # None where it is emulated, as are the next two
    speedup: float | None = None
    memory_gib: float | None = None
    # how many times the tokens make up for its loss, by the baseline's own slope
    tokens: float | None = None
    gain_interval: list[float] | None = None  # of `gain`, by those of speed, loss and slope
    word: str = CANNOT_TELL
    # after which it should be told, if mean and spread stay as they are
    more_seconds: float | None = None
    advice: str = ""

    @property
    def gain(self) -> float | None:
        """Speed at equal loss, in multiples of the baseline's."""
        return self.speedup / self.tokens if self.speedup and self.tokens else None

    @property
    def is_open(self) -> bool:
        """Whether more seeds can tell more: "worse" may lie within the margin or beyond it."""
        return self.word in (CANNOT_TELL, WORSE)


@dataclass
class Rounds:
    """What was trained under a protocol, and what it tells."""

    protocol: Protocol
    # a seed each: the baseline and candidates by name
    runs: list[dict[str, RunRecord]] = field(default_factory=list)
    took: dict[str, float] = field(default_factory=dict)  # seconds of each one's last training

    def seconds(self, candidates: Sequence[str]) -> float:
        """How long a round of the baseline and these should take: as the last one took, or else by the trial."""
        protocol, total = self.protocol, 0.0
        for name in (protocol.base, *candidates):
            shared = protocol.trunk if protocol.begin_with or name != protocol.base else 0
            total += self.took.get(name) or protocol.start + protocol.seconds[name] * (
                protocol.steps - shared
            )
        return total

    # ── What they tell of each candidate ──────────────────────────────────────────────────────────────────────────────────────

    def verdicts(self) -> list[Verdict]:
        """Of every candidate, with advice: the one that gains most at equal loss is to be used."""
        verdicts = [self.verdict(name) for name in self.protocol.candidates]
        faster = [each for each in verdicts if each.gain_interval and each.gain_interval[0] > 1]
        paying = [each for each in faster if each.word not in (WORSE, WORSE + BEYOND_MARGIN)]
        best = max(paying, key=lambda each: each.gain, default=None)
        for each in verdicts:
            if each.is_open:
                about = (
                    "about"
                    if each.served and len(each.served.by_seed) >= FEWEST_SEEDS
                    else "at least"
                )
                hours = (
                    each.more_seconds
                    and f"{about} {duration(each.more_seconds)} more of --hours should tell"
                )
                each.advice = hours or f"nor would {MOST_SEEDS} seeds, if they spread alike"
            elif each.served and each.gain is None:
                flat = (
                    f"its gain is not known, as {self.protocol.base}'s loss does not clearly fall"
                )
                each.advice = flat if each.speedup else "its speed is not known, as it is emulated"
            elif each in paying:
                each.advice = USE if each is best else f"pays less than {best.name}"
            else:
                each.advice = (
                    f"pays at {each.tokens:.2f} × the tokens" if each in faster else NO_GAIN
                )
        return verdicts

    def verdict(self, name: str) -> Verdict:
        protocol = self.protocol
        pairs = [(each[protocol.base], each[name]) for each in self.runs if name in each]
        if not pairs:
            return Verdict(name)
        if why := next((run.broke_off for _, run in pairs if run.broke_off), None):
            return Verdict(name, word=f"broke off: {why}")
        verdict = Verdict(name, _above(pairs, "held_out_loss"), _above(pairs, LOSS_KEY))
        verdict.word = verdict.served.anytime_verdict(protocol.margin, protocol.error)
        if verdict.is_open:
            verdict.more_seconds = self.seconds_to_tell(verdict)
        speeds = [(own_speed(base), own_speed(run)) for base, run in pairs]
        if all(map(all, speeds)):
            verdict.tokens_per_second = statistics.median(own for _, own in speeds)
            speed = SeedDifference(dict(enumerate(own / base for base, own in speeds)), 1.0)
            verdict.speedup = speed.mean
            verdict.memory_gib = pairs[0][1].summary.get("memory_gib")
        slope = SeedDifference(dict(enumerate(loss_slope(base) for base, _ in pairs)), 0.0)
        if (slope_half := slope.half_width()) is not None and slope.mean + slope_half < 0:
            verdict.tokens = self.tokens_for(verdict.served.mean, slope.mean)
            if verdict.speedup and verdict.word != CANNOT_TELL:
                half = verdict.served.anytime_half_width(protocol.error)
                reach = speed.anytime_half_width(protocol.error)
                most = self.tokens_for(verdict.served.mean + half, slope.mean + slope_half)
                least = self.tokens_for(verdict.served.mean - half, slope.mean - slope_half)
                verdict.gain_interval = [(speed.mean - reach) / most, (speed.mean + reach) / least]
        return verdict

    def tokens_for(self, loss: float, slope: float) -> float:
        """Return how many times the tokens make up for `loss` nats, 1 if it is negative.

        `slope`: nats per unit of ln(tokens), negative. A branch counts only its own tokens.
        """
        fold = math.exp(min(max(0.0, loss) / -slope, MOST_FOLD))
        steps, before = self.protocol.steps, self.protocol.trunk if self.protocol.begin_with else 0
        return (fold * steps - before) / (steps - before)

    def seconds_to_tell(self, verdict: Verdict) -> float | None:
        """For the seeds that are missing to a verdict, if mean and spread stay; None where MOST_SEEDS would not tell."""
        values = list(verdict.served.by_seed.values())
        for seeds in range(len(values) + 1, MOST_SEEDS + 1):
            repeated = {place: values[place % len(values)] for place in range(seeds)}
            told = SeedDifference(repeated, verdict.served.baseline).anytime_verdict(
                self.protocol.margin, self.protocol.error
            )
            if not Verdict(verdict.name, word=told).is_open:
                return (seeds - len(values)) * self.seconds([verdict.name])
        return None

    # ── How it is shown ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def table(self, verdicts: Sequence[Verdict]) -> str:
        base, runs = self.protocol.base, [each[self.protocol.base] for each in self.runs]
        served = "served in BF16" if base != "fp32" else "held out"  # FP32 is evaluated in FP32
        header = [
            "precision",
            "seeds",
            served,
            "as trained",
            "tokens/s",
            "speed",
            "tokens for equal loss",
        ]
        header += ["gain at equal loss", "its interval", "memory", "verdict"]

        def percent(difference: SeedDifference | None) -> str:
            """ "+0.071 ± 0.150 %" of the baseline's loss."""
            if difference is None:
                return UNKNOWN
            half, share = (
                difference.anytime_half_width(self.protocol.error),
                100 / difference.baseline,
            )
            return f"{signed(share * difference.mean, 3)}{'' if half is None else f' ± {share * half:.3f}'} %"

        losses = (
            statistics.fmean(run.summary[key] for run in runs)
            for key in ("held_out_loss", LOSS_KEY)
        )
        speeds, peak = (
            [*filter(None, map(own_speed, runs))],
            or_dash(runs[0].summary.get("memory_gib"), memory),
        )
        speed = or_dash(statistics.median(speeds) if speeds else None, "{:,.0f}".format)
        rows = [
            [
                base,
                str(len(runs)),
                *map("{:.4f}".format, losses),
                speed,
                *"111",
                UNKNOWN,
                peak,
                "baseline",
            ]
        ]
        for each in verdicts:
            times = [
                or_dash(value, "{:.2f} ×".format)
                for value in (each.speedup, each.tokens, each.gain)
            ]
            row = [
                each.name,
                str(len(each.served.by_seed) if each.served else 0),
                percent(each.served),
                percent(each.trained),
            ]
            interval = or_dash(each.gain_interval, "{0[0]:.2f} to {0[1]:.2f}".format)
            row += [or_dash(each.tokens_per_second, "{:,.0f}".format), *times, interval]
            rows.append([*row, or_dash(each.memory_gib, memory), each.word])
        return markdown(header, rows)


def _above(pairs: Sequence[tuple[RunRecord, RunRecord]], key: str) -> SeedDifference:
    base, run = (
        {each.config["seed"]: each.summary[key] for each in runs}
        for runs in zip(*pairs, strict=True)
    )
    return SeedDifference.of(run, base)


def loss_slope(run: RunRecord) -> float:
    """Return the slope of the training loss at the last step, in nats per unit of ln(tokens).

    A power law E + A steps^-a is fitted to the steps before the decay and extrapolated to the last
    step. The decay is not fitted, because it lowers the loss faster than more tokens do. The fit
    takes at least the first half of the run, and schedules other than `wsd` up to their end.
    """
    steps, losses = run.curve("loss")
    first, last = int(steps[0]), int(steps[-1])
    fitted = max(schedule.decay_begins(recipe_of(run).schedule, last) or last, (first + last) / 2)
    chosen = (steps > 0.3 * fitted) & (steps <= fitted) & np.isfinite(losses)
    shares = steps[chosen] / last
    fits = {power: np.polyfit(shares**-power, losses[chosen], 1, full=True) for power in POWERS}
    power = min(fits, key=lambda tried: fits[tried][1][0])  # by the sum of squared residuals
    return float(-power * fits[power][0][0])
