"""Runs that meet data which must not reach the weights, or would train something else: nothing of it is saved."""

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
from tests.golden.runs import losses_changed, steps_logged, tensors_of


def copies_in_fp8() -> int:
    gc.collect()
    return sum(isinstance(each, BothWays) for each in gc.get_objects())


def test_a_run_stopped_after_two_rollbacks_saves_its_step_and_count(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """Resumed at 4 it goes back to 4 and, as other data fail there too, to 2, before it was in FP8: no copy of a weight in FP8
    is kept there. The signal comes in step 3."""
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
    every = {"checkpoint": {"every": 2}, "log": {"fp8_statistics": 1}}
    recipe = small_recipe | shorter | phases | every | {"schedule": {"kind": "constant"}}
    assert train_here("train.steps=4", recipe=recipe).status == 0
    run_dir, steps_before, kept = Path(recipe["run_dir"]), [], [copies_in_fp8()]

    def poison(loss: torch.Tensor) -> torch.Tensor:
        if steps_before[-1:] != [logged := steps_logged(run_dir)]:
            steps_before.append(logged)
            if logged == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            kept.append(copies_in_fp8())
        return loss * math.inf if logged == 5 else loss

    with losses_changed(poison):
        stopped = train_here("health.on_nan=rollback", "--accept-changes", recipe=recipe)
    assert stopped.status == 128 + signal.SIGTERM and steps_before == [4, 5, 4, 5, 2], (
        stopped.output
    )
    assert kept[5] == kept[0] < min(kept[1:5])
    assert (run_dir / "fp8_statistics.jsonl").read_text() == "", "the steps in FP8 were taken back"
    saved = json.loads((run_dir / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert (saved["progress"]["left_out"], saved["health"]["rollbacks"]) == (6, 2)
    finished = train_here("health.on_nan=rollback", "--accept-changes", recipe=recipe)
    assert finished.status == 0 and "at step 3" in finished.output, finished.output


def test_weights_that_an_update_has_overflowed_are_never_saved(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """A rate that makes giants of the weights in the first step, whose loss and gradient are finite."""
    blown = {
        "optimizer": {"learning_rate": 1e30, "weight_decay": 0},
        "schedule": {"kind": "constant"},
    }
    run = train_here("parity=off", "checkpoint.every=1", recipe=small_recipe | blown)
    assert run.status == 3 and "halted: step" in run.err, run.output
    for folder in (run.run_dir / "checkpoints").glob("step-*"):
        assert all(tensor.isfinite().all() for tensor in tensors_of(folder).values())
    assert not (run.run_dir / "final").exists()


def test_a_run_that_would_train_something_else_stops_before_a_step(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain under eager attention; under any other, an MLP's output is half as large again. So would a wrong kernel be."""
    forward = Qwen3MLP.forward

    def broken(mlp: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(mlp, x) * (1 if mlp.config._attn_implementation == "eager" else 1.5)

    monkeypatch.setattr(Qwen3MLP, "forward", broken)
    run = train_here("parity=on", "model.fused=off", "train.steps=3")
    assert run.status == 3 and "halted: step 0: parity" in run.err and ".mlp." in run.output, (
        run.output
    )
    assert run.audit()["parity"]["failures"]
    assert not (run.run_dir / "metrics.jsonl").exists() or not run.records()
