"""Health checks: when a step is skipped, rolled back, stopped or warned about."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.metrics.health import CONSECUTIVE_SKIPS, Health, HealthState, StepDecision
from pretrain.settings.recipe import HealthSettings

UPDATE = StepDecision("update")


def health(**settings: str) -> Health:
    return Health(HealthSettings(**settings))


def health_after(losses: Iterable[float], **settings: str) -> Health:
    """Return a Health that has checked steps with these losses and accepted them all."""
    checked = health(**settings)
    for step, loss in enumerate(losses, start=1):
        assert checked.check(step, float(loss), 1.0) == UPDATE
    return checked


def noisy(level: float, steps: int, noise: float, seed: int = 0) -> np.ndarray:
    return level + np.random.default_rng(seed).normal(0, noise, steps)


@pytest.mark.parametrize(
    ("loss", "norm", "message"),
    [(math.nan, 1.0, "loss is nan"), (2.0, math.inf, "gradient norm is inf")],
)
def test_a_value_that_is_not_finite_stops_the_run_with_a_remedy(loss, norm, message):
    decision = health().check(812, loss, norm, can_go_back=True)
    assert decision.action == "stop"
    assert message in decision.reason and "weights are those of step 811" in decision.reason
    for words in ("optimizer.learning_rate", "health.on_nan", "from an earlier checkpoint"):
        assert words in decision.remedy
    assert "start again" in health().check(2, math.nan, 1.0).remedy, "there is no checkpoint yet"


@pytest.mark.parametrize("key", ["on_nan", "on_spike"])
def test_rollbacks_are_limited_and_need_a_checkpoint(key):
    checked = health_after(noisy(2, 40, 0.1), **{key: "rollback"})
    bad = math.nan if key == "on_nan" else 9.0
    assert "no checkpoint yet" in checked.check(41, bad, 1.0).reason
    for done in range(3):
        decision = checked.check(41, bad, 1.0, can_go_back=True)
        assert decision.action == "rollback"
        checked.state = HealthState(**json.loads(json.dumps(asdict(checked.state))))
        checked.state.rollbacks = done + 1
    stop = checked.check(41, bad, 1.0, can_go_back=True)
    assert stop.action == "stop" and "3 times already" in stop.reason


@pytest.mark.parametrize(("key", "bad"), [("on_spike", 4.0), ("on_nan", math.nan)])
def test_skipped_losses_are_not_recorded_and_skips_in_a_row_are_limited(key, bad):
    checked = health_after(noisy(2, 100, 0.05), **{key: "skip"})
    before = checked.state.losses
    decisions = [checked.check(101 + i, bad, 1.0) for i in range(CONSECUTIVE_SKIPS + 1)]
    actions = [decision.action for decision in decisions]
    assert actions == ["skip"] * CONSECUTIVE_SKIPS + ["stop"]
    assert "weights are those of step 100" in decisions[-1].reason
    assert checked.state.losses == before
    remedy = decisions[-1].remedy
    assert f"{key}: rollback" in remedy and f"{key}: skip" not in remedy, "skip is already set"


@given(
    start=st.floats(4, 12),
    end=st.floats(1, 3.5),
    time_scale=st.floats(3, 400),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 2**32 - 1),
)
def test_training_from_scratch_raises_no_alarm(start, end, time_scale, noise, seed):
    steps = np.arange(400)
    curve = end + (start - end) * np.exp(-steps / time_scale)
    health_after(curve + np.random.default_rng(seed).normal(0, noise, len(steps)), on_spike="stop")


@given(
    losses=st.lists(st.floats(0.5, 12) | st.just(math.nan), min_size=1, max_size=260),
    cut=st.integers(0, 259),
)
def test_a_resumed_run_decides_like_an_uninterrupted_one(losses, cut):
    def decide(checked: Health, first_step: int, losses: list[float]) -> list[StepDecision]:
        return [checked.check(step, loss, 1.0) for step, loss in enumerate(losses, first_step)]

    cut = min(cut, len(losses))
    uninterrupted = health(on_nan="skip")
    expected = decide(uninterrupted, 0, losses)
    stopped = health(on_nan="skip")
    decisions = decide(stopped, 0, losses[:cut])
    resumed = health(on_nan="skip")
    resumed.state = HealthState(**json.loads(json.dumps(asdict(stopped.state), allow_nan=False)))
    decisions += decide(resumed, cut, losses[cut:])
    assert decisions == expected
    assert resumed.state == uninterrupted.state


def test_every_spike_is_warned_of_once():
    checked = health_after(noisy(2, 40, 0.01), on_spike="warn")
    reasons = [checked.check(41 + i, loss, 1.0).reason for i, loss in enumerate((9, 9, 2, 9))]
    assert ["jumped to 9" in (reason or "") for reason in reasons] == [True, False, False, True]


def test_lost_updates_starved_experts_and_no_labels_are_warned_of_once():
    checked = health()
    (lost,) = checked.warnings_of(1, 0.2, 5, {})
    (unlabelled,) = checked.warnings_of(2, 0.2, 0, {})
    (starved,) = checked.warnings_of(3, 0.2, 0, {"starved_experts": 0.06})
    assert list(checked.warnings_of(4, 0.2, 0, {"starved_experts": 0.06})) == []
    assert "20.0 %" in lost and "weights: bf16_exact" in lost
    assert "batch.tokens" in unlabelled and "router_aux_loss_coef" in starved


def test_the_loss_of_a_step_without_labels_is_not_recorded():
    labelled = health(on_spike="warn")
    mixed = health(on_spike="warn")
    for step in range(1, 41):
        labelled.check(step, 3.0 + step % 2 / 10, 1.0)
        mixed.check(step, 3.0 + step % 2 / 10, 1.0)
        assert mixed.check(step, 0.0, 0.0, labelled=False).reason is None
    assert mixed.state == labelled.state
    decision = mixed.check(41, 0.0, math.nan, labelled=False)
    assert decision == labelled.check(41, 0.0, math.nan), "its gradient is checked"
