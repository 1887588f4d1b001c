"""`python -m pretrain evaluate`: the held-out loss of a checkpoint, or of a run's first weights.

It can also evaluate on another dataset, which is packed each time, in a temporary folder, as the
dataset of the run was.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from foundation.errors import InputError
from foundation.overrides import overridden
from packing.store import training_parts
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.metrics.console import Console
from pretrain.model.distributed import as_launched, end_processes, from_all_ranks
from pretrain.run.assembly import Assembly
from pretrain.run.checkpointing import load_weights, needs_new_histories
from pretrain.run.evaluate import held_out_figures
from pretrain.run.job import Job, prepare_job
from pretrain.run.resume_point import find_resume_point
from pretrain.run.run import introduce_job
from pretrain.run.startup import explaining_errors
from pretrain.settings.config import load_recipe
from pretrain.settings.launch import with_precision
from pretrain.settings.recipe import Recipe

# Makes a model that is ready to train: `assemble` of train_accelerate.py.
Assemble = Callable[[Job, Accelerator], Assembly]


def main(parsed: argparse.Namespace, assemble: Assemble) -> int:
    """Evaluate and return 0."""
    is_run = parsed.recipe.is_dir()
    path = parsed.recipe / "config.yaml" if is_run else parsed.recipe
    if is_run and not path.is_file():
        raise InputError(
            f"{parsed.recipe}: is no run folder, which has a config.yaml; name one, as runs/NAME, "
            "or a recipe"
        )
    texts = [argument for argument in parsed.overrides if "=" not in argument]
    if len(texts) > 1:
        raise InputError(
            f"command line: {' '.join(texts)}: this evaluates one text; name one file, or a folder "
            "of them"
        )
    overrides = [f"run_dir={parsed.recipe}"] if is_run else []
    overrides += [argument for argument in parsed.overrides if "=" in argument]
    recipe = with_precision(load_recipe(path, overrides), os.environ)
    accelerator, notices = as_launched(recipe)
    with ExitStack() as stack, explaining_errors():
        if texts:
            folder = packing_folder(recipe, accelerator, stack)
            with_text = load_recipe(path, [*overrides, *text_overrides(texts[0], folder)])
            recipe = recipe.model_copy(update={"data": with_text.data})
        _evaluate(recipe, accelerator, notices, parsed.resume, assemble)
        end_processes(accelerator)
    return 0


def packing_folder(recipe: Recipe, accelerator: Accelerator, stack: ExitStack) -> Path:
    """Return a temporary folder to pack a text in, with a link `packs` to the packs of `recipe`.

    Only this user can read it. The first process of each machine makes it, hands it to the others,
    and deletes it when `stack` ends. Collective.
    """
    made = None
    if accelerator.is_local_main_process:
        made = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="evaluate-", ignore_cleanup_errors=True)
            )
        )
        first, *_ = training_parts(recipe.data).values()
        (made / "packs").symlink_to(first.packs.absolute())
    up_to_this_rank = from_all_ranks(made)[: accelerator.process_index + 1]
    return [folder for folder in up_to_this_rank if folder][-1]


def text_overrides(text: str, folder: Path) -> list[str]:
    """Return overrides that evaluate a recipe on `text`, packed in `folder`, and keep its packs."""
    return [
        *(f"data.{key}=null" for key in ("source", "sources", "subset")),
        "data.split=train",
        "data.streaming=false",
        "data.held_out=0",
        f"data.packs={folder / 'packs'}",
        f"data.validation={json.dumps({'source': text})}",
    ]


def _evaluate(
    recipe: Recipe,
    accelerator: Accelerator,
    notices: Iterable[str],
    resume_from: str,
    assemble: Assemble,
) -> None:
    """Print the held-out loss in each precision of the recipe, and in BF16. Collective.

    resume_from: a checkpoint of any recipe with the same model, or "auto": the run folder's newest
        one, or without one the weights that the run would start with.

    Raises InputError if no packs are held out, and if all weights are random.
    """
    job = prepare_job(recipe, accelerator)
    console = introduce_job(job, accelerator, notices)
    if job.data.held_out is None:
        raise InputError("`data.held_out`: no packs are held out to evaluate on; set it")
    job = job.with_settings("batch", microbatch=job.plan.expected_microbatch)
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep)
    source = find_resume_point(checkpoints, resume_from, job, accept_changes=True)
    if source is None and job.recipe.model.weights_source is None:
        raise InputError(
            f"`run_dir`: {job.run_dir} has no checkpoint; name one with --resume, or set "
            "`model.source`"
        )
    assembly = assemble(job, accelerator)
    weights = f"{job.recipe.model.weights_source}, untrained by this run"
    if source is not None:
        weights = str(source.path)
        for note in load_weights(source, checkpoints, job.recipe.weights, assembly):
            console.notice(note)
    console.notice(f"held-out loss of {weights}")
    print_loss = partial(_print_loss, job, assembly, accelerator, console)
    context = assembly.context
    for name, in_model in assembly.precision.in_model.items():
        if in_model.backend is None:
            continue
        with (
            assembly.precision.using(name),
            context.preserving_state(),
            overridden(context, evaluates_low=True),
        ):
            if source is not None and needs_new_histories(source, assembly, job):
                assembly.start_precision(name, job, accelerator)
            print_loss(name)
    if context.backends:
        with overridden(context, evaluates_low=False):
            print_loss("bf16")
        return
    print_loss(assembly.precision.current.name)
    if job.compute_dtype == torch.float32:
        with torch.autocast(accelerator.device.type, torch.bfloat16):
            print_loss("bf16")


def _print_loss(
    job: Job, assembly: Assembly, accelerator: Accelerator, console: Console, precision: str
) -> None:
    """Evaluate, and print the figures with the name of the precision. Collective."""
    figures = held_out_figures(job, assembly.model, accelerator)
    penalty = ""
    if "held_out_penalty" in figures:
        penalty = f"   penalty {figures['held_out_penalty']:.6f}"
    console.notice(
        f"  {precision:<8} {figures['held_out_loss']:.6f}   "
        f"perplexity {figures['held_out_perplexity']:.4g}{penalty}   "
        f"over {figures['held_out_tokens']:,} tokens"
    )
