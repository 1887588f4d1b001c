"""The interval of the gain at equal loss."""

from __future__ import annotations

import numpy as np

from lab.compare.differences import Sample
from lab.experiments.protocol import Protocol
from lab.experiments.verdicts import gain_interval

SECONDS = {"bf16": 0.1, "delayed": 0.1}
PROTOCOL = Protocol(None, 0.003, ["bf16", "delayed"], SECONDS, 5.0, 5, 400, 80)


def test_the_interval_of_the_gain_holds_after_every_round() -> None:
    """The true gain is 1. Loss and speed do not vary, and the slope does."""
    draw = np.random.default_rng(0)
    cost = 0.01
    misses = 0
    for _ in range(300):
        slopes = draw.normal(-0.1, 0.02, 20)
        for seeds in range(3, 21):
            slope = Sample(dict(enumerate(slopes[:seeds])))
            if slope.interval(PROTOCOL.error)[1] >= 0:
                continue
            speedup = Sample(dict.fromkeys(range(seeds), np.exp(cost / 0.1)))
            loss = Sample(dict.fromkeys(range(seeds), cost))
            low, high = gain_interval(PROTOCOL, loss, slope, speedup)
            if not low <= 1 <= high:
                misses += 1
                break
    assert misses / 300 <= PROTOCOL.error


def test_the_interval_of_the_gain_is_not_negative() -> None:
    speedup = Sample(dict(enumerate((0.1, 2.0, 0.2, 2.2))))
    loss, slope = (Sample(dict.fromkeys(range(4), value)) for value in (0.0, -0.1))
    assert gain_interval(PROTOCOL, loss, slope, speedup)[0] == 0
