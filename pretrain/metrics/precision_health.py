"""Every so many steps, what low precision does to the operands of a step: measured, written down, and judged.

A warning comes once a process when operands lose more than the recipe does by nature, with what to change. It only warns: a run
goes on with much underflow, only worse, and whether that is worth a restart is not for a threshold to say. The limits, and the
measurements behind them, are in docs/verification.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from foundation.overrides import overridden
from foundation.units import percent
from pretrain.metrics.trackers import JsonlTracker
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.model_precision import ModelPrecision
from pretrain.precision.observed import OperandStatistics, summary

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

    precision: ModelPrecision
    every: int  # steps between those that are due
    file: JsonlTracker
    # entered around what is measured of a step, to audit it once more
    confirming: Callable[[int], AbstractContextManager[None]]
    _told: set[str] = field(default_factory=set)

    def due(self, step: int) -> bool:
        """The first step, which shows how the run begins, or goes on in another precision, and every n-th."""
        schedule = self.precision.schedule
        return schedule.at(step).precision.quantized and (
            schedule.begins(step) or step % self.every == 0
        )

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Put this around a microbatch of `step`, forward and backward."""
        if not self.due(step):
            yield
            return
        context = self.precision.context
        self._statistics = OperandStatistics(
            self.precision.current.active, context.state(), context.groups
        )
        with (
            self.confirming(step),
            overridden(context, observers=[*context.observers, self._statistics]),
        ):
            yield

    def report(self, step: int) -> tuple[dict[str, float], str | None]:
        """What `step` adds to its line of metrics, and a warning if something has begun; nothing where it was not due."""
        if not self.due(step):
            return {}, None
        records = self._statistics.records()
        self.file.log({"step": step, "operands": records})
        if self.precision.schedule.begins(step):
            self._told.clear()
        return summary(records), self.judge(step, self.precision.current.active.precision, records)

    def judge(
        self, step: int, precision: QuantizedPrecision, records: Sequence[Record]
    ) -> str | None:
        """What is wrong at `step` and was not told before, for the user to read; None where nothing is."""
        warnings = []
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
