"""Every so many steps, what low precision does to the operands of a step: measured, written down, and judged.

A warning comes once when operands lose more than the recipe does by nature, with what to change. It only warns: a run goes on
with much underflow, only worse, and whether that is worth a restart is not for a threshold to say. The limits, and the
measurements behind them, are in docs/verification.md.

State stays in the process. A resumed run says again what is still so: whoever resumed it may not have read the first warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from foundation.units import percent
from pretrain.metrics.run_folder import STATISTICS_FILE
from pretrain.metrics.trackers import JsonlTracker
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import ActivePrecision
from pretrain.precision.statistics import Condition, OperandStatistics, conditions, summary

Record = Mapping[str, Any]

PASSED = 0.5  # a condition is over once its share is below this part of its limit; between the two it neither begins nor ends
NEVER_SCALED = 1.0  # the delayed scale of an operand that no step has quantized yet: what it loses now, the next step will not


class PrecisionHealth:
    """The running judgement of one run in a quantized precision; call `check` with each due step's records."""

    def __init__(self, active: ActivePrecision) -> None:
        self.conditions = conditions(active)
        self._keeps_history = active.precision.keeps_history
        self._standing: set[Condition] = set()
        self._dead: set[tuple[str, str]] = set()

    def check(self, step: int, records: Sequence[Record]) -> str | None:
        """What has begun at `step`, for the user to read; None if nothing has."""
        scaled = [record for record in records if not (self._keeps_history and record["scale"] == NEVER_SCALED)]
        begun = [warning for condition in self.conditions if (warning := self._warning(condition, scaled))]
        dead = {(record["layer"], record["operand"]) for record in records if record["amax"] == 0}
        if new := sorted(dead - self._dead):  # no scale helps them, and their layer is idle
            begun.append(
                f"{' '.join(new[0])} is all zeros, of {len(new)} such operands. Its products are zero in any precision: see "
                "whether the weights it began with are whole; a lower `optimizer.learning_rate` keeps layers from dying"
            )
        self._dead = dead
        return f"step {step}: {'; '.join(begun)}" if begun else None

    def _warning(self, condition: Condition, records: Sequence[Record]) -> str | None:
        concerned = [record for record in records if record["operand"] in condition.roles]
        worst = max(concerned, key=lambda record: record[condition.share], default=None)
        share = worst[condition.share] if worst else 0.0
        if share < condition.limit * PASSED:
            self._standing.discard(condition)
        if share <= condition.limit or condition in self._standing:
            return None
        self._standing.add(condition)
        above = sum(record[condition.share] > condition.limit for record in concerned)
        return (
            f"{percent(share)} of {worst['layer']}'s {worst['operand']} {condition.what} ({above} of {len(concerned)} such "
            f"operands are above {percent(condition.limit)}). {condition.remedy}"
        )


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
        confirming: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """`confirming`: entered around what is measured of a step, to audit it once more."""
        self.every = every
        self._confirming = confirming
        self._context = context
        self.go_over_to(active, first_step=1)
        self._file = JsonlTracker(folder / STATISTICS_FILE, resumed_step) if main_process else None
        if self._file:
            self._file.start()

    def go_over_to(self, active: ActivePrecision, first_step: int) -> None:
        """Measure the operands of `active`, in which the context computes from `first_step` on; nothing where it has none."""
        backend = self._context.backend
        self._first = first_step
        self._statistics = None if backend is None else OperandStatistics(active, backend)
        self._health = None if backend is None else PrecisionHealth(active)

    def due(self, step: int) -> bool:
        """The first step, which shows how the run begins, or goes on in another precision, and every n-th."""
        return self._statistics is not None and (step == self._first or step % self.every == 0)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Put this around a microbatch of `step`, forward and backward."""
        if not self.due(step):
            yield
            return
        with self._confirming(step), self._statistics.watching(self._context):
            yield

    def report(self, step: int) -> tuple[dict[str, float], str | None]:
        """What `step` adds to its line of metrics, and a warning if something has begun; nothing where it was not due."""
        if not self.due(step):
            return {}, None
        records = self._statistics.records()
        if self._file:
            self._file.log({"step": step, "operands": records})
        return summary(records), self._health.check(step, records)

    def go_back(self, step: int) -> None:
        if self._file:
            self._file.go_back(step)

    def finish(self) -> None:
        if self._file:
            self._file.finish()
