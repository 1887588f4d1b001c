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
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError, as_input_error
from foundation.files import FileRecord, check_files, hash_file, hash_of, new_folder
from foundation.reading import load_object
from packing.settings import MANIFEST

Split = Literal["train", "held_out"]

# Label of a position without a loss. The loss functions of torch and transformers skip this label.
IGNORE = -100
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
    # Lines about the content of the packs, which the plan of a run prints.
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Pack:
        """Return the pack with this index. Raise IndexError unless the index is in 0 to len - 1.

        Most formats return views into memory-mapped files, so that bytes are read from the disk
        when they are used.
        """
        raise NotImplementedError

    @cached_property
    def by_source(self) -> Mapping[str, Packs]:
        """Map the name of each source to its packs, which can be read at any time.

        A single source has the name "". For a stream, these are the packs of the part that is not
        deleted while the run trains.
        """
        return {"": self}

    def verify(self) -> None:
        """Compare the size and the hash of every file with the recorded values.

        Raises InputError for the first file that differs. If the format does not record sizes and
        hashes, this method does nothing.
        """


def checked_index(index: int, count: int) -> int:
    """Return `index`. Raise IndexError unless `index` is in 0 to count - 1.

    Negative indices are rejected too, because they hide mistakes in the computation of an index.
    """
    if not 0 <= index < count:
        raise IndexError(f"pack {index} of {count}")
    return index


