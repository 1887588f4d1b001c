"""Every second belongs to one part of what the user waited for."""

from __future__ import annotations

from pretrain.metrics.waited import Waited, since_the_command


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_within_another_part_is_taken_out_of_it():
    clock = Clock()
    waited = Waited(shown=False, already=8.0, clock=clock)
    waited.go_on_to("training")
    clock.now += 10
    with waited.on("evaluation", "evaluating"):
        clock.now += 3
    clock.now += 20
    assert waited.describe() == "41 s: start 8.0 s, training 30 s, evaluation 3.0 s"


def test_the_command_began_before_now():
    assert 0 < since_the_command() < 24 * 3600
