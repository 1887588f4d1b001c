"""What rounds of trainings tell of candidates: for each a verdict, its gain at equal loss and advice; a table and a picture.

Held-out losses are held against a margin that was fixed before the first round. The intervals hold whenever one looks, so one may
look after each round, and a candidate that is equivalent, worse or better is done.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from foundation.units import UNKNOWN, duration, markdown, memory, or_dash
from pretrain.compare.columns import signed
from pretrain.compare.comparison import COLOURS, own_speed
from pretrain.compare.differences import BETTER, CANNOT_TELL, CONFIDENCE, EQUIVALENT, FEWEST_SEEDS, SeedDifference
from pretrain.compare.figures import moving_mean, window_of
from pretrain.metrics.run_record import LOSS_KEY, RunRecord

MOST_SEEDS = 20
MOST_FOLD = math.log(1000)  # of the tokens, for equal loss: beyond, a loss that hardly falls tells nothing of them
USE = "use this"


@dataclass(frozen=True)
class Protocol:
    """What is fixed before the first round, and kept in which.json."""

    begin_with: str | None  # a checkpoint with which all begin, the baseline too
    margin: float  # a share of the baseline's loss
    precisions: list[str]  # that were asked for, the baseline first
    seconds: dict[str, float]  # that a step took in the trial, of those that ran in it: the baseline, then the candidates
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
    trained: SeedDifference | None = None  # loss of the last steps, in the candidate's own precision
    tokens_per_second: float | None = None  # None where it is emulated, as are the next two
    speedup: float | None = None
    memory_gib: float | None = None
    tokens: float | None = None  # how many times the tokens make up for its loss, by the baseline's own slope
    word: str = CANNOT_TELL
    more_seconds: float | None = None  # after which it should be told, if mean and spread stay as they are
    advice: str = ""

    @property
    def gain(self) -> float | None:
        """Speed at equal loss, in multiples of the baseline's."""
        return self.speedup / self.tokens if self.speedup and self.tokens else None

    @property
    def is_open(self) -> bool:
        return self.word == CANNOT_TELL


