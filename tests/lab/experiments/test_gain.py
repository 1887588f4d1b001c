"""Estimates of `which`: the tokens for equal loss, and the interval of the gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.compare.differences import LossDifference, Sample
from lab.experiments.protocol import Protocol
from lab.experiments.verdicts import gain_interval, loss_slope, tokens_for
from pretrain.metrics.run_record import RunRecord
from tests.lab.made_runs import RECIPE

SECONDS = {"bf16": 0.1, "delayed": 0.1}
PROTOCOL = Protocol(None, 0.003, ["bf16", "delayed"], SECONDS, 5.0, 5, 400, 80)


@pytest.mark.parametrize(("power", "decay"), [(0.1, 0.2), (0.28, 0.0), (0.4, 0.2)])
def test_tokens_for_equal_loss_agree_with_a_power_law(
    power: float, decay: float, tmp_path: Path
) -> None:
    """The mean of 50 seeds, on E + A D^-a, is within 5 % of the solution.

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
    slopes = []
    for _ in range(50):
        noisy = (losses + draw.normal(0, 0.03, len(losses))).tolist()
        metrics = [{"step": step, "loss": loss} for step, loss in enumerate(noisy, start=1)]
        slopes.append(loss_slope(RunRecord(tmp_path, config, {}, metrics, {})))
    expected = (1 - power * cost / slope) ** (-1 / power) - 1
    protocol = replace(PROTOCOL, steps=1000, trunk=200)
    assert tokens_for(protocol, cost, np.mean(slopes)) - 1 == pytest.approx(expected, rel=0.05)


def test_the_fit_ends_in_the_middle_if_the_rate_decays_earlier(tmp_path: Path) -> None:
    """The loss follows the power law from 30 % of the fitted steps to their end."""
    steps = np.arange(1, 1001)
    losses = np.where((steps > 150) & (steps <= 500), 2 + (steps / 1000) ** -0.3, 9.0)
    config = RECIPE | {"train": {"steps": 1000}, "schedule": {"kind": "wsd", "decay": 0.8}}
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    slope = loss_slope(RunRecord(tmp_path, config, {}, metrics, {}))
    assert slope == pytest.approx(-0.3)


def test_the_interval_of_the_gain_holds_after_every_round() -> None:
    """The true gain is 1. Loss and speed do not vary, and the slope does."""
    draw = np.random.default_rng(0)
    cost = 0.01
    misses = 0
    for _ in range(150):
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
    assert misses / 150 <= PROTOCOL.error


# Losses as served, slopes and speeds by seed.
SLOPE = Sample({1: -0.20, 2: -0.21, 3: -0.19, 4: -0.20})
SPEED = Sample(dict.fromkeys(range(1, 5), 1.0))


def test_a_lower_served_loss_is_a_gain() -> None:
    """The interval contains the gain at all ends of the intervals of loss and slope."""
    served = replace(PROTOCOL, served="nvfp4")
    assert tokens_for(PROTOCOL, -0.02, -0.2) == 1
    assert tokens_for(served, -0.02, -0.2) == pytest.approx(np.exp(-0.1))
    assert tokens_for(replace(PROTOCOL, settings={"delayed": {}}), -0.02, -0.2) < 1
    loss = LossDifference({1: -0.020, 2: -0.021, 3: -0.019, 4: -0.020}, 2.0)
    low, high = gain_interval(served, loss, SLOPE, SPEED)
    ends = [
        1 / tokens_for(served, of_loss, of_slope)
        for of_loss in loss.interval(PROTOCOL.error)
        for of_slope in SLOPE.interval(PROTOCOL.error)
    ]
    assert [low, high] == pytest.approx([min(ends), max(ends)]) and low > 1


def test_a_gain_after_a_checkpoint_leaves_one_step() -> None:
    """The loss falls by more than all steps after the checkpoint lower it."""
    protocol = replace(PROTOCOL, begin_with="step", steps=1000, trunk=900, served="nvfp4")
    assert tokens_for(protocol, -0.001, -0.2) == pytest.approx(1 - 10 * (1 - np.exp(-0.005)))
    assert tokens_for(protocol, -0.04, -0.2) == 1 / 100
    loss = LossDifference({1: -0.040, 2: -0.041, 3: -0.039, 4: -0.040}, 2.0)
    low, high = gain_interval(protocol, loss, SLOPE, SPEED)
    assert 1 < low <= high
    unsure = Sample(dict(enumerate((0.1, 2.0, 0.2, 2.2))))
    assert gain_interval(protocol, loss, SLOPE, unsure)[0] == 0, "no gain is negative"
