"""The launcher inside this process, for input that it must refuse: importing it anew would take seconds for each of dozens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import train_accelerate


@pytest.fixture
def refusal(
    small_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Start the launcher on `small_recipe`, which a test has spoilt; the one message with which it refuses.

    Every refusal ends with status 2, says one thing, on stderr, and comes before any model is built. `begun` allows that the run
    folder exists by then.
    """

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was built before the input was refused")

    monkeypatch.setattr(train_accelerate.model, "build", never)

    def run(*arguments: str, begun: bool = False) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(small_recipe))
        monkeypatch.setattr(sys, "argv", ["train_accelerate.py", str(path), *arguments])
        capfd.readouterr()
        status = train_accelerate.main()
        said = capfd.readouterr()
        assert status == 2, said
        assert said.out == ""
        assert said.err.startswith("error: ") and said.err.count("error: ") == 1 and "Traceback" not in said.err
        assert begun or not Path(small_recipe["run_dir"]).exists()
        return said.err.removeprefix("error: ").rstrip("\n")

    return run
