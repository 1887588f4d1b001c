"""Train on packs that a packer process makes while the run trains (`data.streaming`).

The functions start the packer and wait for the packs of a step. They do nothing if all packs were
prepared before the run.
"""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator

from packing.batch import Prefetch, StepBatches
from packing.stream import PackerProcess
from pretrain.checkpoint.checkpoint import require_shared
from pretrain.metrics.run_folder import RunFolder
from pretrain.model.distributed import largest_over_ranks, raise_on_all_ranks
from pretrain.run.job import Job
from pretrain.run.resume_point import ResumePoint
from pretrain.run.run import Run

# A rank waits this number of seconds for its packs. If a rank still has no packs, all ranks decide
# together whether they continue to wait.
_WAIT_SECONDS = 0.5


def start_stream(
    job: Job, point: ResumePoint | None, folder: RunFolder, accelerator: Accelerator
) -> None:
    """Start the packer process of the job's stream on the main process.

    point: the checkpoint that the run continues from, or None.
    folder: the run folder. The packer is stopped when `folder` is closed.

    All ranks must call this function. Raises InputError if another run reads the same stream, or if
    the folder of the stream does not exist on one of the machines.
    """
    stream = job.data.stream
    if stream is None:
        return
    # Read from the first pack if there is no checkpoint, or if it belongs to another stream.
    saved = {} if point is None or point.is_of_another_stream(job) else point.state_json
    stream.start_at(saved.get("stream"))
    stream.packer = raise_on_all_ranks(
        lambda: (
            PackerProcess(job.recipe.data, stream.position) if accelerator.is_main_process else None
        )
    )
    if stream.packer is not None:
        folder.enter_context(stream.packer)
    require_shared(stream.path)


def wait_for_packs(run: Run, steps: Prefetch[StepBatches], stop_code: Callable[[], int]) -> int:
    """Wait until all ranks have the packs of the next step, and return 0.

    steps: the prefetched batches of this rank.
    stop_code: a function that returns a stop code above 0 if this rank should stop, else 0.

    If a rank should stop while others wait, return the largest stop code of all ranks. All ranks
    must call this function.

    This function also allows the packer to delete the packs of earlier steps. All ranks have
    already read the packs of earlier steps, because the last step needed the gradients of all
    ranks.
    """
    stream = run.job.data.stream
    if stream is None:
        return 0
    place = run.state.place
    stream.advance_to(range(place, place + run.job.plan.packs_per_step))
    with run.console.progress("waiting for packs"):
        while True:
            # A rank whose packs cannot be made is ready too. Then its stop code is above 0.
            is_ready = steps.wait_until_ready(_WAIT_SECONDS)
            if not largest_over_ranks(run.accelerator, int(not is_ready or stop_code() > 0)):
                return 0
            if code := largest_over_ranks(run.accelerator, stop_code()):
                return code
            stream.publish(waits=True)
