"""`parity` end to end: the launcher holds its first step against plain transformers, writes it down, and trains or stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from tests.conftest import Finished

DELAYED = ("precision=delayed", "fp8_config.on_unsupported=emulate", "model.config.vocab_size=64")


@pytest.fixture
def launch(train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Finished]:
    """Run two steps in the run folder `name`."""
    short = {"train": {"steps": 2}, "schedule": {}, "evaluate": {}, "checkpoint": {"at_end": False}}
    return lambda name, *arguments: train_here(*arguments, recipe=small_recipe | short | {"run_dir": str(tmp_path / name)})


def parity_of(run: Finished) -> dict[str, Any]:
    return json.loads((run.run_dir / "audit.json").read_text())["parity"]


def test_a_run_that_would_train_something_else_stops_before_its_first_step(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain under eager attention; under any other, an MLP's output is half as large again. So would a wrong kernel be."""
    forward = Qwen3MLP.forward

    def broken(mlp: Qwen3MLP, x: Tensor) -> Tensor:
        return forward(mlp, x) * (1 if mlp.config._attn_implementation == "eager" else 1.5)

    monkeypatch.setattr(Qwen3MLP, "forward", broken)
    run = launch("broken", "parity=on", "model.fused=off")
    assert run.status == 3 and "halted: step 0: parity" in run.err, run.output
    assert parity_of(run)["failures"] and ".mlp." in run.output
    metrics = run.run_dir / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""
