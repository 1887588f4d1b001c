"""What a run finds, says and writes down of itself before its first step and around it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pretrain.metrics.console import Console
from pretrain.metrics.peaks import is_known
from pretrain.metrics.run_folder import describe_environment
from pretrain.metrics.run_record import read_finished
from pretrain.model.distributed import describe_topology, largest_over_ranks
from pretrain.plan.preflight import Job
from pretrain.plan.rendering import render
from pretrain.plan.tokenizer import fingerprint_in_use
from pretrain.run.running import Run
from pretrain.settings import config
from pretrain.verify import audit


def warn_of_precisions(job: Job, console: Console) -> None:
    """Say what is done in place of a precision that the device lacks, of those that steps of the run compute in."""
    for notice in [active.notice for active in job.plan.in_use if active.notice]:
        console.warning(notice)


def has_ended(run: Run) -> bool:
    """Whether an earlier start has trained and evaluated all of the run, and this one may only export it again. Collective."""
    found = read_finished(run.folder.path) if run.accelerator.is_main_process and run.state.finished and not run.begins else None
    ended = found is not None and found.summary["steps"] == run.state.step
    if ended and run.job.data.held_out is not None:
        ended = run.state.step in found.held_out_curve()[0]
    return bool(largest_over_ranks(run.accelerator, int(ended)))


def introduce(run: Run, notes: Iterable[str]) -> None:
    """Say and write down what this run is, before its first step; `notes` are of what it goes on from."""
    run.console.notice(render(run.job.plan, brief=True))
    found, plan = run.assembly.audit, run.job.plan
    planned = plan.memory.parts(plan.expected_microbatch)
    found["memory"] = {"microbatch": plan.expected_microbatch, "planned": planned, "held": run.assembly.memory_held()}
    run.console.panel(f"what runs in which precision (all of it: {run.folder.audit})", audit.in_short(found))
    if run.accelerator.device.type == "cuda" and not is_known(plan.devices.name):
        run.console.notice(f"no peak of {plan.devices.name} is known, so there is no MFU; pretrain/metrics/peaks.py has others")
    for note in notes:
        run.console.notice(note)
    if run.accelerator.is_main_process and not run.ended:  # what describes a run that has ended stays as it is
        _write_records(run)
    run.trackers.start(config.resolved(run.job.recipe))


def _write_records(run: Run) -> None:
    """Write config.yaml, environment.json and audit.json as of this start."""
    if not run.state.finished:  # steps are to come: an earlier end is none any more
        run.folder.summary.unlink(missing_ok=True)  # first: it does not describe the other records
    environment = describe_environment(describe_topology(run.accelerator))
    run.folder.write_yaml(run.folder.config, config.resolved(run.job.recipe))
    run.folder.write_json(run.folder.environment, _fingerprints(run.job) | environment | run.past.record())
    run.folder.write_json(run.folder.audit, run.assembly.audit)


def _fingerprints(job: Job) -> dict[str, Any]:
    """What environment.json says of the text, of the tokenizer and of `model.source`."""
    found: dict[str, Any] = {"data_fingerprint": job.data.train.fingerprint}
    if job.source_config:
        found["source_config"] = dict(job.source_config)
    if job.data.held_out is not None:
        found["held_out_fingerprint"] = job.data.held_out.fingerprint
    if tokenizer := fingerprint_in_use(job.recipe.data, job.recipe.model, job.data):
        found["tokenizer_fingerprint"] = tokenizer
    return found


def first_step(run: Run) -> AbstractContextManager[object]:
    """Put this around each step: during the first one of this process, which takes long, a terminal shows a bar."""
    if run.state.step != run.resumed_step:
        return nullcontext()
    compiles = run.assembly.audit["compiled"] != "nothing"
    task = "first step, compiling" if compiles else "first step"
    return run.waited.on("training", task, "microbatches", total=run.job.plan.accumulation)
