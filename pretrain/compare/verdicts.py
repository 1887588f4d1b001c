"""Verdict, gain at equal loss, and advice for each candidate of `which`, and their table.

Held-out losses are compared within a margin that is fixed before the first round. The intervals
hold after every round. A candidate is done when its loss is known to lie within the margin or
beyond it, or to be better than the baseline's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foundation.units import UNKNOWN, duration, markdown, memory, or_dash
from pretrain.compare.columns import signed
from pretrain.compare.comparison import speed_ratio
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
# Largest logarithm of the tokens for equal loss. A loss that hardly falls says nothing about larger
# factors.
MOST_FOLD = math.log(1000)
# Exponents of the power laws that are fitted to a loss.
POWERS = np.arange(0.05, 1.5, 0.05)
# Word of the baseline in the table.
BASELINE = "baseline"
# Advice about a candidate.
USE = "use this"
NO_GAIN = "no gain at equal loss is shown"
# Titles of the table's columns after the held-out loss.
HEADER = (
    "as trained",
    "tokens/s",
    "speed",
    "tokens for equal loss",
    "gain at equal loss",
    "its interval",
    "memory",
    "verdict",
)


@dataclass(frozen=True)
class Protocol:
    """Settings that are fixed before the first round. which.json holds the fields by name."""

    # Checkpoint that all trainings branch from, including the baseline's, or None.
    begin_with: str | None
    # Share of the baseline's loss.
    margin: float
    # The requested precisions, the baseline first.
    precisions: list[str]
    # Seconds per step in the trial, for the precisions that ran in it. The baseline is first.
    seconds: dict[str, float]
    # Seconds that a training takes besides its steps.
    start: float
    # Number of planned rounds.
    seeds: int
    # Last step of a training.
    steps: int
    # Last step of the part that candidates share with the baseline.
    trunk: int

    @property
    def base(self) -> str:
        """Return the name of the baseline."""
        return next(iter(self.seconds))

    @property
    def candidates(self) -> list[str]:
        """Return the names of the candidates."""
        return list(self.seconds)[1:]

    @property
    def error(self) -> float:
        """Return the error probability of one candidate's interval.

        The intervals of all candidates hold together at CONFIDENCE (Bonferroni).
        """
        return (1 - CONFIDENCE) / len(self.candidates)


@dataclass
class Verdict:
    """Results of a candidate. Unknown values are None. verdict.json holds the fields by name."""

    name: str
    # Held-out loss in BF16 minus the baseline's.
    served: SeedDifference | None = None
    # Training loss at the end, in the candidate's own precision, minus the baseline's.
    trained: SeedDifference | None = None
    # None if the precision is emulated, like the next two.
    tokens_per_second: float | None = None
    # Speed divided by the baseline's.
    speedup: float | None = None
    memory_gib: float | None = None
    # Factor of the training tokens that makes up for the loss, by the slope of the baseline's loss.
    tokens: float | None = None
    # Interval of `gain`, from the intervals of speed, loss and slope.
    gain_interval: list[float] | None = None
    word: str = CANNOT_TELL
    # Estimated seconds of training until a verdict, if mean and spread stay the same. None if
    # MOST_SEEDS seeds would not be enough.
    more_seconds: float | None = None
    advice: str = ""

    @property
    def gain(self) -> float | None:
        """Return the speed at equal loss, divided by the baseline's speed."""
        return self.speedup / self.tokens if self.speedup and self.tokens else None

    @property
    def is_open(self) -> bool:
        """Return True if more seeds are needed. "worse" may lie within the margin or beyond it."""
        return self.word in (CANNOT_TELL, WORSE)

    @property
    def is_faster_at_equal_loss(self) -> bool:
        """Return True if the whole interval of the gain is above 1."""
        return self.gain_interval is not None and self.gain_interval[0] > 1


