"""The gap to BF16 on a GPU: on Transformer Engine, fused, the run's bits are those of a run without a meter."""

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
def test_a_run_with_a_meter_has_the_bits_of_one_without(
    precision: str,
    weights: str,
    microbatch: int,
    train: Callable,
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Prints what a look takes of this small model; the cost in a large one is a training's, with `log.gap` and without."""
    recipe = low_precision_recipe | {
        "precision": precision,
        "weights": weights,
        "deterministic": True,
        "evaluate": {},
    }
    recipe["batch"] = {"tokens": 8 * 128, "microbatch": microbatch}
    launch, runs = ["--config_file", "accelerate_configs/bf16.yaml"], []
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
    assert measured.losses() == without.losses() and saved(measured.run_dir, 12) == saved(
        without.run_dir, 12
    )
    steps = measured.steps()
    assert all(
        ("gap/loss" in step) == (step["step"] % 2 == 0) and step["recompiles"] == 0
        for step in steps
    )
    assert all(
        0.9 < step["gap/cosine"] < 1 and step.get("gap/moved", 0) < 0.25 for step in steps[1::2]
    )
    looked, others = (
        statistics.median(step["step_ms"] for step in steps[first::2]) for first in (3, 2)
    )
    print(f"{precision}, {weights}: steps of {others:.1f} ms, with a look {looked:.1f} ms")
