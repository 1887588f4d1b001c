"""A step that must not reach the weights: going back to the last checkpoint, and what the user is told when the run stops."""

from __future__ import annotations

import math

import torch

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.units import plural
from pretrain.metrics.health import MOST_ROLLBACKS, StepDecision, TrainingHalted, some_of
from pretrain.metrics.run_record import read_metrics
from pretrain.metrics.trackers import resolve
from pretrain.model.distributed import local_part
from pretrain.run.assembly import found_of_course
from pretrain.run.evaluate import best_so_far
from pretrain.run.resume import ResumePoint, take_up
from pretrain.run.running import Run
from pretrain.run.switching import go_on_as_scheduled
from pretrain.settings import config


def roll_back(run: Run, reason: str) -> None:
    """Put the run back to its newest good checkpoint, to go on with the packs after those of the step just judged.

    All ranks call it after that step. Where the run has gone back to that checkpoint before, and has failed again on other packs,
    it takes the checkpoint before it, if that is still kept.

    The abandoned steps leave metrics.jsonl as lines and stand inside one line of event `rollback`. Its step is the next one to
    come: a run that is resumed from the checkpoint drops that line, meets the same step, and goes back by itself.
    """
    judged, rollbacks, checkpoints = run.state, run.health.rollbacks + 1, run.checkpoints
    checkpoints.wait()
    path = checkpoints.newest() or checkpoints.current  # none of this run's own yet: the one that it was resumed from
    record = checkpoints.read_state(path)
    if record["progress"]["left_out"] != judged.left_out:
        path = checkpoints.newest(before=record["progress"]["step"]) or path
        record = checkpoints.read_state(path)
    run.assembly.context.forget()
    source = ResumePoint(path, record, [], begins=not checkpoints.owns(path))
    run.state, notes = take_up(source, checkpoints, run.job, run.assembly, run.health, run.accelerator)
    checkpoints.abandon_newer(run.state.step)
    run.resumed_step = min(run.resumed_step, run.state.step)  # what is trained from here is no checkpoint's yet
    run.health.rollbacks = rollbacks
    run.state.left_out = judged.left_out + judged.step - run.state.step
    run.state.shift = judged.shift  # the text goes on after the judged step's packs, whatever shift the checkpoint had

    # What is trained anew is in the precisions of the present schedule, whatever those steps were in before a resume.
    ran = {first: name for first, name in run.job.plan.course.items() if first <= run.state.step}
    run.job = run.job.after(run.state.step, ran, run.state.tokens)
    audit, course, past = run.assembly.audit, found_of_course(run.job.plan), run.past.back_at(run.state.step)
    for key in ("schedule", "phases", "precisions") if not course else ():
        audit.pop(key, None)  # every step that is left is in one
    audit |= course
    go_on_as_scheduled(run, source)
    if run.precision_watch:
        run.precision_watch.go_back(run.state.step)
    if run.accelerator.is_main_process:
        run.folder.write_json(run.folder.audit, audit)
        if past != run.past:
            environment = load_object(run.folder.environment, "start the run again to write it")
            environment.pop("past", None)
            run.folder.write_json(run.folder.environment, environment | past.record())
        event = {
            "step": run.state.step + 1,
            "event": "rollback",
            "reason": f"step {judged.step}: {reason}",
            "resumed_from": run.state.step,
            "rollbacks": rollbacks,
            "left_out": run.state.left_out,
            "abandoned": [each for each in read_metrics(run.folder.path) if each["step"] > run.state.step],
        }
        # To a tracker this is what a resume is: the file is cut back, and a hosted service keeps the abandoned steps.
        run.trackers.finish()
        run.trackers = resolve(run.job.recipe.log, run_dir=run.folder.path, resumed_step=run.state.step)
        run.trackers.start(config.resolved(run.job.recipe))
        run.trackers.log(event)
    run.past, run.best = past, best_so_far(run)
    passed, limit = judged.step - run.state.step, MOST_ROLLBACKS
    run.console.warning(
        f"step {judged.step}: {reason}. Rollback {rollbacks} of {limit} at most: {notes[0]}; the packs of "
        f"{plural(passed, 'step')} since are passed over"
    )


def halted(run: Run, decision: StepDecision) -> TrainingHalted:
    """The end of a run at a step that it does not survive, with what to change. All ranks call it. What was being saved is saved
    then, or the reason says why not."""
    reason, remedy = decision.reason, decision.remedy
    try:
        run.checkpoints.wait()
    except InputError as failure:
        reason += f". {failure}"
    if names := tensors_not_finite(run):
        reason += f". The weights themselves hold infinity or NaN, in {some_of(names)}"
        source, untrained = run.job.recipe.model.weights_source, run.state.step - run.state.skipped_steps <= 1
        if source is not None and untrained:
            remedy = f"They came so with `model.source: {source}`: fetch it again, or name other weights"
        else:
            there = run.checkpoints.latest is not None
            again = "resume from a checkpoint before that with --resume" if there else "start again in another `run_dir`"
            remedy = f"Lower `optimizer.learning_rate`, and {again}"
    return TrainingHalted(run.state.step, f"{reason}. {remedy}.")


def judge_weights(run: Run) -> StepDecision:
    """Whether the present weights may be saved: the last update may have overflowed them, which its own loss and gradient cannot
    show, and what is saved is good to go back to. Collective. Where they stop the run, metrics.jsonl says so."""
    names = tensors_not_finite(run)
    if not names:
        return StepDecision()
    decision = run.health.judge_overflow(names, can_go_back=run.checkpoints.latest is not None)
    if decision.action == "stop":
        run.trackers.log({"step": run.state.step, "event": "halted", "reason": f"{decision.reason}: {some_of(names)}"})
    return decision


@torch.no_grad()
def tensors_not_finite(run: Run) -> list[str]:
    """Names of the parameters that hold infinity or NaN on any rank; collective. Allocates nothing of their size."""
    device, parts = run.accelerator.device, {name: local_part(each) for name, each in run.assembly.hf.named_parameters()}
    largest = [torch.linalg.vector_norm(each, math.inf).float() if each.numel() else torch.zeros(()) for each in parts.values()]
    bad = torch.stack([~each.to(device).isfinite() for each in largest]).float()
    return [name for name, ranks in zip(parts, run.accelerator.reduce(bad, reduction="sum").tolist(), strict=True) if ranks]
