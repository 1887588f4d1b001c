"""Save the state of a run, and restore it: at its start, and after a bad step."""

from __future__ import annotations

import math
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

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
from pretrain.metrics.health import MOST_ROLLBACKS, Health, StepDecision, TrainingHalted, some_of
from pretrain.metrics.run_record import read_metrics
from pretrain.metrics.trackers import Trackers
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import local_part
from pretrain.optimizer.adamw import named_state, set_updates_done
from pretrain.optimizer.exact_weights import master_of
from pretrain.precision.product import PREFIX
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.assembly import REHEARSALS, Assembly
from pretrain.run.evaluate import best_so_far
from pretrain.run.job import Job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import Run
from pretrain.run.startup import make_observers
from pretrain.run.streaming import continue_stream
from pretrain.settings.config import resolved

# Stop code of a failure. Ranks agree on the largest code, so it exceeds every signal number.
FAILED = 999
# Settings that scales of gradients depend on: the largest code, the loss, and its divisor.
SCALES_FOLLOW = ("batch.tokens", "loss.", "fp8_config.fp8_format")

# ── Save ──────────────────────────────────────────────────────────────────────────────────────────


def tensors_to_save(assembly: Assembly) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model's tensors, and the optimizer's tensors with the state of delayed scaling."""
    return assembly.tensors, assembly.optimizer_tensors | assembly.context.saved_state()


def check_disk_space(job: Job, assembly: Assembly, source: ResumePoint | None) -> None:
    """Raise InputError if the disk cannot hold the checkpoints that are still to be written.

    A resumed run has its older checkpoints on the disk already, and needs room for one more.
    """
    new_checkpoints = job.plan.checkpoints_at_once
    if source is not None and source.in_run_folder:
        new_checkpoints = int(source.step < job.plan.steps)
    model_tensors, optimizer_tensors = tensors_to_save(assembly)
    check_space(job.run_dir, new_checkpoints * bytes_needed(model_tensors, optimizer_tensors))


def save(run: Run, *, in_background: bool = False) -> None:
    """Save a checkpoint of the current step and delete checkpoints that are no longer kept.

    With `in_background`, return as soon as the tensors are copied. A thread writes them.
    """
    with run.console.progress(f"saving step {run.state.step}"):
        # A user may have removed the file. The weights are saved all the same.
        if run.accelerator.is_main_process and run.folder.metrics.exists():
            # Metrics first: a run that resumes from this checkpoint does not repeat the steps
            # before it, so their metrics must already be on the disk.
            fsync(run.folder.metrics)
        state = {
            "progress": asdict(run.state),
            "health": asdict(run.health.state),
            "identity": run.job.identity,
            "microbatch": run.job.plan.microbatch,
            "loss_chunk": run.job.plan.loss.tokens_at_once,
            "world_size": run.accelerator.num_processes,
            "past": run.past,
            "precision": run.precision.current.name,
        }
        if run.job.data.stream is not None:
            state["stream"] = run.job.data.stream.record
        model_tensors, optimizer_tensors = tensors_to_save(run.assembly)
        run.checkpoints.save(
            run.state.step,
            model_tensors,
            optimizer_tensors,
            state,
            spared=run.best["step"] if run.best else None,
            behind=in_background,
            say=run.console.notice,
        )


def stop_code(run: Run, batches: Prefetch[StepBatches], stop: StopRequest) -> int:
    """Return why this rank should stop: a signal's number, FAILED, or 0 to go on.

    FAILED means that a checkpoint could not be written, or that the next packs could not be read or
    will not come. A rank knows only its own files and packs.
    """
    return FAILED if run.checkpoints.failed or batches.failure else stop.requested or 0


def save_and_stop(run: Run, code: int, batches: Prefetch[StepBatches]) -> int:
    """Save after a signal or a failure. Return the signal's number, or raise the failure.

    Collective. Raises TrainingHalted if a weight is not finite, and InputError if a checkpoint
    could not be written or packs could not be read.
    """
    run.checkpoints.wait()  # raises if a save in the background has failed
    decision = check_weights(run)
    if not decision.proceed:
        raise training_halted(run, decision)
    has_trained = run.state.step > run.resumed_step
    if has_trained:
        save(run)
    if code != FAILED:
        return report_stop(run, code)
    failure = batches.failure
    if failure is not None and not isinstance(failure, InputError):
        raise failure
    reason = failure or "another process has no more packs; see its message"
    saved = f". Step {run.state.step} is saved" if has_trained else ""
    raise InputError(f"{reason}{saved}")


def report_stop(run: Run, signal_number: int) -> int:
    """Report the signal that stopped the run, and the next start's action. Return its number."""
    next_start = "evaluate and export it" if run.state.finished else "resume from here"
    run.console.notice(
        f"stopped by {signal.Signals(signal_number).name} after step {run.state.step}; "
        f"start the run again to {next_start}"
    )
    return signal_number


