"""What a pack is, and packs in Arrow files beside a manifest that knows them all.

    packs.json                settings, statistics and tokenizer of the packs, and every file with its size and SHA-256
    train/data-00000.arrow    an Arrow stream of record batches, a row a pack
    held_out/...              where a part of the text is set apart
    tokenizer.json            and whatever else travels with the packs

Both sides use pyarrow alone: a memory-mapped record batch is already a NumPy array. `datasets.Dataset.from_file` reads each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.files import FileRecord, check_files, fsync, fsync_tree, hash_file, hash_of
from foundation.reading import load_object

Split = Literal["train", "held_out"]

IGNORE = -100  # the label of a token without a loss, which torch's and transformers' losses skip
MANIFEST = "packs.json"
# in the folder of a stream: the packs that stay, to look at and to evaluate on
FIRST = "part-00000000"
SHARD_BYTES = 512 * 2**20  # of a file, after which another begins
_REMEDY = "prepare the packs again, or fetch them again if they were copied"


@dataclass(frozen=True)
class Pack:
    """One row of training data, always `length` tokens wide."""

    # [length] uint32; a read-only view into the file where the format allows it
    input_ids: np.ndarray
    lengths: np.ndarray  # [documents] int32, in order; the tokens after their sum are padding
    # position of the first token in its document; > 0 where it goes on from another pack
    first_position: int = 0
    # [length] bool: which tokens are to be learnt, each as the label of the token before it; None: all
    trained: np.ndarray | None = None


class Packs:
    """Random access to the packs of one split, of any format. Threads may share one."""

    path: Path
    length: int
    # sha256 hex of what a model would see, in order: equal fingerprints mean equal training data
    fingerprint: str
    # name, fingerprint, vocab_size, bos_id, eos_id, pad_id, where the format knows them
    tokenizer: dict[str, Any] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Pack:
        """Pack `index` of 0 .. len - 1; IndexError outside. Formats give views of files, so what is not looked at is not read."""
        raise NotImplementedError

    def verify(self) -> None:
        """Hash every file, also those checked before; InputError names the first that is not what its writer recorded."""


class JoinedPacks(Packs):
    """The packs of several others, one after another."""

    def __init__(self, path: Path, joined: Sequence[Packs]) -> None:
        self.path, self.joined = path, joined
        self._starts = [0, *accumulate(map(len, joined))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        number = bisect_right(self._starts, checked_index(index, len(self))) - 1
        return self.joined[number][index - self._starts[number]]


def checked_index(index: int, count: int) -> int:
    """`index` itself; IndexError unless it lies in 0 .. count - 1. Negative ones are refused: they hide arithmetic mistakes."""
    if not 0 <= index < count:
        raise IndexError(f"pack {index} of {count}")
    return index


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of packs.json, which is what was written, by its checksum; else InputError."""
    file = path / MANIFEST
    manifest = load_object(file, _REMEDY)
    if manifest.pop("checksum", None) != hash_of(manifest):
        raise InputError(f"{file}: damaged, edited, or not a manifest of packs; {_REMEDY}")
    return manifest


