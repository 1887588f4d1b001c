"""The held-out loss of a checkpoint, or of the model that a run would begin with, or its loss on a text of one's own. The text is
packed anew each time, in a temporary folder, as the run's own text was.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator

from foundation.errors import InputError
from foundation.overrides import overridden
from packing.store import training_parts
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.model.distributed import as_launched, end_processes, from_all_ranks
from pretrain.run.assembly import Assembly
from pretrain.run.evaluate import held_out_figures
from pretrain.run.job import Job, prepare_job
from pretrain.run.out_of_memory import explaining_errors
from pretrain.run.recording import introduce_job
from pretrain.run.resume import begins_histories, find_resume_point, load_weights
from pretrain.settings.config import load_recipe
from pretrain.settings.launch import with_precision
from pretrain.settings.recipe import Recipe


def main(parsed: argparse.Namespace, assemble: Callable[[Job, Accelerator], Assembly]) -> int:
    """Evaluate; `assemble`: the launcher's, which builds the model."""
    is_run, texts = parsed.recipe.is_dir(), [text for text in parsed.overrides if "=" not in text]
    path = parsed.recipe / "config.yaml" if is_run else parsed.recipe
    if is_run and not path.is_file():
        raise InputError(
            f"{parsed.recipe}: is no run folder, which has a config.yaml; name one, as runs/NAME, or a recipe"
        )
    overrides = [f"run_dir={parsed.recipe}"] * is_run + [
        text for text in parsed.overrides if "=" in text
    ]
    if len(texts) > 1:
        raise InputError(
            f"command line: {' '.join(texts)}: this evaluates one text; name one file, or a folder of them"
        )
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
    """Make a temporary folder in which a text is packed, with a link `packs` to the packs of
    `recipe`. Only this user can read it.

    The first process of each machine makes it, hands it to the others, and deletes it when `stack`
    ends. Collective.
    """
    made = None
    if accelerator.is_local_main_process:
        temporary = tempfile.TemporaryDirectory(prefix="evaluate-", ignore_cleanup_errors=True)
        made = Path(stack.enter_context(temporary))
        first, *_ = training_parts(recipe.data).values()
        (made / "packs").symlink_to(first.packs.absolute())
    up_to_this_rank = from_all_ranks(made)[: accelerator.process_index + 1]
    return [folder for folder in up_to_this_rank if folder][-1]


def text_overrides(text: str, folder: Path) -> list[str]:
    """Return overrides with which a recipe is evaluated on `text`, packed in `folder`, and has its
    packs as they are."""
    gone = [
        *(f"data.{key}=null" for key in ("source", "sources", "subset")),
        "data.split=train",
        "data.streaming=false",
    ]
    validation = f"data.validation={json.dumps({'source': text})}"
    return [*gone, "data.held_out=0", f"data.packs={folder / 'packs'}", validation]


def _evaluate(
    recipe: Recipe,
    accelerator: Accelerator,
    notices: Iterable[str],
    wanted: str,
    assemble: Callable[[Job, Accelerator], Assembly],
) -> None:
    """Say the held-out loss in the recipe's precision, and in BF16 where that is another. Collective.

    `wanted`: a checkpoint, of whatever recipe with the same model, or "auto": the run folder's newest, or the weights with which
    the run would begin where there is none. InputError where no packs are held out, and where all weights are random.
    """
    job = prepare_job(recipe, accelerator)
    console = introduce_job(job, accelerator, notices)
    if job.data.held_out is None:
        raise InputError("`data.held_out`: no packs are held out to evaluate on; set it")
    job = job.with_settings("batch", microbatch=job.plan.expected_microbatch)
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep)
    source = find_resume_point(checkpoints, wanted, job, accept_changes=True)
    if source is None and job.recipe.model.weights_source is None:
        raise InputError(
            f"`run_dir`: {job.run_dir} has no checkpoint; name one with --resume, or set `model.source`"
        )
    assembly = assemble(job, accelerator)
    for note in load_weights(source, checkpoints, job.recipe.weights, assembly) if source else ():
        console.notice(note)
    console.notice(
        f"held-out loss of {source.path if source else f'{job.recipe.model.weights_source}, untrained by this run'}"
    )

    def evaluate(precision: str) -> None:
        figures = held_out_figures(job, assembly.model, accelerator)
        penalty = (
            f"   penalty {figures['held_out_penalty']:.6f}" if "held_out_penalty" in figures else ""
        )
        console.notice(
            f"  {precision:<8} {figures['held_out_loss']:.6f}   perplexity {figures['held_out_perplexity']:.4g}{penalty}   "
            f"over {figures['held_out_tokens']:,} tokens"
        )

    context = assembly.context
    low = [each for each in assembly.precision.in_model.values() if each.backend is not None]
    for each in low:
        with (
            assembly.precision.using(each.name),
            context.preserving_state(),
            overridden(context, evaluates_low=True),
        ):
            if source and begins_histories(source, assembly, job):
                assembly.begin_precision(each.name, job, accelerator)
            evaluate(each.name)
    if low:
        with overridden(context, evaluates_low=False):
            evaluate("bf16")
    else:
        evaluate(assembly.precision.current.name)
        if job.compute_dtype == torch.float32:
            with torch.autocast(accelerator.device.type, torch.bfloat16):
                evaluate("bf16")
