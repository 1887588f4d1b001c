"""Packs that other programs wrote: MosaicML streaming's MDS shards (version 2, raw or zstd, every
encoding that packs can use), and flat token files as nanoGPT writes them.

MDS (github.com/mosaicml/streaming, streaming/base/format/mds): `index.json` lists the shards and the columns of each. A shard is
a count `n` (uint32), `n + 1` byte offsets (uint32), a copy of its configuration, and the samples. A sample is the sizes of its
variable-size columns (uint32 each) and then the values of all columns, in the order of `column_names`. The name of a scalar is
ambiguous, as docs/data.md says; the declared size decides.

A token file (.bin) is token ids one after another, uint16 or uint32, without any sign of where documents or packs begin. A folder
holds `train.bin` and perhaps `val.bin`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import Any

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.files import FileRecord, check_files, hash_file, hash_of
from foundation.progress import say
from foundation.reading import load_object, refusing
from packing.arrow import JoinedPacks, Pack, Packs, checked_index
from packing.token_columns import (
    BOUNDARIES,
    LABELS,
    MASK,
    TOKEN_COLUMNS,
    number_documents,
    trained_tokens,
)
from packing.tokenizer import load_tokenizer

INDEX = "index.json"
_REMEDY = "fetch the folder again, or write it again"
_SCALARS = {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)} - {
    "float8"
}
_VALUE_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def decoder(encoding: str, size: int | None) -> Callable[[memoryview], Any]:
    """The function from a value's bytes to a NumPy scalar, a read-only array or, of encodings without tokens, the bytes."""
    name, _, arguments = encoding.partition(":")
    if name in _SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        return (
            (lambda data: np.frombuffer(data, dtype)[0])
            if size == dtype.itemsize
            else partial(np.frombuffer, dtype=dtype)
        )
    if name == "ndarray":
        dtype, _, shape = arguments.partition(":")
        return partial(
            _array, dtype, tuple(int(side) for side in shape.split(",")) if shape else None
        )
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


