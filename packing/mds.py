"""Reads MosaicML streaming's MDS shards: version 2, raw or zstd, every encoding that packs can use.

The format (github.com/mosaicml/streaming, streaming/base/format/mds): `index.json` lists the shards and the columns of each. A
shard is a count `n` (uint32), `n + 1` byte offsets (uint32), a copy of its configuration, and the samples. A sample is the sizes
of its variable-size columns (uint32 each) and then the values of all columns, in the order of `column_names`.

The name `uint32` (and every other scalar's) is ambiguous: one number in the format, the raw bytes of an array in the reference
launcher. The declared size decides: 4 bytes is the number, no fixed size the array.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Container
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

from foundation.errors import InputError
from foundation.files import FileRecord, check_files, hash_file
from foundation.reading import load_object
from packing.arrow import IGNORE, Pack, Packs, checked_index

INDEX = "index.json"
_REMEDY = "fetch the folder again, or write it again"
_SCALARS = {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)} - {"float8"}
_VALUE_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_FILES = ("raw_data", "zip_data")
_MOST_WINDOW = 2**27  # bytes of memory that a zstd file may ask for; what zstd itself allows by default
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, StopIteration, OverflowError)  # what decoding such bytes raises


def decoder(encoding: str, size: int | None) -> Callable[[memoryview], Any]:
    """The function from a value's bytes to a NumPy scalar, a read-only array or, of encodings without tokens, the bytes."""
    name, _, arguments = encoding.partition(":")
    if name in _SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        return (lambda data: np.frombuffer(data, dtype)[0]) if size == dtype.itemsize else partial(np.frombuffer, dtype=dtype)
    if name == "ndarray":
        dtype, _, shape = arguments.partition(":")
        return partial(_array, dtype, tuple(int(side) for side in shape.split(",")) if shape else None)
    return bytes


def _array(dtype: str, shape: tuple[int, ...] | None, data: memoryview) -> np.ndarray:
    """An array; its dtype and shape come from the encoding's name or, where they vary, from the bytes before its values."""
    if not dtype:
        dtype, data = _VALUE_DTYPES[data[0]], data[1:]
    if shape is None:  # ndim in the upper six bits, log2 of the bytes of each side in the lower two
        axes, side_bytes = data[0] >> 2, 1 << (data[0] & 3)
        shape = tuple(np.frombuffer(data, f"<u{side_bytes}", axes, offset=1).tolist())
        data = data[1 + axes * side_bytes :]
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


