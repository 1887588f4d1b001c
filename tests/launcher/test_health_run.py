"""Test runs whose data or model is bad: no wrong weights are saved."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from pretrain.precision.emulation import BothWays
from tests.conftest import flip
from tests.golden.runs import losses_changed, steps_logged, tensors_of


def copies_in_fp8() -> int:
    """Return the number of cached weights in FP8."""
    gc.collect()
    return sum(isinstance(candidate, BothWays) for candidate in gc.get_objects())


def test_a_rollback_before_the_profiled_step_keeps_the_profile(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    changes = {"train": {"steps": 8}, "checkpoint": {"every": 2}, "evaluate": {}, "parity": "off"}
    recipe = small_recipe | changes
    run_dir = Path(recipe["run_dir"])
    poisoned_steps = []

    def poison(loss: torch.Tensor) -> torch.Tensor:
        is_logged = (run_dir / "metrics.jsonl").exists()
        if poisoned_steps or not is_logged or steps_logged(run_dir) != 2:
            return loss
        poisoned_steps.append(3)
        return loss * math.inf

    with losses_changed(poison):
        finished = train_here("health.on_nan=rollback", "--profile", recipe=recipe)
    assert finished.status == 0, finished.output
    assert poisoned_steps == [3]
    assert "Rollback 1" in finished.output
    assert (run_dir / "profile.md").is_file()


def test_a_run_stopped_after_two_rollbacks_saves_its_step_and_count(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """The run resumes at step 4 and rolls back to 4 and, as other data fail too, to 2.

    Step 2 is before the phase in FP8, so no FP8 copy of a weight is kept. The signal comes in step
    3.
    """
    shorter = {
        "train": {"steps": 6},
        "evaluate": {},
        "batch": {"tokens": 2 * 32, "microbatch": 1},
        "parity": "off",
    }
    phases = {
        "precision": [{"until": 3, "use": "bf16"}, {"use": "delayed"}],
        "fp8_config": {"on_unsupported": "emulate"},
    }
    intervals = {"checkpoint": {"every": 2}, "log": {"fp8_statistics": 1}}
    recipe = small_recipe | shorter | phases | intervals | {"schedule": {"kind": "constant"}}
    assert train_here("train.steps=4", recipe=recipe).status == 0
    run_dir = Path(recipe["run_dir"])
    # The number of logged steps at the start of every step, and the number of copies in FP8.
    steps_before = []
    copies = [copies_in_fp8()]

    def poison(loss: torch.Tensor) -> torch.Tensor:
        if steps_before[-1:] != [logged := steps_logged(run_dir)]:
            steps_before.append(logged)
            if logged == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            copies.append(copies_in_fp8())
        return loss * math.inf if logged == 5 else loss

    with losses_changed(poison):
        stopped = train_here("health.on_nan=rollback", "--accept-changes", recipe=recipe)
    assert stopped.status == 128 + signal.SIGTERM, stopped.output
    assert steps_before == [4, 5, 4, 5, 2], stopped.output
    assert copies[5] == copies[0] < min(copies[1:5])
    assert (run_dir / "fp8_statistics.jsonl").read_text() == "", (
        "the statistics of rolled back steps must be removed"
    )
    saved = json.loads((run_dir / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert (saved["progress"]["left_out"], saved["health"]["rollbacks"]) == (6, 2)
    finished = train_here("health.on_nan=rollback", "--accept-changes", recipe=recipe)
    assert finished.status == 0, finished.output
    assert "at step 3" in finished.output, finished.output


def test_a_rollback_uses_the_only_intact_checkpoint_again(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """Step 5 fails twice after the checkpoint of step 4, the only intact one."""
    changes = {"train": {"steps": 6}, "checkpoint": {"every": 2}, "evaluate": {}, "parity": "off"}
    recipe = small_recipe | changes | {"schedule": {"kind": "constant"}}
    assert train_here("train.steps=4", recipe=recipe).status == 0
    run_dir = Path(recipe["run_dir"])
    flip(max((run_dir / "checkpoints" / "step-00000002").glob("*.safetensors")))

    def poison(loss: torch.Tensor) -> torch.Tensor:
        # The second event contains the line of the first.
        rollbacks = (run_dir / "metrics.jsonl").read_text().count('"rollbacks"')
        return loss * math.inf if rollbacks < 2 else loss

    with losses_changed(poison):
        finished = train_here("health.on_nan=rollback", recipe=recipe)
    assert finished.status == 0, finished.output
    (event,) = (record for record in finished.records() if record.get("event") == "rollback")
    assert (event["resumed_from"], event["rollbacks"]) == (4, 2)


def test_weights_that_an_update_has_overflowed_are_never_saved(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """The learning rate makes the weights huge in the first step, with finite loss and gradient."""
    huge_rate = {
        "optimizer": {"learning_rate": 1e30, "weight_decay": 0},
        "schedule": {"kind": "constant"},
    }
    run = train_here("parity=off", "checkpoint.every=1", recipe=small_recipe | huge_rate)
    assert run.status == 3, run.output
    assert "halted: step" in run.err, run.output
    for folder in (run.run_dir / "checkpoints").glob("step-*"):
        assert all(tensor.isfinite().all() for tensor in tensors_of(folder).values())
    assert not (run.run_dir / "final").exists()


def test_a_run_that_would_train_something_else_stops_before_a_step(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP's output is 50 % too large unless attention is eager, like that of a wrong kernel."""
    forward = Qwen3MLP.forward

    def broken(mlp: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(mlp, x) * (1 if mlp.config._attn_implementation == "eager" else 1.5)

    monkeypatch.setattr(Qwen3MLP, "forward", broken)
    run = train_here("parity=on", "model.fused=off", "train.steps=3")
    assert run.status == 3, run.output
    assert "halted: step 0: parity" in run.err, run.output
    assert ".mlp." in run.output, run.output
    assert run.audit()["parity"]["failures"]
    assert not (run.run_dir / "metrics.jsonl").exists() or not run.records()
