r"""Train a causal language model on packed documents, in the precision that the accelerate configuration names.

    accelerate launch --config_file accelerate_configs/bf16.yaml \
        train_accelerate.py recipes/small_malaysian_lm.yaml weights=bf16_exact

The first argument is the recipe: what is trained. `key=value` arguments, or `--key=value`, override it, with dots for nesting.
`--plan` says what would happen and checks every setting; `--profile` shows where a step's time goes. A run that is started again
goes on where it was. `python -m pretrain` has what else is done with runs.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
from contextlib import nullcontext
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

from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.state import TrainState, seed_step
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.profile import StepProfile
from pretrain.metrics.run_folder import RunFolder, check_free
from pretrain.metrics.trackers import resolve
from pretrain.metrics.waited import Waited, since_the_command
from pretrain.model.distributed import (
    RANKS_WAIT,
    as_accelerate_reads_it,
    complete_topology,
    end_processes,
    largest_over_ranks,
    placed_as_planned,
    refused_together,
    same_on_all_ranks,
)
from pretrain.model.packed import forward_backward
from pretrain.model.wrapping import wrap_layers
from pretrain.optimizer import adamw, schedule
from pretrain.plan.preflight import Job, prepare_job
from pretrain.run import assembly as assembling
from pretrain.run import determinism
from pretrain.run.assembly import Assembly
from pretrain.run.command_line import exit_status, parse_arguments
from pretrain.run.evaluate import best_so_far, evaluate, evaluate_once, is_best
from pretrain.run.export import export_trained, is_exported
from pretrain.run.faults import explaining_errors, fault_of
from pretrain.run.introduction import first_step, has_ended, introduce, warn_of_precisions
from pretrain.run.keeping import check_room, conclude, leave, prepare_saves, save, save_last, sum_up, tell_saved
from pretrain.run.microbatch import choose_microbatch
from pretrain.run.parity import find_parity, require_parity
from pretrain.run.previews import plan_launch
from pretrain.run.recording import due, end_records, log, record_of_step, recorder_of, statistics_of_step
from pretrain.run.resume import begin_stream, keep_findings, new_past, take_up, where_to_resume
from pretrain.run.rollback import halted, judge_weights, roll_back
from pretrain.run.running import Run
from pretrain.run.streaming import ending_stream, pack_stream, reading_stream, tell_stream, wait_for_packs
from pretrain.run.switching import follow_the_schedule, go_on_as_scheduled
from pretrain.settings import config
from pretrain.settings.launch_environment import with_precision
from pretrain.settings.launch_topology import put_right


@record  # an error that is none of the user's: its traceback is in torchrun's table
def main() -> int:
    return exit_status(lambda: launch(parse_arguments(__doc__)))


# ── Act 1: settings, Accelerator, packs ───────────────────────────────────────────────────────────────────────────────────────


def launch(arguments: argparse.Namespace) -> int:
    """Refuse what can be refused without the model's weights, before the run folder is touched; then run. Returns the status."""
    if arguments.plan:
        return plan_launch(arguments)
    recipe = with_precision(config.load_recipe(arguments.recipe, arguments.overrides), os.environ)
    if recipe.deterministic:
        determinism.begin(os.environ)
    launched = put_right(recipe, os.environ, has_gpu=torch.accelerator.is_available())
    with as_accelerate_reads_it():  # in no precision of its own: the linears are converted below
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[RANKS_WAIT])
    complete_topology(accelerator, launched.replicas)

    main_process = accelerator.is_main_process
    refused_together(lambda: main_process and check_free(config.run_dir_of(launched.recipe)))  # packs may take hours
    waited = Waited(shown=main_process, already=since_the_command())
    job = prepare_job(launched.recipe, accelerator, arguments.tokens_per_second, waited=waited)
    console = Console(job.plan.steps, enabled=main_process)
    for text in (*launched.notices, *job.notices):
        console.notice(text)
    with refused_together(lambda: RunFolder(job.run_dir, owner=main_process)) as folder, ending_stream(job):
        stopped_by = carry_out(job, accelerator, folder, console, waited, arguments)
    end_processes(accelerator)  # nothing refers to the run any more
    return 128 + stopped_by if stopped_by else 0  # what a shell reports for a process that a signal ended


