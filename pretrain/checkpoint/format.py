"""The format of a checkpoint: its folder, its manifest, and its tensors in safetensors files.

    checkpoints/                                  on a disk that all processes share
      step-00000100/                              complete
        model-00000-of-00002-part-000.safetensors      parameters by Hugging Face name, by rank
        optimizer-00000-of-00002-part-000.safetensors
        state.json                                step, tokens and the identity of the training
        manifest.json                             written last
      .partial-step-00000200/                     being written
      abandoned-step-00000150/                    set aside; the next save deletes it

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

A checkpoint is set aside if the run went back to an earlier step, if it was written again, or if it
is too old.

Each file is flushed to the disk, the manifest comes last, and only then does the folder get its
name. A process may die at any instruction and the machine at any moment: a folder named step-* is
complete.

Each process holds one block of each tensor: the full tensor (plain tensors, Replicate) or a part of
it (DTensor, Shard). A block that several processes hold is written by one of them, so data-parallel
replicas share the writing. docs/log.md explains why torch.distributed.checkpoint is not used.
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
MANIFEST = "manifest.json"
STATE = "state.json"
PARTIAL_STEP = ".partial-"
ABANDONED_STEP = "abandoned-"
# Size at which a rank starts a new file. The last block of a file may exceed it. Files of this size
# are enough to keep the hashing threads busy.
PART_BYTES = 2 * 2**30
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # the names of safetensors
_log = logging.getLogger(__name__)


# ── Folders ──


def step_folder(parent: Path, step: int) -> Path:
    """Return the folder of checkpoint `step` in `parent`."""
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder. Raise ValueError for another name."""
    return int(folder.name.removeprefix("step-"))


def step_folders(parent: Path) -> list[Path]:
    """Return the folders in `parent` with the name of a complete checkpoint, newest first."""
    folders = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(folders, key=step_of, reverse=True)


def newest_in(source: Path) -> Path:
    """Return the newest checkpoint of the run folder `source`, or `source` if it has none."""
    return next(iter(step_folders(source / "checkpoints")), source)


def partial_folder(final: Path) -> Path:
    """Return the folder where the checkpoint `final` is written before it is complete."""
    return final.with_name(f"{PARTIAL_STEP}{final.name}")


def complete(final: Path, manifest: Manifest, state: bytes) -> None:
    """Write the state and the manifest, and rename the partial folder to `final`.

    The files of `manifest` must be written already. An existing folder `final` is set aside. Raises
    OSError.
    """
    partial = partial_folder(final)
    state_record = FileRecord(STATE, len(state), {"sha256": hashlib.sha256(state).hexdigest()})
    write_file(partial / STATE, state)
    with_state = replace(manifest, files=[*manifest.files, state_record])
    content = {"format": FORMAT, **asdict(with_state)}
    signed = {**content, "sha256": hash_of(content)}
    write_file(partial / MANIFEST, json.dumps(signed, indent=1).encode())
    fsync(partial)
    if final.exists():
        set_aside(final)
    os.rename(partial, final)
    fsync(final.parent)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint so that no run resumes from it automatically. Return the new path.

    A folder that already has the new name is deleted.
    """
    aside = folder.with_name(f"{ABANDONED_STEP}{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(folder, aside)
    return aside


def remove(parent: Path, folders: list[Path]) -> None:
    """Delete `folders`, the checkpoints set aside in `parent`, and partial ones of dead processes.

    A failure is only logged, because it costs nothing but space.
    """
    try:
        for folder in folders:
            # Renamed first: an interrupted deletion leaves nothing that looks like a checkpoint.
            set_aside(folder)
        for leftover in (*parent.glob(f"{ABANDONED_STEP}step-*"), *parent.glob(f"{PARTIAL_STEP}*")):
            shutil.rmtree(leftover)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", parent, error)


# ── The manifest ──


@dataclass(frozen=True)
class Piece:
    """One block of a tensor, and the file that has it under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A full tensor, with the disjoint pieces that cover it."""

    dtype: str  # name in safetensors
    shape: tuple[int, ...]  # global
    pieces: tuple[Piece, ...]
    # Of the live tensor (`checksums`). None in checkpoints of earlier versions, whose `checksum`
    # did not weigh positions.
    weighted_sum: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Files and tensors of a checkpoint."""

    step: int
    world_size: int
    files: list[FileRecord]  # with SHA-256; all files except the manifest
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint at `folder`.

    Raises InputError if it is missing or damaged, or if its pieces do not fill a tensor.
    """
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


# ── The assignment of blocks to ranks ──


@dataclass(frozen=True)
class ShardBlock:
    """Description of a process's part of a tensor, without its data, to be sent to all ranks."""

    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int


def block_of(tensor: Tensor) -> ShardBlock:
    """Describe this process's part of `tensor`.

    Raises ValueError for a DTensor whose part is not one block.
    """
    local = local_part(tensor)
    offset: tuple[int, ...] = (0,) * local.dim()
    if isinstance(tensor, DTensor):
        # torch.distributed.checkpoint uses this method. It rejects Partial placements.
        (chunk,) = tensor.__create_chunk_list__()
        offset = tuple(chunk.offsets)
    return ShardBlock(
        DTYPE_NAMES[local.dtype], tuple(tensor.shape), offset, tuple(local.shape), local.nbytes
    )


