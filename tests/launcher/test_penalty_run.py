"""Runs with a penalty: what they record, that they are held to parity, and that another weight is another training."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

PENALTY = ("loss.penalty=neg_entropy", "loss.penalty_weight=0.5")


def test_cross_entropy_and_penalty_stand_apart_in_steps_and_evaluations(train_here: Callable, small_recipe: dict[str, Any]):
    run = train_here(*PENALTY, "parity=on", "train.steps=4", "evaluate.every=2")
    assert run.status == 0, run.output
    steps = [record for record in run.records() if "event" not in record]
    assert all(0 < record["penalty"] < 4.2 for record in steps), "of 61 words, less than log 61"
    assert steps[0]["loss"] == pytest.approx(4.11, abs=0.1), "cross-entropy alone"
    (first, last) = (record for record in run.records() if record.get("event") == "evaluation")
    assert 0 < last["held_out_penalty"] < 4.2 and first["held_out_loss"] > 0
    assert "penalty  4." in run.out or "penalty  3." in run.out
    audit = json.loads((run.run_dir / "audit.json").read_text())
    assert audit["loss"]["penalty"]["kind"] == "neg_entropy" and audit["parity"]["failures"] == []
    refused = train_here(*PENALTY[:1], "loss.penalty_weight=0.6", "train.steps=6").refusal
    assert "loss.penalty_weight: saved 0.5, now 0.6" in refused
