"""Low precision over two processes: emulated, since there is no GPU here, but with the collectives of the real thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BLOCK_LENGTH

pytestmark = pytest.mark.multi


@pytest.mark.long
def test_delayed_scaling_over_two_processes_learns_what_one_learns(
    train_as_ranks: Callable, train_here: Callable, low_precision_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Not the same bits: one process scales by what a pack had, two processes by what two packs had, one in each."""
    recipe = low_precision_recipe | {"precision": "delayed", "weights": "bf16_exact", "train": {"steps": 3}}
    recipe |= {"batch": {"tokens": 4 * BLOCK_LENGTH, "microbatch": 1}}
    recipe |= {"evaluate": {}, "checkpoint": {"at_end": False}, "schedule": {}, "optimizer": {"learning_rate": 0.003}}
    recipe["model"] |= {"gradient_checkpointing": "full"}
    recipe["model"]["config"] |= {"num_hidden_layers": 1}
    one = train_here("fp8_config.scope=linear+head", recipe=recipe | {"run_dir": str(tmp_path / "one")})
    assert one.losses()[-1] < 0.9 * one.losses()[0]
    for topology in ("ddp", "fsdp2"):
        launch = ["--config_file", f"accelerate_configs/{topology}.yaml"]
        arguments = ["fp8_config.scope=linear+head", f"run_dir={tmp_path / topology}"]
        two = train_as_ranks(*arguments, recipe=recipe, launch=launch)
        assert two.status == 0, two.output
        assert two.losses()[0] == pytest.approx(one.losses()[0], abs=0.002), topology
        assert two.losses() == pytest.approx(one.losses(), rel=0.01), topology
        found = json.loads((two.run_dir / "audit.json").read_text())
        assert {entry["effective"] for entry in found["products"]} == {"delayed"} and found["confirmed_in_step"] == 1
