"""Every so many steps, what low precision does to the operands of a step: measured, written down, judged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pretrain.metrics.precision_health import PrecisionHealth
from pretrain.metrics.trackers import JsonlTracker
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.settings import ActivePrecision
from pretrain.precision.statistics import OperandStatistics, summary

STATISTICS_FILE = "fp8_statistics.jsonl"


class PrecisionWatch:
    """`fp8_statistics.jsonl` of a run, one line a step that is due, with an object for each operand of each product; the summary
    for `metrics.jsonl`; and what has begun to go wrong. Only the main process writes; every rank measures, as all of them must
    take the same time.
    """

    def __init__(
        self,
        context: PrecisionContext,
        active: ActivePrecision,
        every: int,
        folder: Path,
        *,
        resumed_step: int,
        main_process: bool,
    ) -> None:
        self.every = every
        self._context = context
        self._statistics = OperandStatistics(active, context.backend)
        self._health = PrecisionHealth(active)
        self._file = JsonlTracker(folder / STATISTICS_FILE, resumed_step) if main_process else None
        if self._file:
            self._file.start()

    def due(self, step: int) -> bool:
        """The first step, which shows how the run begins, and every n-th."""
        return step == 1 or step % self.every == 0

    def watching(self, step: int) -> AbstractContextManager[None]:
        """Around a microbatch of `step`, forward and backward."""
        return self._statistics.watching(self._context) if self.due(step) else nullcontext()

    def report(self, step: int) -> tuple[dict[str, float], str | None]:
        """What `step` adds to its line of metrics, and a warning if something has begun; nothing where it was not due."""
        if not self.due(step):
            return {}, None
        records = self._statistics.records()
        if self._file:
            self._file.log({"step": step, "operands": records})
        return summary(records), self._health.check(step, records)

    def finish(self) -> None:
        if self._file:
            self._file.finish()
