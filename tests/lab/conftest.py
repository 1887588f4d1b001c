"""Matrices over the small recipe, questions to `which`, and outputs like stored texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.experiments import which
from lab.experiments.matrix_file import Matrix, load_matrix
from lab.experiments.which_trainings import WhichTrainings
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe, yaml_of

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
def stored(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with a file beside the test.

    `python -m pytest tests/lab --write-golden` overwrites the files. Read what has changed.
    """

    def compare(name: str, text: str) -> None:
        file = request.path.with_name(name)
        if request.config.getoption("write_golden"):
            file.write_text(text, encoding="utf-8")
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()

    return compare


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
        values |= {"accelerate": str(CONFIGURATIONS / "cpu.yaml")} | keys
        path = tmp_path / "m.yaml"
        # yaml_of sorts keys, but the order of the cells matters.
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return load_matrix(path, overrides)

    return load


@dataclass(frozen=True)
class Question:
    """A question about `recipe`, which is written to the folder `path`."""

    recipe: dict[str, Any]
    path: Path

    def __post_init__(self) -> None:
        write_recipe(self.recipe, self.path)

    @property
    def file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def folder(self) -> Path:
        return self.path / "which"

    def ask(self, *options: str) -> int:
        """Run the command, and return its exit status."""
        command = [str(self.file), "--run_dir", str(self.folder), *options]
        return which.main(commands.read("which", command))

    def trainings(self, *overrides: str, config: str = "cpu", **options: Any) -> WhichTrainings:
        accelerate = CONFIGURATIONS / f"{config}.yaml"
        recipe = options.pop("recipe", None) or load_recipe(self.file, overrides)
        return WhichTrainings(recipe, self.file, overrides, accelerate, self.folder, **options)
