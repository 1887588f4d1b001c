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
from pydantic import BaseModel, TypeAdapter, ValidationError

from foundation.errors import InputError, shown
from foundation.integrity import FileRecord, InnerName, Size, check_files, digests, hash_file
from foundation.reading import load_object, parse_json
from foundation.settings import first_mistake
from packing.arrow import IGNORE, Pack, as_token_ids, checked_index

INDEX = "index.json"
_REMEDY = "fetch the folder again, or write it again"
_SCALARS = {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)} - {"float8"}
_VALUE_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_MOST_WINDOW = 2**27  # bytes of memory that a zstd file may ask for; what zstd itself allows by default


def decoder(encoding: str, size: int | None) -> Callable[[memoryview], Any]:
    """The function from a value's bytes to a NumPy scalar, a read-only array or, of encodings without tokens, the bytes."""
    name, _, arguments = encoding.partition(":")
    if name in _SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        return (lambda data: np.frombuffer(data, dtype)[0]) if size == dtype.itemsize else partial(np.frombuffer, dtype=dtype)
    if name == "ndarray":
        dtype, _, shape = arguments.partition(":")
        if dtype and dtype not in _VALUE_DTYPES.values():
            raise ValueError(f"{shown(encoding, repr)} names no dtype of an array")
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


class ShardFile(BaseModel):
    basename: InnerName
    bytes: Size
    hashes: dict[str, str]


class ShardEntry(BaseModel):
    """What index.json says of a shard; keys beyond these are for other readers."""

    version: int
    format: str
    compression: str | None
    samples: Size
    raw_data: ShardFile
    zip_data: ShardFile | None
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Size | None]


class Shard:
    """Random access to the samples of one shard file, memory-mapped by `open`."""

    def __init__(self, folder: Path, entry: ShardEntry) -> None:
        where = folder / INDEX
        if entry.version != 2 or entry.format != "mds":
            raise InputError(
                f"{where}: lists a shard of format {shown(entry.format)} version {entry.version}; only mds version 2 is read"
            )
        compression = (entry.compression or "").partition(":")[0]
        if compression not in ("", "zstd"):
            raise InputError(f"{where}: its shards are compressed with {compression}; write it again with zstd or uncompressed")
        self.folder = folder
        self.samples = entry.samples
        self.raw, self.packed = _record(entry.raw_data), _record(entry.zip_data) if entry.zip_data else None
        self.path = folder / self.raw.name
        self.layout = [entry.column_names, entry.column_encodings, entry.column_sizes]
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
        if not Path(os.path.realpath(self.path)).is_relative_to(os.path.realpath(self.folder)):
            raise InputError(f"{self.path}: leads out of its folder, where nothing is unpacked; copy the folder without links")
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")  # other ranks do the same
        try:
            with open(packed, "rb") as source, open(temporary, "wb") as target:
                unpacked = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(source)
                while (block := unpacked.read(2**20)) and target.tell() <= self.raw.size:  # a bomb would fill the disk
                    target.write(block)
                target.flush()
                os.fsync(target.fileno())
            if temporary.stat().st_size != self.raw.size or hash_file(temporary, self.raw.hashes) != self.raw.hashes:
                raise InputError(f"{packed}: damaged: what it decompresses to is not what was written; {_REMEDY}")
            temporary.replace(self.path)
        except zstandard.ZstdError as error:
            raise InputError(f"{packed}: damaged: {error}; {_REMEDY}") from None
        except OSError as error:
            raise InputError(
                f"{packed}: cannot be decompressed beside itself ({error}); copy the folder to where it can be written, with "
                f"{self.raw.size} bytes free for each such file"
            ) from None
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
        # The index has no hash of its own. A flipped bit in the name of a column would leave the column out.
        if self._layout_inside(self._data[8 + 4 * count : self._offsets[0]]) not in (None, self.layout):
            raise InputError(f"{self.path}: has other columns than {INDEX} says; {_REMEDY}")

    @staticmethod
    def _layout_inside(header: memoryview) -> list[Any] | None:
        """The columns by the shard's own copy of its configuration; None where its writer left that out."""
        try:
            configuration = parse_json(bytes(header))
            return [configuration[key] for key in ("column_names", "column_encodings", "column_sizes")]
        except (ValueError, TypeError, KeyError):
            return None

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
        except (ValueError, KeyError, IndexError, StopIteration, OverflowError) as error:
            raise InputError(f"{self.path}: damaged: sample {index} cannot be decoded ({error}); {_REMEDY}") from None
        if start != len(data):
            raise InputError(f"{self.path}: damaged: the columns of sample {index} do not fill it; {_REMEDY}")
        return result