class Shard:
    """Random access to the samples of one shard file, memory-mapped by `open`."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        """entry: what index.json says of the shard. Raises ValueError and such where that is no shard."""
        compression = (entry["compression"] or "").partition(":")[0]
        if (entry["format"], entry["version"]) != ("mds", 2) or compression not in ("", "zstd"):
            what = f"{entry['format']} version {entry['version']}, compressed with {compression or 'nothing'}"
            raise ValueError(f"a shard of {what}; MDS version 2 is read, raw or zstd")
        self.folder, self.samples = folder, int(entry["samples"])
        files = (entry[key] and (entry[key]["basename"], entry[key]["bytes"], entry[key]["hashes"]) for key in _FILES)
        self.raw, self.packed = (file and FileRecord(*file) for file in files)
        self.path = folder / self.raw.name
        if not self.path.parent.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{self.raw.name} leads out of the folder")
        self.layout = [entry[key] for key in ("column_names", "column_encodings", "column_sizes")]
        # A column without a size (bytes of every value) has one that each sample states.
        self.columns = [(name, size, decoder(encoding, size)) for name, encoding, size in zip(*self.layout, strict=True)]
        self._variable_columns = sum(not size for _, size, _ in self.columns)

    @property
    def record(self) -> FileRecord:
        """The file to check: the decompressed one, once it exists."""
        return self.packed if self.packed is not None and not self.path.exists() else self.raw

    def unpack(self) -> None:
        """Decompress beside the packed file, as the format's own library does, unless that was done before."""
        if self.packed is None or self.path.exists():
            return
        packed = self.folder / self.packed.name
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")  # other ranks do the same
        try:
            with open(packed, "rb") as source, open(temporary, "wb") as target:
                unpacked = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(source)
                while (block := unpacked.read(2**20)) and target.tell() <= self.raw.size:  # a bomb would fill the disk
                    target.write(block)
                target.flush()
                os.fsync(target.fileno())
            if temporary.stat().st_size != self.raw.size or any(
                hash_file(temporary, algorithm) != digest for algorithm, digest in self.raw.hashes.items()
            ):
                raise InputError(f"{packed}: damaged: what it decompresses to is not what was written; {_REMEDY}")
            temporary.replace(self.path)
        except zstandard.ZstdError as error:
            raise InputError(f"{packed}: damaged: {error}; {_REMEDY}") from None
        except OSError as error:
            raise InputError(f"{packed}: cannot be decompressed beside itself ({error}); copy the folder elsewhere") from None
        finally:
            temporary.unlink(missing_ok=True)

    def open(self) -> None:
        """Map the file; InputError unless its own table agrees with the index."""
        # Arrow's map keeps no file open, Python's does: a terabyte is 16,000 shards, and a process often may open only 1,024.
        self._data = memoryview(pa.memory_map(str(self.path)).read_buffer())
        count = int.from_bytes(self._data[:4], "little")
        fits = count == self.samples and 8 + 4 * count <= len(self._data)
        self._offsets = np.frombuffer(self._data, "<u4", count + 1 if fits else 0, offset=4)
        if not fits or self._offsets[-1] != len(self._data) or (self._offsets[1:] < self._offsets[:-1]).any():
            raise InputError(f"{self.path}: damaged: its table of samples does not fit the file and its index; {_REMEDY}")

    def sample(self, index: int, names: Container[str] | None = None) -> dict[str, Any]:
        """Sample `index`, or those of its columns that `names` holds, decoded. Arrays are views into the file."""
        data = self._data[self._offsets[index] : self._offsets[index + 1]]
        try:
            sizes = iter(np.frombuffer(data, "<u4", self._variable_columns).tolist())
            start, result = 4 * self._variable_columns, {}
            for name, size, decode in self.columns:
                end = start + (size or next(sizes))
                if names is None or name in names:
                    result[name] = decode(data[start:end])
                start = end
        except _DAMAGED as error:
            raise InputError(f"{self.path}: damaged: sample {index} cannot be decoded ({error}); {_REMEDY}") from None
        if start != len(data):
            raise InputError(f"{self.path}: damaged: the columns of sample {index} do not fill it; {_REMEDY}")
        return result


def read_index(folder: Path) -> list[Shard]:
    """The shards of `folder`, checked and decompressed. InputError for what is missing, damaged, or not read here."""
    try:
        shards = [Shard(folder, entry) for entry in load_object(folder / INDEX, _REMEDY)["shards"]]
    except _DAMAGED as error:
        raise InputError(f"{folder / INDEX}: not an MDS index that is read here: {error}; {_REMEDY}") from None
    check_files(folder, [shard.record for shard in shards], _REMEDY)
    for shard in shards:
        shard.unpack()
        shard.open()
    return shards


