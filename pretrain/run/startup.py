"""Prepare the assembled model for its first step.

This module creates the observers, chooses the microbatch if the recipe has `auto`, and compares the
first step with plain transformers (parity).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from foundation.errors import InputError, one_line
from packing.batch import Microbatch
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import clear_main_gradients
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.routing import Routing
from pretrain.observe.audit import ProductAudit
from pretrain.observe.observers import Observer, Observers, Step, is_due
from pretrain.observe.operand_statistics import OperandWatch
from pretrain.observe.profile import StepProfile
from pretrain.observe.step_check import StepCheck
from pretrain.plan.plan import SAVE_MEMORY
from pretrain.run.assembly import Assembly, first_tokens
from pretrain.run.evaluate import held_out_sums, metrics_from_sums
from pretrain.run.job import Job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import Run
from pretrain.verify.parity import PLAIN_BYTES, Parity, check_parity
from pretrain.verify.random_documents import LONGEST

# Share of a device's memory that stays free, for fragmentation, communication buffers and
# evaluation.
RESERVE = 0.04
# The largest number of packs in a microbatch of the parity check if nothing is compiled. Otherwise
# the check uses the microbatch of training, because torch.compile would compile again for another
# shape.
PARITY_MICROBATCH = 2
# An error is about full memory if its message contains one of these texts. Error classes are not
# enough: some libraries allocate memory without torch, and torch has no class for host memory.
_MESSAGES = ("out of memory", "_ALLOC_FAILED", "can't allocate memory", "not enough memory")


# ── Observers ─────────────────────────────────────────────────────────────────────────────────────


def make_observers(run: Run, profile: StepProfile | None) -> Observers:
    """Create the observers of a run.

    profile: the observer that records one step (`--profile`), or None.
    """
    recipe = run.job.recipe
    model = run.assembly.model
    optimizer = run.assembly.optimizer
    accelerator = run.accelerator
    schedule = run.assembly.schedule
    statistics_every = recipe.log.fp8_statistics
    observers: list[Observer] = [profile] if profile else []
    observers += [
        ProductAudit(model, schedule, run.assembly.audits, run.write_audit),
        StepCheck(model, optimizer, recipe, accelerator),
    ]
    if statistics_every and model.routing.routers:
        observers.append(ExpertLoads(model.routing, statistics_every))
    if statistics_every and model.context.engines:
        if accelerator.is_main_process:
            run.trackers.statistics.start()
        observers.append(OperandWatch(model.context, run.trackers.statistics, run.console))
    return Observers(observers, schedule, run.state.step, statistics_every)


@dataclass(eq=False)
class ExpertLoads(Observer):
    """Log the share of tokens that each expert has processed, in every n-th step.

    every: the number n.
    """

    routing: Routing
    every: int
    observes_passes = False

    def due(self, step: Step) -> bool:
        return is_due(step.number, self.every)

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return the metric `expert_loads`. Return {} if no step has been trained."""
        loads = self.routing.loads
        return {} if loads is None else {"expert_loads": loads.double().round(decimals=3).tolist()}


# ── The microbatch ────────────────────────────────────────────────────────────────────────────────


def choose_microbatch(
    job: Job, assembly: Assembly, point: ResumePoint | None, accelerator: Accelerator
) -> int:
    """Return the number of packs in a microbatch, for the setting `batch.microbatch: auto`.

    point: the checkpoint that the run continues from, or None.

    A resumed run keeps the microbatch of the checkpoint if it has the same number of processes, and
    if this size is still one of `Plan.microbatch_sizes`. Then all sums keep their order, and the
    resumed run repeats the uninterrupted run bit for bit. Otherwise trials on the GPU find the
    largest microbatch that fits in every precision of the run. The plan's estimate of memory is not
    precise enough, because it includes neither the choices of the compiler nor the fragmentation of
    the memory. On a CPU the estimate is used. All ranks must call this function.

    Raises InputError if not even one pack fits.
    """
    plan = job.plan
    device = accelerator.device
    if point is not None and point.state_json["world_size"] == accelerator.num_processes:
        microbatch = point.state_json["microbatch"]
        if microbatch in plan.microbatch_sizes:
            return microbatch
    if device.type != "cuda":
        # No trials on a CPU, because the system kills a process if the host memory is full.
        return plan.expected_microbatch
    usable = int((1 - RESERVE) * torch.cuda.get_device_properties(device).total_memory)
    fitting = []
    with assembly.context.preserving_state():
        for active in plan.precisions:
            with assembly.context.using(active):
                fitting.append(
                    largest_that_fits(
                        assembly.model,
                        accelerator,
                        plan.microbatch_sizes,
                        job.data.trial_batch,
                        multiple_of=active.precision.multiple_of,
                        usable=usable,
                        most_reserved=partial(torch.cuda.max_memory_reserved, device),
                    )
                )
    smallest = min(fitting)
    if smallest == 0:
        raise InputError(
            "`batch.microbatch: auto`: not even 1 pack fits into memory; by the plan, it needs "
            f"{plan.memory_text}; {SAVE_MEMORY}, or a shorter `data.length`"
        )
    return smallest


