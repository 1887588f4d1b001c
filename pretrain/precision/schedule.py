"""The precision of each training step: one for the whole run, or several one after the other.

A schedule is computed from the recipe, the precisions that the machine supports, and the number of
steps. It does not depend on the state of the run, so a resumed run has the same schedule. The only
exception is the switch to BF16 that `health.on_gap` can cause: a checkpoint stores the step of the
switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pretrain.precision.settings import ActivePrecision, label, last_steps

# The end of a phase, and the precision that this machine uses in the phase. The end is a share of
# all steps, a step, or None for the last phase.
Phase = tuple[float | int | None, ActivePrecision]


@dataclass(frozen=True)
class Span:
    """Consecutive steps with the same precision, from `first` to `last`, both included.

    The first step of a run has the number 1.
    """

    first: int
    last: int
    active: ActivePrecision


@dataclass(frozen=True)
class PrecisionSchedule:
    """The precision of each step of a run.

    phases: the phases of the recipe, in order.
    steps: the number of steps of the run.
    unquantized: the unquantized precision with which `log.gap` compares the quantized precisions.
        After a switch, the run computes in this precision. None if no phase is quantized.
    switched: the phases of the run after `health.on_gap` switched it to `unquantized`. None if the
        run was not switched.
    """

    phases: Sequence[Phase]
    steps: int
    unquantized: ActivePrecision | None = None
    switched: Sequence[Phase] | None = None

    def switched_to_bf16_after(self, step: int | None) -> PrecisionSchedule:
        """Return a copy of the schedule with the precision `unquantized` after `step`.

        If `step` is None or the last step, the copy has no switch.
        """
        planned = replace(self, switched=None)
        if step is None or step >= self.steps or self.unquantized is None:
            return planned
        return replace(planned, switched=[*planned.until(step), (None, self.unquantized)])

    def until(self, step: int) -> list[Phase]:
        """Return the phases of the steps up to `step`, each with its last step."""
        return [(min(span.last, step), span.active) for span in self.spans if span.first <= step]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the run in the order of their steps.

        If the run was switched to `unquantized`, the last span begins after the switch. Raise
        InputError if a phase would have no step.
        """
        phases = self.switched or self.phases
        ends = last_steps([until for until, _ in phases], self.steps)
        firsts = [1, *(end + 1 for end in ends)]
        return tuple(
            Span(first, end, active)
            for first, end, (_, active) in zip(firsts, ends, phases, strict=False)
        )

    @property
    def changes(self) -> bool:
        """Return True if the run changes its precision."""
        return len(self.spans) > 1

    def at(self, step: int) -> ActivePrecision:
        """Return the precision of `step`.

        A step after the last step of the run has the precision of the last step.
        """
        return next(span.active for span in self.spans if min(step, self.steps) <= span.last)

    def precisions(self, *, and_unquantized: bool = False) -> list[ActivePrecision]:
        """Return the precisions of the run without duplicates, in the order of the steps.

        With `and_unquantized`, append `unquantized` if it is not among them.
        """
        listed = [span.active for span in self.spans]
        if and_unquantized and self.unquantized is not None:
            listed.append(self.unquantized)
        return list({active.precision.name: active for active in listed}.values())

    @property
    def label(self) -> str:
        """Return a readable text, such as "delayed" or "delayed to 80 %, then bf16"."""
        phases = self.switched or self.phases
        names = [{"until": until, "use": active.precision.name} for until, active in phases]
        return label(names) or ""
