"""`--profile`: where the time of one step goes, by torch's profiler: a trace, and a table of its kernels or operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from torch.profiler import profile

from foundation.errors import InputError
from foundation.files import replace_file
from pretrain.checkpoint.state import TrainState

# the step of this process that is recorded: by then everything is compiled and caches are warm
PROFILED = 5
ROWS = 40  # of the table
TRACE_FILE, TABLE_FILE = "profile.json.gz", "profile.md"


class StepProfile:
    """Records one step of this process into `folder`; only the main process does."""

    def __init__(self, folder: Path, accelerator: Accelerator, state: TrainState) -> None:
        """InputError where the run, which is about to begin, ends before that step."""
        self.step = state.step + PROFILED
        self._folder, self._device, self._records = (
            folder,
            accelerator.device,
            accelerator.is_main_process,
        )
        if self.step > state.steps:
            raise InputError(
                f"`--profile` records step {self.step}, and the run ends with step {state.steps}; train longer"
            )

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Put this around every `step`, which ends when the device has; it does nothing but for the one to record."""
        if step != self.step or not self._records:
            yield
            return
        with profile() as recorded:  # all that is computed; it waits for the device before it ends
            yield
        recorded.export_chrome_trace(str(self._folder / TRACE_FILE))
        by = f"self_{self._device.type}_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=80)
        replace_file(self._folder / TABLE_FILE, f"```\n{table}\n```\n".encode())
