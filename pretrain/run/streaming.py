"""A run on packs that are made meanwhile (`packing.stream`): who makes them, where the run is, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from accelerate import Accelerator

from foundation.errors import InputError
from packing.batch import Prefetch, StepBatches
from packing.packer import PackerProcess
from pretrain.checkpoint.checkpoint import require_shared
from pretrain.model.distributed import from_all_ranks, largest_over_ranks, refused_together
from pretrain.plan.preflight import Job
from pretrain.run.running import Run

_LOOK = 0.5  # seconds that a rank waits for packs, until all say whether they go on waiting


def pack_stream(job: Job, accelerator: Accelerator) -> None:
    """Take the folder of the packs, which all machines share. Packs are made once
    `begin_stream` says from where. Collective. InputError where another run has the folder. Does nothing for prepared packs."""
    stream = job.data.stream
    if stream is None:
        return

    if len(set(from_all_ranks(stream.fingerprint))) > 1:
        raise InputError(
            f"{stream.path}: not all processes see the same text: their first parts differ; give every machine the same source, "
            "tokenizer and settings, and remove the folder where it is of another"
        )
    stream.packing = refused_together(lambda: PackerProcess(job.recipe.data) if accelerator.is_main_process else None)
    require_shared(stream.path)


def tell_stream(run: Run) -> None:
    """Tells the stream, between steps, which packs the next step reads. The parts before them may go: this process has read them,
    and so have all others, whose gradients are in the last step."""
    stream, state = run.job.data.stream, run.state
    if stream is not None:
        order = run.job.batches(run.accelerator, state.shift).order
        stream.reads(order.places_of_step(state.data_steps[0]))


def wait_for_packs(run: Run, steps: Prefetch[StepBatches], asked: Callable[[], int]) -> int:
    """Return once the next step's packs are there on all ranks, with 0, or a rank is `asked` to stop, with the largest that any
    is asked. Collective. What the run waits for packs is a part of the time that the user waits.

    `steps` are ready, too, where no more packs come, and `next` raises that: so it is looked whether a rank is asked after them.
    """
    if run.job.data.stream is None:
        return 0
    with run.waited.on("packs", "waiting for packs"):
        while largest_over_ranks(run.accelerator, int(not steps.ready(_LOOK) or asked() > 0)):
            if found := largest_over_ranks(run.accelerator, asked()):
                return found
    return 0


def reading_stream(job: Job) -> AbstractContextManager[None]:
    """Put this around the steps: no thread goes on waiting for packs when they are over."""
    return job.data.stream.waiting() if job.data.stream else nullcontext()


@contextmanager
def ending_stream(job: Job) -> Iterator[None]:
    """A block with whose end no more packs are made. For a process that may end by an error: not collective."""
    try:
        yield
    finally:
        if job.data.stream is not None and job.data.stream.packing is not None:
            job.data.stream.packing.close()
