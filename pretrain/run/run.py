"""The class `Run`, which contains all parts of a run, and functions that describe and log a run.

The precision schedule alone determines at which step the precision changes. A run that is resumed
at such a step repeats the change. A run that is resumed later loads the histories of delayed
scaling from its checkpoint. In both cases the run repeats the uninterrupted run bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from foundation.files import replace_file, write_json
from foundation.reading import load_object
from packing.batch import StepBatches
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.cards import bf16_peak
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_folder import RunFolder, describe_environment
from pretrain.metrics.run_record import Record, last_screen, read_finished
from pretrain.metrics.trackers import Trackers
from pretrain.model.distributed import describe_topology
from pretrain.model.graphs import MicrobatchGraphs
from pretrain.observe.audit import console_rows
from pretrain.observe.observers import Observers, is_due
from pretrain.plan.rendering import render
from pretrain.precision.settings import ActivePrecision
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job
from pretrain.run.resume_point import where_to_resume
from pretrain.run.tokenizer import fingerprint_in_use
from pretrain.settings.config import resolved


@dataclass
class Run:
    """All parts of a run, while this process trains it."""

    job: Job
    assembly: Assembly
    accelerator: Accelerator
    folder: RunFolder
    checkpoints: Checkpoints
    # The history of the run's settings, see `NO_PAST`.
    past: Mapping[str, Any]
    state: TrainState
    # True if the run starts without a checkpoint or branches from another run. False if it resumes.
    is_new: bool
    # The step of the checkpoint that the run was built from, or 0.
    resumed_step: int
    health: Health
    recorder: Recorder
    trackers: Trackers
    console: Console
    observers: Observers = field(init=False)
    graphs: MicrobatchGraphs = field(init=False)
    # The evaluation with the lowest held-out loss, or None. Its checkpoint is not deleted
    # (`checkpoint.best`).
    best: Record | None = None

    @property
    def precision(self) -> ActivePrecision:
        """Return the model's current precision."""
        return self.assembly.context.current

    @property
    def is_best(self) -> bool:
        """Return whether the present step has the best evaluation of the run so far."""
        return self.best is not None and self.best["step"] == self.state.step

    def close(self) -> None:
        """Free the CUDA graphs, and finish the trackers.

        NCCL cannot end its communicators while graphs with their collectives exist.
        """
        self.graphs.drop()
        self.trackers.finish()

    def write_audit(self) -> None:
        """Write audit.json if this is the main process."""
        if self.accelerator.is_main_process:
            write_json(self.folder.audit, self.assembly.audit)

    def report_graphs(self, status: str) -> None:
        """Print the decision about CUDA graphs, and write it to audit.json."""
        self.assembly.shared_audit["cuda_graphs"] = status
        self.write_audit()
        self.console.notice(f"CUDA graphs {status}")

    def introduce(self, notes: Iterable[str]) -> None:
        """Print the plan of the run, and write its settings, environment and audit to its folder.

        Also start the trackers. Call this before the first step.

        notes: lines about the checkpoint that the run resumes or branches from.
        """
        self.console.notice(render(self.job.plan, brief=True))
        self._copy_earlier_parity()
        self.console.panel(
            f"observed precision of the linear layers (details: {self.folder.audit})",
            console_rows(self.assembly.audit),
        )
        self.console.notice(*notes)
        settings = resolved(self.job.recipe)
        if self.accelerator.is_main_process:
            # First delete the summary that an earlier process of this run may have written, because
            # that summary does not describe the files that are written below.
            self.folder.summary.unlink(missing_ok=True)
            replace_file(
                self.folder.config,
                yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120).encode(),
            )
            write_json(self.folder.environment, self._environment())
            self.write_audit()
            self.trackers.start(settings)

    def _copy_earlier_parity(self) -> None:
        """Copy the results of the parity check from audit.json in the run folder into the audit.

        An earlier process of this run has written the file. A resumed run does not repeat the
        parity check, because the check compares only the run's first step.
        """
        if self.is_new or not self.folder.audit.is_file():
            return
        earlier = load_object(self.folder.audit, "delete this file")
        # audit.json has one result for each precision. Without phases of precision there is no key
        # `precisions`, and the result is at the top level.
        records = earlier.get("precisions") or {earlier.get("effective"): earlier}
        audits = self.assembly.audits
        for name, record in records.items():
            if name in audits and "parity" in record:
                audits[name]["parity"] = record["parity"]

    def _environment(self) -> dict[str, Any]:
        """Return the contents of environment.json."""
        job = self.job
        held_out = job.data.held_out
        tokenizer = fingerprint_in_use(job.recipe.data, job.recipe.model, job.data)
        environment = {
            "horizon": job.plan.steps,
            "data_fingerprint": job.data.train.fingerprint,
            "source_config": job.source_config,
            "held_out_fingerprint": None if held_out is None else held_out.fingerprint,
            "tokenizer_fingerprint": tokenizer,
        }
        environment |= describe_environment(describe_topology(self.accelerator))
        environment["past"] = self.past
        return environment

    def follow_schedule(self) -> None:
        """Change the precision if the schedule has another precision for the next step.

        All ranks must call this method. Call this before random numbers are drawn for the step.
        Raises InputError if a product does not compute in the new precision.
        """
        before = self.precision.name
        active = self.assembly.schedule.at(self.state.step + 1)
        if active.name == before:
            return
        self.graphs.drop()
        with self.console.progress("auditing the precision of products"):
            self.assembly.start_precision(active, self.job, self.accelerator)
        self.write_audit()
        self.console.notice(
            f"the precision changes from {before} to {active.name} after step {self.state.step}"
        )

    def lost_share_and_code(self, stop_code: int) -> tuple[float, int]:
        """Return the share of values whose last update was lost, and the largest stop code.

        Both are over all ranks, by one collective. `ExactAdamW.lost_counts` defines lost updates.

        stop_code: the stop code of this rank.

        All ranks must call this method. The host waits for the device.
        """
        counts = self.assembly.optimizer.lost_counts.to(self.accelerator.device)
        code = torch.full_like(counts[:1], stop_code)
        ranks = self.accelerator.gather(torch.cat([counts, code])[None]).tolist()
        lost, updated, codes = zip(*ranks, strict=True)
        return sum(lost) / max(sum(updated), 1), max(codes)

    def record_of_step(
        self,
        batches: StepBatches,
        decision: StepDecision,
        losses: Mapping[str, float],
        metrics: Mapping[str, Any],
        lost_share: float,
    ) -> dict[str, Any]:
        """Return the metrics of the step that was just trained, and print warnings about it.

        batches: the microbatches of the step.
        decision: the decision whether to update the weights.
        losses: the step's mean `loss`, and the other values of `PackedLanguageModel.mean_losses`.
        metrics: learning rate, gradient norm, and the metrics of observers.
        lost_share: the share of values whose last update was lost.
        """
        state = self.state
        loss = losses["loss"]
        is_labelled = batches.valid_tokens > 0
        if not decision.proceed:
            # `lost_share` describes the update of an earlier step.
            lost_share = 0.0
        self._print_warnings(decision, lost_share, batches.valid_tokens, losses)
        record: dict[str, Any] = {"step": state.step, "tokens": state.tokens}
        if self.job.data.has_masks:
            record["trained_tokens"] = state.valid_tokens
        if self.assembly.schedule.changes:
            record["precision"] = self.precision.name
        if decision.action == "stop":
            record["halted"] = decision.reason
        record |= batches.metrics
        # The losses of a step without labels are null. But a `loss` that is not finite is logged.
        record |= losses if is_labelled else dict.fromkeys(losses)
        if not math.isfinite(loss):
            record["loss"] = loss
        elif not is_labelled:
            record["unlabelled"] = True
        record |= metrics
        if decision.proceed:
            for name, value in self.assembly.optimizer.metrics.items():
                record[name] = value.item()
        record["frozen_updates"] = lost_share
        record["step_tokens"] = batches.tokens
        record["sum_squared_lengths"] = batches.sum_squared_lengths
        record["skipped"] = not decision.proceed
        return record

    def _print_warnings(
        self, decision: StepDecision, lost_share: float, labels: int, losses: Mapping[str, float]
    ) -> None:
        """Print warnings about the step. The arguments are as in `record_of_step`.

        The reasons for other decisions than "update" and "skip" are printed when the run ends.
        """
        if decision.reason and decision.action in ("update", "skip"):
            self.console.warning(decision.reason)
        for warning in self.health.warnings_of(self.state.step, lost_share, labels, losses):
            self.console.warning(warning)

    def log(self, metrics: dict[str, Any], *, data_wait_ms: float) -> None:
        """Log a step to metrics.jsonl and the trackers, and print every `log.every`th step.

        metrics: the metrics of the step, from `record_of_step`.
        data_wait_ms: the time that the step has waited for packs, in milliseconds.
        """
        record = self.recorder.finish(**metrics, data_wait_ms=data_wait_ms)
        self.trackers.log(record)
        self.console.step(
            record, show=is_due(self.state.step, self.job.recipe.log.every) or self.state.finished
        )


