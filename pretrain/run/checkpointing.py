"""Save the state of a run. Restore it when the run resumes, or goes back after a bad step."""

from __future__ import annotations

import math
import signal
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foundation.errors import InputError
from foundation.files import fsync
from foundation.signals import StopRequest
from foundation.units import plural
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed, check_space, checksums
from pretrain.checkpoint.format import DTYPE_NAMES, read_manifest
from pretrain.checkpoint.state import TrainState, changed_keys
from pretrain.metrics.health import (
    Health,
    HealthState,
    StepDecision,
    TrainingHalted,
    some_of,
)
from pretrain.metrics.run_record import read_metrics
from pretrain.model.gradients import local_part
from pretrain.optimizer.adamw import named_state, set_updates_done
from pretrain.precision.delayed_state import PREFIX
from pretrain.precision.settings import Weights
from pretrain.run.assembly import REHEARSALS, Assembly, set_weights
from pretrain.run.export import tensor_reader
from pretrain.run.job import Job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import Run

# The stop code of a failure. It exceeds every signal number, because all ranks use the largest code
# of any rank, and a failure has priority over a signal.
FAILED = 999
# The scales of gradients under delayed scaling depend on the settings whose keys start with one of
# these texts: the divisor of the loss, the loss function, and the number format.
KEYS_OF_GRADIENT_SCALES = ("batch.tokens", "loss.", "fp8_config.fp8_format")

# ── Save ──────────────────────────────────────────────────────────────────────────────────────────


