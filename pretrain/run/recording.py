"""What is recorded of a step: who measures it, what its line in metrics.jsonl says, and who is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from packing.batch import StepBatches
from pretrain.metrics.energy import EnergyMeter
from pretrain.metrics.health import StepDecision
from pretrain.metrics.peaks import peak
from pretrain.metrics.recorder import Recorder
from pretrain.plan.preflight import Job
from pretrain.run.assembly import Assembly
from pretrain.run.running import Run


def recorder_of(job: Job, assembly: Assembly, accelerator: Accelerator) -> Recorder:
    plan = job.plan
    return Recorder(
        flops=None if plan.flops.uncounted else plan.flops,  # without all weights an MFU would be wrong
        peak_tflops=peak(plan.devices.name, "bf16"),
        device=accelerator.device,
        world_size=accelerator.num_processes,
        pack_length=job.recipe.data.length,
        low_precision=assembly.low_precision_products(plan.devices.name),
        energy=EnergyMeter.of(accelerator),
    )


def record_of_step(
    run: Run,
    batches: StepBatches,
    decision: StepDecision,
    losses: Sequence[float],
    measured: Mapping[str, float],
    most_frozen: Mapping[str, float],
    statistics: Mapping[str, float],
) -> dict[str, Any]:
    """The part of the metrics of the step just done. `losses`: its mean loss and, where the recipe has one, its penalty."""
    plan, labelled, (loss, *penalty) = run.job.plan, batches.valid_tokens > 0, losses
    return {
        "step": run.state.step,
        "tokens": run.state.tokens,
        **({"trained_tokens": run.state.valid_tokens} if plan.trained_share is not None else {}),
        "epoch": batches.epoch,
        **({"precision": run.job.precision.name} if plan.phases else {}),
        **batches.sources,
        **({"loss": loss} if labelled or not math.isfinite(loss) else {"loss": None, "unlabelled": True}),
        **({"penalty": penalty[0] if labelled else None} if penalty else {}),
        **measured,
        "step_tokens": batches.tokens,
        "sum_squared_lengths": batches.sum_squared_lengths,
        **({"frozen_most": most_frozen} if most_frozen else {}),
        "skipped": not decision.proceed,
        **({"halted": decision.reason} if decision.action == "stop" else {}),
        **statistics,
    }


def log(run: Run, figures: dict[str, Any], *, data_wait_ms: float, shown: bool) -> None:
    """The step's line in metrics.jsonl, in the trackers and, where it is `shown`, on the screen."""
    record = run.recorder.finish(**figures, data_wait_ms=data_wait_ms)
    run.trackers.log(record)
    run.console.step(record, show=shown)
