r"""Train a causal language model on packed documents, in the Accelerate configuration's precision.

    accelerate launch --config_file accelerate_configs/bf16.yaml \
        train_accelerate.py recipes/qwen3_slimpajama.yaml

The first argument is the recipe. Arguments of the form `key=value` or `--key=value` override keys
of the recipe, with dots between the names of nested keys (`train.steps=100`). `--plan` checks every
setting and prints the plan of the run without training. `--profile` records the time of each kernel
in one step. If you start the same command again, the run resumes from its newest checkpoint.
`python -m pretrain` lists all other commands.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from foundation.command import run_command
from foundation.files import write_json
from foundation.signals import StopRequest
from pretrain.launch import script
from pretrain.settings import commands, config

if __name__ == "__main__":
    script.before_imports()
    # Report mistakes on the command line before the slow imports.
    commands.check_script(__doc__)

from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record

from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import Checkpoints, require_shared
from pretrain.checkpoint.state import NO_PAST, TrainState, seed_step
from pretrain.launch.environment import with_precision
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.run_folder import RunFolder, check_ours
from pretrain.metrics.run_record import last_screen, read_finished, read_run
from pretrain.metrics.trackers import JsonlTracker, Trackers
from pretrain.model import distributed
from pretrain.model.graphs import MicrobatchGraphs
from pretrain.model.packed import compute_microbatch, forward_backward, same_on_all_ranks
from pretrain.observe.observers import StepWatch, is_due
from pretrain.observe.profile import StepProfile
from pretrain.optimizer import adamw, schedule
from pretrain.plan.checks import check_step
from pretrain.run import (
    checkpointing,
    evaluate,
    export,
    resume_point,
    startup,
    streaming,
)
from pretrain.run.assembly import assemble
from pretrain.run.checkpointing import RollbackPoint
from pretrain.run.data import require_prepared
from pretrain.run.evaluate_command import served_job, served_loss
from pretrain.run.job import Job, prepare_job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import (
    Run,
    open_console,
    print_plan,
    recorder_of,
    report_if_finished,
)
from pretrain.run.stored_run import check_free, open_run_folder

# Threshold of garbage collection for the oldest generation. No training reaches it, so Python does
# not collect this generation.
NO_COLLECTION = 2**31 - 1


# `record` makes torchrun print the traceback of an unexpected exception.
@record
def main() -> int:
    """Train as the command line requests, and return the exit status of the process."""
    return run_command(lambda: launch(commands.read_script(__doc__)))


# ── 1: settings, Accelerator, packs ───────────────────────────────────────────────────────────────


def launch(arguments: argparse.Namespace) -> int:
    """Check the recipe, the packs and the model. Then lock the run folder and train.

    The checks need no weights. Nothing is written to the run folder before the checks have passed.
    Returns the exit status of the process.
    """
    recipe = config.load_recipe(arguments.recipe, arguments.overrides)
    recipe = with_precision(recipe, os.environ)
    if arguments.plan and recipe.fp8_config.on_unsupported == "error":
        # Emulate precisions that this machine lacks, so that a launch on GPUs can be planned here.
        settings = recipe.fp8_config.model_copy(update={"on_unsupported": "emulate"})
        recipe = recipe.model_copy(update={"fp8_config": settings})
    accelerator, notices = distributed.as_launched(recipe)
    recipe = config.with_weights(
        recipe, on_gpu=accelerator.device.type == "cuda", resume=arguments.resume
    )
    is_main_process = accelerator.is_main_process
    run_dir = config.run_dir_of(recipe)
    address = config.run_address_of(recipe)
    if arguments.plan:
        # A plan is printed at once, so it does not prepare packs, which may take hours.
        require_prepared(recipe.data, arguments.recipe)
        check_ours(run_dir)
    else:
        # Check the run folder before packs are prepared.
        distributed.raise_on_all_ranks(
            lambda: check_free(run_dir, address) if is_main_process else None
        )
    job = prepare_job(recipe, accelerator, arguments.overrides)
    check_step(job.recipe, job.plan.packs)
    # Check now whether the trained model can be evaluated as it will be served.
    served = served_job(job, accelerator) if job.recipe.evaluate.served else None
    console = open_console(job, accelerator, notices)
    for active in job.plan.precisions:
        if active.notice:
            console.warning(active.notice)
    if arguments.plan:
        return print_plan(job, console, arguments.resume, arguments.accept_changes)
    with (
        distributed.raise_on_all_ranks(
            lambda: open_run_folder(run_dir, address, owner=is_main_process)
        ) as folder,
        startup.explaining_errors(),
    ):
        stopped_by = carry_out(job, accelerator, folder, console, arguments)
        # An earlier process of this run may have added the served loss. Then the run is finished.
        if served and not stopped_by and not read_finished(run_dir):
            add_served_loss(served, accelerator, folder, console)
        # `carry_out` has returned, so no variable refers to its model. End the process group
        # here, so that only the first rank waits for object storage.
        distributed.end_process_group(accelerator)
    # Return 128 plus the signal's number, as shells do if a signal has ended a process.
    return 128 + stopped_by if stopped_by else 0


def carry_out(
    job: Job,
    accelerator: Accelerator,
    folder: RunFolder,
    console: Console,
    arguments: argparse.Namespace,
) -> int:
    """Build the run, train it, and finish it unless a signal has stopped it.

    A rollback ends the run, and builds it again from an earlier checkpoint. Returns the number of
    the signal that stopped the run, or 0.
    """
    require_shared(folder.path)
    job, checkpoints, point = resume_point.where_to_resume(
        job, arguments.resume, arguments.accept_changes
    )
    distributed.raise_on_all_ranks(folder.claim)
    resumed_step = point.step if point else 0
    if resumed_step >= job.plan.steps and report_if_finished(job, folder, console):
        return 0
    profile = None
    if arguments.profile:
        profile = StepProfile(folder.path, accelerator, resumed_step, job.plan.steps, console)
    # With `data.streaming` a separate process makes packs while the run trains.
    streaming.start_stream(job, point, folder, accelerator)
    build_from = partial(
        build,
        checkpoints=checkpoints,
        accelerator=accelerator,
        folder=folder,
        console=console,
        profile=profile,
    )
    with closing(checkpoints):
        run = build_from(job, point)
        if run.is_new and job.recipe.model.weights_source is not None:
            # Compute the held-out loss before the first step.
            evaluate.evaluate_once(run)
            # Forget this result. Otherwise step 0 could become the best checkpoint, although this
            # run has not trained it.
            run.best = None
        with StopRequest(announced=accelerator.is_local_main_process) as stop:
            outcome = train(run, stop)
            while isinstance(outcome, RollbackPoint):
                job = run.job  # `build` may have chosen the microbatch
                run.close()
                # Free the model before it is built again. Under FSDP2, Accelerate refers to it, and
                # collects garbage before it drops its reference.
                del run
                accelerator.free_memory()
                gc.collect()
                run = build_from(job, outcome)
                run.trackers.log(outcome.event)
                outcome = train(run, stop)
        stopped_by = outcome
        if not stopped_by:
            finish(run)
        run.close()
        return stopped_by


# ── 2: the model, on its devices, audited, and resumed ────────────────────────────────────────────


def build(
    job: Job,
    point: ResumePoint | None,
    checkpoints: Checkpoints,
    accelerator: Accelerator,
    folder: RunFolder,
    console: Console,
    profile: StepProfile | None,
) -> Run:
    """Return the run, ready for its next step.

    point: the checkpoint that the run continues from, or None.
    checkpoints: the checkpoints of the run folder.
    profile: the observer that records one step, or None.

    All ranks must call this function. Raises TrainingHalted if the first step differs too much from
    plain transformers (`parity`).
    """
    assembly = assemble(job, accelerator, console)
    checkpointing.check_disk_space(job, assembly, point)
    health = Health(job.recipe.health)
    notes: list[str] = []
    if point:
        with console.progress("reading the checkpoint"):
            state, notes = checkpointing.restore(point, checkpoints, job, assembly, health)
    else:
        state = TrainState(steps=job.plan.steps)
    # The microbatch is None if the recipe has `batch.microbatch: auto`.
    if job.plan.microbatch is None:
        with console.progress("finding the microbatch"):
            microbatch = startup.choose_microbatch(job, assembly, point, accelerator)
        job = job.with_settings("batch", microbatch=microbatch)

    run = Run(
        job=job,
        assembly=assembly,
        accelerator=accelerator,
        folder=folder,
        checkpoints=checkpoints,
        past=point.past if point else NO_PAST,
        state=state,
        is_new=point is None or point.is_branch,
        resumed_step=state.step,
        health=health,
        recorder=recorder_of(job, accelerator),
        trackers=Trackers(job.recipe.log, folder.path, state.step),
        console=console,
    )
    run.observers = startup.make_observers(run, profile)
    run.graphs = MicrobatchGraphs(assembly.shared_audit["cuda_graphs"], run.report_graphs)
    if point:
        # First remove later checkpoints from object storage, so that no later start restores one.
        distributed.raise_on_all_ranks(
            lambda: folder.stored.go_back(state.step) if folder.stored else None
        )
        checkpoints.set_aside_newer(state.step)
        checkpointing.resume_precision(run, point)
    run.introduce(notes)
    run.best = evaluate.best_so_far(run)
    if job.recipe.parity and run.is_new:
        startup.require_parity(run)
    return run


# ── 3: the training loop ──────────────────────────────────────────────────────────────────────────


def train(run: Run, stop: StopRequest) -> int | RollbackPoint:
    """Train until the last step of the run and save it, or until a rollback or a stop signal.

    Returns the checkpoint to go back to, or the signal's number, or 0 if the last step was reached.
    """
    run.assembly.model.train()
    steps_left = run.state.steps - run.state.step
    # Only `train_on` collects the oldest generation of garbage, which contains the model and its
    # compiled code. A collection in any step would take up to 0.2 seconds, and all ranks would wait
    # for the rank that collects.
    gc.set_threshold(*gc.get_threshold()[:2], NO_COLLECTION)
    with run.job.batches(run.accelerator).steps(run.state.place, steps_left) as steps:
        return train_on(run, steps, stop)


def train_on(run: Run, steps: Prefetch[StepBatches], stop: StopRequest) -> int | RollbackPoint:
    """Train on the batches `steps` until the last step of the run, a rollback or a stop signal.

    Save the last step if a setting needs its checkpoint. Returns the checkpoint to go back to, or
    the signal's number, or 0 after the last step.
    """
    recipe = run.job.recipe
    state = run.state
    stop_code = partial(checkpointing.stop_code, run, steps, stop)
    while not state.finished:
        with run.observers.step(state.step + 1) as watch, run.recorder.step():
            code = streaming.wait_for_packs(run, steps, stop_code)
            if code:
                return checkpointing.save_and_stop(run, code, steps)
            metrics, decision, code = train_step(run, steps, watch, stop_code)
        run.log(metrics, data_wait_ms=steps.data_wait_ms)
        steps.data_wait_ms = 0.0

        must_save = is_due(state.step, recipe.checkpoint.every)
        must_evaluate = is_due(state.step, recipe.evaluate.every) and not state.finished
        # Collect garbage after the first step, which compiles, and before an evaluation. Both take
        # much longer than a collection.
        if state.step == run.resumed_step + 1 or must_evaluate:
            gc.collect()
        needs_sound_weights = (
            must_save or state.finished or (must_evaluate and recipe.checkpoint.best)
        )
        # Check the weights after a skipped step too, because the previous update may have broken
        # them.
        if decision.action in ("update", "skip") and needs_sound_weights:
            decision = checkpointing.check_weights(run)
        if decision.action == "stop":
            raise checkpointing.training_halted(run, decision)
        if decision.action == "rollback":
            return checkpointing.roll_back(run, decision.reason)

        if must_evaluate:
            evaluate.evaluate(run)
            # A signal may have arrived during the evaluation, which may take longer than a step.
            code = distributed.largest_over_ranks(run.accelerator, stop_code())
        run.checkpoints.settle()
        if code:
            return checkpointing.save_and_stop(run, code, steps)
        if (must_save or run.is_best) and not state.finished:
            checkpointing.save(run, in_background=True)
    # Save before the last evaluation, so that the weights are not lost if the evaluation fails.
    if state.step > run.resumed_step and (recipe.checkpoint.at_end or recipe.evaluate.served):
        checkpointing.save(run)
    run.checkpoints.wait()
    # A signal may have arrived during the save. Then the last step is saved in any case.
    code = distributed.largest_over_ranks(run.accelerator, stop_code())
    return checkpointing.save_and_stop(run, code, steps) if code else 0


def train_step(
    run: Run, steps: Prefetch[StepBatches], watch: StepWatch, stop_code: Callable[[], int]
) -> tuple[dict[str, Any], StepDecision, int]:
    """Train one step. Return the metrics of the step, a decision, and a stop code.

    The decision says whether the weights were updated, and how the run continues. The stop code is
    the largest one of all ranks.

    A small model may take less than 100 ms for a step on a GPU. So the order of the calls matters:
    the host does most of its work while the device computes.

    steps: the prefetched batches of this rank.
    watch: the observers that are due in this step.
    stop_code: a function that returns the stop code of this rank.
    """
    batches = steps.take()
    recipe, state = run.job.recipe, run.state
    model, optimizer = run.assembly.model, run.assembly.optimizer
    run.follow_schedule()
    learning_rate = schedule.learning_rate(
        state.step, recipe.schedule, recipe.optimizer.learning_rate, state.steps
    )
    adamw.set_learning_rate(optimizer, learning_rate)
    seed_step(recipe.seed, state.step, run.accelerator.process_index)
    histories = model.context.copied_state() if run.health.may_skip else []

    with watch.passes(batches, state.place):
        mean_loss = forward_backward(
            model,
            batches,
            run.accelerator,
            watch.first_microbatch(),
            # Replaying a CUDA graph would not call the hooks of observers.
            compute=compute_microbatch if watch.observes_passes else run.graphs.compute,
        )
    norm = adamw.gradient_norm(model.parameters())
    means = model.mean_losses(run.accelerator, batches.valid_tokens, mean_loss)
    # Prepare the update while the device computes the gradients.
    update = optimizer.prepare(clip_coefficient=adamw.clip_coefficient(norm, recipe.optimizer.clip))
    steps.build_ahead()
    # This call waits for the device.
    gradient_norm, *values = same_on_all_ranks(run.accelerator, norm, *means.values())
    losses = dict(zip(means, values, strict=True))

    decision = run.health.check(
        state.step + 1,
        losses["loss"],
        gradient_norm,
        can_go_back=run.checkpoints.latest is not None,
        labelled=batches.valid_tokens > 0,
    )
    metrics = {"learning_rate": learning_rate, "gradient_norm": gradient_norm} | watch.metrics()
    if decision.proceed:
        with watch.update(learning_rate, state.step - state.skipped_steps, losses):
            update()
    elif decision.action == "skip":
        model.context.go_back(histories)
    adamw.clear_gradients(optimizer, model)
    # This call waits for the update.
    lost_share, code = run.lost_share_and_code(stop_code())
    state.advance(
        tokens=batches.tokens,
        valid_tokens=batches.valid_tokens,
        place=batches.places.stop,
        skipped=not decision.proceed,
    )
    return run.record_of_step(batches, decision, losses, metrics, lost_share), decision, code


# ── 4: the final evaluation and the export ────────────────────────────────────────────────────────


def finish(run: Run) -> None:
    """Evaluate the last step, export the model, and print the results and the paths of files."""
    evaluate.evaluate_once(run)
    if run.is_best and run.state.step > run.resumed_step:
        # This writes nothing if the last step is already saved (`checkpoint.at_end`).
        checkpointing.save(run)
    if not run.accelerator.is_main_process:
        return
    finished = read_run(run.folder.path)
    if run.job.recipe.checkpoint.at_end:
        with run.console.progress("writing final/", "tensors", total=len(run.assembly.tensors)):
            export.export_trained(run, finished)
    # The summary is written last: if it describes the last step, all other files are complete.
    write_json(run.folder.summary, finished.summary)
    run.console.panel(*last_screen(finished, run.folder))


def add_served_loss(
    job: Job, accelerator: Accelerator, folder: RunFolder, console: Console
) -> None:
    """Evaluate the trained model as it will be served (`evaluate.served`), and log the loss.

    job: the job of the evaluation.

    All ranks must call this function, after `carry_out` has returned.
    """
    # Free the model of the training.
    accelerator.free_memory()
    gc.collect()
    record = served_loss(job, accelerator)
    console.notice(
        f"held-out loss served in {record['served_precision']}: {record['served_loss']:.4f}"
    )
    if accelerator.is_main_process:
        # Append to the file. `start` keeps the lines of all steps.
        metrics = JsonlTracker(folder.metrics, job.plan.steps)
        metrics.start()
        metrics.log(record)
        write_json(folder.summary, read_run(folder.path).summary)


if __name__ == "__main__":
    script.run_to_end(main)
