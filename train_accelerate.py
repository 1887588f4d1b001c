"""Train a causal language model on packed documents, in the precision that the accelerate configuration names.

    accelerate launch --config_file accelerate_configs/gpu.yaml train_accelerate.py recipes/small_malaysian_lm.yaml weights=bf16

The first argument is the recipe: what is trained. `key=value` arguments override it, with dots for nesting. `--plan` says what would
happen and checks every setting; `--preview-schedule` draws the learning rate. A run that is started again goes on where it was.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from packing.batch import BatchStream, StepBatches, evaluation_batches
from packing.errors import InputError
from packing.order import PackOrder
from pretrain import attention, config, model, optimizer, schedule
from pretrain.checkpoint import Checkpoints, bytes_needed, check_space
from pretrain.curves import plot_losses
from pretrain.data import Data, check_data, load_tokenizer, open_data
from pretrain.distributed import describe_topology, device_of, full_state_dict, make_accelerator, prepare, unwrapped
from pretrain.evaluate import held_out_loss, sample
from pretrain.metrics.closing import last_screen
from pretrain.metrics.console import Console
from pretrain.metrics.health import Health, TrainingHalted
from pretrain.metrics.peaks import peak
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.trackers import Trackers, resolve
from pretrain.metrics.units import duration
from pretrain.microbatch import largest_that_fits
from pretrain.plan import Plan, check_settings
from pretrain.precision import audit, recipes
from pretrain.precision.launch_environment import take_requested_precision
from pretrain.run_files import read_run
from pretrain.run_folder import RunFolder, describe_environment
from pretrain.settings import Recipe
from pretrain.signals import StopRequest
from pretrain.state import TrainState, check_same_training, seed_step
from pretrain.step import forward_backward, largest_over_ranks


@dataclass
class Run:
    """Everything that a running training consists of."""

    recipe: Recipe
    plan: Plan
    identity: dict[str, Any]  # what a checkpoint must agree with to be resumed
    accelerator: Accelerator
    folder: RunFolder
    data: Data
    tokenizer: PreTrainedTokenizerBase | None
    hf: PreTrainedModel  # the Hugging Face model
    model: nn.Module  # the same, mapping packed batches to losses, wrapped for this topology
    optimizer: torch.optim.AdamW
    state: TrainState
    resumed_step: int
    health: Health
    checkpoints: Checkpoints
    recorder: Recorder
    trackers: Trackers
    console: Console


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return launch(arguments)
    except InputError as error:
        say_once(f"error: {error}")
        return 2
    except TrainingHalted as halt:
        say_once(f"halted: {halt}")
        return 3


def say_once(text: str) -> None:
    """One message, not one from each process."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="what is trained: a YAML file, see recipes/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings over the recipe's: weights=bf16 train.steps=100"
    )
    parser.add_argument("--plan", action="store_true", help="say what would happen, check every setting, and stop")
    parser.add_argument("--tokens-per-second", type=float, metavar="N", help="speed at which --plan reckons the hours")
    parser.add_argument("--preview-schedule", type=Path, metavar="PNG", help="draw the learning rate of every step, and stop")
    parser.add_argument(
        "--resume", default="auto", metavar="auto|CHECKPOINT", help="default: the newest intact checkpoint of the run"
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="continue a checkpoint although the recipe has changed since"
    )
    return parser.parse_args()


