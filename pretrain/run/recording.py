"""Record a run: its description before the first step, and each step's line in metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from accelerate import Accelerator

from foundation.files import replace_file, write_json
from foundation.reading import load_object
from packing.batch import StepBatches
from pretrain.metrics.console import Console
from pretrain.metrics.health import StepDecision
from pretrain.metrics.peaks import peak
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_folder import RunFolder, describe_environment
from pretrain.metrics.run_record import last_screen, read_finished
from pretrain.model.distributed import describe_topology
from pretrain.model.huggingface import kept_from_source
from pretrain.observe.audit import in_short
from pretrain.observe.observers import is_due
from pretrain.optimizer import adamw
from pretrain.plan.rendering import render
from pretrain.plan.tokenizer import fingerprint_in_use
from pretrain.run.job import Job
from pretrain.run.run import Run
from pretrain.settings.config import resolved


def recorder_of(job: Job, accelerator: Accelerator) -> Recorder:
    """Return the recorder of the job's steps."""
    flops = job.plan.flops
    return Recorder(
        flops=None if flops.uncounted else flops,  # an MFU without some weights would be wrong
        peak_tflops=peak(job.plan.devices.name, "bf16"),
        device=accelerator.device,
        world_size=accelerator.num_processes,
        pack_length=job.recipe.data.length,
    )


def introduce_job(job: Job, accelerator: Accelerator, notices: Iterable[str]) -> Console:
    """Return a console that has printed the launch's corrections and replaced precisions."""
    console = Console(job.plan.steps, enabled=accelerator.is_main_process)
    for text in [*notices, *kept_from_source(job.recipe.model)]:
        console.notice(text)
    # Phases may share a notice. The dict keeps one of each, in order.
    for text in dict.fromkeys(active.notice for active in job.plan.precisions if active.notice):
        console.warning(text)
    return console


def introduce(run: Run, notes: Iterable[str]) -> None:
    """Print and write what this run is, before its first step.

    notes: about the checkpoint that it resumes or branches from.
    """
    run.console.notice(render(run.job.plan, brief=True))
    _take_over_parity(run)
    run.console.panel(
        f"precision of each product, as observed (all: {run.folder.audit})",
        in_short(run.assembly.audit),
    )
    for note in notes:
        run.console.notice(note)
    settings = resolved(run.job.recipe)
    if run.accelerator.is_main_process:
        # First: the summary of an earlier start does not describe the other records.
        run.folder.summary.unlink(missing_ok=True)
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)
        replace_file(run.folder.config, text.encode())
        write_json(run.folder.environment, _environment_of(run))
    run.write_audit()
    run.trackers.start(settings)


def _take_over_parity(run: Run) -> None:
    """Copy parity from the audit of an earlier start. It was compared before the first step."""
    if run.is_new or not run.folder.audit.is_file():
        return
    before = load_object(run.folder.audit, "delete it")
    # Each precision has a parity of its own.
    by_precision = before.get("precisions", {before.get("effective"): before})
    for name, record in by_precision.items():
        in_model = run.precision.in_model.get(name)
        if in_model is not None and "parity" in record:
            in_model.audit["parity"] = record["parity"]


def _environment_of(run: Run) -> dict[str, Any]:
    """Return the contents of environment.json."""
    data = run.job.data
    held_out = data.held_out
    return {
        "horizon": run.job.plan.steps,
        "data_fingerprint": data.train.fingerprint,
        "source_config": dict(run.job.source_config),
        "held_out_fingerprint": None if held_out is None else held_out.fingerprint,
        "tokenizer_fingerprint": fingerprint_in_use(
            run.job.recipe.data, run.job.recipe.model, data
        ),
        **describe_environment(describe_topology(run.accelerator)),
        "past": run.past,
    }


def record_of_step(
    run: Run,
    batches: StepBatches,
    decision: StepDecision,
    losses: Mapping[str, float],
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the metrics of the step just trained, and print its warnings.

    losses: its mean `loss`, and the other values of `PackedLanguageModel.mean_losses`.
    figures: learning rate and gradient norm, and the figures of observers.

    Collective.
    """
    is_labelled = batches.valid_tokens > 0
    loss = losses["loss"]
    optimizer = run.assembly.optimizer
    frozen = adamw.frozen_share(optimizer, run.accelerator) if decision.proceed else 0.0
    reason = decision.reason if decision.action in ("update", "skip") else None
    warnings = run.health.warnings_of(run.state.step, frozen, batches.valid_tokens, losses)
    for warning in filter(None, (reason, *warnings)):
        run.console.warning(warning)
    record = {
        "step": run.state.step,
        "tokens": run.state.tokens,
        "trained_tokens": run.state.valid_tokens if run.job.data.has_masks else None,
        "epoch": batches.epoch,
        "precision": run.precision.current.name if run.precision.schedule.changes else None,
        "unlabelled": True if not is_labelled and math.isfinite(loss) else None,
        "halted": decision.reason if decision.action == "stop" else None,
    }
    # A key without a meaning in this run is left out. A loss without a label is null.
    record = {key: value for key, value in record.items() if value is not None}
    record |= batches.sources
    record |= {name: value if is_labelled else None for name, value in losses.items()}
    if not math.isfinite(loss):
        record["loss"] = loss
    return {
        **record,
        **figures,
        "frozen_updates": frozen,
        "step_tokens": batches.tokens,
        "sum_squared_lengths": batches.sum_squared_lengths,
        "skipped": not decision.proceed,
    }


def log(run: Run, figures: dict[str, Any], *, data_wait_ms: float) -> None:
    """Write a step to metrics.jsonl and to the trackers, and print it every `log.every` steps."""
    record = run.recorder.finish(**figures, data_wait_ms=data_wait_ms)
    run.trackers.log(record)
    shows = is_due(run.state.step, run.job.recipe.log.every) or run.state.finished
    run.console.step(record, show=shows)


def is_over(job: Job, folder: RunFolder, console: Console) -> bool:
    """Return whether an earlier start has finished the run. If so, print its last screen."""
    finished = read_finished(job.run_dir)
    if finished is None or finished.summary["steps"] != job.plan.steps:
        return False
    is_complete = folder.final.exists() or not job.recipe.checkpoint.at_end
    if is_complete:
        console.panel(*last_screen(finished, folder))
    return is_complete
