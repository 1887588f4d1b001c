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
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

from foundation.command import run_command
from foundation.files import replace_file, write_json
from pretrain.settings import config

# importing takes seconds; until the loop can save, Ctrl-C just ends the process, without a
# traceback
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imports leave no garbage, and looking for it took a fifth of their time
    # torch reads this when it first uses a GPU. By default its allocator keeps pieces that fit nothing else: of Llama-3.1-8B in
    # shards, 67.9 GiB beside the 67.2 GiB in use. What the user sets goes first, under either of its names.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    config.check_arguments(__doc__)  # a mistake is told at once

from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record

from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import require_shared
from pretrain.checkpoint.state import TrainState, seed_step
from pretrain.compare.figures import picture_of_run
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.profile import StepProfile
from pretrain.metrics.run_folder import RunFolder, check_free
from pretrain.metrics.run_record import last_screen, read_run
from pretrain.metrics.trackers import Trackers
from pretrain.model import distributed
from pretrain.model.packed import forward_backward, same_on_all_ranks
from pretrain.model.wrapping import wrap_layers
from pretrain.optimizer import adamw, schedule
from pretrain.run import assembly as assembling
from pretrain.run import (
    evaluate,
    export,
    plan_command,
    recording,
    resume,
    saving,
    startup,
    streaming,
)
from pretrain.run.job import Job, prepare_job
from pretrain.run.out_of_memory import explaining_errors
from pretrain.run.run import Run, follow_schedule
from pretrain.settings.launch import with_precision
from pretrain.verify.gap import GapMeter
from pretrain.verify.update import StepCheck


@record  # for errors that are bugs: torchrun shows their traceback in its table
def main() -> int:
    return run_command(lambda: launch(config.parse_arguments(__doc__)))


# ── Act 1: settings, Accelerator, packs ───────────────────────────────────────────────────────────────────────────────────────


def launch(arguments: argparse.Namespace) -> int:
    """Refuse what can be refused without the model's weights, before the run folder is touched; then run. Returns the status."""
    recipe = with_precision(config.load_recipe(arguments.recipe, arguments.overrides), os.environ)
    accelerator, notices = distributed.as_launched(recipe)
    main_process, run_dir = accelerator.is_main_process, config.run_dir_of(recipe)
    # packs may take hours
    distributed.refused_together(
        lambda: main_process and not arguments.plan and check_free(run_dir)
    )
    job = prepare_job(recipe, accelerator, purpose="plan" if arguments.plan else "run")
    console = recording.introduce_job(job, accelerator, notices)
    if arguments.plan:
        return plan_command.say_plan(job, console, arguments.resume, arguments.accept_changes)
    with (
        distributed.refused_together(lambda: RunFolder(run_dir, owner=main_process)) as folder,
        streaming.packing_stream(job, accelerator) if job.data.stream else nullcontext(),
    ):
        stopped_by = carry_out(job, accelerator, folder, console, arguments)
    distributed.end_processes(accelerator)  # nothing refers to the run any more
    # what a shell reports for a process that a signal ended
    return 128 + stopped_by if stopped_by else 0


def carry_out(job: Job, *surroundings: Any) -> int:
    """Build the run, train it, and finish unless a signal came first; returns the signal's number, or 0."""
    with explaining_errors():
        run = build(job, *surroundings)
        if run is None:
            return 0
        with closing(run.checkpoints):
            # what the weights knew before
            if run.begins and job.recipe.model.weights_source is not None:
                evaluate.evaluate_once(run)
                run.best = None  # the untrained model is no candidate for the best checkpoint
            stopped_by = train(run)
            if not stopped_by:
                finish(run)
            run.trackers.finish()
            if run.precision_watch:
                run.precision_watch.file.finish()
            return stopped_by


# ── Act 2: the model on its devices and audited, resumed where there is something to resume ───────────────────────────────────


