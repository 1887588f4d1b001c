"""Train like `train_accelerate.py --profile`, but trace the last step of each rank.

    accelerate launch -m benchmarks.traced_training --profile RECIPE ...

The trace of each rank is in `traces/` in the run folder. `benchmarks.step_traces` reads the traces.
On a GPU, only the work of the GPU and its launches are traced, because tracing each operation of
the host would slow the host down. CUDA graphs stay on. On a CPU, each operation is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.launch import script

if __name__ == "__main__":
    script.before_imports()

from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile

import train_accelerate
from benchmarks.step_traces import TRACED
from pretrain.metrics.console import Console
from pretrain.observe.observers import Observer, Step


class StepTraces(Observer):
    """Trace the last steps on all ranks, and write the trace of the very last step.

    The step before the last one is traced to load the profiler.
    """

    observes_passes = False

    def __init__(
        self, folder: Path, accelerator: Accelerator, step: int, steps: int, console: Console
    ) -> None:
        """Take the arguments of `StepProfile`. `folder` is the run folder, `steps` the last step.

        The arguments `step` and `console` are not needed.
        """
        self._last = steps
        self._accelerator = accelerator
        self._path = folder / "traces" / f"rank_{accelerator.process_index}.json.gz"

    def due(self, step: Step) -> bool:
        """Return True if `step` is one of the last steps."""
        return step.number > self._last - TRACED

    @contextmanager
    def whole_step(self, step: Step) -> Iterator[None]:
        """Trace the step. All ranks start it together, after the first collective of the trace."""
        on_gpu = self._accelerator.device.type == "cuda"
        with profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        ) as trace:
            self._accelerator.wait_for_everyone()
            yield
        if step.number == self._last:
            self._path.parent.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(self._path))


if __name__ == "__main__":
    train_accelerate.StepProfile = StepTraces
    script.run_to_end(train_accelerate.main)
