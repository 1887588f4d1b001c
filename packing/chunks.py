"""The unit of work of `prepare`: a chunk of raw records that one process cuts from a source and another turns into documents.

A reader that also parsed would be the bottleneck from a few dozen cores on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import pyarrow as pa

from foundation.errors import InputError

CHUNK_BYTES = 2**20  # takes a core about 50 ms: small enough to keep all cores busy, large enough that sending costs nothing
MOST_DOCUMENT = 2**28  # bytes of one text file: a tokenizer needs about 100 bytes a token, and takes documents only whole
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a source, not yet parsed."""

    kind: Literal["jsonl", "table", "files"]  # payload: lines | an Arrow IPC stream | a JSON list of paths, a document each
    origin: str  # the file or dataset they came from
    first: int  # number of the first record there: lines count from 1, rows from 0
    payload: bytes
    progress: float | None = None  # share of the whole source that is read after this chunk, where its size is known
    after: dict[str, Any] | None = None  # JSON-able: from where a source's `chunks` goes on behind this one


Document = TypeVar("Document", covariant=True)


class Records(Protocol[Document]):
    """Makes a document of a record."""

    keys: str  # the settings that name the columns
    columns: tuple[str, ...]

    def fill(self, record: dict[str, Any]) -> Document:
        """The document that `record`, with all columns, holds; something false for none. Raises BadRecord."""


@dataclass
class Texts(Generic[Document]):
    """What a chunk holds: documents in order, and what was left out."""

    documents: list[Document] = field(default_factory=list)
    skipped: int = 0  # malformed records, with on_bad_line: skip
    first_skipped: str | None = None  # where, and why
    empty: int = 0  # records without any text


class BadRecord(ValueError):
    """A record gives no text; the message says why, the caller adds where."""


def check_columns(where: str, records: Records, names: list[str]) -> None:
    """InputError where a table of the columns `names` lacks one of those that `records` reads, or has it twice."""
    wrong = [column for column in records.columns if names.count(column) != 1]
    if wrong:
        what = "several columns" if wrong[0] in names else "no column"
        there = ", ".join(names)
        raise InputError(f"{where}: {what} `{wrong[0]}`; the columns are: {there}. Set {records.keys} to one of them")


def read_chunk(chunk: Chunk, records: Records[Document], skip_bad: bool) -> Texts[Document]:
    """The documents of `chunk`. A malformed record raises InputError with its place, or is counted with `skip_bad`."""
    texts = Texts()
    for place, read in _records(chunk, records):
        try:
            document = read()
        except BadRecord as error:
            if not skip_bad:
                raise InputError(f"{place}: {error}; or set data.on_bad_line: skip to leave such records out") from None
            texts.skipped += 1
            texts.first_skipped = texts.first_skipped or f"{place}: {error}"
            continue
        if document:
            texts.documents.append(document)
        else:
            texts.empty += 1
    return texts


def _records(chunk: Chunk, records: Records) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The place of every record, and a call that gives its document."""
    if chunk.kind == "jsonl":
        for number, line in enumerate(chunk.payload.split(b"\n"), chunk.first):
            if line.strip():
                yield f"{chunk.origin}:{number}", lambda line=line: _of_line(line, records)
    elif chunk.kind == "files":
        for path in json.loads(chunk.payload):
            yield path, lambda path=path: _file_text(path)
    else:
        table = pa.ipc.open_stream(chunk.payload).read_all().select(records.columns)
        for row in range(len(table)):
            yield f"{chunk.origin}, row {chunk.first + row}", lambda row=row: _of_row(table, row, records)


def _of_row(table: pa.Table, row: int, records: Records[Document]) -> Document:
    try:
        record = {name: table[name][row].as_py() for name in table.column_names}
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    return records.fill(record)


def _of_line(line: bytes, records: Records[Document]) -> Document:
    try:
        record = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"the line is not valid JSON: {error}; each line is to be one whole record") from None
    if not isinstance(record, dict):
        raise BadRecord(f'an object such as {{"text": ...}} is wanted, the line holds {type(record).__name__}')
    if absent := [column for column in records.columns if column not in record]:
        there = ", ".join(map(str, record)) or "none"
        raise BadRecord(f"no column `{absent[0]}`; the columns are: {there}. Set {records.keys} to one of them")
    return records.fill(record)


def _file_text(path: str) -> str:
    try:
        stream, raw = open_stream(Path(path))
        text = bytearray()
        with raw, stream:
            while piece := stream.read(CHUNK_BYTES):
                text += piece
                if len(text) > MOST_DOCUMENT:  # an archive of a megabyte can hold a thousand
                    raise BadRecord(too_long(len(text)))
        return str(text, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise BadRecord(f"cannot be read: {error}") from None


def too_long(size: int) -> str:
    """What is wrong with a text file of `size` bytes or more."""
    return (
        f"a text file is one document, and {size / 2**20:,.0f} MiB is too long for one; split it into several files, or write it "
        'as JSONL with a {"text": ...} line for each document'
    )


def open_stream(path: Path) -> tuple[pa.NativeFile, pa.NativeFile]:
    """`path` open for reading, decompressed by its suffix (.gz, .zst), and the file below it, whose `tell` is the progress.

    Arrow's decompressors, unlike Python's, raise on a truncated stream. Raises InputError where it cannot be opened, OSError for
    an archive without a byte, which they would take for one without text.
    """
    try:
        raw = pa.OSFile(str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    compression = _COMPRESSION.get(path.suffix.lower())
    if compression and not raw.size():
        raise OSError(f"it is empty, which no {path.suffix} file is: writing or copying it was broken off")
    return (pa.CompressedInputStream(raw, compression), raw) if compression else (raw, raw)
