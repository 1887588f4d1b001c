"""Evaluate a run: compute the held-out loss, and generate samples.

The held-out loss is computed in microbatches of the same size as in training, so it needs no more
memory than training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from foundation.progress import advance
from packing.batch import Batching, Microbatch
from pretrain.checkpoint.folders import step_folder
from pretrain.metrics.run_record import (
    Record,
    best_evaluation,
    evaluations_of_training,
    kind,
    read_metrics,
    same_measure,
)
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.precision.settings import UNQUANTIZED
from pretrain.run.data import evaluated_packs
from pretrain.run.job import Job
from pretrain.run.run import Run
from pretrain.run.sampling import draw_samples


def evaluate(run: Run) -> None:
    """Compute and log the held-out loss, and generate samples.

    All ranks must call this function. There is no held-out loss if no packs are held out, and there
    are no samples if the recipe has no prompts. With `checkpoint.best`, also update `run.best`.
    """
    job = run.job
    record: Record | None = None
    with run.console.progress("evaluating", "microbatches"):
        if job.data.held_out is not None:
            started = time.perf_counter()
            record = {"step": run.state.step, "event": "evaluation"}
            record |= held_out_metrics(job, run.assembly.model, run.accelerator)
            record |= measure_of(run)
            run.console.evaluation(record, time.perf_counter() - started)
            if job.recipe.checkpoint.best:
                # All processes use the result of the main process.
                best = best_evaluation(filter(None, (run.best, record)))
                run.best = _from_main_process(best)
        if job.recipe.evaluate.samples:
            draw_samples(run)
    # Log the loss last. If the run is killed before its last samples are logged, `evaluate_once`
    # then repeats the evaluation.
    if record is not None:
        run.trackers.log(record)


def _from_main_process(value: Any) -> Any:
    """Return the value of the main process on all ranks. All ranks must call this function."""
    return broadcast_object_list([value])[0]


def evaluate_once(run: Run) -> None:
    """Evaluate the run, unless metrics.jsonl already contains the evaluation.

    All ranks must call this function. Two evaluations are the same if they have the same step and
    the same measure (see `measure_of`). Only the main process reads metrics.jsonl.
    """
    is_logged = False
    if run.accelerator.is_main_process:
        measure = measure_of(run)
        is_logged = any(
            kind(line) == "evaluation"
            and line["step"] == run.state.step
            and same_measure(line, measure)
            for line in read_metrics(run.folder.path)
        )
    if not largest_over_ranks(run.accelerator, int(is_logged)):
        evaluate(run)


def measure_of(run: Run) -> dict[str, Any]:
    """Return the measure of an evaluation: a dict that identifies its held-out packs and precision.

    The items of this dict are part of the evaluation's line in metrics.jsonl. Only evaluations with
    the same measure can be compared. Return {} if no packs are held out.
    """
    job = run.job
    if job.data.held_out is None:
        return {}
    precision = run.precision.precision
    if precision.quantized and not run.assembly.context.evaluates_low:
        precision = UNQUANTIZED[precision.compute_dtype]
    parts = evaluated_packs(job.data.held_out, job.recipe.evaluate.packs)
    return {
        "held_out_fingerprint": job.data.held_out.fingerprint[:16],
        "held_out_packs": sum(count for _, count in parts.values()),
        "held_out_precision": precision.name,
    }


def held_out_metrics(
    job: Job, model: PackedLanguageModel, accelerator: Accelerator
) -> dict[str, float]:
    """Evaluate the model on held-out packs, and return its metrics (see `metrics_from_sums`).

    All ranks must call this function. If the dataset has several sources, the same share of
    held-out packs is read from every source. Then the metrics also contain `held_out_loss/NAME` for
    each source.
    """
    sums = {}
    parts = evaluated_packs(job.data.held_out, job.recipe.evaluate.packs)
    for name, (packs, count) in parts.items():
        with Batching(**job.batching(accelerator)).evaluation(packs, count) as batches:
            sums[name] = held_out_sums(model, batches, accelerator)
    metrics = metrics_from_sums(cast(Tensor, sum(sums.values())))
    if len(sums) > 1:
        for name, source_sums in sums.items():
            metrics[f"held_out_loss/{name}"] = metrics_from_sums(source_sums)["held_out_loss"]
    return metrics


def best_so_far(run: Run) -> Record | None:
    """Return the best evaluation in metrics.jsonl whose checkpoint still exists, or None.

    The evaluation must have the same measure as the next evaluations of this run, see `measure_of`.
    Call this when metrics.jsonl has no lines after the present step. All ranks must call this
    function.
    """
    best = None
    if run.job.recipe.checkpoint.best and run.accelerator.is_main_process:
        measure = measure_of(run)
        evaluations = evaluations_of_training(read_metrics(run.folder.path))
        best = best_evaluation(
            evaluation
            for evaluation in evaluations
            if same_measure(evaluation, measure)
            and step_folder(run.folder.checkpoints, evaluation["step"]).exists()
        )
    return _from_main_process(best)


@torch.no_grad()
def held_out_sums(
    model: PackedLanguageModel, batches: Iterable[Microbatch], accelerator: Accelerator
) -> Tensor:
    """Return sums over the held-out packs of all ranks: FP64 [2], or [3] if the loss has a penalty.

    The sums are: the cross-entropy in nats, the number of labels, and the penalty. The model is in
    evaluation mode meanwhile. Its sums of `LossHead.take_parts` are reset.

    batches: the microbatches of this rank. All ranks must pass the same number of microbatches.

    All ranks must call this function.
    """
    head = model.hf.get_output_embeddings()
    # Drop the sums of earlier forward passes.
    head.take_parts()
    total = torch.zeros(3 if head.penalty else 2, dtype=torch.float64, device=accelerator.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for batch in batches:
        total[0] += model(**inputs_of(batch, accelerator.device))
        total[1] += batch.valid_tokens
        advance()
    for module, was_training in modes:
        module.training = was_training
    parts = head.take_parts()
    if parts is not None:
        _, penalties = parts
        total[2] = penalties
    return accelerator.reduce(total, reduction="sum")


def metrics_from_sums(sums: Tensor) -> dict[str, float]:
    """Return the metrics of an evaluation from the sums of `held_out_sums`.

    held_out_loss: the mean cross-entropy in nats per label.
    held_out_perplexity: exp(held_out_loss).
    held_out_tokens: the number of labels.
    held_out_penalty: the mean penalty, only if the loss has one. It is not part of held_out_loss.
    """
    loss_sum, tokens, *penalty = sums.tolist()
    loss = loss_sum / max(tokens, 1)
    metrics = {
        "held_out_loss": loss,
        # The exponential of a loss above 700 may overflow.
        "held_out_perplexity": math.exp(min(loss, 700.0)),
        "held_out_tokens": int(tokens),
    }
    if penalty:
        metrics["held_out_penalty"] = penalty[0] / max(tokens, 1)
    return metrics
