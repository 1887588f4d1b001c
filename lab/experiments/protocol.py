"""The protocol of `which`, which is fixed before the first round, and the times of its rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.compare.differences import error_of, fewest_seeds
from pretrain.metrics.run_record import RunRecord

# Maximum number of rounds. Each round has one seed, so this is also the maximum number of seeds.
MOST_SEEDS = 20

# Map the baseline and each candidate of a round to its run. All runs of a round have the same seed.
Round = Mapping[str, RunRecord]


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
    # Precision in which the trained models are evaluated, or None for the baseline's own.
    served: str | None = None
    # Settings of the baseline and each candidate, by dotted key (--candidates). It is empty if the
    # candidates are precisions.
    settings: dict[str, dict[str, object]] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Return the name of the baseline."""
        return next(iter(self.seconds))

    @property
    def candidates(self) -> list[str]:
        """Return the names of the candidates: all names in `seconds` except the baseline."""
        return list(self.seconds)[1:]

    @property
    def error(self) -> float:
        """Return the allowed probability that the interval of one candidate misses the true value.

        With probability CONFIDENCE, the intervals of all candidates contain the true values.
        """
        return error_of(len(self.candidates))


@dataclass
class Rounds:
    """The trained rounds, and estimates of the time that further rounds take."""

    protocol: Protocol
    # Number of trainings that run at the same time, on different GPUs.
    at_once: int = 1
    # Map the baseline and each candidate to the seconds that its most recent finished run took.
    took: dict[str, float] = field(default_factory=dict)
    # The runs of each trained round.
    runs: list[Round] = field(default_factory=list)

    def rounds_together(self) -> int:
        """Return the number of rounds to train together next, if the time suffices.

        No verdict is possible before `fewest_seeds` rounds, so these rounds can share several GPUs.
        On one GPU, the rounds are trained one by one: together they would not end earlier, and the
        first table would be late.
        """
        missing = fewest_seeds(self.protocol.error) - len(self.runs)
        return max(1, missing) if self.at_once > 1 else 1

    def planned_seconds(self) -> float:
        """Return the estimated seconds of all planned rounds. Call this before the first round."""
        candidates = self.protocol.candidates
        together = self.rounds_together()
        later = self.protocol.seeds - together
        return self.seconds(candidates, together) + later * self.seconds(candidates)

    def seconds(self, candidates: Sequence[str], rounds: int = 1) -> float:
        """Return the estimated seconds of `rounds` that are trained together.

        On several GPUs, the runs are counted as waves of `at_once` runs that take equally long.
        """
        seconds = [self._seconds_of(name) for name in (self.protocol.base, *candidates)]
        waves = math.ceil(rounds * len(seconds) / self.at_once)
        return waves * statistics.fmean(seconds)

    def _seconds_of(self, name: str) -> float:
        """Return the estimated seconds of one run of `name`, the baseline or a candidate.

        The estimate is the duration of the most recent run of `name` in a round. If there is no
        such run yet, the estimate is computed from the speed in the trial.
        """
        protocol = self.protocol
        if name in self.took:
            return self.took[name]
        is_branch = protocol.begin_with or name != protocol.base
        steps = protocol.steps - protocol.trunk if is_branch else protocol.steps
        return protocol.start + protocol.seconds[name] * steps
