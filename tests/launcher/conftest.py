"""What the launcher's own tests change in the small recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Finished


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """A step in two microbatches, not four."""

    def recipe(run_dir: Path) -> dict[str, Any]:
        small = recipe_for(run_dir)
        return small | {"batch": small["batch"] | {"microbatch": 4}}

    return recipe


@pytest.fixture
def changes() -> dict[str, Any]:
    """Five steps of two microbatches in exact BF16 weights, each saved."""
    changes = {
        "train": {"steps": 5},
        "evaluate": {},
        "checkpoint": {"every": 1, "keep": 9},
        "weights": "bf16_exact",
    }
    changes |= {
        "batch": {"tokens": 128, "microbatch": 2},
        "fp8_config": {"on_unsupported": "emulate"},
        "parity": "off",
    }
    return changes | {"schedule": {"kind": "constant"}}


@pytest.fixture
def started(
    start_here: Callable, small_recipe: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> Callable[..., Finished]:
    """Run the small recipe with `changes` in a folder of this name, which must end with this status."""

    def start(folder: str, *arguments: str, status: int = 0) -> Finished:
        run = start_here(
            small_recipe | changes, tmp_path, f"run_dir={tmp_path / folder}", *arguments
        )
        assert run.status == status and "Traceback" not in run.output, run.output
        return run

    return start
