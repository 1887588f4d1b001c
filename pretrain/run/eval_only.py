"""`--eval-only`: the held-out loss of a checkpoint, or of the model that a run would begin with. Nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator

from foundation.attributes import holding
from foundation.errors import InputError
from pretrain.checkpoint.state import check_same_source
from pretrain.metrics.console import Console
from pretrain.plan.preflight import Job
from pretrain.precision.settings import ActivePrecision
from pretrain.run.assembly import Assembly, assemble
from pretrain.run.evaluate import held_out_figures
from pretrain.run.resume import complete_histories, load_weights, look_for_resume_point, scales_to_load
from pretrain.settings.config import run_dir_of
from pretrain.settings.recipe import Recipe


def require_weights(recipe: Recipe, wanted: str) -> None:
    """InputError where `evaluate_only` will find no weights, as far as the file system tells without the job."""
    if wanted == "auto" and recipe.train.begin_with is None and not run_dir_of(recipe).exists():
        _refuse_random_weights(recipe)


def _refuse_random_weights(recipe: Recipe) -> None:
    """InputError where a run of `recipe` without a checkpoint begins with weights that are drawn."""
    if recipe.model.weights_source is None:
        raise InputError(
            f"`--eval-only`: the run folder, {run_dir_of(recipe)}, has no checkpoint, and this recipe begins with random "
            "weights; set `run_dir` to that of a run that has saved one, name a checkpoint with --resume, or set `model.source`"
        )


def evaluate_only(job: Job, accelerator: Accelerator, console: Console, wanted: str) -> None:
    """Say the held-out loss in the recipe's precision, and in BF16 where that is another. Collective.

    Nothing is written. `wanted`: a checkpoint, of whatever recipe with the same model, or "auto": the run folder's newest, or the
    weights with which the run would begin where there is none. InputError where no packs are held out, where there are no weights
    but random ones, and where the config.json of `model.source` has changed since the checkpoint.
    """
    if job.data.held_out is None:
        raise InputError("`--eval-only` needs held-out packs and there are none; set `data.held_out`")
    job = job.with_microbatch(job.plan.expected_microbatch)
    checkpoints, source = look_for_resume_point(wanted, job, accept_changes=True)
    if source is not None and not source.begins:
        check_same_source(source.record["identity"], job.source_config, source.path, job.recipe.model.source)
    if source is None:
        _refuse_random_weights(job.recipe)
    assembly = assemble(job, accelerator)
    if source is None:
        what = f"{job.recipe.model.weights_source}, untrained by this run"
    else:
        scales, _ = scales_to_load(source.path, assembly.context.saved_state())
        for note in load_weights(source, checkpoints, job.recipe.weights, assembly, scales):
            console.notice(note)
        what = str(source.path)

    console.notice(f"held-out loss of {what}")
    for name, evaluating in _precisions(job, assembly, accelerator):
        with evaluating:
            reads_histories = source and assembly.context.evaluates_low
            if reads_histories and (note := complete_histories(source, assembly, job, accelerator)):
                console.notice(note)
            figures = held_out_figures(job, assembly.model, accelerator)
        penalty = f"   penalty {figures['held_out_penalty']:.6f}" if "held_out_penalty" in figures else ""
        console.notice(
            f"  {name:<8} {figures['held_out_loss']:.6f}   perplexity {figures['held_out_perplexity']:.4g}{penalty}   "
            f"over {figures['held_out_tokens']:,} tokens"
        )


def _precisions(job: Job, assembly: Assembly, accelerator: Accelerator) -> list[tuple[str, AbstractContextManager[None]]]:
    """The recipe's, or those of its schedule, and BF16, with what to enter for an evaluation in it."""
    if assembly.context.backends:
        low = [each.active for each in assembly.precisions.values() if each.backend is not None]
        turns = [(active.precision.name, _evaluating_in(active, assembly)) for active in low]
        return [*turns, ("bf16", holding(assembly.context, evaluates_low=False))]
    plain = (job.precision.name, nullcontext())
    if job.compute_dtype == torch.float32:
        return [plain, ("bf16", torch.autocast(accelerator.device.type, torch.bfloat16))]
    return [plain]


@contextmanager
def _evaluating_in(active: ActivePrecision, assembly: Assembly) -> Iterator[None]:
    """While entered, evaluations compute in `active`, a low precision."""
    context = assembly.context
    with assembly.using(active), context.preserving_state(), holding(context, evaluates_low=True):
        yield
