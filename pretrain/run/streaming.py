"""A run on packs that are made meanwhile (`packing.stream`): who makes them, where the run is, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from accelerate import Accelerator

from packing.batch import Prefetch, StepBatches
from packing.stream import PackerProcess, StreamedPacks
from pretrain.checkpoint.checkpoint import require_shared
from pretrain.model.distributed import largest_over_ranks, refused_together
from pretrain.run.job import Job
from pretrain.run.run import Run

_LOOK = 0.5  # seconds that a rank waits for packs, until all say whether they go on waiting


@contextmanager
def packing_stream(job: Job, accelerator: Accelerator) -> Iterator[None]:
    """A block in which a process of its own makes the packs of the job's stream, once `StreamedPacks.begin` says from where.
    Entering it is collective, leaving is not. InputError where another run has the folder."""
    stream = job.data.stream
    stream.packing = refused_together(
        lambda: PackerProcess(job.recipe.data) if accelerator.is_main_process else None
    )
    with stream.packing or nullcontext():
        require_shared(stream.path)
        yield


def tell_stream(run: Run, stream: StreamedPacks) -> None:
    """Tells the stream, between steps, which packs the next step reads. The parts before them may go: this process has read them,
    and so have all others, whose gradients are in the last step."""
    order = run.job.batches(run.accelerator, run.state.shift).order
    stream.reads(order.places_of_step(run.state.data_steps[0]))


def wait_for_packs(
    run: Run, steps: Prefetch[StepBatches], reason_to_stop: Callable[[], int]
) -> int:
    """Return once the next step's packs are there on all ranks, with 0, or a rank has a reason to stop, with the largest that any
    has. Collective. What the run waits for packs is a part of the time that the user waits.

    `steps` are ready, too, where no more packs come, and `next` raises that: so the reason is asked for after them.
    """
    with run.console.progress("waiting for packs"):
        while largest_over_ranks(
            run.accelerator, int(not steps.ready(_LOOK) or reason_to_stop() > 0)
        ):
            if stopped_by := largest_over_ranks(run.accelerator, reason_to_stop()):
                return stopped_by
    return 0
