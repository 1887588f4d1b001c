"""Where documents come from: JSONL, Parquet, text files, folders of these, and Hugging Face datasets, cut into chunks.

A chunk is the unit of work: one process cuts it from the source, and another turns it into documents, as a reader that also
parsed would be the bottleneck from a few dozen cores on.

Both sources have a `description` for people, and an `identity` (JSON-able) that differs where the documents may. `chunks()`
raises InputError with the file or place that cannot be read. An unchanged source gives the same chunks every time.
`chunks(begin)` goes on behind the chunk whose `after` is `begin`: with the same records, in chunks that may be cut elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.reading import one_line, reason_of
from packing.arrow import MANIFEST
from packing.settings import HUB_NAME, DataSettings
from packing.tokenizer import split_revision

if TYPE_CHECKING:
    import datasets

CHUNK_BYTES = 2**20  # takes a core about 50 ms: small enough to keep all cores busy, large enough that sending costs nothing
_ROWS = 1024  # read from tables at once, then cut by size
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_SUFFIXES = {
    "jsonl": {".jsonl", ".ndjson", ".json"},
    "parquet": {".parquet"},
    "text": {
        *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift"),
        *(".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".ex", ".erl", ".clj"),
        *(".sh", ".sql", ".css"),
    },
}
_KNOWN = "JSONL, Parquet and text (.txt, .md, .py, ...) are read, also as .gz or .zst; name a .bin file in `data.packs`"

Place = dict[str, Any]  # in a source; empty at its beginning


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a source, not yet parsed."""

    kind: Literal["jsonl", "table", "files"]  # payload: lines | an Arrow IPC stream | a JSON list of paths, a document each
    origin: str  # the file or dataset they came from
    first: int  # number of the first record there: lines count from 1, rows from 0
    payload: bytes
    progress: float | None = None  # share of the whole source that is read after this chunk, where its size is known
    after: Place | None = None


# A document's ids, [tokens] uint32, and which of them are to be learnt, [tokens] bool; None: all.
Encoded = tuple[np.ndarray, np.ndarray | None]


class Records(Protocol):
    """Makes documents of records, and ids of documents."""

    keys: str  # the settings that name the columns
    columns: tuple[str, ...]

    def fill(self, record: dict[str, Any]) -> Any:
        """The document that `record`, with all columns, holds; something false for none."""

    def encode(self, tokenizer: Tokenizer, documents: list[Any]) -> Iterator[Encoded]:
        """The ids of documents, without those that have none to learn."""


