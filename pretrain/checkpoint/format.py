"""A checkpoint on the disk: the names of its folder, the manifest of what it must hold, and its tensors in safetensors files.

    checkpoints/                                  on a disk that all processes share
      step-00000100/                              complete
        model-00000-of-00002-part-000.safetensors      parameters under their Hugging Face names, by rank
        optimizer-00000-of-00002-part-000.safetensors
        state.json                                step, tokens and what defines the training
        manifest.json                             written last
      .partial-step-00000200/                     while it is written
      abandoned-step-00000150/                    set aside: gone back to before it, written anew, too old; a save deletes it

    manifest.json:
    {"format": 1, "step": 100, "world_size": 2,
     "files":     [{"name": "model-00000-of-00002-part-000.safetensors", "size": 3441185, "hashes": {"sha256": "9f8e..."}}, ...],
     "model":     {"model.norm.weight": {"dtype": "BF16", "shape": [2048], "checksum": 33292288,
                                         "pieces": [
                      {"file": "model-00000-of-00002-part-000.safetensors", "offset": [0], "shape": [1024]}, ...]}, ...},
     "optimizer": {...},
     "sha256": "of all the above, so that a flipped bit in the manifest shows too"}

Each file is flushed to the disk, the manifest comes last, and only then does the folder get its name. So a process may die at any
instruction, and the machine at any moment: a folder named step-* is whole.

Each process holds one block of each tensor: all of it (plain tensors, Replicate) or its part (DTensor, Shard). A block that
several processes hold is written by one of them, so data-parallel replicas share the writing. docs/log.md
says why torch.distributed.checkpoint is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundation.errors import InputError
from foundation.files import FileRecord, by_umask, fsync, hash_file, hash_of, write_file
from foundation.reading import load_object, refusing
from pretrain.model.gradients import local_part

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
PARTIAL_STEP, ABANDONED_STEP = ".partial-", "abandoned-"
# of a file, which its last block may exceed: enough files to keep the hashing threads busy
PART_BYTES = 2 * 2**30
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
}
DTYPES |= {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors has them
_log = logging.getLogger(__name__)


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder; ValueError for another name."""
    return int(folder.name.removeprefix("step-"))


def step_folders(parent: Path) -> list[Path]:
    """All folders in `parent` that are named like a checkpoint, newest first."""
    return sorted(
        (path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)),
        key=step_of,
        reverse=True,
    )


def newest_in(source: Path) -> Path:
    """The newest checkpoint of the run folder `source`; `source` itself where it is no such folder."""
    return next(iter(step_folders(source / "checkpoints")), source)


def partial_folder(final: Path) -> Path:
    """Returns the folder in which the checkpoint `final` is written before it has its name."""
    return final.with_name(f"{PARTIAL_STEP}{final.name}")


