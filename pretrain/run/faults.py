"""What may happen to a run from outside: memory that runs out, packs that cannot be read. One message, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from foundation.errors import InputError
from packing.batch import Prefetch, StepBatches
from pretrain.plan.preflight import Job
from pretrain.plan.remedies import is_out_of_memory, out_of_memory
from pretrain.run import determinism
from pretrain.run.running import Run


class Stop(IntEnum):
    """Why ranks leave, where it is no signal. Above all numbers of signals: ranks agree on the largest."""

    PACKS_FAILED, SAVE_FAILED = 997, 998


@contextmanager
def explaining_errors(job: Job, run: Run | None = None) -> Iterator[None]:
    """InputError with the settings that take less where a device, or the host, runs out of memory inside, and for an operation
    that `deterministic` rules out."""
    try:
        with determinism.explaining():
            yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        when = f"after step {run.state.step}" if run and run.state.step else "before the first step was done"
        raise InputError(out_of_memory(job.plan, error, when)) from None


def fault_of(run: Run, steps: Prefetch[StepBatches]) -> int:
    """SAVE_FAILED of `Stop` where the checkpoint being written cannot be, PACKS_FAILED where no more packs come of a stream or
    those of the next of `steps` cannot be read, else 0; also 0 before this run's first step, when nothing can be lost. A rank
    knows only of the files that it writes and the packs that it reads itself; every rank knows that no more packs come."""
    if run.state.step == run.resumed_step:
        return 0
    if run.checkpoints.failed:
        return Stop.SAVE_FAILED
    stream = run.job.data.stream
    return Stop.PACKS_FAILED if (stream is not None and stream.failure) or steps.failure else 0


def why_no_packs(run: Run, steps: Prefetch[StepBatches]) -> BaseException:
    """The error to raise for PACKS_FAILED, once the step in memory is saved. All ranks call it, and then save."""
    step, stream, error = run.state.step, run.job.data.stream, steps.failure
    reason = (stream.failure if stream else None) or error or "another process or machine has no more packs, and says why"
    if error is None or isinstance(error, InputError):
        return InputError(f"{reason}. Step {step} is saved")
    error.add_note(f"Step {step} is saved")
    return error