def save_last(run: Run, stop: StopRequest) -> int:
    """Save the last step if this process trained it and `checkpoint.at_end` is set.

    Collective. Returns the number of a signal that arrived meanwhile, else 0.
    """
    if not run.job.recipe.checkpoint.at_end or run.state.step <= run.resumed_step:
        return 0
    save(run)
    signal_number = largest_over_ranks(run.accelerator, stop.requested or 0)
    return report_stop(run, signal_number) if signal_number else 0


@torch.no_grad()
def check_weights(run: Run) -> StepDecision:
    """Decide whether the weights may be saved: every weight must be finite.

    The last update may have overflowed a weight. Its loss and gradient norm cannot show that,
    because they were computed before the update. A stop is recorded in metrics.jsonl. Collective.
    """
    overflowed = {}
    for name, parameter in run.assembly.hf.named_parameters():
        weight = local_part(parameter)
        # The infinity norm allocates nothing of the weight's size.
        largest = torch.linalg.vector_norm(weight, math.inf) if weight.numel() else torch.zeros(())
        overflowed[name] = ~largest.to(run.accelerator.device).isfinite()
    on_ranks = run.accelerator.reduce(torch.stack(list(overflowed.values())).float(), "sum")
    names = [name for name, ranks in zip(overflowed, on_ranks.tolist(), strict=True) if ranks]
    if not names:
        return StepDecision()
    decision = run.health.judge_overflow(names, can_go_back=run.checkpoints.latest is not None)
    if decision.action == "stop":
        run.trackers.log({"step": run.state.step, "event": "halted", "reason": decision.reason})
    return decision


def training_halted(run: Run, decision: StepDecision) -> TrainingHalted:
    """Return the exception that ends a run at a bad step, with its reason and remedy.

    Waits for the save in the background, and raises InputError if that failed. Collective.
    """
    run.checkpoints.wait()
    return TrainingHalted(run.state.step, f"{decision.reason}. {decision.remedy}.")


# ── Restore ───────────────────────────────────────────────────────────────────────────────────────


