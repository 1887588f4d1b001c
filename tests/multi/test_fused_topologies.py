"""Fused layers in shards: what an unfused model in one process computes. Other topologies: test_topologies.py, fused as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.multi


def figures(run: Any, key: str) -> list[float]:
    return [record[key] for record in run.records() if key in record]


def test_two_processes_of_fsdp2_with_fused_layers_train_as_one_without(
    train_as_ranks: Callable, train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """FSDP2 exchanges the parameters before and after each layer: no stacked matrix may outlive its use. Biases are stacked."""
    small_recipe["model"]["config"]["attention_bias"] = True
    launch = ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "no"]
    one = train_here("model.fused=off", f"run_dir={small_recipe['run_dir']}-unfused")
    two = train_as_ranks("model.fused=on", launch=launch)
    assert one.status == two.status == 0, one.output + two.output
    said = [json.loads((run.run_dir / "audit.json").read_text())["fused"] for run in (one, two)]
    assert said == ["nothing: model.fused is off", "2 of 2 layers"]
    assert two.losses() == pytest.approx(one.losses(), abs=1e-5)
    assert figures(two, "gradient_norm") == pytest.approx(figures(one, "gradient_norm"), rel=1e-5)
    assert figures(two, "held_out_loss") == pytest.approx(figures(one, "held_out_loss"), abs=1e-5)
