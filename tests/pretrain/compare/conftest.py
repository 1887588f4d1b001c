"""Matrices over the small recipe, for tests of matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.compare.matrix_file import Matrix, load_matrix
from tests.conftest import ROOT, yaml_of

AXES = {"precision": ["bf16", "delayed", "mxfp8"], "weights": ["fp32", "bf16"]}


@pytest.fixture
def matrix(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Matrix]:
    """Return a function that loads a matrix over the small recipe in BF16.

    It takes keys of the matrix file and command-line overrides.
    """
    (tmp_path / "recipe.yaml").write_text(yaml_of(small_recipe | {"precision": "bf16"}))

    def load(*overrides: str, **keys: Any) -> Matrix:
        values = {
            "name": "m",
            "recipe": str(tmp_path / "recipe.yaml"),
            "axes": AXES,
            "run_dir": f"{tmp_path}/runs/{{cell}}",
        }
        values |= {"accelerate": str(ROOT / "accelerate_configs" / "cpu.yaml")} | keys
        path = tmp_path / "m.yaml"
        path.write_text(yaml_of({key: value for key, value in values.items() if value is not None}))
        return load_matrix(path, overrides)

    return load