def assemble(
    job: Job, accelerator: Accelerator, console: Console | None = None
) -> assembling.Assembly:
    """The model of `job`, ready to train, and its optimizer. Each line changes what the next ones find: docs/architecture.md says
    why they stand in this order. Collective."""
    recipe, device, exact = job.recipe, accelerator.device, job.recipe.weights == "bf16_exact"
    attention = job.attention
    hf, aside = assembling.build_model(job, accelerator, attention.name)  # transformers' own
    model, precision, fused = assembling.convert_model(job, hf, attention.name, device)
    # Around each layer: FP32 weights as BF16 working copies, torch.compile, gradient checkpointing.
    compiled = recipe.model.compile == "layer" or (
        recipe.model.compile == "auto" and device.type == "cuda"
    )
    # FSDP2's copies come of its gathering
    copied = job.compute_dtype != job.weight_dtype and not accelerator.is_fsdp2
    wrap_layers(
        model, recipe.model, cast_to=job.compute_dtype if copied else None, compile_layers=compiled
    )

    optimizer, once_a_step = (
        adamw.build_optimizer(model, recipe.optimizer, exact=exact),
        job.plan.devices.gathered,
    )
    if accelerator.is_fsdp2:
        with distributed.sharded_as_planned(
            accelerator, model, optimizer, job.compute_dtype, once_a_step=once_a_step
        ):
            # around the optimizer comes what only FP16 needs
            model, _ = accelerator.prepare(model, optimizer)
    assembling.set_weights(hf, aside, optimizer, exact=exact)
    assembling.allocate_gradient_sums(job, accelerator, model)
    optimizer.materialise()

    around = {"attention": {"kind": attention.name, "reason": attention.reason}, "fused": fused}
    around["compiled"] = assembling.describe_compiled(compiled, model)
    assembly = assembling.Assembly(hf, model, optimizer, precision, around)
    assembling.audit_precisions(job, accelerator, assembly, console or Console(0, enabled=False))
    return assembly


def build(
    job: Job,
    accelerator: Accelerator,
    folder: RunFolder,
    console: Console,
    arguments: argparse.Namespace,
) -> Run | None:
    """The run, ready for its next step; None where it had ended before. TrainingHalted where parity fails. Collective."""
    health, log = Health(job.recipe.health), job.recipe.log
    require_shared(folder.path)
    job, checkpoints, source = resume.where_to_resume(
        job, arguments.resume, arguments.accept_changes
    )
    if source and source.step >= job.plan.steps and recording.is_over(job, folder, console):
        return None
    assembly = assemble(job, accelerator, console)
    saving.check_room(job, assembly, checkpoints, source)
    if source:
        with console.progress("reading the checkpoint"):
            state, notes = resume.restore(source, checkpoints, job, assembly, health)
    else:
        state, notes = TrainState(steps=job.plan.steps), []
        resume.begin_stream(None, job)
    if job.plan.microbatch is None:  # `auto`
        with console.progress("finding the microbatch"):
            microbatch = startup.choose_microbatch(
                job, assembly, source.record if source else None, accelerator
            )
        job = job.with_settings("batch", microbatch=microbatch)
    if source:
        checkpoints.abandon_newer(state.step)

    main_process, path = accelerator.is_main_process, folder.path
    run = Run(
        job=job,
        assembly=assembly,
        accelerator=accelerator,
        folder=folder,
        checkpoints=checkpoints,
        constants=saving.constants_of(job, source, accelerator),
        state=state,
        begins=source is None or source.begins,
        resumed_step=state.step,
        restarted_step=state.step,
        has_masks=job.data.has_masks,
        health=health,
        recorder=recording.recorder_of(job, accelerator),
        trackers=Trackers(log, path, state.step, main_process=main_process),
        precision_watch=assembly.precision_watch(
            log.fp8_statistics, path, state.step, main_process
        ),
        profile=StepProfile(path, accelerator, state) if arguments.profile else None,
        console=console,
        stream=job.data.stream,
        gap=GapMeter(assembly.model, assembly.optimizer, accelerator) if log.gap else None,
    )
    if source:
        resume.resume_precision(run, source)
    parity = startup.find_parity(run) if job.recipe.parity and run.begins else []
    recording.introduce(run, notes)
    run.best = evaluate.best_so_far(run)
    if parity:
        startup.require_parity(run, parity)
    return run


