"""What a pack is, and packs in Arrow files, laid out as Hugging Face `datasets` saves them.

Both sides use pyarrow alone: `datasets` takes seconds to import, and a memory-mapped record batch is already a NumPy array.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.files import fsync, fsync_tree, no_room, remove_own_folder
from foundation.integrity import FileRecord, check_files, hash_file, hash_of, stamp_as_verified
from foundation.reading import reason_of
from packing.manifest import MANIFEST, MASKED_VERSION, REMEDY, VERSION, Split, read_manifest

IGNORE = -100  # the label of a token without a loss, which torch's and transformers' losses skip
_BATCH_BYTES = 16 * 2**20  # one record batch: large enough that opening costs nothing, small enough to hold in memory
_OWN = re.compile(
    r"train|held_out|tokenizer\.json|chat_template\.jinja|lengths\.png|dataset_dict\.json|packs\.json"
)  # what a writer puts into its folder


@dataclass(frozen=True)
class Pack:
    """One row of training data, always `length` tokens wide."""

    input_ids: np.ndarray  # [length] uint32; a read-only view into the file where the format allows it
    lengths: np.ndarray  # [documents] int32, in order; the tokens after their sum are padding
    first_position: int = 0  # position of the first token in its document; > 0 only with `positions: continue`
    trained: np.ndarray | None = (
        None  # [length] bool, which tokens are to be learnt, so are the label of the one before; None: all
    )


class DiskFull(InputError):
    """The disk was full while packs were being written."""


class Packs(Protocol):
    """Random access to the packs of one split, of any format. Threads may share one."""

    path: Path
    length: int
    fingerprint: str  # sha256 hex of what a model would see, in order: equal fingerprints mean equal training data
    tokenizer: dict | None  # name, fingerprint, vocab_size, bos_id, eos_id, pad_id, where the format knows them

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Pack:
        """Pack `index` of 0 .. len - 1; IndexError outside."""

    def lengths(self, index: int) -> np.ndarray:
        """[documents] int32 of one pack, without reading its tokens where the format allows it."""

    def trained(self, index: int) -> np.ndarray | None:
        """`Pack.trained` of one pack, read like `lengths`."""

    def verify(self) -> None:
        """Hash every file, also those checked before; InputError names the first that is not what its writer recorded."""


def checked_index(index: int, count: int) -> int:
    """`index` itself; IndexError unless it lies in 0 .. count - 1. Negative ones are refused: they hide arithmetic mistakes."""
    if not 0 <= index < count:
        raise IndexError(f"pack {index} of {count}")
    return index


def as_token_ids(values: np.ndarray, where: str) -> np.ndarray:
    """`values` as uint32, copied only where their dtype differs; InputError where that would change a value."""
    if values.dtype == np.uint32:
        return values
    if values.dtype.kind not in "iu":
        raise InputError(f"{where}: token ids are whole numbers, these are {values.dtype}; write them as uint16 or uint32")
    if values.size and (values.min() < 0 or values.max() >= 2**32):
        raise InputError(f"{where}: token ids run from {values.min()} to {values.max()}; they must be 0 or more and below 2^32")
    return values.astype(np.uint32)


class PackWriter:
    """Writes a folder of packs that is either complete or absent.

    Everything goes to a hidden `folder` beside `path`, which `finish` completes, flushes and renames to `path`. Where `path` is a
    link, both are where it leads. Leaving the `with` block without `finish` removes the folder. Further files in it travel with
    the packs. One writer a path at a time.

    Raises InputError if `path` exists and is not an empty folder, if the hidden one is not ours or cannot be made, and on leaving
    the block if the disk was full.
    """

    def __init__(self, path: Path, length: int, *, shard_bytes: int = 512 * 2**20) -> None:
        self.path = Path(path)
        self.length = length
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InputError(f"{self.path}: exists already and is never written over; name another folder or move it away")
        self._place = Path(os.path.realpath(path))  # what a link leads to, which is no folder of packs yet
        if self._place.is_symlink():
            raise InputError(f"{self.path}: is a link that leads in a circle; name another folder or take it away")
        self.folder = self._place.with_name(f".{self._place.name}.partial")
        remove_own_folder(self.folder, _OWN)  # what a killed writer left; nothing there was ever complete
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made: {reason_of(error)}; name another folder") from None
        self._shard_bytes = shard_bytes
        self._splits: dict[Split, _SplitWriter] = {}

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        for split in self._splits.values():
            if split.stream is not None:
                split.file.close()  # NFS keeps the name of a file that is removed while it is open
        shutil.rmtree(self.folder, ignore_errors=True)  # already renamed away where `finish` ran
        if full := no_room(error):
            kind = InputError if error.errno == errno.EFBIG else DiskFull  # less on the disk makes a larger file no more possible
            raise kind(f"{self.path}: {full} and run this again") from None

    def add(self, split: Split, pack: Pack) -> None:
        """Append one pack; `write` is the faster way to append many."""
        trained = None if pack.trained is None else pack.trained[None]
        self.write(split, pack.input_ids[None], [pack.lengths], np.array([pack.first_position]), trained)

    def write(
        self,
        split: Split,
        input_ids: np.ndarray,
        lengths: Sequence[np.ndarray],
        first_positions: np.ndarray | None = None,
        trained: np.ndarray | None = None,
    ) -> None:
        """Append packs: `input_ids` [packs, length] integers, `lengths` one [documents] array a pack, `first_positions` [packs],
        by default zeros, `trained` [packs, length] bool, by default all: with it for every pack of a folder, or for none. The
        arrays are copied. Raises ValueError where they do not fit together.
        """
        packs = len(input_ids)
        first_positions = np.zeros(packs, np.int32) if first_positions is None else first_positions
        if input_ids.shape != (packs, self.length) or len(lengths) != packs or first_positions.shape != (packs,):
            shapes = f"{input_ids.shape} ids, {len(lengths)} lengths, {first_positions.shape} first positions"
            raise ValueError(f"these do not make packs of {self.length}: {shapes}")
        if packs == 0:
            return
        counts = np.fromiter(map(len, lengths), np.int32, packs)
        flat = np.concatenate(lengths).astype(np.int32, copy=False)
        tokens = [int(each.sum()) for each in lengths]
        if counts.min() < 1 or flat.min() < 1 or max(tokens) > self.length or first_positions.min() < 0:
            raise ValueError("every pack needs documents of 1 token or more that fit into it, and a first position of 0 or more")
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self.folder / split, self.length, self._shard_bytes, masked=trained is not None)
        if {writer.masked for writer in self._splits.values()} != {trained is not None}:
            raise ValueError("some packs of this folder say which tokens are to be learnt, and others do not")
        columns = [as_token_ids(input_ids, "packs"), flat, counts, first_positions.astype(np.int32, copy=False)]
        if trained is not None:
            if trained.shape != input_ids.shape or trained.dtype != np.bool_:
                raise ValueError(f"a mask of {trained.dtype} {trained.shape} does not fit packs of {input_ids.shape}")
            columns.append(np.packbits(trained, axis=1, bitorder="little"))
        self._splits[split].append(*columns)

    def finish(self, *, settings: dict[str, Any], statistics: dict[str, Any], tokenizer: dict[str, Any] | None) -> dict[str, Any]:
        """Complete the folder, move it to `path` and return the manifest, which packs.json holds. All three dicts are JSON-able.

        Raises InputError if no training pack was written.
        """
        if "train" not in self._splits:
            raise InputError(f"{self.path}: no training pack was made; the source holds no text, or all of it is held out")
        splits = {name: self._splits[name].finish() for name in ("train", "held_out") if name in self._splits}
        manifest = {
            "version": MASKED_VERSION if self._splits["train"].masked else VERSION,
            "length": self.length,
            "tokenizer": tokenizer,
            "settings": settings,
            "statistics": statistics,
            "splits": splits,
            "files": [_entry(path) for path in sorted(self.folder.iterdir()) if path.is_file()],
        }
        manifest = json.loads(json.dumps(manifest, default=str))  # as it will be read back, so that the checksum fits
        _write_json(self.folder / "dataset_dict.json", {"splits": list(splits)})
        _write_json(self.folder / MANIFEST, manifest | {"checksum": hash_of(manifest)})
        fsync_tree(self.folder)
        shards = [record for name, part in splits.items() for record in _records(part["files"], f"{name}/")]
        stamp_as_verified(self.folder, shards)
        self.folder.rename(self._place)
        fsync(self._place.parent)
        return manifest


class _SplitWriter:
    """The shards of one split: buffers packs to record batches and record batches to files."""

    def __init__(self, folder: Path, length: int, shard_bytes: int, *, masked: bool) -> None:
        folder.mkdir()
        self.masked = masked
        self.folder = folder
        self.length = length
        self.rows_per_batch = max(1, _BATCH_BYTES // (4 * length))
        self.shard_bytes = shard_bytes
        self.schema = _schema(length, masked)
        self.buffered: list[tuple[np.ndarray, ...]] = []
        self.buffered_rows = 0
        self.shard_packs: list[int] = []
        self.documents = self.tokens = 0
        self.hashes = [hashlib.sha256() for _ in range(4 + masked)]
        self.stream: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, *columns: np.ndarray) -> None:
        """Columns: ids [packs, length], lengths of all documents, documents of each pack, first position of each pack, and, where
        the packs have masks, these in bits [packs, bytes] uint8."""
        _, lengths, counts, *_ = columns
        for hasher, column in zip(self.hashes, columns, strict=True):  # each by itself: batches must not change the hash
            hasher.update(np.ascontiguousarray(column))
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.buffered.append(tuple(column.copy() for column in columns))  # the caller may reuse its arrays
        self.buffered_rows += len(counts)
        if self.buffered_rows >= self.rows_per_batch:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Write the rest and the two files that `datasets` wants; returns the split's part of the manifest."""
        self._flush()
        if self.stream is not None:
            self._close_shard()
        files = []
        for shard, count in enumerate(self.shard_packs):
            path = self.folder / f"data-{shard:05d}-of-{len(self.shard_packs):05d}.arrow"
            self._shard_path(shard).rename(path)
            files.append({"packs": count} | _entry(path))
        packs = sum(self.shard_packs)
        content = {"length": self.length, "packs": packs, "columns": [hasher.hexdigest() for hasher in self.hashes]}
        fingerprint = hash_of(content)
        _write_json(self.folder / "dataset_info.json", {"features": _features(self.length, self.masked)})
        state = {
            "_data_files": [{"filename": file["name"]} for file in files],
            "_fingerprint": fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self.folder.name,
        }
        _write_json(self.folder / "state.json", state)
        totals = {"packs": packs, "documents": self.documents, "tokens": self.tokens}
        return totals | {"fingerprint": fingerprint, "files": files}

    def _flush(self) -> None:
        if not self.buffered:
            return
        ids, lengths, counts, first_positions, *masks = (np.concatenate(each) for each in zip(*self.buffered, strict=True))
        self.buffered, self.buffered_rows = [], 0
        offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        columns = [
            pa.FixedSizeListArray.from_arrays(_column(ids.reshape(-1)), self.length),
            pa.ListArray.from_arrays(_column(offsets), _column(lengths)),
            _column(first_positions),
            *(pa.FixedSizeListArray.from_arrays(_column(bits.reshape(-1)), bits.shape[1]) for bits in masks),
        ]
        if self.stream is None:
            self.file = pa.OSFile(str(self._shard_path(len(self.shard_packs))), "wb")
            self.stream = pa.ipc.new_stream(self.file, self.schema)
            self.shard_packs.append(0)
        self.stream.write_batch(pa.record_batch(columns, schema=self.schema))
        self.shard_packs[-1] += len(counts)
        if self.file.tell() >= self.shard_bytes:
            self._close_shard()

    def _close_shard(self) -> None:
        self.stream.close()
        self.file.close()
        self.stream = None

    def _shard_path(self, shard: int) -> Path:
        return self.folder / f"data-{shard:05d}.arrow"  # `-of-n` joins once n is known