def locate(starts: Sequence[int], index: int) -> tuple[int, int]:
    """Return the number of the part that has pack `index`, and the index of the pack in the part.

    `starts` has the index of each part's first pack, and the number of all packs.
    """
    number = bisect_right(starts, checked_index(index, starts[-1])) - 1
    return number, index - starts[number]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of packs.json in the folder `path`. Raise InputError if it is damaged."""
    file = path / MANIFEST
    manifest = load_object(file, _REMEDY)
    if manifest.pop("checksum", None) != hash_of(manifest):
        raise InputError(
            f"{file}: this file is damaged, edited, or not a manifest of packs; {_REMEDY}"
        )
    return manifest


def write_packs(
    path: Path,
    length: int,
    splits: Mapping[Split, Iterable[Sequence[Pack]]],
    *,
    settings: dict[str, Any],
    statistics: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    texts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write packs to the folder `path`, completely or not at all, and return the manifest.

    Only one process may write to `path` at a time. Raises OSError if `path` exists and is not an
    empty folder.

    Args:
        path: The folder.
        length: Number of tokens in a pack.
        splits: The packs of each split. Each element of an iterable becomes one record batch, which
            must fit in memory. Use batches of many packs, because a file with thousands of small
            batches is slow to open. In a split, either all packs must have a mask (`Pack.trained`),
            or none may have one.
        settings: JSON-able value for the manifest, as are `statistics` and `tokenizer`.
        texts: Map the names of other files that belong to the packs to their content.
    """
    # Resolve links, because `path` may be a link to a folder on a larger disk.
    with new_folder(Path(os.path.realpath(path))) as folder:
        written = {
            split: _write_split(folder / split, length, batches)
            for split, batches in splits.items()
        }
        for name, text in (texts or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        files = [_entry(folder / name) for name in sorted(texts or ())]
        manifest = {
            "version": 1,
            "length": length,
            "tokenizer": tokenizer,
            "settings": settings,
            "statistics": statistics,
            "splits": written,
            "files": files,
        }
        # JSON changes the types of some values, such as paths and tuples. So compute the checksum
        # from values that were converted to JSON and back.
        manifest = json.loads(json.dumps(manifest, default=str))
        content = manifest | {"checksum": hash_of(manifest)}
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return manifest


def _write_split(folder: Path, length: int, batches: Iterable[Sequence[Pack]]) -> dict[str, Any]:
    """Write the packs of one split to `folder`, and return the split's entry in the manifest."""
    folder.mkdir()
    shards: list[Path] = []
    totals: Counter[str] = Counter()
    # One hash for each column. With a hash of whole batches, the fingerprint would depend on how
    # packs are divided into batches.
    hashes: list[Any] = []
    file: pa.OSFile | None = None
    with ExitStack() as shard:
        for packs in batches:
            columns = _columns(packs)
            hashes = hashes or [hashlib.sha256() for _ in columns]
            for hasher, column in zip(hashes, columns, strict=True):
                hasher.update(column)
            lengths = columns[1]
            totals.update(packs=len(packs), documents=len(lengths), tokens=int(lengths.sum()))
            batch = _record_batch(*columns)
            if file is None or file.tell() >= SHARD_BYTES:
                shard.close()
                shards.append(folder / f"data-{len(shards):05d}.arrow")
                file = shard.enter_context(pa.OSFile(str(shards[-1]), "wb"))
                stream = shard.enter_context(pa.ipc.new_stream(file, batch.schema))
            stream.write_batch(batch)
    content = {
        "length": length,
        "packs": totals["packs"],
        "columns": [hasher.hexdigest() for hasher in hashes],
    }
    return {
        **totals,
        "fingerprint": hash_of(content),
        "files": [_entry(path) for path in shards],
    }


def _columns(packs: Sequence[Pack]) -> list[np.ndarray]:
    """Return the columns of a record batch as arrays.

    The columns are the token ids [packs, length], the document lengths of all packs, the number of
    documents of each pack, and the position of each pack's first token. This position is always 0,
    and its column only keeps the format and the fingerprints of earlier packs. Packs with masks
    also have a column with the bits of the masks [packs, bytes].
    """
    ids = np.stack([pack.input_ids for pack in packs]).astype(np.uint32, copy=False)
    lengths = np.concatenate([pack.lengths for pack in packs]).astype(np.int32, copy=False)
    documents = np.array([len(pack.lengths) for pack in packs], np.int32)
    columns: list[np.ndarray] = [ids, lengths, documents, np.zeros_like(documents)]
    if masks := [pack.trained for pack in packs if pack.trained is not None]:
        columns.append(np.packbits(np.stack(masks), axis=1, bitorder="little"))
    return columns


def _record_batch(
    ids: np.ndarray,
    lengths: np.ndarray,
    documents: np.ndarray,
    first_positions: np.ndarray,
    *masks: np.ndarray,
) -> pa.RecordBatch:
    """Return the record batch with the columns that `_columns` returns."""
    offsets = pa.array(np.append(0, np.cumsum(documents)), pa.int32())
    columns = {
        "input_ids": _rows(ids),
        "lengths": pa.ListArray.from_arrays(offsets, pa.array(lengths)),
        "first_position": pa.array(first_positions),
    }
    if masks:
        columns["trained"] = _rows(masks[0])
    return pa.record_batch(columns)


class ArrowPacks(Packs):
    """Memory-mapped packs of one split in a folder that `write_packs` wrote.

    Raises InputError if a file is missing, truncated or damaged. The fingerprint depends on the
    tokens, lengths and masks of the packs and on their order. It does not depend on how
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
        number, row = locate(self._starts, index)
        # `masks` has one array with the masks of all rows, or is empty.
        ids, lengths, offsets, *masks = self._batches[number]
        trained = None
        if masks:
            bits = np.unpackbits(masks[0][row], count=self.length, bitorder="little")
            trained = bits.view(np.bool_)
        return Pack(
            input_ids=ids[row],
            lengths=lengths[offsets[row] : offsets[row + 1]],
            trained=trained,
        )

    def verify(self) -> None:
        check_files(
            self.path, self._records + _records(self.manifest["files"]), _REMEDY, hashed=True
        )

    def _map(self, path: Path) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the columns of each record batch in the file `path`, as views into the file.

        The columns are the token ids [rows, length], the document lengths of all rows, and the
        offsets [rows + 1] at which the document lengths of each row start. Packs with masks also
        have a column with the bits of the masks [rows, bytes]. First positions are not read.
        """
        with (
            as_input_error((pa.ArrowException,), f"{path}: damaged", _REMEDY),
            pa.ipc.open_stream(pa.memory_map(str(path))) as stream,
        ):
            for batch in stream:
                ids, lengths, _, *masks = batch.columns
                columns = [_view(ids.values, np.uint32).reshape(len(ids), self.length)]
                columns.append(_view(lengths.values, np.int32))
                columns.append(_view(lengths.offsets, np.int32))
                for bits in masks:
                    columns.append(_view(bits.values, np.uint8).reshape(len(bits), -1))
                yield tuple(columns)


def _entry(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file that is completely written."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_file(path)}


def _records(files: list[dict[str, Any]], folder: str = "") -> list[FileRecord]:
    """Return the records of files from their entries in the manifest.

    `folder` is the folder of the files, relative to the folder of the packs.
    """
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
        array.buffers()[1], dtype, len(array), offset=array.offset * array.type.bit_width // 8
    )