def tensors_to_save(assembly: Assembly) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that a checkpoint stores, in two dicts by name.

    The first dict has the tensors of the model. The second dict has the tensors of the optimizer
    and the histories and scales of delayed scaling.
    """
    return assembly.tensors, assembly.optimizer_tensors | assembly.context.saved_state()


def check_disk_space(job: Job, assembly: Assembly, point: ResumePoint | None) -> None:
    """Raise InputError if the disk has too little free space for the checkpoints of the run.

    A new run and a branch need space for all checkpoints that are stored at the same time. A run
    that resumes from its own folder has checkpoints on the disk already, and needs space for one
    more.
    """
    new_checkpoints = job.plan.checkpoints_at_once
    if point is not None and point.in_run_folder:
        new_checkpoints = int(point.step < job.plan.steps)
    model_tensors, optimizer_tensors = tensors_to_save(assembly)
    check_space(job.run_dir, new_checkpoints * bytes_needed(model_tensors | optimizer_tensors))


def save(run: Run, *, in_background: bool = False) -> None:
    """Save a checkpoint of the present step, and delete old checkpoints (`checkpoint.keep`).

    in_background: True to return as soon as the tensors are copied to host memory. A thread then
        writes the copies to the disk. False to return when the checkpoint is complete.

    All ranks must call this function.
    """
    with run.console.progress(f"saving step {run.state.step}"):
        # A user may have deleted metrics.jsonl. Then save the checkpoint without it.
        if run.accelerator.is_main_process and run.folder.metrics.exists():
            # Write metrics.jsonl to the disk before the checkpoint. A run that resumes from the
            # checkpoint does not repeat the steps before it, and so cannot log them again.
            fsync(run.folder.metrics)
        model_tensors, optimizer_tensors = tensors_to_save(run.assembly)
        run.checkpoints.save(
            run.state.step,
            model_tensors,
            optimizer_tensors,
            _state_to_save(run),
            spared=run.best["step"] if run.best else None,
            in_background=in_background,
            announce=partial(_print_and_store, run),
        )


def _state_to_save(run: Run) -> dict[str, Any]:
    """Return the content of state.json."""
    job = run.job
    state = {
        "progress": asdict(run.state),
        "health": asdict(run.health.state),
        "identity": job.identity,
        "microbatch": job.plan.microbatch,
        "loss_chunk": job.plan.loss.tokens_at_once,
        "world_size": run.accelerator.num_processes,
        "past": run.past,
        "precision": run.precision.name,
    }
    if job.data.stream is not None:
        state["stream"] = job.data.stream.state
    return state


def _print_and_store(run: Run, text: str) -> None:
    """Print `text` about a new checkpoint. Store the checkpoint if the run is in object storage."""
    run.console.notice(text)
    if run.folder.stored is not None:
        run.folder.stored.store()


def stop_code(run: Run, batches: Prefetch[StepBatches], stop: StopRequest) -> int:
    """Return the stop code of this rank: a signal's number, FAILED, or 0 to continue.

    FAILED means that this rank could not write its part of a checkpoint, that it could not read its
    next packs, or that the packer ended before it made these packs. The caller combines the codes
    of all ranks.
    """
    # Wait until the next packs are read. Otherwise a rank that cannot read them would stop alone,
    # and without a checkpoint. With a stream, `wait_for_packs` has waited already.
    if run.job.data.stream is None:
        batches.wait_until_ready()
    if run.checkpoints.failed or batches.failure:
        return FAILED
    return stop.requested or 0


def save_and_stop(run: Run, code: int, batches: Prefetch[StepBatches]) -> int:
    """Save a checkpoint after a signal or a failure. Print and return the signal's number.

    code: the largest stop code of all ranks, see `stop_code`.
    batches: the prefetched batches of this rank. `batches.failure` is the exception that was raised
        when packs were read, or None.

    All ranks must call this function. Raises TrainingHalted if a weight is not finite. Raises
    InputError if a checkpoint could not be written. If a rank could not read packs, the checkpoint
    is saved first. Then this rank raises `batches.failure`, and the other ranks raise InputError.
    """
    # `wait` raises InputError if a save in the background has failed.
    run.checkpoints.wait()
    decision = check_weights(run)
    if not decision.proceed:
        raise training_halted(run, decision)
    if run.state.step > run.resumed_step:
        save(run)
    if code == FAILED:
        raise batches.failure or InputError("another process has no more packs; see its message")
    run.console.notice(
        f"stopped by {signal.Signals(code).name} after step {run.state.step}; start the run again "
        "to continue from here"
    )
    return code


@torch.no_grad()
def check_weights(run: Run) -> StepDecision:
    """Check that all weights are finite, and return the decision of the health check.

    The last update may have overflowed a weight. The loss and gradient norm of the step do not show
    an overflow, because they were computed before the update. If the decision is to stop, it is
    recorded in metrics.jsonl. All ranks must call this function.
    """
    parameters = dict(run.assembly.hf.named_parameters())
    largest = []
    for parameter in parameters.values():
        weight = local_part(parameter)
        # The infinity norm needs no temporary tensor of the weight's size.
        norm = torch.linalg.vector_norm(weight, math.inf) if weight.numel() else torch.zeros(())
        largest.append(norm.to(run.accelerator.device, torch.float32))
    overflowed = (~torch.stack(largest).isfinite()).float()
    on_ranks = run.accelerator.reduce(overflowed, "sum").tolist()
    names = [name for name, ranks in zip(parameters, on_ranks, strict=True) if ranks]
    if not names:
        return StepDecision()
    decision = run.health.judge_overflow(names, can_go_back=run.checkpoints.latest is not None)
    if decision.action == "stop":
        run.trackers.log({"step": run.state.step, "event": "halted", "reason": decision.reason})
    return decision


def training_halted(run: Run, decision: StepDecision) -> TrainingHalted:
    """Return the exception that ends a run at a bad step. Its message has the reason and a remedy.

    First wait until a background save has finished, and raise InputError if it has failed. All
    ranks must call this function.
    """
    run.checkpoints.wait()
    return TrainingHalted(run.state.step, f"{decision.reason}. {decision.remedy}.")


# ── Restore ───────────────────────────────────────────────────────────────────────────────────────


def restore(
    point: ResumePoint, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Load the checkpoint `point` into the model, the optimizer and `health`.

    Returns the counters of the run, and notes for the user. All ranks must call this function. The
    caller must call `Checkpoints.set_aside_newer` afterwards.
    """
    state = point.state(job)
    # Drop the quantized copies of the initial weights, which the audit has made.
    assembly.context.reset_engines()
    notes = load_weights(point, checkpoints, job.recipe.weights, assembly)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.state = point.health
    return state, [f"resumed from {point.path} at step {state.step}", *point.notes, *notes]


