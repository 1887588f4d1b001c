"""What a running training consists of, which everything that happens to it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import Past, TrainState
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health
from pretrain.metrics.precision_health import PrecisionWatch
from pretrain.metrics.profile import StepProfile
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import MEASURE, same_measure
from pretrain.metrics.trackers import Trackers
from pretrain.metrics.waited import Waited
from pretrain.plan.preflight import Job
from pretrain.run.assembly import Assembly


@dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the lowest held-out loss, among those of the same measure as the newest."""

    step: int
    loss: float
    measure: Mapping[str, Any]

    @classmethod
    def after(cls, record: Mapping[str, Any], before: BestEvaluation | None) -> BestEvaluation | None:
        """Returns the best once `record`, an evaluation's object, follows those that `before` is the best of. The first of equal
        ones stays, and one whose loss is not finite does not count."""
        loss = record["held_out_loss"]
        if loss is None or not math.isfinite(loss):
            return before
        better = before is None or not same_measure(before.measure, record) or loss < before.loss
        return cls(record["step"], loss, {key: record[key] for key in MEASURE if key in record}) if better else before


@dataclass
class Run:
    """Everything that a running training consists of."""

    job: Job
    identity: Mapping[str, Any]  # what a checkpoint must agree with to be continued
    assembly: Assembly
    accelerator: Accelerator
    folder: RunFolder
    state: TrainState
    begins: bool  # here, with no step or with another run's; False where it goes on from a checkpoint that it resumes
    resumed_step: int
    health: Health
    checkpoints: Checkpoints
    recorder: Recorder
    trackers: Trackers
    precision_watch: PrecisionWatch | None
    profile: StepProfile | None
    console: Console
    waited: Waited
    best: BestEvaluation | None = None  # whose checkpoint is kept, where that is asked for
    past: Past = field(default_factory=Past)
    ended: bool = False  # in an earlier start, which left nothing to train or to evaluate: its records stay as they are
