from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.metrics.health import CONSECUTIVE_SKIPS, Health, HealthState, StepDecision
from pretrain.settings.recipe import HealthSettings

UPDATE = StepDecision("update")


def health(**settings) -> Health:
    return Health(HealthSettings(**settings))


def fed(losses, **settings) -> Health:
    watched = health(**settings)
    for step, loss in enumerate(losses, start=1):
        assert watched.check(step, float(loss), 1.0) == UPDATE
    return watched


def noisy(level: float, steps: int, noise: float, seed: int = 0) -> np.ndarray:
    return level + np.random.default_rng(seed).normal(0, noise, steps)


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [(math.nan, 1.0, "loss is nan"), (2.0, math.inf, "gradient norm is inf")],
)
def test_a_figure_that_is_not_finite_stops_the_run_and_says_what_to_change(loss, norm, said):
    decision = health().check(812, loss, norm, can_go_back=True)
    assert (
        decision.action == "stop"
        and said in decision.reason
        and "weights are those of step 811" in decision.reason
    )
    assert "optimizer.learning_rate" in decision.remedy and "health.on_nan" in decision.remedy
    assert "resume from an earlier checkpoint" in decision.remedy
    assert "start again" in health().check(2, math.nan, 1.0).remedy, (
        "where there is no checkpoint yet"
    )


@pytest.mark.parametrize("key", ["on_nan", "on_spike"])
def test_a_rollback_is_wanted_so_often_only_and_only_with_a_checkpoint(key):
    losses = noisy(2, 40, 0.1)
    watched = fed(losses, **{key: "rollback"})
    bad = math.nan if key == "on_nan" else 9.0
    assert "no checkpoint yet" in watched.check(41, bad, 1.0).reason
    for done in range(3):
        decision = watched.check(41, bad, 1.0, can_go_back=True)
        assert decision.action == "rollback"
        watched.state = HealthState(**json.loads(json.dumps(asdict(watched.state))))
        watched.state.rollbacks = done + 1
    stop = watched.check(41, bad, 1.0, can_go_back=True)
    assert stop.action == "stop" and "3 times already" in stop.reason


@pytest.mark.parametrize(("key", "bad"), [("on_spike", 4.0), ("on_nan", math.nan)])
def test_steps_that_are_left_out_never_become_usual_and_are_so_many_in_a_row_only(key, bad):
    watched = fed(noisy(2, 100, 0.05), **{key: "skip"})
    before = watched.state.losses
    decisions = [watched.check(101 + i, bad, 1.0) for i in range(CONSECUTIVE_SKIPS + 1)]
    assert [each.action for each in decisions] == ["skip"] * CONSECUTIVE_SKIPS + ["stop"]
    assert (
        "weights are those of step 100" in decisions[-1].reason and watched.state.losses == before
    )


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
    fed(curve + np.random.default_rng(seed).normal(0, noise, len(steps)), on_spike="stop")


@given(
    losses=st.lists(st.floats(0.5, 12) | st.just(math.nan), min_size=1, max_size=260),
    cut=st.integers(0, 259),
)
def test_a_run_resumed_from_its_json_state_judges_every_step_as_the_unbroken_run(losses, cut):
    def judge(watched, first, some):
        return [watched.check(step, loss, 1.0) for step, loss in enumerate(some, first)]

    cut = min(cut, len(losses))
    unbroken, first, resumed = (health(on_nan="skip") for _ in range(3))
    expected = judge(unbroken, 0, losses)
    got = judge(first, 0, losses[:cut])
    resumed.state = HealthState(**json.loads(json.dumps(asdict(first.state), allow_nan=False)))
    got += judge(resumed, cut, losses[cut:])
    assert got == expected
    assert resumed.state == unbroken.state


def test_lost_updates_and_a_step_without_labels_are_told_once():
    watched = health()
    told = [
        list(watched.warnings_of(step, 0.2, tokens, {}))
        for step, tokens in ((1, 5), (2, 0), (3, 0))
    ]
    assert [len(each) for each in told] == [1, 1, 0]
    assert (
        "20.0 %" in told[0][0]
        and "weights: bf16_exact" in told[0][0]
        and "batch.tokens" in told[1][0]
    )


def test_a_step_without_labels_tells_nothing_of_which_loss_is_usual():
    watched, other = health(on_spike="warn"), health(on_spike="warn")
    for step in range(1, 41):
        watched.check(step, 3.0 + step % 2 / 10, 1.0)
        other.check(step, 3.0 + step % 2 / 10, 1.0)
        assert other.check(step, 0.0, 0.0, labelled=False).reason is None
    assert other.state == watched.state
    assert other.check(41, 0.0, float("nan"), labelled=False) == watched.check(
        41, 0.0, float("nan")
    ), "a gradient may break"
