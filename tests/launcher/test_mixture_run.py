"""A branch of the launcher with other weights of data sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import PACK_LENGTH, write_packs


def test_a_branch_changes_the_weights_of_sources(
    recipe_for: Callable, small_packs: Path, start_here: Callable, tmp_path: Path
) -> None:
    shutil.copytree(small_packs, tmp_path / "packs" / "a")
    write_packs(tmp_path / "packs" / "b", PACK_LENGTH, multiple=2)

    def recipe(name: str, weight: float, steps: int) -> dict:
        sources = [{"name": "a", "weight": 1}, {"name": "b", "weight": weight}]
        data = {"packs": str(tmp_path / "packs"), "length": PACK_LENGTH, "sources": sources}
        return recipe_for(tmp_path / name) | {
            "data": data,
            "schedule": {"kind": "constant"},
            "train": {"steps": steps},
            "evaluate": {},
            "checkpoint": {"every": 2},
        }

    first = start_here(recipe("first", 0.01, 4), tmp_path)
    assert first.status == 0, first.output
    checkpoint = first.run_dir / "checkpoints" / "step-00000004"
    branch = start_here(recipe("branch", 3, 6), tmp_path, f"train.begin_with={checkpoint}")
    assert branch.status == 0, branch.output
    shares = {
        name: [record["share/b"] for record in run.records() if "share/b" in record]
        for name, run in (("first", first), ("branch", branch))
    }
    assert shares["first"][-1] < 0.1 and shares["branch"][-1] > 0.5