@dataclass
class Rounds:
    """The runs of all rounds so far, and the verdicts that follow from them."""

    protocol: Protocol
    # Runs of each round, which is a seed, by name: the baseline and the candidates.
    runs: list[dict[str, RunRecord]] = field(default_factory=list)
    # Seconds of the last training by name.
    took: dict[str, float] = field(default_factory=dict)

    def seconds(self, candidates: Sequence[str]) -> float:
        """Return the estimated seconds of a round with the baseline and `candidates`.

        A training takes as long as its last one, or as the trial predicts.
        """
        return sum(map(self._seconds_of, (self.protocol.base, *candidates)))

    def _seconds_of(self, name: str) -> float:
        """Return the estimated seconds of a training."""
        protocol = self.protocol
        is_branch = bool(protocol.begin_with) or name != protocol.base
        steps = protocol.steps - (protocol.trunk if is_branch else 0)
        return self.took.get(name) or protocol.start + protocol.seconds[name] * steps

    # ── Verdicts ──────────────────────────────────────────────────────────────────────────────────

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts of all candidates with advice.

        The candidate with the largest gain at equal loss is recommended.
        """
        verdicts = [self.verdict(name) for name in self.protocol.candidates]
        eligible = [
            verdict
            for verdict in verdicts
            if verdict.is_faster_at_equal_loss
            and verdict.word not in (WORSE, WORSE + BEYOND_MARGIN)
        ]
        eligible.sort(key=lambda verdict: verdict.gain or 0.0, reverse=True)
        for verdict in verdicts:
            verdict.advice = self._advice(verdict, eligible)
        return verdicts

    def _advice(self, verdict: Verdict, eligible: Sequence[Verdict]) -> str:
        """Return the advice about a candidate.

        `eligible` are the candidates that may be recommended, the recommended one first.
        """
        if verdict.is_open:
            if not verdict.more_seconds:
                return f"{MOST_SEEDS} seeds would not be enough if mean and spread stay the same"
            has_interval = verdict.served and len(verdict.served.by_seed) >= FEWEST_SEEDS
            about = "about" if has_interval else "at least"
            return f"{about} {duration(verdict.more_seconds)} more of --hours should be enough"
        if verdict.served and verdict.gain is None:
            if verdict.speedup:
                return (
                    f"its gain is not known, because {self.protocol.base}'s loss does not clearly "
                    "fall"
                )
            return "its speed is not known, because it is emulated"
        if verdict in eligible:
            return USE if verdict is eligible[0] else f"pays less than {eligible[0].name}"
        if verdict.is_faster_at_equal_loss:
            return f"pays at {verdict.tokens:.2f} × the tokens"
        return NO_GAIN

    def verdict(self, name: str) -> Verdict:
        """Return the verdict of a candidate, without advice."""
        protocol = self.protocol
        pairs = [(runs[protocol.base], runs[name]) for runs in self.runs if name in runs]
        if not pairs:
            return Verdict(name)
        failures = [run.broke_off for _, run in pairs if run.broke_off]
        if failures:
            return Verdict(name, word=f"broke off: {failures[0]}")
        served = _difference(pairs, "held_out_loss")
        verdict = Verdict(name, served, _difference(pairs, LOSS_KEY))
        verdict.word = served.anytime_verdict(protocol.margin, protocol.error)
        if verdict.is_open:
            verdict.more_seconds = self._seconds_to_verdict(name, served)
        speedups = _speedups(pairs)
        if speedups:
            speeds = [run.summary["tokens_per_second"] for _, run in pairs]
            verdict.tokens_per_second = statistics.median(speeds)
            verdict.speedup = speedups.mean
            verdict.memory_gib = pairs[0][1].summary.get("memory_gib")
        slopes = {place: loss_slope(base) for place, (base, _) in enumerate(pairs)}
        self._add_gain(verdict, speedups, SeedDifference(slopes, 0.0))
        return verdict

    def _add_gain(
        self, verdict: Verdict, speedups: SeedDifference | None, slopes: SeedDifference
    ) -> None:
        """Set the tokens for equal loss and the interval of the gain.

        Both stay None unless the baseline's loss falls clearly. The interval also needs a speed and
        a decided loss.
        """
        slope_half = slopes.anytime_half_width(self.protocol.error)
        served = verdict.served
        if served is None or slope_half is None or slopes.mean + slope_half >= 0:
            return
        verdict.tokens = self.tokens_for(served.mean, slopes.mean)
        if speedups is None or verdict.word == CANNOT_TELL:
            return
        loss_half = served.anytime_half_width(self.protocol.error)
        speed_half = speedups.anytime_half_width(self.protocol.error)
        if loss_half is None or speed_half is None:
            return
        most = self.tokens_for(served.mean + loss_half, slopes.mean + slope_half)
        least = self.tokens_for(served.mean - loss_half, slopes.mean - slope_half)
        verdict.gain_interval = [
            max(0.0, speedups.mean - speed_half) / most,
            (speedups.mean + speed_half) / least,
        ]

    def tokens_for(self, loss: float, slope: float) -> float:
        """Return the factor of the training tokens that makes up for `loss` nats.

        The factor is 1 for a negative loss. `slope` is in nats per unit of ln(tokens), and is
        negative. For branches, only the tokens after the branch count.
        """
        fold = math.exp(min(max(0.0, loss) / -slope, MOST_FOLD))
        steps = self.protocol.steps
        before = self.protocol.trunk if self.protocol.begin_with else 0
        return (fold * steps - before) / (steps - before)

    def _seconds_to_verdict(self, name: str, served: SeedDifference) -> float | None:
        """Return the estimated seconds until a verdict, if mean and spread stay the same.

        The differences so far are repeated until a verdict is reached. Return None if MOST_SEEDS
        seeds would not be enough.
        """
        values = list(served.by_seed.values())
        for seeds in range(len(values) + 1, MOST_SEEDS + 1):
            repeated = {place: values[place % len(values)] for place in range(seeds)}
            difference = SeedDifference(repeated, served.baseline)
            word = difference.anytime_verdict(self.protocol.margin, self.protocol.error)
            if not Verdict(name, word=word).is_open:
                return (seeds - len(values)) * self.seconds([name])
        return None

    # ── Table ─────────────────────────────────────────────────────────────────────────────────────

    def table(self, verdicts: Sequence[Verdict]) -> str:
        """Return the Markdown table of the baseline and the candidates."""
        # FP32 is evaluated in FP32.
        served = "held out" if self.protocol.base == "fp32" else "served in BF16"
        baseline = replace(
            self.verdict(self.protocol.base),
            word=BASELINE,
            speedup=1.0,
            tokens=1.0,
            gain_interval=None,
        )
        rows = [self._row(verdict) for verdict in (baseline, *verdicts)]
        return markdown(["precision", "seeds", served, *HEADER], rows)

    def _row(self, verdict: Verdict) -> list[str]:
        """Return the table's row of a candidate or of the baseline."""
        return [
            verdict.name,
            str(len(verdict.served.by_seed) if verdict.served else 0),
            self._loss(verdict, verdict.served),
            self._loss(verdict, verdict.trained),
            or_dash(verdict.tokens_per_second, "{:,.0f}".format),
            *(
                or_dash(value, "{:.2f} ×".format)
                for value in (verdict.speedup, verdict.tokens, verdict.gain)
            ),
            or_dash(verdict.gain_interval, "{0[0]:.2f} to {0[1]:.2f}".format),
            or_dash(verdict.memory_gib, memory),
            verdict.word,
        ]

    def _loss(self, verdict: Verdict, difference: SeedDifference | None) -> str:
        """Return a difference in percent of the baseline's loss: "+0.071 ± 0.150 %".

        For the baseline, return its loss.
        """
        if difference is None:
            return UNKNOWN
        if verdict.word == BASELINE:
            return f"{difference.baseline:.4f}"
        scale = 100 / difference.baseline
        half = difference.anytime_half_width(self.protocol.error)
        interval = "" if half is None else f" ± {scale * half:.3f}"
        return f"{signed(scale * difference.mean, 3)}{interval} %"


