"""Save checkpoints during a run, at its end, and when it is stopped or fails."""

from __future__ import annotations

import math
import signal
from dataclasses import asdict

import torch
from torch import Tensor

from foundation.errors import InputError
from foundation.files import fsync
from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import bytes_needed, check_space
from pretrain.metrics.health import StepDecision, TrainingHalted
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import local_part
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import Run

# Stop code of a failure. Ranks agree on the largest code, so it exceeds every signal number.
FAILED = 999


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
    if run.checkpoints.failed or batches.failure:
        return FAILED
    return stop.requested or 0


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
