"""Checkpoint folders by their names: made, completed, abandoned, deleted. checkpoint.py shows the kinds of names."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from foundation.errors import InputError
from foundation.files import fsync
from foundation.integrity import wrong_sizes
from pretrain.checkpoint.manifest import read_manifest

PARTIAL_STEP, REMOVED_STEP, ABANDONED_STEP, REPLACED_STEP = ".partial-", ".removed-", "abandoned-", "replaced-"
_STEP = re.compile(r"step-\d{8,}")
_log = logging.getLogger(__name__)


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder; ValueError for another name."""
    return int(folder.name.removeprefix("step-"))


def step_folders(parent: Path) -> list[Path]:
    """All folders in `parent` that are named like a checkpoint, newest first."""
    folders = [path for path in parent.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def partial_folder(final: Path) -> Path:
    """Returns the folder in which the checkpoint `final` is written before it has its name."""
    return final.with_name(f"{PARTIAL_STEP}{final.name}")


def make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def give_name(partial: Path, final: Path) -> None:
    """Let what is complete in `partial` appear as `final`; what had that name keeps its files under another. Raises OSError."""
    fsync(partial)
    if final.exists():
        move_aside(final, REPLACED_STEP)
    os.rename(partial, final)
    fsync(final.parent)


def finish_renames(parent: Path) -> None:
    """Name the partial folders that have their manifest: their writers died just before doing so."""
    for partial in parent.glob(f"{PARTIAL_STEP}step-*"):
        final = parent / partial.name.removeprefix(PARTIAL_STEP)
        if not final.exists() and looks_complete(partial):
            os.rename(partial, final)
            fsync(parent)


def looks_complete(folder: Path) -> bool:
    """Whether all files are there with their sizes. Hashing them is left to loading."""
    try:
        return not wrong_sizes(folder, read_manifest(folder).files)
    except InputError:
        return False


def move_aside(folder: Path, prefix: str) -> Path:
    """Rename a checkpoint so that no run resumes from it unless it is named; returns the new path.

    An older one of that step and prefix goes: the run has saved a whole checkpoint of the step since.
    """
    aside = folder.with_name(f"{prefix}{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(folder, aside)
    return aside


def remove(parent: Path, folders: list[Path]) -> None:
    """Delete `folders`, and what dead writers and deleters left in `parent`. A failure is logged: it costs only space."""
    try:
        for folder in folders:
            # Renamed first, so that an interrupted deletion leaves nothing that looks like a checkpoint.
            os.rename(folder, folder.with_name(f"{REMOVED_STEP}{folder.name}"))
        for prefix in (REMOVED_STEP, PARTIAL_STEP):
            for leftover in parent.glob(f"{prefix}*step-*"):
                # Of a link the link alone goes: whoever made it may want what it leads to.
                leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", parent, error)


def abandoned(parent: Path) -> list[Path]:
    """The checkpoints in `parent` from which a run has gone back."""
    return list(parent.glob(f"{ABANDONED_STEP}step-*"))