# ── Act 3: the training loop ──────────────────────────────────────────────────────────────────────────────────────────────────


def train(run: Run) -> int:
    """Step until the horizon and save, or until a signal asks any rank to stop; returns that signal's number, or 0."""
    run.assembly.model.train()
    with StopRequest(announced=run.accelerator.is_local_main_process) as stop:
        while not run.state.finished:  # once, and again after each rollback
            if run.stream:
                streaming.tell_stream(run, run.stream)
            batches = run.job.batches(run.accelerator, run.state.shift)
            with (
                batches.steps(*run.state.data_steps) as steps,
                run.stream.waiting() if run.stream else nullcontext(),
            ):
                if stopped_by := train_on(run, steps, stop):
                    return stopped_by
        # first of all: an evaluation that fails must not cost what was trained
        return saving.save_last(run, stop)


def train_on(run: Run, steps: Prefetch[StepBatches], stop: StopRequest) -> int:
    """Train on `steps` until the horizon, a rollback or a signal; returns the signal's number, else 0."""
    recipe, state = run.job.recipe, run.state
    reason_to_stop = partial(saving.reason_to_stop, run, steps, stop)
    while not state.finished:
        profiling = run.profile.recording(state.step + 1) if run.profile else nullcontext()
        with profiling, run.recorder.step():
            if run.stream and (reason := streaming.wait_for_packs(run, steps, reason_to_stop)):
                return saving.leave(run, reason, steps)
            figures, decision = train_step(run, next(steps))
        if run.stream:
            streaming.tell_stream(run, run.stream)
        recording.log(run, figures, data_wait_ms=steps.data_wait_ms)
        evaluates = recording.due(state.step, recipe.evaluate.every) and not state.finished
        saves = recording.due(state.step, recipe.checkpoint.every) or (
            evaluates and recipe.checkpoint.best
        )
        # After a skipped step too: the update before it may be to blame.
        if decision.action in ("update", "skip") and (saves or state.finished):
            decision = saving.judge_weights(run)
        if decision.action == "stop":
            raise saving.halted(run, decision)
        if decision.action == "rollback":
            resume.roll_back(run, decision.reason)
            return 0
        if is_confirming(run, state.step - 1) and run.accelerator.is_main_process:
            write_json(run.folder.audit, run.assembly.audit)  # once more: the step has confirmed it

        # Between steps.
        if evaluates:
            evaluate.evaluate(run)
        run.checkpoints.settle()
        if reason := distributed.largest_over_ranks(run.accelerator, reason_to_stop()):
            return saving.leave(run, reason, steps)
        if (
            recording.due(state.step, recipe.checkpoint.every) or evaluate.is_best(run)
        ) and not state.finished:
            saving.save(run, behind=True)
    return 0


def is_confirming(run: Run, steps: int) -> bool:
    """Whether the products of the step after `steps` steps are held to the audit: in the first two steps of this process, after a
    rollback, and of each phase. The second sees what the first update has made."""
    spans = run.precision.schedule.spans
    before = {run.restarted_step, *(span.first - 1 for span in spans)}
    return steps in before or steps - 1 in before


