"""`--profile`: record one step with torch's profiler, and write a trace and a table of kernels.

The recorded step runs without CUDA graphs, so that the trace names the operation of each kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from torch.profiler import profile

from foundation.errors import InputError
from foundation.files import replace_file
from pretrain.metrics.console import Console
from pretrain.observe.observers import Observer, Step

# The fifth step of the process is recorded. The first four steps compile all functions and
# fill all caches.
PROFILED = 5
# The number of kernels in the table.
ROWS = 40
TRACE_FILE = "profile.json.gz"
TABLE_FILE = "profile.md"


class StepProfile(Observer):
    """Record one step of the main process, and write its profile to the run folder."""

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        resumed_step: int,
        last_step: int,
        console: Console,
    ) -> None:
        """Choose the step to record, which is PROFILED steps after `resumed_step`.

        folder: the run folder.
        resumed_step: the step of the loaded checkpoint, or 0 without a checkpoint.
        last_step: the number of the run's last step.

        Raises InputError if the run ends before the chosen step.
        """
        self._number = resumed_step + PROFILED
        self._folder = folder
        self._device = accelerator.device
        self._records = accelerator.is_main_process
        self._console = console
        if self._number > last_step:
            raise InputError(
                f"`--profile` records step {self._number}, but the run ends with step "
                f"{last_step}; raise `train.steps`, `train.tokens` or `train.epochs`"
            )

    def due(self, step: Step) -> bool:
        """Return True if `step` is the step to record.

        The other processes observe this step too, because all processes must use CUDA graphs in the
        same steps.
        """
        return step.number == self._number

    @contextmanager
    def whole_step(self, step: Step) -> Iterator[None]:
        """Record the step. The profiler waits until the device has finished the step."""
        if not self._records:
            yield
            return
        with profile() as recorded:
            yield
        trace_file = self._folder / TRACE_FILE
        # Replace an existing link. The profiler would write to the file that the link refers to.
        trace_file.unlink(missing_ok=True)
        recorded.export_chrome_trace(str(trace_file))
        table = recorded.key_averages().table(
            sort_by=f"self_{self._device.type}_time_total",
            row_limit=ROWS,
            max_name_column_width=80,
        )
        table_file = self._folder / TABLE_FILE
        replace_file(table_file, f"```\n{table}\n```\n".encode())
        self._console.notice(f"profile of this step: {table_file}")
