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

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from foundation.errors import InputError
from foundation.integrity import FileRecord, InnerName, Size
from foundation.reading import load_json, reason_of
from foundation.settings import first_mistake

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """One block of a tensor and the file that holds it, under the tensor's name."""

    file: InnerName
    offset: tuple[Size, ...]
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: safetensors dtype name, global shape, and the disjoint pieces that cover it."""

    dtype: str
    shape: tuple[Size, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class HashedFile:
    bytes: Size
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: Size
    world_size: Size
    files: list[FileRecord]  # all but the manifest itself, each with its SHA-256
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]

    def to_json(self) -> bytes:
        files = {file.name: {"bytes": file.size, **file.hashes} for file in self.files}
        content = {"format": FORMAT, **asdict(self), "files": files}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


_FILES = TypeAdapter(dict[InnerName, HashedFile])
_MANIFEST = TypeAdapter(Manifest)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`; InputError where there is none, or none that can be trusted."""
    path = folder / MANIFEST
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise InputError(f"{folder}: not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    claimed = content.pop("sha256", None) if isinstance(content, dict) else None
    if claimed is None or claimed != _digest(content):
        raise InputError(f"{path}: its content does not match its own SHA-256; the file is damaged")
    if content.pop("format", None) != FORMAT:
        raise InputError(
            f"{path}: written in another checkpoint format than this version's ({FORMAT}); resume with the version that wrote it"
        )
    try:
        files = _FILES.validate_python(content.get("files"))
        content["files"] = [FileRecord(name, file.bytes, {"sha256": file.sha256}) for name, file in files.items()]
        manifest = _MANIFEST.validate_python(content)
        _check_pieces(manifest)
    except ValidationError as error:
        raise InputError(f"{path}: not a manifest of a checkpoint: {first_mistake(error)}") from None
    except ValueError as error:
        raise InputError(f"{path}: not a manifest of a checkpoint: {error}") from None
    return manifest


def _check_pieces(manifest: Manifest) -> None:
    """ValueError unless every piece lies inside its tensor, and in a file that is listed and so was hashed."""
    listed = {file.name for file in manifest.files}
    for name, entry in [*manifest.model.items(), *manifest.optimizer.items()]:
        for piece in entry.pieces:
            if piece.file not in listed:
                raise ValueError(f"{name} lies in {piece.file}, which it does not list")
            if not len(entry.shape) == len(piece.offset) == len(piece.shape):
                raise ValueError(f"{name} and its pieces differ in their number of dimensions")
            if any(start + size > whole for start, size, whole in zip(piece.offset, piece.shape, entry.shape, strict=True)):
                raise ValueError(f"a piece of {name} lies outside it")