def largest_that_fits(
    model: PackedLanguageModel,
    accelerator: Accelerator,
    sizes: Sequence[int],
    make_batch: Callable[[int], Microbatch],
    *,
    multiple_of: int,
    usable: int,
    most_reserved: Callable[[], int],
) -> int:
    """Return the largest of `sizes` whose forward and backward fit into memory on every rank.

    sizes: the numbers of packs that a microbatch may have.
    make_batch: returns a microbatch of a given number of packs, with the documents of real packs.
    multiple_of: the number of tokens in a microbatch must be a multiple of this number.
    usable: the number of bytes on this device that a trial may use.
    most_reserved: returns the peak number of bytes that the last trial has reserved.

    Returns 0 if not even one pack fits. Leaves the model in training mode with zero gradients.

    Ranks may wait for each other within a trial. If one rank ran out of memory, the other ranks
    would wait forever. So the first trial has only half a pack. The memory of a larger trial is
    predicted from the memory that the smaller trials used, on the rank that used most. The larger
    trial runs only if the predicted memory is available.
    """
    # A model that was loaded from a folder is in evaluation mode, in which no layer is recomputed.
    model.train()
    # The smallest number of usable bytes on any rank.
    limit = -largest_over_ranks(accelerator, -usable)
    length = make_batch(1).max_seqlen
    half = math.ceil(length / (2 * multiple_of)) * multiple_of

    def most_used(packs: float) -> int:
        # Each size is compiled separately. Reset the compiler, because it stops compiling a
        # function after eight compilations.
        torch.compiler.reset()
        try:
            _run_two_passes(
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

    return largest_size_within(sorted(sizes), limit, most_used, half / length)


def largest_size_within(
    sizes: Sequence[int], limit: int, most_used: Callable[[float], int], first: float
) -> int:
    """Return the largest of `sizes` whose trial uses no more than `limit` bytes, or 0.

    sizes: numbers of packs, ascending.
    most_used: a function that runs a trial with a given number of packs, and returns the number of
        bytes that the trial used.
    first: the number of packs in the first trial, at most one. It may be a fraction of a pack.

    The memory of the next trial is predicted from the last two trials by a straight line. The line
    has an offset, because a large part of the memory is used at any size. A trial has at most four
    times the packs of the previous one, so that the prediction is corrected in time if memory
    does not grow linearly.
    """
    previous_packs = first
    previous_bytes = most_used(first)
    if previous_bytes > limit:
        return 0
    largest = int(first) if first in sizes else 0
    # Sizes that are predicted to fit. The next trial has the largest of them.
    candidates = [size for size in sizes if size > first][:1]
    while candidates:
        packs = candidates[-1]
        used = most_used(packs)
        if used > limit:
            sizes = [size for size in sizes if size < packs]
        else:
            largest = packs
        bytes_per_pack = max((used - previous_bytes) / (packs - previous_packs), 0)
        previous_packs = packs
        previous_bytes = used
        candidates = [
            size
            for size in sizes
            if largest < size <= 4 * packs and used + (size - packs) * bytes_per_pack <= limit
        ]
    return largest


def _run_two_passes(
    model: PackedLanguageModel, accelerator: Accelerator, batch: Microbatch
) -> None:
    """Run two forward and backward passes of `batch`, and then clear the gradients.

    On a GPU, the peak statistics of memory are reset first. The caller reads the peak afterwards.
    """
    device = accelerator.device
    # Free the tensors in reference cycles that a failed trial may have left.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        # Run two passes. During the second pass, the gradients of the first pass are in memory, as
        # in every microbatch of training except the first.
        for is_last in (False, True):
            with ExitStack() as contexts:
                if model.sharding and not is_last:
                    # Do not exchange gradients. Ranks that store the whole model must not wait for
                    # a rank that has run out of memory. With sharded parameters, ranks wait for
                    # each other in any case.
                    contexts.enter_context(model.sharding.accumulating())
                accelerator.backward(model(**inputs_of(batch, device)))
    finally:
        model.discard_partial_gradients()
        # Set gradients to zero without freeing them, because training keeps their memory too. Under
        # FSDP2 free them, because each step allocates new sharded gradients.
        model.zero_grad(set_to_none=accelerator.is_fsdp2)
        clear_main_gradients(model.parameters())


# ── Errors about full memory ──────────────────────────────────────────────────────────────────────


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes reports that device or host memory is full."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            part in str(error) for part in _MESSAGES
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Context manager that re-raises errors about full memory as InputError.

    The message lists settings that need less memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory: {one_line(error)}; {SAVE_MEMORY}. `--plan` prints the memory of a "
            "recipe. The checkpoints are intact: to continue, start the same command with one of "
            "these settings. If you change `weights`, `optimizer.moments` or "
            "`optimizer.gradients`, also pass --accept-changes"
        ) from None