def recorder_of(job: Job, accelerator: Accelerator) -> Recorder:
    """Return the recorder that measures the time, speed and memory of steps."""
    flops = job.plan.flops
    return Recorder(
        # No MFU is computed if the FLOPs of some weights are not counted.
        flops=None if flops.uncounted else flops,
        peak_tflops=bf16_peak(job.plan.devices.name),
        device=accelerator.device,
        world_size=accelerator.num_processes,
        pack_length=job.recipe.data.length,
    )


def open_console(job: Job, accelerator: Accelerator, notices: Iterable[str]) -> Console:
    """Return a new console of the run, after printing `Plan.notices` and `notices` to it.

    notices: lines about settings that `as_launched` has corrected in the Accelerate configuration.
    """
    console = Console(job.plan.steps, enabled=accelerator.is_main_process)
    console.notice(*job.plan.notices, *notices)
    return console


def report_if_finished(job: Job, folder: RunFolder, console: Console) -> bool:
    """Print the results of the run and return True if the run is already finished.

    A run is finished if its folder has a summary of the job's last step, and if its model was
    exported or `checkpoint.at_end` is off.
    """
    finished = read_finished(job.run_dir)
    if finished is None or finished.summary["steps"] != job.plan.steps:
        return False
    is_complete = folder.final.exists() or not job.recipe.checkpoint.at_end
    if is_complete:
        console.notice(
            "this run is already finished, so nothing is trained; for another run, set another "
            "`name` or `run_dir`"
        )
        console.panel(*last_screen(finished, folder))
    return is_complete


def print_plan(job: Job, console: Console, resume_from: str, accept_changes: bool) -> int:
    """Print the plan of a launch on this machine, and the checkpoint that it resumes. Return 0.

    resume_from: the value of --resume.
    accept_changes: True if --accept-changes is given.

    Raises InputError if the launch would be refused.
    """
    job, _, point = where_to_resume(job, resume_from, accept_changes)
    console.notice(render(job.plan))
    if point is not None:
        console.notice(f"the run continues from {point.path}", *point.notes)
    return 0
