"""The launcher inside this process: dozens of refusals are tested, and importing torch anew for each would take minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import train_accelerate


@dataclass(frozen=True)
class Said:
    """What one start of the launcher came to."""

    status: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The message with which it refused, after checking that it refused as it should: status 2 and one message, on stderr."""
        assert self.status == 2, self
        assert self.err.count("error: ") == 1 and "Traceback" not in self.out + self.err, self
        assert self.out == "", self
        return self.err.partition("error: ")[2].rstrip("\n")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub names are looked up in the local cache only, so a test neither needs a network nor waits for one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def launch(
    small_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Start the launcher on `small_recipe` as it is by then, with more arguments, and wait for its end."""

    def run(*arguments: str) -> Said:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(small_recipe))
        monkeypatch.setattr(sys, "argv", ["train_accelerate.py", str(path), *arguments])
        capfd.readouterr()
        status = train_accelerate.main()
        return Said(status, *capfd.readouterr())

    return run


@pytest.fixture
def refusal(launch: Callable[..., Said], small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """As `launch`, for what must be refused before a model is built or a run folder changed; returns the message."""

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was built before the input was refused")

    def run(*arguments: str) -> str:
        before = contents(Path(small_recipe["run_dir"]))
        with monkeypatch.context() as patch:
            patch.setattr(train_accelerate.model, "build", never)
            message = launch(*arguments).refusal
        assert contents(Path(small_recipe["run_dir"])) == before
        return message

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes; the lock file, which says who is running, left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