def restore(
    source: ResumePoint, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Restore the run's memory to the state of `source`.

    Return the counters and notes for the user. Collective. The caller still has to call
    `Checkpoints.abandon_newer`.
    """
    place = {"shift": source.shift(job), "place": source.place(job)}
    state = TrainState(**source.record["progress"] | {"steps": job.plan.steps} | place)
    notes = load_weights(source, checkpoints, job.recipe.weights, assembly)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.state = source.health
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def load_weights(
    source: ResumePoint, checkpoints: Checkpoints, mode: Weights, assembly: Assembly
) -> list[str]:
    """Load weights, moments and histories, and return notes for the user.

    mode: `weights` of the recipe. The checkpoint may have another one. Then its weights are read as
        they were stored, become FP32 masters, and are stored in `mode`.

    Histories of other layers or precisions are not loaded.
    """
    saved: Weights = source.record["identity"]["weights"]
    parameters = dict(assembly.hf.named_parameters())
    stored: dict[str, Tensor] = {}
    targets = assembly.optimizer_tensors | histories_in(source, assembly)
    if saved != mode:
        dtype = getattr(torch, WEIGHT_DTYPES[saved])
        stored = {name: torch.empty_like(p, dtype=dtype) for name, p in parameters.items()}
        targets = {
            name: tensor for name, tensor in targets.items() if not name.startswith("remainder/")
        }
        # Plain BF16 keeps the stored weight: a master between two BF16 values would round to the
        # other one.
        if (saved, mode) == ("bf16_exact", "fp32"):
            targets |= {
                f"remainder/{name}": torch.empty_like(p, dtype=torch.int16)
                for name, p in parameters.items()
            }
    not_loaded = {
        name
        for name in read_manifest(source.path).optimizer.keys() - targets.keys()
        if name.startswith((PREFIX, "remainder/"))
    }
    checkpoints.load(source.path, assembly.tensors | stored, targets, left_out=not_loaded)
    if saved == mode:
        return []
    for name, parameter in parameters.items():
        remainder = targets.pop(f"remainder/{name}", None)
        assembly.optimizer.set_master(
            parameter,
            master_of(
                local_part(stored.pop(name)), None if remainder is None else local_part(remainder)
            ),
        )
    if mode == "bf16":
        return [f"weights: {saved} became {mode}; the lower 16 bits of each weight are LOST"]
    return [f"weights: {saved} became {mode}; nothing is lost, and updates are exact from now on"]


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
    wrong = [name for name in present if saved[name].weighted_sum not in (None, present[name])]
    if wrong:
        raise TrainingHalted(
            source.step,
            f"{source.path}: {len(wrong)} tensors in memory differ from what was saved: "
            f"{some_of(wrong)}. No step was trained. The fault lies in the code or in the device, "
            "not in the recipe",
        )


def histories_in(source: ResumePoint, assembly: Assembly) -> dict[str, Tensor]:
    """Return the live histories and scales of delayed scaling if the checkpoint holds them."""
    return assembly.context.saved_state() if holds_histories(source, assembly) else {}


def holds_histories(source: ResumePoint, assembly: Assembly) -> bool:
    """Return whether the checkpoint has exactly the histories and scales that this run has."""
    saved = {
        name: entry.shape
        for name, entry in read_manifest(source.path).optimizer.items()
        if name.startswith(PREFIX)
    }
    return saved == {
        name: tuple(tensor.shape) for name, tensor in assembly.context.saved_state().items()
    }


def needs_new_histories(source: ResumePoint, assembly: Assembly, job: Job) -> bool:
    """Return whether the present precision has histories that the checkpoint's cannot continue.

    The saved histories may belong to other products, or to gradients of another size. Then call
    `Assembly.start_precision` after the checkpoint's weights are loaded. Before that, histories are
    those of the weights that the model was built with, whose gradients are many times as large.
    """
    if not assembly.context.state():
        return False
    changed = changed_keys(source.record["identity"], job.identity)
    return (
        any(key.startswith(SCALES_FOLLOW) for key in changed)
        or source.record["precision"] != assembly.precision.current.name
        or not holds_histories(source, assembly)
    )


def resume_precision(run: Run, source: ResumePoint) -> None:
    """Compute in the precision of the run's last step before `source`. Collective.

    If the checkpoint is another run's, compute in the precision of the next step. The next step may
    change the precision. Delayed scaling fills histories that the checkpoint lacks.
    """
    require_restored(source, run.assembly)
    name = run.precision.schedule.at(run.state.step + 1).precision.name
    names = [active.precision.name for active in run.precision.schedule.precisions()]
    if not source.is_branch and source.record["precision"] in names:
        name = source.record["precision"]
    run.precision.use(name)
    if needs_new_histories(source, run.assembly, run.job):
        run.assembly.start_precision(name, run.job, run.accelerator)
        run.console.notice(
            f"delayed scaling fills its histories again, from {REHEARSALS} packs under the "
            "checkpoint's weights"
        )


# ── After a bad step ──────────────────────────────────────────────────────────────────────────────


def roll_back(run: Run, reason: str | None) -> None:
    """Restore the newest good checkpoint, and continue after the packs of the judged step.

    All ranks call this after that step. If the run has gone back to that checkpoint before, and has
    failed again on other packs, it takes the checkpoint before it if that still exists.

    The lines of abandoned steps are removed from metrics.jsonl and kept inside one line of event
    `rollback`. Its step is the next one: a run that is resumed from the checkpoint drops that line,
    meets the same step, and goes back by itself.
    """
    judged = run.state
    rollbacks = run.health.state.rollbacks + 1
    checkpoints = run.checkpoints
    checkpoints.wait()
    source = _rollback_point(checkpoints, judged)
    run.assembly.context.forget()
    continue_stream(run.job, source)
    run.state, notes = restore(source, checkpoints, run.job, run.assembly, run.health)
    step = run.state.step
    checkpoints.abandon_newer(step)
    # Steps trained from here on are in no checkpoint yet.
    run.resumed_step = min(run.resumed_step, step)
    run.health.state.rollbacks = rollbacks
    # The next packs are those after the judged step's, whatever place the checkpoint has.
    run.state = replace(
        run.state,
        left_out=judged.left_out + judged.step - step,
        shift=judged.shift,
        place=judged.place,
    )

    run.precision.schedule = run.precision.schedule.switched_to_bf16_after(
        run.health.state.switched_after
    )
    resume_precision(run, source)
    # New observers check the next two steps, as after a start.
    run.observers.finish()
    run.observers = make_observers(run)
    run.write_audit()
    if run.accelerator.is_main_process:
        _record_rollback(run, f"step {judged.step}: {reason}")
    run.best = best_so_far(run)
    run.console.warning(
        f"step {judged.step}: {reason}. Rollback {rollbacks} of {MOST_ROLLBACKS} at most: "
        f"{notes[0]}; the packs of {plural(judged.step - step, 'step')} since are passed over"
    )


def _rollback_point(checkpoints: Checkpoints, judged: TrainState) -> ResumePoint:
    """Return the checkpoint that a rollback from `judged` restores."""
    # Without a checkpoint of its own, the run goes back to the one that it was resumed from.
    path = cast(Path, checkpoints.newest() or checkpoints.latest)
    record = checkpoints.read_state(path)
    if record["progress"]["left_out"] != judged.left_out:
        path = checkpoints.newest(before=record["progress"]["step"]) or path
        record = checkpoints.read_state(path)
    return ResumePoint(path, record, is_branch=not checkpoints.owns(path))


def _record_rollback(run: Run, reason: str) -> None:
    """Replace the lines of abandoned steps in metrics.jsonl by one event."""
    step = run.state.step
    event = {
        "step": step + 1,
        "event": "rollback",
        "reason": reason,
        "resumed_from": step,
        "rollbacks": run.health.state.rollbacks,
        "left_out": run.state.left_out,
        "abandoned": [line for line in read_metrics(run.folder.path) if line["step"] > step],
    }
    # To a tracker this is a resume: the file is cut back, and a hosted service keeps the abandoned
    # steps.
    run.trackers.finish()
    run.trackers = Trackers(run.job.recipe.log, run.folder.path, step)
    run.trackers.start(resolved(run.job.recipe))
    run.trackers.log(event)