class PackWriter(AbstractContextManager):
    """Writes a folder of packs that is either complete or absent.

    Everything goes to a hidden `folder` beside `path`, which `finish` completes, flushes and renames to `path`. Leaving the block
    without `finish` removes it. Further files in it travel with the packs. One writer a path at a time.
    """

    def __init__(self, path: Path, length: int) -> None:
        self.path = Path(os.path.realpath(path))  # packs may lie on a large disk, and a link here
        self.length = length
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        # what a killed writer left; nothing there was ever complete
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._splits: dict[Split, _SplitWriter] = {}

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # already renamed away where `finish` ran

    def add(self, split: Split, *packs: Pack) -> None:
        """Append packs as one record batch, which must fit in memory; thousands of small ones would open slowly. Each pack of a
        split has a mask (`trained`), or none has."""
        if split not in self._splits:
            masked = packs[0].trained is not None
            self._splits[split] = _SplitWriter(self.folder / split, self.length, masked=masked)
        self._splits[split].append(packs)

    def finish(
        self,
        *,
        settings: dict[str, Any],
        statistics: dict[str, Any],
        tokenizer: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Complete the folder, move it to `path` and return the manifest, which packs.json holds. All three dicts are JSON-able.
        Raises InputError if no training pack was written, OSError where `path` is there and no empty folder."""
        if "train" not in self._splits:
            raise InputError(
                f"{self.path}: no training pack was made; the source holds no text, or all of it is held out"
            )
        splits = {
            name: self._splits[name].finish()
            for name in ("train", "held_out")
            if name in self._splits
        }
        manifest = {
            "version": 1,
            "length": self.length,
            "tokenizer": tokenizer,
            "settings": settings,
            "statistics": statistics,
            "splits": splits,
            "files": [_entry(path) for path in sorted(self.folder.iterdir()) if path.is_file()],
        }
        # as it will be read back, so that the checksum fits
        manifest = json.loads(json.dumps(manifest, default=str))
        text = json.dumps(manifest | {"checksum": hash_of(manifest)}, indent=1, ensure_ascii=False)
        (self.folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
        fsync_tree(self.folder)
        self.folder.rename(self.path)
        fsync(self.path.parent)
        return manifest


class _SplitWriter:
    """The files of one split, and what the manifest says of them."""

    def __init__(self, folder: Path, length: int, *, masked: bool) -> None:
        folder.mkdir()
        self.folder, self.length, self.masked = folder, length, masked
        self.packs = self.documents = self.tokens = 0
        self.shards: list[Path] = []
        # by column: batches must not change the fingerprint
        self.hashes = [hashlib.sha256() for _ in range(4 + masked)]
        self.stream: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, packs: Sequence[Pack]) -> None:
        ids = np.stack([pack.input_ids for pack in packs]).astype(np.uint32, copy=False)
        lengths = np.concatenate([pack.lengths for pack in packs]).astype(np.int32, copy=False)
        offsets = np.append(0, np.cumsum([len(pack.lengths) for pack in packs])).astype(np.int32)
        firsts = np.array([pack.first_position for pack in packs], np.int32)
        masks = (
            [np.packbits(np.stack([pack.trained for pack in packs]), axis=1, bitorder="little")]
            if self.masked
            else []
        )
        for hasher, column in zip(
            self.hashes, (ids, lengths, np.diff(offsets), firsts, *masks), strict=True
        ):
            hasher.update(column)
        self.packs += len(packs)
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        columns = {
            "input_ids": _rows(ids),
            "lengths": pa.ListArray.from_arrays(pa.array(offsets), pa.array(lengths)),
            "first_position": pa.array(firsts),
            **({"trained": _rows(masks[0])} if masks else {}),  # a bit a token
        }
        batch = pa.record_batch(columns)
        if self.stream is None:
            self.shards.append(self.folder / f"data-{len(self.shards):05d}.arrow")
            self.file = pa.OSFile(str(self.shards[-1]), "wb")
            self.stream = pa.ipc.new_stream(self.file, batch.schema)
        self.stream.write_batch(batch)
        if self.file.tell() >= SHARD_BYTES:
            self._close_shard()

    def finish(self) -> dict[str, Any]:
        """Returns the split's part of the manifest."""
        if self.stream is not None:
            self._close_shard()
        content = {
            "length": self.length,
            "packs": self.packs,
            "columns": [hasher.hexdigest() for hasher in self.hashes],
        }
        totals = {"packs": self.packs, "documents": self.documents, "tokens": self.tokens}
        return totals | {
            "fingerprint": hash_of(content),
            "files": [_entry(path) for path in self.shards],
        }

    def _close_shard(self) -> None:
        self.stream.close()
        self.file.close()
        self.stream = None


class ArrowPacks(Packs):
    """One split of a folder that PackWriter wrote, memory-mapped. InputError where a file is missing, truncated or damaged.

    The fingerprint covers tokens, lengths, positions, masks and their order, but not how they are sharded.
    """

    def __init__(self, path: Path, split: Split = "train") -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        written = self.manifest["splits"][split]
        self.length: int = self.manifest["length"]
        self.tokenizer: dict | None = self.manifest["tokenizer"]
        self.fingerprint: str = written["fingerprint"]
        self.tokens: int = written["tokens"]  # without padding
        self._records = _records(written["files"], split)
        check_files(self.path, self._records, _REMEDY)
        self._batches = [
            batch for record in self._records for batch in self._map(self.path / record.name)
        ]
        self._starts = [0, *accumulate(len(ids) for ids, *_ in self._batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        number = bisect_right(self._starts, checked_index(index, len(self))) - 1
        ids, lengths, offsets, first_positions, *masks = self._batches[number]
        row = index - self._starts[number]
        mask = (
            np.unpackbits(masks[0][row], count=self.length, bitorder="little").view(np.bool_)
            if masks
            else None
        )
        return Pack(
            ids[row], lengths[offsets[row] : offsets[row + 1]], int(first_positions[row]), mask
        )

    def verify(self) -> None:
        check_files(
            self.path, self._records + _records(self.manifest["files"]), _REMEDY, hashed=True
        )

    def _map(self, path: Path) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields for each record batch, as views of the file: ids [rows, length], lengths, offsets [rows + 1], first positions
        and, with masks, their bits [rows, bytes]."""
        with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
            for ids, lengths, first_positions, *masks in (batch.columns for batch in stream):
                yield (
                    _view(ids.values, np.uint32).reshape(len(ids), self.length),
                    _view(lengths.values, np.int32),
                    _view(lengths.offsets, np.int32),
                    _view(first_positions, np.int32),
                    *(_view(bits.values, np.uint8).reshape(len(bits), -1) for bits in masks),
                )


def _entry(path: Path) -> dict[str, Any]:
    """Returns what the manifest records of a finished file."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_file(path)}


def _records(files: list[dict[str, Any]], folder: str = "") -> list[FileRecord]:
    return [
        FileRecord(os.path.join(folder, file["name"]), file["bytes"], {"sha256": file["sha256"]})
        for file in files
    ]


def _rows(values: np.ndarray) -> pa.Array:
    """Returns an array of lists over the memory of `values`, which are 2-dimensional."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _view(array: pa.Array, dtype: type) -> np.ndarray:
    """Returns the array's own memory as numpy sees it. (`to_numpy` does, and imports pandas where it is installed.)"""
    return np.frombuffer(
        array.buffers()[1], dtype, len(array), array.offset * array.type.bit_width // 8
    )
