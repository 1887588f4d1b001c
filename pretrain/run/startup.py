"""Prepare the assembled model for its first step: observers, microbatch, parity."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from foundation.errors import InputError
from foundation.reading import one_line
from packing.batch import Microbatch
from pretrain.metrics.recorder import gradient_statistics
from pretrain.metrics.run_folder import STATISTICS_FILE
from pretrain.metrics.trackers import JsonlTracker
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import clear_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.routing import Routing
from pretrain.observe.audit import ProductAudit
from pretrain.observe.bf16_gap import GapMeter
from pretrain.observe.observers import Observer, Observers, PeriodicFigures
from pretrain.observe.operand_statistics import OperandWatch
from pretrain.observe.profile import StepProfile
from pretrain.observe.step_check import StepCheck
from pretrain.plan.memory import TAKES_LESS
from pretrain.run.assembly import Assembly, first_tokens
from pretrain.run.job import Job
from pretrain.run.run import Run
from pretrain.verify.parity import LONGEST, PLAIN_BYTES, Parity, check_parity

# Share of a device's memory that stays free for fragments, communication buffers and evaluation.
RESERVE = 0.04
# Packs of a microbatch of parity, if another shape than training's costs no compilation.
PARITY_MICROBATCH = 2
# Parts of messages. Libraries that allocate by themselves, and torch on a host, raise errors of
# other classes.
_MESSAGES = ("out of memory", "_ALLOC_FAILED", "can't allocate memory", "not enough memory")


# ── Observers ─────────────────────────────────────────────────────────────────────────────────────


def make_observers(run: Run, *, profiles: bool = False) -> Observers:
    """Return the observers of a run.

    profiles: record a step (`--profile`). Raises InputError if the run ends before that step.
    """
    recipe = run.job.recipe
    model = run.assembly.model
    optimizer = run.assembly.optimizer
    accelerator = run.accelerator
    every = recipe.log.fp8_statistics
    observers: list[Observer] = []
    if profiles:
        observers.append(StepProfile(run.folder.path, accelerator, run.state, run.console))
    if recipe.log.gap:
        # Before other observers of the passes, so that they do not see its pass in BF16.
        observers.append(GapMeter(model, optimizer, run.precision, run.health, recipe, accelerator))
    observers += [
        ProductAudit(model, run.precision, every, run.write_audit),
        StepCheck(model, optimizer, recipe, accelerator),
        PeriodicFigures(
            recipe.log.gradient_statistics,
            partial(gradient_statistics, model.hf, decoder_layers(model.hf), accelerator),
        ),
    ]
    if model.routing is not None:
        observers.append(PeriodicFigures(every, partial(_expert_loads, model.routing)))
    if every and model.context.backends:
        file = JsonlTracker(
            run.folder.path / STATISTICS_FILE,
            run.state.step,
            main_process=accelerator.is_main_process,
        )
        file.start()
        observers.append(OperandWatch(run.precision, every, file, run.console))
    return Observers(observers, run.precision, run.state.step)


def _expert_loads(routing: Routing) -> dict[str, Any]:
    """Return the share of tokens of each expert, for metrics.jsonl. Empty before any step."""
    loads = routing.loads
    return {} if loads is None else {"expert_loads": loads.double().round(decimals=3).tolist()}


# ── The microbatch ────────────────────────────────────────────────────────────────────────────────


def choose_microbatch(
    job: Job, assembly: Assembly, resumed: Mapping[str, Any] | None, accelerator: Accelerator
) -> int:
    """Return what `batch.microbatch: auto` means, in packs.

    It is the microbatch of the `resumed` state, or the largest one that fits now in each precision
    of the run. On a CPU it is the largest one that is expected to fit.

    The plan's estimate of memory includes neither the choices of the compiler nor the fragments of
    the allocator. Keeping the microbatch keeps the order of all sums, so the resumed run repeats
    the uninterrupted one bit for bit.
    """
    plan = job.plan
    device = accelerator.device
    if (
        resumed is not None
        and resumed["world_size"] == accelerator.num_processes
        and resumed["microbatch"] in plan.microbatch_sizes
    ):
        return resumed["microbatch"]
    if device.type != "cuda":
        # Host memory that runs out ends a process, so it cannot be tried.
        return plan.expected_microbatch
    usable = int((1 - RESERVE) * torch.cuda.get_device_properties(device).total_memory)
    fitting = []
    with assembly.context.preserving_state():
        for active in plan.precisions:
            with assembly.precision.using(active.precision.name):
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
            "`batch.microbatch: auto`: not even 1 pack fits into memory; what takes less: a "
            f"shorter `data.length`, {TAKES_LESS}"
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
    """Return the largest of `sizes` whose forward and backward fit on every rank.

    sizes: packs of a microbatch.
    make_batch: makes a microbatch of a number of packs, with documents as they lie in the packs.
    multiple_of: the precision takes numbers of tokens that are multiples of it.
    usable: bytes of this device.
    most_reserved: returns the bytes that the last trial took.

    Returns 0 if not even 1 pack fits. Leaves the model in training mode, its gradients zero.

    Ranks may wait for each other within a trial, and a rank that runs out of memory would leave the
    others waiting. So trials grow from half a pack, and each size is predicted to fit from the
    smaller ones on the fullest rank.
    """
    model.train()  # a model from a folder is in evaluation mode, and then recomputes no layer
    limit = -largest_over_ranks(accelerator, -usable)
    length = make_batch(1).max_seqlen
    half = math.ceil(length / (2 * multiple_of)) * multiple_of

    def most_used(packs: float) -> int:
        # Each size compiles anew, and the compiler gives up on a function compiled eight times.
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
    sizes: Sequence[int], limit: int, most_used: Callable[[float], int], first: float = 0.5
) -> int:
    """Return the largest of `sizes` whose trial uses no more than `limit` bytes, or 0.

    sizes: packs, ascending.
    most_used: tries a number of packs and returns the bytes used.
    first: the first trial, part of a pack or one pack.

    Memory is assumed to grow linearly in packs from the last two trials, because much of it is used
    at any size. Sizes grow at most fourfold, so that a deviation from linear growth shows.
    """
    fewer, less = first, most_used(first)  # packs and bytes of the last trial
    if less > limit:
        return 0
    largest = int(first) if first in sizes else 0
    following = [size for size in sizes if size > first][:1]
    while following:
        packs = following[-1]
        used = most_used(packs)
        if used > limit:
            sizes = [size for size in sizes if size < packs]
        else:
            largest = packs
        bytes_per_pack = max((used - less) / (packs - fewer), 0)
        fewer, less = packs, used
        following = [
            size
            for size in sizes
            if (largest or packs) < size <= 4 * packs
            and used + (size - packs) * bytes_per_pack <= limit
        ]
    return largest


def _try(model: PackedLanguageModel, accelerator: Accelerator, batch: Microbatch) -> None:
    """Run two forwards and backwards of `batch`, and measure the peak memory from here on.

    Gradients are cleared afterwards.
    """
    device = accelerator.device
    gc.collect()  # reference cycles of a trial that failed
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        # The second pass has gradients in memory, as every later microbatch has.
        for is_last in (False, True):
            with ExitStack() as contexts:
                if model.sharding and not is_last:
                    # Ranks that hold the whole model must not wait for one that has run out of
                    # memory. With shards they wait in any case.
                    contexts.enter_context(model.sharding.accumulating())
                accelerator.backward(model(**inputs_of(batch, device)))
    finally:
        model.discard_partial_gradients()
        # Zeroed, not freed: every trial needs the gradients' memory. Shards get new ones each step.
        model.zero_grad(set_to_none=accelerator.is_fsdp2)
        clear_main_gradients(model.parameters())


# ── Memory that runs out ──────────────────────────────────────────────────────────────────────────


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes reports that a device or the host is full."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if any(part in str(error) for part in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Raise InputError with the settings that take less memory if memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory: {one_line(error)}. What takes less: {TAKES_LESS}; `--plan` says how "
            "much. Checkpoints are untouched: the same command with one of these goes on, with "
            "--accept-changes where `weights` or `optimizer` differ"
        ) from None


# ── Parity ────────────────────────────────────────────────────────────────────────────────────────


def find_parity(run: Run) -> list[Parity | str]:
    """Compare step 0 with plain transformers in each precision of the run. Collective.

    Each result is the comparison or the reason why there is none. The audit has it too.
    """
    results = []
    comparisons = sum(3 if active.precision.quantized else 2 for active in run.job.plan.precisions)
    with run.console.progress("parity with plain transformers", "comparisons", total=comparisons):
        for name, in_model in run.precision.in_model.items():
            with run.precision.using(name):
                result = _compare_first_step(run)
            record = {"left_out": result} if isinstance(result, str) else result.record()
            in_model.audit["parity"] = {"source": "this run"} | record
            results.append(result)
    return results


def require_parity(run: Run, parity: Sequence[Parity | str]) -> None:
    """Print the results of `find_parity`, and raise TrainingHalted if a comparison failed."""
    for active, result in zip(run.job.plan.precisions, parity, strict=False):
        name = f"{active.precision.name}: " if len(parity) > 1 else ""
        if isinstance(result, str):
            run.console.notice(f"{name}parity left out: {result}")
        else:
            run.console.notice(f"{name}{result.summary()}")
            result.require()


def _compare_first_step(run: Run) -> Parity | str:
    """Compare part of step 0 in the present precision. Return why if that is not possible.

    The result is the same on every rank.
    """
    model, accelerator = run.assembly.model, run.accelerator
    if run.state.step:
        return (
            "step 0 is compared only, and this run begins with the weights of step "
            f"{run.state.step:,}"
        )
    if largest_over_ranks(accelerator, int(not _fits(run.job, model, accelerator.device))):
        return (
            "plain transformers in FP32 does not fit beside the run "
            f"({PLAIN_BYTES} bytes a parameter)"
        )
    job = run.job
    if run.assembly.audit["compiled"] == "nothing":
        job = job.with_settings(
            "batch", microbatch=math.gcd(job.plan.expected_microbatch, PARITY_MICROBATCH)
        )
    batches = job.batches(accelerator)
    return check_parity(
        model,
        run.assembly.optimizer,
        batches.step(0),
        [batches.packs[index] for index in batches.order.packs_of_step(0).tolist()],
        run.precision.current.active,
        accelerator,
        mask_boundaries=job.recipe.data.mask_boundaries,
    )


def _fits(job: Job, model: PackedLanguageModel, device: torch.device) -> bool:
    """Return whether plain transformers in FP32 fits beside the model."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    parameters = sum(parameter.numel() for parameter in model.hf.parameters())
    heads = model.hf.config.get_text_config().num_attention_heads
    scores = heads * min(job.recipe.data.length, LONGEST["cuda"]) ** 2  # of attention
    return PLAIN_BYTES * (parameters + scores) < 0.8 * free