def carry_out(job: Job, *surroundings: Any) -> int | None:
    """Build the run, train it, and finish unless a signal came first; returns the signal's number."""
    with explaining_errors(job):
        run = build(job, *surroundings)
    try:
        with explaining_errors(run.job, run):
            if run.begins and run.job.recipe.model.weights_source is not None:  # what the weights knew before
                evaluate_once(run)
                run.best = None  # the untrained model is no candidate for the best checkpoint
            stopped_by = train(run)
            if stopped_by is None:
                stopped_by = finish(run)
            end_records(run, stopped_by)
            return stopped_by
    finally:
        run.checkpoints.close()


# ── Act 2: the model on its devices and audited, resumed where there is something to resume ───────────────────────────────────


def assemble(job: Job, accelerator: Accelerator, waited: Waited | None = None) -> Assembly:
    """The model of `job`, ready to train, and its optimizer. Each line changes what the next ones find: docs/architecture.md says
    why they stand in this order. Collective."""
    recipe, device, exact = job.recipe, accelerator.device, job.recipe.weights == "bf16_exact"
    attention = assembling.choose_attention(job, accelerator)
    built = assembling.build_model(job, accelerator, attention.name)  # transformers' own
    model, precisions, fused = assembling.in_its_precisions(job, built.hf, attention.name, device)
    # Around each layer: FP32 weights as BF16 working copies, torch.compile, gradient checkpointing.
    compiled, cast_to = assembling.compiles_layers(job, device), assembling.working_dtype(job, accelerator)
    wrap_layers(model, recipe.model, cast_to=cast_to, compile_layers=compiled)

    optimizer = adamw.build_optimizer(model, recipe.optimizer, exact=exact)
    with placed_as_planned(accelerator, model, optimizer, job.compute_dtype, once_a_step=job.plan.devices.gathered):
        model, _ = accelerator.prepare(model, optimizer)  # around the optimizer comes what only FP16 needs
    assembling.give_values(built, optimizer, exact=exact)
    assembling.sum_gradients_apart(job, accelerator, model)
    optimizer.materialise()

    around = {"attention": {"kind": attention.name, "reason": attention.reason}, "fused": fused}
    around["compiled"] = assembling.what_is_compiled(compiled, model)
    assembly = Assembly(built.hf, model, optimizer, job.active, model.context, precisions, {})
    assembling.observe(job, accelerator, assembly, around, waited or Waited(shown=False))
    return assembly


def build(
    job: Job, accelerator: Accelerator, folder: RunFolder, console: Console, waited: Waited, arguments: argparse.Namespace
) -> Run:
    """Returns the run before its first step, or its next: nothing but the steps is left to do. Collective; raises TrainingHalted
    where parity failed."""
    health, main_process = Health(job.recipe.health, job.precision_remedy), accelerator.is_main_process
    job, checkpoints, source = where_to_resume(job, folder, arguments.resume, arguments.accept_changes)
    warn_of_precisions(job, console)
    pack_stream(job, accelerator)
    assembly = assemble(job, accelerator, waited)
    check_room(folder, job, assembly, checkpoints, source)

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
        identity=job.identity,
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
        profile=StepProfile.of(folder.path, accelerator, state) if arguments.profile else None,
        console=console,
        waited=waited,
        past=source.past if source else new_past(job, accelerator),
    )
    if source:
        go_on_as_scheduled(run, source)
    if not run.begins:
        keep_findings(source, assembly, job)
    parity, run.ended = find_parity(run), has_ended(run)
    introduce(run, notes)
    run.best = best_so_far(run)
    prepare_saves(run)
    require_parity(run, parity)
    return run


# ── Act 3: the training loop ──────────────────────────────────────────────────────────────────────────────────────────────────


