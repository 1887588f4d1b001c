"""Where documents come from: JSONL, CSV, Parquet, text files, folders of these, and Hugging Face datasets, as a stream of chunks.

Both sources have a `description` for people, and an `identity` (JSON-able) that differs where the documents may. `chunks()`
raises InputError with the file and place of what cannot be read. An unchanged source gives the same chunks every time.
`chunks(begin)` goes on behind the chunk whose `after` is `begin`: with the same records, in chunks that may be cut elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from foundation.errors import InputError
from foundation.reading import one_line, reason_of
from packing.chunks import CHUNK_BYTES, MOST_DOCUMENT, Chunk, Records, check_columns, open_stream, too_long
from packing.manifest import MANIFEST
from packing.settings import HUB_NAME, DataSettings
from packing.tokenizer import split_revision

if TYPE_CHECKING:
    import datasets

_SUFFIXES = {"jsonl": {".jsonl", ".ndjson", ".json"}, "parquet": {".parquet"}, "csv": {".csv", ".tsv"}}
_TEXT = {
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js"),
    *(".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".ex", ".erl", ".clj"),
    *(".sh", ".sql", ".css"),
}
_SUFFIXES["text"] = _TEXT
_ROWS = 1024  # read from tables at once, then cut by size
_KNOWN = "JSONL (.jsonl), Parquet (.parquet), CSV (.csv, .tsv) and text (.txt, .md, .py, ...) are read, also as .gz or .zst"

Place = dict[str, Any]  # in a source; empty at its beginning


class SourceAbsent(InputError):
    """There is no such file or folder on this machine."""


class SourceUnreachable(InputError):
    """A dataset has stopped to come, as over a network it may: worth another try."""


def open_source(settings: DataSettings, records: Records) -> FileSource | DatasetSource:
    """The source that `settings` name, from names only. InputError where there is none or its format is unclear."""
    name, path = str(settings.source), Path(str(settings.source))
    saved = (path / "dataset_dict.json").is_file() or ((path / "dataset_info.json").is_file() and (path / "state.json").is_file())
    if saved or (not path.exists() and HUB_NAME.fullmatch(split_revision(name)[0]) and _kind_of(path) is None):
        return DatasetSource(settings, records)
    if not path.exists():
        raise SourceAbsent(f"data.source: {name}: no such file or folder (relative paths start at the current directory)")
    kind, paths = _files_of(path, settings.packs) if path.is_dir() else (_kind_of(path), [path])
    if kind is None:
        raise InputError(f"data.source: {path}: its suffix does not tell its format; {_KNOWN}{_hint(path)}")
    columns = ("text", "messages", "prompt", "input_ids") if kind == "text" else ()
    if unused := settings.changed(("subset", "split", *columns)):
        why = "a text file is one document, without columns" if unused[0] in columns else "only Hugging Face datasets have that"
        raise InputError(f"data.{unused[0]}: {name} is read as {kind}: {why}; leave it out")
    if settings.streaming is True:
        raise InputError(f"data.streaming: {name} is read as {kind}; a mapping, as {{disk_gb: 20}}, packs it while a run trains")
    return FileSource(paths, kind, records, path if path.is_dir() else None)


def _hint(path: Path) -> str:
    if path.suffix == ".bin" or (path / "train.bin").exists():
        return ". To train on the tokens of a .bin file, name it in `data.packs` and leave `data.source` out"
    return ""


def _kind_of(path: Path) -> str | None:
    """What a file holds, by its suffix without .gz or .zst; None where that does not say."""
    name = Path(path.stem) if path.suffix.lower() in (".gz", ".zst") else path
    return next((kind for kind, known in _SUFFIXES.items() if name.suffix.lower() in known), None)


def _files_of(folder: Path, packs: Path) -> tuple[str, list[Path]]:
    """All files below `folder` of one kind, in order of their paths, without hidden files, `packs` and other folders of packs.

    Data files come before text, since many data sets carry a README; of two kinds of data files neither is taken.
    """
    files, own = [], packs.absolute()
    for parent, folders, names in os.walk(folder):
        inside = Path(parent)
        if inside != folder and (MANIFEST in names or inside.absolute() in (own, own.with_name(f"{own.name}.partial"))):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        files += [inside / name for name in names if not name.startswith(".")]
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(files):
        by_kind.setdefault(_kind_of(path) or "other", []).append(path)
    kinds = [kind for kind in ("parquet", "jsonl", "csv") if kind in by_kind]
    if len(kinds) > 1:
        counts = " and ".join(f"{len(by_kind[kind])} {kind} files" for kind in kinds)
        raise InputError(f"data.source: {folder}: holds {counts}; put each kind into a folder of its own, or name a file")
    kind = kinds[0] if kinds else "text"
    if kind not in by_kind:
        raise InputError(f"data.source: {folder}: none of its {len(files)} files is of a known kind; {_KNOWN}{_hint(folder)}")
    return kind, by_kind[kind]


def _listed(path: Path) -> list[str | int]:
    """Path, bytes and date of a file."""
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]


class FileSource:
    """Files of one kind."""

    def __init__(self, paths: list[Path], kind: str, records: Records, folder: Path | None = None) -> None:
        self.paths, self.kind, self.records = paths, kind, records
        listing = self._listing = [_listed(path) for path in paths]
        self.sizes = [size for _, size, _ in listing]
        self.bytes = sum(self.sizes)
        self.identity = {"kind": kind, "bytes": self.bytes, "files": hashlib.sha256(json.dumps(listing).encode()).hexdigest()}
        many = f"{len(paths):,} {kind} files in {folder}" if folder else f"{paths[0]} ({kind})"
        self.description = f"{many}, {self.bytes / 1e6:,.1f} MB"

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """`size`: about how many bytes a chunk has."""
        size, begin = size or CHUNK_BYTES, begin or {}
        first = begin.get("file", 0)
        if self.kind == "text":
            yield from self._text_chunks(first, size)
            return
        read = {"jsonl": self._jsonl_chunks, "csv": self._csv_chunks, "parquet": self._parquet_chunks}[self.kind]
        for number, path in enumerate(self.paths[first:], first):
            here = (begin.get("at", 0), begin.get("line", 1)) if number == first else (0, 1)
            try:
                for chunk in read(path, sum(self.sizes[:number]), size, *here):
                    yield replace(chunk, after={"file": number} | chunk.after)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                reason = reason_of(error)
                raise InputError(f"{path}: cannot be read: {reason}; the file is damaged or not of this format") from None

    def changed(self) -> Path | None:
        """The first file that has another size or date than when this was made; None if all are as they were."""
        return next((path for path, before in zip(self.paths, self._listing, strict=True) if _listed(path) != before), None)

    def _progress(self, done: int) -> float:
        return done / max(self.bytes, 1)

    def _jsonl_chunks(self, path: Path, before: int, size: int, at: int, line: int) -> Iterator[Chunk]:
        """Whole lines, about `size` bytes at a time; a longer line is a chunk of its own. `at`: the byte that `line` begins with,
        to which an archive has to be unpacked."""
        stream, raw = open_stream(path)
        with raw, stream:
            if at and stream is raw:
                raw.seek(at)
            for skipped in range(0, at if stream is not raw else 0, CHUNK_BYTES):
                stream.read(min(CHUNK_BYTES, at - skipped))
            head = b"" if at else stream.read(3)
            pending = [head.removeprefix(b"\xef\xbb\xbf")]
            if pending[0].startswith(b"["):
                raise InputError(f"{path}: is a JSON list; write a record a line, as `jq -c .[] {path.name}` does")
            at += len(head) - len(pending[0])

            def chunk(payload: bytes) -> Chunk:
                nonlocal at, line
                at, first, line = at + len(payload), line, line + payload.count(b"\n")
                progress = self._progress(before + raw.tell())
                return Chunk("jsonl", str(path), first, payload, progress, {"at": at, "line": line})

            while block := stream.read(size):
                cut = block.rfind(b"\n") + 1
                if not cut:
                    pending.append(block)
                    continue
                yield chunk(b"".join([*pending, block[:cut]]))
                pending = [block[cut:]]
            if payload := b"".join(pending):
                yield chunk(payload)

    def _csv_chunks(self, path: Path, before: int, size: int, at: int, line: int) -> Iterator[Chunk]:
        """`at`: the row to begin with. Every column is text."""
        from pyarrow import csv

        stream, raw = open_stream(path)
        with raw, stream:
            delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
            types = dict.fromkeys(self.records.columns, pa.string())
            reader = csv.open_csv(
                stream,
                read_options=csv.ReadOptions(use_threads=False),
                parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                convert_options=csv.ConvertOptions(column_types=types),
            )
            check_columns(str(path), self.records, reader.schema.names)
            row = 0
            for batch in reader:
                begin, row = row, row + len(batch)
                if row > at:
                    part = batch.select(list(self.records.columns)).slice(max(0, at - begin))
                    yield from _rows(part, str(path), max(at, begin), self._progress(before + raw.tell()), size)

    def _parquet_chunks(self, path: Path, before: int, size: int, at: int, line: int) -> Iterator[Chunk]:
        """`at`: the row to begin with; row groups before it are not read."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(str(path), self.records, file.schema_arrow.names)
            counts = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            ends = list(accumulate(counts))
            first = bisect_right(ends, at)
            row, rows, whole = ends[first - 1] if first else 0, max(file.metadata.num_rows, 1), path.stat().st_size
            groups = list(range(first, len(counts)))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=list(self.records.columns)):
                begin, row = row, row + len(batch)
                if row > at:
                    progress = self._progress(before + whole * row // rows)
                    yield from _rows(batch.slice(max(0, at - begin)), str(path), max(at, begin), progress, size)

    def _text_chunks(self, first: int, most: int) -> Iterator[Chunk]:
        """Each file is one document. A chunk holds names only: the files are read where they are tokenised."""
        names: list[str] = []
        pending, done = 0, sum(self.sizes[:first])
        for number, (path, size) in enumerate(zip(self.paths[first:], self.sizes[first:], strict=True), first + 1):
            if size > MOST_DOCUMENT:
                raise InputError(f"{path}: {too_long(size)}")
            names.append(str(path))
            pending += size
            done += size
            if pending >= most:
                yield Chunk("files", names[0], 0, json.dumps(names).encode(), self._progress(done), {"file": number})
                names, pending = [], 0
        if names:
            yield Chunk("files", names[0], 0, json.dumps(names).encode(), 1.0, {"file": len(self.paths)})


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
        """`begin` of a streamed dataset: the dataset's own state before a batch of rows, and how many of these to leave out."""
        import datasets

        data, begin, size = self._data, begin or {}, size or CHUNK_BYTES
        if data.features is not None:
            check_columns(self.name, self.records, list(data.features))
            data = data.select_columns(list(self.records.columns))
        streamed, row = isinstance(data, datasets.IterableDataset), begin.get("row", 0)
        try:
            for chunk in self._streamed_chunks(data, begin, size) if streamed else self._loaded_chunks(data, row, size):
                yield chunk
                row = chunk.after["row"]
        except (OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            reason = f"data.source: {self.name}: cannot be read after row {row}: {reason_of(error)}"
            raise (SourceUnreachable if streamed else InputError)(reason) from None

    def _loaded_chunks(self, data: datasets.Dataset, row: int, size: int) -> Iterator[Chunk]:
        """Yields the chunks from `row` on, each with the share of all rows that is read with it."""
        total = len(data)
        if row >= total:
            return
        data = data.select(range(row, total)) if row else data
        for table in data.with_format("arrow").iter(_ROWS):
            done = row + len(table)
            for chunk in _rows(self._wanted(table), self.name, row, done / total, size):
                yield replace(chunk, after={"row": chunk.after["at"]})
            row = done

    def _streamed_chunks(self, data: datasets.IterableDataset, begin: Place, size: int) -> Iterator[Chunk]:
        """Yields the chunks from `begin` on, each with the place after it: inside a batch, the state before that and what to
        leave out of it."""
        row, state, data = begin.get("row", 0), begin.get("state"), data.with_format("arrow")
        done = 0  # rows before the next batch
        if state is not None:
            data.load_state_dict(state)
            done = row - begin.get("skip", 0)
        for table in data.iter(_ROWS):
            first, done = done, done + len(table)
            for chunk in _rows(self._wanted(table).slice(row - first), self.name, row, None, size):
                next_row = chunk.after["at"]
                after = {"state": state, "skip": next_row - first} if next_row < done else {"state": data.state_dict()}
                yield replace(chunk, after={"row": next_row} | after)
            row, state = max(row, done), data.state_dict()

    def _wanted(self, table: pa.Table) -> pa.Table:
        """Its columns that are read; InputError where it lacks one."""
        check_columns(self.name, self.records, table.schema.names)
        return table.select(list(self.records.columns))

    @cached_property
    def _data(self) -> datasets.Dataset | datasets.IterableDataset:
        import datasets

        settings = self.settings
        try:
            if self.is_saved:
                data = datasets.load_from_disk(self.name)
            else:
                name, revision = split_revision(self.name)
                chosen = {"split": settings.split, "revision": revision, "streaming": bool(settings.streaming)}
                data = datasets.load_dataset(name, settings.subset, **chosen)
        # RuntimeError: it has a loading script, whose code is not run.
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"data.source: {self.name}: neither a file or folder here nor a dataset that can be loaded "
                f"(data.subset: {settings.subset}, data.split: {settings.split}): {one_line(error)}"
            ) from None
        if not isinstance(data, datasets.DatasetDict):
            return data
        if settings.split not in data:
            raise InputError(f"data.split: {self.name} has no split `{settings.split}`; it has: {', '.join(data)}")
        return data[settings.split]


def _rows(table: pa.RecordBatch | pa.Table, origin: str, first: int, progress: float | None, size: int) -> Iterator[Chunk]:
    """`table` in pieces of about `size` bytes; `after` says which row of the whole comes next."""
    rows = max(1, len(table) * size // max(table.nbytes, 1))
    for start in range(0, len(table), rows):
        piece = table.slice(start, rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write(piece)
        after = {"at": first + start + len(piece)}
        yield Chunk("table", origin, first + start, sink.getvalue().to_pybytes(), progress, after)
