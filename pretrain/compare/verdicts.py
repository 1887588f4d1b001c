"""Compute the verdict, the gain at equal loss, and the advice for each candidate of `which`.

A candidate is a precision that `which` compares with the baseline, which is also a precision. In
each round, the baseline and the candidates are trained with one seed. The difference between a
candidate's held-out loss and the baseline's held-out loss is compared with a margin that is fixed
before the first round. The confidence intervals of the differences are valid after every round. A
candidate needs no more rounds if its difference certainly lies within the margin, certainly lies
beyond the margin, or is certainly below zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foundation.units import duration, memory
from pretrain.compare.columns import Column, signed, table_of
from pretrain.compare.comparison import speed_ratio
from pretrain.compare.differences import (
    BEYOND_MARGIN,
    CANNOT_TELL,
    CONFIDENCE,
    FEWEST_SEEDS,
    MOST_ESTIMATED_SEEDS,
    OPEN_VERDICTS,
    PROBABLY_ENOUGH,
    WORSE,
    SeedDifference,
    fewest_seeds,
)
from pretrain.compare.fairness import recipe_of
from pretrain.metrics.run_record import LOSS_KEY, RunRecord
from pretrain.optimizer import schedule

# Maximum number of rounds. Each round has one seed, so this is also the maximum number of seeds.
MOST_SEEDS = 20
# Upper limit of the estimated growth of the training tokens for equal loss, as a natural logarithm.
# A larger estimate would not be reliable, because it means that the baseline's loss hardly falls.
MOST_FOLD = math.log(1000)
# Exponents that are tried when a power law is fitted to a loss curve.
POWERS = np.arange(0.05, 1.5, 0.05)
# Entry of the baseline in the table's column "verdict".
BASELINE = "baseline"
# Advice about the recommended candidate, and about a candidate that may not be faster.
USE = "use this"
NO_GAIN = "not shown to be faster at equal loss"


@dataclass(frozen=True)
class Protocol:
    """Settings that are fixed before the first round. which.json stores each field by its name."""

    # Checkpoint from which all runs branch, including the baseline's runs. None if the baseline
    # trains from the start.
    begin_with: str | None
    # Largest acceptable difference from the baseline's loss, as a share of that loss.
    margin: float
    # Names of the requested precisions. The baseline is the first.
    precisions: list[str]
    # Map the name of each precision that ran in the trials to its seconds per step. The baseline is
    # the first.
    seconds: dict[str, float]
    # Seconds that a run takes in addition to its steps, for its start and its evaluation.
    start: float
    # Number of planned rounds. Each round has one seed.
    seeds: int
    # Number of the last step of every run.
    steps: int
    # Number of the step after which candidates branch from the baseline.
    trunk: int

    @property
    def base(self) -> str:
        """Return the name of the baseline."""
        return next(iter(self.seconds))

    @property
    def candidates(self) -> list[str]:
        """Return the names of the candidates, which are all precisions except the baseline."""
        return list(self.seconds)[1:]

    @property
    def error(self) -> float:
        """Return the allowed probability that the interval of one candidate misses the true value.

        The total probability of a miss, 1 - CONFIDENCE, is divided by the number of candidates. So
        with probability CONFIDENCE, the intervals of all candidates contain the true values
        (Bonferroni).
        """
        return (1 - CONFIDENCE) / len(self.candidates)


@dataclass
class Verdict:
    """Results of a candidate. Unknown values are None. verdict.json stores each field by its name.

    `tokens_per_second`, `speedup` and `memory_gib` are None if the precision is emulated.
    """

    # Name of the candidate.
    name: str
    # Held-out loss of the candidate, evaluated in BF16, minus the baseline's held-out loss.
    served: SeedDifference | None = None
    # Training loss at the end of the candidate's run, in the candidate's precision, minus the
    # baseline's training loss.
    trained: SeedDifference | None = None
    # Median of the candidate's speed over all seeds.
    tokens_per_second: float | None = None
    # Speed of the candidate divided by the baseline's speed.
    speedup: float | None = None
    # Peak memory of the candidate's run.
    memory_gib: float | None = None
    # Factor by which the training tokens would have to grow until the candidate has the baseline's
    # loss. It is estimated from the slope of the baseline's loss.
    tokens: float | None = None
    # Lower and upper end of the interval of `gain`. It combines the intervals of the speedup, the
    # loss and the slope.
    gain_interval: list[float] | None = None
    # The verdict as text, such as "equivalent" or "broke off: was halted at step 7".
    word: str = CANNOT_TELL
    # If the verdict is open: number of seeds, including the trained ones, that are enough with the
    # probability PROBABLY_ENOUGH. None if the number is larger than MOST_ESTIMATED_SEEDS. Before
    # FEWEST_SEEDS seeds, it is the number without which no verdict is possible.
    enough_seeds: int | None = None
    # Estimated seconds of the rounds that are missing to `enough_seeds`. None if there would be
    # more than MOST_SEEDS rounds.
    more_seconds: float | None = None
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


@dataclass
class Rounds:
    """The runs of all trained rounds, and the verdicts that follow from the runs."""

    protocol: Protocol
    # One dict per trained round, which maps the baseline and the round's candidates to their runs.
    # All runs of a round have the same seed.
    runs: list[dict[str, RunRecord]] = field(default_factory=list)
    # Map the baseline and each candidate to the seconds that its most recent finished run took.
    took: dict[str, float] = field(default_factory=dict)
    # Number of trainings that run at the same time, on different GPUs.
    at_once: int = 1

    @property
    def before_verdict(self) -> int:
        """Number of rounds to train together next, if the time suffices.

        No verdict is possible before `fewest_seeds` rounds, so these rounds can share several GPUs.
        On one GPU, the rounds are trained one by one: together they would not end earlier, and the
        first table would be late.
        """
        missing = fewest_seeds(self.protocol.error) - len(self.runs)
        return max(1, missing) if self.at_once > 1 else 1

    def planned_seconds(self) -> float:
        """Return the estimated seconds of all planned rounds. Call this before the first round."""
        candidates = self.protocol.candidates
        first_rounds = self.before_verdict
        later_rounds = self.protocol.seeds - first_rounds
        return self.seconds(candidates, first_rounds) + later_rounds * self.seconds(candidates)

    def seconds(self, candidates: Sequence[str], rounds: int = 1) -> float:
        """Return the estimated seconds of `rounds` that are trained together.

        The runs start in the order of `Question.rounds`: first all baselines, then the candidates
        one after another, with all seeds. A candidate waits until the baseline with its seed has
        saved the starting checkpoint.
        """
        protocol = self.protocol
        baseline = self._seconds_of(protocol.base)
        trunk = 0.0 if protocol.begin_with else baseline * protocol.trunk / protocol.steps
        # For each GPU, the seconds from the start of the rounds until the GPU is free. The next run
        # is trained on the GPU that is free first.
        gpu_free_at = [0.0] * self.at_once
        # For each round, the seconds until its candidates can start.
        candidates_start_at = []
        for _ in range(rounds):
            gpu = gpu_free_at.index(min(gpu_free_at))
            candidates_start_at.append(gpu_free_at[gpu] + trunk)
            gpu_free_at[gpu] += baseline
        for name in candidates:
            for start in candidates_start_at:
                gpu = gpu_free_at.index(min(gpu_free_at))
                gpu_free_at[gpu] = max(gpu_free_at[gpu], start) + self._seconds_of(name)
        return max(gpu_free_at)

    def _seconds_of(self, name: str) -> float:
        """Return the estimated seconds of one run of `name`, the baseline or a candidate.

        The estimate is the duration of the most recent run of `name` in a round. If there is no
        such run yet, the estimate is computed from the speed in the trial.
        """
        protocol = self.protocol
        is_branch = bool(protocol.begin_with) or name != protocol.base
        steps = protocol.steps - (protocol.trunk if is_branch else 0)
        return self.took.get(name) or protocol.start + protocol.seconds[name] * steps

    # ── Verdicts ──────────────────────────────────────────────────────────────────────────────────

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts of all candidates, including advice.

        Among the eligible candidates, the candidate with the largest gain at equal loss is
        recommended. A candidate is not eligible if its gain may be 1 or less, or if its loss may be
        worse than the baseline's loss by more than the margin.
        """
        verdicts = [self.verdict(name) for name in self.protocol.candidates]
        # The next rounds train all open candidates.
        seconds_of_round = self.seconds([verdict.name for verdict in verdicts if verdict.is_open])
        for verdict in verdicts:
            if verdict.served and verdict.enough_seeds and verdict.enough_seeds <= MOST_SEEDS:
                verdict.more_seconds = seconds_of_round * (
                    verdict.enough_seeds - len(verdict.served.by_seed)
                )
        eligible = [
            verdict
            for verdict in sorted(verdicts, key=lambda verdict: -(verdict.gain or 0.0))
            if verdict.is_faster_at_equal_loss
            and verdict.word not in (WORSE, WORSE + BEYOND_MARGIN)
        ]
        for verdict in verdicts:
            verdict.advice = self._advice(verdict, eligible)
        return verdicts

    def _advice(self, verdict: Verdict, eligible: Sequence[Verdict]) -> str:
        """Return the advice about a candidate.

        `eligible` has the verdicts of the candidates that may be recommended, sorted by their gain.
        The first of them is recommended.
        """
        if verdict.is_open:
            seeds = verdict.enough_seeds or f"more than {MOST_ESTIMATED_SEEDS}"
            enough = (
                f"{seeds} seeds would be enough with a probability of {100 * PROBABLY_ENOUGH:g} %"
            )
            if verdict.more_seconds is None:
                return f"{enough}, but at most {MOST_SEEDS} are trained"
            more = f"{duration(verdict.more_seconds)} more of --hours"
            has_interval = verdict.served and len(verdict.served.by_seed) >= FEWEST_SEEDS
            return f"about {more} ({enough})" if has_interval else f"needs at least {more}"
        if verdict.served and verdict.gain is None:
            if verdict.speedup:
                return (
                    "its gain is not known, because the loss of the baseline "
                    f"{self.protocol.base} does not clearly fall"
                )
            return "its speed is not known, because the precision is emulated"
        if verdict in eligible:
            return USE if verdict is eligible[0] else f"smaller gain than {eligible[0].name}"
        if verdict.is_faster_at_equal_loss:
            return (
                f"faster than {self.protocol.base} at equal loss, with {verdict.tokens:.2f} × the "
                "tokens"
            )
        return NO_GAIN

    def verdict(self, name: str) -> Verdict:
        """Return the verdict of the candidate or baseline `name`, without advice."""
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
            verdict.enough_seeds = fewest_seeds(protocol.error)
            if len(pairs) >= FEWEST_SEEDS:
                verdict.enough_seeds = served.seeds_for_verdict(protocol.margin, protocol.error)
        speedups = _speedups(pairs)
        if speedups:
            speeds = [run.summary["tokens_per_second"] for _, run in pairs]
            verdict.tokens_per_second = statistics.median(speeds)
            verdict.speedup = speedups.mean
            verdict.memory_gib = pairs[0][1].summary.get("memory_gib")
        # SeedDifference only computes the mean and the interval of the slopes here. Neither depends
        # on its field `baseline`.
        slopes = {index: loss_slope(base) for index, (base, _) in enumerate(pairs)}
        self._add_gain(verdict, speedups, SeedDifference(slopes, 0.0))
        return verdict

    def _add_gain(
        self, verdict: Verdict, speedups: SeedDifference | None, slopes: SeedDifference
    ) -> None:
        """Set `verdict.tokens` and `verdict.gain_interval`.

        Both fields stay None unless the whole interval of the loss slope is negative.
        `gain_interval` also stays None if the speedups are not known, or if the verdict is "cannot
        tell".

        Args:
            verdict: The verdict of a candidate, with its loss difference in `served`.
            speedups: Speed of the candidate divided by the baseline's speed, for each seed. None if
                a speed is not known.
            slopes: Slope of the baseline's loss for each seed, as `loss_slope` returns it.
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
        # Largest and smallest factor of tokens within the intervals of the loss and the slope.
        most = self.tokens_for(served.mean + loss_half, slopes.mean + slope_half)
        least = self.tokens_for(served.mean - loss_half, slopes.mean - slope_half)
        verdict.gain_interval = [
            max(0.0, speedups.mean - speed_half) / most,
            (speedups.mean + speed_half) / least,
        ]

    def tokens_for(self, loss: float, slope: float) -> float:
        """Return the growth factor of the training tokens that lowers the loss by `loss`.

        If all runs branch from the checkpoint of another run, only the tokens after that checkpoint
        are multiplied by the factor. Otherwise all tokens are multiplied by it.

        Args:
            loss: Loss of a candidate minus the baseline's loss, in nats per token. The factor is 1
                if `loss` is negative.
            slope: Slope of the baseline's loss, in nats per unit of ln(tokens). Must be negative.
        """
        total_factor = math.exp(min(max(0.0, loss) / -slope, MOST_FOLD))
        steps = self.protocol.steps
        before = self.protocol.trunk if self.protocol.begin_with else 0
        return (total_factor * steps - before) / (steps - before)

    # ── Table ─────────────────────────────────────────────────────────────────────────────────────

    def table(self, verdicts: Sequence[Verdict]) -> str:
        """Return the Markdown table of the baseline and the candidates in `verdicts`."""
        baseline = replace(
            self.verdict(self.protocol.base),
            word=BASELINE,
            speedup=1.0,
            tokens=1.0,
            gain_interval=None,
        )
        columns = [
            Column("precision", "", lambda verdict: verdict.name, is_text=True),
            Column(
                "seeds", "", lambda verdict: len(verdict.served.by_seed) if verdict.served else 0
            ),
            Column(
                # A baseline in FP32 is evaluated in FP32 instead of BF16.
                "held out" if self.protocol.base == "fp32" else "served in BF16",
                "",
                lambda verdict: self._loss(verdict, verdict.served),
            ),
            Column("training loss", "", lambda verdict: self._loss(verdict, verdict.trained)),
            Column("tokens/s", "", lambda verdict: verdict.tokens_per_second, "{:,.0f}".format),
            Column("speed", "", lambda verdict: verdict.speedup, "{:.2f} ×".format),
            Column("tokens for equal loss", "", lambda verdict: verdict.tokens, "{:.2f} ×".format),
            Column("gain at equal loss", "", lambda verdict: verdict.gain, "{:.2f} ×".format),
            Column(
                "its interval",
                "",
                lambda verdict: verdict.gain_interval,
                "{0[0]:.2f} to {0[1]:.2f}".format,
            ),
            Column("memory", "", lambda verdict: verdict.memory_gib, memory),
            Column("verdict", "", lambda verdict: verdict.word),
        ]
        return table_of(columns, [baseline, *verdicts])

    def _loss(self, verdict: Verdict, difference: SeedDifference | None) -> str | None:
        """Return a loss difference in percent of the baseline's loss: "+0.071 ± 0.150 %".

        If `verdict` is the baseline's, return the loss itself. Return None if `difference` is None.
        """
        if difference is None:
            return None
        if verdict.word == BASELINE:
            return f"{difference.baseline:.4f}"
        scale = 100 / difference.baseline
        half = difference.anytime_half_width(self.protocol.error)
        interval = "" if half is None else f" ± {scale * half:.3f}"
        return f"{signed(scale * difference.mean, 3)}{interval} %"


def _difference(pairs: Sequence[tuple[RunRecord, RunRecord]], key: str) -> SeedDifference:
    """Return the candidate's loss minus the baseline's loss, for each pair of runs.

    Each pair is the baseline's run and the candidate's run with the same seed. `key` is the key of
    the loss in the summaries of the runs.
    """
    by_seed = {run.config["seed"]: run.summary[key] - base.summary[key] for base, run in pairs}
    return SeedDifference(by_seed, statistics.fmean(base.summary[key] for base, _ in pairs))


def _speedups(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> SeedDifference | None:
    """Return the candidate's speed divided by the baseline's speed, for each pair of runs.

    Each pair is the baseline's run and the candidate's run with the same seed. Return None if the
    speed of any run is not known.
    """
    speedups = {
        index: speedup
        for index, (base, run) in enumerate(pairs)
        if (speedup := speed_ratio(base, run))
    }
    return SeedDifference(speedups, 1.0) if len(speedups) == len(pairs) else None


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
    decay_begins = schedule.decay_begins(recipe_of(run).schedule, last) or last
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
