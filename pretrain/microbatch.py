"""`batch.microbatch: auto`: the largest microbatch that fits on this device, found by trying.

Formulas for activation memory are off by tens of percent with the attention backend, the compiler's choices and the allocator's
fragments, and a run that dies of memory after an hour costs more than two trials at its start. The plan's estimate only says where
to begin. A trial is one forward and backward of real packs; what the optimizer and the gradients will hold is already allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import nn

from packing.batch import Microbatch
from packing.errors import InputError
from pretrain.model import inputs_of

# Left free for the allocator's fragments, communication buffers and evaluation.
RESERVE = 0.04


def largest_that_fits(
    model: nn.Module, accelerator: Accelerator, candidates: Sequence[int], make_batch: Callable[[int], Microbatch]
) -> int:
    """The first of `candidates` (packs a microbatch, descending) whose forward and backward fit; all ranks agree on the smallest.

    Gradients must exist already or are made by the trial; they are zeroed afterwards. Raises InputError where not even the smallest
    fits, naming what would help.
    """
    for candidate in candidates:
        if _agreed(accelerator, _fits(model, accelerator, make_batch(candidate))):
            return candidate
    raise InputError(
        f"`batch.microbatch: auto`: not even {candidates[-1]} pack(s) at once fit into the device's memory; set "
        "`model.gradient_checkpointing: full`, a shorter `data.length`, `weights: bf16`, or shard the model over more devices"
    )


def _fits(model: nn.Module, accelerator: Accelerator, batch: Microbatch) -> bool:
    device = accelerator.device
    if device.type != "cuda":
        # No device allocator to ask; the plan's candidates respect the memory of the host.
        return True
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for _ in range(2):  # the second pass holds gradients as well, as every later microbatch does
            accelerator.backward(model(**inputs_of(batch, device)))
        reserved = torch.cuda.max_memory_reserved(device)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        # Zeroed, not freed: the gradients' memory belongs to every trial.
        model.zero_grad(set_to_none=False)
        torch.cuda.empty_cache()
    return reserved < (1 - RESERVE) * torch.cuda.get_device_properties(device).total_memory


def _agreed(accelerator: Accelerator, fits: bool) -> bool:
    verdict = torch.tensor([float(fits)], device=accelerator.device)
    return accelerator.reduce(verdict, reduction="sum").item() == accelerator.num_processes