def load_weights(
    point: ResumePoint, checkpoints: Checkpoints, mode: Weights, assembly: Assembly
) -> list[str]:
    """Load weights, moments and histories, and return notes for the user.

    mode: the setting `weights` of the recipe. If the checkpoint was saved with another value of
        this setting, its weights are converted as in an export.

    Histories of delayed scaling are loaded only if the checkpoint has exactly the histories that
    the run has.
    """
    saved: Weights = point.state_json["identity"]["weights"]
    live = assembly.tensors | assembly.optimizer_tensors | loadable_histories(point, assembly)
    if saved == mode:
        checkpoints.load(point.path, live, optional=(PREFIX,))
        return []
    # Load everything but the weights and their remainders, and then convert the weights.
    weights = tuple(name for name, _ in assembly.hf.named_parameters())
    for name in weights:
        del live[name]
        live.pop(f"remainder/{name}", None)
    checkpoints.load(point.path, live, optional=(PREFIX, "remainder/", *weights))
    read = tensor_reader([point.path], assembly.hf, "bf16" if mode == "bf16" else "fp32")
    set_weights(assembly.hf, read, assembly.optimizer)
    effect = "the lower 16 bits of each weight are LOST" if mode == "bf16" else "without loss"
    return [f"weights: converted from {saved} to {mode}; {effect}"]


def require_restored(point: ResumePoint, run: Run) -> None:
    """Raise TrainingHalted if tensors of the run differ from the checkpoint.

    All ranks must call this function. The checksums of weights, moments, remainders and histories
    are compared. Tensors that were converted to another dtype are not compared.
    """
    assembly = run.assembly
    saved = read_manifest(point.path).tensors
    optimizer_tensors = named_state(assembly.optimizer, assembly.hf)
    live = assembly.tensors | optimizer_tensors | loadable_histories(point, assembly)
    same_dtype = [
        name for name in live.keys() & saved if saved[name].dtype == DTYPE_NAMES[live[name].dtype]
    ]
    present = checksums({name: live[name] for name in sorted(same_dtype)})
    wrong = [name for name in present if saved[name].weighted_sum != present[name]]
    if wrong:
        raise TrainingHalted(
            point.step,
            f"{point.path}: after loading, {len(wrong)} tensors differ from the checkpoint: "
            f"{some_of(wrong)}. No step was trained. The fault lies in the code or in the device, "
            "not in the recipe",
        )


def loadable_histories(point: ResumePoint, assembly: Assembly) -> dict[str, Tensor]:
    """Return the run's live histories and scales of delayed scaling by name.

    The checkpoint `point` can be loaded into these tensors. Return {} unless the checkpoint has
    exactly the histories and scales that this run has.
    """
    live = assembly.context.saved_state()
    saved = {
        name: entry.shape
        for name, entry in read_manifest(point.path).optimizer.items()
        if name.startswith(PREFIX)
    }
    return live if saved == {name: tuple(live[name].shape) for name in live} else {}


def needs_new_histories(point: ResumePoint, assembly: Assembly, job: Job) -> bool:
    """Return whether the histories of the present precision must be filled again after loading.

    This is necessary if the saved histories belong to other products, or to gradients of another
    size. If True is returned, the caller must load the weights and call `Assembly.start_precision`.
    Without this call, the run would continue with the histories that the assembly has recorded with
    the initial weights, whose gradients are many times as large as the gradients of trained
    weights. Return False if the present precision has no histories.
    """
    if not assembly.context.state():
        return False
    changed = changed_keys(point.state_json["identity"], job.identity)
    return (
        any(key.startswith(KEYS_OF_GRADIENT_SCALES) for key in changed)
        or point.state_json["precision"] != assembly.context.current.name
        or not loadable_histories(point, assembly)
    )


