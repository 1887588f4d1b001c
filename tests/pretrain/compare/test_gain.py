"""The interval of the gain at equal loss."""

from __future__ import annotations

import numpy as np

from pretrain.compare.differences import EQUIVALENT, SeedDifference
from pretrain.compare.verdicts import Protocol, Rounds, Verdict

PROTOCOL = Protocol(
    None, 0.003, ["bf16", "delayed"], {"bf16": 0.1, "delayed": 0.1}, 5.0, 5, 400, 80
)


def test_the_interval_of_the_gain_holds_after_every_round() -> None:
    """The true gain is 1. Loss and speed do not vary, and the slope does."""
    draw = np.random.default_rng(0)
    rounds = Rounds(PROTOCOL)
    cost = 0.01
    misses = 0
    for _ in range(300):
        slopes = draw.normal(-0.1, 0.02, 20)
        for seeds in range(3, 21):
            places = range(seeds)
            speedups = SeedDifference(dict.fromkeys(places, np.exp(cost / 0.1)), 1.0)
            served = SeedDifference(dict.fromkeys(places, cost), 2.0)
            verdict = Verdict("delayed", served, speedup=speedups.mean, word=EQUIVALENT)
            rounds._add_gain(
                verdict, speedups, SeedDifference(dict(enumerate(slopes[:seeds])), 0.0)
            )
            low, high = verdict.gain_interval or (0, np.inf)
            if not low <= 1 <= high:
                misses += 1
                break
    assert misses / 300 <= PROTOCOL.error


def test_the_interval_of_the_gain_is_not_negative() -> None:
    places = range(4)
    speedups = SeedDifference(dict(zip(places, (0.1, 2.0, 0.2, 2.2), strict=True)), 1.0)
    served = SeedDifference(dict.fromkeys(places, 0.0), 2.0)
    verdict = Verdict("delayed", served, speedup=speedups.mean, word=EQUIVALENT)
    rounds = Rounds(PROTOCOL)
    rounds._add_gain(verdict, speedups, SeedDifference(dict.fromkeys(places, -0.1), 0.0))
    assert verdict.gain_interval[0] == 0
