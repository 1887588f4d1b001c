"""Read MDS shards of MosaicML's streaming library: version 2, not compressed.

The format is that of github.com/mosaicml/streaming (streaming/base/format/mds). `index.json` lists
the shards and the columns of each shard. A shard file consists of the number of samples `n`
(uint32), `n + 1` byte offsets (uint32), a copy of the shard's configuration, and the samples. A
sample consists of the sizes of its variable-size columns (uint32 each) and of the values of all
columns in the order of `column_names`. An encoding such as `uint32` may mean one number or an array
of numbers. It means one number if the declared size is the size of one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foundation.errors import InputError, as_input_error
from foundation.files import FileRecord, check_files, hash_of
from foundation.reading import load_object
from packing.arrow import Pack, Packs, locate
from packing.token_columns import (
    BOUNDARIES,
    MASK,
    TOKEN_COLUMNS,
    number_documents,
    rule_of_eos,
    starts_of_documents,
    token_columns,
    trained_tokens,
    whole_numbers,
)
from packing.tokenizer import load_tokenizer

INDEX = "index.json"
_REMEDY = (
    "fetch or write the folder again; compressed shards must be unpacked first, for example with "
    "`zstd -d FOLDER/*.zstd`"
)
_SCALARS = {
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
}  # fmt: skip
# Dtype of an array by its first byte. It is used if the encoding does not include a dtype.
_VALUE_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


# ── Encodings ─────────────────────────────────────────────────────────────────────────────────────


def decoder(encoding: str, size: int | None) -> Callable[[memoryview], Any]:
    """Return a function that decodes the bytes of a value with this encoding.

    The function returns a NumPy scalar or a read-only array. For an encoding that is not numeric,
    it returns the bytes. `size` is the declared number of bytes of every value, or None if each
    sample stores the size.
    """
    name, _, arguments = encoding.partition(":")
    if name in _SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        if size == dtype.itemsize:
            return lambda data: np.frombuffer(data, dtype)[0]
        return partial(np.frombuffer, dtype=dtype)
    if name == "ndarray":
        dtype_name, _, sides = arguments.partition(":")
        shape = tuple(map(int, sides.split(","))) if sides else None
        return partial(_decode_array, dtype_name, shape)
    return bytes


def _decode_array(dtype: str, shape: tuple[int, ...] | None, data: memoryview) -> np.ndarray:
    """Return the array in `data`. A dtype or shape that is not given is read from `data`."""
    if not dtype:
        dtype = _VALUE_DTYPES[data[0]]
        data = data[1:]
    if shape is None:
        # The upper six bits are the number of axes. The lower two bits are log2 of the number of
        # bytes that store the length of each axis.
        axes = data[0] >> 2
        side_bytes = 1 << (data[0] & 3)
        shape = tuple(np.frombuffer(data, f"<u{side_bytes}", axes, offset=1).tolist())
        data = data[1 + axes * side_bytes :]
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


# ── Shards ────────────────────────────────────────────────────────────────────────────────────────


class Shard:
    """The samples of one shard file."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        """Read the shard's `entry` in index.json."""
        self.folder = folder
        self.samples: int = entry["samples"]
        raw = entry["raw_data"]
        self.record = FileRecord(raw["basename"], raw["bytes"], raw["hashes"])
        self.path = folder / self.record.name
        self.layout = [entry[key] for key in ("column_names", "column_encodings", "column_sizes")]
        names, encodings, sizes = self.layout
        # A size is the number of bytes of every value, or None if each sample stores the size.
        self._columns = [*zip(names, sizes, map(decoder, encodings, sizes), strict=True)]

    @cached_property
    def content(self) -> memoryview:
        """The memory-mapped content of the shard file."""
        # Use Arrow's memory map. Unlike Python's memory map, it does not keep the file open. A
        # terabyte of data is 16,000 shards, and many systems limit a process to 1,024 open files.
        return memoryview(pa.memory_map(str(self.path)).read_buffer())

    def sample(self, index: int) -> dict[str, Any]:
        """Return the decoded columns of sample `index`. Arrays are views into the file."""
        begin, stop = np.frombuffer(self.content, "<u4", 2, offset=4 + 4 * index)
        data = self.content[begin:stop]
        stored_sizes = sum(1 for _, size, _ in self._columns if not size)
        sizes = iter(np.frombuffer(data, "<u4", stored_sizes).tolist())
        start = 4 * stored_sizes
        columns = {}
        for name, size, decode in self._columns:
            end = start + (size or next(sizes))
            columns[name] = decode(data[start:end])
            start = end
        return columns


def read_index(folder: Path) -> list[Shard]:
    """Return the shards of `folder`. Raise InputError if a shard is missing or damaged."""
    with as_input_error(
        (LookupError, TypeError), f"{folder / INDEX}: is not an index of MDS shards", _REMEDY
    ):
        shards = [Shard(folder, entry) for entry in load_object(folder / INDEX, _REMEDY)["shards"]]
    check_files(folder, [shard.record for shard in shards], _REMEDY)
    return shards


