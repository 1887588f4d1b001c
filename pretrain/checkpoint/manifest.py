"""What a checkpoint folder must hold: the size and SHA-256 of each file, and where each tensor's pieces are.

    {"format": 1, "step": 100, "world_size": 2,
     "files":     {"model-00000-of-00002.safetensors": {"bytes": 3441185, "sha256": "9f8e..."}, ...},
     "model":     {"model.norm.weight": {"dtype": "BF16", "shape": [2048], "pieces": [
                      {"file": "model-00000-of-00002.safetensors", "offset": [0], "shape": [1024]}, ...]}, ...},
     "optimizer": {...},
     "sha256": "of all the above, so that a flipped bit in the manifest shows too"}

Nothing but the pieces ties a checkpoint to the processes that wrote it, so any world size loads it. No torch here: a folder can
be listed and verified on a machine without it.

Machines that share no disk write a manifest each, about the files on theirs: `manifest.json` where rank 0 is, elsewhere
`manifest-00008.json`, by its leader. Each says under `disks` which there are and where they lie. Their files can be copied into
one folder, whose manifests are read as one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from foundation.errors import InputError
from foundation.integrity import FileRecord, InnerName, Size, hash_of
from foundation.reading import load_json, reason_of
from foundation.settings import first_mistake

MANIFEST = "manifest.json"
FORMAT = 1
NOT_HERE = "are not here"  # said of shards on a disk that another machine has
_NAME = re.compile(r"manifest(-\d{5,})?\.json")


def manifest_name(leader: int) -> str:
    """Returns the name of the manifest about the disk whose files rank `leader` completes."""
    return f"manifest-{leader:05d}.json" if leader else MANIFEST


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

    @property
    def is_covered(self) -> bool:
        """Whether every value lies in one of the pieces."""
        return sum(math.prod(piece.shape) for piece in self.pieces) == math.prod(self.shape)


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
    disks: dict[str, tuple[str, str]] = field(default_factory=dict)  # by leader: "ranks 8 to 15", "host:/path"; of several

    @property
    def uncovered(self) -> list[str]:
        """The tensors of which the files do not hold every value."""
        return [name for name, entry in (*self.model.items(), *self.optimizer.items()) if not entry.is_covered]

    def to_json(self) -> bytes:
        files = {file.name: {"bytes": file.size, **file.hashes} for file in self.files}
        content = {"format": FORMAT, **asdict(self), "files": files}
        if not self.disks:
            del content["disks"]
        return json.dumps({**content, "sha256": hash_of(content)}, indent=1).encode()


_FILES = TypeAdapter(dict[InnerName, HashedFile])
_MANIFEST = TypeAdapter(Manifest)


def is_manifest(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`, or of all disks whose files are there; InputError where there is none, or one
    that cannot be trusted."""
    names = sorted(path.name for path in folder.glob("manifest*.json") if is_manifest(path.name))
    return _merged(folder, [_read(folder, name) for name in names or [MANIFEST]])


def missing_disks(folder: Path, manifest: Manifest) -> list[str]:
    """One line for each disk whose files are not in `folder`, though ranks wrote a part of this checkpoint there."""
    absent = [note for leader, note in manifest.disks.items() if not (folder / manifest_name(int(leader))).exists()]
    return [f"the shards of {ranks} {NOT_HERE}; copy all files of {place} into it" for ranks, place in absent]


def _merged(folder: Path, manifests: list[Manifest]) -> Manifest:
    """What several disks hold of one checkpoint; a block that lies on more than one counts once."""
    first, *others = manifests
    if not others:
        return first
    files = {file.name: file for manifest in manifests for file in manifest.files}
    if any(files[file.name] != file for manifest in manifests for file in manifest.files) or any(
        (other.step, other.world_size, other.disks) != (first.step, first.world_size, first.disks) for other in others
    ):
        raise InputError(
            f"{folder}: its manifests are of different checkpoints; copy the files of one checkpoint into one folder"
        )
    groups = [[each.model for each in manifests], [each.optimizer for each in manifests]]
    try:
        model, optimizer = ({name: _joined([g[name] for g in group]) for name in group[0]} for group in groups)
    except KeyError as name:
        raise InputError(
            f"{folder}: one of its manifests lacks {name}; copy the files of one checkpoint into one folder"
        ) from None
    return Manifest(first.step, first.world_size, list(files.values()), model, optimizer, first.disks)


def _joined(entries: list[TensorEntry]) -> TensorEntry:
    pieces = {(piece.offset, piece.shape): piece for entry in entries for piece in entry.pieces}
    return TensorEntry(entries[0].dtype, entries[0].shape, tuple(pieces.values()))


def _read(folder: Path, name: str) -> Manifest:
    path = folder / name
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise InputError(f"{folder}: not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    claimed = content.pop("sha256", None) if isinstance(content, dict) else None
    if claimed is None or claimed != hash_of(content):
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
