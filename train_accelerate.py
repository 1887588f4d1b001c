r"""Train a causal language model on packed documents, in the accelerate configuration's precision.

    accelerate launch --config_file accelerate_configs/bf16.yaml \
        train_accelerate.py recipes/small_malaysian_lm.yaml weights=bf16_exact

The first argument is the recipe. `key=value` arguments, or `--key=value`, override it, with dots
for nesting. `--plan` checks every setting and prints what would happen. `--profile` shows where the
time of a step goes. A run that is started again resumes from its newest checkpoint. `python -m
pretrain` lists the other commands.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
from contextlib import closing
from functools import partial
from typing import Any

from foundation.command import run_command
from foundation.files import replace_file, write_json
from pretrain.settings import config

if __name__ == "__main__":
    # Imports take seconds. Until the loop can save, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imports leave no garbage, and looking for it took a fifth of their time
    # torch reads this when it first uses a GPU. By default its allocator keeps pieces that nothing
    # else fits: of Llama-3.1-8B in shards, 67.9 GiB beside the 67.2 GiB in use. What the user sets
    # has precedence, under either of its names.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    config.check_arguments(__doc__)  # typos are reported at once

from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record

from foundation.signals import StopRequest
from packing.batch import Prefetch, StepBatches
from pretrain.checkpoint.checkpoint import require_shared
from pretrain.checkpoint.state import NO_PAST, TrainState, seed_step
from pretrain.compare.figures import picture_of_run
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.run_folder import RunFolder, check_free
from pretrain.metrics.run_record import last_screen, read_run
from pretrain.metrics.trackers import Trackers
from pretrain.model import distributed
from pretrain.model.packed import forward_backward, same_on_all_ranks
from pretrain.model.wrapping import wrap_layers
from pretrain.observe.observers import StepWatch, is_due
from pretrain.optimizer import adamw, schedule
from pretrain.run import (
    checkpointing,
    evaluate,
    export,
    plan_command,
    resume_point,
    startup,
    streaming,
)
from pretrain.run.assembly import (
    Assembly,
    allocate_gradient_sums,
    audit_precisions,
    build_model,
    convert_model,
    describe_surroundings,
    set_weights,
)
from pretrain.run.job import Job, prepare_job
from pretrain.run.run import Run, introduce_job, is_over, recorder_of
from pretrain.settings.launch import with_precision


@record  # torchrun shows the traceback of a bug in its table
def main() -> int:
    """Train, and return the exit status."""
    return run_command(lambda: launch(config.parse_arguments(__doc__)))


# ── 1: settings, Accelerator, packs ───────────────────────────────────────────────────────────────


def launch(arguments: argparse.Namespace) -> int:
    """Check everything that needs no weights, before the run folder is touched. Then run.

    Returns the exit status.
    """
    recipe = with_precision(config.load_recipe(arguments.recipe, arguments.overrides), os.environ)
    accelerator, notices = distributed.as_launched(recipe)
    is_main_process = accelerator.is_main_process
    run_dir = config.run_dir_of(recipe)
    # The folder is checked first, because packs may take hours.
    if not arguments.plan:
        distributed.refused_together(lambda: check_free(run_dir) if is_main_process else None)
    job = prepare_job(recipe, accelerator, purpose="plan" if arguments.plan else "run")
    console = introduce_job(job, accelerator, notices)
    if arguments.plan:
        return plan_command.print_plan(job, console, arguments.resume, arguments.accept_changes)
    with distributed.refused_together(lambda: RunFolder(run_dir, owner=is_main_process)) as folder:
        stopped_by = carry_out(job, accelerator, folder, console, arguments)
    distributed.end_processes(accelerator)  # nothing refers to the run any more
    # The status that a shell reports for a process that a signal ended.
    return 128 + stopped_by if stopped_by else 0


def carry_out(job: Job, *surroundings: Any) -> int:
    """Build the run, train it, and finish unless a signal stopped it.

    Returns the signal's number, or 0.
    """
    with startup.explaining_errors():
        run = build(job, *surroundings)
        if run is None:
            return 0
        with closing(run.checkpoints):
            if run.is_new and job.recipe.model.weights_source is not None:
                evaluate.evaluate_once(run)  # the loss before the first step
                run.best = None  # the untrained model is no candidate for the best checkpoint
            stopped_by = train(run)
            if not stopped_by:
                finish(run)
            run.trackers.finish()
            run.observers.finish()
            return stopped_by


# ── 2: the model, on its devices, audited, and resumed ────────────────────────────────────────────


def assemble(job: Job, accelerator: Accelerator, console: Console | None = None) -> Assembly:
    """Return the model of `job`, ready to train, and its optimizer. Collective.

    Each part changes the input of the next ones. docs/architecture.md explains the order.
    """
    recipe = job.recipe
    exact = recipe.weights == "bf16_exact"
    hf, values = build_model(job, accelerator)  # of transformers
    model, precision, fused = convert_model(job, hf, accelerator.device)

    # Gradient checkpointing, torch.compile, and BF16 working copies of FP32 weights, around each
    # layer. FSDP2 makes its copies when it gathers weights.
    compiles = recipe.model.compile == "layer" or (
        recipe.model.compile == "auto" and accelerator.device.type == "cuda"
    )
    has_copies = job.compute_dtype != job.weight_dtype and not accelerator.is_fsdp2
    wrap_layers(
        model,
        recipe.model,
        cast_to=job.compute_dtype if has_copies else None,
        compile_layers=compiles,
    )

    optimizer = adamw.build_optimizer(model, recipe.optimizer, exact=exact)
    if accelerator.is_fsdp2:
        with distributed.sharded_as_planned(
            accelerator, model, optimizer, job.compute_dtype, once_a_step=job.plan.devices.gathered
        ):
            # accelerate wraps the optimizer too, which only FP16 needs.
            model, _ = accelerator.prepare(model, optimizer)
    # Any other model is on its device already. DistributedDataParallel, which accelerate would wrap
    # it in, sums gradients in the dtype of the parameters, and RankSums sums them in FP32.
    set_weights(hf, values, optimizer, exact=exact)
    allocate_gradient_sums(job, accelerator, model)
    optimizer.materialise()

    assembly = Assembly(
        hf, model, optimizer, precision, describe_surroundings(job, model, fused, compiles=compiles)
    )
    audit_precisions(job, accelerator, assembly, console or Console(0, enabled=False))
    return assembly


def build(
    job: Job,
    accelerator: Accelerator,
    folder: RunFolder,
    console: Console,
    arguments: argparse.Namespace,
) -> Run | None:
    """Return the run, ready for its next step, or None if it has ended before. Collective.

    Raises TrainingHalted if parity fails.
    """
    require_shared(folder.path)
    job, checkpoints, source = resume_point.where_to_resume(
        job, arguments.resume, arguments.accept_changes
    )
    if source and source.step >= job.plan.steps and is_over(job, folder, console):
        return None
    streaming.start_stream(job, source, folder, accelerator)  # packs are made while the run trains
    assembly = assemble(job, accelerator, console)
    checkpointing.check_disk_space(job, assembly, source)
    health = Health(job.recipe.health)
    notes: list[str] = []
    if source:
        with console.progress("reading the checkpoint"):
            state, notes = checkpointing.restore(source, checkpoints, job, assembly, health)
    else:
        state = TrainState(steps=job.plan.steps)
    if job.plan.microbatch is None:  # `auto`
        resumed = source.record if source else None
        with console.progress("finding the microbatch"):
            microbatch = startup.choose_microbatch(job, assembly, resumed, accelerator)
        job = job.with_settings("batch", microbatch=microbatch)
    if source:
        checkpoints.abandon_newer(state.step)

    run = Run(
        job=job,
        assembly=assembly,
        accelerator=accelerator,
        folder=folder,
        checkpoints=checkpoints,
        past=source.past if source else NO_PAST,
        state=state,
        is_new=source is None or source.is_branch,
        resumed_step=state.step,
        health=health,
        recorder=recorder_of(job, accelerator),
        trackers=Trackers(
            job.recipe.log, folder.path, state.step, main_process=accelerator.is_main_process
        ),
        console=console,
    )
    run.observers = startup.make_observers(run, profiles=arguments.profile)
    if source:
        checkpointing.resume_precision(run, source)
    parity = startup.find_parity(run) if job.recipe.parity and run.is_new else []
    run.introduce(notes)
    run.best = evaluate.best_so_far(run)
    startup.require_parity(run, parity)
    return run


# ── 3: the training loop ──────────────────────────────────────────────────────────────────────────


def train(run: Run) -> int:
    """Train until the horizon and save, or until a signal asks any rank to stop.

    Returns the signal's number, or 0.
    """
    run.assembly.model.train()
    with StopRequest(announced=run.accelerator.is_local_main_process) as stop:
        while not run.state.finished:  # once, and again after each rollback
            with run.job.batches(run.accelerator, run.state.shift).steps(
                *run.state.data_steps
            ) as steps:
                stopped_by = train_on(run, steps, stop)
            if stopped_by:
                return stopped_by
        # Before the last evaluation: if that fails, it must not cost the trained weights.
        return checkpointing.save_last(run, stop)


def train_on(run: Run, steps: Prefetch[StepBatches], stop: StopRequest) -> int:
    """Train on `steps` until the horizon, a rollback or a signal.

    Returns the signal's number, or 0.
    """
    recipe = run.job.recipe
    state = run.state
    stop_code = partial(checkpointing.stop_code, run, steps, stop)
    while not state.finished:
        with run.observers.step(state.step + 1) as watch, run.recorder.step():
            code = streaming.wait_for_packs(run, steps, stop_code)
            if code:
                return checkpointing.save_and_stop(run, code, steps)
            figures, decision = train_step(run, next(steps), watch)
        run.log(figures, data_wait_ms=steps.data_wait_ms)

        is_saved = is_due(state.step, recipe.checkpoint.every)
        is_evaluated = is_due(state.step, recipe.evaluate.every) and not state.finished
        needs_sound_weights = (
            is_saved or state.finished or (is_evaluated and recipe.checkpoint.best)
        )
        # After a skipped step too: the update before it may be to blame.
        if decision.action in ("update", "skip") and needs_sound_weights:
            decision = checkpointing.check_weights(run)
        if decision.action == "stop":
            raise checkpointing.training_halted(run, decision)
        if decision.action == "rollback":
            checkpointing.roll_back(run, decision.reason)
            return 0

        if is_evaluated:
            evaluate.evaluate(run)
        run.checkpoints.settle()
        code = distributed.largest_over_ranks(run.accelerator, stop_code())
        if code:
            return checkpointing.save_and_stop(run, code, steps)
        if (is_saved or run.is_best) and not state.finished:
            checkpointing.save(run, in_background=True)
    return 0


def train_step(
    run: Run, batches: StepBatches, watch: StepWatch
) -> tuple[dict[str, Any], StepDecision]:
    """Make one optimizer step. Return its part of the metrics and the decision about its update."""
    recipe, state, accelerator = run.job.recipe, run.state, run.accelerator
    model, optimizer = run.assembly.model, run.assembly.optimizer
    run.follow_schedule()
    learning_rate = schedule.learning_rate(
        state.step, recipe.schedule, recipe.optimizer, state.steps
    )
    adamw.set_learning_rate(optimizer, learning_rate)
    seed_step(recipe.seed, state.step, accelerator.process_index)
    histories = model.context.copied_state() if run.health.may_skip else []

    with watch.passes(batches, state.place):
        mean_loss = forward_backward(
            model,
            batches,
            accelerator,
            watch.first_microbatch(),
            first_apart=watch.separates_first_microbatch,
        )
    norm = adamw.gradient_norm(model.parameters())
    means = model.mean_losses(accelerator, batches.valid_tokens, mean_loss)
    # Waits for the device.
    gradient_norm, *values = same_on_all_ranks(accelerator, norm, *means.values())
    losses = dict(zip(means, values, strict=True))

    decision = run.health.check(
        state.step + 1,
        losses["loss"],
        gradient_norm,
        can_go_back=run.checkpoints.latest is not None,
        labelled=batches.valid_tokens > 0,
    )
    decision = watch.judge(decision)
    figures = {"learning_rate": learning_rate, "gradient_norm": gradient_norm} | watch.metrics()
    if decision.proceed:
        with watch.update(learning_rate, state.step - state.skipped_steps):
            optimizer.step(clip_coefficient=adamw.clip_coefficient(norm, recipe.optimizer.clip))
    elif decision.action == "skip":
        model.context.go_back(histories)
    adamw.clear_gradients(optimizer, model)  # queued before the host waits for the update
    state.advance(
        tokens=batches.tokens,
        valid_tokens=batches.valid_tokens,
        place=batches.places.stop,
        skipped=not decision.proceed,
    )
    return run.record_of_step(batches, decision, losses, figures), decision


# ── 4: what remains of the run ────────────────────────────────────────────────────────────────────


def finish(run: Run) -> None:
    """Evaluate once more, export, and print where everything is."""
    evaluate.evaluate_once(run)
    if run.is_best and run.state.step > run.resumed_step:
        checkpointing.save(run)  # unless `checkpoint.at_end` has saved it
    if not run.accelerator.is_main_process:
        return
    finished = read_run(run.folder.path)
    replace_file(run.folder.loss_plot, picture_of_run(finished))
    if run.job.recipe.checkpoint.at_end:
        with run.console.progress("writing final/", "tensors", total=len(run.assembly.tensors)):
            export.export_trained(run, finished)
    # The last file: a summary of the last step means that all others exist.
    write_json(run.folder.summary, finished.summary)
    run.console.panel(*last_screen(finished, run.folder))


if __name__ == "__main__":
    # Imported objects stay. Without this, each collection would look through them, which took a
    # third of a second.
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton's library reports its objects as leaked
    gc.enable()
    sys.exit(main())