def open_source(settings: DataSettings, records: Records) -> FileSource | DatasetSource:
    """The source that `settings` name, from names only. InputError where there is none or its format is unclear."""
    name, path = str(settings.source), Path(str(settings.source))
    saved = (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()
    if saved or (not path.exists() and HUB_NAME.fullmatch(split_revision(name)[0]) and _kind_of(path) is None):
        return DatasetSource(settings, records)
    if not path.exists():
        raise InputError(f"data.source: {name}: no such file or folder (relative paths start at the current directory)")
    kind, paths = _files_of(path) if path.is_dir() else (_kind_of(path), [path])
    if kind is None:
        raise InputError(f"data.source: {path}: its suffix does not tell its format; {_KNOWN}")
    columns = ("text", "messages", "prompt", "input_ids") if kind == "text" else ()
    if unused := settings.changed(("subset", "split", *columns)) or ["streaming"] * (settings.streaming is True):
        raise InputError(f"data.{unused[0]}: {name} is read as {kind}, which has no such thing; leave it out")
    return FileSource(paths, kind, records, path if path.is_dir() else None)


def _kind_of(path: Path) -> str | None:
    """What a file holds, by its suffix without .gz or .zst; None where that does not say."""
    name = Path(path.stem) if path.suffix.lower() in _COMPRESSION else path
    return next((kind for kind, known in _SUFFIXES.items() if name.suffix.lower() in known), None)


def _files_of(folder: Path) -> tuple[str, list[Path]]:
    """All files below `folder` of one kind, in order of their paths, without hidden files and other folders of packs.

    Data files come before text, since many data sets carry a README; of two kinds of data files neither is taken.
    """
    packs = {manifest.parent for manifest in folder.rglob(MANIFEST)} - {folder}
    by_kind: dict[str | None, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        hidden = any(name.startswith(".") or name == "__pycache__" for name in names)
        if not hidden and not packs.intersection(path.parents) and path.is_file():
            by_kind.setdefault(_kind_of(path), []).append(path)
    kinds = [kind for kind in ("parquet", "jsonl") if kind in by_kind]
    if len(kinds) > 1:
        counts = " and ".join(f"{len(by_kind[kind])} {kind} files" for kind in kinds)
        raise InputError(f"data.source: {folder}: holds {counts}; put each kind into a folder of its own, or name a file")
    kind = kinds[0] if kinds else "text"
    if kind not in by_kind:
        raise InputError(f"data.source: {folder}: no file in it is of a known kind; {_KNOWN}")
    return kind, by_kind[kind]


def open_stream(path: Path) -> tuple[pa.NativeFile, pa.NativeFile]:
    """`path` open for reading, decompressed by its suffix (.gz, .zst), and the file below it, whose `tell` is the progress.

    Arrow's decompressors, unlike Python's, raise on a truncated stream. Raises OSError, also for an archive without a byte, which
    they would take for one without text.
    """
    raw = pa.OSFile(str(path))
    compression = _COMPRESSION.get(path.suffix.lower())
    if compression and not raw.size():
        raise OSError(f"it is empty, which no {path.suffix} file is: writing or copying it was broken off")
    return (pa.CompressedInputStream(raw, compression), raw) if compression else (raw, raw)


def check_columns(where: str, records: Records, names: list[str]) -> None:
    """InputError where a table of the columns `names` lacks one of those that `records` reads."""
    if absent := [column for column in records.columns if column not in names]:
        there = ", ".join(names)
        raise InputError(f"{where}: no column `{absent[0]}`; the columns are: {there}. Set {records.keys} to one of them")


class FileSource:
    """Files of one kind."""

    def __init__(self, paths: list[Path], kind: str, records: Records, folder: Path | None = None) -> None:
        self.paths, self.kind, self.records = paths, kind, records
        self.sizes = [path.stat().st_size for path in paths]
        many = f"{len(paths):,} {kind} files in {folder}" if folder else f"{paths[0]} ({kind})"
        self.description = f"{many}, {sum(self.sizes) / 1e6:,.1f} MB"

    @property
    def identity(self) -> dict[str, Any]:
        """Paths, sizes and dates of the files, as they are now."""
        stats = [path.stat() for path in self.paths]
        listing = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in zip(self.paths, stats, strict=True)]
        return {"kind": self.kind, "files": hashlib.sha256(json.dumps(listing).encode()).hexdigest()}

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """`size`: about how many bytes a chunk has."""
        size, begin, total = size or CHUNK_BYTES, begin or {}, max(sum(self.sizes), 1)
        first = begin.get("file", 0)
        if self.kind == "text":
            yield from self._text_chunks(first, size)
            return
        for number, path in enumerate(self.paths[first:], first):
            at, line = (begin.get("at", 0), begin.get("line", 1)) if number == first else (0, 1)
            before = sum(self.sizes[:number])
            chunks = self._jsonl_chunks(path, size, at, line) if self.kind == "jsonl" else self._parquet_chunks(path, size, at)
            try:
                for done, chunk in chunks:
                    yield replace(chunk, progress=(before + done) / total, after={"file": number} | chunk.after)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                reason = reason_of(error)
                raise InputError(f"{path}: cannot be read: {reason}; the file is damaged or not of this format") from None

    # Each yields chunks of a file, and how many of its bytes are read. `at`: the byte or row to begin with.

    def _jsonl_chunks(self, path: Path, size: int, at: int, line: int) -> Iterator[tuple[int, Chunk]]:
        """Whole lines, about `size` bytes at a time; a longer line is a chunk of its own. `line`: the number of the first."""
        stream, raw = open_stream(path)
        with raw, stream:
            if stream is raw:
                raw.seek(at)
            for skipped in range(0, 0 if stream is raw else at, CHUNK_BYTES):  # an archive is unpacked up to there
                stream.read(min(CHUNK_BYTES, at - skipped))
            pending, block = bytearray(), True
            while block:
                block = stream.read(size)
                pending += block
                cut = pending.rfind(b"\n", len(pending) - len(block)) + 1 if block else len(pending)
                if payload := bytes(pending[:cut]):
                    del pending[:cut]
                    at, first, line = at + cut, line, line + payload.count(b"\n")
                    yield raw.tell(), Chunk("jsonl", str(path), first, payload, after={"at": at, "line": line})

    def _parquet_chunks(self, path: Path, size: int, at: int) -> Iterator[tuple[int, Chunk]]:
        """Row groups before the row `at` are not read."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(str(path), self.records, file.schema_arrow.names)
            ends = list(accumulate(file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)))
            first = bisect_right(ends, at)
            row, bytes_of_row = ends[first - 1] if first else 0, path.stat().st_size / max(file.metadata.num_rows, 1)
            groups = list(range(first, len(ends)))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=list(self.records.columns)):
                begin, row = row, row + len(batch)
                for chunk in _rows(batch.slice(max(0, at - begin)), str(path), max(at, begin), size):
                    yield round(bytes_of_row * row), chunk

    def _text_chunks(self, first: int, most: int) -> Iterator[Chunk]:
        """Each file is one document. A chunk holds names only: the files are read where they are tokenised."""
        names: list[str] = []
        pending, done, total = 0, sum(self.sizes[:first]), max(sum(self.sizes), 1)
        for number, (path, size) in enumerate(zip(self.paths[first:], self.sizes[first:], strict=True), first + 1):
            names.append(str(path))
            pending, done = pending + size, done + size
            if pending >= most or number == len(self.paths):
                yield Chunk("files", names[0], 0, json.dumps(names).encode(), done / total, {"file": number})
                names, pending = [], 0


class DatasetSource:
    """A Hugging Face dataset: a folder that `save_to_disk` wrote, or whatever `load_dataset` takes, streamed or not."""

    def __init__(self, settings: DataSettings, records: Records) -> None:
        self.settings, self.records, self.name = settings, records, str(settings.source)
        self.is_saved = Path(self.name).exists()
        how = ", streaming" if settings.streaming else ""
        self.description = f"Hugging Face dataset {self.name} ({settings.subset or 'default'}, {settings.split}{how})"

    @property
    def identity(self) -> dict[str, Any]:
        """A dataset that comes over a network has no fingerprint; a saved one has, however `streaming` is set."""
        settings = self.settings
        place = {"kind": "dataset", "name": self.name, "subset": settings.subset, "split": settings.split}
        return place | {"fingerprint": None if settings.streaming and not self.is_saved else self._data._fingerprint}

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """`begin`: the next row and, of a streamed dataset, its own state before the batch that the row lies in, and how many
        rows of that batch come before."""
        import datasets

        data, begin, size, columns = self._data, begin or {}, size or CHUNK_BYTES, list(self.records.columns)
        streamed = isinstance(data, datasets.IterableDataset)
        if data.features is not None:
            check_columns(self.name, self.records, list(data.features))
            data = data.select_columns(columns)
        data, row, state = data.with_format("arrow"), begin.get("row", 0), begin.get("state")
        first = row - begin.get("skip", 0)
        try:
            if state is not None:
                data.load_state_dict(state)
            for table in data.iter(_ROWS) if streamed else (data[at : at + _ROWS] for at in range(first, len(data), _ROWS)):
                check_columns(self.name, self.records, table.schema.names)
                last = first + len(table)
                for chunk in _rows(table.select(columns).slice(row - first), self.name, row, size):
                    row = chunk.after["at"]
                    after = {"row": row} | ({"skip": row - first, "state": state} if streamed else {})
                    yield replace(chunk, progress=None if streamed else last / len(data), after=after)
                first, state = last, data.state_dict() if streamed else None
        except (OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            raise InputError(f"data.source: {self.name}: cannot be read after row {row}: {reason_of(error)}") from None

    @cached_property
    def _data(self) -> datasets.Dataset | datasets.IterableDataset:
        import datasets

        settings = self.settings
        try:
            if self.is_saved:
                data = datasets.load_from_disk(self.name)
                if not isinstance(data, datasets.DatasetDict):
                    return data
                if settings.split not in data:
                    raise InputError(f"data.split: {self.name} has no split `{settings.split}`; it has: {', '.join(data)}")
                return data[settings.split]
            name, revision = split_revision(self.name)
            chosen = {"split": settings.split, "revision": revision, "streaming": bool(settings.streaming)}
            return datasets.load_dataset(name, settings.subset, **chosen)
        # RuntimeError: it has a loading script, whose code is not run.
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"data.source: {self.name}: neither a file or folder here nor a dataset that can be loaded "
                f"(data.subset: {settings.subset}, data.split: {settings.split}): {one_line(error)}"
            ) from None


Source = FileSource | DatasetSource


def _rows(table: pa.RecordBatch | pa.Table, origin: str, first: int, size: int) -> Iterator[Chunk]:
    """`table` in pieces of about `size` bytes; `after` says which row of the whole comes next."""
    rows = max(1, len(table) * size // max(table.nbytes, 1))
    for start in range(0, len(table), rows):
        piece = table.slice(start, rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write(piece)
        yield Chunk("table", origin, first + start, sink.getvalue().to_pybytes(), after={"at": first + start + len(piece)})