class Shard(Packs):
    """The packs of one shard file, a sample each: `input_ids` (or `tokens`) and the columns of
    `packing.token_columns`. An `end_token` that is not None ends a document."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        """entry: what index.json says of the shard."""
        if (entry["format"], entry["version"]) != ("mds", 2):
            raise InputError(
                f"{folder / INDEX}: a shard of {entry['format']} version {entry['version']}; MDS version 2 is read"
            )
        raw, self.folder, self.samples = entry["raw_data"], folder, entry["samples"]
        self.hashes: dict[str, str] = raw["hashes"]
        self.is_packed = bool(entry["zip_data"]) and not (folder / raw["basename"]).exists()
        file = entry["zip_data"] if self.is_packed else raw
        if Path(file["basename"]).is_absolute() or ".." in Path(file["basename"]).parts:
            raise InputError(f"{folder / INDEX}: {file['basename']} is outside of it; {_REMEDY}")
        self.record = FileRecord(file["basename"], file["bytes"], file["hashes"])
        self.path = folder / self.record.name
        self.codec = (entry["compression"] or "").partition(":")[0]  # as `zstd:7`
        self.layout = [entry[key] for key in ("column_names", "column_encodings", "column_sizes")]
        # A column without a size (bytes of every value) has one that each sample states.
        self._columns = [
            (name, size, decoder(encoding, size))
            for name, encoding, size in zip(*self.layout, strict=True)
        ]
        self._tokens = "input_ids" if "input_ids" in self.layout[0] else "tokens"

    @cached_property
    def content(self) -> tuple[memoryview, np.ndarray]:
        """The mapped file, unpacked, and the offsets of its samples.

        Raise InputError if the file's own table does not agree with the index.
        """
        # Arrow's map keeps no file open, Python's does: a terabyte is 16,000 shards, and a process often may open only 1,024.
        file = self._unpacked() if self.is_packed else pa.memory_map(str(self.path))
        data = memoryview(file.read_buffer())
        fits = data[:4] == self.samples.to_bytes(4, "little") and 8 + 4 * self.samples <= len(data)
        offsets = np.frombuffer(data, "<u4", self.samples + 1 if fits else 0, offset=4)
        if not fits or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
            raise InputError(
                f"{self.path}: damaged: its table of samples does not fit the file and its index; {_REMEDY}"
            )
        return data, offsets

    def _unpacked(self) -> pa.MemoryMappedFile:
        """Return the content of a compressed file, as the map of an unlinked temporary file."""
        what = f"{self.path}: cannot be unpacked into {gettempdir()} (TMPDIR names another folder)"
        with (
            refusing((OSError, ValueError, NotImplementedError), what, _REMEDY),
            NamedTemporaryFile() as file,
        ):
            shutil.copyfileobj(pa.input_stream(str(self.path), compression=self.codec), file)
            file.flush()
            return pa.memory_map(file.name)

    def sample(self, index: int) -> dict[str, Any]:
        """The columns of sample `index`, decoded. Arrays are views into the file."""
        data, offsets = self.content
        data = data[offsets[index] : offsets[index + 1]]
        variable = sum(not size for _, size, _ in self._columns)
        start, result = 4 * variable, {}
        sizes = iter(np.frombuffer(data, "<u4", variable).tolist())
        for name, size, decode in self._columns:
            end = start + (size or next(sizes))
            result[name] = decode(data[start:end])
            start = end
        return result

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pack:
        sample, where = self.sample(checked_index(index, len(self))), f"{self.path}, sample {index}"
        if (ids := _row(sample, self._tokens, where)) is None:
            raise InputError(
                f"{where}: has the columns {', '.join(sample)}; packs need one named input_ids"
            )
        if len(ids) != self.length:
            raise InputError(
                f"{where}: holds {len(ids)} tokens, `data.length` says {self.length}; set it to fit"
            )
        columns = {
            name: _row(sample, name, where) for name in sample if name in (LABELS, *TOKEN_COLUMNS)
        }
        if self.end_token is not None:
            columns["document_ids"] = np.cumsum(np.append(0, ids[:-1] == self.end_token))
        with refusing((ValueError,), where):
            numbers = number_documents(len(ids), columns)
            trained = trained_tokens(ids, columns)
        real = numbers >= 0
        first_position = int(columns.get("position_ids", numbers)[0])
        if first_position < 0 or not real[: max(1, real.sum())].all():
            raise InputError(
                f"{where}: {', '.join(columns)} make no documents that are padded at the end only"
            )
        lengths = np.bincount(numbers[real]).astype(np.int32)
        return Pack(
            ids.astype(np.uint32, copy=False),
            lengths,
            first_position,
            None if trained is None else trained & real,
        )


def read_index(folder: Path) -> list[Shard]:
    """The shards of `folder`, checked. InputError for what is missing, damaged, or not read here."""
    with refusing((LookupError, TypeError), f"{folder / INDEX}: no index of MDS shards", _REMEDY):
        shards = [Shard(folder, entry) for entry in load_object(folder / INDEX, _REMEDY)["shards"]]
    check_files(folder, [shard.record for shard in shards], _REMEDY)
    for shard in shards:
        if not shard.is_packed:  # what is compressed is unpacked when it is first read
            _ = shard.content
    return shards


class MDSPacks(JoinedPacks):
    """Packs in MDS folders, one after another. length: None for what the first sample has.

    The EOS token of `tokenizer` ends a document if no column of the first sample says what a
    document is.
    """

    def __init__(
        self, folders: list[Path], path: Path, length: int | None, tokenizer: str | None = None
    ) -> None:
        shards = [shard for folder in folders for shard in read_index(folder)]
        if not shards:
            raise InputError(f"{path}: its {INDEX} lists no shards; {_REMEDY}")
        super().__init__(path, shards)
        # Of columns and content: the hashes of the index, or else the files' own. The same samples in other shards have another.
        hashes = [each.hashes or {"sha256": hash_file(each.path)} for each in shards]
        content = [
            [each.samples, each.layout, its] for each, its in zip(shards, hashes, strict=True)
        ]
        first = shards[0].sample(0)
        tokens = first.pop(shards[0]._tokens, ())
        self.length = length or len(tokens)
        unread = ", ".join(name for name in first if name not in (LABELS, *TOKEN_COLUMNS))
        say(
            f"{path}: columns not read: {unread}",
            shown=bool(unread) and os.environ.get("RANK", "0") == "0",
        )
        has_lengths = np.size(first.get(MASK, tokens)) != np.size(tokens)
        says_documents = has_lengths or not first.keys().isdisjoint(BOUNDARIES)
        end_token = (
            load_tokenizer(tokenizer).special.get("eos")
            if tokenizer and not says_documents
            else None
        )
        self.fingerprint = hash_of(content if end_token is None else [*content, end_token])
        for shard in shards:
            shard.length = self.length
            shard.end_token = end_token
        self[0]  # a wrong length or dtype shows here, before anything costs time

    def verify(self) -> None:
        for shard in self.joined:
            check_files(shard.folder, [shard.record], _REMEDY, hashed=True)


def _row(sample: dict[str, Any], name: str, where: str) -> np.ndarray | None:
    """A column with a number a token; None where there is none of this name."""
    row = sample.get(name)
    if row is not None and (
        not isinstance(row, np.ndarray) or row.ndim != 1 or row.dtype.kind not in "iu"
    ):
        raise InputError(
            f"{where}: column `{name}` holds no row of integers; write ndarray:uint32, or uint32 without a size"
        )
    return row


_SAMPLED_TOKENS, _FEWEST_TOKENS = 2**20, 64  # in fewer, chance may make them small
# a uint32 file of a vocabulary below 2^20 has only such values in every other uint16
_HIGH_WORD_LIMIT = 16


class TokenBin(Packs):
    """Consecutive windows of `length` tokens of one .bin file; the last one is padded.

    With `end_token`, each document ends with that id, and the positions of a cut one restart in each pack; without, a pack is one
    document. In a file of uint32 every other uint16 is small, which tells the dtype.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        self.path, self.length, self.end_token = Path(path), length, end_token
        sample = np.fromfile(self.path, "<u2", _SAMPLED_TOKENS)
        wide = (
            len(sample) >= _FEWEST_TOKENS
            and sample[1::2].max() < _HIGH_WORD_LIMIT <= sample[0::2].max()
        )
        dtype, size = "uint32" if wide else "uint16", self.path.stat().st_size
        if size == 0 or size % np.dtype(dtype).itemsize:
            raise InputError(
                f"{self.path}: truncated: {size} bytes are no whole number of {dtype} tokens; write it again"
            )
        self._tokens = np.memmap(self.path, np.dtype(dtype).newbyteorder("<"), mode="r")
        self.fingerprint = hash_of([hash_file(self.path, "xxh3_128"), dtype, length, end_token])

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.length)

    def __getitem__(self, index: int) -> Pack:
        start = checked_index(index, len(self)) * self.length
        tokens = self._tokens[start : start + self.length]
        ids = np.full(self.length, self.end_token or 0, np.uint32)
        ids[: len(tokens)] = tokens
        ends = (
            np.flatnonzero(tokens == self.end_token) + 1
            if self.end_token is not None
            else np.zeros(0, np.int64)
        )
        return Pack(ids, np.diff(np.union1d(ends, len(tokens)), prepend=0).astype(np.int32))