def launch(arguments: argparse.Namespace) -> int:
    """Everything that can be refused is refused here, before it costs time or memory; then the run."""
    # ── What is asked for ─────────────────────────────────────────────────────────────────────────────────────────────────────
    recipe = config.load_recipe(arguments.recipe, arguments.overrides)
    asked_of_accelerate = take_requested_precision(os.environ)
    precision = recipes.find(
        recipe.precision or asked_of_accelerate, "`precision`" if recipe.precision else "accelerate configuration"
    )
    recipe = recipe.model_copy(update={"precision": precision.name})
    run_dir = config.run_dir_of(recipe)
    resolve(recipe.log.trackers, run_dir=run_dir, project=recipe.log.project)

    # ── What will happen: shapes and counts, no weights ───────────────────────────────────────────────────────────────────────
    accelerator = make_accelerator()
    check_settings(recipe, precision.name, accelerator.num_processes)
    shape_config = model.load_config(recipe.model)
    shapes = model.build_on_meta(shape_config)
    model.check_architecture(shapes, recipe.data.length, recipe.loss, accelerator.device.type)
    tokenizer = load_tokenizer(recipe.data, recipe.model, needed=bool(recipe.evaluate.samples))
    data = open_data(recipe.data, recipe.seed, is_main_process=accelerator.is_main_process)
    check_data(data, recipe.model, shapes.config.vocab_size)
    device_name, device_memory = device_of(accelerator)
    plan = Plan.make(
        recipe,
        model=shapes,
        precision=precision.name,
        packs=len(data.train),
        mean_squared=data.mean_squared,
        held_out_packs=data.held_out_packs,
        packs_vocabulary=data.vocabulary,
        world_size=accelerator.num_processes,
        sharded=accelerator.is_fsdp2,
        device_name=device_name,
        device_memory=device_memory,
        tokens_per_second=arguments.tokens_per_second,
    )
    console = Console(plan.steps, enabled=accelerator.is_main_process)
    if arguments.plan:
        console.notice(plan.render())
        return 0
    if arguments.preview_schedule:
        console.notice(
            schedule.preview(recipe.schedule, recipe.optimizer, plan.steps, plan.tokens_per_step, arguments.preview_schedule)
        )
        return 0

    # ── It happens ────────────────────────────────────────────────────────────────────────────────────────────────────────────
    with RunFolder(run_dir, owner=accelerator.is_main_process) as folder:
        stopped_by = run_to_its_end(build(recipe, plan, shape_config, accelerator, folder, data, tokenizer, console, arguments))
    # Only now that the model is gone: a process group whose last holder is DistributedDataParallel can deadlock as it is freed.
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return 128 + stopped_by if stopped_by else 0  # what a shell reports for a process that a signal ended


def run_to_its_end(run: Run) -> int | None:
    """Train, and finish unless a signal came first; returns the signal's number."""
    stopped_by = train(run)
    if stopped_by is None:
        finish(run)
    run.trackers.finish()
    return stopped_by


def build(
    recipe: Recipe,
    plan: Plan,
    shape_config: PretrainedConfig,
    accelerator: Accelerator,
    folder: RunFolder,
    data: Data,
    tokenizer: PreTrainedTokenizerBase | None,
    console: Console,
    arguments: argparse.Namespace,
) -> Run:
    """The model in memory and audited, resumed where there is something to resume, and all that watches over it."""
    precision = recipes.RECIPES[recipe.precision]
    compute_dtype, weights = getattr(torch, precision.compute_dtype), getattr(torch, recipes.WEIGHT_DTYPES[recipe.weights])

    # ── A checkpoint of another training is refused before a model is built ───────────────────────────────────────────────────
    checkpoints = Checkpoints.of_process_group(folder.checkpoints, recipe.checkpoint.keep)
    source = checkpoints.newest() if arguments.resume == "auto" else Path(arguments.resume)
    if source is None and checkpoints.damaged:
        raise InputError(f"{folder.checkpoints}: every checkpoint is damaged; name another `run_dir` to train from the beginning")
    record = checkpoints.read_state(source) if source else None
    identity = config.identity_of(recipe, data.train.fingerprint)
    changes = check_same_training(record, identity, source, arguments.accept_changes) if record else []

    # ── The model: working copies, compilation and recomputation around its layers; then sharded or replicated ────────────────
    backend = attention.choose(recipe.model.attention, accelerator.device.type, plan.flops.shape.head_dim, compute_dtype)
    hf = model.build(
        recipe.model, shape_config, weights=weights, seed=recipe.seed, device=accelerator.device, backend=backend.name
    )
    packed = model.PackedLanguageModel(hf, backend.name, recipe.loss)
    compiled = recipe.model.compile == "layer" or (recipe.model.compile == "auto" and accelerator.device.type == "cuda")
    cast_to = compute_dtype if compute_dtype != weights and not accelerator.is_fsdp2 else None
    model.wrap_layers(hf, recipe.model, cast_to=cast_to, compile_layers=compiled)
    adamw = optimizer.build_optimizer(packed, recipe.optimizer)
    prepared, adamw = prepare(accelerator, packed, adamw, compute_dtype)
    optimizer.materialise_state(adamw)

    # ── Proof of what runs in which precision ─────────────────────────────────────────────────────────────────────────────────
    products = audit.observe(unwrapped(prepared), model.inputs_of(data.trial_batch(1), accelerator.device), precision)
    backends = {"attention": {"kind": backend.name, "reason": backend.reason}, "loss": hf.get_output_embeddings().describe()}

    # ── Where the run stands ──────────────────────────────────────────────────────────────────────────────────────────────────
    state, health = TrainState(steps=plan.steps), Health(recipe.health)
    model_tensors, optimizer_tensors = model.named_tensors(hf), optimizer.named_state(adamw, hf)
    if checkpoints.current is None:
        check_space(folder.path, plan.checkpoints_at_once * bytes_needed(model_tensors, optimizer_tensors))
    notes: list[str] = []
    if record:
        state = TrainState.from_record(record, plan.steps, source)
        health.load_state_dict(record["health"])
        notes = checkpoints.load(source, model_tensors, optimizer_tensors).notes
        optimizer.set_updates_done(adamw, state.step - state.skipped_steps)
        checkpoints.set_aside_newer(state.step)
    microbatch = settled_microbatch(plan, record, prepared, data, accelerator)
    plan = plan.with_microbatch(microbatch)
    recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"microbatch": microbatch})})

    run = Run(
        recipe=recipe,
        plan=plan,
        identity=identity,
        accelerator=accelerator,
        folder=folder,
        data=data,
        tokenizer=tokenizer,
        hf=hf,
        model=prepared,
        optimizer=adamw,
        state=state,
        resumed_step=state.step,
        health=health,
        checkpoints=checkpoints,
        recorder=Recorder(
            flops=plan.flops,
            peak_tflops=peak(plan.device_name, "bf16"),
            device=accelerator.device,
            world_size=accelerator.num_processes,
        ),
        trackers=resolve(
            recipe.log.trackers,
            run_dir=folder.path,
            project=recipe.log.project,
            resumed_step=state.step,
            main_process=accelerator.is_main_process,
        ),
        console=console,
    )
    console.notice(plan.render())
    console.panel("what runs in which precision", audit.rows(products, backends))
    for change in changes:
        console.warning(f"resumed although the recipe has changed: {change}")
    if record:
        console.notice("; ".join([f"resumed from {source} at step {state.step}", *notes]))
    if accelerator.is_main_process:
        folder.write_yaml(folder.config, config.resolved(recipe))
        folder.write_json(
            folder.environment,
            {"data_fingerprint": data.train.fingerprint} | describe_environment(describe_topology(accelerator)),
        )
        folder.write_json(
            folder.audit, {"precision": precision.name, "weights": recipe.weights, **backends, "products": products}
        )
    run.trackers.start(config.resolved(recipe))
    return run


