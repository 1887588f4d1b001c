"""Copy a checkpoint back into a run: when it starts, and after a bad step when it goes back to one of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from foundation.files import write_json
from foundation.units import plural
from pretrain.checkpoint.checkpoint import Checkpoints, checksums
from pretrain.checkpoint.format import (
    DTYPE_NAMES,
    read_manifest,
)
from pretrain.checkpoint.state import TrainState, changed_keys
from pretrain.metrics.health import MOST_ROLLBACKS, Health, TrainingHalted, some_of
from pretrain.metrics.run_record import read_metrics
from pretrain.metrics.trackers import Trackers
from pretrain.model.gradients import local_part
from pretrain.optimizer.adamw import named_state, set_updates_done
from pretrain.optimizer.exact_weights import master_of
from pretrain.plan.preflight import Job
from pretrain.precision.product import PREFIX
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.assembly import REHEARSALS, Assembly
from pretrain.run.evaluate import best_so_far
from pretrain.run.resume_point import ResumePoint
from pretrain.run.running import Run
from pretrain.run.streaming import continue_stream
from pretrain.settings.config import resolved

# Settings that scales of gradients depend on: the largest code, the loss, and by how many tokens it is divided.
SCALES_FOLLOW = ("batch.tokens", "loss.", "fp8_config.fp8_format")


# ── Its state copied back ─────────────────────────────────────────────────────────────────────────────────────────────────────


def restore(
    source: ResumePoint, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Put the run's memory into the state of `source`; returns the counters, and notes for the user. Collective;
    `Checkpoints.abandon_newer` is left to do."""
    state = TrainState(
        **{
            **source.record["progress"],
            "steps": job.plan.steps,
            "shift": source.shift(job),
            "place": source.place(job),
        }
    )
    notes = load_weights(source, checkpoints, job.recipe.weights, assembly)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.state = source.health
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def load_weights(
    source: ResumePoint, checkpoints: Checkpoints, mode: Weights, assembly: Assembly
) -> list[str]:
    """Copy weights, moments and histories into place, whatever mode of `weights:` they were saved in; returns notes for the user.

    Weights of another mode are read as they were stored, become FP32 masters, and are stored in this run's `mode`. Histories that
    are not those of this run's layers and precisions are left out.
    """
    saved: Weights = source.record["identity"]["weights"]
    parameters = dict(assembly.hf.named_parameters())
    index = read_manifest(source.path).optimizer
    stored: dict[str, torch.Tensor] = {}
    targets = assembly.optimizer_tensors | histories_in(source, assembly)
    if saved != mode:
        stored = {
            name: torch.empty_like(p, dtype=getattr(torch, WEIGHT_DTYPES[saved]))
            for name, p in parameters.items()
        }
        targets = {
            name: tensor for name, tensor in targets.items() if not name.startswith("remainder/")
        }
        # Plain BF16 keeps the stored weight: the master would round to its neighbour where it lies just between two.
        if (saved, mode) == ("bf16_exact", "fp32"):
            targets |= {
                f"remainder/{name}": torch.empty_like(p, dtype=torch.int16)
                for name, p in parameters.items()
            }
    left_out = {
        name for name in index.keys() - targets.keys() if name.startswith((PREFIX, "remainder/"))
    }
    checkpoints.load(source.path, assembly.tensors | stored, targets, left_out=left_out)
    if saved == mode:
        return []
    for name, parameter in parameters.items():
        remainder = targets.pop(f"remainder/{name}", None)
        master = master_of(
            local_part(stored.pop(name)), None if remainder is None else local_part(remainder)
        )
        assembly.optimizer.set_master(parameter, master)
    lost = (
        "the lower 16 bits of each weight are LOST"
        if mode == "bf16"
        else "nothing is lost, and updates are exact from now on"
    )
    return [f"weights: {saved} became {mode}; {lost}"]


def require_restored(source: ResumePoint, assembly: Assembly) -> None:
    """Raise TrainingHalted unless the live tensors have the checkpoint's bits. Collective.

    Compared are weights, moments, remainders and histories that have the checkpoint's dtype.
    Checkpoints of earlier versions have no checksums.
    """
    manifest = read_manifest(source.path)
    saved = manifest.model | manifest.optimizer
    live = {
        **assembly.tensors,
        **named_state(assembly.optimizer, assembly.hf),
        **histories_in(source, assembly),
    }
    comparable = {
        name: tensor
        for name, tensor in live.items()
        if name in saved and saved[name].dtype == DTYPE_NAMES[tensor.dtype]  # and not converted
    }
    present = checksums(comparable)
    if wrong := [name for name in present if saved[name].checksum not in (None, present[name])]:
        raise TrainingHalted(
            source.step,
            f"{source.path}: {len(wrong)} tensors in memory differ from what was saved: "
            f"{some_of(wrong)}. No step was trained. The fault lies in the code or in the device, "
            "not in the recipe",
        )


