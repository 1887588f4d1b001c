"""The format of a checkpoint: its folder, its manifest, and its tensors in safetensors files.

    checkpoints/                                  on a disk that all processes share
      step-00000100/                              a complete checkpoint
        model-00000-of-00002-part-000.safetensors      parameters that rank 0 of 2 has written
        optimizer-00000-of-00002-part-000.safetensors  tensors of the optimizer
        state.json                                step, tokens and the identity of the training
        manifest.json                             index of files and tensors, written last
      .partial-step-00000200/                     a checkpoint that is being written
      abandoned-step-00000150/                    a checkpoint set aside; the next save deletes it

    manifest.json:
    {"format": 1, "step": 100, "world_size": 2,
     "files":     [{"name": "model-00000-of-00002-part-000.safetensors",
                    "size": 3441185, "hashes": {"sha256": "9f8e..."}}, ...],
     "model":     {"model.norm.weight": {"dtype": "BF16", "shape": [2048],
                                         "weighted_sum": 33292288, "pieces": [
                      {"file": "model-00000-of-00002-part-000.safetensors",
                       "offset": [0], "shape": [1024]}, ...]}, ...},
     "optimizer": {...},
     "sha256": "of everything above, to detect a flipped bit in the manifest"}

A checkpoint is set aside (its folder is renamed to abandoned-*) in three cases: the run went back
to an earlier step, a new checkpoint of the same step replaces it, or it is older than the
checkpoints that the run keeps.

Each file is flushed to the disk. The manifest is written after all other files, and only then is
the folder renamed to step-*. Therefore a folder with this name is complete, even if a process or
the machine stops during a save.

Each process holds one block of each tensor. The block is the full tensor (plain tensors, Replicate)
or a part of the tensor (DTensor, Shard). If several processes hold the same block, as data-parallel
replicas do, one of them writes the block. `lay_out` selects this process for each block, so that
all replicas write about the same number of bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundation.errors import InputError, as_input_error
from foundation.files import (
    FileRecord,
    apply_umask,
    fsync,
    hash_file,
    hash_of,
    remove_tree,
    write_file,
)
from foundation.reading import load_object
from pretrain.checkpoint.folders import MANIFEST, STATE
from pretrain.model.gradients import local_part

FORMAT = 1
# Prefixes of the names of folders that are not complete, or are set aside.
PARTIAL_PREFIX = ".partial-"
SET_ASIDE_PREFIX = "abandoned-"
# Number of bytes after which a rank starts a new file. The last block of a file may exceed this
# limit. With this size, a large checkpoint has enough files for all hashing threads.
PART_BYTES = 2 * 2**30
# Map the dtype names of safetensors to torch dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_log = logging.getLogger(__name__)


# ── Folders ──


def partial_folder(final: Path) -> Path:
    """Return the temporary folder of the checkpoint `final`.

    When the checkpoint is complete, this folder is renamed to `final`.
    """
    return final.with_name(f"{PARTIAL_PREFIX}{final.name}")


def complete(final: Path, manifest: Manifest, state: bytes) -> None:
    """Write the state and the manifest of a checkpoint, and give its folder the final name.

    All files in `manifest` must have been written to the partial folder. If the folder `final`
    exists, it is set aside. Raises OSError if a file cannot be written.

    Args:
        final: Folder of the complete checkpoint.
        manifest: Files and tensors of the checkpoint. The file of the state is added.
        state: Content of the file of the state, as JSON.
    """
    partial = partial_folder(final)
    write_file(partial / STATE, state)
    state_record = FileRecord(STATE, len(state), {"sha256": hashlib.sha256(state).hexdigest()})
    with_state = replace(manifest, files=[*manifest.files, state_record])
    content = {"format": FORMAT, **asdict(with_state)}
    content["sha256"] = hash_of(content)
    write_file(partial / MANIFEST, json.dumps(content, indent=1).encode())
    fsync(partial)
    if final.exists():
        set_aside(final)
    os.rename(partial, final)
    fsync(final.parent)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint, so that no run resumes from it automatically. Return the new path.

    If another folder has the new path, that folder is deleted first.
    """
    aside = folder.with_name(f"{SET_ASIDE_PREFIX}{folder.name}")
    if os.path.lexists(aside):
        remove_tree(aside)
    os.rename(folder, aside)
    return aside


