"""A run's evaluations: held-out loss and samples. The loss takes the same path as training, so it fits wherever training does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from foundation.progress import advance
from packing.arrow import Packs
from packing.batch import Batching, Microbatch
from packing.order import MixedPacks
from pretrain.checkpoint.format import step_folder
from pretrain.metrics.run_record import Record, kind, own_evaluations, read_metrics, same_measure
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.precision.settings import UNQUANTIZED
from pretrain.run.data import packs_evaluated
from pretrain.run.job import Job
from pretrain.run.run import Run, best_evaluation
from pretrain.run.sampling import draw_samples


def evaluate(run: Run) -> None:
    """Held-out loss, where packs are held out, and samples, where prompts are set. Collective."""
    with run.console.progress("evaluating", "microbatches"):
        if run.job.data.held_out is not None:
            began = time.perf_counter()
            figures = held_out_figures(run.job, run.assembly.model, run.accelerator)
            record = {"step": run.state.step, "event": "evaluation", **figures, **measure_of(run)}
            run.trackers.log(record)
            run.console.evaluation(record, time.perf_counter() - began)
            if run.job.recipe.checkpoint.best:
                # the main process's
                run.best = broadcast_object_list(
                    [best_evaluation([*filter(None, [run.best]), record])]
                )[0]
        if run.job.recipe.evaluate.samples:
            draw_samples(run)


def evaluate_once(run: Run) -> None:
    """Evaluates, unless the same evaluation of the present step is in metrics.jsonl already."""
    done = False
    if run.accelerator.is_main_process:
        lines = [
            line
            for line in read_metrics(run.folder.path)
            if kind(line) == "evaluation" and line["step"] == run.state.step
        ]
        done = any(same_measure(line, measure_of(run)) for line in lines)
    if not largest_over_ranks(run.accelerator, int(done)):
        evaluate(run)


def measure_of(run: Run) -> dict[str, Any]:
    """The packs and the precision of an evaluation, as its line in metrics has them; empty where no packs are held out."""
    job = run.job
    if job.data.held_out is None:
        return {}
    precision = run.precision.current.active.precision
    as_trained = run.assembly.context.evaluates_low or not precision.quantized
    return {
        "held_out_fingerprint": job.data.held_out.fingerprint[:16],
        "held_out_packs": sum(most for _, most in evaluated_parts(job).values()),
        "held_out_precision": (
            precision if as_trained else UNQUANTIZED[precision.compute_dtype]
        ).name,
    }


def held_out_figures(
    job: Job, model: PackedLanguageModel, accelerator: Accelerator
) -> dict[str, float]:
    """`held_out_loss` of the held-out packs that the recipe evaluates on; of several sources, an equal share of each one's packs,
    and `held_out_loss/NAME` too. Collective."""
    sums = {}
    for name, (packs, most) in evaluated_parts(job).items():
        with Batching(**job.batching(accelerator)).evaluation(packs, most) as batches:
            sums[name] = held_out_sums(model, batches, accelerator)
    by_source = {
        f"held_out_loss/{name}": figures_of(each)["held_out_loss"] for name, each in sums.items()
    }
    return figures_of(sum(sums.values())) | (by_source if len(sums) > 1 else {})


def evaluated_parts(job: Job) -> dict[str, tuple[Packs, int]]:
    """Returns for each source, by name, its held-out packs and how many of them are evaluated on."""
    held_out, limit = job.data.held_out, job.recipe.evaluate.packs
    parts = held_out.parts if isinstance(held_out, MixedPacks) else {"": held_out}
    return {
        name: (packs, packs_evaluated(len(packs), len(held_out), limit))
        for name, packs in parts.items()
    }


def best_so_far(run: Run) -> Record | None:
    """The best evaluation in metrics.jsonl whose checkpoint still exists, if evaluations to come have the same measure. The file
    has none after the present step. Collective."""
    best = None
    if run.job.recipe.checkpoint.best and run.accelerator.is_main_process:
        evaluations = own_evaluations(read_metrics(run.folder.path))
        best = best_evaluation(
            e for e in evaluations if step_folder(run.folder.checkpoints, e["step"]).exists()
        )
        best = best if best and same_measure(best, measure_of(run)) else None
    return broadcast_object_list([best])[0]


def is_best(run: Run) -> bool:
    """Whether the present step has the best evaluation, and its checkpoint is to be kept for that."""
    return run.best is not None and run.best["step"] == run.state.step


@torch.no_grad()
def held_out_sums(
    model: PackedLanguageModel, batches: Iterable[Microbatch], accelerator: Accelerator
) -> Tensor:
    """Evaluates on `batches`, this rank's share of held-out packs, of which every rank must pass equally many. Returns sums over
    all ranks, FP64: the cross-entropy in nats, the valid labels, and where the loss has a penalty also that."""
    head = model.hf.get_output_embeddings()
    head.take_parts()  # those of earlier forwards do not count
    total = torch.zeros(3 if head.penalty else 2, dtype=torch.float64, device=accelerator.device)
    training = model.training
    model.eval()
    for batch in batches:
        total[0] += model(**inputs_of(batch, accelerator.device))
        total[1] += batch.valid_tokens
        advance()
    model.train(training)
    if (parts := head.take_parts()) is not None:
        total[2] = parts[1]
    return accelerator.reduce(total, reduction="sum")


def figures_of(sums: Tensor) -> dict[str, float]:
    """`held_out_loss`, the mean in nats over the `held_out_tokens`, `held_out_perplexity`, and of a penalty `held_out_penalty`,
    which is no part of the two."""
    loss_sum, tokens, *penalty = sums.tolist()
    loss = loss_sum / max(tokens, 1)
    perplexity = math.exp(min(loss, 700.0))  # a larger one would overflow
    figures = {
        "held_out_loss": loss,
        "held_out_perplexity": perplexity,
        "held_out_tokens": int(tokens),
    }
    return figures | {"held_out_penalty": penalty[0] / max(tokens, 1)} if penalty else figures
