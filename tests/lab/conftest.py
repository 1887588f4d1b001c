"""Matrices over the small recipe, for tests of matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.experiments.matrix_file import Matrix, load_matrix
from tests.conftest import ROOT, yaml_of

AXES = {"precision": ["bf16", "delayed", "mxfp8"], "weights": ["fp32", "bf16"]}


def crossed(axes: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Return a cell for each combination of the axes' values, such as "bf16-seed=1"."""
    cells = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        parts = [
            value if key in ("precision", "weights") else f"{key.rpartition('.')[-1]}={value}"
            for key, value in settings.items()
        ]
        cells["-".join(parts)] = settings
    return cells


@pytest.fixture
def matrix(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Matrix]:
    """Return a function that loads a matrix over the small recipe in BF16.

    It takes keys of the matrix file, axes whose combinations are its cells, and command-line
    overrides.
    """
    (tmp_path / "recipe.yaml").write_text(yaml_of(small_recipe | {"precision": "bf16"}))

    def load(*overrides: str, axes: Mapping[str, Sequence[Any]] = AXES, **keys: Any) -> Matrix:
        values = {
            "name": "m",
            "recipe": str(tmp_path / "recipe.yaml"),
            "cells": crossed(axes),
            "run_dir": f"{tmp_path}/runs/{{cell}}",
        }
        values |= {"accelerate": str(ROOT / "accelerate_configs" / "cpu.yaml")} | keys
        path = tmp_path / "m.yaml"
        # yaml_of sorts keys, but the order of the cells matters.
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return load_matrix(path, overrides)

    return load
