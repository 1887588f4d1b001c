"""What the launcher's own tests change in the small recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """A step in two microbatches, not four."""

    def recipe(run_dir: Path) -> dict[str, Any]:
        small = recipe_for(run_dir)
        return small | {"batch": small["batch"] | {"microbatch": 4}}

    return recipe
