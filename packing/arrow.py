"""Define a pack, and write and read packs in Arrow files.

    packs.json                settings, statistics, tokenizer, and the size and SHA-256 of each file
    train/data-00000.arrow    an Arrow stream of record batches, one row for each pack
    held_out/...              if a share of the text is held out
    tokenizer.json            and other files that belong to the packs

Writer and reader need no libraries except pyarrow and NumPy. The columns of a memory-mapped record
batch can be used as NumPy arrays without a copy. `datasets.Dataset.from_file` can also read
each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
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

# Label of a position without a loss. The loss functions of torch and transformers skip this label.
IGNORE = -100
MANIFEST = "packs.json"
# Folder of a stream's first part, which always stays on the disk.
FIRST = "part-00000000"
# A new file is started when the current file has this number of bytes or more.
SHARD_BYTES = 512 * 2**20
_REMEDY = "prepare the packs again, or copy them again if they are a copy"


@dataclass(frozen=True)
class Pack:
    """One row of training data, always `length` tokens wide."""

    # [length] uint32, a read-only view into the file if possible.
    input_ids: np.ndarray
    # [documents] int32: number of tokens of each document, in order. The tokens after the last
    # document are padding.
    lengths: np.ndarray
    # Position of the pack's first token in its document. It is above 0 if the document started in
    # another pack.
    first_position: int = 0
    # [length] bool: True for tokens that have a loss when they are predicted from the tokens before
    # them. None means that all tokens have a loss.
    trained: np.ndarray | None = None


class Packs:
    """Base class of the packs of one split, in any format. Objects are thread-safe."""

    path: Path
    # Number of tokens in a pack.
    length: int
    # SHA-256 that identifies the training data. Equal fingerprints mean equal packs in equal order.
    fingerprint: str
    # Description of the tokenizer, with the keys name, fingerprint, vocab_size, bos_id, eos_id and
    # pad_id. Keys that the format does not record are missing. If the format does not record a
    # tokenizer, the value is None.
    tokenizer: dict[str, Any] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Pack:
        """Return the pack with this index. Raise IndexError unless the index is in 0 to len - 1.

        Most formats return views into memory-mapped files, so that bytes are read from the disk
        when they are used.
        """
        raise NotImplementedError

    def verify(self) -> None:
        """Compare the size and the hash of every file with the recorded values.

        Raises InputError for the first file that differs. If the format does not record sizes and
        hashes, this method does nothing.
        """


class JoinedPacks(Packs):
    """Concatenation of several `Packs`."""

    def __init__(self, path: Path, joined: Sequence[Packs]) -> None:
        self.path = path
        self.joined = joined
        self._starts = [0, *accumulate(map(len, joined))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        number = bisect_right(self._starts, checked_index(index, len(self))) - 1
        return self.joined[number][index - self._starts[number]]


def checked_index(index: int, count: int) -> int:
    """Return `index`. Raise IndexError unless `index` is in 0 to count - 1.

    Negative indices are rejected too, because they hide mistakes in the computation of an index.
    """
    if not 0 <= index < count:
        raise IndexError(f"pack {index} of {count}")
    return index


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of packs.json in the folder `path`. Raise InputError if it is damaged."""
    file = path / MANIFEST
    manifest = load_object(file, _REMEDY)
    if manifest.pop("checksum", None) != hash_of(manifest):
        raise InputError(
            f"{file}: this file is damaged, edited, or not a manifest of packs; {_REMEDY}"
        )
    return manifest


