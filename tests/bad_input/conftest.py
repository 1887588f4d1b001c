"""Refusals of the launcher, dozens of them, in this process: importing torch anew for each would take minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.model import huggingface


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub names are looked up in the local cache only, so a test neither needs a network nor waits for one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def launch(train_here: Callable[..., Any]) -> Callable[..., Any]:
    """Start the launcher on `small_recipe` as it is by then, with more arguments, and wait for its end."""
    return train_here


@pytest.fixture
def refusal(launch: Callable[..., Any], small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """As `launch`, for what must be refused before a model is built or a run folder changed; returns the message."""

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was built before the input was refused")

    def run(*arguments: str) -> str:
        before = contents(Path(small_recipe["run_dir"]))
        with monkeypatch.context() as patch:
            patch.setattr(huggingface, "build", never)
            message = launch(*arguments).refusal
        assert contents(Path(small_recipe["run_dir"])) == before
        return message

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes; the lock file, which says who is running, left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
