"""Resuming: which checkpoint, whether it belongs to this training, and its state copied back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from foundation.errors import InputError
from pretrain.checkpoint.checkpoint import Checkpoints, step_folders
from pretrain.checkpoint.disks import look_at_disks
from pretrain.checkpoint.folders import step_of
from pretrain.checkpoint.manifest import NOT_HERE, read_manifest
from pretrain.checkpoint.state import TrainState, check_record, check_same_training
from pretrain.metrics.health import Health
from pretrain.optimizer import schedule
from pretrain.optimizer.adamw import set_updates_done
from pretrain.optimizer.adamw_update import Weights, convert_weight, describe_conversion, local_part
from pretrain.plan.preflight import Job
from pretrain.precision.linear import PREFIX
from pretrain.precision.registry import WEIGHT_DTYPES
from pretrain.precision.schedule import last_steps, phases_of
from pretrain.run.assembly import Assembly
from pretrain.settings.config import begin_of
from pretrain.settings.recipe import USUAL_CHUNK, ScheduleSettings


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that may be continued."""

    path: Path
    record: dict[str, Any]  # its state.json
    notes: list[str]  # what differs between its recipe and the present one


def find_resume_point(
    checkpoints: Checkpoints, wanted: str, job: Job, accept_changes: bool, *, look_only: bool = False
) -> ResumePoint | None:
    """The checkpoint to continue, `wanted` ("auto" or a path); where there is none yet that of another run with which the recipe
    begins (`train.begin_with`), or None. `look_only`: for a plan, which changes nothing on the disk.

    Raises InputError where it does not exist, where it belongs to another training and `accept_changes` is not set, and where all
    checkpoints are damaged: a new run in their place would bury what may still be rescued.
    """
    path = checkpoints.newest(look_only=look_only) if wanted == "auto" else Path(wanted)
    if path is not None and not checkpoints.is_there(path):
        there = ", ".join(folder.name for folder in step_folders(checkpoints.folder)) or "no checkpoint"
        raise InputError(
            f"--resume {path}: no such checkpoint; {checkpoints.folder} holds {there}; name a step-* folder, or auto"
        )
    if path is None and checkpoints.damaged:
        newest, problems = max(checkpoints.damaged.items())
        if all(NOT_HERE in problem for problem in problems):
            raise InputError(f"checkpoint {newest}: {'; '.join(problems)}; then start the same command again")
        raise InputError(f"{checkpoints.folder}: every checkpoint is damaged; name another `run_dir` to train from the beginning")
    if path is None:
        path, accept_changes = begin_of(job.recipe), True  # another training is what is asked for
        if path is None:
            return None
        if not checkpoints.is_there(path):
            raise InputError(
                f"`train.begin_with`: {path}: no such checkpoint; name a step-* folder of another run's `checkpoints`, whose "
                "`checkpoint.every` and `checkpoint.keep` decide which there are"
            )
    record = checkpoints.read_state(path)
    check_record(record, path)
    hint = extending_a_decayed_run(path, record, job, checkpoints)
    try:
        changes = check_same_training(record, job.identity, path, accept_changes)
    except InputError as error:
        raise InputError("\n".join(filter(None, [str(error), hint]))) from None
    notes = [f"the recipe has changed: {change}" for change in changes]
    notes += filter(None, [precision_has_moved(record, job)])
    return ResumePoint(path, record, [*notes, f"WARNING  {hint}"] if hint else notes)


def extending_a_decayed_run(path: Path, record: Mapping[str, Any], job: Job, checkpoints: Checkpoints) -> str | None:
    """What to know where the checkpoint's rate has fallen towards a shorter horizon than the present one and would leap up:
    by how much, and which checkpoint is from before. None for any other checkpoint."""
    identity, progress = record["identity"], record["progress"]
    step, horizon = progress["step"], progress["steps"]
    if horizon >= job.plan.steps or step >= job.plan.steps:
        return None
    saved = {key.removeprefix("schedule."): value for key, value in identity.items() if key.startswith("schedule.")}
    try:
        settings, tokens = ScheduleSettings(**saved), identity["batch.tokens"]
        optimizer = job.recipe.optimizer.model_copy(update={"learning_rate": identity["optimizer.learning_rate"]})
    except (ValidationError, KeyError):  # of a version whose schedules were others
        return None
    begins = schedule.decay_begins(settings, horizon, tokens)
    if begins is None or step <= begins:
        return None
    recipe = job.recipe
    last = schedule.learning_rate(step - 1, settings, optimizer, horizon, tokens)
    following = schedule.learning_rate(step, recipe.schedule, recipe.optimizer, job.plan.steps, recipe.batch.tokens)
    told = (
        f"{path.name} is from the decay towards step {horizon:,}, which began after step {begins:,}: the rate would leap from "
        f"{last:.3g} to {following:.3g}, and what the decay has gained would be lost. "
    )
    if settings.kind != "wsd":
        return told + f"A {settings.kind} schedule falls all the way, so train anew with another `run_dir`"
    earlier = [folder for folder in step_folders(checkpoints.folder) if step_of(folder) <= begins]
    if not earlier:
        return told + "No checkpoint from before it is there; a smaller `checkpoint.every` would have saved one, which is kept"
    return told + f"{earlier[0].name} is from before it; go on from there with --resume {earlier[0]} --accept-changes"


