"""A step enters the hooks of the observers that are due, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.overrides import overridden
from packing.batch import StepBatches
from pretrain.observe.observers import Observer, Observers, Step, StepWatch, is_due
from pretrain.precision.schedule import PrecisionSchedule
from tests.pretrain.conftest import active_in

BATCHES = StepBatches([], 0, 0, 0)


class Recorder(Observer):
    """Record the names of the hooks that are called."""

    def __init__(self, name: str, calls: list[str], due: bool = True) -> None:
        self.name, self.calls, self.is_due = name, calls, due
        self.steps: list[Step] = []
        for hook in ("whole_step", "passes", "first_microbatch", "update"):
            setattr(self, hook, lambda *arguments, hook=hook: self.enclosing(hook))

    def due(self, step: Step) -> bool:
        self.steps.append(step)
        return self.is_due

    @contextmanager
    def enclosing(self, hook: str) -> Iterator[None]:
        self.calls.append(f"{self.name} {hook}")
        yield
        self.calls.append(f"{self.name} {hook} ends")

    def metrics(self, step: Step) -> dict[str, int]:
        return {self.name: step.number}


def steps_described(
    schedule: PrecisionSchedule,
    numbers: Iterable[int],
    *,
    resumed_step: int = 0,
    every: int | None = 100,
) -> list[Step]:
    """Return the steps that an observer is asked about."""
    recorder = Recorder("a", [])
    observers = Observers([recorder], schedule, resumed_step, every)
    for number in numbers:
        with observers.step(number):
            pass
    return recorder.steps


BF16 = active_in("bf16", "torch")
TWO_PHASES = PrecisionSchedule([(5, active_in("nvfp4")), (None, BF16)], 20)
THREE_PHASES = PrecisionSchedule(
    [(8, active_in("nvfp4")), (12, active_in("mxfp8")), (None, BF16)], 20
)


def test_two_steps_are_new_at_start_phase_change_and_rollback() -> None:
    steps = steps_described(TWO_PHASES, range(3, 12), resumed_step=2)
    assert [step.number for step in steps if step.is_new] == [3, 4, 6, 7]
    assert [step.number for step in steps if step.measures_operands] == []
    assert [step.number for step in steps if step.is_quantized] == [3, 4, 5]
    # As a rollback makes the observers
    steps = steps_described(TWO_PHASES, range(10, 14), resumed_step=9)
    assert [step.number for step in steps if step.is_new] == [10, 11]


@given(number=st.integers(1, 20), every=st.none() | st.integers(1, 5))
def test_operands_are_measured_at_a_precisions_start_and_every_n_steps(number, every):
    (step,) = steps_described(THREE_PHASES, range(number, number + 1), every=every)
    is_multiple = every is not None and number % every == 0
    assert is_due(number, every) == is_multiple
    is_measured = number in (1, 9) or (is_multiple and number <= 12)
    assert step.measures_operands == (every is not None and is_measured)


def test_hooks_are_entered_in_order_and_exited_in_reverse() -> None:
    calls: list[str] = []
    observers = [Recorder("a", calls), Recorder("b", calls), Recorder("idle", calls, due=False)]
    with Observers(observers, TWO_PHASES, 0, None).step(3) as watch:
        with watch.passes(BATCHES, 0), watch.first_microbatch():
            pass
        assert watch.metrics() == {"a": 3, "b": 3}
        with watch.update(0.1, 2, {}):
            pass
    assert calls == [
        *("a whole_step", "b whole_step"),
        *("a passes", "b passes", "a first_microbatch", "b first_microbatch"),
        *("b first_microbatch ends", "a first_microbatch ends", "b passes ends", "a passes ends"),
        *("a update", "b update", "b update ends", "a update ends"),
        *("b whole_step ends", "a whole_step ends"),
    ]


def test_an_error_in_a_step_exits_the_hooks_of_all_observers() -> None:
    class Watching(Observer):
        is_entered = False

        @contextmanager
        def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
            with overridden(self, is_entered=True):
                yield

    outer, inner = Watching(), Watching()
    watch = StepWatch(Step(3, True, False, False), [outer, inner])
    with pytest.raises(ValueError), watch.passes(BATCHES, 0):
        assert outer.is_entered and inner.is_entered
        raise ValueError
    assert not outer.is_entered and not inner.is_entered