def settled_microbatch(plan: Plan, record: dict | None, prepared: nn.Module, data: Data, accelerator: Accelerator) -> int:
    """Packs a microbatch: the recipe's, or the one that `auto` found before the interruption, or the largest that fits now."""
    if plan.microbatch:
        return plan.microbatch
    if record and record["world_size"] == accelerator.num_processes:
        return record["microbatch"]  # the same sums in the same order: a resumed run stays exact
    return largest_that_fits(prepared, accelerator, plan.microbatch_candidates, data.trial_batch)


def train(run: Run) -> int | None:
    """Step until the horizon, or until a signal asks any rank to stop; returns that signal's number."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    stream = BatchStream(
        run.data.train,
        PackOrder(len(run.data.train), run.plan.packs_per_step, recipe.seed),
        microbatch=run.plan.microbatch,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        mask_boundaries=recipe.data.mask_boundaries,
        pin_memory=accelerator.device.type == "cuda",
        vocab_size=run.hf.config.vocab_size,
    )
    run.model.train()
    with StopRequest() as stop, stream.steps(state.step, state.steps) as steps:
        while not state.finished:
            with run.recorder.step():
                step_record = train_step(run, next(steps))
            log(run, step_record, data_wait_ms=steps.data_wait_ms)

            # ── Between steps ─────────────────────────────────────────────────────────────────────────────────────────────────
            if due(state.step, recipe.evaluate.every) and not state.finished:
                evaluate_now(run)
            if stopped_by := largest_over_ranks(accelerator, stop.requested or 0):
                save(run)
                run.console.notice(
                    f"stopped by {signal.Signals(stopped_by).name} after step {state.step}; the same command goes on from here"
                )
                return stopped_by
            if due(state.step, recipe.checkpoint.every) and not state.finished:
                save(run)
    return None


def train_step(run: Run, batches: StepBatches) -> dict[str, Any]:
    """One optimizer step; returns its part of the metrics."""
    state, settings = run.state, run.recipe.optimizer
    learning_rate = schedule.learning_rate(state.step, run.recipe.schedule, settings, state.steps, run.plan.tokens_per_step)
    optimizer.set_learning_rate(run.optimizer, learning_rate)
    seed_step(run.recipe.seed, state.step, run.accelerator.process_index)

    # ── Forward and backward over all microbatches ────────────────────────────────────────────────────────────────────────────
    mean_loss = forward_backward(run.model, batches, run.accelerator)
    norm = optimizer.gradient_norm(run.model.parameters())
    loss, gradient_norm = torch.stack([mean_loss, norm]).tolist()  # waits for the device, once a step

    # ── Update, unless the figures say that it would do harm ──────────────────────────────────────────────────────────────────
    verdict = run.health.check(state.step + 1, loss, gradient_norm)
    if verdict.warning:
        run.console.warning(verdict.warning)
    if verdict.proceed:
        if settings.clip:
            optimizer.clip_gradients(run.model.parameters(), norm, settings.clip)
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    state.advance(tokens=batches.tokens, valid_tokens=batches.valid_tokens, skipped=not verdict.proceed)
    return {
        "step": state.step,
        "tokens": state.tokens,
        "epoch": batches.epoch,
        "loss": loss,
        "learning_rate": learning_rate,
        "gradient_norm": gradient_norm,
        "step_tokens": batches.tokens,
        "sum_squared_lengths": batches.sum_squared_lengths,
        "skipped": not verdict.proceed,
    }


def log(run: Run, step_record: dict[str, Any], *, data_wait_ms: float) -> None:
    record = run.recorder.finish(**step_record, data_wait_ms=data_wait_ms)
    run.state.seconds += record["step_ms"] / 1e3
    run.trackers.log(record)
    run.console.step(record, show=due(record["step"], run.recipe.log.every) or run.state.finished)


def evaluate_now(run: Run) -> None:
    """Held-out loss, where packs are held out, and samples, where prompts are set."""
    began = time.perf_counter()
    if run.data.held_out is not None:
        batches = evaluation_batches(
            run.data.held_out,
            microbatch=run.plan.microbatch,
            rank=run.accelerator.process_index,
            world_size=run.accelerator.num_processes,
            mask_boundaries=run.recipe.data.mask_boundaries,
            vocab_size=run.hf.config.vocab_size,
            limit=run.recipe.evaluate.packs,
        )
        held_out = held_out_loss(run.model, batches, run.accelerator)
        record = {
            "step": run.state.step,
            "event": "evaluation",
            "held_out_loss": held_out.loss,
            "held_out_perplexity": held_out.perplexity,
            "held_out_tokens": held_out.tokens,
        }
        run.trackers.log(record)
        run.console.evaluation(record, time.perf_counter() - began)
    settings = run.recipe.evaluate
    for text in sample(run.hf, run.tokenizer, settings.samples, settings.sample_tokens, run.recipe.seed):
        run.console.sample(text.prompt, text.continuation)


def save(run: Run) -> None:
    record = run.state.record(run.identity) | {
        "health": run.health.state_dict(),
        "microbatch": run.plan.microbatch,
        "world_size": run.accelerator.num_processes,
    }
    began = time.perf_counter()
    path = run.checkpoints.save(run.state.step, model.named_tensors(run.hf), optimizer.named_state(run.optimizer, run.hf), record)
    run.console.notice(f"saved {path} in {duration(time.perf_counter() - began)}")


def finish(run: Run) -> None:
    """Evaluate once more, save, export, and say where everything is. A finished run started again only exports and says it again."""
    has_trained = run.state.step > run.resumed_step
    if has_trained:
        evaluate_now(run)
    if run.recipe.checkpoint.at_end:
        if has_trained:
            save(run)
        weights = full_state_dict(run.accelerator, run.model, prefix="hf.")
        if run.accelerator.is_main_process:
            model.export(run.hf, weights, run.tokenizer, run.folder.final)
    if not run.accelerator.is_main_process:
        return
    identity = {
        "seed": run.recipe.seed,
        "tokens_per_step": run.plan.tokens_per_step,
        "data_fingerprint": run.data.train.fingerprint,
    }
    run.folder.write_json(run.folder.summary, identity | read_run(run.folder.path).summary)
    finished = read_run(run.folder.path)
    picture = run.folder.path / "loss.png"
    plot_losses([finished], picture)
    run.console.panel(*last_screen(run.recipe.name, run.folder.path, finished.summary, picture))


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


if __name__ == "__main__":
    sys.exit(main())
