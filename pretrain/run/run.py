"""The parts of a running training, handed to all that acts on it; and how it changes its precision.

The settings alone say at which step the precision changes. A run that is resumed at that step repeats the change, and one resumed
later finds the histories in its checkpoint. So both have the bits of an unbroken run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from packing.stream import StreamedPacks
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health
from pretrain.metrics.precision_health import PrecisionWatch
from pretrain.metrics.profile import StepProfile
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import Record, same_measure
from pretrain.metrics.trackers import Trackers
from pretrain.precision.settings import ActivePrecision
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job
from pretrain.verify.audit import in_short
from pretrain.verify.gap import GapMeter


def best_evaluation(records: Iterable[Record]) -> Record | None:
    """The first evaluation with the lowest finite held-out loss among those of the same measure as the last of `records`."""
    best = None
    for record in records:
        loss = record["held_out_loss"]
        if loss is None or not math.isfinite(loss):
            continue
        if best is None or not same_measure(best, record) or loss < best["held_out_loss"]:
            best = record
    return best


@dataclass
class Run:
    """Everything that a running training consists of."""

    job: Job
    assembly: Assembly
    accelerator: Accelerator
    folder: RunFolder
    checkpoints: Checkpoints
    constants: Mapping[str, Any]  # what all its checkpoints say alike
    state: TrainState
    # here, with no step or with another run's; False where it goes on from a checkpoint that it
    # resumes
    begins: bool
    resumed_step: int
    has_masks: bool  # of its packs: not every token has a label
    health: Health
    recorder: Recorder
    trackers: Trackers
    precision_watch: PrecisionWatch | None
    profile: StepProfile | None
    console: Console
    stream: StreamedPacks | None = None  # of packs that are made meanwhile
    gap: GapMeter | None = None  # of a run that measures it
    # the best evaluation, whose checkpoint is kept, where `checkpoint.best` wants that
    best: Record | None = None

    def compute_in(self, active: ActivePrecision, first_step: int) -> None:
        """Tell the job and the watch that steps compute in `active` now. Operands of `first_step` are measured in any case."""
        self.job = self.job.with_plan(active=active)
        if self.precision_watch:
            self.precision_watch.go_over_to(active, first_step)


def follow_the_schedule(run: Run) -> None:
    """Change to the precision of the next step, if that is another, before random numbers are drawn for it. Collective."""
    active, before, step = (
        run.job.plan.active_after(run.state.step),
        run.assembly.active,
        run.state.step,
    )
    if active.precision.name == before.precision.name:
        return
    with run.console.progress("looking at what runs"):
        run.assembly.begin(active, run.job, run.accelerator)
    run.compute_in(active, first_step=step + 1)
    change = f"{before.precision.name}, then {active.precision.name}"
    run.console.notice(
        f"precision after step {step}: {change}, audited again: {in_short(run.assembly.audit)['products']}"
    )
