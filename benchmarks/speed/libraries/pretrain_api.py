"""`pretrain.api` in a plain loop: low-precision linears and exact BF16 weights, not compiled.

The recipe sets the precision. transformers computes norms, activations, attention and the loss.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.speed.libraries.task import Task, Way, hugging_face_loss
from packing.batch import Microbatch
from pretrain.api import convert, exact_adamw


def obstacle(device: torch.device) -> str | None:
    return None


def build(task: Task) -> Way:
    # All ways begin with the same FP32 weights, which the optimizer keeps exactly.
    hf = replace(task, weights="fp32").hugging_face_model()
    weights = [parameter.detach().clone() for parameter in hf.parameters()]
    hf.to(torch.bfloat16)
    precision = task.recipe.precision
    inputs = task.inputs(first_microbatch(task))
    inputs["shift_labels"] = inputs["labels"]
    convert(
        hf,
        precision,
        scope=task.recipe.fp8_config.scope,
        calibrate_on=inputs if precision == "delayed" else None,
    )
    settings = task.recipe.optimizer
    optimizer = exact_adamw(
        hf,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for parameter, weight in zip(hf.parameters(), weights, strict=True):
        optimizer.set_master(parameter, weight)
    return Way(hf, optimizer, hugging_face_loss(task, hf))


def first_microbatch(task: Task) -> Microbatch:
    """Return the first pack of the training. Delayed scaling computes its first scales from it."""
    with task.batches(1).steps(0, 1) as batches:
        return next(iter(batches.take().microbatches))