def remove(parent: Path, folders: list[Path]) -> None:
    """Delete checkpoints that are not needed any more.

    Delete the checkpoints in `folders`. Also delete all checkpoints in `parent` that were set
    aside, and all incomplete checkpoints, so no save may be in progress. If a deletion fails, log a
    warning and raise no error, because the remaining files only occupy disk space.
    """
    try:
        for folder in folders:
            # A checkpoint is renamed before it is deleted. Otherwise an interrupted deletion would
            # leave an incomplete folder with the name of a complete checkpoint.
            set_aside(folder)
        for prefix in (SET_ASIDE_PREFIX, PARTIAL_PREFIX):
            for leftover in list(parent.glob(f"{prefix}step-{'[0-9]' * 8}")):
                remove_tree(leftover)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", parent, error)


# ── The manifest ──


@dataclass(frozen=True)
class Piece:
    """One block of a tensor, and the file that stores the block.

    The key of the block in the file is the name of the tensor.
    """

    # Name of the file. "" until `lay_out` assigns the block to a file.
    file: str
    # Index of the block's first value in the full tensor, for each dimension.
    offset: tuple[int, ...]
    # Shape of the block.
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Dtype, shape and pieces of one tensor in a checkpoint."""

    # Name of the dtype in safetensors.
    dtype: str
    # Shape of the full tensor.
    shape: tuple[int, ...]
    # Disjoint blocks that together are the full tensor.
    pieces: tuple[Piece, ...]
    # Checksum of the tensor in memory (see `pretrain.checkpoint.checkpoint.checksums`).
    weighted_sum: int


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json: the files and tensors of a checkpoint."""

    step: int
    # Number of ranks that wrote the checkpoint.
    world_size: int
    # Name, size and SHA-256 of all files except the manifest.
    files: list[FileRecord]
    # Map the names of the model's tensors to their entries.
    model: dict[str, TensorEntry]
    # Map the names of the optimizer's tensors to their entries.
    optimizer: dict[str, TensorEntry]

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Map the names of all tensors to their entries."""
        return self.model | self.optimizer


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint at `folder`.

    Raises InputError if the manifest is missing or damaged.
    """
    path = folder / MANIFEST
    content = load_object(
        path,
        "this is no complete checkpoint; choose a step-* folder in the `checkpoints` of a run",
    )
    if content.pop("sha256", None) != hash_of(content):
        raise InputError(
            f"{path}: the file is damaged, because its content does not match its SHA-256"
        )
    return TypeAdapter(Manifest).validate_python(content)


# ── The assignment of blocks to ranks ──


def block_of(tensor: Tensor) -> Piece:
    """Return this process's block of `tensor`, without a file.

    Raises ValueError if `tensor` is a DTensor and this process holds several blocks of it, or none.
    """
    local = local_part(tensor)
    offset: tuple[int, ...] = (0,) * local.dim()
    if isinstance(tensor, DTensor):
        # torch.distributed.checkpoint calls this method too. The method raises an error for Partial
        # placements.
        (chunk,) = tensor.__create_chunk_list__()
        offset = tuple(chunk.offsets)
    return Piece("", offset, tuple(local.shape))


def rank_stem(kind: str, rank: int, world_size: int) -> str:
    """Return the common prefix of the names of the files that `rank` writes.

    `kind` is "model" or "optimizer".
    """
    return f"{kind}-{rank:05d}-of-{world_size:05d}"


