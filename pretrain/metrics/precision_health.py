"""Every so many steps, what low precision does to the operands of a step: measured, written down, and judged.

A warning comes once a process when operands lose more than the recipe does by nature, with what to change. It only warns: a run
goes on with much underflow, only worse, and whether that is worth a restart is not for a threshold to say. The limits, and the
measurements behind them, are in docs/verification.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from foundation.overrides import overridden
from foundation.units import percent
from pretrain.metrics.trackers import JsonlTracker
from pretrain.precision.observed import OperandStatistics, summary
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import ActivePrecision

Record = Mapping[str, Any]

# the share of values that scales from earlier steps may cut; others cut none
LOST_TO_LATE_SCALES = 1e-3
# Of each share: what happens to its values, and what to change.
LOSSES = {
    "underflow": (
        "becomes zero",
        "`precision=mxfp8`, `fp8_config.fp8_format: HYBRID` for gradients, or layers in BF16 (`fp8_config.keep_bf16_layers`)",
    ),
    "saturation": (
        "is cut to the format's maximum",
        "`precision=current`, `fp8_config.amax_compute_algo: max` or a larger `fp8_config.margin`",
    ),
}
# the delayed scale of an operand that no step has quantized yet: what it loses now, the next step
# will not
NEVER_SCALED = 1.0


@dataclass
class PrecisionWatch:
    """`fp8_statistics.jsonl` of a run, one line a step that is due, with an object for each operand of each product; the summary
    for `metrics.jsonl`; and what has begun to go wrong. Every rank measures, as all of them must take the same time.
    """

    context: PrecisionContext
    every: int  # steps between those that are due
    file: JsonlTracker
    # entered around what is measured of a step, to audit it once more
    confirming: Callable[[int], AbstractContextManager[None]]

    def go_over_to(self, active: ActivePrecision, first_step: int) -> None:
        """Measure the operands of `active`, in which the context computes from `first_step` on; nothing where it has none."""
        self._first, self._active, self._told = first_step, active, set[str]()

    def due(self, step: int) -> bool:
        """The first step, which shows how the run begins, or goes on in another precision, and every n-th."""
        return self.context.backend is not None and (step == self._first or step % self.every == 0)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Put this around a microbatch of `step`, forward and backward."""
        if not self.due(step):
            yield
            return
        self._statistics = OperandStatistics(
            self._active, self.context.state(), self.context.groups
        )
        with (
            self.confirming(step),
            overridden(self.context, observers=[*self.context.observers, self._statistics]),
        ):
            yield

    def report(self, step: int) -> tuple[dict[str, float], str | None]:
        """What `step` adds to its line of metrics, and a warning if something has begun; nothing where it was not due."""
        if not self.due(step):
            return {}, None
        records = self._statistics.records()
        self.file.log({"step": step, "operands": records})
        return summary(records), self.judge(step, records)

    def judge(self, step: int, records: Sequence[Record]) -> str | None:
        """What is wrong at `step` and was not told before, for the user to read; None where nothing is."""
        precision, warnings = self._active.precision, []
        late = precision.keeps_history
        scaled = [record for record in records if not (late and record["scale"] == NEVER_SCALED)]
        for share, limit in {
            "underflow": precision.underflow_limit,
            "saturation": LOST_TO_LATE_SCALES if late else 1.0,
        }.items():
            above = [record for record in scaled if record[share] > limit]
            if above and share not in self._told:
                self._told.add(share)
                worst, (what, remedy) = max(above, key=lambda record: record[share]), LOSSES[share]
                warnings.append(
                    f"{percent(worst[share])} of {worst['layer']}'s {worst['operand']} {what} ({len(above)} of {len(scaled)} "
                    f"operands are above {percent(limit)}); {remedy} loses less"
                )
        return f"step {step}: {'; '.join(warnings)}" if warnings else None
