"""What is tried on the assembled model before a run's first step: its microbatch, and parity with plain transformers."""

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
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.plan.memory import TAKES_LESS
from pretrain.run.assembly import Assembly, first_tokens
from pretrain.run.job import Job
from pretrain.run.out_of_memory import is_out_of_memory
from pretrain.run.run import Run
from pretrain.verify.parity import PLAIN_BYTES, Parity, check_parity

# Left free for the allocator's fragments, communication buffers and evaluation.
RESERVE = 0.04
# packs laid end to end, where a smaller shape than training's costs no compilation
PARITY_MICROBATCH = 2


def choose_microbatch(
    job: Job, assembly: Assembly, resumed: Mapping[str, Any] | None, accelerator: Accelerator
) -> int:
    """What `auto` means, in packs: the microbatch of the `resumed` state, or the largest that fits now, in each of the run's
    precisions; on a CPU, what is expected to fit.

    The plan's estimate of memory knows neither all of the compiler's choices nor the allocator's fragments, so it only says where
    to begin. To keep the microbatch keeps the order of all sums, so the resumed run repeats the uninterrupted one bit for bit.
    """
    plan, device, fitting = job.plan, accelerator.device, []
    same_split = resumed is not None and resumed["world_size"] == accelerator.num_processes
    if same_split and resumed["microbatch"] in plan.microbatch_sizes:
        return resumed["microbatch"]
    if device.type != "cuda":  # host memory that is used up ends a process, and cannot be measured
        return plan.expected_microbatch
    usable = int((1 - RESERVE) * torch.cuda.get_device_properties(device).total_memory)
    most_reserved = partial(torch.cuda.max_memory_reserved, device)
    with assembly.context.preserving_state():
        for active in plan.precisions:
            options = {
                "multiple_of": active.precision.multiple_of,
                "usable": usable,
                "most_reserved": most_reserved,
            }
            with assembly.precision.using(active.precision.name):
                fitting.append(
                    largest_that_fits(
                        assembly.model,
                        accelerator,
                        plan.microbatch_sizes,
                        job.data.trial_batch,
                        **options,
                    )
                )
    if None in fitting:
        raise InputError(
            f"`batch.microbatch: auto`: not even 1 pack fits into memory; what takes less: a shorter `data.length`, {TAKES_LESS}"
        )
    return min(fitting)


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
    """The largest of `sizes` (packs a microbatch) whose forward and backward fit on every rank, on documents as they lie in the
    packs; None where not even half a pack does. Leaves the model in training mode, its gradients zero.

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
            _try(
                model,
                accelerator,
                first_tokens(make_batch(1), half) if packs < 1 else make_batch(int(packs)),
            )
            used = most_reserved()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            used = limit + 1
        return largest_over_ranks(accelerator, used)

    return grow(sorted(sizes), limit, most_used, half / length)


def grow(
    sizes: Sequence[int], limit: int, most_used: Callable[[float], int], begin: float = 0.5
) -> int | None:
    """The largest of `sizes` (packs, ascending) for which `most_used` gives no more than `limit` bytes; None if there is none.

    Memory is taken to grow linearly in packs, by the last two sizes tried: much of it is taken at any size. The first size is
    `begin`, part of a pack or a whole one. Sizes grow fourfold at most, so that what is not quite linear shows.
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
        following = [
            size
            for size in sizes
            if (largest or packs) < size <= 4 * packs and used + (size - packs) * each <= limit
        ]
    return largest


def _try(model: nn.Module, accelerator: Accelerator, batch: Microbatch) -> None:
    """Runs two forwards and backwards of `batch`, with the device's peak memory counted afresh; clears gradients afterwards."""
    device = accelerator.device
    gc.collect()  # what a trial that failed has left in reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    sharding = getattr(model, "sharding", None)
    try:
        # the second pass holds gradients as well, as every later microbatch does
        for last in (False, True):
            # Ranks that hold the whole model must not wait here for one that has run out of memory. Shards wait in any case.
            with sharding.accumulating() if sharding and not last else nullcontext():
                accelerator.backward(model(**inputs_of(batch, device)))
    finally:
        if sharding:
            sharding.abandon()
        # Zeroed, not freed: the gradients' memory belongs to every trial. Shards get new ones with every step.
        model.zero_grad(set_to_none=accelerator.is_fsdp2)
        clear_main_gradients(model.parameters())


def find_parity(run: Run) -> list[Parity | str]:
    """Compares step 0 with plain transformers in each of the run's precisions, or says why not, for the audit. Collective."""
    assembly, results = run.assembly, []
    comparisons = sum(3 if active.precision.quantized else 2 for active in run.job.plan.precisions)
    with run.console.progress("parity with plain transformers", "comparisons", total=comparisons):
        for each in assembly.precision.in_model.values():
            with assembly.precision.using(each.name):
                results.append(_in_present_precision(run))
            record = (
                {"left_out": results[-1]} if isinstance(results[-1], str) else results[-1].record()
            )
            each.audit["parity"] = {"source": "this run"} | record
    return results


def require_parity(run: Run, parity: Sequence[Parity | str]) -> None:
    """Says what the comparisons have found; raises TrainingHalted where one failed."""
    for active, result in zip(run.job.plan.precisions, parity, strict=False):
        name = f"{active.precision.name}: " if len(parity) > 1 else ""
        run.console.notice(
            name + (f"parity left out: {result}" if isinstance(result, str) else result.summary())
        )
        if isinstance(result, Parity):
            result.require()


def _in_present_precision(run: Run) -> Parity | str:
    """Returns the comparison of some of step 0 in the present precision, or why it was left out; the same on every rank."""
    job, model, accelerator = run.job, run.assembly.model, run.accelerator
    if run.state.step:
        return f"step 0 is compared only, and this run begins with the weights of step {run.state.step:,}"
    if largest_over_ranks(accelerator, int(not _fits(model, accelerator.device))):
        return f"plain transformers in FP32 does not fit beside the run ({PLAIN_BYTES} bytes a parameter)"
    if run.assembly.audit["compiled"] == "nothing":
        job = job.with_settings(
            "batch", microbatch=math.gcd(job.plan.microbatch, PARITY_MICROBATCH)
        )
    batches, mask_boundaries = job.batches(accelerator), job.recipe.data.mask_boundaries
    packs = [batches.packs[index] for index in batches.order.packs_of_step(0).tolist()]
    optimizer = run.assembly.optimizer
    return check_parity(
        model,
        optimizer,
        batches.step(0),
        packs,
        run.precision.current.active,
        accelerator,
        mask_boundaries=mask_boundaries,
    )


def _fits(model: PackedLanguageModel, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return PLAIN_BYTES * sum(p.numel() for p in model.hf.parameters()) < 0.8 * free