# ── Parity ────────────────────────────────────────────────────────────────────────────────────────


def require_parity(run: Run) -> None:
    """Compare step 0 with plain transformers in each precision of the run, and print the results.

    The results are also recorded in the audit. All ranks must call this function. Raises
    TrainingHalted if a comparison has failed.
    """
    precisions = run.job.plan.precisions
    for active in precisions:
        with (
            run.console.progress("parity with plain transformers"),
            run.assembly.context.using(active),
        ):
            result = _compare_first_step(run)
        run.assembly.audits[active.name]["parity"] = (
            {"left_out": result} if isinstance(result, str) else result.record()
        )
        run.write_audit()
        prefix = f"{active.name}: " if len(precisions) > 1 else ""
        if isinstance(result, str):
            run.console.notice(f"{prefix}parity skipped: {result}")
        else:
            run.console.notice(f"{prefix}{result.summary()}")
            result.require()


def _compare_first_step(run: Run) -> Parity | str:
    """Compare part of step 0 in the present precision with plain transformers.

    All ranks must call this function.

    Returns the comparison, or a text with the reason if it is not possible. All ranks return the
    same result.
    """
    model, accelerator = run.assembly.model, run.accelerator
    if run.state.step:
        return (
            "the check compares only step 0, but this run starts with the weights of step "
            f"{run.state.step:,}"
        )
    if largest_over_ranks(
        accelerator, int(not _plain_model_fits(run.job, model, accelerator.device))
    ):
        return (
            "plain transformers in FP32 does not fit into memory beside the run "
            f"({PLAIN_BYTES} bytes per parameter)"
        )
    job = run.job
    # The value of `describe_shared_audit` if torch.compile compiles no layer.
    if run.assembly.audit["compiled"] == "nothing":
        microbatch = math.gcd(job.plan.expected_microbatch, PARITY_MICROBATCH)
        job = job.with_settings("batch", microbatch=microbatch)
    batches = job.batches(accelerator)
    first_step = batches.step(0)
    indices = batches.order.packs_at(first_step.places).tolist()

    def held_out_loss(microbatches: Iterable[Microbatch]) -> float:
        return metrics_from_sums(held_out_sums(model, microbatches, accelerator))["held_out_loss"]

    return check_parity(
        model,
        run.assembly.optimizer,
        first_step,
        [batches.packs[index] for index in indices],
        run.precision,
        accelerator,
        held_out_loss=held_out_loss,
        mask_boundaries=job.recipe.data.mask_boundaries,
    )


def _plain_model_fits(job: Job, model: PackedLanguageModel, device: torch.device) -> bool:
    """Return whether plain transformers in FP32 fits into this device's memory beside the model."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    parameters = sum(parameter.numel() for parameter in model.hf.parameters())
    heads = model.hf.config.get_text_config().num_attention_heads
    # The number of attention scores of one document. Plain transformers keeps them in memory. A
    # compared document has at most LONGEST tokens. The estimate is PLAIN_BYTES for each parameter
    # and for each score. A fifth of the free memory remains for all other tensors.
    scores = heads * min(job.recipe.data.length, LONGEST["cuda"]) ** 2
    return PLAIN_BYTES * (parameters + scores) < 0.8 * free