class PackWriter(AbstractContextManager):
    """Context manager that writes packs to the folder `path`, completely or not at all.

    All files are first written to `folder`, a hidden folder beside `path`. `finish` completes and
    flushes `folder` and renames it to `path`. If the caller's `with` statement ends without a call
    of `finish`, `folder` is removed. The caller may write other files to `folder`, which then
    belong to the packs. Only one writer may exist for a path at a time.
    """

    def __init__(self, path: Path, length: int) -> None:
        # Resolve links, because `path` may be a link to a folder on a larger disk.
        self.path = Path(os.path.realpath(path))
        self.length = length
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        # Remove the folder that a killed writer may have left.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._splits: dict[Split, _SplitWriter] = {}

    def __exit__(self, *exception: object) -> None:
        # Remove an incomplete folder. After `finish` has renamed the folder, nothing is removed.
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, split: Split, *packs: Pack) -> None:
        """Append packs to a split as one record batch, which must fit in memory.

        Add many packs at once, because a file with thousands of small batches is slow to open.
        In a split, either all packs must have a mask (`Pack.trained`), or none may have one.
        """
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self.folder / split, self.length)
        self._splits[split].append(packs)

    def finish(
        self,
        *,
        settings: dict[str, Any],
        statistics: dict[str, Any],
        tokenizer: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Complete the folder, rename it to `path`, and return the manifest (packs.json).

        The arguments are stored in the manifest and must be JSON-able. Raises OSError if `path`
        exists and is not an empty folder.
        """
        splits = {split: files.finish() for split, files in self._splits.items()}
        manifest = {
            "version": 1,
            "length": self.length,
            "tokenizer": tokenizer,
            "settings": settings,
            "statistics": statistics,
            "splits": splits,
            "files": [_entry(path) for path in sorted(self.folder.iterdir()) if path.is_file()],
        }
        # JSON changes the types of some values, such as paths and tuples. So compute the checksum
        # from values that were converted to JSON and back.
        manifest = json.loads(json.dumps(manifest, default=str))
        text = json.dumps(manifest | {"checksum": hash_of(manifest)}, indent=1, ensure_ascii=False)
        (self.folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
        fsync_tree(self.folder)
        self.folder.rename(self.path)
        fsync(self.path.parent)
        return manifest


class _SplitWriter:
    """Write the files of one split."""

    def __init__(self, folder: Path, length: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.length = length
        self.totals: Counter[str] = Counter()
        self.shards: list[Path] = []
        # One hash for each column. With a hash of whole batches, the fingerprint would depend on
        # how packs are divided into batches.
        self.hashes: list[Any] = []
        self.open_files = ExitStack()

    def append(self, packs: Sequence[Pack]) -> None:
        ids = np.stack([pack.input_ids for pack in packs]).astype(np.uint32, copy=False)
        lengths = np.concatenate([pack.lengths for pack in packs]).astype(np.int32, copy=False)
        offsets = np.append(0, np.cumsum([len(pack.lengths) for pack in packs])).astype(np.int32)
        first_positions = np.array([pack.first_position for pack in packs], np.int32)
        hashed = [ids, lengths, np.diff(offsets), first_positions]
        columns = {
            "input_ids": _rows(ids),
            "lengths": pa.ListArray.from_arrays(pa.array(offsets), pa.array(lengths)),
            "first_position": pa.array(first_positions),
        }
        if masks := [pack.trained for pack in packs if pack.trained is not None]:
            # The mask is stored with one bit for each token.
            bits = np.packbits(np.stack(masks), axis=1, bitorder="little")
            hashed.append(bits)
            columns["trained"] = _rows(bits)
        self.hashes = self.hashes or [hashlib.sha256() for _ in hashed]
        for hasher, column in zip(self.hashes, hashed, strict=True):
            hasher.update(column)
        self.totals.update(
            packs=len(packs), documents=len(lengths), tokens=int(lengths.sum(dtype=np.int64))
        )
        batch = pa.record_batch(columns)
        if not self.shards or self.file.tell() >= SHARD_BYTES:
            self.open_files.close()
            self.shards.append(self.folder / f"data-{len(self.shards):05d}.arrow")
            self.file: pa.OSFile = self.open_files.enter_context(
                pa.OSFile(str(self.shards[-1]), "wb")
            )
            self.stream = self.open_files.enter_context(pa.ipc.new_stream(self.file, batch.schema))
        self.stream.write_batch(batch)

    def finish(self) -> dict[str, Any]:
        """Close the files and return the split's entry in the manifest."""
        self.open_files.close()
        content = {
            "length": self.length,
            "packs": self.totals["packs"],
            "columns": [hasher.hexdigest() for hasher in self.hashes],
        }
        return {
            **self.totals,
            "fingerprint": hash_of(content),
            "files": [_entry(path) for path in self.shards],
        }


class ArrowPacks(Packs):
    """Memory-mapped packs of one split in a folder that PackWriter wrote.

    Raises InputError if a file is missing, truncated or damaged. The fingerprint depends on the
    tokens, lengths, positions and masks of the packs and on their order. It does not depend on how
    packs are divided into files.
    """

    def __init__(self, path: Path, split: Split = "train") -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        written = self.manifest["splits"][split]
        self.length: int = self.manifest["length"]
        self.tokenizer: dict | None = self.manifest["tokenizer"]
        self.fingerprint: str = written["fingerprint"]
        # Number of tokens, without padding.
        self.tokens: int = written["tokens"]
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
        # `masks` has one array with the masks of all rows, or is empty.
        ids, lengths, offsets, first_positions, *masks = self._batches[number]
        row = index - self._starts[number]
        trained = None
        if masks:
            bits = np.unpackbits(masks[0][row], count=self.length, bitorder="little")
            trained = bits.view(np.bool_)
        return Pack(
            input_ids=ids[row],
            lengths=lengths[offsets[row] : offsets[row + 1]],
            first_position=int(first_positions[row]),
            trained=trained,
        )

    def verify(self) -> None:
        check_files(
            self.path, self._records + _records(self.manifest["files"]), _REMEDY, hashed=True
        )

    def _map(self, path: Path) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the columns of each record batch in the file `path`, as views into the file.

        The columns are the token ids [rows, length], the document lengths of all rows, the offsets
        [rows + 1] at which the document lengths of each row start, and the first positions [rows].
        Packs with masks also have a column with the bits of the masks [rows, bytes].
        """
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
    """Return the manifest's entry for a file that is completely written."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_file(path)}


def _records(files: list[dict[str, Any]], folder: str = "") -> list[FileRecord]:
    return [
        FileRecord(os.path.join(folder, file["name"]), file["bytes"], {"sha256": file["sha256"]})
        for file in files
    ]


def _rows(values: np.ndarray) -> pa.Array:
    """Return an Arrow array of lists that shares the memory of a two-dimensional array."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _view(array: pa.Array, dtype: type) -> np.ndarray:
    """Return an Arrow array as a NumPy array that shares its memory.

    `to_numpy` would return the same array, but it imports pandas if pandas is installed.
    """
    return np.frombuffer(
        array.buffers()[1], dtype, len(array), array.offset * array.type.bit_width // 8
    )
