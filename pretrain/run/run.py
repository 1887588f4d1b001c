"""The parts of a running training, and how it changes its precision.

The schedule alone decides at which step the precision changes. A run that is resumed at that step
repeats the change, and one that is resumed later finds the histories in its checkpoint. So both have
the bits of an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from foundation.files import write_json
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import Record, same_measure
from pretrain.metrics.trackers import Trackers
from pretrain.observe.audit import in_short
from pretrain.observe.observers import Observers
from pretrain.precision.model_precision import ModelPrecision
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job


def best_evaluation(records: Iterable[Record]) -> Record | None:
    """Return the first evaluation with the lowest finite held-out loss.

    Only evaluations with the same measure as the last of `records` count.
    """
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
    past: Mapping[str, Any]  # changes of its settings, as `NO_PAST` has them
    state: TrainState
    is_new: bool  # it starts without a checkpoint or branches; False if it resumes its own
    # The step after which this process trains, or an earlier one after a rollback.
    resumed_step: int
    health: Health
    recorder: Recorder
    trackers: Trackers
    console: Console
    observers: Observers = field(init=False)
    # The best evaluation, whose checkpoint is kept (`checkpoint.best`).
    best: Record | None = None

    @property
    def precision(self) -> ModelPrecision:
        """Return the precision in which the model computes."""
        return self.assembly.precision

    def write_audit(self) -> None:
        """Write audit.json if this is the main process."""
        if self.accelerator.is_main_process:
            write_json(self.folder.audit, self.assembly.audit)


def follow_schedule(run: Run) -> None:
    """Change to the precision of the next step if it is another one. Collective.

    Call this before random numbers are drawn for the step.
    """
    before = run.precision.current
    name = run.precision.schedule.at(run.state.step + 1).precision.name
    if name == before.name:
        return
    with run.console.progress("auditing the precision of products"):
        run.assembly.start_precision(name, run.job, run.accelerator)
    run.write_audit()
    run.console.notice(
        f"precision after step {run.state.step}: {before.name}, then {name}, audited again: "
        f"{in_short(run.assembly.audit)['products']}"
    )
