"""Compute the verdict, the gain at equal loss, and the advice for each candidate of `which`.

A candidate is a precision, or a set of settings, that `which` compares with the baseline. In each
round, the baseline and the candidates are trained with one seed. The difference between a
candidate's held-out loss and the baseline's held-out loss is compared with a margin that is fixed
before the first round. The confidence intervals of the differences are valid after every round. A
candidate needs no more rounds if its difference certainly lies within the margin, certainly lies
beyond the margin, or is certainly below zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lab.compare.comparison import speed_ratio
from lab.compare.differences import (
    BEYOND_MARGIN,
    CANNOT_TELL,
    OPEN_VERDICTS,
    WORSE,
    LossDifference,
    Sample,
)
from lab.experiments.protocol import MOST_SEEDS, Protocol, Round, Rounds
from pretrain.metrics.run_record import LOSS_KEY, RunRecord
from pretrain.optimizer import schedule

# Upper limit of the estimated growth of the training tokens for equal loss, as a natural logarithm.
# A larger estimate would not be reliable, because it means that the baseline's loss hardly falls.
MOST_FOLD = math.log(1000)
# Exponents that are tried when a power law is fitted to a loss curve.
POWERS = np.arange(0.05, 1.5, 0.05)
# Advice about the recommended candidate, and about a candidate that may not be faster.
USE = "use this"
NO_GAIN = "not shown to be faster at equal loss"
# Advice about a candidate with an open verdict, before and after the last round.
NEEDS_SEEDS = f"more seeds are needed (at most {MOST_SEEDS} are trained)"
ALL_TRAINED = (
    f"all {MOST_SEEDS} seeds are trained, and the interval still extends beyond the margin; set "
    "longer runs (--steps N) or a larger --margin, with another --run_dir"
)


@dataclass
class Verdict:
    """Results of a candidate. Unknown values are None.

    `tokens_per_second`, `speedup` and `memory_gib` are None if the precision is emulated.
    """

    # Name of the candidate.
    name: str
    # Held-out loss of the candidate minus the baseline's. The candidates are evaluated in BF16, or
    # in the precision `served` of the protocol.
    held_out: LossDifference | None = None
    # Training loss at the end of the candidate's run, in the candidate's precision, minus the
    # baseline's training loss.
    trained: LossDifference | None = None
    # Median of the candidate's speed over all seeds.
    tokens_per_second: float | None = None
    # Speed of the candidate divided by the baseline's speed.
    speedup: float | None = None
    # Peak memory of the candidate's run with the first seed.
    memory_gib: float | None = None
    # Factor by which the training tokens would have to grow until the candidate has the baseline's
    # loss. It is estimated from the slope of the baseline's loss.
    tokens: float | None = None
    # Lower and upper end of the interval of `gain`. It combines the intervals of the speedup, the
    # loss and the slope.
    gain_interval: list[float] | None = None
    # The verdict as text, such as "equivalent" or "broke off: was halted at step 7".
    word: str = CANNOT_TELL
    # Advice about the candidate, such as USE.
    advice: str = ""

    @property
    def gain(self) -> float | None:
        """Return `speedup` divided by `tokens`, or None if one of them is unknown."""
        return self.speedup / self.tokens if self.speedup and self.tokens else None

    @property
    def is_open(self) -> bool:
        """Return True if more seeds are needed."""
        return self.word in OPEN_VERDICTS

    @property
    def is_faster_at_equal_loss(self) -> bool:
        """Return True if the whole interval of `gain` is known and above 1."""
        return self.gain_interval is not None and self.gain_interval[0] > 1

    @property
    def is_eligible(self) -> bool:
        """Return True if the candidate may be recommended.

        Its gain must be above 1. If its loss is worse, it must certainly be within the margin.
        """
        return self.is_faster_at_equal_loss and self.word not in (WORSE, WORSE + BEYOND_MARGIN)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for verdict.json, where `held_out` has the name `served`."""
        fields = asdict(self)
        return {"served": fields.pop("held_out")} | fields | {"gain_at_equal_loss": self.gain}


