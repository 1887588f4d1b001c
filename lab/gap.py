"""`python -m pretrain gap`: print how far low precision moves losses and gradients from BF16's.

A batch of held-out packs is computed in BF16, and in each low precision. All computations have the
same weights, dropout masks and scales of the loss, so the gap shows only the effect of rounding.
docs/developers/checks.md defines the distances.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from foundation.overrides import overridden
from foundation.units import UNKNOWN, markdown, signed
from packing.batch import Batching, Microbatch
from pretrain.checkpoint.state import seed_step
from pretrain.launch.environment import with_precision
from pretrain.metrics.console import Console
from pretrain.model.distributed import as_launched, end_process_group
from pretrain.model.gradients import gradients_of, local_part
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import compute_microbatch
from pretrain.optimizer.adamw import clear_gradients
from pretrain.run.assembly import Assembly
from pretrain.run.command_checks import checkpoint_of
from pretrain.run.data import evaluated_packs
from pretrain.run.evaluate_command import in_low_precisions, load_assembly, precision_overrides
from pretrain.run.job import Job, prepare_job
from pretrain.run.run import open_console
from pretrain.run.startup import explaining_errors
from pretrain.settings.config import load_recipe


def main(options: argparse.Namespace) -> int:
    """Print the gap of a checkpoint in each precision of --precisions, and return 0.

    Raises InputError if the checkpoint cannot be loaded, or if no packs are held out.
    """
    checkpoint, run_dir = checkpoint_of(options.source)
    overrides = [f"run_dir={run_dir}", *precision_overrides(options.precisions)]
    recipe = with_precision(load_recipe(run_dir / "config.yaml", overrides), os.environ)
    accelerator, notices = as_launched(recipe)
    with explaining_errors():
        job = prepare_job(recipe, accelerator, overrides)
        console = open_console(job, accelerator, notices)
        print_gaps(job, accelerator, checkpoint, options.packs, console)
        end_process_group(accelerator)
    return 0


def print_gaps(
    job: Job, accelerator: Accelerator, checkpoint: Path, pack_limit: int, console: Console
) -> None:
    """Load the checkpoint, and print its gap in each low precision of `job`.

    `pack_limit` is the `limit` of `evaluated_packs`. All ranks must call this function.
    """
    assembly, point = load_assembly(job, accelerator, str(checkpoint), console)
    batch: list[Microbatch] = []
    for packs, count in evaluated_packs(job.data.held_out, pack_limit).values():
        with Batching(**job.batching(accelerator)).evaluation(packs, count) as microbatches:
            batch += microbatches
    with overridden(assembly.context, quantizing=False):
        in_bf16 = loss_and_gradients(batch, job, assembly, accelerator)
    # The iterator switches the model to each precision.
    for name in in_low_precisions(job, accelerator, assembly, point):
        low = loss_and_gradients(batch, job, assembly, accelerator)
        console.notice(f"\n{name}: {describe(low, in_bf16, assembly, accelerator)}")


def loss_and_gradients(
    batch: Sequence[Microbatch], job: Job, assembly: Assembly, accelerator: Accelerator
) -> tuple[float, dict[str, Tensor]]:
    """Compute the loss and the gradients of a batch in the model's present precision.

    Gradients have the same scale as in training, because the histories of delayed scaling contain
    gradients of this scale. All ranks must call this function.

    Return the mean loss, and this rank's gradients or shards of gradients by the names of
    parameters.
    """
    packed = assembly.model
    packed.train()
    # The sum of the losses, and the number of labels.
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for index, microbatch in enumerate(batch):
        seed_step(job.recipe.seed, index, accelerator.process_index)
        scale = 1 / job.plan.tokens_per_step
        sums[0] += compute_microbatch(packed, accelerator, microbatch, scale)
        sums[1] += microbatch.valid_tokens
    loss, labels = accelerator.reduce(sums, reduction="sum").tolist()
    gradients = gradients_of(packed.hf)
    copies = {name: local_part(gradient).clone() for name, gradient in gradients.items()}
    clear_gradients(assembly.optimizer, packed)
    return loss / labels, copies


def describe(
    low: tuple[float, dict[str, Tensor]],
    in_bf16: tuple[float, dict[str, Tensor]],
    assembly: Assembly,
    accelerator: Accelerator,
) -> str:
    """Return the distances of two results of `loss_and_gradients`.

    The text has a table of the distances of gradients by layer.

    All ranks must call this function.
    """
    loss, gradients = low
    bf16_loss, bf16_gradients = in_bf16
    text = f"loss {loss:.6f}, {signed(loss - bf16_loss, 6)} nats from BF16's"
    layers = decoder_layers(assembly.hf)
    # Map each layer to the sums of `dot_products` over its parameters.
    products: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        # A parameter outside of the decoder layers belongs to its module.
        module = name.rpartition(".")[0]
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), module)
        local = dot_products(gradient, bf16_gradients[name])
        products[layer] = products.get(layer, 0) + accelerator.reduce(local, reduction="sum")
    products["all"] = torch.stack([*products.values()]).sum(0)
    rows = [[layer, *comparison_cells(*row.tolist())] for layer, row in products.items()]
    return f"{text}\n{markdown(['layer', 'distance', 'cosine', 'norm ratio'], rows)}"


def dot_products(low: Tensor, in_bf16: Tensor) -> Tensor:
    """Return the dot product of two gradients, and the squared norm of each gradient, FP64 [3]."""
    x, y = low.float(), in_bf16.float()
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in ((x, y), (x, x), (y, y))])


def comparison_cells(dot: float, low_squared: float, bf16_squared: float) -> list[str]:
    """Return the distance of two gradients, their cosine, and the ratio of their norms, as text.

    The distance is the norm of their difference, divided by the norm of the BF16 gradient.
    """
    if not (low_squared and bf16_squared):
        return [UNKNOWN] * 3
    ratio = math.sqrt(low_squared / bf16_squared)
    cosine = dot / math.sqrt(low_squared * bf16_squared)
    distance = math.sqrt(max(1 + ratio**2 - 2 * ratio * cosine, 0.0))
    return [f"{distance:.4f}", f"{cosine:.6f}", f"{ratio:.4f}"]
