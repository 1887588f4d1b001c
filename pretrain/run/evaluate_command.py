"""`python -m pretrain evaluate`: print the held-out loss of a checkpoint, or of initial weights.

The command evaluates on the held-out packs of the run, or on documents that the command line names.
These documents are packed with the settings of the run's dataset, in a temporary folder that is
deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from foundation.errors import InputError
from foundation.files import scratch_folder
from foundation.overrides import overridden
from packing.arrow import FIRST
from packing.store import training_sources
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.folders import newest_in
from pretrain.launch.environment import with_precision
from pretrain.launch.launcher import count_gpus
from pretrain.metrics.console import Console
from pretrain.model.configuration import load_config
from pretrain.model.distributed import as_launched, end_process_group
from pretrain.model.huggingface import build_on_meta
from pretrain.precision.settings import (
    OPTIONS,
    PRECISIONS,
    QUANTIZED,
    ActivePrecision,
    configured,
    shortest_phases,
)
from pretrain.run.assembly import Assembly, assemble, set_weights
from pretrain.run.checkpointing import load_weights, needs_new_histories
from pretrain.run.command_checks import arguments_of_evaluate
from pretrain.run.evaluate import held_out_metrics
from pretrain.run.export import checkpoints_to_merge, tensor_reader
from pretrain.run.job import Job, check_precision, prepare_job
from pretrain.run.resume_point import ResumePoint, find_checkpoint
from pretrain.run.run import open_console
from pretrain.run.startup import explaining_errors
from pretrain.settings.config import (
    branch_checkpoint,
    load_recipe,
    run_address_of,
    with_weights,
)
from pretrain.settings.recipe import Recipe


def main(options: argparse.Namespace) -> int:
    """Evaluate as the command line requests, and return 0.

    Raises InputError if the recipe or the weights cannot be evaluated.
    """
    path, overrides, datasets = arguments_of_evaluate(options)
    recipe_of_run = load_recipe(path, overrides)
    names, skipped = expand_all(options.precisions or [], recipe_of_run)
    # Set the folder of the run before --precisions replaces its precision, because the name of the
    # default folder contains the precision.
    # `with_precision` removes variables, so pass a copy.
    recipe_of_run = with_weights(
        with_precision(recipe_of_run, dict(os.environ)),
        on_gpu=count_gpus() > 0,
        resume=options.resume,
    )
    run_address = run_address_of(recipe_of_run)
    overrides += [f"run_dir={run_address}", *precision_overrides(names)]
    recipe = with_precision(load_recipe(path, overrides), os.environ)
    recipe = recipe.model_copy(update={"weights": recipe_of_run.weights})
    accelerator, notices = as_launched(recipe)
    with ExitStack() as stack, explaining_errors():
        if datasets:
            folder = packing_folder(recipe, stack)
            with_dataset = load_recipe(path, [*overrides, *dataset_overrides(datasets[0], folder)])
            recipe = recipe.model_copy(update={"data": with_dataset.data})
        job = prepare_job(recipe, accelerator, overrides)
        # Do not call a dataset held out, because the run may have been trained on it.
        loss = f"loss on {datasets[0]}" if datasets else "held-out loss"
        _evaluate(job, accelerator, [*skipped, *notices], options.resume, loss)
        end_process_group(accelerator)
    return 0


def packing_folder(recipe: Recipe, stack: ExitStack) -> Path:
    """Create a temporary folder for the packs of the dataset on the command line.

    Return the path of the folder. Each process has a folder of its own, with a link `packs` to the
    packs of `recipe`. Only the present user can read the folder. It is deleted when `stack` ends.
    The next command deletes the folder of a killed process.
    """
    parent = Path(tempfile.gettempdir(), f"evaluate-{os.getuid()}")
    folder = stack.enter_context(scratch_folder(parent))
    folder.chmod(0o700)
    first, *_ = training_sources(recipe.data).values()
    # The first part of a stream stays on the disk.
    (folder / "packs").symlink_to(first.packs.absolute() / (FIRST if first.stream else ""))
    return folder


def dataset_overrides(dataset: str, folder: Path) -> list[str]:
    """Return recipe overrides that set the documents of `dataset` as the held-out documents.

    dataset: the path of a file or of a folder of files.
    folder: the result of `packing_folder`, where the documents are packed.

    The training packs of the recipe are still used, so the documents are packed with the tokenizer
    of the training packs.
    """
    return [
        "data.source=null",
        "data.sources=null",
        "data.subset=null",
        "data.split=train",
        "data.streaming=false",
        "data.held_out=0",
        f"data.packs={folder / 'packs'}",
        f"data.validation={json.dumps({'source': dataset})}",
    ]


def expand_all(names: Sequence[str], recipe: Recipe) -> tuple[Sequence[str], list[str]]:
    """Return `names` and [], unless `names` contains "all".

    For "all", return the quantized precisions that suit the pack length and the model of `recipe`,
    and a message for each other quantized precision.
    """
    if "all" not in names:
        return names, []
    shapes = build_on_meta(load_config(recipe.model))
    supported: list[str] = []
    skipped: list[str] = []
    for name in QUANTIZED:
        try:
            precision = configured(name, recipe.fp8_config)
            check_precision(ActivePrecision(name, precision, "emulation"), recipe, shapes)
        except InputError as error:
            skipped.append(f"skipped: {error}")
        else:
            supported.append(name)
    return supported, skipped


def precision_overrides(names: Sequence[str]) -> list[str]:
    """Return recipe overrides that set the precisions `names`. Return [] if there are no names.

    Each precision becomes a phase of the recipe, because the model is assembled for all phases. The
    number of steps and the lengths of the phases have no effect, because nothing is trained.
    """
    if not names:
        return []
    # Unset the options that none of the precisions accepts. The recipe of a run sets all options of
    # the precision in which the run was trained.
    accepted = {key for name in names if name in PRECISIONS for key in PRECISIONS[name].options}
    removed = [f"fp8_config.{key}=null" for key in OPTIONS if key not in accepted]
    return [
        f"precision={json.dumps(shortest_phases(names))}",
        "fp8_config.on_unsupported=emulate",
        # A schedule needs a step for each phase, and the run may have fewer steps.
        f"train.steps={10**9}",
        *removed,
    ]


def _evaluate(
    job: Job,
    accelerator: Accelerator,
    notices: Iterable[str],
    checkpoint: str,
    loss: str,
) -> None:
    """Print the held-out loss in each precision of the recipe.

    If one of them is quantized, also print the loss in BF16.

    All ranks must call this function.

    checkpoint: the path of a checkpoint, or "auto". The checkpoint may belong to any recipe with
        the same model. With "auto", the newest checkpoint of the run folder is evaluated. If the
        run folder has no checkpoint, the weights of the model's source are evaluated.
    loss: name of the loss in the output.

    Raises InputError if no packs are held out, or if the run has neither a checkpoint nor weights
    from a source.
    """
    console = open_console(job, accelerator, notices)
    assembly, point = load_assembly(job, accelerator, checkpoint, console)
    weights = f"{job.recipe.model.weights_source}, untrained by this run"
    if point is not None:
        weights = str(point.path)
    console.notice(f"{loss} of {weights}")
    print_in = partial(_print_loss, job, assembly, accelerator, console)
    context = assembly.context
    for name in in_low_precisions(job, accelerator, assembly, point):
        with overridden(context, evaluates_low=True):
            print_in(name)
    # In this context, a model with low-precision products computes in BF16.
    with overridden(context, evaluates_low=False):
        print_in("bf16" if context.engines else context.current.name)


def load_assembly(
    job: Job, accelerator: Accelerator, checkpoint: str, console: Console
) -> tuple[Assembly, ResumePoint | None]:
    """Build the model of `job`, and load a checkpoint. Return the checkpoint too, or None.

    All ranks must call this function. Without a checkpoint, the model has the weights of its
    source. `_evaluate` documents `checkpoint`, and the errors.
    """
    if job.data.held_out is None:
        raise InputError(
            "`data.held_out`: no packs are held out to evaluate on; set `data.held_out` or "
            "`data.validation`"
        )
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep)
    point = find_checkpoint(checkpoints, checkpoint, branch_checkpoint(job.recipe))
    if point is None and job.recipe.model.weights_source is None:
        raise InputError(
            f"`run_dir`: {job.run_dir} has no checkpoint; either pass a checkpoint to --resume, or "
            "set `model.source`"
        )
    if job.plan.emulated:
        console.warning("precisions that this device does not support are emulated")
    assembly = assemble(job, accelerator)
    if point is not None:
        for note in load_weights(point, checkpoints, job.recipe.weights, assembly):
            console.notice(note)
    return assembly, point


def in_low_precisions(
    job: Job, accelerator: Accelerator, assembly: Assembly, point: ResumePoint | None
) -> Iterator[str]:
    """Set each quantized precision of the model, and yield its name. All ranks must do this.

    Delayed scaling uses the histories in the checkpoint `point`. If the checkpoint has no
    histories for the precision, they are filled again. They are restored after the yield.
    """
    for active in job.plan.precisions:
        if not active.precision.quantized:
            continue
        with assembly.context.using(active), assembly.context.preserving_state():
            if point is not None and needs_new_histories(point, assembly, job):
                assembly.start_precision(active, job, accelerator)
            yield active.name


def _print_loss(
    job: Job, assembly: Assembly, accelerator: Accelerator, console: Console, precision: str
) -> None:
    """Evaluate the model, and print a line of metrics that starts with `precision`.

    All ranks must call this function.

    precision: the name of the precision that the model computes in.
    """
    metrics = held_out_metrics(job, assembly.model, accelerator)
    columns = [
        f"  {precision:<8} {metrics['held_out_loss']:.6f}",
        f"perplexity {metrics['held_out_perplexity']:.4g}",
    ]
    if "held_out_penalty" in metrics:
        columns.append(f"penalty {metrics['held_out_penalty']:.6f}")
    columns.append(f"over {metrics['held_out_tokens']:,} tokens")
    console.notice("   ".join(columns))


# ── The end of a training ─────────────────────────────────────────────────────────────────────────


def served_job(job: Job, accelerator: Accelerator) -> Job:
    """Return the job that evaluates the model of `job` in the precision `evaluate.served`.

    Raises InputError if the precision does not suit the model or the recipe.
    """
    settings = job.recipe.fp8_config.without_options().model_copy(
        update={"scope": "linear", "on_unsupported": "emulate", "use_autocast_during_eval": True}
    )
    recipe = job.recipe.model_copy(
        update={
            "precision": job.recipe.evaluate.served,
            "fp8_config": settings,
            # The default folder has the name of the precision.
            "run_dir": str(job.run_dir),
        }
    )
    return prepare_job(recipe, accelerator, (), job.data)


def served_loss(job: Job, accelerator: Accelerator) -> dict[str, object]:
    """Evaluate the last checkpoints of a finished training in the precision of their server.

    Return the line for metrics.jsonl. The model of the training computes only in the precisions of
    the training, because a further precision would change its speed. So this function builds
    another model, and the model of the training must have been freed.

    job: the job that `served_job` returns.

    All ranks must call this function. Raises InputError if the run has fewer checkpoints than
    `evaluate.merge`.
    """
    assembly = assemble(job, accelerator)
    merged = checkpoints_to_merge(newest_in(job.run_dir), job.recipe.evaluate.merge, job.recipe)
    read = tensor_reader(merged, assembly.hf, "bf16" if job.recipe.weights == "bf16" else "fp32")
    # Buffers are not loaded, because training does not change them.
    set_weights(assembly.hf, read, assembly.optimizer)
    # Quantize the loaded weights, and fill the histories of delayed scaling.
    assembly.start_precision(assembly.context.current, job, accelerator)
    metrics = held_out_metrics(job, assembly.model, accelerator)
    return {
        "step": job.plan.steps,
        "event": "served",
        "served_loss": metrics["held_out_loss"],
        "served_precision": job.recipe.precision,
        "merged": [checkpoint.name for checkpoint in merged],
    }
