"""The held-out loss of a checkpoint, or of the model that a run would begin with. Nothing is trained, and nothing written.

accelerate launch --config_file accelerate_configs/bf16.yaml -m pretrain evaluate my.yaml [--resume CHECKPOINT]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator

from foundation.attributes import holding
from foundation.errors import InputError
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.metrics.console import Console
from pretrain.model.distributed import end_processes
from pretrain.plan.preflight import Job, prepare_job
from pretrain.precision.settings import ActivePrecision
from pretrain.run.assembly import Assembly
from pretrain.run.command_line import LaunchParser, as_launched, compute_in_a_fixed_order, exit_status, explaining_errors
from pretrain.run.evaluate import held_out_figures
from pretrain.run.recording import warn_of_precisions
from pretrain.run.resume import complete_histories, find_resume_point, load_weights
from pretrain.settings.config import load_recipe, run_dir_of
from pretrain.settings.launch_environment import with_precision
from pretrain.settings.recipe import Recipe


def main(arguments: Sequence[str], assemble: Callable[[Job, Accelerator], Assembly]) -> int:
    """`assemble`: the launcher's, which builds the model."""
    parser = LaunchParser(__doc__, "python -m pretrain evaluate")
    parser.add_argument("--resume", default="auto", metavar="CHECKPOINT", help="default auto: the run's newest intact one")
    parsed = parser.read(arguments)

    def evaluate() -> int:
        recipe = with_precision(load_recipe(parsed.recipe, parsed.overrides), os.environ)
        if recipe.deterministic:
            compute_in_a_fixed_order(os.environ)
        recipe, accelerator, notices = as_launched(recipe)
        if parsed.resume == "auto" and recipe.train.begin_with is None and not run_dir_of(recipe).exists():
            _refuse_random_weights(recipe)  # before packs are prepared
        job = prepare_job(recipe, accelerator)
        console = Console(job.plan.steps, enabled=accelerator.is_main_process)
        for text in notices:
            console.notice(text)
        warn_of_precisions(job, console)
        with explaining_errors():
            evaluate_only(job, accelerator, console, parsed.resume, assemble)
        end_processes(accelerator)
        return 0

    return exit_status(evaluate)


def _refuse_random_weights(recipe: Recipe) -> None:
    """InputError where a run of `recipe` without a checkpoint begins with weights that are drawn."""
    if recipe.model.weights_source is None:
        raise InputError(
            f"`run_dir`: {run_dir_of(recipe)} has no checkpoint, and this recipe begins with random weights; set it to that of "
            "a run that has saved one, name a checkpoint with --resume, or set `model.source`"
        )


def evaluate_only(
    job: Job, accelerator: Accelerator, console: Console, wanted: str, assemble: Callable[[Job, Accelerator], Assembly]
) -> None:
    """Say the held-out loss in the recipe's precision, and in BF16 where that is another. Collective.

    `wanted`: a checkpoint, of whatever recipe with the same model, or "auto": the run folder's newest, or the weights with which
    the run would begin where there is none. InputError where no packs are held out, and where all weights are random.
    """
    if job.data.held_out is None:
        raise InputError("`data.held_out`: no packs are held out to evaluate on; set it")
    job = job.with_settings("batch", microbatch=job.plan.expected_microbatch)
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep)
    source = find_resume_point(checkpoints, wanted, job, accept_changes=True)
    if source is None:
        _refuse_random_weights(job.recipe)
    assembly = assemble(job, accelerator)
    what = f"{job.recipe.model.weights_source}, untrained by this run"
    if source is not None:
        what = str(source.path)
        for note in load_weights(source, checkpoints, job.recipe.weights, assembly):
            console.notice(note)

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
