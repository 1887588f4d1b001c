"""Read documents in chunks from files, folders and Hugging Face datasets.

A chunk is the unit of work: one process cuts chunks from the source, and other processes turn them
into documents. If the first process also parsed the chunks, it would be the bottleneck on machines
with more than a few dozen cores.

`FileSource` and `DatasetSource` have the same attributes:

* `description` is a text for the user.
* `identity` is a JSON-able value that differs if the documents may differ.
* `chunks()` yields the chunks. As long as the source does not change, they are the same in every
  call. If a file or a row cannot be read, InputError names it.
* `chunks(begin)` continues after the chunk whose `after` is `begin`. It yields the same records as
  `chunks()`, but may divide them into other chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from foundation.errors import InputError
from foundation.files import hash_of
from foundation.reading import one_line, refusing
from packing.arrow import MANIFEST
from packing.chunks import COMPRESSION, Chunk, Place, check_columns, open_stream
from packing.records import Records
from packing.settings import HUB_NAME, DataSettings, split_revision

if TYPE_CHECKING:
    import datasets

# Size of a chunk. A core needs about 50 ms for a chunk. This is short enough to keep all cores
# busy, and so long that the time for sending a chunk to another process does not matter.
CHUNK_BYTES = 2**20
_ROWS = 1024  # number of rows of a table that are read at once, and then divided by size
_SUFFIXES = {
    "jsonl": {".jsonl", ".ndjson", ".json"},
    "parquet": {".parquet"},
    "text": {
        ".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".yaml", ".yml", ".toml",
        ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs",
        ".go", ".java", ".kt", ".scala", ".swift", ".js", ".jsx", ".ts", ".tsx", ".rb", ".php",
        ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".ex", ".erl", ".clj", ".sh", ".sql", ".css",
    },
}  # fmt: skip
_KINDS = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes}
_READABLE = (
    "JSONL, Parquet and text files (.txt, .md, .py, ...) can be read, also as .gz or .zst; "
    "set data.packs to read a token .bin file"
)


def open_source(settings: DataSettings, records: Records) -> FileSource | DatasetSource:
    """Return the source that `settings` name. The content of its files is not read.

    Raises InputError if the source does not exist, if its format is not known, or if `settings` has
    a setting that this kind of source does not use.
    """
    name = str(settings.source)
    path = Path(name)
    is_saved = (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()
    is_hub_name = HUB_NAME.fullmatch(split_revision(name)[0]) and _kind_of(path) is None
    if is_saved or (is_hub_name and not path.exists()):
        return DatasetSource(settings, records)
    if not path.exists():
        raise InputError(
            f"data.source: {name}: no such file or folder "
            "(relative paths start at the current directory)"
        )
    kind = _kind_of(path)
    paths = [path]
    unread = ""
    files = f"{path} ({kind})"
    if path.is_dir():
        kind, paths, unread = _files_of(path)
        files = f"{len(paths):,} {kind} files in {path}"
    if kind is None:
        raise InputError(f"data.source: {path}: its suffix is not of a known format; {_READABLE}")
    columns = ("text", "messages", "input_ids") if kind == "text" else ()
    unused = settings.changed(("subset", "split", *columns))
    if settings.streaming is True:
        unused.append("streaming")
    if unused:
        raise InputError(
            f"data.{unused[0]}: {name} is read as {kind}, which has no such setting; remove it"
        )
    description = f"{files}, {_bytes_of(paths) / 1e6:,.1f} MB{unread}"
    return FileSource(description, paths, kind, records)


def _kind_of(path: Path) -> str | None:
    """Return the kind of a file by its suffix (without .gz or .zst), or None if it is unknown."""
    name = Path(path.stem) if path.suffix.lower() in COMPRESSION else path
    return _KINDS.get(name.suffix.lower())


def _files_of(folder: Path) -> tuple[str, list[Path], str]:
    """Return the kind of files to read below `folder`, their sorted paths, and a note.

    The note lists files that are not read. Hidden files and folders of other packs are ignored.
    Text files are not read if there are data files, because many datasets have a README. Raises
    InputError if there are two kinds of data files, or if the files to read have fewer bytes than
    the files that are not read.
    """
    packs = {manifest.parent for manifest in folder.rglob(MANIFEST)} - {folder}
    by_kind: dict[str | None, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        is_hidden = any(name.startswith(".") or name == "__pycache__" for name in names)
        if not is_hidden and not packs.intersection(path.parents) and path.is_file():
            by_kind.setdefault(_kind_of(path), []).append(path)
    readable: list[str] = [kind for kind in ("parquet", "jsonl", "text") if kind in by_kind]
    kinds = [kind for kind in readable if kind != "text"] or readable
    if len(kinds) != 1:
        counts = " and ".join(f"{len(by_kind[kind])} {kind} files" for kind in kinds)
        raise InputError(
            f"data.source: {folder}: has {counts or 'no files of a known kind'}; set data.source "
            f"to a file, or to a folder with one kind of files; {_READABLE}"
        )
    paths = by_kind.pop(kinds[0])
    unread_paths = [path for group in by_kind.values() for path in group]
    suffixes = Counter(path.suffix or "without a suffix" for path in unread_paths)
    unread = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes.most_common(8))
    if "text" in by_kind:
        unread += f"; text files are not read beside {kinds[0]} files"
    if _bytes_of(unread_paths) > _bytes_of(paths):
        raise InputError(
            f"data.source: {folder}: most of its bytes are in files that are not read ({unread}). "
            f"Set data.source to a file, or to a folder without these files; {_READABLE}"
        )
    return kinds[0], paths, unread and f"; files not read: {unread}"


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@dataclass(frozen=True)
class FileSource:
    """Source that reads files of one kind: jsonl, parquet or text."""

    description: str
    paths: list[Path]
    kind: str
    records: Records

    @property
    def identity(self) -> dict[str, Any]:
        """Kind of the files, and a hash of their present paths, sizes and dates."""
        stats = [path.stat() for path in self.paths]
        listing = [
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
            for path, stat in zip(self.paths, stats, strict=True)
        ]
        return {"kind": self.kind, "files": hash_of(listing)}

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """Yield chunks of about `size` bytes.

        A text file is one chunk. The chunk has only the path, because a worker reads the file.
        """
        size = size or CHUNK_BYTES
        begin = begin or {}
        first = begin.get("file", 0)
        for number, path in enumerate(self.paths[first:], first):
            if self.kind == "text":
                yield Chunk("text", str(path), 0, b"", {"file": number + 1})
                continue
            place = begin if number == first else {}
            chunks = self._jsonl_chunks if self.kind == "jsonl" else self._parquet_chunks
            with refusing(
                (OSError, pa.ArrowException, UnicodeDecodeError),
                f"{path}: cannot be read",
                "the file is damaged or not of this format",
            ):
                for chunk in chunks(path, size, place):
                    yield replace(chunk, after={"file": number} | chunk.after)

    def _jsonl_chunks(self, path: Path, size: int, place: Place) -> Iterator[Chunk]:
        """Yield chunks of complete lines. A chunk is longer if a line is longer than `size`."""
        at = place.get("at", 0)  # offset in bytes
        line = place.get("line", 1)
        with open_stream(path) as stream:
            if stream.seekable():
                stream.seek(at)
            else:  # A compressed file is decompressed up to the place.
                for skipped in range(0, at, CHUNK_BYTES):
                    stream.read(min(CHUNK_BYTES, at - skipped))
            pending = bytearray()
            # The loop ends with an empty block. It yields the bytes that are still pending, which
            # are a last line without a newline.
            for block in chain(iter(partial(stream.read, size), b""), [b""]):
                pending += block
                cut = len(pending)
                if block:
                    cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
                if payload := bytes(pending[:cut]):
                    del pending[:cut]
                    first = line
                    at += cut
                    line += payload.count(b"\n")
                    yield Chunk("jsonl", str(path), first, payload, {"at": at, "line": line})

    def _parquet_chunks(self, path: Path, size: int, place: Place) -> Iterator[Chunk]:
        """Yield chunks of rows. Row groups before `place` are not read."""
        import pyarrow.parquet as pq

        at = place.get("at", 0)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            check_columns(str(path), self.records, names)
            groups = range(file.num_row_groups)
            ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
            first_group = bisect_right(ends, at)
            row = ends[first_group - 1] if first_group else 0
            # pyarrow ignores names that the file does not have.
            columns = [*self.records.columns, *self.records.optional]
            batches = file.iter_batches(
                _ROWS, row_groups=list(groups[first_group:]), columns=columns
            )
            for batch in batches:
                rows = batch.slice(max(0, at - row))
                yield from _table_chunks(rows, names, str(path), max(at, row), size)
                row += len(batch)


class DatasetSource:
    """Source that reads a Hugging Face dataset, from `save_to_disk` or with `load_dataset`."""

    kind = "dataset"

    def __init__(self, settings: DataSettings, records: Records) -> None:
        self.settings = settings
        self.records = records
        self.name = str(settings.source)
        self.is_saved = Path(self.name).exists()
        streaming = ", streaming" if settings.streaming else ""
        part = f"{settings.subset or 'default'}, {settings.split}{streaming}"
        self.description = f"Hugging Face dataset {self.name} ({part})"

    @property
    def identity(self) -> dict[str, Any]:
        """Name, subset, split and fingerprint. A streamed dataset has None as its fingerprint."""
        is_streamed = self.settings.streaming and not self.is_saved
        return {
            "kind": self.kind,
            "name": self.name,
            "subset": self.settings.subset,
            "split": self.settings.split,
            "fingerprint": None if is_streamed else self._data._fingerprint,
        }

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """Yield chunks of about `size` bytes.

        A place has three values: the number of the next row (`row`), the state of the dataset
        before the batch that has this row (`state`), and the number of earlier rows in this batch
        (`skip`).
        """
        import datasets

        begin = begin or {}
        row = begin.get("row", 0)
        state = begin.get("state")
        batch_start = row - begin.get("skip", 0)
        data, names = self._arrow_data()
        try:
            if state is not None:
                data.load_state_dict(state)
            for table in data.iter(_ROWS):
                check_columns(self.name, self.records, table.schema.names)
                names = names or table.schema.names
                table = table.select(self._read_columns(table.schema.names))
                rows = table.slice(row - batch_start)
                for chunk in _table_chunks(rows, names, self.name, row, size or CHUNK_BYTES):
                    row = chunk.after["at"]
                    place = {"row": row, "skip": row - batch_start, "state": state}
                    yield replace(chunk, after=place)
                batch_start += len(table)
                state = data.state_dict()
        except (OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"data.source: {self.name}: cannot be read after row {row}: {one_line(error)}"
            ) from None

    def _read_columns(self, names: Iterable[str]) -> list[str]:
        """Return the columns in `names` that `records` reads."""
        columns = {*self.records.columns, *self.records.optional}
        return [name for name in names if name in columns]

    def _arrow_data(self) -> tuple[datasets.IterableDataset, list[str]]:
        """Return the dataset as Arrow tables of the columns that are read, and all columns' names.

        The list of names is empty if the dataset does not state its columns.
        """
        import datasets

        data = self._data
        names = []
        if isinstance(data, datasets.Dataset):
            data = data.to_iterable_dataset()
        if data.features is not None:
            names = list(data.features)
            check_columns(self.name, self.records, names)
            data = data.select_columns(self._read_columns(names))
        return data.with_format("arrow"), names

    @cached_property
    def _data(self) -> datasets.Dataset | datasets.IterableDataset:
        """The loaded dataset. Raises InputError if it cannot be loaded, or has no such split."""
        import datasets

        settings = self.settings
        # RuntimeError is raised for a dataset with a loading script, because its code is not run.
        kinds = (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
            datasets.exceptions.DatasetsError,
        )
        what = (
            f"data.source: {self.name} (data.subset: {settings.subset}, data.split: "
            f"{settings.split}): is neither an existing file or folder nor a dataset that can be "
            "loaded"
        )
        with refusing(kinds, what):
            if self.is_saved:
                data = datasets.load_from_disk(self.name)
                if not isinstance(data, datasets.DatasetDict):
                    return data
                if settings.split not in data:
                    raise InputError(
                        f"data.split: {self.name} has no split {settings.split}; "
                        f"set data.split to one of {', '.join(data)}"
                    )
                return data[settings.split]
            name, revision = split_revision(self.name)
            return datasets.load_dataset(
                name,
                settings.subset,
                split=settings.split,
                revision=revision,
                streaming=bool(settings.streaming),
            )


def _table_chunks(
    table: pa.RecordBatch | pa.Table, columns: list[str], origin: str, first: int, size: int
) -> Iterator[Chunk]:
    """Yield the rows of a table in chunks of about `size` bytes.

    `columns` are the names of all columns of the source, `origin` is the source's name, and `first`
    is the number of the table's first row in the source. The place of a chunk (`Chunk.after`) is
    the number of the next row.
    """
    rows = max(1, len(table) * size // max(table.nbytes, 1))
    for start in range(0, len(table), rows):
        piece = table.slice(start, rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write(piece)
        yield Chunk(
            "table",
            origin,
            first + start,
            sink.getvalue().to_pybytes(),
            {"at": first + start + len(piece)},
            tuple(columns),
        )
