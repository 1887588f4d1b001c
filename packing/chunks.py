"""Turn the chunks of a source into documents and token ids."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError, as_input_error
from foundation.units import plural
from packing.records import UNTRAINED, WITHOUT_COLUMNS, RecordRule
from packing.settings import DataSettings
from packing.tokenizer import TextTokenizer

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
# Offset in a source from which reading can continue. It is empty for the beginning of the source.
Offset = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a source that are not parsed yet."""

    # jsonl: `payload` has lines. table: `payload` is an Arrow IPC stream. text: `payload` is empty,
    # and the file `origin` is the document.
    kind: Literal["jsonl", "table", "text"]
    # Text before the number of a record in messages, such as "data.jsonl:" or "data.json, record ".
    origin: str
    # Number of the first record: lines count from 1, rows and array records from 0.
    first: int
    payload: bytes
    # Offset in the source directly after this chunk.
    after: Offset
    # Names of all columns of a table. `payload` has only the columns that are read.
    columns: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Position of the records, for messages: a text file, or the first of several records."""
        records = f"{self.origin}{self.first} or one of the next records"
        return self.origin if self.kind == "text" else records


def open_stream(path: Path) -> pa.NativeFile:
    """Open a file for reading, and decompress it if its suffix is .gz or .zst.

    Raises OSError if the file cannot be opened. Arrow's decompressors raise OSError for a truncated
    stream, but would read a file of 0 bytes as an empty text. So this function raises OSError for
    such a file. Raises InputError for a pointer of Git LFS, which would be read as a text.
    """
    compression = COMPRESSION.get(path.suffix.lower())
    if compression and not path.stat().st_size:
        raise OSError("the file has 0 bytes, so it was not written or copied to the end")
    # pyarrow cannot open a file whose name is not in UTF-8.
    file = open(path, "rb")  # noqa: SIM115
    if file.peek(64).startswith(b"version https://git-lfs."):
        raise InputError(f"{path}: this is a Git LFS pointer; fetch the file with `git lfs pull`")
    return pa.input_stream(file, compression=compression)


def lacking(rule: RecordRule, names: Collection[str]) -> str | None:
    """Return an error message if a source lacks a column that `rule` requires, else None.

    `names` are the names of the columns that the source has.
    """
    absent = [column for column in rule.columns if column not in names]
    if not absent:
        return None
    return (
        f"no column `{absent[0]}`; the columns are: {', '.join(names)}. Set data.text to a column "
        "of text or a template of columns, data.messages to a column of chats or to two columns "
        "('[prompt, response]'), or data.input_ids to a column of token ids"
    )


@dataclass(frozen=True)
class Counts:
    """Numbers of documents and tokens, and of records that were not used."""

    documents: int = 0
    tokens: int = 0
    # Number of tokens that have a loss.
    trained: int = 0
    # Number of records without text.
    empty: int = 0
    # Names of columns, and of keys of messages, that have values but are not read. At most 30 names
    # are recorded.
    unread: tuple[str, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        names = ("documents", "tokens", "trained", "empty")
        # Keep at most 30 names. Some datasets use data as names of columns, so the number of names
        # is unbounded.
        unread = sorted({*self.unread, *other.unread})[:30]
        return Counts(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            unread=tuple(unread),
        )


def require_documents(settings: DataSettings, counts: Counts) -> None:
    """Raise InputError if `counts`, the counts of a whole source, has no documents."""
    if counts.documents:
        return
    raise InputError(
        f"data.source: {settings.source}: the source contains no text "
        f"({plural(counts.empty, 'empty record')}); set another source"
    )


@dataclass(frozen=True)
class Tokens:
    """Documents as token ids, in the order of their source."""

    # [sum of lengths] uint32. In tokens without a loss, the bit `UNTRAINED` is set.
    tokens: np.ndarray
    # [documents] int64: number of tokens of each document, including EOS.
    lengths: np.ndarray
    counts: Counts
    # Offset in the source after the last document.
    after: Offset = field(default_factory=dict)


def tokenize(chunk: Chunk, tokenizer: TextTokenizer, rule: RecordRule) -> Tokens:
    """Return the documents of `chunk` as token ids.

    Raises InputError if a long document cannot be encoded.
    """
    documents, counts = read_chunk(chunk, rule)
    with as_input_error(
        (ValueError,),
        chunk.where,
        "divide it into shorter documents, such as one line of a .jsonl file for each",
    ):
        encoded = list(rule.encode(tokenizer.tokenizer, documents))
    tokens = np.concatenate([np.zeros(0, np.uint32), *encoded])
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    trained = int(np.count_nonzero(tokens < UNTRAINED))
    # Number of records without tokens. A record of token ids may have several documents. So if
    # `encoded` has more documents than there are records, no record is counted as empty.
    empty = max(0, len(documents) - len(encoded))
    counts += Counts(documents=len(encoded), tokens=len(tokens), trained=trained, empty=empty)
    return Tokens(tokens, lengths, counts, chunk.after)


def read_chunk(chunk: Chunk, rule: RecordRule) -> tuple[list[Any], Counts]:
    """Return the documents of `chunk`, and the number of its empty records.

    The documents have the form that `rule.fill` returns. The first malformed record raises
    InputError with its position.
    """
    documents = []
    unread = rule.unread(dict.fromkeys(chunk.columns, ""))
    for where, record in _records(chunk):
        try:
            if isinstance(record, Path):
                with open_stream(record) as stream:
                    documents.append(decoded(stream.read()))
            else:
                parsed = _parsed(record, rule) if isinstance(record, bytes) else record
                documents.append(rule.fill(parsed))
                unread |= rule.unread(parsed)
        except (ValueError, OSError, RecursionError) as error:
            raise InputError(f"{where}: {error}") from None
    filled = [document for document in documents if document]
    return filled, Counts(
        empty=len(documents) - len(filled),
        unread=tuple(unread),
    )


def decoded(data: bytes) -> str:
    """Return the text of UTF-8 bytes. Raise ValueError if the bytes have another encoding.

    ASCII text in UTF-16 or UTF-32 is also valid UTF-8, but has NUL characters. So a text with NUL
    characters is rejected.
    """
    try:
        text = str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 ({error}); unpack the file if it is compressed, or convert the file to "
            "UTF-8, for example from Latin-1 with `iconv -f latin1 -t utf8`, or from UTF-16 with "
            "`iconv -f utf16 -t utf8`"
        ) from None
    if "\0" in text:
        raise ValueError(
            "has NUL characters, as UTF-16 and UTF-32 have; convert the file to UTF-8, for example "
            "with `iconv -f utf16 -t utf8`; or remove the zeros, if a crash has left them"
        )
    return text


def _records(chunk: Chunk) -> Iterator[tuple[str, bytes | Path | dict[str, Any]]]:
    """Yield a pair (where, record) for each record of a chunk.

    `where` is a text for error messages, such as "data.jsonl:12". A record is an unparsed line of
    JSON, the path of a text file that is not read yet, or the columns of a table's row.
    """
    if chunk.kind == "jsonl":
        for number, line in enumerate(chunk.payload.split(b"\n"), chunk.first):
            if line.strip():
                yield f"{chunk.origin}{number}", line
    elif chunk.kind == "text":
        yield chunk.origin, Path(chunk.origin)
    else:
        table = pa.ipc.open_stream(chunk.payload).read_all()
        # In a table all messages have the same keys, and the value of a missing key is null.
        nested = [field.name for field in table.schema if "struct<" in str(field.type)]
        for row, record in enumerate(table.to_pylist(maps_as_pydicts="lossy"), chunk.first):
            record |= {name: _without_nulls(record[name]) for name in nested}
            yield f"{chunk.origin}{row}", record


def _without_nulls(value: Any) -> Any:
    """Return `value` without null fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def column_names(chunk: Chunk) -> set[str]:
    """Return the names of all columns in the records of `chunk`. Skip unreadable records."""
    names = set(chunk.columns)
    for _, record in _records(chunk):
        if isinstance(record, bytes):
            with suppress(ValueError):
                names.update(_parsed(record, WITHOUT_COLUMNS))
    return names


def _parsed(line: bytes, rule: RecordRule) -> dict[str, Any]:
    """Return the record in a line.

    Raises ValueError if the line is not a JSON object, or if it lacks a column that `rule`
    requires.
    """
    text = decoded(line)
    remedy = (
        "write each record on one line as {...}, as `jq -c .[]` does with a list, or write one "
        "complete list to a .json file"
    )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not valid JSON: {error}; {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the line is not a JSON object; {remedy}")
    if message := lacking(rule, value):
        raise ValueError(message)
    return value
