r"""Train a causal language model on packed documents, in the precision that the accelerate configuration names.

    accelerate launch --config_file accelerate_configs/bf16.yaml \
        train_accelerate.py recipes/small_malaysian_lm.yaml weights=bf16_exact

The first argument is the recipe: what is trained. `key=value` arguments, or `--key=value`, override it, with dots for nesting.
`--plan` says what would happen and checks every setting; `--preview-schedule` draws the learning rate; `--profile` shows where a
step's time goes; `--eval-only` evaluates and trains nothing. A run that is started again goes on where it was.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

if __name__ == "__main__":  # importing takes seconds; until the loop can save, Ctrl-C just ends the process, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imports leave no garbage; looking for it while millions of objects come in took a fifth of their time
    # torch reads this when it first uses a GPU. By default its allocator keeps pieces that fit nothing else: of Llama-3.1-8B in
    # shards, 67.9 GiB beside the 67.2 GiB in use. What the user sets goes first, under either of its names.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import torch
from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record

from foundation.errors import InputError, permissions_named
from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from packing.stream import StreamEnded
from pretrain.checkpoint.checkpoint import bytes_needed, check_space
from pretrain.checkpoint.state import TrainState, seed_step
from pretrain.metrics.console import Console
from pretrain.metrics.gradient_statistics import gradient_statistics
from pretrain.metrics.health import Health, StepDecision, TrainingHalted, frozen_names_due
from pretrain.metrics.profile import StepProfile
from pretrain.metrics.run_folder import RunFolder, check_free, check_writable
from pretrain.metrics.run_record import last_screen
from pretrain.metrics.trackers import resolve
from pretrain.metrics.waited import Waited, since_the_command
from pretrain.model.distributed import (
    end_processes,
    largest_over_ranks,
    make_accelerator,
    refused_together,
    same_on_all_ranks,
)
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import forward_backward
from pretrain.optimizer import adamw, schedule
from pretrain.plan.preflight import Job, planned_steps, prepare_job
from pretrain.plan.rendering import render
from pretrain.run import determinism
from pretrain.run.assembly import assemble
from pretrain.run.command_line import leave_status, parse_arguments, say_once
from pretrain.run.eval_only import evaluate_only, require_weights
from pretrain.run.evaluate import best_so_far, evaluate, evaluate_once, is_best
from pretrain.run.export import export_trained, is_exported
from pretrain.run.faults import explaining_memory, fault_of
from pretrain.run.introduction import environment_of_start, first_step, has_ended, introduce, warn_of_precisions
from pretrain.run.keeping import conclude, ended_before, leave, prepare_saves, save, save_last, sum_up, tell_saved
from pretrain.run.microbatch import choose_microbatch
from pretrain.run.parity import find_parity, require_parity
from pretrain.run.recording import log, record_of_step, recorder_of
from pretrain.run.resume import (
    ResumePoint,
    begin_stream,
    keep_findings,
    new_past,
    planned_resume,
    take_up,
    where_to_resume,
)
from pretrain.run.rollback import halted, judge_weights, oldest_checkpoint, roll_back
from pretrain.run.running import Run
from pretrain.run.streaming import ending_stream, pack_stream, reading_stream, tell_stream, wait_for_packs
from pretrain.run.switching import follow_the_schedule, go_on_as_scheduled
from pretrain.settings import config
from pretrain.settings.launch_environment import with_precision
from pretrain.settings.launch_topology import put_right


@record  # an error that is none of the user's: its traceback is in torchrun's table
def main() -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        with permissions_named():
            return launch(parse_arguments(__doc__))
    except InputError as error:
        say_once(f"error: {error}", error)
        return leave_status(2)
    except TrainingHalted as halt:
        say_once(f"halted: {halt}", halt)
        return leave_status(3)


# ── Act 1: what is asked for, and what would happen ───────────────────────────────────────────────────────────────────────────


def launch(arguments: argparse.Namespace) -> int:
    """Refuse what can be refused without the model's weights, before the run folder is touched; then run. Returns the status."""
    recipe = with_precision(config.load_recipe(arguments.recipe, arguments.overrides), os.environ)
    if recipe.deterministic:
        determinism.begin(os.environ)
    asked = put_right(recipe, os.environ, has_gpu=torch.accelerator.is_available())
    recipe, accelerator = asked.recipe, make_accelerator(asked.replicas)
    main_process = accelerator.is_main_process
    if arguments.preview_schedule:
        steps, picture = planned_steps(recipe, accelerator), arguments.preview_schedule
        if main_process:
            print(schedule.preview(recipe.schedule, recipe.optimizer, steps, recipe.batch.tokens, picture))
        return 0
    # Before packs are prepared, which may take hours; a plan may be made while the run is going on.
    if arguments.eval_only:
        refused_together(lambda: main_process and require_weights(recipe, arguments.resume))
    else:
        check_run_dir = check_writable if arguments.plan else check_free
        refused_together(lambda: main_process and check_run_dir(config.run_dir_of(recipe)))
    waited = Waited(shown=main_process, already=since_the_command())
    purpose = "plan" if arguments.plan else "run"
    job = prepare_job(recipe, accelerator, arguments.tokens_per_second, purpose=purpose, waited=waited)
    console = Console(job.plan.steps, enabled=main_process)
    for text in (*asked.notices, *job.notices):
        console.notice(text)
    if arguments.plan:
        job, resumed = planned_resume(job, arguments.resume, arguments.accept_changes)
        warn_of_precisions(job, console)
        console.notice("\n".join(filter(None, [render(job.plan), resumed])))
        return 0
    if arguments.eval_only:
        warn_of_precisions(job, console)
        with explaining_memory(job), determinism.explaining():
            evaluate_only(job, accelerator, console, arguments.resume)
        return ended(accelerator)

    with refused_together(lambda: RunFolder(job.run_dir, owner=main_process)) as folder:
        stopped_by, wanted, profiled = None, arguments.resume, arguments.profile
        if not ended_before(job, accelerator, folder, console, waited, wanted=wanted, profiled=profiled):
            options = {"wanted": wanted, "accept_changes": arguments.accept_changes, "profiled": profiled}
            begin = partial(build, job, accelerator, folder, console, waited, **options)
            stopped_by = carry_out(job, begin)
    return ended(accelerator, stopped_by)