def verdicts_after(rounds: Rounds) -> list[Verdict]:
    """Return the verdicts of all candidates after `rounds`, including advice.

    Among the eligible candidates, the candidate with the largest gain at equal loss is recommended.
    """
    protocol = rounds.protocol
    verdicts = [verdict_of(protocol, rounds.runs, name) for name in protocol.candidates]
    eligible = [verdict for verdict in verdicts if verdict.is_eligible]
    best = max(eligible, key=lambda verdict: verdict.gain or 0.0, default=None)
    open_advice = NEEDS_SEEDS if len(rounds.runs) < MOST_SEEDS else ALL_TRAINED
    for verdict in verdicts:
        verdict.advice = open_advice if verdict.is_open else advice_on(verdict, best, protocol.base)
    return verdicts


def advice_on(verdict: Verdict, best: Verdict | None, base: str) -> str:
    """Return the advice about a candidate whose verdict is final.

    Args:
        verdict: The verdict of the candidate.
        best: The verdict of the recommended candidate, or None if no candidate is recommended.
        base: Name of the baseline.
    """
    if verdict.held_out and verdict.gain is None:
        if verdict.speedup:
            return (
                f"its gain is not known, because the loss of the baseline {base} does not clearly "
                "fall"
            )
        return "its speed is not known, because the precision is emulated"
    if verdict is best:
        return USE
    if verdict.is_eligible and best:
        return f"smaller gain than {best.name}"
    if verdict.is_faster_at_equal_loss:
        return f"faster than {base} at equal loss, with {verdict.tokens:.2f} × the tokens"
    return NO_GAIN


def verdict_of(protocol: Protocol, rounds: Sequence[Round], name: str) -> Verdict:
    """Return the verdict of the candidate or baseline `name` after `rounds`, without advice."""
    pairs = [(runs[protocol.base], runs[name]) for runs in rounds if name in runs]
    if not pairs:
        return Verdict(name)
    for _, run in pairs:
        if run.failure:
            return Verdict(name, word=f"broke off: {run.failure}")
    held_out = _difference(pairs, "served_loss" if protocol.served else "held_out_loss")
    word = held_out.verdict(protocol.margin, protocol.error)
    verdict = Verdict(name, held_out, _difference(pairs, LOSS_KEY), word=word)
    slope = Sample({base.config["seed"]: loss_slope(base) for base, _ in pairs})
    base_clearly_falls = slope.interval(protocol.error)[1] < 0
    if base_clearly_falls:
        verdict.tokens = tokens_for(protocol, held_out.mean, slope.mean)
    speedup = _speedup(pairs)
    if speedup is not None:
        speeds = [run.summary["tokens_per_second"] for _, run in pairs]
        verdict.tokens_per_second = statistics.median(speeds)
        verdict.speedup = speedup.mean
        verdict.memory_gib = pairs[0][1].summary.get("memory_gib")
        # With CANNOT_TELL, the interval of the loss may be unbounded, as with one seed. A candidate
        # without an interval of its gain is not recommended.
        if base_clearly_falls and word != CANNOT_TELL:
            verdict.gain_interval = gain_interval(protocol, held_out, slope, speedup)
    return verdict


def gain_interval(protocol: Protocol, loss: Sample, slope: Sample, speedup: Sample) -> list[float]:
    """Return the lower and upper end of the interval of the gain at equal loss.

    The lower end combines the lowest speedup with the largest factor of tokens within the intervals
    of the loss and the slope.

    Args:
        protocol: The protocol.
        loss: Loss of the candidate minus the baseline's loss.
        slope: Slope of the baseline's loss (`loss_slope`). Its interval must be negative.
        speedup: Speed of the candidate divided by the baseline's speed.
    """
    lowest_loss, highest_loss = loss.interval(protocol.error)
    slope_interval = slope.interval(protocol.error)
    lowest_speedup, highest_speedup = speedup.interval(protocol.error)
    most_tokens = max(tokens_for(protocol, highest_loss, end) for end in slope_interval)
    fewest_tokens = min(tokens_for(protocol, lowest_loss, end) for end in slope_interval)
    return [max(0.0, lowest_speedup) / most_tokens, highest_speedup / fewest_tokens]