def train(run: Run) -> int | None:
    """Step until the horizon, or until a signal asks any rank to stop; returns that signal's number."""
    run.waited.go_on_to("training")
    run.assembly.model.train()
    with StopRequest(announced=run.accelerator.is_local_main_process) as stop:
        while not run.state.finished:  # once, and again after each rollback
            tell_stream(run)
            with run.job.batches(run.accelerator, run.state.shift).steps(*run.state.data_steps) as steps, reading_stream(run.job):
                if stopped_by := train_on(run, steps, stop):
                    return stopped_by
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
    plan = run.job.plan
    return steps == plan.done or (bool(plan.phases) and plan.begins_phase(steps))


def train_step(run: Run, batches: StepBatches) -> tuple[dict[str, Any], StepDecision]:
    """One optimizer step; returns its part of the metrics, and what its health has decided."""
    plan, state, optimizer, context = run.job.plan, run.state, run.assembly.optimizer, run.assembly.context
    recipe = plan.recipe
    if plan.phases:
        follow_the_schedule(run)
    learning_rate = schedule.learning_rate(state.step, recipe.schedule, recipe.optimizer, state.steps)
    adamw.set_learning_rate(optimizer, learning_rate)
    seed_step(recipe.seed, state.step, run.accelerator.process_index)
    if run.health.may_skip:
        context.keep_state()

    # Forward and backward over all microbatches.
    watching = run.precision_watch.watching(state.step + 1) if run.precision_watch else None
    audited = context.backend is not None and is_confirming(run, state.step)
    with run.assembly.confirming_audit(state.step + 1) if audited else nullcontext():
        mean_loss = forward_backward(run.assembly.model, batches, run.accelerator, watching)
    norm = adamw.gradient_norm(run.assembly.model.parameters())
    parts = run.assembly.model.mean_parts(run.accelerator, batches.valid_tokens)
    figures = (mean_loss, norm) if parts is None else (parts[0], norm, parts[1])
    clip_coefficient = adamw.clip_coefficient(norm, recipe.optimizer.clip)
    loss, gradient_norm, *penalty = same_on_all_ranks(run.accelerator, *figures)  # waits for the device

    statistics = statistics_of_step(run)

    # Update, unless the figures say that it would do harm.
    labelled = batches.valid_tokens > 0
    can_go_back = run.checkpoints.latest is not None
    decision = run.health.check(state.step + 1, loss, gradient_norm, can_go_back=can_go_back, labelled=labelled)
    if decision.proceed:
        optimizer.step(clip_coefficient=clip_coefficient)
    elif decision.action == "skip":
        context.go_back()
    adamw.clear_gradients(optimizer, run.assembly.model)  # queued before what waits for the update
    state.advance(tokens=batches.tokens, valid_tokens=batches.valid_tokens, skipped=not decision.proceed)
    measured = {"learning_rate": learning_rate, "gradient_norm": gradient_norm}
    return record_of_step(run, batches, decision, [loss, *penalty], measured, statistics), decision


# ── Act 4: what is kept ───────────────────────────────────────────────────────────────────────────────────────────────────────


def finish(run: Run) -> int | None:
    """Save, evaluate once more, export, and say where everything is. A finished run started again does what is still missing.

    Returns the number of a signal that came during the save, after which nothing more is done."""
    run.waited.go_on_to("end")
    if asked := save_last(run):  # first: an evaluation that takes long, or fails, must not cost what was trained
        return asked
    evaluate_once(run)
    if is_best(run) and run.state.step > run.resumed_step:
        save(run)  # where `at_end` has not
    finished = sum_up(run)
    if run.job.recipe.checkpoint.at_end and not is_exported(run):
        with run.waited.on("saves", "writing final/", "tensors", total=len(run.assembly.tensors)):
            export_trained(run, finished)
    conclude(run, finished)
    return None


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: no later collection looks through it, of which each took a third of a second
    atexit.register(gc.unfreeze)  # or Triton's library reports as leaked what it holds
    gc.enable()
    sys.exit(main())
