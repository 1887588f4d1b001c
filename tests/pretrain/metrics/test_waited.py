"""Every second belongs to one part of what the user waited for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pretrain.metrics.waited import Waited, since_the_command

PARTS = st.sampled_from(["packs", "checks", "training", "evaluation", "saves", "end"])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(walk=st.lists(st.tuples(PARTS, st.booleans(), st.integers(0, 1000)), max_size=20), already=st.integers(0, 1000))
def test_parts_add_up_to_the_time_that_has_passed_however_they_are_nested(walk, already):
    clock = Clock()
    waited = Waited(shown=False, already=already, clock=clock)
    inside = []
    for part, nested, seconds in walk:
        if nested:
            inside.append(waited.on(part, "a task"))
            inside[-1].__enter__()
        else:
            waited.go_on_to(part)
        clock.now += seconds
        if inside and not nested:
            inside.pop().__exit__(None, None, None)
    for each in reversed(inside):
        each.__exit__(None, None, None)
    assert sum(waited.seconds().values()) == already + clock.now


def test_a_wait_within_another_part_is_taken_out_of_it():
    clock = Clock()
    waited = Waited(shown=False, already=8.0, clock=clock)
    waited.go_on_to("training")
    clock.now += 10
    with waited.on("evaluation", "evaluating"):
        clock.now += 3
    clock.now += 20
    assert waited.seconds() == {"start": 8.0, "training": 30.0, "evaluation": 3.0}
    assert waited.describe() == "41 s: start 8.0 s, training 30 s, evaluation 3.0 s"


def test_the_command_began_before_now():
    assert 0 < since_the_command() < 24 * 3600
