"""A checkpoint's folder: its names, and the manifest of what it must hold. No torch here, so any machine can list and verify it.

    checkpoints/                                  on a disk that all processes share
      step-00000100/                              complete
        model-00000-of-00002-part-000.safetensors      parameters under their Hugging Face names, by rank
        optimizer-00000-of-00002-part-000.safetensors
        state.json                                step, tokens and what defines the training
        manifest.json                             written last
      .partial-step-00000200/                     while it is written
      abandoned-step-00000150/                    a run went back to before it, or wrote the step anew; the next save deletes it
      .removed-step-00000050/                     while it is deleted

    manifest.json:
    {"format": 1, "step": 100, "world_size": 2,
     "files":     [{"name": "model-00000-of-00002-part-000.safetensors", "size": 3441185, "hashes": {"sha256": "9f8e..."}}, ...],
     "model":     {"model.norm.weight": {"dtype": "BF16", "shape": [2048], "pieces": [
                      {"file": "model-00000-of-00002-part-000.safetensors", "offset": [0], "shape": [1024]}, ...]}, ...},
     "optimizer": {...},
     "sha256": "of all the above, so that a flipped bit in the manifest shows too"}

Each file is flushed to the disk, the manifest comes last, and only then does the folder get its name. So a process may die at any
instruction, and the machine at any moment: a folder named step-* is whole. Nothing but the pieces ties it to the processes that
wrote it, so any number of processes loads it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import FileRecord, fsync, hash_of
from foundation.reading import load_object

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 1
PARTIAL_STEP, REMOVED_STEP, ABANDONED_STEP = ".partial-", ".removed-", "abandoned-"
_log = logging.getLogger(__name__)


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder; ValueError for another name."""
    return int(folder.name.removeprefix("step-"))


def step_folders(parent: Path) -> list[Path]:
    """All folders in `parent` that are named like a checkpoint, newest first."""
    return sorted((path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of, reverse=True)


def partial_folder(final: Path) -> Path:
    """Returns the folder in which the checkpoint `final` is written before it has its name."""
    return final.with_name(f"{PARTIAL_STEP}{final.name}")


def give_name(partial: Path, final: Path) -> None:
    """Let what is complete in `partial` appear as `final`; what had that name is set aside. Raises OSError."""
    fsync(partial)
    if final.exists():
        set_aside(final)
    os.rename(partial, final)
    fsync(final.parent)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint so that no run resumes from it unless it is named; returns the new path. One of that name goes."""
    aside = folder.with_name(f"{ABANDONED_STEP}{folder.name}")
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
        for leftover in (*parent.glob(f"{REMOVED_STEP}*"), *parent.glob(f"{PARTIAL_STEP}*")):
            shutil.rmtree(leftover)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", parent, error)


# ── The manifest ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Piece:
    """One block of a tensor and the file that holds it, under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: safetensors dtype name, global shape, and the disjoint pieces that cover it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    files: list[FileRecord]  # all but the manifest itself, each with its SHA-256
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]

    def to_json(self) -> bytes:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "sha256": hash_of(content)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`; InputError where there is none, or one that is damaged."""
    path = folder / MANIFEST
    content = load_object(path, "this is no complete checkpoint, use another")
    if content.pop("sha256", None) != hash_of(content):
        raise InputError(f"{path}: its content does not match its own SHA-256; the file is damaged")
    files = [FileRecord(**file) for file in content["files"]]
    return Manifest(content["step"], content["world_size"], files, _entries(content["model"]), _entries(content["optimizer"]))


def _entries(group: Mapping[str, Any]) -> dict[str, TensorEntry]:
    entries = {}
    for name, entry in group.items():
        pieces = [Piece(piece["file"], tuple(piece["offset"]), tuple(piece["shape"])) for piece in entry["pieces"]]
        entries[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(pieces))
    return entries
