"""Forward and backward of one optimizer step, over however many microbatches and ranks share it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from packing.batch import StepBatches
from pretrain.distributed import accumulating, unwrapped
from pretrain.exact_adamw import ExactAdamW
from pretrain.model import inputs_of


def forward_backward(
    model: nn.Module,
    batches: StepBatches,
    accelerator: Accelerator,
    around_first: AbstractContextManager[Any] | None = None,
) -> Tensor:
    """Accumulate the gradient of the step's mean loss; returns that loss, an FP32 scalar, the same on every rank.

    The loss of a step is the sum over all its valid tokens divided by their number over all ranks. Averaging the means of
    microbatches instead would weigh a token by how few others its microbatch has. `around_first` is entered around the first
    microbatch, the one in which weights are quantized, by what looks on.
    """
    packed = unwrapped(model)
    tokens = max(batches.valid_tokens, 1)
    # DDP and FSDP2 average gradients over ranks; the sum is wanted.
    scale = accelerator.num_processes / tokens
    total = torch.zeros((), device=accelerator.device)
    for index, microbatch in enumerate(batches.microbatches):
        last = index == len(batches.microbatches) - 1
        packed.begin_microbatch(first=index == 0)
        watched = around_first if around_first and index == 0 else nullcontext()
        with watched, nullcontext() if last else accumulating(accelerator, model):
            loss_sum = model(**inputs_of(microbatch, accelerator.device))
            accelerator.backward(loss_sum * scale)
        total += loss_sum.detach()
    packed.begin_microbatch(first=True)  # for whatever forward comes before the next step
    return accelerator.reduce(total, reduction="sum") / tokens


def frozen_share(optimizer: ExactAdamW, accelerator: Accelerator) -> float:
    """The fraction of all parameters whose non-zero update left their stored weight as it was, in the step just done."""
    frozen, total = accelerator.reduce(optimizer.frozen_counts().to(accelerator.device), reduction="sum").tolist()
    return frozen / max(total, 1)


def largest_over_ranks(accelerator: Accelerator, value: int) -> int:
    """The largest of the ranks' values, the same on all of them, so that all leave a loop together."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())
