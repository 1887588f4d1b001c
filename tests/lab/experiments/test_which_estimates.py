"""Estimates of `which`: tokens for equal loss, and the smallest number of seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.compare.differences import (
    LossDifference,
    fewest_seeds,
)
from lab.experiments.protocol import Protocol
from lab.experiments.verdicts import loss_slope, tokens_for
from pretrain.metrics.run_record import RunRecord
from tests.lab.made_runs import RECIPE


@pytest.mark.parametrize("power", [0.1, 0.28, 0.4])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_tokens_for_equal_loss_agree_with_a_power_law(
    power: float,
    decay: float,
    tmp_path: Path,
) -> None:
    """The mean of ten answers over five seeds, on E + A D^-a, is within 5 % of the solution.

    The loss is 2.5 at the end, its slope 0.18 per unit of ln(tokens), and the noise of a step 0.03.
    A decay lowers the loss further. The candidate is 0.3 % worse.
    """
    draw = np.random.default_rng(0)
    cost = 0.0075
    slope = 0.18
    steps = np.arange(1, 1001)
    share = steps / 1000
    losses = 2.5 + slope / power * (share**-power - 1) - 0.1 * np.maximum(0.0, share - 1 + decay)
    config = RECIPE | {"train": {"steps": 1000}, "schedule": {"kind": "wsd", "decay": decay}}
    protocol = Protocol(None, 0.003, ["bf16"], {"bf16": 1.0}, 0.0, 5, 1000, 200)
    extra_tokens = []
    for _ in range(10):
        slopes = []
        for _ in range(5):
            noisy = losses + draw.normal(0, 0.03, len(losses))
            pairs = zip(steps.tolist(), noisy.tolist(), strict=True)
            metrics = [{"step": step, "loss": loss} for step, loss in pairs]
            slopes.append(loss_slope(RunRecord(tmp_path, config, {}, metrics, {})))
        extra_tokens.append(tokens_for(protocol, cost, np.mean(slopes)) - 1)
    expected = (1 - power * cost / slope) ** (-1 / power) - 1
    assert np.mean(extra_tokens) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("candidates", "seeds"), [(1, 3), (2, 4), (4, 4), (40, 5)])
def test_fewest_seeds_are_the_first_with_a_finite_interval(candidates: int, seeds: int) -> None:
    error = 0.05 / candidates
    assert fewest_seeds(error) == seeds
    fewer = LossDifference(dict(enumerate(range(seeds - 1))), 1.0)
    assert fewer.half_width(error) is None
    enough = LossDifference(dict(enumerate(range(seeds))), 1.0)
    assert enough.half_width(error) is not None
