"""Test CUDA graphs of runs on two GPUs, with the real launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import needs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("configuration", ["ddp", "zero"])
def test_runs_with_graphs_equal_runs_without(
    configuration: str,
    train: Callable,
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Each rank has four microbatches in a step. With ZeRO-2, two of them run as graphs."""
    recipe = low_precision_recipe | {
        "precision": needs("delayed"),
        "weights": "bf16_exact",
        "deterministic": True,
    }
    recipe["batch"]["microbatch"] = 1
    launch = ["--config_file", f"accelerate_configs/{configuration}.yaml", "--num_processes", "2"]
    losses = []
    for graphs in ("off", "on"):
        changes = (f"model.cuda_graphs={graphs}", f"run_dir={tmp_path / graphs}")
        finished = train(*changes, recipe=recipe, launch=launch)
        assert finished.status == 0, finished.output
        assert finished.audit()["cuda_graphs"].startswith(graphs)
        losses.append(finished.losses())
    assert losses[0] == losses[1]
