"""A question to `which`: a recipe in a folder, the command, and the trainings of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.experiments import which
from lab.experiments.which_trainings import WhichTrainings
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe


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
