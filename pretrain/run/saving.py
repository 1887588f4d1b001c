"""What is kept of a run: checkpoints while it goes on and where it stops, and only of weights that are worth it."""

from __future__ import annotations

import math
import signal
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from foundation.errors import InputError
from foundation.files import fsync
from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed, check_space
from pretrain.checkpoint.state import NO_PAST
from pretrain.metrics.health import StepDecision, TrainingHalted
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import local_part
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job
from pretrain.run.resume import ResumePoint
from pretrain.run.run import Run


def tensors_to_save(assembly: Assembly) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors; and beside them the optimizer's, with histories and scales of delayed scaling."""
    histories = assembly.context.saved_state() if assembly.context.backends else {}
    return assembly.tensors, assembly.optimizer_tensors | histories


def check_room(
    job: Job, assembly: Assembly, checkpoints: Checkpoints, source: ResumePoint | None
) -> None:
    """InputError where the disk has no room for the checkpoints to come, of which the kept ones are on it already."""
    at_once = job.plan.checkpoints_at_once
    if source is not None and checkpoints.owns(source.path):
        at_once = int(source.step < job.plan.steps)
    check_space(job.run_dir, at_once * bytes_needed(*tensors_to_save(assembly)))


def constants_of(job: Job, source: ResumePoint | None, accelerator: Accelerator) -> dict[str, Any]:
    """What all checkpoints of a run say alike: what defines it, what it keeps when it is resumed, and its past."""
    return {
        "identity": job.identity,
        "microbatch": job.plan.microbatch,
        "loss_chunk": job.plan.loss.tokens_at_once,
        "world_size": accelerator.num_processes,
        "past": source.past if source else NO_PAST,
    }


def save(run: Run, *, behind: bool = False) -> None:
    """A checkpoint of this step, after which the older ones may go. `behind`: return once its tensors are copied, and go on."""
    with run.console.progress(f"saving step {run.state.step}"):
        # Somebody may have removed the file. The weights are saved all the same.
        if run.accelerator.is_main_process and run.folder.metrics.exists():
            # first: after a resume from this checkpoint nothing repeats the steps before it
            fsync(run.folder.metrics)
        state = {"progress": asdict(run.state), "health": asdict(run.health.state), **run.constants}
        # of this step, whose histories are saved
        state["precision"] = run.precision.current.name
        if run.stream:
            state["stream"] = run.stream.record()
        spared = run.best["step"] if run.best else None
        how = {"spared": spared, "behind": behind, "say": run.console.notice}
        run.checkpoints.save(run.state.step, *tensors_to_save(run.assembly), state, **how)


# why ranks stop, where it is no signal. Above all numbers of signals: ranks agree on the largest
FAILED = 999


def reason_to_stop(run: Run, steps: Prefetch[StepBatches], stop: StopRequest) -> int:
    """The signal that has come; or FAILED, where a checkpoint cannot be written or the next packs cannot be read, or do not come;
    else 0. Before this run's first step there is nothing to save, so only signals count. A rank knows its own files and packs."""
    if run.state.step > run.resumed_step and (run.checkpoints.failed or steps.failure):
        return FAILED
    return stop.requested or 0


def leave(run: Run, reason: int, steps: Prefetch[StepBatches]) -> int:
    """Save, for a signal or a failure; returns the signal's number, or raises the failure. `steps`: those that would have come
    next. TrainingHalted where the weights are not finite. Collective."""
    run.checkpoints.wait()  # which raises that a save has failed
    if not (decision := judge_weights(run)).proceed:
        raise halted(run, decision)
    if run.state.step > run.resumed_step:
        save(run)
    if reason == FAILED:
        if steps.failure is not None and not isinstance(steps.failure, InputError):
            raise steps.failure
        why = steps.failure or "another process has no more packs, and says why"
        raise InputError(f"{why}. Step {run.state.step} is saved")
    return tell_stopped(run, reason)


def tell_stopped(run: Run, number: int) -> int:
    """Say that the signal of this number has stopped the run, and what comes next; returns the number."""
    todo = "evaluate and export it" if run.state.finished else "go on from here"
    run.console.notice(
        f"stopped by {signal.Signals(number).name} after step {run.state.step}; start the run again to {todo}"
    )
    return number


def save_last(run: Run, stop: StopRequest) -> int:
    """The checkpoint of the last step, where it is wanted and this process has trained it; returns the number of a signal that
    came meanwhile, after which nothing more is to be done, or 0. Collective."""
    if not (run.job.recipe.checkpoint.at_end and run.state.step > run.resumed_step):
        return 0
    save(run)
    number = largest_over_ranks(run.accelerator, stop.requested or 0)
    return tell_stopped(run, number) if number else 0


@torch.no_grad()
def judge_weights(run: Run) -> StepDecision:
    """Whether the weights may be saved: the last update may have overflowed them, and its loss and gradient, computed before,
    cannot show that. Where it stops the run, metrics.jsonl says so. Collective."""
    device, parts = (
        run.accelerator.device,
        {name: local_part(each) for name, each in run.assembly.hf.named_parameters()},
    )
    # A norm allocates nothing of the parameters' size.
    largest = [
        torch.linalg.vector_norm(each, math.inf).float() if each.numel() else torch.zeros(())
        for each in parts.values()
    ]
    bad = run.accelerator.reduce(
        torch.stack([~each.to(device).isfinite() for each in largest]).float(), reduction="sum"
    )
    names = [name for name, ranks in zip(parts, bad.tolist(), strict=True) if ranks]
    if not names:
        return StepDecision()
    decision = run.health.judge_overflow(names, can_go_back=run.checkpoints.latest is not None)
    if decision.action == "stop":
        run.trackers.log({"step": run.state.step, "event": "halted", "reason": decision.reason})
    return decision


def halted(run: Run, decision: StepDecision) -> TrainingHalted:
    """The exception that ends a run at a bad step, with what to change. Waits for the save under way, and raises InputError where
    that fails. Collective."""
    run.checkpoints.wait()
    return TrainingHalted(run.state.step, f"{decision.reason}. {decision.remedy}.")
