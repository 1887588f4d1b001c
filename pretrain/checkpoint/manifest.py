"""What a checkpoint folder must hold: the size and SHA-256 of each file, and where each tensor's pieces are.

    {"format": 1, "step": 100, "world_size": 2,
     "files":     {"model-00000-of-00002.safetensors": {"bytes": 3441185, "sha256": "9f8e..."}, ...},
     "model":     {"model.norm.weight": {"dtype": "BF16", "shape": [2048], "pieces": [
                      {"file": "model-00000-of-00002.safetensors", "offset": [0], "shape": [1024]}, ...]}, ...},
     "optimizer": {...},
     "sha256": "of all the above, so that a flipped bit in the manifest shows too"}

Nothing but the pieces ties a checkpoint to the processes that wrote it, so any world size loads it. No torch here: a folder can
be listed and verified on a machine without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.integrity import FileRecord, hash_of
from foundation.reading import load_json, reason_of

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


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
        files = {file.name: {"bytes": file.size, **file.hashes} for file in self.files}
        content = {"format": FORMAT, **asdict(self), "files": files}
        return json.dumps({**content, "sha256": hash_of(content)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`; InputError where there is none, or one that is damaged."""
    path = folder / MANIFEST
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise InputError(f"{folder}: not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    written = content.pop("sha256", None) if isinstance(content, dict) else None
    if written is None or written != hash_of(content):
        raise InputError(f"{path}: its content does not match its own SHA-256; the file is damaged")
    files = [FileRecord(name, file["bytes"], {"sha256": file["sha256"]}) for name, file in content["files"].items()]
    return Manifest(content["step"], content["world_size"], files, _entries(content["model"]), _entries(content["optimizer"]))


def _entries(group: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            entry["dtype"],
            tuple(entry["shape"]),
            tuple(Piece(piece["file"], tuple(piece["offset"]), tuple(piece["shape"])) for piece in entry["pieces"]),
        )
        for name, entry in group.items()
    }
