"""What a run finds, says and writes down of itself before its first step and around it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pretrain.metrics.console import Console
from pretrain.metrics.peaks import is_known
from pretrain.metrics.run_folder import describe_environment
from pretrain.model.distributed import describe_topology
from pretrain.plan.preflight import Job
from pretrain.plan.rendering import render
from pretrain.plan.tokenizer import fingerprint_in_use
from pretrain.run.assembly import IN_PARTS
from pretrain.run.running import Run
from pretrain.settings import config
from pretrain.verify import audit, kernels


def warn_of_precisions(job: Job, console: Console) -> None:
    """Say what is done in place of a precision that the device lacks, of those that steps of the run compute in."""
    for notice in [active.notice for active in job.plan.in_use if active.notice]:
        console.warning(notice)


def introduce(run: Run, notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Say and write down what this run is, before its first step; `notes` and `warnings` are of what it goes on from."""
    run.console.notice(render(run.job.plan, brief=True))
    found, plan = run.assembly.audit, run.job.plan
    planned = plan.memory.parts(plan.expected_microbatch)
    found["memory"] = {"microbatch": plan.expected_microbatch, "planned": planned, "held": run.assembly.memory_held()}
    if run.job.recipe.log.audit == "full":
        run.console.panel("what runs in which precision", audit.rows(found) | kernels.rows(found))
    else:
        title = f"what runs in which precision (all of it: {run.folder.audit}, or log.audit=full)"
        run.console.panel(title, audit.in_short(found) | kernels.rows(found))
    device = run.job.plan.devices.name
    if run.accelerator.device.type == "cuda" and not is_known(device):
        run.console.notice(f"no peak of {device} is known, so there is no MFU; pretrain/metrics/peaks.py has those that are")
    if (built := run.assembly.audit.get("built", IN_PARTS)) != IN_PARTS:
        run.console.notice(f"the model was built {built}")
    for note in notes:
        run.console.notice(note)
    for warning in warnings:
        run.console.warning(warning)
    settings = config.resolved(run.job.recipe)
    if run.checkpoints.disks.leads and not run.accelerator.is_main_process:
        run.folder.write_yaml(run.folder.config, settings)  # which makes it a run's folder on this machine's disk
    if not run.checkpoints.disks.are_one:
        run.console.notice(run.checkpoints.disks.describe())
    if run.accelerator.is_main_process:
        environment = describe_environment(describe_topology(run.accelerator))
        run.folder.write_yaml(run.folder.config, settings)
        fingerprints: dict[str, Any] = {"data_fingerprint": run.job.data.train.fingerprint}
        if run.job.source_config:
            fingerprints["source_config"] = dict(run.job.source_config)
        if run.job.data.held_out is not None:
            fingerprints["held_out_fingerprint"] = run.job.data.held_out.fingerprint
        if tokenizer := fingerprint_in_use(run.job.recipe.data, run.job.recipe.model, run.job.data):
            fingerprints["tokenizer_fingerprint"] = tokenizer
        run.folder.write_json(run.folder.environment, fingerprints | environment | run.past.record())
        run.folder.write_json(run.folder.audit, run.assembly.audit)
    run.trackers.start(settings)


def first_step(run: Run) -> AbstractContextManager[object]:
    """Put this around each step: during the first one of this process, which takes long, a terminal shows a bar."""
    if run.state.step != run.resumed_step:
        return nullcontext()
    compiles = run.assembly.audit["compiled"] != "nothing"
    task = "first step, compiling" if compiles else "first step"
    return run.waited.on("training", task, "microbatches", total=run.job.plan.accumulation)