def ended(accelerator: Accelerator, stopped_by: int | None = None) -> int:
    """End the process group; returns the exit status, for a run that the signal `stopped_by` ended."""
    status = leave_status(128 + stopped_by if stopped_by else 0)  # what a shell reports for a process that a signal ended
    end_processes(accelerator)
    return status


def carry_out(job: Job, begin: Callable[[], Run]) -> int | None:
    """Build the run and train it; returns the number of the signal that stopped it. Nothing refers to the run any more then."""
    with ending_stream(job):
        with explaining_memory(job), determinism.explaining():
            run = begin()
        try:
            with explaining_memory(run.job, run), determinism.explaining():
                return run_to_its_end(run)
        finally:
            run.checkpoints.close()


# ── Act 2: the model in memory and audited, resumed where there is something to resume, and all that watches over it ──────────


def build(
    job: Job,
    accelerator: Accelerator,
    folder: RunFolder,
    console: Console,
    waited: Waited,
    *,
    wanted: str,
    accept_changes: bool,
    profiled: bool,
) -> Run:
    """Returns the run before its first step, or its next: nothing but the steps is left to do. Collective.

    `wanted`: the checkpoint to go on from, or "auto". `profiled`: a step is to be recorded."""
    health, main_process = Health(job.recipe.health, job.precision_remedy), accelerator.is_main_process
    job, checkpoints, source = where_to_resume(job, folder, wanted, accept_changes)
    warn_of_precisions(job, console)
    pack_stream(job, accelerator)
    assembly = assemble(job, accelerator, waited)
    in_own_folder = source is not None and checkpoints.owns(source.path)
    to_come = 1 if in_own_folder else job.plan.checkpoints_at_once  # the kept ones are on disk already
    if in_own_folder and source.record["progress"]["step"] >= job.plan.steps:
        to_come = 0  # no step is to come
    check_space(folder.path, to_come * bytes_needed(assembly.tensors, assembly.state_tensors))

    state, notes = TrainState(steps=job.plan.steps), []
    if source:
        with waited.on("start", "reading the checkpoint"):
            state, notes = take_up(source, checkpoints, job, assembly, health, accelerator)
    else:
        begin_stream(None, job)
    with waited.on("checks", "finding the microbatch"):
        job = job.with_microbatch(choose_microbatch(job, assembly, source.record if source else None, accelerator))
    if source:
        checkpoints.abandon_newer(state.step)

    log_settings = job.recipe.log
    run = Run(
        job=job,
        assembly=assembly,
        accelerator=accelerator,
        folder=folder,
        state=state,
        begins=source is None or source.begins,
        resumed_step=state.step,
        health=health,
        checkpoints=checkpoints,
        recorder=recorder_of(job, assembly, accelerator),
        trackers=resolve(log_settings, run_dir=folder.path, resumed_step=state.step, main_process=main_process),
        precision_watch=assembly.precision_watch(log_settings.fp8_statistics, folder.path, state.step, main_process),
        profile=StepProfile.of(folder.path, accelerator, state) if profiled else None,
        console=console,
        waited=waited,
        past=source.past if source else new_past(job, accelerator),
    )
    get_ready(run, source, notes)
    return run


