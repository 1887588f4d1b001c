"""Sharded tensors in safetensors files: which process writes which piece, the writing, and reading into any other sharding.

Each process holds one block of each tensor: all of it (plain tensors, Replicate) or its part (DTensor, Shard). A block that
several processes hold is written by one of them, so data-parallel replicas share the writing.

torch.distributed.checkpoint is not used: measured on the same tensors it stops training five times as long, takes a second copy
of them in host memory while it writes, and stores no hashes (docs/log.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundation.files import FileRecord
from pretrain.checkpoint.folders import Piece, TensorEntry
from pretrain.model.gradients import local_part

PART_BYTES = 2 * 2**30  # largest file, unless one block is larger: enough files to keep the hashing threads busy
BLOCK_BYTES = 64 * 2**20  # what goes from device to host, to the hash and to the disk at once

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors has them


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
        chunks = tensor.__create_chunk_list__()  # torch's own description, for its checkpoints; refuses Partial placements
        if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
            raise ValueError(f"placements {tensor.placements}: this process's part is not one block of the tensor")
        offset = tuple(chunks[0].offsets)
    return ShardBlock(DTYPE_NAMES[local.dtype], tuple(tensor.shape), offset, tuple(local.shape), local.nbytes)


def rank_stem(kind: str, rank: int, world_size: int) -> str:
    """How the names of all files begin that `rank` writes."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}"


def lay_out(kind: str, offers: list[dict[str, ShardBlock]]) -> dict[str, TensorEntry]:
    """The index of a checkpoint: which rank writes each block into which file, of at most PART_BYTES unless a block is larger.

    `offers[rank]` has the block that this rank holds of each tensor. A pure function, so every rank computes the same index
    without a further exchange.
    """
    whole = {name: block for offer in offers for name, block in offer.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in sorted(whole)}
    for rank, assigned in enumerate(_share_out(offers)):
        stem, parts, room = rank_stem(kind, rank, len(offers)), 0, 0
        for name, block in assigned:
            if not parts or block.bytes > room:
                parts, room = parts + 1, PART_BYTES
            pieces[name].append(Piece(f"{stem}-part-{parts - 1:03d}.safetensors", block.offset, block.shape))
            room -= block.bytes
    return {name: TensorEntry(whole[name].dtype, whole[name].global_shape, tuple(parts)) for name, parts in pieces.items()}


def _share_out(offers: list[dict[str, ShardBlock]]) -> list[list[tuple[str, ShardBlock]]]:
    """Give each distinct block to one of the ranks that hold it, the largest first to the one with least to write (LPT)."""
    owners: dict[tuple[str, ShardBlock], list[int]] = {}
    for rank, offer in enumerate(offers):
        for block in offer.items():
            owners.setdefault(block, []).append(rank)
    load = [0] * len(offers)
    assigned: list[list[tuple[str, ShardBlock]]] = [[] for _ in offers]
    for name, block in sorted(owners, key=lambda item: (-item[1].bytes, item[0], item[1].offset)):
        if block.bytes:  # of more ranks than rows some hold nothing
            writer = min(owners[name, block], key=lambda rank: (load[rank], rank))
            load[writer] += block.bytes
            assigned[writer].append((name, block))
    return [sorted(blocks, key=lambda item: item[0]) for blocks in assigned]


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write `tensors` (local data, any device) as one safetensors file, flushed to disk; returns its size and SHA-256.

    safetensors' own writer needs all tensors of the file in host memory and computes no hashes. This takes BLOCK_BYTES of it, and
    hashes each block on its way to the disk. Raises OSError.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # wide types first keeps each tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head, digest = len(text).to_bytes(8, "little") + text, hashlib.sha256()
    with open(path, "wb") as file:
        for block in chain([head], *(_host_blocks(tensors[name]) for name in names)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, len(head) + end, {"sha256": digest.hexdigest()})


def _host_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor`, BLOCK_BYTES at a time; each block is overwritten by the next."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    with torch.cuda.device_of(data):  # threads start on device 0: pinning there would open a context on another rank's device
        staging = torch.empty(min(BLOCK_BYTES, data.numel()), dtype=torch.uint8, pin_memory=True) if data.is_cuda else None
        for start in range(0, data.numel(), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            if staging is not None:
                block = staging[: block.numel()].copy_(block)
            yield memoryview(block.numpy())


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mismatches(index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]) -> list[str]:
    """One line for each reason why the saved tensors cannot be loaded into `targets`; empty: they can.

    A floating-point tensor may be loaded into another floating-point dtype: moments may be kept in another one.
    """
    problems = [f"it lacks {name}" for name in sorted(targets.keys() - index.keys())]
    problems += [f"only it has {name}" for name in sorted(index.keys() - targets.keys())]
    for name in sorted(targets.keys() & index.keys()):
        saved, dtype, wanted = index[name], DTYPES[index[name].dtype], targets[name]
        if saved.shape != tuple(wanted.shape):
            problems.append(f"{name} has shape {list(saved.shape)} there and {list(wanted.shape)} here")
        elif dtype != wanted.dtype and not (dtype.is_floating_point and wanted.dtype.is_floating_point):
            problems.append(f"{name} is {saved.dtype} there and {DTYPE_NAMES[wanted.dtype]} here")
    return problems


def load_tensors(folder: Path, index: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]) -> None:
    """Fill `targets`, of any sharding and without mismatches, from the checkpoint in `folder`, converted to their dtypes.

    Files are mapped, not loaded: a rank touches only the bytes of its own part.
    """
    with ExitStack() as stack, torch.no_grad():
        open_file = cache(lambda file: stack.enter_context(safe_open(folder / file, framework="pt", device="cpu")))
        for name, target in targets.items():
            mine, local = block_of(target), local_part(target)
            for piece in index[name].pieces:
                if overlap := _overlap(piece, mine):
                    (where, here), file = overlap, open_file(piece.file)
                    is_whole = where == tuple(slice(0, size) for size in piece.shape)  # without dimensions there are no slices
                    local[here].copy_(file.get_tensor(name) if is_whole else file.get_slice(name)[where])


def _overlap(one: Piece | ShardBlock, other: Piece | ShardBlock) -> list[tuple[slice, ...]] | None:
    """What two blocks of a tensor share, as slices of each; None if they share nothing."""
    starts = [max(a, b) for a, b in zip(one.offset, other.offset, strict=True)]
    stops = [min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    where = list(zip(starts, stops, strict=True))
    return [tuple(slice(a - base, b - base) for (a, b), base in zip(where, each.offset, strict=True)) for each in (one, other)]
