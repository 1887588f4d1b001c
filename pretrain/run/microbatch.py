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
    precisions.

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
    if not trials_are_collective(model, accelerator):
        candidates = job.plan.microbatch_candidates
        largest = largest_that_fits(model, accelerator, candidates, job.data.trial_batch)
    elif accelerator.device.type == "cuda":
        candidates = list(reversed(job.plan.microbatch_sizes))
        usable, most_reserved = usable_memory(accelerator.device), partial(torch.cuda.max_memory_reserved, accelerator.device)
        options = {"multiple_of": job.precision.multiple_of, "usable": usable, "most_reserved": most_reserved}
        largest = largest_by_growth(model, accelerator, candidates, job.data.trial_batch, **options)
    else:  # host memory that is used up ends a process, and cannot be measured: only what the estimate expects to fit is tried
        candidates = [job.plan.expected_microbatch]
        largest = largest_that_fits(model, accelerator, candidates, job.data.trial_batch)
    if largest is None:
        raise InputError(
            f"`batch.microbatch: auto`: {candidates[-1]} pack(s) at once do not fit into the device's memory; shard the model "
            f"over more devices, or set a shorter `data.length`.{listed(job.plan.with_microbatch(candidates[-1]))}"
        )
    return largest


def trials_are_collective(model: nn.Module, accelerator: Accelerator) -> bool:
    """Whether ranks exchange something within a forward and backward: shards of weights, or the amaxes of delayed scaling."""
    context = getattr(model, "context", None)
    return accelerator.is_fsdp2 or (accelerator.num_processes > 1 and context is not None and bool(context.state()))


def largest_that_fits(
    model: nn.Module, accelerator: Accelerator, candidates: Sequence[int], make_batch: Callable[[int], Microbatch]
) -> int | None:
    """The first of `candidates` (packs a microbatch, descending) whose forward and backward fit; all ranks agree on the smallest.

    Leaves the model in training mode, its gradients zero. None where not even the smallest fits. A CPU process that runs
    out of memory is killed without an exception; there the plan's candidates respect the host's memory.
    """
    model.train()  # a model from a folder comes in evaluation mode, in which no layer is recomputed
    for candidate in candidates:
        fits = _fits(model, accelerator, make_batch(candidate))
        if not fits and trials_are_collective(model, accelerator):
            break  # the other ranks wait
        if not largest_over_ranks(accelerator, int(not fits)):
            return candidate
        # Each size is compiled for itself, and the compiler gives up on a function that it has compiled eight times.
        torch.compiler.reset()
    return None


def largest_by_growth(
    model: nn.Module,
    accelerator: Accelerator,
    candidates: Sequence[int],
    make_batch: Callable[[int], Microbatch],
    *,
    multiple_of: int,
    usable: int,
    most_reserved: Callable[[], int],
) -> int | None:
    """Does what `largest_that_fits` does, on GPUs whose ranks wait for each other within a trial: one that ran out of memory
    would leave the others waiting. So what is tried grows from half a pack on, and each size is foreseen to fit from what smaller
    ones took on the fullest rank.

    `multiple_of`: the precision takes tokens in multiples of it, the half pack's too. `usable`: bytes of this device.
    `most_reserved`: how many of them the last trial took."""
    model.train()
    limit = -largest_over_ranks(accelerator, -usable)
    length = make_batch(1).max_seqlen
    half = math.ceil(length / (2 * multiple_of)) * multiple_of

    def most_used(packs: float) -> int:
        torch.compiler.reset()  # each size is compiled for itself
        _try(model, accelerator, beginning_of(make_batch(1), half) if packs < 1 else make_batch(int(packs)))
        return largest_over_ranks(accelerator, most_reserved())

    return grow(sorted(candidates), limit, most_used, half / length)


def usable_memory(device: torch.device) -> int:
    """Bytes of a GPU that a trial may take."""
    return int((1 - RESERVE) * torch.cuda.get_device_properties(device).total_memory)


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


def _fits(model: nn.Module, accelerator: Accelerator, batch: Microbatch) -> bool:
    device = accelerator.device
    try:
        _try(model, accelerator, batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    if device.type != "cuda":
        return True
    return torch.cuda.max_memory_reserved(device) < usable_memory(device)


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
