"""The precision of each training step: one for the whole run, or several in turn.

A schedule follows from the recipe, the precisions that the machine has, and the number of steps,
not from the state of a run. So a resumed run has the same schedule, and a checkpoint stores only
the step of a switch to BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pretrain.precision.settings import ActivePrecision, label, last_steps

# The end of a phase as the recipe states it (a share of all steps, a step, or None for the last
# phase), and the precision that the machine has for it.
Phase = tuple[float | int | None, ActivePrecision]


@dataclass(frozen=True)
class Span:
    """Consecutive steps in one precision. Steps count from 1, and `last` is one of them."""

    first: int
    last: int
    active: ActivePrecision


@dataclass(frozen=True)
class PrecisionSchedule:
    """The precision of each step of a run.

    phases: of the recipe, in order.
    steps: the number of steps of the run.
    unquantized: the precision that `log.gap` compares with and that a switch leads to. None if no
        phase is quantized.
    switched_after: the step after which the run computes in `unquantized` (`health.on_gap`).
    """

    phases: Sequence[Phase]
    steps: int
    unquantized: ActivePrecision | None = None
    switched_after: int | None = None

    def switched_to_bf16_after(self, step: int | None) -> PrecisionSchedule:
        """Return the schedule with a switch after `step`, or without any switch if it is None."""
        return replace(self, switched_after=step)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the steps of each precision, in order.

        Raises InputError if a phase would have no step.
        """
        ends = last_steps([until for until, _ in self.phases], self.steps)
        firsts = [1, *(end + 1 for end in ends)]
        spans = tuple(
            Span(first, end, active)
            for first, end, (_, active) in zip(firsts, ends, self.phases, strict=False)
        )
        switch = self._switch
        if switch is None:
            return spans
        before = [span for span in spans if span.first < switch.first]
        return (*(replace(span, last=min(span.last, switch.first - 1)) for span in before), switch)

    @property
    def changes(self) -> bool:
        """Return whether the run has more than one span."""
        return len(self.spans) > 1

    def at(self, step: int) -> ActivePrecision:
        """Return the precision of `step`. Steps beyond the horizon have that of the last step."""
        return next(span.active for span in self.spans if min(step, self.steps) <= span.last)

    def starts_precision_at(self, step: int) -> bool:
        """Return whether `step` is the run's first step, or its first one in another precision."""
        return step == 1 or self.at(step).precision.name != self.at(step - 1).precision.name

    def precisions(self, *, and_unquantized: bool = False) -> list[ActivePrecision]:
        """Return each precision of the run once, in the order of its steps.

        With `and_unquantized`, the precision that `log.gap` compares with comes last.
        """
        listed = [span.active for span in self.spans]
        if and_unquantized and self.unquantized is not None:
            listed.append(self.unquantized)
        return list({active.precision.name: active for active in listed}.values())

    @property
    def label(self) -> str:
        """Return the schedule for people, such as "delayed" or "delayed to 80 %, then bf16"."""
        phases = list(self.phases)
        if self._switch is not None:
            phases = [(span.last, span.active) for span in self.spans]
            phases[-1] = (None, self.spans[-1].active)
        names = [{"until": until, "use": active.precision.name} for until, active in phases]
        return label(names) or ""

    @property
    def _switch(self) -> Span | None:
        """Return the steps after a switch to `unquantized`, or None without such steps."""
        after = self.switched_after
        if self.unquantized is None or after is None or after >= self.steps:
            return None
        return Span(after + 1, self.steps, self.unquantized)