class ArrowPacks:
    """One split of a folder that PackWriter wrote, memory-mapped. InputError where a file is missing, truncated or damaged.

    The fingerprint covers tokens, lengths, positions, masks and their order, but not how they are sharded.
    """

    def __init__(self, path: Path, split: Split = "train") -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        if split not in self.manifest["splits"]:
            raise InputError(f"{self.path}: has no {split} split; it holds {', '.join(self.manifest['splits'])}")
        part = self.manifest["splits"][split]
        self.length: int = self.manifest["length"]
        self.tokenizer: dict | None = self.manifest["tokenizer"]
        self.fingerprint: str = part["fingerprint"]
        self.tokens: int = part.get("tokens", part["packs"] * self.length)  # without padding
        self._records = _records(part["files"], f"{split}/")
        check_files(self.path, self._records, REMEDY)
        self._batches = [batch for record in self._records for batch in self._map(record.name)]
        self._unchecked = set(range(len(self._batches)))
        self._starts = np.concatenate([[0], np.cumsum([len(batch[0]) for batch in self._batches])]).tolist()
        if self._starts[-1] != part["packs"]:
            raise InputError(f"{self.path / split}: holds {len(self)} packs where {MANIFEST} says {part['packs']}; {REMEDY}")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        (ids, lengths, offsets, first_positions, *masks), row = self._locate(index)
        return Pack(ids[row], lengths[offsets[row] : offsets[row + 1]], int(first_positions[row]), self._bits(masks, row))

    def lengths(self, index: int) -> np.ndarray:
        (_, lengths, offsets, *_), row = self._locate(index)
        return lengths[offsets[row] : offsets[row + 1]]

    def trained(self, index: int) -> np.ndarray | None:
        (_, _, _, _, *masks), row = self._locate(index)
        return self._bits(masks, row)

    def _bits(self, masks: list[np.ndarray], row: int) -> np.ndarray | None:
        return np.unpackbits(masks[0][row], count=self.length, bitorder="little").view(np.bool_) if masks else None

    def verify(self) -> None:
        check_files(self.path, self._records + _records(self.manifest["files"]), REMEDY, trust_stamp=False)

    def _locate(self, index: int) -> tuple[tuple[np.ndarray, ...], int]:
        batch = bisect_right(self._starts, checked_index(index, len(self))) - 1
        if batch in self._unchecked:
            self._check_documents(*self._batches[batch][1:4])
            self._unchecked.discard(batch)
        return self._batches[batch], index - self._starts[batch]

    def _check_documents(self, lengths: np.ndarray, offsets: np.ndarray, first_positions: np.ndarray) -> None:
        """InputError unless every pack of a record batch has documents of 1 token or more that fit into it."""
        fits = offsets[0] >= 0 and offsets[-1] <= len(lengths) and (np.diff(offsets) > 0).all()
        if fits:
            used = lengths[offsets[0] : offsets[-1]]
            totals = np.add.reduceat(used, offsets[:-1] - offsets[0], dtype=np.int64)
            fits = used.min() > 0 and totals.max() <= self.length and first_positions.min() >= 0
        if not fits:
            raise InputError(f"{self.path}: holds documents of lengths that make no packs of {self.length} tokens; {REMEDY}")

    def _map(self, name: str) -> list[tuple[np.ndarray, ...]]:
        """Returns for each record batch, as views of the file: ids [rows, length], lengths, offsets [rows + 1], first positions
        and, with masks, their bits [rows, bytes]."""
        masked = self.manifest["version"] == MASKED_VERSION
        try:
            with pa.ipc.open_stream(pa.memory_map(str(self.path / name))) as stream:
                if stream.schema != _schema(self.length, masked):
                    raise InputError(f"{self.path / name}: its columns are not those of packs of {self.length} tokens; {REMEDY}")
                return [
                    (
                        _view(ids.values, np.uint32).reshape(len(ids), self.length),
                        _view(lengths.values, np.int32),
                        _view(lengths.offsets, np.int32),
                        _view(first_positions, np.int32),
                        *(_view(bits.values, np.uint8).reshape(len(bits), -1) for bits in masks),
                    )
                    for ids, lengths, first_positions, *masks in (batch.columns for batch in stream if len(batch))
                ]
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            raise InputError(f"{self.path / name}: damaged: {reason_of(error)}; {REMEDY}") from None