def lay_out(
    kind: str,
    tensors: Mapping[str, Tensor],
    offers: list[dict[str, Piece]],
    checksums: Mapping[str, int],
) -> dict[str, TensorEntry]:
    """Assign the blocks of all tensors to ranks and files.

    Return a dict that maps the name of each tensor to its entry in the manifest.

    Each distinct block is written by one of the ranks that hold the block. The blocks are assigned
    in order of size, the largest block first. Each block is assigned to the rank that has the
    fewest bytes at that point (LPT scheduling). A rank starts a new file after every PART_BYTES.
    The result depends on the arguments only, so all ranks compute the same entries without another
    collective.

    Args:
        kind: "model" or "optimizer".
        tensors: Tensors by name. Their dtypes and shapes are the same on all ranks.
        offers: For each rank, a dict that maps the name of each tensor to the block that this rank
            holds (see `block_of`).
        checksums: Map the name of each tensor to its checksum.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in sorted(tensors)}
    holders: dict[tuple[str, Piece], list[int]] = {}
    for rank, offer in enumerate(offers):
        for named_block in offer.items():
            holders.setdefault(named_block, []).append(rank)
    sizes = {
        (name, block): math.prod(block.shape) * tensors[name].element_size()
        for name, block in holders
    }
    written = [0] * len(offers)  # bytes assigned to each rank
    largest_first = sorted(holders, key=lambda item: (-sizes[item], item[0], item[1].offset))
    for name, block in largest_first:
        if not sizes[name, block]:  # the tensor has fewer rows than there are ranks
            continue
        rank = min(holders[name, block], key=lambda rank: (written[rank], rank))
        stem = rank_stem(kind, rank, len(offers))
        file = f"{stem}-part-{written[rank] // PART_BYTES:03d}.safetensors"
        pieces[name].append(replace(block, file=file))
        written[rank] += sizes[name, block]
    entries = {}
    for name, parts in pieces.items():
        tensor = tensors[name]
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[name] = TensorEntry(dtype, tuple(tensor.shape), tuple(parts), checksums[name])
    return entries


# ── Writing ──


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write `tensors` to one safetensors file, and flush the file to the disk.

    Return the record of the file, with its size and SHA-256. `tensors` are local parts on any
    device. Other Python threads can run during writing and hashing. Raises InputError if the file
    cannot be written, for example because the disk is full.
    """
    with as_input_error((SafetensorError,), f"{path}: cannot be written"):
        # No variable refers to the copies, so that they are freed before the file is hashed.
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    apply_umask(path)
    fsync(path)
    return FileRecord(path.name, path.stat().st_size, {"sha256": hash_file(path)})


# ── Reading ──


def mismatches(index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]) -> list[str]:
    """Return one line for each reason why the saved tensors cannot be loaded into `targets`.

    A floating-point tensor can be loaded into another floating-point dtype, because a recipe may
    change the dtype of the moments.

    Args:
        index: Map the names of the saved tensors to their entries in the manifest.
        targets: Map names to the tensors to fill.
    """
    problems = [f"the checkpoint lacks {name}" for name in sorted(targets.keys() - index.keys())]
    for name, saved in sorted(index.items()):
        target = targets.get(name)
        if target is None:
            problems.append(f"only the checkpoint has {name}")
            continue
        dtype = DTYPES[saved.dtype]
        both_float = dtype.is_floating_point and target.dtype.is_floating_point
        is_convertible = both_float or dtype == target.dtype
        if saved.shape != tuple(target.shape) or not is_convertible:
            problems.append(
                f"{name} is {saved.dtype} {list(saved.shape)} in the checkpoint, and has another "
                "dtype or shape in this run"
            )
    return problems


def load_tensors(
    folder: Path, index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]
) -> None:
    """Copy the tensors of the checkpoint in `folder` into `targets`.

    The values are converted to the dtypes of `targets`. `mismatches` must have returned no line for
    `index` and `targets`. The targets may have any sharding. The files are mapped into memory, so
    that a rank reads only the bytes of its local parts.
    """
    with ExitStack() as stack, torch.no_grad():

        @cache
        def opened(file_name: str) -> Any:
            # A forged manifest may name a file outside of the folder.
            path = folder / os.path.basename(file_name)
            return stack.enter_context(safe_open(path, framework="pt", device="cpu"))

        for name, target in targets.items():
            local_block = block_of(target)
            for piece in index[name].pieces:
                overlap = local_part(target)[_overlap_in(local_block, piece)]
                if overlap.numel():
                    saved = opened(piece.file).get_tensor(name)
                    overlap.copy_(saved[_overlap_in(piece, local_block)])


def _overlap_in(block: Piece, other: Piece) -> tuple[slice, ...]:
    """Return the slices of `block` that select its overlap with `other`.

    `block` and `other` are blocks of the same tensor. If they do not overlap, the slices select
    nothing.
    """
    slices = []
    for offset, first, size in zip(block.offset, other.offset, other.shape, strict=True):
        start = first - offset
        # A negative index would count from the end of the block.
        slices.append(slice(max(start, 0), max(start + size, 0)))
    return tuple(slices)