class MDSPacks(Packs):
    """The packs of one or several MDS folders, concatenated in the order of the folders.

    Each sample is a pack. It has a column `input_ids` (or `tokens`), and may have columns of
    `packing.token_columns`.
    """

    def __init__(
        self, folders: list[Path], path: Path, length: int | None, tokenizer: str | None = None
    ) -> None:
        """Open the shards in `folders`. `path` is the name of these packs in messages.

        If `length` is None, a pack has the length of the first sample. If no column of the first
        sample marks where documents end, each EOS token of `tokenizer` ends a document, or begins
        one if the first sample begins with it (see `starts_of_documents`).
        """
        self.path = path
        self._shards = [shard for folder in folders for shard in read_index(folder)]
        if not self._shards:
            raise InputError(f"{path}: its {INDEX} lists no shards; {_REMEDY}")
        self._starts = [0, *accumulate(shard.samples for shard in self._shards)]
        sample = self._shards[0].sample(0)
        tokens = sample.pop(_token_column(sample), ())
        self.length = length or len(tokens)
        # Id of the token that ends or begins a document, or None if columns mark documents.
        self._end_token: int | None = None
        if tokenizer and not _marks_documents(sample, tokens):
            self._end_token = load_tokenizer(tokenizer).special.get("eos")
        self._eos_begins = False
        notes = []
        if unread := [name for name in sample if name not in TOKEN_COLUMNS]:
            notes.append(f"{path}: columns not read: {', '.join(unread)}")
        if self._end_token is not None:
            self._eos_begins = bool(np.ravel(tokens)[0] == self._end_token)
            notes.append(rule_of_eos(path, self._end_token, begins=self._eos_begins))
        self.notes = notes
        self.fingerprint = self._fingerprint()
        # Read a pack, so that a wrong length or dtype raises InputError at the start.
        self[0]

    def _fingerprint(self) -> str:
        """Return the fingerprint, which depends on how samples are divided into shards."""
        content: list[Any] = []
        for shard in self._shards:
            hashes = shard.record.hashes or {"sha256": hashlib.sha256(shard.content).hexdigest()}
            content.append([shard.samples, shard.layout, hashes])
        if self._end_token is not None:
            content.append(self._end_token)
        # Other packs keep the hash that they had before EOS could begin documents.
        if self._eos_begins:
            content.append("begins")
        return hash_of(content)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        number, row = locate(self._starts, index)
        sample = self._shards[number].sample(row)
        return self._pack_of(sample, where=f"{self._shards[number].path}, sample {row}")

    def _pack_of(self, sample: Mapping[str, Any], where: str) -> Pack:
        """Return the pack in the columns of a sample.

        `where` names the sample in the message of an InputError.
        """
        ids, columns = self._read_columns(sample, where)
        with as_input_error((ValueError,), where):
            document_numbers = number_documents(len(ids), columns)
            trained = trained_tokens(ids, columns)
        is_real = document_numbers >= 0
        # Padding is only at the end if the first `real_tokens` tokens are no padding.
        real_tokens = is_real.sum()
        if real_tokens == 0 or not is_real[:real_tokens].all():
            raise InputError(
                f"{where}: the columns {', '.join(columns)} are not supported: a sample must "
                "start with a document, and have padding only at its end"
            )
        if trained is not None:
            trained &= is_real
        lengths = np.bincount(document_numbers[is_real]).astype(np.int32)
        return Pack(ids.astype(np.uint32, copy=False), lengths, trained)

    def _read_columns(
        self, sample: Mapping[str, Any], where: str
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the token ids of a sample, and its columns of `packing.token_columns`.

        If EOS ends or begins documents, the column `document_ids` is added.
        """
        token_column = _token_column(sample)
        if token_column not in sample:
            raise InputError(
                f"{where}: the sample has the columns {', '.join(sample)}, but no column "
                "input_ids; write the tokens in a column of this name"
            )
        with as_input_error(
            (ValueError,),
            where,
            "in MDS, write the column as ndarray:uint32, or as uint32 without a size",
        ):
            ids = whole_numbers(token_column, sample[token_column])
            columns = token_columns(sample)
        if len(ids) != self.length:
            raise InputError(
                f"{where}: the sample has {len(ids)} tokens, but `data.length` is {self.length}; "
                f"set data.length={len(ids)} if all samples have this length"
            )
        if self._end_token is not None:
            starts = starts_of_documents(ids == self._end_token, begins=self._eos_begins)
            columns["document_ids"] = np.cumsum(starts)
        return ids, columns

    def verify(self) -> None:
        for shard in self._shards:
            check_files(shard.folder, [shard.record], _REMEDY, hashed=True)


def _marks_documents(sample: Mapping[str, Any], tokens: Any) -> bool:
    """Return True if a column of a sample with these `tokens` marks where documents end."""
    # If the attention mask does not have one value per token, it has the lengths of documents.
    has_lengths = np.size(sample.get(MASK, tokens)) != np.size(tokens)
    return has_lengths or not sample.keys().isdisjoint(BOUNDARIES)


def _token_column(sample: Mapping[str, Any]) -> str:
    """Return the name of the column with the tokens of a sample."""
    return "input_ids" if "input_ids" in sample else "tokens"
