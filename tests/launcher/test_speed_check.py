"""Trainings compare the speed of their first steps with the predicted speed, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pretrain.plan.speed import Prediction
from pretrain.run import speed_check
from tests.conftest import Finished


@pytest.fixture
def changes(changes: dict[str, Any]) -> dict[str, Any]:
    shorter = {"checkpoint": {"at_end": False, "every": 22}, "precision": "fp32", "weights": "fp32"}
    return changes | shorter


def lines(run: Finished) -> list[str]:
    return [line for line in run.out.splitlines() if line.startswith("speed: ")]


def events(run: Finished) -> list[dict[str, Any]]:
    return [record for record in run.records() if record.get("event") == "speed"]


def test_a_run_on_a_cpu_prints_and_records_no_prediction(
    started: Callable[..., Finished],
) -> None:
    run = started("run", "train.steps=21")
    assert len(run.steps()) == 21 and not lines(run) and not events(run)


def test_each_start_is_compared_once(
    started: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of a CPU is not predicted, so the prediction is replaced."""
    fast = Prediction({"GEMMs": 1e-9}, 128, 0.07, "± 7 %")
    monkeypatch.setattr(speed_check, "predict", lambda plan: fast)
    first = started("run", "train.steps=23")
    resumed = started("run", "train.steps=43")
    assert [event["step"] for event in events(resumed)] == [20, 42]
    for run, event in zip((first, resumed), events(resumed), strict=True):
        assert lines(run) == [event["text"]] and "tokens/s (-100 %): " in event["text"]


def test_steps_in_two_precisions_are_not_compared(
    train_here: Callable[..., Finished],
    low_precision_recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = Prediction({"GEMMs": 1e-9}, 256, 0.07, "± 7 %")
    monkeypatch.setattr(speed_check, "predict", lambda plan: fast)
    run = train_here(
        "train.steps=20",
        "precision=[{use: current, until: 15}, {use: bf16}]",
        "batch.tokens=256",
        "evaluate={}",
        "checkpoint={at_end: false}",
        recipe=low_precision_recipe,
    )
    assert len(run.steps()) == 20, run.output
    assert not lines(run) and not events(run)
