"""What happens to checkpoint folders as folders: their names, and the order of writes and renames that keeps them whole.

Knows nothing of tensors and ranks. A folder is called

    .partial-step-00000100      while it is written; once its manifest is there, only the name is missing
    step-00000100               complete
    step-00000100.replaced-1    given up by the run, kept for the user to look at or remove
    .removed-step-00000100      while it is deleted
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from foundation.errors import InputError
from foundation.files import fsync_folder, write_file
from pretrain.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_manifest, wrong_sizes

STATE = "state.json"
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"
_REMOVED = ".removed-"
_log = logging.getLogger(__name__)


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder; ValueError for another name."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder.name} is not the name of a checkpoint")
    return int(match[1])


def step_folders(parent: Path) -> list[Path]:
    """All in `parent` that is named like a checkpoint, newest first."""
    folders = [path for path in parent.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def start_writing(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` into."""
    partial = partial_of(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def partial_of(final: Path) -> Path:
    return final.with_name(f"{_PARTIAL}{final.name}")


def complete(final: Path, manifest: Manifest, state_json: bytes) -> None:
    """Add the state and, last, the manifest to the tensor files in the partial folder; then give it its name."""
    partial = partial_of(final)
    if wrong := wrong_sizes(partial, manifest.files):
        raise OSError(f"{wrong[0]}: rank 0 does not find what another rank wrote; all machines must share this file system")
    write_file(partial / STATE, state_json)
    manifest.files[STATE] = FileEntry.of(state_json)
    write_file(partial / MANIFEST, manifest.to_json())
    fsync_folder(partial)
    if final.exists():
        set_aside(final)
    os.rename(partial, final)
    fsync_folder(final.parent)


def finish_renames(parent: Path) -> None:
    """Name the partial folders that have their manifest: their writers died just before doing so."""
    for partial in parent.glob(f"{_PARTIAL}step-*"):
        final = parent / partial.name.removeprefix(_PARTIAL)
        if not final.exists() and looks_complete(partial):
            os.rename(partial, final)
            fsync_folder(parent)


def looks_complete(folder: Path) -> bool:
    """What can be told without reading the tensors; their hashes are for loading."""
    try:
        return not wrong_sizes(folder, read_manifest(folder).files)
    except InputError:
        return False


def set_aside(folder: Path) -> Path:
    """Give up the name `step-*` without giving up the data."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    _log.warning("%s was set aside as %s; remove it when you do not need it", folder, aside.name)
    return aside


def remove(parent: Path, folders: list[Path]) -> None:
    """Delete `folders` and what dead writers and deleters left in `parent`. One that fails is logged: it costs only space."""
    try:
        for folder in folders:
            # Renamed first, so that a deletion cut short leaves nothing that looks like a checkpoint.
            os.rename(folder, folder.with_name(f"{_REMOVED}{folder.name}"))
        for prefix in (_REMOVED, _PARTIAL):
            for leftover in parent.glob(f"{prefix}step-*"):
                shutil.rmtree(leftover)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", parent, error)
