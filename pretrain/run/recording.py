"""What is recorded of a step: who measures it, what its line in metrics.jsonl says, and who is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from packing.batch import StepBatches
from pretrain.metrics.gradient_statistics import gradient_statistics
from pretrain.metrics.health import StepDecision, frozen_names_due
from pretrain.metrics.peaks import peak
from pretrain.metrics.recorder import Recorder, joules_of
from pretrain.model.huggingface import decoder_layers
from pretrain.optimizer import adamw
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
        energy=joules_of(accelerator.device),
    )


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def statistics_of_step(run: Run) -> dict[str, float]:
    """What the recipe wants to know of the gradients and the low-precision operands of the step whose backward is done."""
    step, hf, statistics = run.state.step + 1, run.assembly.hf, {}
    if due(step, run.job.plan.recipe.log.gradient_statistics):
        statistics = gradient_statistics(hf, decoder_layers(hf), run.accelerator)
    if run.precision_watch:
        figures, warning = run.precision_watch.report(step)
        statistics |= figures
        if warning:
            run.console.warning(warning)
    return statistics


def record_of_step(
    run: Run,
    batches: StepBatches,
    decision: StepDecision,
    losses: Sequence[float],
    measured: Mapping[str, float],
    statistics: Mapping[str, float],
) -> dict[str, Any]:
    """The part of the metrics of the step just done, and warnings of it. `losses`: its mean loss and, where the recipe has one,
    its penalty."""
    plan, labelled, (loss, *penalty) = run.job.plan, batches.valid_tokens > 0, losses
    step, optimizer, most_frozen = run.state.step, run.assembly.optimizer, {}
    frozen = adamw.frozen_share(optimizer, run.accelerator) if decision.proceed else 0.0
    if frozen_names_due(step, run.state.steps, frozen):
        most_frozen = adamw.most_frozen(optimizer, run.assembly.hf, run.accelerator)
    reason = decision.reason if decision.action in ("update", "skip") else None
    warnings = run.health.warnings_of(step, frozen, most_frozen, batches.valid_tokens)
    for warning in filter(None, (reason, *warnings)):
        run.console.warning(warning)
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
        "frozen_updates": frozen,
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
    if run.profile and run.profile.step == run.state.step:
        run.console.notice(run.profile.table(data_wait_ms))


def end_records(run: Run, stopped_by: int | None) -> None:
    """Close what is recorded; `stopped_by`: the signal that ended the run."""
    run.trackers.finish()
    if run.precision_watch:
        run.precision_watch.finish()
    if stopped_by is not None:
        run.console.notice(f"you waited {run.waited.describe()}")