def _entry(path: Path) -> dict[str, Any]:
    """Returns what the manifest records of a finished file."""
    return {"name": path.name, "bytes": path.stat().st_size} | hash_file(path, ["sha256"])


def _records(files: list[dict[str, Any]], folder: str = "") -> list[FileRecord]:
    return [FileRecord(folder + file["name"], file["bytes"], {"sha256": file["sha256"]}) for file in files]


def _column(values: np.ndarray) -> pa.Array:
    """Returns an array over the memory of `values`, which are 1-dimensional. (`pa.array` gives the same, and imports pandas where
    it is installed.)"""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _view(array: pa.Array, dtype: type) -> np.ndarray:
    """Returns the array's own memory as numpy sees it. (`to_numpy` gives the same, and imports pandas where it is installed.)"""
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * array.type.bit_width // 8)


def _schema(length: int, masked: bool) -> pa.Schema:
    columns = [
        ("input_ids", pa.list_(pa.uint32(), length)),
        ("lengths", pa.list_(pa.int32())),
        ("first_position", pa.int32()),
    ]
    if masked:
        columns.append(("trained", pa.list_(pa.uint8(), -(-length // 8))))
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": _features(length, masked)}})})


def _features(length: int, masked: bool) -> dict[str, Any]:
    """The columns as `datasets` describes them. Every version reads `Sequence`; from 4.0 on it means `List`."""
    bits = {"feature": {"dtype": "uint8", "_type": "Value"}, "length": -(-length // 8), "_type": "Sequence"}
    return {
        "input_ids": {"feature": {"dtype": "uint32", "_type": "Value"}, "length": length, "_type": "Sequence"},
        "lengths": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"},
        "first_position": {"dtype": "int32", "_type": "Value"},
    } | ({"trained": bits} if masked else {})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