class MDSPacks(Packs):
    """Packs in MDS folders, one after another: `input_ids` (or `tokens`), cut into documents by `attention_mask` and
    `position_ids` if there are any. Where there are `labels`, those of -100 are of tokens that are not to be learnt.

    length: None for what the first sample has.
    """

    tokenizer = None  # the format has no place for it

    def __init__(self, folders: list[Path], path: Path, length: int | None) -> None:
        self.path = path
        self.shards = [shard for folder in folders for shard in read_index(folder)]
        self._starts = [0, *accumulate(shard.samples for shard in self.shards)]
        if len(self) == 0:
            raise InputError(f"{path}: its MDS index lists no samples; name a folder that holds packs in `data.packs`")
        names = set(self.shards[0].layout[0])
        if other := next((each for each in self.shards if set(each.layout[0]) != names), None):
            raise InputError(f"{other.path}: has other columns than {self.shards[0].path}; take the shards of one kind alone")
        self._tokens = next((name for name in ("input_ids", "tokens") if name in names), None)
        if self._tokens is None:
            raise InputError(f"{path}: has the columns {', '.join(sorted(names))}; packs need one named input_ids")
        self._labelled = "labels" in names
        # Of columns and content: the hashes of the index, or else the files' own. The same samples in other shards have another.
        hashes = [each.raw.hashes or {"sha256": hash_file(each.folder / each.raw.name)} for each in self.shards]
        content = [[each.samples, each.layout, its] for each, its in zip(self.shards, hashes, strict=True)]
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self.length = length or len(self._row(self.shards[0].sample(0), self._tokens, 0))
        self[0]  # a wrong length or dtype shows here, before anything costs time

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate(self, index: int) -> tuple[Shard, int]:
        number = bisect_right(self._starts, checked_index(index, len(self))) - 1
        return self.shards[number], index - self._starts[number]

    def __getitem__(self, index: int) -> Pack:
        shard, own = self._locate(index)
        sample, where = shard.sample(own), self._where(index)
        ids = self._row(sample, self._tokens, index)
        if len(ids) != self.length:
            raise InputError(f"{where}: holds {len(ids)} tokens, `data.length` says {self.length}; set it to fit")
        if ids.min() < 0 or ids.max() >= 2**32:
            raise InputError(f"{where}: token ids run from {ids.min()} to {ids.max()}; they must be 0 or more and below 2^32")
        lengths, first_position = self._documents(sample, index)
        trained = None
        if self._labelled:
            labels = self._row(sample, "labels", index)
            if len(labels) != len(ids) or ((labels != ids) & (labels != IGNORE)).any():
                raise InputError(
                    f"{where}: its labels are neither its tokens nor {IGNORE}; write them not shifted, or not at all"
                )
            trained = (labels != IGNORE) & (np.arange(len(ids)) < lengths.sum())  # padding is never to be learnt
        return Pack(ids.astype(np.uint32, copy=False), lengths, first_position, trained)

    def lengths(self, index: int) -> np.ndarray:
        shard, own = self._locate(index)
        return self._documents(shard.sample(own, ("attention_mask", "position_ids")), index)[0]

    def trained(self, index: int) -> np.ndarray | None:
        return self[index].trained if self._labelled else None

    def verify(self) -> None:
        for shard in self.shards:
            check_files(shard.folder, [shard.record], _REMEDY, hashed=True)

    def _where(self, index: int) -> str:
        shard, own = self._locate(index)
        return f"{shard.path}, sample {own}"

    def _documents(self, sample: dict[str, Any], index: int) -> tuple[np.ndarray, int]:
        columns = [self._row(sample, name, index) if name in sample else None for name in ("attention_mask", "position_ids")]
        return documents(self.length, *columns, self._where(index))

    def _row(self, sample: dict[str, Any], name: str, index: int) -> np.ndarray:
        row = sample.get(name)
        if not isinstance(row, np.ndarray) or row.ndim != 1 or row.dtype.kind not in "iu":
            raise InputError(
                f"{self._where(index)}: column `{name}` holds no row of integers; write it as "
                "ndarray:uint32, or as uint32 without a fixed size"
            )
        return row


def documents(width: int, mask: np.ndarray | None, positions: np.ndarray | None, where: str) -> tuple[np.ndarray, int]:
    """The document lengths ([documents] int32) and first position of a pack of `width` tokens. InputError where they disagree.

    `mask` is either a list of document lengths, as the reference writes it, or an ordinary mask: ones, then zeros for padding.
    Without lengths, a document begins wherever `positions` do not count on by one; without positions, a pack is one document.
    """
    if positions is not None and (len(positions) != width or positions.min() < 0 or positions.max() >= 2**31):
        raise InputError(f"{where}: position_ids holds no positions of {width} tokens; write the packs again")
    first_position = 0 if positions is None else int(positions[0])
    real = width
    if mask is not None and len(mask) == width and mask.max() <= 1:
        real = int(mask.sum())
        if real == 0 or not mask[:real].all():
            raise InputError(f"{where}: attention_mask has zeros before its last one; packs are padded at the end only")
    elif mask is not None:
        if mask.sum(dtype=np.int64) != width or mask.min() < 0 or mask.max() > width:
            raise InputError(f"{where}: attention_mask is neither a mask nor the lengths of documents that make {width} tokens")
        return mask[mask > 0].astype(np.int32), first_position
    if positions is None:
        return np.array([real], np.int32), 0
    counting = positions[:real].astype(np.int64)  # a narrow dtype could wrap around below
    starts = np.flatnonzero(counting[1:] != counting[:-1] + 1) + 1
    return np.diff(starts, prepend=0, append=real).astype(np.int32), first_position
