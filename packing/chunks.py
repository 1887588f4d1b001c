"""The unit of work of `prepare`: a chunk of raw records that one process cuts from a source and another turns into documents.

A reader that also parsed would be the bottleneck from a few dozen cores on.
"""

from __future__ import annotations

import json
import string
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


Document = TypeVar("Document")


class Records(Protocol[Document]):
    """Makes a document of a record; a source asks it for its columns before any is read."""

    columns: tuple[str, ...]

    def missing(self, names: list[str]) -> str | None:
        """The message for a source whose columns `names` lack one of these; None if they have all."""

    def mistyped(self, schema: pa.Schema) -> str | None:
        """The message for a table, with all columns, in which one cannot hold what is wanted; None where all may."""

    def fill(self, record: dict[str, Any]) -> Document:
        """The document that `record` holds, something false for none. Raises BadRecord."""


@dataclass
class Texts(Generic[Document]):
    """What a chunk holds: documents in order, and what was left out."""

    documents: list[Document] = field(default_factory=list)
    skipped: int = 0  # malformed records, with on_bad_line: skip
    first_skipped: str | None = None  # where, and why
    empty: int = 0  # records without any text


class BadRecord(ValueError):
    """A record gives no text; the message says why, the caller adds where."""


class MissingColumn(BadRecord):
    """The record lacks a column, as all others probably do."""


@dataclass(frozen=True)
class TextTemplate:
    """Makes a document of a record: from one column as it is, or by a template such as "{title}\\n\\n{body}".

    In a template, null counts as no text and numbers are written out; lists, mappings and bytes would stand there as Python
    writes them, and are refused.
    """

    columns: tuple[str, ...]
    pieces: tuple[tuple[str, str | None], ...] | None  # literal text, then a column; None: the one column as it is
    key: str = "data.text"  # the setting it comes from

    @classmethod
    def parse(cls, text: str, key: str = "data.text") -> TextTemplate:
        if "{" not in text and "}" not in text:
            return cls((text,), None, key)
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise InputError(
                f"{key}: {text!r} is no template: {error}; write columns as {{title}}, braces as {{{{ and }}}}"
            ) from None
        if any(spec or conversion for _, _, spec, conversion in parsed) or any(name == "" for _, name, _, _ in parsed):
            raise InputError(f"{key}: {text!r}: only plain column names can stand between braces, as in {{title}}")
        columns = tuple(dict.fromkeys(name for _, name, _, _ in parsed if name is not None))
        if not columns:
            raise InputError(f"{key}: the template {text!r} names no column, so every document would be the same")
        return cls(columns, tuple((literal, name) for literal, name, _, _ in parsed), key)

    def missing(self, names: list[str]) -> str | None:
        return no_column(self.columns, names, self.key)

    def mistyped(self, schema: pa.Schema) -> str | None:
        if self.pieces is not None:
            return None  # what cannot be written out, each record shows
        kind = schema.field(self.columns[0]).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        of_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        if any(is_of(kind) for is_of in of_text):
            return None
        there = ", ".join(schema.names)
        remedy = f"Set {self.key} to one of text, or write this one as text"
        return f"column `{self.columns[0]}` holds {kind}, not text; the columns are: {there}. {remedy}"

    def fill(self, record: dict[str, Any]) -> str:
        """The text that `record` holds, "" for none. Raises BadRecord."""
        if problem := self.missing(list(record)):
            raise MissingColumn(problem)
        if self.pieces is None:
            value = record[self.columns[0]]
            if value is not None and not isinstance(value, str):
                raise BadRecord(f"column `{self.columns[0]}` holds {type(value).__name__}, not text")
            return encodable(value or "")
        if odd := next((column for column in self.columns if isinstance(record[column], (list, dict, bytes))), None):
            raise BadRecord(f"column `{odd}` holds {type(record[odd]).__name__}, which a template cannot write; make it text")
        if all(record[column] in (None, "") for column in self.columns):
            return ""
        values = {column: "" if record[column] is None else str(record[column]) for column in self.columns}
        return encodable("".join(literal + (values[name] if name is not None else "") for literal, name in self.pieces))


def is_list_of(kind: pa.DataType, is_value: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether a column of this type holds lists, in any of Arrow's layouts, of such values; one of nulls alone may."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return pa.types.is_null(kind) or (any(is_of(kind) for is_of in lists) and is_value(kind.value_type))


def no_column(wanted: tuple[str, ...], names: list[str], setting: str) -> str | None:
    """The message where the columns `names` lack some of those that `setting` names; None if they have all."""
    absent = [column for column in wanted if column not in names]
    if not absent:
        return None
    there = ", ".join(map(str, names)) or "none"
    return f"no column `{'`, `'.join(absent)}`; the columns are: {there}. Set {setting} to one of them"


def read_chunk(chunk: Chunk, records: Records[Document], skip_bad: bool) -> Texts[Document]:
    """The documents of `chunk`. A malformed record raises InputError with its place, or is counted with `skip_bad`."""
    texts = Texts()
    for place, document_of, *arguments in _records(chunk, records):
        try:
            document = document_of(*arguments)
        except BadRecord as error:
            message = f"{place}: {error}"
            if not skip_bad:
                hint = "" if isinstance(error, MissingColumn) else "; or set data.on_bad_line: skip to leave such records out"
                raise InputError(message + hint) from None
            texts.skipped += 1
            texts.first_skipped = texts.first_skipped or message
            continue
        if document:
            texts.documents.append(document)
        else:
            texts.empty += 1
    return texts


def _records(chunk: Chunk, records: Records) -> Iterator[tuple[Any, ...]]:
    """The place of every record, and the call that gives its document."""
    if chunk.kind == "jsonl":
        for number, line in enumerate(chunk.payload.split(b"\n"), chunk.first):
            if line.strip():
                yield f"{chunk.origin}:{number}", _of_line, line, records
    elif chunk.kind == "files":
        for path in json.loads(chunk.payload):
            yield path, _file_text, path
    else:
        table = pa.ipc.open_stream(chunk.payload).read_all().select(records.columns)
        try:
            for number, record in enumerate(table.to_pylist(), chunk.first):
                yield f"{chunk.origin}, row {number}", records.fill, record
        except UnicodeDecodeError:  # raised for the table before its first row: each row is tried by itself, which takes longer
            for row in range(len(table)):
                yield f"{chunk.origin}, row {chunk.first + row}", _of_row, table, row, records


def _of_row(table: pa.Table, row: int, records: Records[Document]) -> Document:
    record = {}
    for name in table.column_names:
        try:
            record[name] = table[name][row].as_py()
        except UnicodeDecodeError as error:
            raise BadRecord(f"column `{name}` is not UTF-8 ({error.reason} at byte {error.start})") from None
    return records.fill(record)


def _of_line(line: bytes, records: Records[Document]) -> Document:
    try:
        record = json.loads(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 ({error.reason} at byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        remedy = "each line is to be one whole record; a .json file may also be a list of them"
        raise BadRecord(f"the line is not valid JSON: {what}; {remedy}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise BadRecord(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord(f'an object such as {{"text": ...}} is wanted, the line holds {type(record).__name__}')
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


def encodable(text: str) -> str:
    """`text` itself. JSON can hold half of a surrogate pair (`\\ud800`), which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"half a surrogate pair at character {error.start}, which is no text") from None
    return text


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