def precision_to_come(record: Mapping[str, Any]) -> str | None:
    """What the schedule that a checkpoint was saved under has for what comes after it; None where there was no schedule."""
    phases, progress = phases_of(record["identity"].get("precision")), record["progress"]
    if len(phases) < 2:
        return None
    try:
        ends = last_steps([until for until, _ in phases], progress["steps"])
    except (InputError, TypeError):  # of a version with other rules
        return None
    names = [name for end, (_, name) in zip(ends, phases, strict=True) if progress["step"] < end]
    return names[0] if names else phases[-1][1]


def precision_has_moved(record: Mapping[str, Any], job: Job) -> str | None:
    """What to know where the present schedule goes on in another precision than the checkpoint's own: a changed horizon moves the
    shares. None where it does not."""
    saved, step = precision_to_come(record), record["progress"]["step"]
    now = job.plan.active_after(step).precision.name
    if saved in (None, now):
        return None
    return (
        f"WARNING  after step {step:,} the checkpoint's `precision` was to be {saved}; by the present schedule it is {now}, "
        "which begins anew there. An `until` that is a step number stays where it is when the horizon changes"
    )


def planned_resume(job: Job, wanted: str, accept_changes: bool) -> str | None:
    """What a run would go on from, for --plan; None where it would begin. InputError where the run would refuse."""
    if job.data is None:  # packs that are not prepared belong to no checkpoint yet
        return None
    disks = look_at_disks(job.run_dir)
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep, disks=disks)
    source = find_resume_point(checkpoints, wanted, job, accept_changes, look_only=True)
    return "\n".join([f"would resume from {source.path}", *source.notes]) if source else None


def chunk_of(job: Job, source: ResumePoint | None) -> int:
    """Tokens of the loss at once: the recipe's, or where that is `auto` those that the run began with, so that sums keep their
    order; of a fresh run, what its memory allows."""
    if job.recipe.loss.chunk == "auto" and source:
        return source.record.get("loss_chunk", USUAL_CHUNK)
    return job.plan.loss.tokens_at_once


def restore(
    source: ResumePoint | None, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Copy the checkpoint's weights, moments and counters back; returns the state, and notes about it for the user."""
    if job.data.stream is not None:
        job.data.stream.begin(source.record.get("stream", {}) if source else None)
    if source is None:
        return TrainState(steps=job.plan.steps), []
    state = TrainState.from_record(source.record, job.plan.steps, source.path)
    scales, scale_notes = scales_to_load(source.path, assembly.precision.saved_state())
    notes = scale_notes + load_weights(source, checkpoints, job.recipe.weights, assembly, scales)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.load_state_dict(source.record["health"])
    checkpoints.set_aside_newer(state.step)
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def load_weights(
    source: ResumePoint, checkpoints: Checkpoints, mode: Weights, assembly: Assembly, scales: Mapping[str, Tensor]
) -> list[str]:
    """Copy weights, moments and `scales` into place, whatever mode of `weights:` they were saved in; returns notes for the user.

    Weights of another mode are read as they were stored, become FP32 masters, and are stored in this run's `mode`.
    """
    saved: Weights = source.record["identity"]["weights"]
    if saved == mode:
        return checkpoints.load(source.path, assembly.tensors, assembly.optimizer_tensors | scales)
    parameters = dict(assembly.hf.named_parameters())
    stored = {name: torch.empty_like(p, dtype=getattr(torch, WEIGHT_DTYPES[saved])) for name, p in parameters.items()}
    moments = {key: tensor for key, tensor in assembly.optimizer_tensors.items() if not key.startswith("remainder/")}
    remainders = {f"remainder/{name}": torch.empty_like(p, dtype=torch.int16) for name, p in parameters.items()}
    kept = moments | scales | (remainders if saved == "bf16_exact" else {})
    notes = checkpoints.load(source.path, assembly.tensors | stored, kept)
    for name, parameter in parameters.items():
        remainder = local_part(remainders[f"remainder/{name}"]) if saved == "bf16_exact" else None
        master, _ = convert_weight(local_part(stored.pop(name)), remainder, "fp32")
        assembly.optimizer.set_master(parameter, master)
    return [describe_conversion(saved, mode), *notes]


def scales_to_load(path: Path, wanted: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Where to load the checkpoint's history and scales of delayed scaling, by name, and notes for the user.

    Those that this run has too, in the same shape, go into `wanted`; the others into tensors that nobody keeps.
    """
    saved = {name: entry for name, entry in read_manifest(path).optimizer.items() if name.startswith(PREFIX)}
    fits = {name: tensor for name, tensor in wanted.items() if name in saved and tuple(saved[name].shape) == tuple(tensor.shape)}
    rest = {name: torch.empty(tuple(entry.shape), dtype=torch.float32) for name, entry in saved.items() if name not in fits}
    notes = []
    if len(fits) < len(wanted):
        notes.append(
            f"{len(wanted) - len(fits)} of {len(wanted)} tensors of delayed scaling are not in the checkpoint and start afresh"
        )
    if rest:
        notes.append(f"{len(rest)} tensors of delayed scaling in the checkpoint have no place in this run")
    return fits | rest, notes
