"""Runs of the launcher in which the weights of data sources change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PACK_LENGTH, Finished, write_packs

# The weights change after step 4 of 6. A checkpoint follows each step.
STEPS = 6
LAST_OF_PHASE = 4


@pytest.fixture(scope="module")
def recipe(
    recipe_for: Callable, small_packs: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(small_packs, folder / "packs" / "a")
    write_packs(folder / "packs" / "b", PACK_LENGTH, multiple=2)
    sources = [{"name": "a", "weight": [1, 1]}, {"name": "b", "weight": [0, 3]}]
    data = {"packs": str(folder / "packs"), "length": PACK_LENGTH, "sources": sources}
    return recipe_for(folder / "run") | {
        "data": data | {"weights_until": [0.7]},
        "schedule": {"kind": "constant"},
        "train": {"steps": STEPS},
        "evaluate": {},
        "checkpoint": {"every": 1, "keep": 9},
    }


@pytest.fixture(scope="module")
def alone(recipe: dict[str, Any], start_here: Callable) -> Finished:
    """Finished run without interruption."""
    finished = start_here(recipe, Path(recipe["run_dir"]).parent)
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture
def resumed(
    recipe: dict[str, Any], alone: Finished, start_here: Callable, tmp_path: Path
) -> Callable[..., Finished]:
    """Function that continues the run from the checkpoint of a step."""

    def resume(step: int, *settings: str) -> Finished:
        checkpoint = alone.run_dir / "checkpoints" / f"step-{step:08d}"
        other = recipe | {"run_dir": str(tmp_path / "run")}
        return start_here(other, tmp_path, "--resume", str(checkpoint), *settings)

    return resume


def test_the_plan_says_when_the_weights_change(alone: Finished) -> None:
    assert "until step 4: 100.0 % a, 0.0 % b of the tokens" in alone.output
    assert "until step 6: 25.0 % a, 75.0 % b of the tokens" in alone.output
    shares = [record["share/b"] for record in alone.records() if "share/b" in record]
    assert shares[:LAST_OF_PHASE] == [0.0] * LAST_OF_PHASE
    # Two steps of 8 packs have 12 packs of b, or 11 because of rounding.
    assert shares[-1] == pytest.approx(12 / 48, abs=1 / 48)


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_resume_in_each_phase_repeats_the_uninterrupted_run(
    step: int, alone: Finished, resumed: Callable
) -> None:
    run = resumed(step)
    assert run.status == 0, run.output
    assert run.losses() == alone.losses()[step:]


def test_phases_that_alter_data_already_read_are_refused(resumed: Callable) -> None:
    # The first phase ends after 70 % of the steps: step 6 of 9 instead of step 4 of 6.
    run = resumed(5, "train.steps=9")
    assert run.status == 2
    assert "data.weights_until: saved [4], now [6]" in run.output
    assert resumed(5, "train.steps=9", "data.weights_until=[4]").status == 0


def test_a_longer_run_may_end_a_phase_later(resumed: Callable) -> None:
    run = resumed(4, "train.steps=9")
    assert run.status == 0, run.output
    assert "until step 6: 100.0 % a" in run.output