def tokens_for(protocol: Protocol, loss: float, slope: float) -> float:
    """Return the growth factor of the training tokens that lowers the loss by `loss`.

    If all runs branch from the checkpoint of another run, only the tokens after that checkpoint are
    multiplied by the factor, and at least one step remains. Otherwise all tokens are multiplied by
    it.

    Args:
        protocol: The protocol, which has the number of steps.
        loss: Loss of a candidate minus the baseline's loss, in nats per token. If it is negative,
            the factor is 1 for a precision, which is assumed not to lower the true loss. The factor
            is below 1 for other candidates, and if the models are evaluated as served.
        slope: Slope of the baseline's loss, in nats per unit of ln(tokens). Must be negative.
    """
    lowest = -MOST_FOLD if protocol.served or protocol.settings else 0.0
    # Logarithm of the growth of all tokens.
    growth = min(max(lowest, loss / -slope), MOST_FOLD)
    before = protocol.trunk if protocol.begin_with else 0
    steps = math.exp(growth) * protocol.steps - before
    return max(1.0, steps) / (protocol.steps - before)


def _difference(pairs: Sequence[tuple[RunRecord, RunRecord]], key: str) -> LossDifference:
    """Return the candidate's loss minus the baseline's loss.

    Each pair is the baseline's run and the candidate's run with the same seed. `key` is the key of
    the loss in the summaries of the runs.
    """
    by_seed = {run.config["seed"]: run.summary[key] - base.summary[key] for base, run in pairs}
    return LossDifference(by_seed, statistics.fmean(base.summary[key] for base, _ in pairs))


def _speedup(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> Sample | None:
    """Return the candidate's speed divided by the baseline's speed.

    Return None if a speed is not known, because the precision is emulated. The pairs are as in
    `_difference`.
    """
    by_seed = {}
    for base, run in pairs:
        ratio = speed_ratio(base, run)
        if ratio is None:
            return None
        by_seed[run.config["seed"]] = ratio
    return Sample(by_seed)


def loss_slope(run: RunRecord) -> float:
    """Return the slope of the training loss at the last step, in nats per unit of ln(tokens).

    A power law E + A * steps^-a is fitted to a part of the loss curve and extrapolated to the last
    step. With a `wsd` schedule, the fitted part ends where the decay begins, because the decay
    lowers the loss faster than more tokens do. If the decay begins in the first half of the run,
    the fitted part ends in the middle of the run instead. With other schedules, the fitted part
    ends at the last step. The first 30 % of the steps before this end are not fitted, because the
    warmup and the steep fall of the loss at the beginning do not follow a power law.
    """
    steps, losses = run.curve("loss")
    first = int(steps[0])
    last = int(steps[-1])
    decay_begins = schedule.decay_begins(run.recipe.schedule, last) or last
    fit_end = max(decay_begins, (first + last) / 2)
    is_fitted = (steps > 0.3 * fit_end) & (steps <= fit_end) & np.isfinite(losses)
    # Divide the steps by the last step. The slope of the fitted curve at the last step is then
    # -a * A.
    shares = steps[is_fitted] / last
    # A fit begins with the coefficients (A, E) and the sum of squared errors.
    fits = {power: np.polyfit(shares**-power, losses[is_fitted], 1, full=True) for power in POWERS}
    best_power = min(fits, key=lambda power: fits[power][1])
    amplitude, _ = fits[best_power][0]
    return float(-best_power * amplitude)