def histories_in(source: ResumePoint, assembly: Assembly) -> dict[str, torch.Tensor]:
    """Return the live histories and scales of delayed scaling if the checkpoint holds them."""
    return assembly.context.saved_state() if holds_histories(source, assembly) else {}


def holds_histories(source: ResumePoint, assembly: Assembly) -> bool:
    """Whether the checkpoint has all histories and scales of delayed scaling that this run has, and no others."""
    saved = {
        name: entry.shape
        for name, entry in read_manifest(source.path).optimizer.items()
        if name.startswith(PREFIX)
    }
    return saved == {
        name: tuple(tensor.shape) for name, tensor in assembly.context.saved_state().items()
    }


def begins_histories(source: ResumePoint, assembly: Assembly, job: Job) -> bool:
    """Whether the present precision has histories, and the checkpoint has them of other products, or of other gradients than
    those to come. Then `Assembly.begin` is due, once the checkpoint's weights are loaded: until then histories are of the weights
    that the model was built with, whose gradients are many times as large."""
    if not assembly.context.state():
        return False
    follow = any(
        key.startswith(SCALES_FOLLOW)
        for key in changed_keys(source.record["identity"], job.identity)
    )
    return (
        follow
        or source.record["precision"] != assembly.active.precision.name
        or not holds_histories(source, assembly)
    )


def resume_precision(run: Run, source: ResumePoint) -> None:
    """After `source` was read, take the precision of the run's last step before it or, where the checkpoint is another run's, of
    its next step. The next step may change it. Histories that the checkpoint lacks begin here. Collective."""
    require_restored(source, run.assembly)
    plan, ran = run.job.plan, None if source.is_branch else source.record["precision"]
    last = next(
        (each for *_, each in plan.spans if each.precision.name == ran),
        plan.active_after(run.state.step),
    )
    # which a rollback to before a switch to BF16 takes back
    if plan.is_scheduled or last != run.assembly.active:
        run.assembly.use(last)
        run.compute_in(last, first_step=1)
    if begins_histories(source, run.assembly, run.job):
        run.assembly.begin(run.assembly.active, run.job, run.accelerator)
        run.console.notice(
            f"delayed scaling fills its histories again, from {REHEARSALS} packs under the checkpoint's weights"
        )


# ── After a bad step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def roll_back(run: Run, reason: str) -> None:
    """Put the run back to its newest good checkpoint, to go on with the packs after those of the step just judged.

    All ranks call it after that step. Where the run has gone back to that checkpoint before, and has failed again on other packs,
    it takes the checkpoint before it, if that is still there.

    The abandoned steps leave metrics.jsonl as lines and stand inside one line of event `rollback`. Its step is the next one to
    come: a run that is resumed from the checkpoint drops that line, meets the same step, and goes back by itself.
    """
    judged, rollbacks, checkpoints = run.state, run.health.state.rollbacks + 1, run.checkpoints
    checkpoints.wait()
    # none of this run's own yet: the one that it was resumed from
    path = checkpoints.newest() or checkpoints.latest
    record = checkpoints.read_state(path)
    if record["progress"]["left_out"] != judged.left_out:
        path = checkpoints.newest(before=record["progress"]["step"]) or path
        record = checkpoints.read_state(path)
    run.assembly.context.forget()
    source = ResumePoint(path, record, [], is_branch=not checkpoints.owns(path))
    continue_stream(run.job, source)
    run.state, notes = restore(source, checkpoints, run.job, run.assembly, run.health)
    step = run.state.step
    checkpoints.abandon_newer(step)
    # what is trained from here is no checkpoint's yet
    run.resumed_step = min(run.resumed_step, step)
    run.health.state.rollbacks = rollbacks
    # The next packs are those after the judged step's, whatever place the checkpoint had.
    run.state = replace(
        run.state,
        left_out=judged.left_out + judged.step - step,
        shift=judged.shift,
        place=judged.place,
    )

    run.job = run.job.with_plan(done=step, switched_after=run.health.state.switched_after)
    run.assembly.describe_schedule(run.job.plan)
    resume_precision(run, source)
    if run.precision_watch:
        run.precision_watch.file.go_back(step)
    if run.accelerator.is_main_process:
        write_json(run.folder.audit, run.assembly.audit)
        event = {
            "step": step + 1,
            "event": "rollback",
            "reason": f"step {judged.step}: {reason}",
            "resumed_from": step,
            "rollbacks": rollbacks,
            "left_out": run.state.left_out,
            "abandoned": [each for each in read_metrics(run.folder.path) if each["step"] > step],
        }
        # To a tracker this is what a resume is: the file is cut back, and a hosted service keeps the abandoned steps.
        run.trackers.finish()
        run.trackers = Trackers(run.job.recipe.log, run.folder.path, step)
        run.trackers.start(resolved(run.job.recipe))
        run.trackers.log(event)
    run.best = best_so_far(run)
    run.console.warning(
        f"step {judged.step}: {reason}. Rollback {rollbacks} of {MOST_ROLLBACKS} at most: {notes[0]}; the packs of "
        f"{plural(judged.step - step, 'step')} since are passed over"
    )