def train_step(run: Run, batches: StepBatches) -> tuple[dict[str, Any], StepDecision]:
    """One optimizer step; returns its part of the metrics, and what its health has decided."""
    plan, state, optimizer, context = (
        run.job.plan,
        run.state,
        run.assembly.optimizer,
        run.assembly.context,
    )
    recipe, accelerator, model = plan.recipe, run.accelerator, run.assembly.model
    follow_schedule(run)
    learning_rate = schedule.learning_rate(
        state.step, recipe.schedule, recipe.optimizer, state.steps
    )
    adamw.set_learning_rate(optimizer, learning_rate)
    gap = (
        run.gap
        if run.gap and context.backend and recording.due(state.step + 1, recipe.log.gap)
        else None
    )
    if gap:
        seed_step(recipe.seed, state.step, accelerator.process_index)
        gap.look(batches)
    seed_step(recipe.seed, state.step, accelerator.process_index)
    scales_before = context.copied_state() if run.health.may_skip else []

    # Forward and backward over all microbatches.
    watching = run.precision_watch.watching(state.step + 1) if run.precision_watch else None
    confirms = is_confirming(run, state.step)
    audit = (
        run.assembly.confirming_audit(state.step + 1)
        if confirms and context.backend is not None
        else nullcontext()
    )
    looked_at = confirms or recording.due(state.step + 1, recipe.log.fp8_statistics)
    check = StepCheck(model, optimizer, recipe, accelerator) if looked_at else None
    with audit, check.passes(batches, state.place) if check else nullcontext():
        around_first = gap.beside(watching) if gap else watching
        mean_loss = forward_backward(
            model, batches, accelerator, around_first, first_apart=gap is not None
        )
    norm = adamw.gradient_norm(model.parameters())
    parts = model.mean_losses(accelerator, batches.valid_tokens, mean_loss)
    clip_coefficient = adamw.clip_coefficient(norm, recipe.optimizer.clip)
    # waits for the device
    gradient_norm, *values = same_on_all_ranks(accelerator, norm, *parts.values())
    losses = dict(zip(parts, values, strict=True))
    statistics = recording.statistics_of_step(run) | (gap.figures() if gap else {})

    # Update, unless the figures say that it would do harm.
    labelled, can_go_back = batches.valid_tokens > 0, run.checkpoints.latest is not None
    decision = run.health.check(
        state.step + 1, losses["loss"], gradient_norm, can_go_back=can_go_back, labelled=labelled
    )
    if gap and decision.proceed:
        decision, figures = recording.judge_gap(run, decision, gap)
        statistics |= figures
    if decision.proceed:
        updates = state.step - state.skipped_steps
        with check.update(state.step + 1, learning_rate, updates) if check else nullcontext():
            optimizer.step(clip_coefficient=clip_coefficient)
    elif decision.action == "skip":
        context.go_back(scales_before)
    adamw.clear_gradients(optimizer, model)  # queued before what waits for the update
    state.advance(
        tokens=batches.tokens,
        valid_tokens=batches.valid_tokens,
        place=batches.places.stop,
        skipped=not decision.proceed,
    )
    measured = {"learning_rate": learning_rate, "gradient_norm": gradient_norm}
    return recording.record_of_step(run, batches, decision, losses, measured, statistics), decision


# ── Act 4: what is kept ───────────────────────────────────────────────────────────────────────────────────────────────────────


def finish(run: Run) -> None:
    """Evaluate once more, export, and say where everything is."""
    evaluate.evaluate_once(run)
    if evaluate.is_best(run) and run.state.step > run.resumed_step:
        saving.save(run)  # where `at_end` has not
    if not run.accelerator.is_main_process:
        return
    finished = read_run(run.folder.path)
    replace_file(run.folder.loss_plot, picture_of_run(finished))
    if run.job.recipe.checkpoint.at_end:
        with run.console.progress("writing final/", "tensors", total=len(run.assembly.tensors)):
            export.export_trained(run, finished)
    # last of all files: where it is of the last step, the others are there
    write_json(run.folder.summary, finished.summary)
    run.console.panel(*last_screen(finished, run.folder))


if __name__ == "__main__":
    # what is imported stays: no later collection looks through it, of which each took a third of a
    # second
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton's library reports as leaked what it holds
    gc.enable()
    sys.exit(main())
