"""Observe training steps: the base class of observers, and the objects that call their hooks.

A run has a list of observers. Each observer chooses the steps that it observes (`Observer.due`),
and overrides the hooks that it needs. In a step that no observer has chosen, no hook is called, and
the step costs no additional time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from packing.batch import StepBatches
from pretrain.precision.schedule import PrecisionSchedule


def is_due(step: int, every: int | None) -> bool:
    """Return whether `step` is a multiple of `every`. Return False if `every` is None."""
    return every is not None and step % every == 0


@dataclass(frozen=True)
class Step:
    """The properties of a training step. `Observer.due` uses them to decide about the step."""

    # The number of the step. The first step of a run has number 1.
    number: int
    # True if matrix products compute in low precision.
    is_quantized: bool
    # True in the first two steps of this process, the first two steps after a rollback, and the
    # first two steps of each phase of precision. The second step is included because it is the
    # first step with updated weights.
    is_new: bool
    # True in a statistics step, in which operands are measured. With `log.fp8_statistics: n`, these
    # are the quantized steps whose number is a multiple of n, and the first step of each quantized
    # phase.
    measures_operands: bool


class Observer:
    """Base class of observers. Each hook does nothing unless a subclass overrides it.

    The hooks of a step are called in the order of their definition. Hooks that are context managers
    may raise an exception when the caller's `with` statement ends. All hooks except `whole_step`
    may communicate between ranks, so all ranks must call these hooks.
    """

    # True if hooks run between the kernels of a microbatch, which a CUDA graph does not allow.
    observes_passes = True

    def due(self, step: Step) -> bool:
        """Return whether the hooks of this observer are called in `step`.

        The result must be the same on all ranks. Otherwise only some of them would run the step
        with CUDA graphs, and wait for the others forever.
        """
        raise NotImplementedError

    @contextmanager
    def whole_step(self, step: Step) -> Iterator[None]:
        """Enclose the whole step, from the wait for its packs until the end of its update."""
        yield

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Enclose forward and backward of all microbatches.

        place: the position, in the order of packs, of the first pack that the step must use.
        """
        yield

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Enclose forward and backward of the first microbatch.

        The first microbatch quantizes the weights. The other microbatches use the cached quantized
        weights.
        """
        yield

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return metrics for the step's line in metrics.jsonl.

        The gradients of the step are complete and not yet cleared when this hook is called.
        """
        return {}

    @contextmanager
    def update(
        self, step: Step, learning_rate: float, past_updates: int, losses: Mapping[str, float]
    ) -> Iterator[None]:
        """Enclose the optimizer's step.

        past_updates: the number of updates of the run before this step.
        losses: the step's losses as metrics.jsonl gets them, see `PackedLanguageModel.mean_losses`.
        """
        yield


@dataclass
class StepWatch:
    """A step and its due observers. Each method calls one hook of all these observers."""

    step: Step
    observers: Sequence[Observer]

    @property
    def observes_passes(self) -> bool:
        """Return whether a due observer sets `Observer.observes_passes`."""
        return any(observer.observes_passes for observer in self.observers)

    def passes(self, batches: StepBatches, place: int) -> AbstractContextManager[None]:
        """Return a context manager that enters `Observer.passes` of each due observer."""
        return _all_of(observer.passes(self.step, batches, place) for observer in self.observers)

    def first_microbatch(self) -> AbstractContextManager[None]:
        """Return a context manager that enters `Observer.first_microbatch` of each due observer."""
        return _all_of(observer.first_microbatch(self.step) for observer in self.observers)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of all due observers in one dict."""
        metrics: dict[str, Any] = {}
        for observer in self.observers:
            metrics |= observer.metrics(self.step)
        return metrics

    def update(
        self, learning_rate: float, past_updates: int, losses: Mapping[str, float]
    ) -> AbstractContextManager[None]:
        """Return a context manager that enters `Observer.update` of each due observer."""
        return _all_of(
            observer.update(self.step, learning_rate, past_updates, losses)
            for observer in self.observers
        )


@dataclass
class Observers:
    """All observers of a run.

    observers: the observers, in the order of their hook calls.
    schedule: the precision of each step, which determines the phases.
    resumed_step: the step of the loaded checkpoint, or 0 without a checkpoint. The step after it is
        the first step of this process.
    statistics_every: `log.fp8_statistics`, or None if there are no statistics steps.
    """

    observers: Sequence[Observer]
    schedule: PrecisionSchedule
    resumed_step: int
    statistics_every: int | None

    @contextmanager
    def step(self, number: int) -> Iterator[StepWatch]:
        """Enclose step `number` of the run, and yield the StepWatch with its due observers."""
        phase_starts = [first for first, *_ in self.schedule.spans]
        is_quantized = self.schedule.at(number).precision.quantized
        is_statistics_step = self.statistics_every is not None and (
            number in phase_starts or is_due(number, self.statistics_every)
        )
        first_steps = (self.resumed_step + 1, *phase_starts)
        step = Step(
            number,
            is_quantized=is_quantized,
            is_new=any(number in (first, first + 1) for first in first_steps),
            measures_operands=is_quantized and is_statistics_step,
        )
        due = [observer for observer in self.observers if observer.due(step)]
        with _all_of(observer.whole_step(step) for observer in due):
            yield StepWatch(step, due)


@contextmanager
def _all_of(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter the contexts in order. After `yield`, exit them in reverse order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