def rank_stem(kind: str, rank: int, world_size: int) -> str:
    """Return the prefix of the names of all files that `rank` writes."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}"


def lay_out(
    kind: str,
    offers: list[dict[str, ShardBlock]],
    checksums: Mapping[str, int | None],
) -> dict[str, TensorEntry]:
    """Assign the blocks of all tensors to ranks and files, and return the index of the tensors.

    Each distinct block is written by one of the ranks that hold it. Blocks are assigned in order of
    size, the largest first, each to the rank with the fewest bytes so far (LPT scheduling). A rank
    begins a new file after every PART_BYTES. The function is pure, so all ranks compute the same
    index without another exchange.

    Args:
        kind: "model" or "optimizer".
        offers: For each rank, the block that it holds of each tensor.
        checksums: Checksum of each tensor.
    """
    any_block = {name: block for offer in offers for name, block in offer.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in sorted(any_block)}
    holders: dict[tuple[str, ShardBlock], list[int]] = {}
    for rank, offer in enumerate(offers):
        for named_block in offer.items():
            holders.setdefault(named_block, []).append(rank)
    written = [0] * len(offers)  # bytes assigned to each rank
    largest_first = sorted(holders, key=lambda item: (-item[1].bytes, item[0], item[1].offset))
    for name, block in largest_first:
        if not block.bytes:  # with more ranks than rows, some ranks hold nothing
            continue
        rank = min(holders[name, block], key=lambda rank: (written[rank], rank))
        stem = rank_stem(kind, rank, len(offers))
        file = f"{stem}-part-{written[rank] // PART_BYTES:03d}.safetensors"
        pieces[name].append(Piece(file, block.offset, block.shape))
        written[rank] += block.bytes
    return {
        name: TensorEntry(
            any_block[name].dtype, any_block[name].global_shape, tuple(parts), checksums[name]
        )
        for name, parts in pieces.items()
    }


# ── Writing ──


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write `tensors` as one safetensors file, flush it, and return its size and SHA-256.

    `tensors` are local parts on any device. Neither writing nor hashing holds Python's lock. Raises
    InputError if the disk is full.
    """
    with refusing((SafetensorError,), f"{path}: cannot be written"):
        # The copies have no name, so that they are freed before the file is hashed.
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    by_umask(path)
    fsync(path)
    return FileRecord(path.name, path.stat().st_size, {"sha256": hash_file(path)})


# ── Reading ──


def mismatches(index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]) -> list[str]:
    """Return one line for each reason why the saved tensors cannot be loaded into `targets`.

    A floating-point tensor may be loaded into another floating-point dtype, because a recipe may
    change the dtype of the moments.
    """
    problems = [f"it lacks {name}" for name in sorted(targets.keys() - index.keys())]
    problems += [f"only it has {name}" for name in sorted(index.keys() - targets.keys())]
    for name in sorted(targets.keys() & index.keys()):
        saved = index[name]
        target = targets[name]
        dtypes = {DTYPES[saved.dtype], target.dtype}
        is_convertible = len(dtypes) == 1 or all(dtype.is_floating_point for dtype in dtypes)
        if saved.shape != tuple(target.shape) or not is_convertible:
            problems.append(
                f"{name} is {saved.dtype} {list(saved.shape)} there and "
                f"{DTYPE_NAMES[target.dtype]} {list(target.shape)} here"
            )
    return problems


def load_tensors(
    folder: Path, index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]
) -> None:
    """Fill `targets` from the checkpoint in `folder`, converted to their dtypes.

    The targets may have any sharding, and must have no `mismatches`. Files are mapped and not
    loaded: a rank reads only the bytes of its own part.
    """
    with ExitStack() as stack, torch.no_grad():
        open_file = cache(
            lambda file: stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
        )
        for name, target in targets.items():
            block = block_of(target)
            local = local_part(target)
            for piece in index[name].pieces:
                if overlap := _overlap(piece, block):
                    in_piece, in_block = overlap
                    file = open_file(piece.file)
                    # A tensor without dimensions has no slices, so full pieces are read whole.
                    is_full = in_piece == tuple(slice(0, size) for size in piece.shape)
                    values = file.get_tensor(name) if is_full else file.get_slice(name)[in_piece]
                    local[in_block].copy_(values)


def _overlap(
    piece: Piece | ShardBlock, block: Piece | ShardBlock
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the common part of two blocks of a tensor as slices of each, or None."""
    in_piece = []
    in_block = []
    dimensions = zip(piece.offset, piece.shape, block.offset, block.shape, strict=True)
    for piece_start, piece_size, block_start, block_size in dimensions:
        start = max(piece_start, block_start)
        stop = min(piece_start + piece_size, block_start + block_size)
        if start >= stop:
            return None
        in_piece.append(slice(start - piece_start, stop - piece_start))
        in_block.append(slice(start - block_start, stop - block_start))
    return tuple(in_piece), tuple(in_block)
