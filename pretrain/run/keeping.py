"""What is kept of a run: checkpoints while it goes on and where it stops, then its summary and its curves; and what is said of a
run that has ended without a checkpoint, when it is started again."""

from __future__ import annotations

import signal
from dataclasses import replace

from foundation.errors import InputError
from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed, check_space
from pretrain.compare.figures import plot_losses
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import RunRecord, last_screen, read_metrics, read_run, summary
from pretrain.model.distributed import largest_over_ranks
from pretrain.plan.preflight import Job
from pretrain.run.assembly import Assembly
from pretrain.run.faults import Stop, why_no_packs
from pretrain.run.resume import ResumePoint
from pretrain.run.rollback import halted, judge_weights
from pretrain.run.running import Run

# ── Checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_room(folder: RunFolder, job: Job, assembly: Assembly, checkpoints: Checkpoints, source: ResumePoint | None) -> None:
    """InputError where the disk has no room for the checkpoints to come, of which the kept ones are on it already."""
    at_once = job.plan.checkpoints_at_once
    if source is not None and checkpoints.owns(source.path):
        at_once = int(source.record["progress"]["step"] < job.plan.steps)
    check_space(folder.path, at_once * bytes_needed(assembly.tensors, assembly.state_tensors))


def prepare_saves(run: Run) -> None:
    """Reserves the memory for saves that go on behind the training, before the training takes it."""
    every, step = run.job.recipe.checkpoint.every, run.state.step
    if every is not None and step // every * every + every < run.state.steps:
        run.checkpoints.prepare(run.assembly.tensors, run.assembly.state_tensors)


def save(run: Run, *, behind: bool = False) -> None:
    """A checkpoint of this step, after which the older ones may go. `behind`: return once its tensors are copied, and go on."""
    run.trackers.sync()
    record = run.state.record(run.identity) | {
        "health": run.health.state_dict(),
        "microbatch": run.job.plan.microbatch,
        "loss_chunk": run.job.plan.loss.tokens_at_once,
        "world_size": run.accelerator.num_processes,
        **run.past.record(),
        **({"stream": run.job.data.stream.record()} if run.job.data.stream else {}),
    }
    write = run.checkpoints.begin if behind else run.checkpoints.save
    spared = run.best.step if run.job.plan.recipe.checkpoint.best and run.best else None
    task = f"saving step {run.state.step}"
    with run.waited.on("saves", task):
        write(run.state.step, run.assembly.tensors, run.assembly.state_tensors, record, spared=spared)
    tell_saved(run)


def tell_saved(run: Run) -> None:
    """Say what has been saved since this was last called."""
    for line in run.checkpoints.news():
        run.console.notice(line)


def leave(run: Run, asked: int, steps: Prefetch[StepBatches]) -> int:
    """Save, as a signal or what has gone wrong asks for; returns the number of the signal to end by, or raises what was lost.
    `steps`: those that would have come next."""
    if asked == Stop.SAVE_FAILED:
        with run.waited.on("saves", "saving"):
            run.checkpoints.wait()  # which raises what has failed
    lost = why_no_packs(run, steps) if asked == Stop.PACKS_FAILED else None
    if not (decision := judge_weights(run)).proceed:
        raise halted(run, decision)
    if run.state.step > run.resumed_step:  # else it still waits for the packs of its first step, and has none of its own to save
        save(run)
    if lost:
        raise lost
    step, why = run.state.step, signal.Signals(asked).name
    run.console.notice(f"stopped by {why} after step {step}; start the run again to go on from here")
    return asked


# ── The end ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def save_last(run: Run) -> int | None:
    """The checkpoint of the last step, where it is wanted and this process has trained it; returns the number of a signal that
    came meanwhile, after which nothing more is to be done."""
    if not (run.job.recipe.checkpoint.at_end and run.state.step > run.resumed_step):
        return None
    with StopRequest(announced=run.accelerator.is_local_main_process) as stop:  # what was trained must not be lost so late
        save(run)
    asked = largest_over_ranks(run.accelerator, stop.requested or 0)
    if not asked:
        return None
    why = f"stopped by {signal.Signals(asked).name} after step {run.state.step}"
    run.console.notice(f"{why}, the last one; start the run again to evaluate and export it")
    return asked


def sum_up(run: Run) -> RunRecord | None:
    """Draw the curves; returns what the run folder holds, with the summary that `conclude` writes. None but on the main process.
    InputError where metrics.jsonl has no step any more."""
    if not run.accelerator.is_main_process:
        return None
    metrics = read_metrics(run.folder.path)
    figures = summary(metrics)
    if not figures["steps"]:
        raise InputError(
            f"{run.folder.metrics}: holds no step of this run any more, of which a summary could be written; the model of "
            f"its last checkpoint is exported by: python -m pretrain export {run.folder.path}"
        )
    if not run.ended:  # what lies there is of an earlier end, or damaged
        run.folder.summary.unlink(missing_ok=True)
    finished = read_run(run.folder.path, metrics)
    if not run.ended:  # else the summary describes the recipe as it was then
        finished = replace(finished, summary=run.job.plan.fairness(run.job.data.train.fingerprint) | figures)
    if not (run.ended and run.folder.loss_plot.exists()):
        plot_losses([finished], run.folder.loss_plot)
    run.trackers.picture(run.folder.loss_plot, run.state.step)
    return finished


def conclude(run: Run, finished: RunRecord | None) -> None:
    """Write the summary, the last thing that a run does: who finds it of the last step finds all else. And say where all is."""
    if finished is None:
        return
    if not run.ended:
        run.folder.write_json(run.folder.summary, finished.summary)
    run.console.panel(*last_screen(finished, run.folder, run.waited.describe()))
