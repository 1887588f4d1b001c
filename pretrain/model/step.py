"""Forward and backward of one optimizer step, over however many microbatches and ranks share it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from packing.batch import StepBatches
from pretrain.model.distributed import accumulating, unwrapped
from pretrain.model.huggingface import inputs_of


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