def get_ready(run: Run, source: ResumePoint | None, notes: list[str]) -> None:
    """Do what is left before the first step: the precision in force and parity are found, the run is introduced and watched.
    Collective; raises TrainingHalted where parity failed."""
    if source:
        go_on_as_scheduled(run, source)
    if not run.begins:
        keep_findings(source, run.assembly, run.job)
    parity, run.ended, run.environment = find_parity(run), has_ended(run), environment_of_start(run)
    introduce(run, notes)
    run.best = best_so_far(run)
    prepare_saves(run)
    require_parity(run, parity)


# ── Act 3: the training loop ──────────────────────────────────────────────────────────────────────────────────────────────────


def run_to_its_end(run: Run) -> int | None:
    """Train, and finish unless a signal came first; returns the signal's number."""
    if run.begins and run.job.recipe.model.weights_source is not None:  # what the weights knew before
        evaluate_once(run)
        run.best = None  # the untrained model is no candidate for the best checkpoint
    run.waited.go_on_to("training")
    stopped_by = train(run)
    run.waited.go_on_to("end")
    if stopped_by is None:
        stopped_by = finish(run)
    run.trackers.finish()
    if run.precision_watch:
        run.precision_watch.finish()
    if stopped_by is not None:
        run.console.notice(f"you waited {run.waited.describe()}")
    return stopped_by


def train(run: Run) -> int | None:
    """Step until the horizon, or until a signal asks any rank to stop; returns that signal's number."""
    run.assembly.model.train()
    with StopRequest(announced=run.accelerator.is_local_main_process) as stop:
        while not run.state.finished:  # once, and again after each rollback
            tell_stream(run)
            with run.job.batches(run.accelerator, run.state.shift).steps(*run.state.data_steps) as steps, reading_stream(run.job):
                try:
                    if stopped_by := train_on(run, steps, stop):
                        return stopped_by
                except StreamEnded as ended:  # which all ranks meet at one step
                    if run.state.step > run.resumed_step and judge_weights(run).proceed:
                        save(run)
                    enough = f"`train.steps: {run.state.step}` with --accept-changes, for which it is enough"
                    raise InputError(f"{ended}, or {enough if run.state.step else 'a smaller `batch.tokens`'}") from None
    return None


def train_on(run: Run, steps: Prefetch[StepBatches], stop: StopRequest) -> int | None:
    """Step until these `steps` serve no more: to the horizon, a rollback, or a signal, whose number it returns."""
    recipe, state, accelerator = run.job.recipe, run.state, run.accelerator

    def to_leave() -> int:
        return fault_of(run, steps) or stop.requested or 0

    while not state.finished:
        profiling = run.profile.recording(state.step + 1) if run.profile else nullcontext()
        with first_step(run), profiling, run.recorder.step():
            asked = wait_for_packs(run, steps, to_leave)
            if not asked:
                figures, decision = train_step(run, next(steps))
        if asked:
            return leave(run, asked, steps)
        tell_stream(run)
        log(run, figures, data_wait_ms=steps.data_wait_ms, shown=due(state.step, recipe.log.every) or state.finished)
        evaluates = due(state.step, recipe.evaluate.every) and not state.finished
        saves = due(state.step, recipe.checkpoint.every) or (evaluates and recipe.checkpoint.best)
        # After a skipped step too: the update before it may be to blame.
        if decision.action in ("update", "skip") and (saves or state.finished):
            decision = judge_weights(run)
        if decision.action == "stop":
            raise halted(run, decision)
        if decision.action == "rollback":
            return roll_back(run, decision.reason)
        if run.profile and run.profile.step == state.step:
            work = run.assembly.work_of(figures, run.recorder)
            run.console.notice(run.profile.table(work, steps.data_wait_ms))
        if is_confirming(run, state.step - 1) and accelerator.is_main_process:
            run.folder.write_json(run.folder.audit, run.assembly.audit)  # once more: the step has confirmed it

        # Between steps.
        if evaluates:
            evaluate(run)
        tell_saved(run)
        if asked := largest_over_ranks(accelerator, to_leave()):
            return leave(run, asked, steps)
        if (due(state.step, recipe.checkpoint.every) or is_best(run)) and not state.finished:
            save(run, behind=True)
    return None


