"""Where documents come from, in chunks: JSONL, Parquet, text files, folders of these, and Hugging Face datasets; and their ids.

A chunk is the unit of work: one process cuts it from the source, and another turns it into documents, as a reader that also
parsed would be the bottleneck from a few dozen cores on.

Both sources have a `description` for people, and an `identity` (JSON-able) that differs where the documents may. `chunks()`
raises InputError with the file or place that cannot be read. An unchanged source gives the same chunks every time.
`chunks(begin)` goes on behind the chunk whose `after` is `begin`: with the same records, in chunks that may be cut elsewhere.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.files import hash_of
from foundation.reading import one_line, refusing
from packing.arrow import MANIFEST
from packing.records import UNTRAINED, Records
from packing.settings import HUB_NAME, DataSettings, split_revision
from packing.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import datasets

# takes a core about 50 ms: small enough to keep all cores busy, large enough that sending costs
# nothing
CHUNK_BYTES = 2**20
_ROWS = 1024  # read from tables at once, then cut by size
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_SUFFIXES = {
    "jsonl": {".jsonl", ".ndjson", ".json"},
    "parquet": {".parquet"},
    "text": {
        *(
            ".txt",
            ".text",
            ".md",
            ".rst",
            ".tex",
            ".html",
            ".htm",
            ".xml",
            ".yaml",
            ".yml",
            ".toml",
            ".ini",
            ".cfg",
        ),
        *(
            ".py",
            ".pyi",
            ".c",
            ".h",
            ".cc",
            ".cpp",
            ".hpp",
            ".cu",
            ".cuh",
            ".rs",
            ".go",
            ".java",
            ".kt",
            ".scala",
            ".swift",
        ),
        *(
            ".js",
            ".jsx",
            ".ts",
            ".tsx",
            ".rb",
            ".php",
            ".pl",
            ".lua",
            ".r",
            ".jl",
            ".hs",
            ".ml",
            ".ex",
            ".erl",
            ".clj",
        ),
        *(".sh", ".sql", ".css"),
    },
}
_KNOWN = "JSONL, Parquet and text (.txt, .md, .py, ...) are read, also as .gz or .zst; name a .bin file in `data.packs`"

Place = dict[str, Any]  # in a source; empty at its beginning


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a source, not yet parsed."""

    # payload: lines | an Arrow IPC stream | nothing: the document is the file `origin`
    kind: Literal["jsonl", "table", "text"]
    origin: str  # the file or dataset they came from
    first: int  # number of the first record there: lines count from 1, rows from 0
    payload: bytes
    after: Place  # behind it
    columns: tuple[str, ...] = ()  # all columns of a table; its payload has those that are read


