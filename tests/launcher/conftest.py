"""Fixtures of the launcher's tests: changes of the small recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# torch.compile imports setuptools. This import fails if a test has imported distutils before.
import setuptools  # noqa: F401

from tests.conftest import Finished

LOW = ("precision=delayed", "weights=bf16_exact", "fp8_config.on_unsupported=emulate")


def with_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a small mixture of experts in two layers."""
    return {key: value for key, value in config.items() if key != "head_dim"} | {
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    }


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """Function that returns the small recipe with two microbatches a step instead of four."""

    def recipe(run_dir: Path) -> dict[str, Any]:
        small = recipe_for(run_dir)
        return small | {"batch": small["batch"] | {"microbatch": 4}}

    return recipe


@pytest.fixture
def changes() -> dict[str, Any]:
    """Recipe changes for five steps of two microbatches with exact BF16 weights, all saved."""
    return {
        "train": {"steps": 5},
        "evaluate": {},
        "checkpoint": {"every": 1, "keep": 9},
        "weights": "bf16_exact",
        "batch": {"tokens": 128, "microbatch": 2},
        "fp8_config": {"on_unsupported": "emulate"},
        "parity": "off",
        "schedule": {"kind": "constant"},
    }


@pytest.fixture
def started(
    start_here: Callable,
    start_as_ranks: Callable,
    small_recipe: dict[str, Any],
    changes: dict[str, Any],
    tmp_path: Path,
) -> Callable[..., Finished]:
    """Function that runs the small recipe with `changes` in a folder and checks the status.

    With `topology`, two ranks run it.
    """

    def start(
        folder: str, *arguments: str, status: int = 0, topology: str | None = None
    ) -> Finished:
        recipe = small_recipe | changes
        arguments = (f"run_dir={tmp_path / folder}", *arguments)
        if topology:
            launch = f"--config_file accelerate_configs/{topology}.yaml --mixed_precision no"
            run = start_as_ranks(recipe, tmp_path, *arguments, launch=launch.split())
        else:
            run = start_here(recipe, tmp_path, *arguments)
        assert run.status == status, run.output
        assert "Traceback" not in run.output, run.output
        return run

    return start