def complete(final: Path, manifest: Manifest, state: bytes) -> None:
    """Write the state and, last, the manifest beside the files that the manifest has, and let the checkpoint appear as `final`;
    what had that name is set aside. Raises OSError."""
    partial, record = (
        partial_folder(final),
        FileRecord(STATE, len(state), {"sha256": hashlib.sha256(state).hexdigest()}),
    )
    write_file(partial / STATE, state)
    content = {"format": FORMAT, **asdict(replace(manifest, files=[*manifest.files, record]))}
    write_file(
        partial / MANIFEST, json.dumps({**content, "sha256": hash_of(content)}, indent=1).encode()
    )
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
    """Delete `folders`, what was set aside in `parent` and what dead writers left. A failure is logged: it costs only space."""
    try:
        for folder in folders:
            set_aside(folder)  # an interrupted deletion leaves nothing that looks like a checkpoint
        for leftover in (*parent.glob(f"{ABANDONED_STEP}step-*"), *parent.glob(f"{PARTIAL_STEP}*")):
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
    checksum: int | None = None  # of the live tensor; None in checkpoints of earlier versions


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    files: list[FileRecord]  # all but the manifest itself, each with its SHA-256
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`; InputError where there is none, or one that is damaged."""
    path = folder / MANIFEST
    content = load_object(
        path, "this is no complete checkpoint; name a step-* folder in the `checkpoints` of a run"
    )
    if content.pop("sha256", None) != hash_of(content):
        raise InputError(f"{path}: its content does not match its own SHA-256; the file is damaged")
    manifest = TypeAdapter(Manifest).validate_python(content)
    files = {record.name for record in manifest.files}
    for name, entry in (*manifest.model.items(), *manifest.optimizer.items()):
        values = sum(math.prod(piece.shape) for piece in entry.pieces if piece.file in files)
        if values != math.prod(entry.shape):
            raise InputError(f"{path}: the pieces of {name} in its files do not fill the tensor")
    return manifest


# ── Who writes what ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ShardBlock:
    """What a process holds of a tensor, without its data, so that it can be sent to the others."""

    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int


def block_of(tensor: Tensor) -> ShardBlock:
    """Returns where this process's part of `tensor` lies in the whole; ValueError for a DTensor whose part is not one block."""
    local = local_part(tensor)
    offset: tuple[int, ...] = (0,) * local.dim()
    if isinstance(tensor, DTensor):
        # torch's own description, for its checkpoints; refuses Partial placements
        (chunk,) = tensor.__create_chunk_list__()
        offset = tuple(chunk.offsets)
    return ShardBlock(
        DTYPE_NAMES[local.dtype], tuple(tensor.shape), offset, tuple(local.shape), local.nbytes
    )


def rank_stem(kind: str, rank: int, world_size: int) -> str:
    """How the names of all files begin that `rank` writes."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}"


def lay_out(
    kind: str,
    offers: list[dict[str, ShardBlock]],
    checksums: Mapping[str, int | None],
) -> dict[str, TensorEntry]:
    """The index of a checkpoint: which rank writes each block into which file. Each distinct block is for one of the ranks that
    hold it, the largest first for the one with least to write (LPT), which begins a new file after each PART_BYTES.

    `offers[rank]` has the block that this rank holds of each tensor. A pure function, so every rank computes the same index
    without a further exchange.
    """
    whole = {name: block for offer in offers for name, block in offer.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in sorted(whole)}
    holders: dict[tuple[str, ShardBlock], list[int]] = {}
    for rank, offer in enumerate(offers):
        for held in offer.items():
            holders.setdefault(held, []).append(rank)
    written = [0] * len(offers)  # bytes of each rank so far
    for name, block in sorted(holders, key=lambda held: (-held[1].bytes, held[0], held[1].offset)):
        if block.bytes:  # of more ranks than rows some hold nothing
            rank = min(holders[name, block], key=lambda rank: (written[rank], rank))
            file = f"{rank_stem(kind, rank, len(offers))}-part-{written[rank] // PART_BYTES:03d}.safetensors"
            pieces[name].append(Piece(file, block.offset, block.shape))
            written[rank] += block.bytes
    return {
        name: TensorEntry(
            whole[name].dtype,
            whole[name].global_shape,
            tuple(parts),
            checksums[name],
        )
        for name, parts in pieces.items()
    }


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write `tensors` (local data, any device) as one safetensors file, flushed to disk; returns its size and SHA-256. Neither
    writing nor hashing holds Python's lock. InputError where the disk is full."""
    with refusing((SafetensorError,), f"{path}: cannot be written"):
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    by_umask(path)
    fsync(path)
    return FileRecord(path.name, path.stat().st_size, {"sha256": hash_file(path)})


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mismatches(index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]) -> list[str]:
    """One line for each reason why the saved tensors cannot be loaded into `targets`; empty: they can.

    A floating-point tensor may be loaded into another floating-point dtype: moments may be kept in another one.
    """
    problems = [f"it lacks {name}" for name in sorted(targets.keys() - index.keys())]
    problems += [f"only it has {name}" for name in sorted(index.keys() - targets.keys())]
    for name in sorted(targets.keys() & index.keys()):
        saved, dtype, wanted = index[name], DTYPES[index[name].dtype], targets[name]
        alike = dtype == wanted.dtype or (
            dtype.is_floating_point and wanted.dtype.is_floating_point
        )
        if saved.shape != tuple(wanted.shape) or not alike:
            ours = f"{DTYPE_NAMES[wanted.dtype]} {list(wanted.shape)}"
            problems.append(f"{name} is {saved.dtype} {list(saved.shape)} there and {ours} here")
    return problems


def load_tensors(
    folder: Path, index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]
) -> None:
    """Fill `targets`, of any sharding and without mismatches, from the checkpoint in `folder`, converted to their dtypes.

    Files are mapped, not loaded: a rank touches only the bytes of its own part.
    """
    with ExitStack() as stack, torch.no_grad():
        open_file = cache(
            lambda file: stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
        )
        for name, target in targets.items():
            mine, local = block_of(target), local_part(target)
            for piece in index[name].pieces:
                if overlap := _overlap(piece, mine):
                    (where, here), file = overlap, open_file(piece.file)
                    # without dimensions there are no slices
                    is_whole = where == tuple(slice(0, size) for size in piece.shape)
                    local[here].copy_(
                        file.get_tensor(name) if is_whole else file.get_slice(name)[where]
                    )


def _overlap(one: Piece | ShardBlock, other: Piece | ShardBlock) -> list[tuple[slice, ...]] | None:
    """What two blocks of a tensor share, as slices of each; None if they share nothing."""
    sizes = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    where = [(max(a, b), min(a + n, b + m)) for a, n, b, m in sizes]
    if any(start >= stop for start, stop in where):
        return None
    return [
        tuple(slice(a - base, b - base) for (a, b), base in zip(where, each.offset, strict=True))
        for each in (one, other)
    ]