def _difference(pairs: Sequence[tuple[RunRecord, RunRecord]], key: str) -> SeedDifference:
    """Return the difference in `key` of the summaries, from pairs (baseline, candidate)."""
    by_seed = {run.config["seed"]: run.summary[key] - base.summary[key] for base, run in pairs}
    return SeedDifference(by_seed, statistics.fmean(base.summary[key] for base, _ in pairs))


def _speedups(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> SeedDifference | None:
    """Return the candidate's speed divided by the baseline's for each pair, with their mean.

    Return None if a speed is not known.
    """
    speedups = {
        place: speedup
        for place, (base, run) in enumerate(pairs)
        if (speedup := speed_ratio(base, run))
    }
    return SeedDifference(speedups, 1.0) if len(speedups) == len(pairs) else None


def loss_slope(run: RunRecord) -> float:
    """Return the slope of the training loss at the last step, in nats per unit of ln(tokens).

    A power law E + A steps^-a is fitted to the steps before the decay and extrapolated to the last
    step. The decay is not fitted, because it lowers the loss faster than more tokens do. The fit
    covers at least the first half of the run, and schedules other than `wsd` up to their end.
    """
    steps, losses = run.curve("loss")
    first = int(steps[0])
    last = int(steps[-1])
    decay_begins = schedule.decay_begins(recipe_of(run).schedule, last) or last
    fitted = max(decay_begins, (first + last) / 2)
    chosen = (steps > 0.3 * fitted) & (steps <= fitted) & np.isfinite(losses)
    shares = steps[chosen] / last
    fits = {power: np.polyfit(shares**-power, losses[chosen], 1, full=True) for power in POWERS}
    # The second element of a fit is the sum of squared residuals.
    power = min(fits, key=lambda power: fits[power][1][0])
    return float(-power * fits[power][0][0])