_ENTRIES = TypeAdapter(list[ShardEntry])


def read_index(folder: Path) -> list[Shard]:
    """The shards that `folder`/index.json lists; InputError where it is no MDS index."""
    path = folder / INDEX
    try:
        entries = _ENTRIES.validate_python(load_object(path, _REMEDY).get("shards"), strict=True)
        return [Shard(folder, entry) for entry in entries]
    except ValidationError as error:
        raise InputError(f"{path}: not an MDS index: {first_mistake(error)}; {_REMEDY}") from None
    except ValueError as error:  # a column more than encodings, or an encoding that is none
        raise InputError(f"{path}: not an MDS index: {error}; {_REMEDY}") from None


def _record(file: ShardFile) -> FileRecord:
    return FileRecord(str(Path(file.basename)), file.bytes, file.hashes)


class MDSReader:
    """All samples of several MDS folders in turn, as dicts of decoded columns.

    Opening checks sizes and hashes and decompresses. Raises InputError for what the folders lack, damage and unknown compression.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._shards_of = {folder: read_index(folder) for folder in folders}
        self.shards = [shard for shards in self._shards_of.values() for shard in shards]
        self._starts = [0, *accumulate(shard.samples for shard in self.shards)]
        self.verify(trust_stamp=True)
        for shard in self.shards:
            shard.unpack()
            shard.open()

    def __len__(self) -> int:
        return self._starts[-1]

    def sample(self, index: int, names: Container[str] | None = None) -> dict[str, Any]:
        shard = bisect_right(self._starts, checked_index(index, len(self))) - 1
        return self.shards[shard].sample(index - self._starts[shard], names)

    def _where(self, index: int) -> str:
        shard = bisect_right(self._starts, index) - 1
        return f"{self.shards[shard].path}, sample {index - self._starts[shard]}"

    def verify(self, *, trust_stamp: bool = False) -> None:
        for folder, shards in self._shards_of.items():
            check_files(folder, [shard.record for shard in shards], _REMEDY, trust_stamp=trust_stamp)

    def _hash(self) -> str:
        """sha256 hex over columns and content hashes in order: those of the index, or else the files' sha256.

        The same samples in other shards, or with other hashes, have another fingerprint.
        """
        content = []
        for folder, shards in self._shards_of.items():
            unhashed = [shard.raw.name for shard in shards if not shard.raw.hashes]
            computed = digests(folder, unhashed, ["sha256"])
            content += [[shard.samples, shard.layout, shard.raw.hashes or computed[shard.raw.name]] for shard in shards]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class MDSPacks(MDSReader):
    """Packs in MDS: `input_ids` (or `tokens`), cut into documents by `attention_mask` and `position_ids` if there are any. Where
    there are `labels`, those of -100 are of tokens that are not to be learnt."""

    tokenizer: dict | None = None  # the format has no place for it

    def __init__(self, folders: list[Path], path: Path, length: int) -> None:
        super().__init__(folders)
        self.path = path
        self.length = length
        if len(self) == 0:
            raise InputError(f"{path}: its MDS index lists no samples; name a folder that holds packs in `data.packs`")
        names = set(self.shards[0].layout[0])
        once = {"input_ids", "tokens", "labels"}  # which of these there are is asked once; other columns a shard may lack
        if other := next((each for each in self.shards if once & (names ^ set(each.layout[0]))), None):
            raise InputError(f"{other.path}: has other columns than {self.shards[0].path}; take the shards of one kind alone")
        self._tokens = next((name for name in ("input_ids", "tokens") if name in names), None)
        if self._tokens is None:
            raise InputError(f"{path}: has the columns {', '.join(sorted(names))}; packs need one named input_ids")
        self._labelled = "labels" in names
        self.fingerprint = self._hash()
        self[0]  # a wrong length or dtype shows here, before anything costs time

    def __getitem__(self, index: int) -> Pack:
        sample = self.sample(index, (self._tokens, "attention_mask", "position_ids", "labels"))
        tokens = self._vector(sample, self._tokens, index)
        if len(tokens) != self.length:
            raise InputError(f"{self._where(index)}: holds {len(tokens)} tokens, `data.length` says {self.length}; set it to fit")
        lengths, first_position = self._documents(sample, index)
        ids = as_token_ids(tokens, self._where(index))
        return Pack(ids, lengths, first_position, self._mask(ids, int(lengths.sum()), sample, index))

    def lengths(self, index: int) -> np.ndarray:
        return self._documents(self.sample(index, ("attention_mask", "position_ids")), index)[0]

    def trained(self, index: int) -> np.ndarray | None:
        return self[index].trained if self._labelled else None

    def _mask(self, ids: np.ndarray, real: int, sample: dict[str, Any], index: int) -> np.ndarray | None:
        """[length] bool from the column `labels`, which is `input_ids` with -100 in places; InputError for any other. What pads
        the pack, behind its first `real` tokens, is not to be learnt whatever stands there."""
        if "labels" not in sample:
            return None
        labels = self._vector(sample, "labels", index)
        if len(labels) != len(ids) or ((labels != ids) & (labels != IGNORE)).any():
            raise InputError(
                f"{self._where(index)}: its labels are neither its tokens nor {IGNORE}; write them as the tokens themselves, not "
                "shifted (the loss shifts them), or leave the column out"
            )
        return (labels != IGNORE) & (np.arange(len(ids)) < real)

    def _documents(self, sample: dict[str, Any], index: int) -> tuple[np.ndarray, int]:
        columns = {name: self._vector(sample, name, index) for name in ("attention_mask", "position_ids") if name in sample}
        return documents(self.length, columns.get("attention_mask"), columns.get("position_ids"), self._where(index))

    def _vector(self, sample: dict[str, Any], name: str, index: int) -> np.ndarray:
        value = sample.get(name)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
            kind = "one number" if isinstance(value, np.generic) else type(value).__name__
            kind += f" of {value.ndim} axes of {value.dtype}" if isinstance(value, np.ndarray) else ""
            raise InputError(
                f"{self._where(index)}: column `{name}` holds {kind} where a row of integers is wanted; "
                "write it as ndarray:uint32, or as uint32 without a fixed size"
            )
        return value


def documents(width: int, mask: np.ndarray | None, positions: np.ndarray | None, where: str) -> tuple[np.ndarray, int]:
    """The document lengths ([documents] int32) and first position of a pack of `width` tokens. InputError where they disagree.

    `mask` is either a list of document lengths, as the reference writes it, or an ordinary mask: ones, then zeros for padding.
    Without lengths, a document begins wherever `positions` do not count on by one; without positions, a pack is one document.
    """
    if positions is not None and len(positions) != width:
        raise InputError(f"{where}: position_ids holds {len(positions)} positions for {width} tokens; write the packs again")
    if positions is not None and (strange := [p for p in (positions.min(), positions.max()) if not 0 <= p < 2**31]):
        raise InputError(f"{where}: position_ids holds {strange[0]}, which is no position; write the packs again")
    first_position = 0 if positions is None else int(positions[0])
    real = width
    if mask is not None and len(mask) == width and mask.max() <= 1:
        real = int(mask.sum())
        if real == 0 or not mask[:real].all():
            raise InputError(f"{where}: attention_mask has zeros before its last one; packs are padded at the end only")
    elif mask is not None:
        total = int(mask.sum(dtype=np.int64))
        if total != width or mask.min() < 0 or mask.max() > width:
            raise InputError(
                f"{where}: attention_mask sums to {total} where the pack has {width} tokens, so it is neither a mask nor the "
                "lengths of the documents; write the packs again"
            )
        return mask[mask > 0].astype(np.int32), first_position
    if positions is None:
        return np.array([real], np.int32), 0
    counting = positions[:real].astype(np.int64)  # a narrow dtype could wrap around below
    starts = np.flatnonzero(counting[1:] != counting[:-1] + 1) + 1
    return np.diff(starts, prepend=0, append=real).astype(np.int32), first_position
