"""The driver's counter of energy: of the device that trains, in joules, and read in less time than a step would notice."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretrain.metrics.energy import joules_of

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


def test_a_reading_takes_less_than_a_millisecond(read: Callable[[], float]) -> None:
    times = []
    for _ in range(200):
        began = time.perf_counter()
        read()
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 1e-3, f"{1e6 * statistics.median(times):.0f} µs; of a step that is two of them"


def test_a_run_writes_down_what_its_steps_took(read: Callable[[], float], train_here: Callable, small_recipe: dict[str, Any]):
    run = train_here("precision=bf16", "train.steps=40", "evaluate.every=null", "checkpoint.at_end=false", recipe=small_recipe)
    assert run.status == 0, run.output
    steps = [record for record in run.records() if "event" not in record]
    assert all(step["joules"] >= 0 for step in steps) and sum(step["joules"] for step in steps) > 0
    summary = json.loads((run.run_dir / "summary.json").read_text())
    tokens, joules = steps[-1]["tokens"] - steps[1]["tokens"], sum(step["joules"] for step in steps[2:])
    assert summary["tokens_per_joule"] == pytest.approx(tokens / joules)
