"""Checkpoint folders by their names: made, completed, set aside, deleted. The kinds of names are in checkpoint.py."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from foundation.errors import InputError
from foundation.files import fsync, name_aside
from foundation.integrity import wrong_sizes
from pretrain.checkpoint.manifest import is_manifest, read_manifest

PARTIAL_STEP, REMOVED_STEP = ".partial-", ".removed-"
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
    """Let what is complete in `partial` appear as `final`; what had that name is set aside. Raises OSError."""
    fsync(partial)
    if final.exists():
        set_aside(final)
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


def set_aside(path: Path) -> Path:
    """Free the name of a checkpoint, or of a file, without losing the data."""
    aside = name_aside(path)
    os.rename(path, aside)
    _log.warning("%s was set aside as %s; remove it when you do not need it", path, aside.name)
    return aside


def remove(parent: Path, folders: list[Path]) -> None:
    """Delete `folders` and what dead writers and deleters left in `parent`. A failure is logged: it costs only space, and
    does not keep the others. What others have put into a folder is set aside. Of a link the link alone goes: whoever made it may
    want what it leads to."""
    for folder in folders:
        _attempt(_begin_removal, folder)
    for prefix in (REMOVED_STEP, PARTIAL_STEP):
        for leftover in parent.glob(f"{prefix}step-*"):
            _attempt(os.unlink if leftover.is_symlink() else shutil.rmtree, leftover)


def _begin_removal(folder: Path) -> None:
    if not folder.is_symlink():
        ours = {file.name for file in read_manifest(folder).files}
        if others := [path for path in folder.iterdir() if path.name not in ours and not is_manifest(path.name)]:
            aside = name_aside(folder)
            aside.mkdir()
            for path in others:
                path.rename(aside / path.name)
            _log.warning("%s is none of the run's: it is kept in %s, as the checkpoint goes", others[0], aside.name)
    # Renamed first, so that an interrupted deletion leaves nothing that looks like a checkpoint.
    os.rename(folder, folder.with_name(f"{REMOVED_STEP}{folder.name}"))


def _attempt(work: Callable[[Path], object], path: Path) -> None:
    try:
        work(path)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", path, error)
