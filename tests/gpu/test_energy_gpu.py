"""The driver's counter of energy, in joules; and a run's memory by part."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretrain.metrics.recorder import joules_of

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def read() -> Callable[[], float]:
    found = joules_of(DEVICE)
    if found is None:
        pytest.skip("this device has no counter of energy (a part of a GPU, or one before Volta)")
    return found


def test_the_counter_grows_by_the_power_that_the_device_draws(read: Callable[[], float]) -> None:
    numbers = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    began, joules, powers = time.perf_counter(), read(), []
    while time.perf_counter() - began < 2:
        for _ in range(50):
            numbers @ numbers
        torch.cuda.synchronize()
        powers.append(torch.cuda.power_draw(DEVICE) / 1e3)
    watts = (read() - joules) / (time.perf_counter() - began)
    assert 0.5 * statistics.median(powers) < watts < 2 * statistics.median(powers), (watts, powers)


def test_a_run_writes_down_what_its_steps_and_its_tensors_took(
    read: Callable[[], float], train: Callable, small_recipe: dict[str, Any]
) -> None:
    recipe = small_recipe | {"train": {"steps": 60}, "evaluate": {}, "checkpoint": {"every": None, "at_end": False}}
    recipe["model"]["config"] |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    run = train(recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"])
    assert run.status == 0, run.output
    steps = [record for record in run.records() if "event" not in record]
    assert all(step["joules"] >= 0 for step in steps) and sum(step["joules"] for step in steps) > 0
    summary = json.loads((run.run_dir / "summary.json").read_text())
    tokens, joules = steps[-1]["tokens"] - steps[1]["tokens"], sum(step["joules"] for step in steps[2:])
    assert summary["tokens_per_joule"] == pytest.approx(tokens / joules)

    held = json.loads((run.run_dir / "audit.json").read_text())["memory"]["held"]
    assert held["weights"] > 0 and held["moments"] > 0 and held["gradients"] > 0
    assert sum(held.values()) / 2**30 < summary["memory_gib"], "what is held is a part of the peak, not more than it"
