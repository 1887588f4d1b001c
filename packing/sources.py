"""Where documents come from: JSONL, Parquet, text files, folders of these, and Hugging Face datasets, all as a stream of chunks.

Both sources have a `description` for people, and an `identity` (JSON-able) that differs where the documents may. `chunks()`
raises InputError with the file and place of what cannot be read. An unchanged source gives the same chunks every time.
`chunks(begin)` goes on behind the chunk whose `after` is `begin`: with the same records, in chunks that may be cut elsewhere.
"""

from __future__ import annotations

import glob
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
from foundation.reading import one_line, parse_json, reason_of, unusable_text
from packing.chunks import CHUNK_BYTES, MOST_DOCUMENT, Chunk, Records, open_stream, too_long
from packing.manifest import FIRST, holds_packs
from packing.records import records_of
from packing.settings import HUB_NAME, DataSettings
from packing.token_log import OWN

if TYPE_CHECKING:
    import datasets

_JSONL, _PARQUET = {".jsonl", ".ndjson"}, {".parquet"}
_TOKEN_BINS = (
    "holds tokens, not text; to train on them leave this source out and set `data.packs` to the folder of `train.bin`, beside "
    "which a `val.bin` is held out by itself"
)
_TEXT = {
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js"),
    *(".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".ex", ".erl", ".clj"),
    *(".sh", ".sql", ".css"),
}
_ROWS = 1024  # read from tables at once, then cut by size

Place = dict[str, Any]  # in a source; empty at its beginning


class SourceAbsent(InputError):
    """There is no such file or folder on this machine."""


class SourceUnreachable(InputError):
    """A dataset has stopped to come, as over a network it may: worth another try."""


def open_source(settings: DataSettings) -> FileSource | DatasetSource:
    """The source that `settings` name, from names only. InputError where there is none or its format is unclear."""
    records = records_of(settings)
    path = Path(settings.source or "")
    saved = (path / "dataset_dict.json").is_file() or ((path / "dataset_info.json").is_file() and (path / "state.json").is_file())
    if settings.format == "dataset" or (settings.format == "auto" and saved):
        source = DatasetSource(settings, records)
        _refuse_unused_settings(settings, source)
        return source
    if path.is_symlink() and not path.exists():  # not to be looked for among the datasets of that name
        raise SourceAbsent(f"data.source: {path}: is a dead link; correct it, or name the text itself")
    if path.exists():
        if not path.is_file() and not path.is_dir():
            raise InputError(f"data.source: {path}: is no file or folder but a pipe, socket or device; write the text to a file")
        if path.is_dir():
            source = _open_folder(path, settings, records)
        else:
            source = FileSource([path], _kind_of_file(path, settings.format), records)
        _refuse_unused_settings(settings, source)
        return source
    if (
        settings.format == "auto"
        and HUB_NAME.fullmatch(str(settings.source))
        and not _suffix(path) & (_JSONL | _PARQUET | _TEXT | {".json"})
    ):
        return DatasetSource(settings, records)
    raise SourceAbsent(f"data.source: {settings.source}: no such file or folder (relative paths start at the current directory)")


def _suffix(path: Path) -> set[str]:
    """The suffix of a file, without .gz or .zst, as a set to intersect with the known ones."""
    name = Path(path.stem) if path.suffix.lower() in (".gz", ".zst") else path
    return {name.suffix.lower()}


def _refuse_unused_settings(settings: DataSettings, source: FileSource | DatasetSource) -> None:
    """InputError for a setting that files, or a saved dataset, do not use: someone who sets `split` must not get all of them."""
    unused, columns = ["subset", "split", "revision", "streaming"], []
    kind, why, remedy = "a saved dataset", "it was saved without any", "leave it out"
    if isinstance(source, DatasetSource):  # one that is not saved has all of them
        unused = ["subset", "revision", *(() if source.has_splits else ("split",))] if source.is_saved else []
    else:
        kind, why, remedy = source.kind, "only Hugging Face datasets have that", "leave it out, or set data.format to what it is"
        columns = ["text", "messages", "prompt", "input_ids"] if kind == "text" else []
    for name in settings.changed((*unused, *columns)):
        if not (name == "streaming" and settings.stream):
            why = "a text file is one document, without columns" if name in columns else why
            if name == "streaming":
                why += "; a mapping, as {disk_gb: 20}, has the packs of any source made while a run trains"
            raise InputError(f"data.{name}: {settings.source} is read as {kind}: {why}; {remedy}")


def _kind_of_file(path: Path, wanted: str) -> str:
    """jsonl, json, parquet or text: as the settings say, else by suffix."""
    suffix = _suffix(path)
    if wanted == "jsonl" or (wanted == "auto" and suffix & (_JSONL | {".json"})):
        return "json" if suffix & {".json"} else "jsonl"
    if wanted != "auto":
        return wanted
    if suffix & _PARQUET:
        return "parquet"
    if suffix & _TEXT:
        return "text"
    if suffix == {".bin"}:
        raise InputError(f"data.source: {path}: {_TOKEN_BINS}")
    raise InputError(
        f"data.source: {path}: its suffix does not tell its format; set its `format` to jsonl, parquet, text or dataset"
    )


def _open_folder(folder: Path, settings: DataSettings, records: Records) -> FileSource:
    """All files below `folder` of one kind, in order of their relative paths, without hidden files, packs and runs.

    Data files come before text, since many data sets carry a README. Where two kinds are possible, `data.format` has to name one.
    """
    wanted, packs = settings.format, settings.packs.absolute()
    made = (packs, packs.with_name(f"{packs.name}.lock"), *packs.parent.glob(f"{glob.escape(packs.name)}.partial*"))
    files = sorted(path for path in _files_below(folder) if not any(map(path.absolute().is_relative_to, made)))
    by_suffix = {"parquet": _PARQUET, "jsonl": _JSONL, "json": {".json"}, "text": _TEXT}
    found = {kind: paths for kind, known in by_suffix.items() if (paths := [path for path in files if _suffix(path) & known])}
    if wanted == "text":
        found = {"text": files} if files else {}
    elif wanted != "auto" or found.keys() & {"parquet", "jsonl"}:
        kinds = {"auto": ("parquet", "jsonl"), "jsonl": ("jsonl", "json"), "parquet": ("parquet",)}[wanted]
        found = {kind: found[kind] for kind in kinds if kind in found}
    if not found:
        what = "file" if wanted in ("auto", "text") else f"{wanted} file"
        if (folder / "train.bin").exists():
            raise InputError(f"data.source: {folder}: {_TOKEN_BINS}")
        raise InputError(
            f"data.source: {folder}: no {what} to read among its {len(files)} files; set its `format` or another source"
        )
    if len(found) > 1:
        counts = " and ".join(f"{len(paths)} {kind} files" for kind, paths in found.items())
        remedy = (
            "set its `format` to the kind you mean, or name a file" if wanted == "auto" else "put each kind into its own folder"
        )
        raise InputError(f"data.source: {folder}: holds {counts}; {remedy}")
    ((kind, paths),) = found.items()
    return FileSource(paths, kind, records, folder)


def _files_below(folder: Path) -> Iterator[Path]:
    """Every file below `folder` that is not hidden, and not in a folder of packs or of a run. InputError for what would be left
    out silently otherwise: dead links, links to folders (which may lead in a circle), pipes, and folders that cannot be read."""

    def refuse(error: OSError) -> None:
        raise InputError(f"data.source: {error.filename}: cannot be read: {reason_of(error)}") from None

    for parent, folders, names in os.walk(folder, onerror=refuse):
        if Path(parent) != folder and _is_ours(Path(parent), [*folders, *names]):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for path in (Path(parent, name) for name in [*folders, *names] if not name.startswith(".")):
            if path.is_file():
                yield path
            elif path.is_symlink() or not path.is_dir():
                what = "a link to a folder" if path.is_dir() else "a dead link" if path.is_symlink() else "no file"
                raise InputError(f"data.source: {path}: is {what}; put the text itself there, or take it away")


_OF_A_RUN = {"config.yaml", "environment.json", "metrics.jsonl"}


def _is_ours(folder: Path, names: list[str]) -> bool:
    """Whether a folder with `names` in it holds packs, parts of a stream, or tokens on their way to packs: those of another part
    of `data` may lie in the source of this one. Or a run, whose metrics would be taken for text."""
    tokens = ".partial" in folder.suffixes and all(map(OWN.fullmatch, names))
    return tokens or holds_packs(folder) or holds_packs(folder / FIRST) or _OF_A_RUN.issubset(names)


def _listed(path: Path) -> list[str | int]:
    """Path, bytes and date of a file. InputError where it has gone, or where nobody but the file system can name it."""
    if unusable := unusable_text(str(path)):
        raise InputError(f"data.source: {path}: its name is {unusable}; rename it")
    try:
        stat = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}; put it back, or leave it out") from None
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
        read = {"jsonl": self._jsonl_chunks, "json": self._json_chunks, "parquet": self._parquet_chunks}[self.kind]
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

    def _json_chunks(self, path: Path, before: int, size: int, at: int, line: int) -> Iterator[Chunk]:
        """A .json file that begins with a bracket is a list of records, read whole; any other is read as JSONL."""
        stream, raw = open_stream(path)
        with raw, stream:
            head = stream.read(1024)
            content = head + stream.read() if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else None
        if content is None:
            yield from self._jsonl_chunks(path, before, size, at, line)
            return
        try:
            records = parse_json(content)
        except ValueError as error:
            raise InputError(f"{path}: not valid JSON: {error}") from None
        for first in range(at, len(records), _ROWS):
            lines, end = "\n".join(json.dumps(record) for record in records[first : first + _ROWS]), first + _ROWS
            progress = self._progress(int(before + path.stat().st_size * min(1.0, end / len(records))))
            yield Chunk("jsonl", f"{path}, record", first + 1, lines.encode(), progress, {"at": end})

    def _parquet_chunks(self, path: Path, before: int, size: int, at: int, line: int) -> Iterator[Chunk]:
        """`at`: the row to begin with; row groups before it are not read."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(str(path), file.schema_arrow, self.records)
            counts = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            ends = list(accumulate(counts))
            first = bisect_right(ends, at)
            row, rows, whole = ends[first - 1] if first else 0, max(file.metadata.num_rows, 1), path.stat().st_size
            groups = list(range(first, len(counts)))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=list(self.records.columns)):
                begin, row = row, row + len(batch)
                if row > at:
                    progress = self._progress(before + whole * row // rows)
                    for chunk in _table_chunks(batch.slice(max(0, at - begin)), str(path), max(at, begin), progress, size):
                        yield replace(chunk, after={"at": chunk.after["row"]})

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
        how = ", streaming" if settings.streaming else ""
        at = f", revision {settings.revision}" if settings.revision else ""
        self.description = f"Hugging Face dataset {self.name} ({settings.subset or 'default'}, {settings.split}{at}{how})"

    @property
    def place(self) -> dict[str, Any]:
        """Which dataset it is, by names alone; a revision only where one is named, as versions before that have none."""
        found = {"kind": "dataset", "name": self.name, "subset": self.settings.subset, "split": self.settings.split}
        return found | ({"revision": self.settings.revision} if self.settings.revision else {})

    @property
    def identity(self) -> dict[str, Any]:
        """A dataset that comes over a network has no fingerprint; a saved one has, however `streaming` is set."""
        return self.place | {"fingerprint": None if self.settings.streaming and not self.is_saved else self._data._fingerprint}

    @property
    def is_saved(self) -> bool:
        """Whether `save_to_disk` wrote it."""
        return self.has_splits or (Path(self.name) / "state.json").is_file()

    @property
    def has_splits(self) -> bool:
        """Whether `save_to_disk` wrote several splits, which `data.split` chooses from."""
        return (Path(self.name) / "dataset_dict.json").is_file()

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """`begin` of a streamed dataset: the dataset's own state before a batch of rows, and how many of these to leave out. One
        without `state` names the row alone, to which all is read again."""
        import datasets

        data, begin, size = self._data, begin or {}, size or CHUNK_BYTES
        if data.features is not None:
            _check_columns(self.name, data.features.arrow_schema, self.records)
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
            yield from _table_chunks(self._wanted(table), self.name, row, done / total, size)
            row = done

    def _streamed_chunks(self, data: datasets.IterableDataset, begin: Place, size: int) -> Iterator[Chunk]:
        """Yields the chunks from `begin` on, each with the place after it: inside a batch, the state before that and what to
        leave out of it.

        Without a state all rows are read and those before `begin` left out here: states of `data.skip` fit no other dataset.
        """
        row, state, data = begin.get("row", 0), begin.get("state"), data.with_format("arrow")
        done = 0  # rows before the next batch
        if state is not None:
            data.load_state_dict(state)
            done = row - begin.get("skip", 0)
        for table in data.iter(_ROWS):
            first, done = done, done + len(table)
            for chunk in _table_chunks(self._wanted(table).slice(row - first), self.name, row, None, size):
                next_row = chunk.after["row"]
                after = {"state": state, "skip": next_row - first} if next_row < done else {"state": data.state_dict()}
                yield replace(chunk, after={"row": next_row} | after)
            row, state = max(row, done), data.state_dict()

    def _wanted(self, table: pa.Table) -> pa.Table:
        """Its columns that are read; InputError where it lacks one."""
        _check_columns(self.name, table.schema, self.records)
        return table.select(list(self.records.columns))

    @cached_property
    def _data(self) -> datasets.Dataset | datasets.IterableDataset:
        import datasets

        settings = self.settings
        try:
            if self.is_saved:
                data = datasets.load_from_disk(self.name)
            else:
                chosen = {"split": settings.split, "revision": settings.revision, "streaming": bool(settings.streaming)}
                data = datasets.load_dataset(self.name, settings.subset, **chosen)
        # RuntimeError: it has a loading script, whose code is not run.
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"data.source: {self.name}: neither a file or folder here nor a dataset that can be loaded "
                f"(data.subset: {settings.subset}, data.split: {settings.split}, data.revision: {settings.revision}): "
                f"{one_line(error)}"
            ) from None
        if not isinstance(data, datasets.DatasetDict):
            return data
        if settings.split not in data:
            raise InputError(f"data.split: {self.name} has no split `{settings.split}`; it has: {', '.join(data)}")
        return data[settings.split]


def _check_columns(where: str, schema: pa.Schema, records: Records) -> None:
    """InputError where a table lacks a column or has it several times, or where one cannot hold what is wanted."""
    if problem := records.missing(schema.names) or _repeated(schema.names, records) or records.mistyped(schema):
        raise InputError(f"{where}: {problem}")


def _repeated(names: list[str], records: Records) -> str | None:
    often = ((name, names.count(name)) for name in records.columns)
    return next((f"column `{name}` is there {n} times; write it once" for name, n in often if n > 1), None)


def _table_chunks(
    table: pa.RecordBatch | pa.Table, origin: str, first: int, progress: float | None, size: int
) -> Iterator[Chunk]:
    """`table` in pieces of about `size` bytes; `after` says which row of the whole comes next."""
    rows = max(1, len(table) * size // max(table.nbytes, 1))
    for start in range(0, len(table), rows):
        piece = table.slice(start, rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write(piece)
        after = {"row": first + start + len(piece)}
        yield Chunk("table", origin, first + start, sink.getvalue().to_pybytes(), progress, after)
