"""Train on packs that are made meanwhile: run the packer, and wait for its parts.

Each function does nothing for a run whose packs were prepared before.
"""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator

from packing.batch import Prefetch, StepBatches
from packing.stream import PackerProcess
from pretrain.checkpoint.checkpoint import require_shared
from pretrain.metrics.run_folder import RunFolder
from pretrain.model.distributed import largest_over_ranks, refused_together
from pretrain.run.job import Job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import Run

_LOOK = 0.5  # seconds that a rank waits before all ranks agree whether to wait on


def start_stream(
    job: Job, source: ResumePoint | None, folder: RunFolder, accelerator: Accelerator
) -> None:
    """Start the packer of the job's stream. It ends when the run `folder` is closed.

    Collective. Raises InputError if another run reads the stream, or if a machine does not see its
    folder.
    """
    stream = job.data.stream
    if stream is None:
        return
    continue_stream(job, source)
    is_first = accelerator.is_main_process
    stream.packer = refused_together(
        lambda: PackerProcess(job.recipe.data, stream.position) if is_first else None
    )
    if stream.packer is not None:
        folder.enter_context(stream.packer)
    require_shared(stream.path)


def continue_stream(job: Job, source: ResumePoint | None) -> None:
    """Read the stream from the place of the checkpoint `source` on.

    Without a checkpoint of this stream, the run starts at the first pack.
    """
    stream = job.data.stream
    if stream is None:
        return
    record = {} if source is None or source.is_of_another_stream(job) else source.record
    stream.start_at(record.get("stream"))


def wait_for_packs(
    run: Run, steps: Prefetch[StepBatches], reason_to_stop: Callable[[], int]
) -> int:
    """Wait until all ranks have the packs of the next step, and return 0.

    If a rank has a reason to stop meanwhile, return the largest reason of all ranks. The packer may
    delete the parts before the next step: this rank has read them, and so have all others, whose
    gradients are in the last step. Collective.
    """
    stream = run.job.data.stream
    if stream is None:
        return 0
    order = run.job.batches(run.accelerator, run.state.shift).order
    stream.advance_to(order.places_of_step(run.state.data_steps[0]))
    with run.console.progress("waiting for packs"):
        # `steps` are also ready if their packs will never come, which is a reason to stop.
        while largest_over_ranks(
            run.accelerator, int(not steps.ready(_LOOK) or reason_to_stop() > 0)
        ):
            if reason := largest_over_ranks(run.accelerator, reason_to_stop()):
                return reason
            stream.publish(waits=True)
    return 0