@dataclass
class Rounds:
    """What was trained under a protocol, and what it tells."""

    protocol: Protocol
    runs: list[dict[str, RunRecord]] = field(default_factory=list)  # a seed each: the baseline and candidates by name
    took: dict[str, float] = field(default_factory=dict)  # seconds of each one's last training

    def seconds(self, candidates: Sequence[str]) -> float:
        """How long a round of the baseline and these should take: as the last one took, or else by the trial."""
        protocol, total = self.protocol, 0.0
        for name in (protocol.base, *candidates):
            shared = protocol.trunk if protocol.begin_with or name != protocol.base else 0
            total += self.took.get(name) or protocol.start + protocol.seconds[name] * (protocol.steps - shared)
        return total

    # ── What they tell of each candidate ──────────────────────────────────────────────────────────────────────────────────────

    def verdicts(self) -> list[Verdict]:
        """Of every candidate, with advice: the one that gains most at equal loss is to be used."""
        verdicts = [self.verdict(name) for name in self.protocol.candidates]
        paying = [each for each in verdicts if each.word in (BETTER, EQUIVALENT) and (each.gain or 0) > 1]
        best = max(paying, key=lambda each: each.gain, default=None)
        for each in verdicts:
            if each.is_open:
                about = "about" if each.served and len(each.served.by_seed) >= FEWEST_SEEDS else "at least"
                hours = each.more_seconds and f"{about} {duration(each.more_seconds)} more of --hours should tell"
                each.advice = hours or f"nor would {MOST_SEEDS} seeds, if they spread alike"
            elif each.served and each.gain is None:
                flat = f"its gain is not known, as {self.protocol.base}'s loss does not clearly fall"
                each.advice = flat if each.speedup else "its speed is not known, as it is emulated"
            elif each in paying:
                each.advice = USE if each is best else f"pays less than {best.name}"
            else:
                each.advice = f"pays only over {each.tokens:.2f} times the tokens" if (each.gain or 0) > 1 else "not worth it"
        return verdicts

    def verdict(self, name: str) -> Verdict:
        protocol = self.protocol
        pairs = [(each[protocol.base], each[name]) for each in self.runs if name in each]
        if not pairs:
            return Verdict(name)
        if why := next((run.broke_off for _, run in pairs if run.broke_off), None):
            return Verdict(name, word=f"broke off: {why}")
        verdict = Verdict(name, _above(pairs, held_out_loss), _above(pairs, loss_at_end))
        speeds = [(own_speed(base), own_speed(run)) for base, run in pairs]
        if all(map(all, speeds)):
            verdict.tokens_per_second = statistics.median(own for _, own in speeds)
            verdict.speedup = statistics.median(own / base for base, own in speeds)
            verdict.memory_gib = pairs[0][1].summary.get("memory_gib")
        slope = SeedDifference({place: loss_slope(base) for place, (base, _) in enumerate(pairs)}, 0.0)
        if (half := slope.half_width()) is not None and slope.mean + half < 0:
            fold = math.exp(min(max(0.0, verdict.served.mean) / -slope.mean, MOST_FOLD))
            before = protocol.trunk if protocol.begin_with else 0  # these tokens are trained, and only others can be more
            verdict.tokens = (fold * protocol.steps - before) / (protocol.steps - before)
        verdict.word = verdict.served.anytime_verdict(protocol.margin, protocol.error)
        if verdict.is_open:
            verdict.more_seconds = self.seconds_to_tell(verdict)
        return verdict

    def seconds_to_tell(self, verdict: Verdict) -> float | None:
        """For the seeds that are missing to a verdict, if mean and spread stay; None where MOST_SEEDS would not tell."""
        values = list(verdict.served.by_seed.values())
        for seeds in range(len(values) + 1, MOST_SEEDS + 1):
            repeated = {place: values[place % len(values)] for place in range(seeds)}
            told = SeedDifference(repeated, verdict.served.baseline).anytime_verdict(self.protocol.margin, self.protocol.error)
            if told != CANNOT_TELL:
                return (seeds - len(values)) * self.seconds([verdict.name])
        return None

    # ── How it is shown ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def table(self, verdicts: Sequence[Verdict]) -> str:
        base, runs = self.protocol.base, [each[self.protocol.base] for each in self.runs]
        served = "served in BF16" if base != "fp32" else "held out"  # FP32 is evaluated in FP32
        header = ["precision", "seeds", served, "as trained", "tokens/s", "speed", "tokens for equal loss"]
        header += ["gain at equal loss", "memory", "verdict"]

        def percent(difference: SeedDifference | None) -> str:
            """ "+0.071 ± 0.150 %" of the baseline's loss."""
            if difference is None:
                return UNKNOWN
            half, share = difference.anytime_half_width(self.protocol.error), 100 / difference.baseline
            return f"{signed(share * difference.mean, 3)}{'' if half is None else f' ± {share * half:.3f}'} %"

        losses = (statistics.fmean(map(loss, runs)) for loss in (held_out_loss, loss_at_end))
        speeds, peak = [*filter(None, map(own_speed, runs))], or_dash(runs[0].summary.get("memory_gib"), memory)
        speed = or_dash(statistics.median(speeds) if speeds else None, "{:,.0f}".format)
        rows = [[base, str(len(runs)), *map("{:.4f}".format, losses), speed, "1", "1", "1", peak, "baseline"]]
        for each in verdicts:
            times = [or_dash(value, "{:.2f} ×".format) for value in (each.speedup, each.tokens, each.gain)]
            row = [each.name, str(len(each.served.by_seed) if each.served else 0), percent(each.served), percent(each.trained)]
            row += [or_dash(each.tokens_per_second, "{:,.0f}".format), *times, or_dash(each.memory_gib, memory)]
            rows.append([*row, each.word])
        return markdown(header, rows)

    def picture(self) -> str:
        """Loss against wall-clock in the first round, or against tokens where some are emulated: HTML that needs no network."""
        from plotly.graph_objects import Figure  # only the page needs it

        figure, first, base = Figure(), self.runs[0], self.protocol.base
        timed = all(map(own_speed, first.values()))
        for name, run in first.items():
            steps, losses = run.curve("loss")
            hours = np.cumsum(run.curve("step_ms")[1]) / 3.6e6 if timed else steps * run.tokens_per_step
            if timed and name != base and not self.protocol.begin_with:  # a branch begins where the baseline's trunk ends
                hours = hours + np.sum(first[base].curve("step_ms")[1][: self.protocol.trunk]) / 3.6e6
            figure.add_scatter(x=hours, y=moving_mean(losses, window_of(len(steps))), name=escape(name))
        figure.update_layout(template="plotly_white", colorway=COLOURS, yaxis_title="loss")
        return figure.update_xaxes(title="hours of training" if timed else "tokens").to_html(full_html=False)


def _above(pairs: Sequence[tuple[RunRecord, RunRecord]], loss: Callable[[RunRecord], float]) -> SeedDifference:
    base, run = ({each.config["seed"]: loss(each) for each in runs} for runs in zip(*pairs, strict=True))
    return SeedDifference.of(run, base)


def held_out_loss(run: RunRecord) -> float:
    return run.summary["held_out_loss"]


def loss_at_end(run: RunRecord) -> float:
    return run.summary[LOSS_KEY]


def loss_slope(run: RunRecord) -> float:
    """How a run's training loss falls, in nats for each unit of ln(tokens), over its middle half: below 0, where it falls."""
    steps, losses = run.curve("loss")
    middle = slice(len(steps) // 4, 3 * len(steps) // 4)
    return float(np.polyfit(np.log(steps[middle]), losses[middle], 1)[0])
