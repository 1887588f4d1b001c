"""`batch.microbatch: auto`: the largest microbatch that fits on this device, found by trying.

The plan's estimate of memory knows neither all of the compiler's choices nor the allocator's fragments, so it only says where to
begin. A trial is a forward and backward of documents as they lie in the packs, after the optimizer's state was allocated.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from foundation.errors import InputError
from packing.batch import Microbatch
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import clear_main_gradients
from pretrain.model.packed import inputs_of
from pretrain.plan.preflight import Job
from pretrain.plan.remedies import is_out_of_memory, listed
from pretrain.run.assembly import Assembly, beginning_of

# Left free for the allocator's fragments, communication buffers and evaluation.
RESERVE = 0.04


def choose_microbatch(job: Job, assembly: Assembly, resumed: Mapping[str, Any] | None, accelerator: Accelerator) -> int:
    """Packs a microbatch: the recipe's number, or that of the `resumed` state, or the largest that fits now, in each of the run's
    precisions; on a CPU, what is expected to fit.

    To keep the microbatch keeps the order of all sums, so the resumed run repeats the uninterrupted one bit for bit.
    """
    fitting = []
    with assembly.context.preserving_state():
        for active in job.plan.actives:
            with assembly.using(active):
                fitting.append(_of_one_precision(job.in_precision(active), assembly.model, resumed, accelerator))
    return min(fitting)


def _of_one_precision(job: Job, model: nn.Module, resumed: Mapping[str, Any] | None, accelerator: Accelerator) -> int:
    if job.plan.microbatch:
        return job.plan.microbatch
    same_split = resumed is not None and resumed["world_size"] == accelerator.num_processes
    if same_split and resumed["microbatch"] in job.plan.microbatch_sizes:
        return resumed["microbatch"]
    if accelerator.device.type != "cuda":  # host memory that is used up ends a process, and cannot be measured
        return job.plan.expected_microbatch
    usable = int((1 - RESERVE) * torch.cuda.get_device_properties(accelerator.device).total_memory)
    most_reserved = partial(torch.cuda.max_memory_reserved, accelerator.device)
    options = {"multiple_of": job.precision.multiple_of, "usable": usable, "most_reserved": most_reserved}
    largest = largest_that_fits(model, accelerator, job.plan.microbatch_sizes, job.data.trial_batch, **options)
    if largest is None:
        least = min(job.plan.microbatch_sizes)
        raise InputError(
            f"`batch.microbatch: auto`: {least} pack(s) at once do not fit into the device's memory; shard the model over more "
            f"devices, or set a shorter `data.length`.{listed(job.plan.with_microbatch(least))}"
        )
    return largest


def largest_that_fits(
    model: nn.Module,
    accelerator: Accelerator,
    sizes: Sequence[int],
    make_batch: Callable[[int], Microbatch],
    *,
    multiple_of: int,
    usable: int,
    most_reserved: Callable[[], int],
) -> int | None:
    """The largest of `sizes` (packs a microbatch) whose forward and backward fit on every rank; None where not even half a pack
    does. Leaves the model in training mode, its gradients zero.

    Ranks may wait for each other within a trial, and one that ran out of memory would leave the others waiting. So what is tried
    grows from half a pack on, and each size is foreseen to fit from what smaller ones took on the fullest rank.

    `multiple_of`: the precision takes tokens in multiples of it, the half pack's too. `usable`: bytes of this device.
    `most_reserved`: how many of them the last trial took."""
    model.train()  # a model from a folder comes in evaluation mode, in which no layer is recomputed
    limit = -largest_over_ranks(accelerator, -usable)
    length = make_batch(1).max_seqlen
    half = math.ceil(length / (2 * multiple_of)) * multiple_of

    def most_used(packs: float) -> int:
        # Each size is compiled for itself, and the compiler gives up on a function that it has compiled eight times.
        torch.compiler.reset()
        try:
            _try(model, accelerator, beginning_of(make_batch(1), half) if packs < 1 else make_batch(int(packs)))
            used = most_reserved()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            used = limit + 1
        return largest_over_ranks(accelerator, used)

    return grow(sorted(sizes), limit, most_used, half / length)


def grow(sizes: Sequence[int], limit: int, most_used: Callable[[float], int], begin: float = 0.5) -> int | None:
    """The largest of `sizes` (packs, ascending) for which `most_used` gives no more than `limit` bytes; None if there is none.

    Memory is taken to be a line in packs, through the last two sizes tried, of which the first is `begin`, part of a pack or a
    whole one: much of it is taken at any size. A step is at most fourfold, so that what is not quite a line shows.
    """
    fewer, less = begin, most_used(begin)
    if less > limit:
        return None
    largest = int(begin) if begin in sizes else None
    following = [size for size in sizes if size > begin][:1]
    while following:
        packs = following[-1]
        used = most_used(packs)
        if used > limit:
            sizes = [size for size in sizes if size < packs]
        else:
            largest = packs
        each = max((used - less) / (packs - fewer), 0)
        fewer, less = packs, used
        following = [size for size in sizes if (largest or packs) < size <= 4 * packs and used + (size - packs) * each <= limit]
    return largest


def _try(model: nn.Module, accelerator: Accelerator, batch: Microbatch) -> None:
    """Runs two forwards and backwards of `batch`, from a fresh count of the device's peak memory; gradients are zero
    afterwards."""
    device = accelerator.device
    gc.collect()  # what a trial that failed has left in reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    sharding = getattr(model, "sharding", None)
    try:
        for last in (False, True):  # the second pass holds gradients as well, as every later microbatch does
            # Ranks that hold the whole model must not wait here for one that has run out of memory. Shards wait in any case.
            with sharding.accumulating() if sharding and not last else nullcontext():
                accelerator.backward(model(**inputs_of(batch, device)))
    finally:
        if sharding:
            sharding.abandon()
        # Zeroed, not freed: the gradients' memory belongs to every trial. Shards get new ones with every step.
        model.zero_grad(set_to_none=accelerator.is_fsdp2)
        clear_main_gradients(model.parameters())
