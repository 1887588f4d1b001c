"""The precision of each training step: one for the whole run, or several one after the other.

A schedule is computed from the recipe, the precisions that the machine supports, and the number of
steps. It does not depend on the state of the run, so a resumed run has the same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foundation.settings import last_steps
from pretrain.precision.settings import ActivePrecision, label

# The end of a phase, and the precision that this machine uses in the phase. The end is a share of
# all steps, a step, or None for the last phase.
Phase = tuple[float | int | None, ActivePrecision]


@dataclass(frozen=True)
class PrecisionSchedule:
    """The precision of each step of a run. The first step of a run has the number 1.

    phases: the phases of the recipe, in order.
    steps: the number of steps of the run.
    """

    phases: Sequence[Phase]
    steps: int

    @cached_property
    def spans(self) -> list[tuple[int, int, ActivePrecision]]:
        """Return the first step, the last step and the precision of each phase.

        Raise InputError if a phase would have no step.
        """
        ends = last_steps("precision", [until for until, _ in self.phases], self.steps)
        firsts = [1, *(end + 1 for end in ends)]
        actives = [active for _, active in self.phases]
        # No phase starts at the last number of `firsts`, the step after the run.
        return list(zip(firsts, ends, actives, strict=False))

    @property
    def changes(self) -> bool:
        """Return True if the run changes its precision."""
        return len(self.spans) > 1

    def at(self, step: int) -> ActivePrecision:
        """Return the precision of `step`.

        A step after the last step of the run has the precision of the last step.
        """
        return next(active for _, last, active in self.spans if min(step, self.steps) <= last)

    @property
    def precisions(self) -> list[ActivePrecision]:
        """Return the precisions of the run without duplicates, in the order of the steps."""
        return list({active.name: active for *_, active in self.spans}.values())

    @property
    def quantizes(self) -> bool:
        """Return True if a phase of the run is quantized."""
        return any(active.precision.quantized for active in self.precisions)

    @property
    def label(self) -> str:
        """Return a readable text, such as "delayed" or "delayed to 80 %, then bf16"."""
        names = [{"until": until, "use": active.name} for until, active in self.phases]
        return label(names) or ""
