"""A running training: its parts, its precision, its description, and its line of each step.

The schedule alone decides at which step the precision changes. A run that is resumed at that step
repeats the change, and one that is resumed later finds the histories in its checkpoint. So both
have the bits of an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from accelerate import Accelerator

from foundation.files import replace_file, write_json
from foundation.reading import load_object
from packing.batch import StepBatches
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.peaks import peak
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_folder import RunFolder, describe_environment
from pretrain.metrics.run_record import Record, last_screen, read_finished, same_measure
from pretrain.metrics.trackers import Trackers
from pretrain.model.distributed import describe_topology
from pretrain.model.huggingface import kept_from_source
from pretrain.observe.audit import in_short
from pretrain.observe.observers import Observers, is_due
from pretrain.optimizer import adamw
from pretrain.plan.rendering import render
from pretrain.plan.tokenizer import fingerprint_in_use
from pretrain.precision.model_precision import ModelPrecision
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job
from pretrain.settings.config import resolved


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
        """Return the model's current precision and its schedule."""
        return self.assembly.precision

    @property
    def is_best(self) -> bool:
        """Return whether the present step has the best evaluation, so its checkpoint is kept."""
        return self.best is not None and self.best["step"] == self.state.step

    def write_audit(self) -> None:
        """Write audit.json if this is the main process."""
        if self.accelerator.is_main_process:
            write_json(self.folder.audit, self.assembly.audit)

    def introduce(self, notes: Iterable[str]) -> None:
        """Print and write what this run is, before its first step.

        notes: about the checkpoint that it resumes or branches from.
        """
        self.console.notice(render(self.job.plan, brief=True))
        self._take_over_parity()
        self.console.panel(
            f"precision of each product, as observed (all: {self.folder.audit})",
            in_short(self.assembly.audit),
        )
        for note in notes:
            self.console.notice(note)
        settings = resolved(self.job.recipe)
        if self.accelerator.is_main_process:
            # First: the summary of an earlier start does not describe the other records.
            self.folder.summary.unlink(missing_ok=True)
            replace_file(
                self.folder.config,
                yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120).encode(),
            )
            write_json(self.folder.environment, self._environment())
        self.write_audit()
        self.trackers.start(settings)

    def _take_over_parity(self) -> None:
        """Copy parity from the audit of an earlier start. It was compared before the first step."""
        if self.is_new or not self.folder.audit.is_file():
            return
        before = load_object(self.folder.audit, "delete it")
        # Each precision has a parity of its own.
        for name, record in before.get("precisions", {before.get("effective"): before}).items():
            in_model = self.precision.in_model.get(name)
            if in_model is not None and "parity" in record:
                in_model.audit["parity"] = record["parity"]

    def _environment(self) -> dict[str, Any]:
        """Return the contents of environment.json."""
        job = self.job
        held_out = job.data.held_out
        return {
            "horizon": job.plan.steps,
            "data_fingerprint": job.data.train.fingerprint,
            "source_config": job.source_config,
            "held_out_fingerprint": None if held_out is None else held_out.fingerprint,
            "tokenizer_fingerprint": fingerprint_in_use(
                job.recipe.data, job.recipe.model, job.data
            ),
            **describe_environment(describe_topology(self.accelerator)),
            "past": self.past,
        }

    def follow_schedule(self) -> None:
        """Change to the precision of the next step if it is another one. Collective.

        Call this before random numbers are drawn for the step.
        """
        before = self.precision.current.name
        name = self.precision.schedule.at(self.state.step + 1).precision.name
        if name == before:
            return
        with self.console.progress("auditing the precision of products"):
            self.assembly.start_precision(name, self.job, self.accelerator)
        self.write_audit()
        self.console.notice(
            f"precision after step {self.state.step}: {before}, then {name}, audited again: "
            f"{in_short(self.assembly.audit)['products']}"
        )

    def record_of_step(
        self,
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
        state = self.state
        loss = losses["loss"]
        is_labelled = batches.valid_tokens > 0
        frozen = 0.0
        if decision.proceed:
            frozen = adamw.frozen_share(self.assembly.optimizer, self.accelerator)
        warnings = [*self.health.warnings_of(state.step, frozen, batches.valid_tokens, losses)]
        if decision.reason and decision.action in ("update", "skip"):
            warnings.insert(0, decision.reason)
        for warning in warnings:
            self.console.warning(warning)
        record = {
            "step": state.step,
            "tokens": state.tokens,
            "trained_tokens": state.valid_tokens if self.job.data.has_masks else None,
            "epoch": batches.epoch,
            "precision": self.precision.current.name if self.precision.schedule.changes else None,
            "unlabelled": True if not is_labelled and math.isfinite(loss) else None,
            "halted": decision.reason if decision.action == "stop" else None,
        }
        # A key without a meaning in this run is left out. A loss without a label is null.
        record = {key: value for key, value in record.items() if value is not None}
        reported: dict[str, float | None] = dict(losses if is_labelled else dict.fromkeys(losses))
        if not math.isfinite(loss):
            reported["loss"] = loss
        return {
            **record,
            **batches.sources,
            **reported,
            **figures,
            "frozen_updates": frozen,
            "step_tokens": batches.tokens,
            "sum_squared_lengths": batches.sum_squared_lengths,
            "skipped": not decision.proceed,
        }

    def log(self, figures: dict[str, Any], *, data_wait_ms: float) -> None:
        """Write a step to metrics.jsonl and to trackers, and print it every `log.every` steps."""
        record = self.recorder.finish(**figures, data_wait_ms=data_wait_ms)
        self.trackers.log(record)
        self.console.step(
            record, show=is_due(self.state.step, self.job.recipe.log.every) or self.state.finished
        )


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


def is_over(job: Job, folder: RunFolder, console: Console) -> bool:
    """Return whether an earlier start has finished the run. If so, print its last screen."""
    finished = read_finished(job.run_dir)
    if finished is None or finished.summary["steps"] != job.plan.steps:
        return False
    is_complete = folder.final.exists() or not job.recipe.checkpoint.at_end
    if is_complete:
        console.panel(*last_screen(finished, folder))
    return is_complete


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
