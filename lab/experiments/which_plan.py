"""The plan of `which`, which is fixed before the first round, and its rounds with their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace

from lab.compare.differences import error_of, fewest_seeds
from pretrain.metrics.run_record import RunRecord

# Maximum number of rounds. Each round has one seed, so this is also the maximum number of seeds.
MOST_SEEDS = 20

# Map the baseline and each candidate of a round to its run. All runs of a round have the same seed.
Round = Mapping[str, RunRecord]


@dataclass(frozen=True)
class WhichPlan:
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
        """Return the names of the candidates, which are all precisions except the baseline."""
        return list(self.seconds)[1:]

    @property
    def error(self) -> float:
        """Return the allowed probability that the interval of one candidate misses the true value.

        With probability CONFIDENCE, the intervals of all candidates contain the true values.
        """
        return error_of(len(self.candidates))


@dataclass
class Rounds:
    """The trained rounds, and estimates of the time that further rounds take.

    The estimates simulate the order of the runs on the GPUs.
    """

    plan: WhichPlan
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
        missing = fewest_seeds(self.plan.error) - len(self.runs)
        return max(1, missing) if self.at_once > 1 else 1

    def planned_seconds(self) -> float:
        """Return the estimated seconds of all planned rounds. Call this before the first round."""
        candidates = self.plan.candidates
        first_rounds = self.rounds_together()
        later_rounds = self.plan.seeds - first_rounds
        return self.seconds(candidates, first_rounds) + later_rounds * self.seconds(candidates)

    def seconds(self, candidates: Sequence[str], rounds: int = 1) -> float:
        """Return the estimated seconds of `rounds` that are trained together.

        The runs start in the order of `WhichTrainings.rounds`: first all baselines, then the
        candidates one after another, with all seeds. A candidate waits until the baseline with its
        seed has saved the starting checkpoint.
        """
        plan = self.plan
        baseline = self._seconds_of(plan.base)
        trunk = 0.0 if plan.begin_with else baseline * plan.trunk / plan.steps
        # For each GPU, the seconds from the start of the rounds until the GPU is free, as a heap.
        # The next run is trained on the GPU that is free first.
        free_at = [0.0] * self.at_once
        # For each round, the seconds until its candidates can start.
        candidates_start_at = []
        for _ in range(rounds):
            start = heapreplace(free_at, free_at[0] + baseline)
            candidates_start_at.append(start + trunk)
        for name in candidates:
            for start in candidates_start_at:
                heapreplace(free_at, max(free_at[0], start) + self._seconds_of(name))
        return max(free_at)

    def _seconds_of(self, name: str) -> float:
        """Return the estimated seconds of one run of `name`, the baseline or a candidate.

        The estimate is the duration of the most recent run of `name` in a round. If there is no
        such run yet, the estimate is computed from the speed in the trial.
        """
        plan = self.plan
        is_branch = bool(plan.begin_with) or name != plan.base
        steps = plan.steps - (plan.trunk if is_branch else 0)
        return self.took.get(name) or plan.start + plan.seconds[name] * steps
