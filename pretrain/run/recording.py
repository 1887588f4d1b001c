"""What is written and said of a run: what it is before its first step, each step's line in metrics.jsonl, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml
from accelerate import Accelerator

from foundation.files import replace_file, write_json
from foundation.reading import load_object
from packing.batch import StepBatches
from pretrain.metrics.console import Console
from pretrain.metrics.health import StepDecision
from pretrain.metrics.peaks import peak
from pretrain.metrics.profile import TABLE_FILE
from pretrain.metrics.recorder import Recorder, gradient_statistics
from pretrain.metrics.run_folder import RunFolder, describe_environment
from pretrain.metrics.run_record import last_screen, read_finished
from pretrain.model.distributed import describe_topology
from pretrain.model.huggingface import decoder_layers
from pretrain.optimizer import adamw
from pretrain.plan.rendering import render
from pretrain.plan.tokenizer import fingerprint_in_use
from pretrain.run.job import Job
from pretrain.run.run import Run
from pretrain.settings import config
from pretrain.verify import audit
from pretrain.verify.gap import GapMeter


def recorder_of(job: Job, accelerator: Accelerator) -> Recorder:
    return Recorder(
        # without all weights an MFU would be wrong
        flops=None if job.plan.flops.uncounted else job.plan.flops,
        peak_tflops=peak(job.plan.devices.name, "bf16"),
        device=accelerator.device,
        world_size=accelerator.num_processes,
        pack_length=job.recipe.data.length,
    )


def introduce_job(job: Job, accelerator: Accelerator, notices: Iterable[str]) -> Console:
    """A console for `job` that has said what the launch was corrected in, and what is done in place of a missing precision."""
    console = Console(job.plan.steps, enabled=accelerator.is_main_process)
    for text in notices:
        console.notice(text)
    # phases may share one
    for text in dict.fromkeys(active.notice for active in job.plan.precisions if active.notice):
        console.warning(text)
    return console


def introduce(run: Run, notes: Iterable[str]) -> None:
    """Say and write down what this run is, before its first step; `notes` are of what it goes on from."""
    plan, data, assembly, folder = run.job.plan, run.job.data, run.assembly, run.folder
    run.console.notice(render(plan, brief=True))
    # parity was looked at before the run's first step
    if not run.begins and folder.audit.is_file():
        before = load_object(folder.audit, "delete it")
        # by precision: it says nothing of another
        looked_at = before.get("precisions", {before.get("effective"): before})
        for name, record in looked_at.items():
            if name in assembly.precision.in_model and "parity" in record:
                assembly.precision.in_model[name].audit["parity"] = record["parity"]
    run.console.panel(
        f"what runs in which precision (all of it: {folder.audit})", audit.in_short(assembly.audit)
    )
    for note in notes:
        run.console.notice(note)
    settings = config.resolved(run.job.recipe)
    if run.accelerator.is_main_process:
        folder.summary.unlink(missing_ok=True)  # first: it does not describe the other records
        replace_file(
            folder.config,
            yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120).encode(),
        )
        known = {
            "horizon": plan.steps,
            "data_fingerprint": data.train.fingerprint,
            "source_config": dict(run.job.source_config),
            "held_out_fingerprint": data.held_out.fingerprint
            if data.held_out is not None
            else None,
            "tokenizer_fingerprint": fingerprint_in_use(
                run.job.recipe.data, run.job.recipe.model, data
            ),
        }
        environment = describe_environment(describe_topology(run.accelerator))
        write_json(folder.environment, known | environment | {"past": run.constants["past"]})
        write_json(folder.audit, assembly.audit)
    run.trackers.start(settings)


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def statistics_of_step(run: Run) -> dict[str, Any]:
    """What the recipe wants to know of the gradients, the low-precision operands and the experts of the step whose backward is
    done."""
    step, hf, statistics, log = run.state.step + 1, run.assembly.hf, {}, run.job.plan.recipe.log
    if due(step, log.gradient_statistics):
        statistics |= gradient_statistics(hf, decoder_layers(hf), run.accelerator)
    if (
        (routing := run.assembly.model.routing)
        and routing.loads is not None
        and due(step, log.fp8_statistics)
    ):
        statistics["expert_loads"] = routing.loads.double().round(decimals=3).tolist()
    if run.precision_watch:
        figures, warning = run.precision_watch.report(step)
        statistics |= figures
        if warning:
            run.console.warning(warning)
    return statistics


def judge_gap(
    run: Run, decision: StepDecision, gap: GapMeter
) -> tuple[StepDecision, dict[str, Any]]:
    """What the `gap` decides of a step that its loss and norm would let update, and the gap's part of its metrics. If the run is
    to go on in BF16, its plan says so from here on, and the next step changes."""
    health, step = run.health, run.state.step + 1
    judged, figures = health.judge_gap(step, run.precision.current.name, gap.places)
    if health.state.switched_after == step:
        run.precision.schedule = run.precision.schedule.switched_to_bf16_after(step)
    reasons = [each.reason for each in (decision, judged) if each.reason]
    return replace(judged, reason="; ".join(reasons) or None), figures


def record_of_step(
    run: Run,
    batches: StepBatches,
    decision: StepDecision,
    losses: Mapping[str, float],
    measured: Mapping[str, float],
    statistics: Mapping[str, Any],
) -> dict[str, Any]:
    """The part of the metrics of the step just done, and warnings of it. `losses`: its mean `loss`, and what else
    `PackedLanguageModel.mean_losses` has."""
    labelled, loss = batches.valid_tokens > 0, losses["loss"]
    beside = {name: value if labelled else None for name, value in losses.items() if name != "loss"}
    frozen = (
        adamw.frozen_share(run.assembly.optimizer, run.accelerator) if decision.proceed else 0.0
    )
    reason = decision.reason if decision.action in ("update", "skip") else None
    warnings = run.health.warnings_of(run.state.step, frozen, batches.valid_tokens, losses)
    for warning in filter(None, (reason, *warnings)):
        run.console.warning(warning)
    return {
        "step": run.state.step,
        "tokens": run.state.tokens,
        **({"trained_tokens": run.state.valid_tokens} if run.has_masks else {}),
        "epoch": batches.epoch,
        **({"precision": run.precision.current.name} if run.precision.schedule.changes else {}),
        **batches.sources,
        **(
            {"loss": loss}
            if labelled or not math.isfinite(loss)
            else {"loss": None, "unlabelled": True}
        ),
        **beside,
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
    run.console.step(
        record, show=due(run.state.step, run.job.recipe.log.every) or run.state.finished
    )
    if run.profile and run.profile.step == run.state.step:
        run.console.notice(f"profile of this step: {run.folder.path / TABLE_FILE}")


def is_over(job: Job, folder: RunFolder, console: Console) -> bool:
    """Whether an earlier start has finished a run that has no steps to come; then it says so."""
    finished = read_finished(job.run_dir)
    over = finished is not None and finished.summary["steps"] == job.plan.steps
    if over := over and (not job.recipe.checkpoint.at_end or folder.final.exists()):
        console.panel(*last_screen(finished, folder))
    return over