def is_confirming(run: Run, steps: int) -> bool:
    """Whether the step that follows `steps` is the first of this process, after a rollback, or of a phase: its products are held
    to the audit."""
    return steps == run.job.plan.done or run.job.plan.begins_phase(steps)


def train_step(run: Run, batches: StepBatches) -> tuple[dict[str, Any], StepDecision]:
    """One optimizer step; returns its part of the metrics, and what its health has decided."""
    recipe, state, optimizer, context = run.job.recipe, run.state, run.assembly.optimizer, run.assembly.context
    follow_the_schedule(run)
    learning_rate = schedule.learning_rate(state.step, recipe.schedule, recipe.optimizer, state.steps)
    adamw.set_learning_rate(optimizer, learning_rate)
    seed_step(recipe.seed, state.step, run.accelerator.process_index)
    if run.health.may_skip:
        context.keep_state()

    # Forward and backward over all microbatches.
    watching = run.precision_watch.watching(state.step + 1) if run.precision_watch else None
    with run.assembly.confirming_audit(state.step + 1) if is_confirming(run, state.step) else nullcontext():
        mean_loss = forward_backward(run.assembly.model, batches, run.accelerator, watching)
    norm = adamw.gradient_norm(run.assembly.model.parameters())
    parts = run.assembly.model.mean_parts(run.accelerator, batches.valid_tokens)
    figures = (mean_loss, norm) if parts is None else (parts[0], norm, parts[1])
    clip_coefficient = adamw.clip_coefficient(norm, recipe.optimizer.clip)
    loss, gradient_norm, *penalty = same_on_all_ranks(run.accelerator, *figures)  # waits for the device

    gradients = {}
    if due(state.step + 1, recipe.log.gradient_statistics):
        gradients = gradient_statistics(run.assembly.hf, decoder_layers(run.assembly.hf), run.accelerator)
    precision_figures, precision_warning = run.precision_watch.report(state.step + 1) if run.precision_watch else ({}, None)

    # Update, unless the figures say that it would do harm.
    labelled = batches.valid_tokens > 0
    oldest = partial(oldest_checkpoint, run) if run.checkpoints.latest else None
    decision = run.health.check(state.step + 1, loss, gradient_norm, oldest=oldest, labelled=labelled)
    if decision.proceed:
        optimizer.step(clip_coefficient=clip_coefficient)
    elif decision.action == "skip":
        context.go_back()
    adamw.clear_gradients(optimizer, run.assembly.model)  # queued before what waits for the update
    frozen_updates = adamw.frozen_share(optimizer, run.accelerator) if decision.proceed else 0.0
    most_frozen = {}
    if frozen_names_due(state.step + 1, state.steps, frozen_updates):
        most_frozen = adamw.most_frozen(optimizer, run.assembly.hf, run.accelerator)
    told = decision.reason if decision.action in ("update", "skip") else None
    frozen = run.health.frozen_warning(state.step + 1, frozen_updates, most_frozen)
    unlabelled = run.health.unlabelled_warning(state.step + 1, batches.valid_tokens)
    for warning in filter(None, (told, precision_warning, frozen, unlabelled)):
        run.console.warning(warning)
    state.advance(tokens=batches.tokens, valid_tokens=batches.valid_tokens, skipped=not decision.proceed)
    measured = {"learning_rate": learning_rate, "gradient_norm": gradient_norm, "frozen_updates": frozen_updates}
    statistics = gradients | precision_figures
    return record_of_step(run, batches, decision, [loss, *penalty], measured, most_frozen, statistics), decision


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


# ── Act 4: what is kept ───────────────────────────────────────────────────────────────────────────────────────────────────────


def finish(run: Run) -> int | None:
    """Save, evaluate once more, export, and say where everything is. A finished run started again does what is still missing.

    Returns the number of a signal that came during the save, after which nothing more is done."""
    if asked := save_last(run):  # first: an evaluation that takes long, or fails, must not cost what was trained
        return asked
    evaluate_once(run)
    if is_best(run) and run.state.step > run.resumed_step:
        save(run)  # where `at_end` has not
    finished = sum_up(run)
    if run.job.recipe.checkpoint.at_end and not is_exported(run):
        with run.waited.on("saves", "writing final/", "tensors", total=len(run.assembly.tensors)):
            export_trained(run, finished)
    if finished:
        conclude(run, finished)
        run.console.panel(*last_screen(finished, run.folder, run.waited.describe()))
    return None


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: no later collection looks through it, of which each took a third of a second
    atexit.register(gc.unfreeze)  # or Triton's library reports as leaked what it holds
    gc.enable()
    sys.exit(main())
