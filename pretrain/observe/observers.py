"""Observe training steps: one interface for everything that looks at a step.

A run has a list of observers. Each decides when it is due, and overrides the hooks that it
needs. On other steps the list is empty, and a step costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from packing.batch import StepBatches
from pretrain.metrics.health import StepDecision
from pretrain.precision.model_precision import ModelPrecision


def is_due(step: int, every: int | None) -> bool:
    """Return whether `step` is a multiple of `every`. None means never."""
    return every is not None and step % every == 0


@dataclass(frozen=True)
class Step:
    """A training step, as far as observers decide by it whether they are due."""

    number: int  # counted from 1
    is_quantized: bool  # products compute in low precision
    # The run's first step, or its first one in another precision.
    starts_precision: bool
    # The first or second step of this process, after a rollback, or of a phase. The second one is
    # the first that uses updated weights.
    is_new: bool

    def measures_operands(self, every: int | None) -> bool:
        """Return whether statistics of operands are due (`log.fp8_statistics`)."""
        if every is None or not self.is_quantized:
            return False
        return self.starts_precision or is_due(self.number, every)


class Observer:
    """Base class of observers. Each hook does nothing unless a subclass overrides it.

    The hooks of a step are called in the order of their definition. Those that are context managers
    may raise when they end. All hooks but `whole_step` may be collective.
    """

    # The gradients of the first microbatch must not be exchanged yet when its hook ends.
    separates_first_microbatch = False

    def due(self, step: Step) -> bool:
        """Return whether this observer looks at `step`."""
        raise NotImplementedError

    @contextmanager
    def whole_step(self, step: Step) -> Iterator[None]:
        """Enclose the step, from waiting for its packs to the end of its update."""
        yield

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Enclose forward and backward of all microbatches.

        place: the place in the stream where the step's packs must begin.
        """
        yield

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Enclose forward and backward of the first microbatch, which quantizes the weights."""
        yield

    def judge(self, step: Step, decision: StepDecision) -> StepDecision:
        """Return `decision`, or another one, about a step whose gradients are complete."""
        return decision

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return figures for the step's line of metrics. Gradients are still complete."""
        return {}

    @contextmanager
    def update(self, step: Step, learning_rate: float, updates: int) -> Iterator[None]:
        """Enclose the optimizer's step. `updates` is the number of updates before it."""
        yield

    def finish(self) -> None:
        """Close files at the end of the run."""


@dataclass(eq=False)
class PeriodicFigures(Observer):
    """Compute figures for metrics.jsonl every n steps."""

    every: int | None
    compute: Callable[[], dict[str, Any]]

    def due(self, step: Step) -> bool:
        """Return True in every n-th step. Never if `every` is None."""
        return is_due(step.number, self.every)

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return the figures."""
        return self.compute()


@dataclass
class StepWatch:
    """One step, with the observers that are due in it."""

    step: Step
    due: Sequence[Observer]

    @property
    def separates_first_microbatch(self) -> bool:
        """Return whether any observer needs the gradients of the first microbatch alone."""
        return any(observer.separates_first_microbatch for observer in self.due)

    def whole_step(self) -> AbstractContextManager[None]:
        """Enclose the step in `Observer.whole_step` of each observer."""
        return _all_of(observer.whole_step(self.step) for observer in self.due)

    def passes(self, batches: StepBatches, place: int) -> AbstractContextManager[None]:
        """Enclose forward and backward in `Observer.passes` of each observer."""
        return _all_of(observer.passes(self.step, batches, place) for observer in self.due)

    def first_microbatch(self) -> AbstractContextManager[None]:
        """Enclose the first microbatch in `Observer.first_microbatch` of each observer."""
        return _all_of(observer.first_microbatch(self.step) for observer in self.due)

    def judge(self, decision: StepDecision) -> StepDecision:
        """Return the decision of health after each observer has judged it."""
        for observer in self.due:
            decision = observer.judge(self.step, decision)
        return decision

    def metrics(self) -> dict[str, Any]:
        """Return the figures of all observers."""
        figures: dict[str, Any] = {}
        for observer in self.due:
            figures |= observer.metrics(self.step)
        return figures

    def update(self, learning_rate: float, updates: int) -> AbstractContextManager[None]:
        """Enclose the optimizer's step in `Observer.update` of each observer."""
        return _all_of(observer.update(self.step, learning_rate, updates) for observer in self.due)


@dataclass
class Observers:
    """The observers of a run. Their hooks are entered in this order.

    They see the steps after `resumed_step`.
    """

    observers: Sequence[Observer]
    precision: ModelPrecision
    resumed_step: int

    @contextmanager
    def step(self, number: int) -> Iterator[StepWatch]:
        """Enclose step `number`, counted from 1. Return the watch over it."""
        schedule = self.precision.schedule
        starts = [self.resumed_step + 1, *(span.first for span in schedule.spans)]
        step = Step(
            number,
            is_quantized=schedule.at(number).precision.quantized,
            starts_precision=schedule.starts_precision_at(number),
            is_new=any(number - start in (0, 1) for start in starts),
        )
        watch = StepWatch(step, [observer for observer in self.observers if observer.due(step)])
        with watch.whole_step():
            yield watch

    def finish(self) -> None:
        """Close the files of all observers."""
        for observer in self.observers:
            observer.finish()


@contextmanager
def _all_of(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter the contexts in order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