def resume_precision(run: Run, point: ResumePoint) -> None:
    """Set the model's precision for the continuation from the checkpoint `point`.

    All ranks must call this function. Usually this is the precision of the checkpoint. If the next
    step has another precision, `Run.follow_schedule` then changes the precision. In two cases the
    precision of the next step is set here: if the checkpoint belongs to another run, or if this run
    does not use the saved precision. If the checkpoint has no suitable histories of delayed
    scaling, the histories are filled from some packs.

    Raises TrainingHalted if loaded tensors differ from the checkpoint.
    """
    require_restored(point, run)
    schedule = run.assembly.schedule
    precisions = {active.name: active for active in schedule.precisions}
    active = precisions.get(point.state_json["precision"])
    if point.is_branch or active is None:
        active = schedule.at(run.state.step + 1)
    run.assembly.context.current = active
    if needs_new_histories(point, run.assembly, run.job):
        run.assembly.start_precision(active, run.job, run.accelerator)
        run.console.notice(
            f"delayed scaling: the histories were filled again from {REHEARSALS} packs with the "
            "weights of the checkpoint"
        )


# ── After a bad step ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class RollbackPoint(ResumePoint):
    """The checkpoint that a run goes back to. The run is then built again from this checkpoint."""

    # Position in the data after the bad step.
    next_place: int
    # Line with the event `rollback` for metrics.jsonl.
    event: dict[str, Any]

    @property
    def health(self) -> HealthState:
        """Return the state of the health check in the checkpoint, with the number of rollbacks."""
        return replace(super().health, rollbacks=self.event["rollbacks"])

    def state(self, job: Job) -> TrainState:
        """Return the counters in the checkpoint, with the position in the data after the bad step.

        So the packs of the discarded steps are not used again.
        """
        return replace(super().state(job), place=self.next_place, left_out=self.event["left_out"])


def roll_back(run: Run, reason: str | None) -> RollbackPoint:
    """Return the checkpoint from which the run is built again, and warn the user.

    reason: the reason of the health check, for the message.

    All ranks must call this function after the bad step. The checkpoint is the newest intact one.
    If the run was already rolled back to this checkpoint and failed again on other packs, it is the
    next older checkpoint. If no older checkpoint exists, it is the newest again.

    The steps after the checkpoint are discarded, and their packs are skipped. The result has an
    event `rollback`, which the caller writes to metrics.jsonl in place of the lines of these steps.
    In the event, `left_out` is the number of steps that all rollbacks have discarded, `abandoned`
    has the replaced lines, and `step` is the checkpoint's step plus 1. If the run is later resumed
    from the same checkpoint, all lines of later steps are removed, including this line. Then the
    run trains the bad step again, and rolls back again.
    """
    state = run.state
    path, state_json = _checkpoint_before(run.checkpoints, state)
    step = state_json["progress"]["step"]
    discarded = state.step - step
    rollbacks = run.health.state.rollbacks + 1
    reason = f"step {state.step}: {reason}"
    abandoned = []
    if run.accelerator.is_main_process:
        abandoned = [line for line in read_metrics(run.folder.path) if line["step"] > step]
    event = {
        "step": step + 1,
        "event": "rollback",
        "reason": reason,
        "resumed_from": step,
        "rollbacks": rollbacks,
        "left_out": state.left_out + discarded,
        "abandoned": abandoned,
    }
    skipped = plural(discarded, "step")
    run.console.warning(
        f"{reason}. Rollback {rollbacks}: the run goes back to {path}, and the packs of {skipped} "
        "after it are skipped"
    )
    # A run without a checkpoint of its own goes back to the checkpoint that it began with.
    is_own = run.checkpoints.owns(path)
    return RollbackPoint(
        path=path,
        state_json=state_json,
        is_branch=run.is_new and not is_own,
        in_run_folder=is_own,
        past=run.past,
        next_place=state.place,
        event=event,
    )


def _checkpoint_before(checkpoints: Checkpoints, state: TrainState) -> tuple[Path, dict[str, Any]]:
    """Return the path and the state.json of the checkpoint that a rollback restores.

    state: the counters after the bad step.
    """
    # If the run folder has no checkpoint, use the checkpoint that the run was resumed from.
    path = cast(Path, checkpoints.newest() or checkpoints.latest)
    state_json = checkpoints.read_state(path)
    # If the run has discarded more steps than this checkpoint has recorded, a training from it has
    # failed once. Then choose an older checkpoint, or the same one if there is no older one.
    if state_json["progress"]["left_out"] != state.left_out:
        path = checkpoints.newest(before=state_json["progress"]["step"]) or path
        state_json = checkpoints.read_state(path)
    return path, state_json
