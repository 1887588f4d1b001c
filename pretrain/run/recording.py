"""What is written and said of a run: what it is before its first step, each step's line in metrics.jsonl, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from accelerate import Accelerator

from packing.batch import StepBatches
from pretrain.compare.figures import plot_losses
from pretrain.metrics.console import Console
from pretrain.metrics.gradient_statistics import gradient_statistics
from pretrain.metrics.health import StepDecision
from pretrain.metrics.peaks import peak
from pretrain.metrics.recorder import Recorder, joules_of
from pretrain.metrics.run_folder import RunFolder, describe_environment
from pretrain.metrics.run_record import RunRecord, last_screen, read_finished, read_metrics, read_run, summary
from pretrain.metrics.waited import Waited
from pretrain.model.distributed import describe_topology
from pretrain.model.huggingface import decoder_layers
from pretrain.optimizer import adamw
from pretrain.plan.preflight import Job
from pretrain.plan.rendering import render
from pretrain.plan.tokenizer import fingerprint_in_use
from pretrain.run.assembly import Assembly
from pretrain.run.running import Run
from pretrain.settings import config
from pretrain.verify import audit

# ── Before the first step ─────────────────────────────────────────────────────────────────────────────────────────────────────


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


def warn_of_precisions(job: Job, console: Console) -> None:
    """Say what is done in place of a precision that the device lacks, of those that steps of the run compute in."""
    for notice in [active.notice for active in job.plan.in_use if active.notice]:
        console.warning(notice)


def introduce(run: Run, notes: Iterable[str]) -> None:
    """Say and write down what this run is, before its first step; `notes` are of what it goes on from."""
    plan, assembly, folder = run.job.plan, run.assembly, run.folder
    run.console.notice(render(plan, brief=True))
    microbatch = plan.expected_microbatch
    memory = {"microbatch": microbatch, "planned": plan.memory.parts(microbatch), "held": assembly.memory_held()}
    assembly.audit["memory"] = memory
    run.console.panel(f"what runs in which precision (all of it: {folder.audit})", audit.in_short(assembly.audit))
    for note in notes:
        run.console.notice(note)
    if run.accelerator.is_main_process:
        folder.summary.unlink(missing_ok=True)  # first: it does not describe the other records
        folder.write_yaml(folder.config, config.resolved(run.job.recipe))
        environment = describe_environment(describe_topology(run.accelerator))
        folder.write_json(folder.environment, _fingerprints(run.job) | environment | {"past": run.constants["past"]})
        folder.write_json(folder.audit, assembly.audit)
    run.trackers.start(config.resolved(run.job.recipe))


def _fingerprints(job: Job) -> dict[str, Any]:
    """What environment.json says of the text, of the tokenizer and of `model.source`."""
    held_out = job.data.held_out
    fingerprints = {
        "data_fingerprint": job.data.train.fingerprint,
        "source_config": dict(job.source_config),
        "held_out_fingerprint": held_out.fingerprint if held_out is not None else None,
        "tokenizer_fingerprint": fingerprint_in_use(job.recipe.data, job.recipe.model, job.data),
    }
    return {key: value for key, value in fingerprints.items() if value}


def first_step(run: Run) -> AbstractContextManager[object]:
    """Put this around each step: during the first one of this process, which takes long, a terminal shows a bar."""
    if run.state.step != run.resumed_step:
        return nullcontext()
    compiles = run.assembly.audit["compiled"] != "nothing"
    return run.waited.on("training", "first step, compiling" if compiles else "first step")


# ── A step ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    frozen = adamw.frozen_share(run.assembly.optimizer, run.accelerator) if decision.proceed else 0.0
    reason = decision.reason if decision.action in ("update", "skip") else None
    warnings = run.health.warnings_of(run.state.step, frozen, batches.valid_tokens)
    for warning in filter(None, (reason, *warnings)):
        run.console.warning(warning)
    return {
        "step": run.state.step,
        "tokens": run.state.tokens,
        **({"trained_tokens": run.state.valid_tokens} if run.job.data.has_masks else {}),
        "epoch": batches.epoch,
        **({"precision": run.job.precision.name} if plan.phases else {}),
        **batches.sources,
        **({"loss": loss} if labelled or not math.isfinite(loss) else {"loss": None, "unlabelled": True}),
        **({"penalty": penalty[0] if labelled else None} if penalty else {}),
        **measured,
        "frozen_updates": frozen,
        "step_tokens": batches.tokens,
        "sum_squared_lengths": batches.sum_squared_lengths,
        "skipped": not decision.proceed,
        **({"halted": decision.reason} if decision.action == "stop" else {}),
        **statistics,
    }


def log(run: Run, figures: dict[str, Any], *, data_wait_ms: float) -> None:
    """The step's line in metrics.jsonl, in the trackers and, every `log.every` steps, on the screen."""
    record = run.recorder.finish(**figures, data_wait_ms=data_wait_ms)
    run.trackers.log(record)
    run.console.step(record, show=due(run.state.step, run.job.recipe.log.every) or run.state.finished)
    if run.profile and run.profile.step == run.state.step:
        run.console.notice(run.profile.table(data_wait_ms))


# ── The end ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def end_records(run: Run, stopped_by: int) -> None:
    """Close what is recorded; `stopped_by`: the signal that ended the run, or 0."""
    run.trackers.finish()
    if run.precision_watch:
        run.precision_watch.finish()
    if stopped_by:
        run.console.notice(f"you waited {run.waited.describe()}")


def sum_up(run: Run) -> RunRecord | None:
    """Draw the curves; returns what the run folder holds, with the summary that `conclude` writes. None but on the main
    process."""
    if not run.accelerator.is_main_process:
        return None
    metrics = read_metrics(run.folder.path)
    recipe, text = run.job.recipe, run.job.data.train.fingerprint
    fairness = {"seed": recipe.seed, "tokens_per_step": recipe.batch.tokens, "data_fingerprint": text}  # what may be compared
    finished = replace(read_run(run.folder.path, metrics), summary=fairness | summary(metrics))
    plot_losses([finished], run.folder.loss_plot)
    run.trackers.picture(run.folder.loss_plot, run.state.step)
    return finished


def conclude(run: Run, finished: RunRecord | None) -> None:
    """Write the summary, the last thing that a run does: who finds it of the last step finds all else. And say where all is."""
    if finished is not None:
        run.folder.write_json(run.folder.summary, finished.summary)
        run.console.panel(*last_screen(finished, run.folder, run.waited.describe()))


def is_over(job: Job, folder: RunFolder, console: Console, waited: Waited) -> bool:
    """Whether an earlier start has done all of a run that has no steps to come, which is said then."""
    finished = read_finished(job.run_dir)
    over = finished is not None and finished.summary["steps"] == job.plan.steps
    if over and job.data.held_out is not None:
        over = job.plan.steps in finished.held_out_curve()[0]
    if over and job.recipe.checkpoint.at_end:
        over = folder.final.exists()
    if over:
        console.panel(*last_screen(finished, folder, waited.describe()))
    return over
