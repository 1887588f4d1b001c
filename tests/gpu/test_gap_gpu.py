"""Test the gap meter on a GPU with fused layers: it does not change the bits of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.runs import saved


@pytest.mark.parametrize(
    ("precision", "weights", "microbatch"),
    [("delayed", "bf16_exact", 2), ("delayed", "fp32", 8), ("current", "bf16", 2)],
)
def test_the_gap_meter_does_not_change_the_bits_of_a_run(
    precision: str,
    weights: str,
    microbatch: int,
    train: Callable,
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Also prints the time of a measurement, for this small model only."""
    recipe = low_precision_recipe | {
        "precision": precision,
        "weights": weights,
        "deterministic": True,
        "evaluate": {},
    }
    recipe["batch"] = {"tokens": 8 * 128, "microbatch": microbatch}
    launch = ["--config_file", "accelerate_configs/bf16.yaml"]
    runs = []
    for gap in ("null", "2"):
        run = train(
            "fp8_config.scope=linear+head",
            f"log.gap={gap}",
            f"run_dir={tmp_path / gap}",
            recipe=recipe,
            launch=launch,
        )
        assert run.status == 0, run.output
        runs.append(run)
    without, measured = runs
    assert measured.losses() == without.losses()
    assert saved(measured.run_dir, 12) == saved(without.run_dir, 12)
    steps = measured.steps()
    for step in steps:
        assert ("gap/loss" in step) == (step["step"] % 2 == 0)
        assert step["recompiles"] == 0
    for step in steps[1::2]:
        assert 0.9 < step["gap/cosine"] < 1
        assert step.get("gap/moved", 0) < 0.25
    measured_ms, plain_ms = (
        statistics.median(step["step_ms"] for step in steps[first::2]) for first in (3, 2)
    )
    print(f"{precision}, {weights}: {plain_ms:.1f} ms a step, {measured_ms:.1f} ms when measured")
