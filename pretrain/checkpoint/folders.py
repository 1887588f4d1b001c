"""The folders of checkpoints. `pretrain.checkpoint.format` describes their files.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MANIFEST = "manifest.json"
STATE = "state.json"


def step_folder(parent: Path, step: int) -> Path:
    """Return the path in `parent` of the checkpoint of step `step`."""
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder.

    Raises ValueError if `folder` does not have the name of a checkpoint.
    """
    return int(folder.name.removeprefix("step-"))


def step_folders(parent: Path) -> list[Path]:
    """Return the folders of complete checkpoints in `parent`, the newest first."""
    folders = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(folders, key=step_of, reverse=True)


def averaged(folders: Sequence[Path], number: int, every: int) -> list[Path]:
    """Return the checkpoints whose weights are averaged: at most `number`, the newest first.

    These are the newest of `folders`, and earlier ones whose steps are multiples of `every`. So the
    checkpoints that an interrupted run saves in addition do not change the mean.

    folders: complete checkpoints of a run, the newest first.
    """
    regular = [path for path in folders[1:] if step_of(path) % every == 0]
    return [*folders[:1], *regular[: number - 1]]


def newest_in(source: Path) -> Path:
    """Return the newest checkpoint of the run folder `source`.

    Return `source` itself if it contains no checkpoints.
    """
    return next(iter(step_folders(source / "checkpoints")), source)