def open_source(settings: DataSettings, records: Records) -> FileSource | DatasetSource:
    """The source that `settings` name, from names only. InputError where there is none or its format is unclear."""
    name, path = str(settings.source), Path(str(settings.source))
    saved = (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()
    if saved or (
        not path.exists() and HUB_NAME.fullmatch(split_revision(name)[0]) and _kind_of(path) is None
    ):
        return DatasetSource(settings, records)
    if not path.exists():
        raise InputError(
            f"data.source: {name}: no such file or folder (relative paths start at the current directory)"
        )
    kind, paths, unread = _files_of(path) if path.is_dir() else (_kind_of(path), [path], "")
    if kind is None:
        raise InputError(f"data.source: {path}: its suffix does not tell its format; {_KNOWN}")
    columns = ("text", "messages", "input_ids") if kind == "text" else ()
    if unused := settings.changed(("subset", "split", *columns)) or ["streaming"] * (
        settings.streaming is True
    ):
        raise InputError(
            f"data.{unused[0]}: {name} is read as {kind}, which has no such thing; leave it out"
        )
    return FileSource(paths, kind, records, path if path.is_dir() else None, unread)


def _kind_of(path: Path) -> str | None:
    """What a file holds, by its suffix without .gz or .zst; None where that does not say."""
    name = Path(path.stem) if path.suffix.lower() in _COMPRESSION else path
    return next((kind for kind, known in _SUFFIXES.items() if name.suffix.lower() in known), None)


def _files_of(folder: Path) -> tuple[str, list[Path], str]:
    """Return the kind of files to read below `folder`, these files in order of their paths, and a
    text that counts the other files.

    Hidden files and other folders of packs do not count. Data files come before text, since many
    data sets carry a README. Raises InputError for two kinds of data files, and if the files to
    read have fewer bytes than the others.
    """
    packs = {manifest.parent for manifest in folder.rglob(MANIFEST)} - {folder}
    by_kind: dict[str | None, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        hidden = any(name.startswith(".") or name == "__pycache__" for name in names)
        if not hidden and not packs.intersection(path.parents) and path.is_file():
            by_kind.setdefault(_kind_of(path), []).append(path)
    kinds = [kind for kind in ("parquet", "jsonl") if kind in by_kind] or [
        kind for kind in ("text",) if kind in by_kind
    ]
    if len(kinds) != 1:
        has = (
            " and ".join(f"{len(by_kind[kind])} {kind} files" for kind in kinds)
            or "no files of a known kind"
        )
        raise InputError(
            f"data.source: {folder}: holds {has}; name a file, or a folder with one kind; {_KNOWN}"
        )
    paths = by_kind.pop(kinds[0])
    others = [path for group in by_kind.values() for path in group]
    suffixes = Counter(path.suffix or "without a suffix" for path in others)
    unread = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes.most_common(8))
    if _bytes_of(others) > _bytes_of(paths):
        raise InputError(
            f"data.source: {folder}: most of its bytes are in files that are not read ({unread}); "
            f"name a file, or a folder without them; {_KNOWN}"
        )
    return kinds[0], paths, unread and f"; files not read: {unread}"


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def open_stream(path: Path) -> pa.NativeFile:
    """`path` open for reading, decompressed by its suffix (.gz, .zst).

    Arrow's decompressors, unlike Python's, raise on a truncated stream. Raises OSError, also for an archive without a byte, which
    they would take for one without text.
    """
    raw, compression = pa.OSFile(str(path)), _COMPRESSION.get(path.suffix.lower())
    if compression and not raw.size():
        raise OSError(
            f"it is empty, which no {path.suffix} file is: writing or copying it was broken off"
        )
    return pa.CompressedInputStream(raw, compression) if compression else raw


# Columns that data sets usually have, and the keys of `data` that read them.
_USUAL_COLUMNS = {
    ("messages",): "data.messages=messages",
    ("conversations",): "data.messages=conversations",
    ("instruction", "output"): "data.messages='[instruction, output]'",
    ("prompt", "completion"): "data.messages='[prompt, completion]'",
    ("prompt", "response"): "data.messages='[prompt, response]'",
    ("question", "answer"): "data.messages='[question, answer]'",
    ("input_ids",): "data.input_ids=input_ids",
    ("content",): "data.text=content",
}


def lacking(records: Records, names: Collection[str]) -> str | None:
    """What is wrong where the columns `names` lack one that `records` reads, with the keys that would fit them; else None."""
    if absent := [column for column in records.columns if column not in names]:
        keys = " or ".join(
            keys for columns, keys in _USUAL_COLUMNS.items() if set(columns) <= set(names)
        )
        return f"no column `{absent[0]}`; the columns are: {', '.join(names)}. Set {keys or 'data.text to one, or to a template'}"
    return None


def check_columns(where: str, records: Records, names: Collection[str]) -> None:
    """InputError where a table of the columns `names` lacks one of those that `records` reads."""
    if wrong := lacking(records, names):
        raise InputError(f"{where}: {wrong}")


class FileSource:
    """Files of one kind."""

    def __init__(
        self,
        paths: list[Path],
        kind: str,
        records: Records,
        folder: Path | None = None,
        unread: str = "",
    ) -> None:
        self.paths, self.kind, self.records = paths, kind, records
        many = f"{len(paths):,} {kind} files in {folder}" if folder else f"{paths[0]} ({kind})"
        self.description = f"{many}, {_bytes_of(paths) / 1e6:,.1f} MB{unread}"

    @property
    def identity(self) -> dict[str, Any]:
        """Paths, sizes and dates of the files, as they are now."""
        stats = [path.stat() for path in self.paths]
        listing = [
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
            for path, stat in zip(self.paths, stats, strict=True)
        ]
        return {"kind": self.kind, "files": hash_of(listing)}

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """`size`: about how many bytes a chunk has. Of text, a chunk is a file: it is read where it is tokenised."""
        size, begin = size or CHUNK_BYTES, begin or {}
        first = begin.get("file", 0)
        for number, path in enumerate(self.paths[first:], first):
            if self.kind == "text":
                yield Chunk("text", str(path), 0, b"", {"file": number + 1})
                continue
            at, line = (begin.get("at", 0), begin.get("line", 1)) if number == first else (0, 1)
            chunks = (
                self._jsonl_chunks(path, size, at, line)
                if self.kind == "jsonl"
                else self._parquet_chunks(path, size, at)
            )
            kinds, remedy = (
                (OSError, pa.ArrowException, UnicodeDecodeError),
                "the file is damaged or not of this format",
            )
            with refusing(kinds, f"{path}: cannot be read", remedy):
                for chunk in chunks:
                    yield replace(chunk, after={"file": number} | chunk.after)

    # Each yields chunks of a file. `at`: the byte or row to begin with.

    def _jsonl_chunks(self, path: Path, size: int, at: int, line: int) -> Iterator[Chunk]:
        """Whole lines, about `size` bytes at a time; a longer line is a chunk of its own. `line`: the number of the first."""
        with open_stream(path) as stream:
            if stream.seekable():
                stream.seek(at)
            # an archive is unpacked up to there
            for skipped in range(0, 0 if stream.seekable() else at, CHUNK_BYTES):
                stream.read(min(CHUNK_BYTES, at - skipped))
            pending, block = bytearray(), True
            while block:
                block = stream.read(size)
                pending += block
                cut = pending.rfind(b"\n", len(pending) - len(block)) + 1 if block else len(pending)
                if payload := bytes(pending[:cut]):
                    del pending[:cut]
                    at, first, line = at + cut, line, line + payload.count(b"\n")
                    yield Chunk("jsonl", str(path), first, payload, {"at": at, "line": line})

    def _parquet_chunks(self, path: Path, size: int, at: int) -> Iterator[Chunk]:
        """Row groups before the row `at` are not read."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(str(path), self.records, file.schema_arrow.names)
            ends = list(
                accumulate(
                    file.metadata.row_group(number).num_rows
                    for number in range(file.num_row_groups)
                )
            )
            first = bisect_right(ends, at)
            begin, groups = ends[first - 1] if first else 0, list(range(first, len(ends)))
            wanted = [*self.records.columns, *self.records.others]  # pyarrow takes those it has
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=wanted):
                rows = batch.slice(max(0, at - begin))
                yield from _rows(rows, file.schema_arrow.names, str(path), max(at, begin), size)
                begin += len(batch)


class DatasetSource:
    """A Hugging Face dataset: a folder that `save_to_disk` wrote, or whatever `load_dataset` takes, streamed or not."""

    kind = "dataset"

    def __init__(self, settings: DataSettings, records: Records) -> None:
        self.settings, self.records, self.name = settings, records, str(settings.source)
        self.is_saved = Path(self.name).exists()
        how = ", streaming" if settings.streaming else ""
        self.description = f"Hugging Face dataset {self.name} ({settings.subset or 'default'}, {settings.split}{how})"

    @property
    def identity(self) -> dict[str, Any]:
        """A dataset that comes over a network has no fingerprint; a saved one has, however `streaming` is set."""
        settings = self.settings
        place = {
            "kind": self.kind,
            "name": self.name,
            "subset": settings.subset,
            "split": settings.split,
        }
        return place | {
            "fingerprint": None
            if settings.streaming and not self.is_saved
            else self._data._fingerprint
        }

    def chunks(self, begin: Place | None = None, size: int | None = None) -> Iterator[Chunk]:
        """`begin`: the next row, the dataset's own state before the batch that the row lies in, and how many rows of that batch
        come before."""
        import datasets

        data, begin, size, names = self._data, begin or {}, size or CHUNK_BYTES, []
        wanted = (*self.records.columns, *self.records.others)
        if isinstance(data, datasets.Dataset):
            data = data.to_iterable_dataset()
        if data.features is not None:
            names = list(data.features)
            check_columns(self.name, self.records, names)
            data = data.select_columns([name for name in names if name in wanted])
        data, row, state = data.with_format("arrow"), begin.get("row", 0), begin.get("state")
        first = row - begin.get("skip", 0)
        try:
            if state is not None:
                data.load_state_dict(state)
            for table in data.iter(_ROWS):
                check_columns(self.name, self.records, table.schema.names)
                names = names or table.schema.names
                table = table.select([name for name in table.schema.names if name in wanted])
                for chunk in _rows(table.slice(row - first), names, self.name, row, size):
                    row = chunk.after["at"]
                    yield replace(chunk, after={"row": row, "skip": row - first, "state": state})
                first, state = first + len(table), data.state_dict()
        except (OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"data.source: {self.name}: cannot be read after row {row}: {one_line(error)}"
            ) from None

    @cached_property
    def _data(self) -> datasets.Dataset | datasets.IterableDataset:
        import datasets

        settings = self.settings
        # RuntimeError: it has a loading script, whose code is not run.
        kinds = (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
            datasets.exceptions.DatasetsError,
        )
        asked = f"{self.name} (data.subset: {settings.subset}, data.split: {settings.split})"
        with refusing(
            kinds,
            f"data.source: {asked}: neither a file or folder here nor a dataset that can be loaded",
        ):
            if self.is_saved:
                data = datasets.load_from_disk(self.name)
                if not isinstance(data, datasets.DatasetDict):
                    return data
                if settings.split not in data:
                    raise InputError(
                        f"data.split: {self.name} has no {settings.split}; set it to one of {', '.join(data)}"
                    )
                return data[settings.split]
            name, revision = split_revision(self.name)
            chosen = {
                "split": settings.split,
                "revision": revision,
                "streaming": bool(settings.streaming),
            }
            return datasets.load_dataset(name, settings.subset, **chosen)


def _rows(
    table: pa.RecordBatch | pa.Table, columns: list[str], origin: str, first: int, size: int
) -> Iterator[Chunk]:
    """`table` in pieces of about `size` bytes; `after` says which row of the whole comes next."""
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


@dataclass(frozen=True)
class Counts:
    """What records are made into, and what is left out of them."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0  # of the tokens, those that are to be learnt
    unknown: int = 0  # of the tokens, those that stand for text which the vocabulary lacks
    skipped: int = 0  # malformed records, with on_bad_line: skip
    empty: int = 0  # records without any text
    first_skipped: str | None = None  # where, and why
    unread: tuple[str, ...] = ()  # columns with a value and no effect, the first ones by name

    def __add__(self, other: Counts) -> Counts:
        *numbers, first_skipped, unread = zip(astuple(self), astuple(other), strict=True)
        names = sorted({*unread[0], *unread[1]})[:30]  # some records have keys without end
        return Counts(*map(sum, numbers), first_skipped[0] or first_skipped[1], tuple(names))


@dataclass(frozen=True)
class Tokens:
    """Documents as ids, in the order of their source: those of a chunk, or of all."""

    tokens: np.ndarray  # [sum of lengths] uint32, those that are not to be learnt with `UNTRAINED`
    lengths: np.ndarray  # [documents] int64, EOS included
    counts: Counts
    after: Place = field(default_factory=dict)  # as of its chunk


def tokenize(
    chunk: Chunk, tokenizer: TextTokenizer, records: Records, settings: DataSettings
) -> Tokens:
    """The documents of `chunk` as ids."""
    documents, left_out = read_chunk(chunk, records, settings.on_bad_line == "skip")
    encoded = list(records.encode(tokenizer.tokenizer, documents))
    tokens, lengths = (
        np.concatenate([np.zeros(0, np.uint32), *encoded]),
        np.array([len(ids) for ids in encoded], np.int64),
    )
    trained = int(np.count_nonzero(tokens < UNTRAINED))
    empty = max(0, len(documents) - len(encoded))  # a record of tokens may hold several documents
    unknown = int(np.count_nonzero(tokens & ~UNTRAINED == tokenizer.unknown))
    counts = left_out + Counts(len(encoded), len(tokens), trained, unknown, empty=empty)
    return Tokens(tokens, lengths, counts, chunk.after)


def read_chunk(chunk: Chunk, records: Records, skip_bad: bool) -> tuple[list[Any], Counts]:
    """The documents of `chunk`, as `records` fill them, and counts of what was left out. A malformed record raises InputError
    with its place, or is counted with `skip_bad`."""
    documents, skipped = [], []
    unread = records.unread(dict.fromkeys(chunk.columns, ""))
    for place, record in _records(chunk, records):
        try:
            if isinstance(record, Path):
                with open_stream(record) as stream:
                    documents.append(str(stream.read(), "utf-8-sig"))
            else:
                parsed = _parsed(record, records) if isinstance(record, bytes) else record
                documents.append(records.fill(parsed))
                unread |= records.unread(parsed)
        except (ValueError, OSError) as error:
            wrong = error
            if isinstance(error, UnicodeDecodeError):
                encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
                wrong = f"is not UTF-8 ({error}); convert it, as by `iconv -f {encoding} -t UTF-8`"
            if not skip_bad:
                raise InputError(
                    f"{place}: {wrong}; or set data.on_bad_line: skip to leave such records out"
                ) from None
            skipped.append(f"{place}: {wrong}")
    filled = [document for document in documents if document]
    empty, first_skipped = len(documents) - len(filled), skipped[0] if skipped else None
    return filled, Counts(
        skipped=len(skipped), empty=empty, first_skipped=first_skipped, unread=tuple(unread)
    )


def _records(chunk: Chunk, records: Records) -> Iterator[tuple[str, bytes | Path | dict[str, Any]]]:
    """Every record, a line not yet parsed and a text file not yet read, with its place."""
    if chunk.kind == "jsonl":
        lines = enumerate(chunk.payload.split(b"\n"), chunk.first)
        yield from (
            (f"{chunk.origin}:{number}", record)
            for number, line in lines
            if line.strip()
            for record in _listed(line)
        )
    elif chunk.kind == "text":
        yield chunk.origin, Path(chunk.origin)
    else:
        table = pa.ipc.open_stream(chunk.payload).read_all()
        yield from (
            (f"{chunk.origin}, row {row}", record)
            for row, record in enumerate(table.to_pylist(), chunk.first)
        )


def _listed(line: bytes) -> list[bytes]:
    """The records of a line that is a list of them, each as a line; else the line itself, right or wrong."""
    try:
        listed = json.loads(line) if line.lstrip().startswith(b"[") else None
    except ValueError:
        listed = None
    return (
        [json.dumps(record).encode() for record in listed] if isinstance(listed, list) else [line]
    )


def _parsed(line: bytes, records: Records) -> dict[str, Any]:
    """The record that a line holds, with all columns."""
    text = str(line, "utf-8-sig")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the line is not valid JSON: {error}; each is one whole record, as `jq -c .[]` writes a list"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("the line holds no record but a value; each is one whole record, {...}")
    if wrong := lacking(records, value):
        raise ValueError(wrong)
    return value
