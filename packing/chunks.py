"""Turn the chunks of a source into documents and token ids."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.units import plural
from packing.records import UNTRAINED, Records
from packing.settings import DataSettings
from packing.tokenizer import TextTokenizer

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
# UTF-32's little-endian mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
Place = dict[str, Any]  # a place in a source; empty for its beginning


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a source, not parsed."""

    # The payload is lines, an Arrow IPC stream, or empty if the document is the file `origin`.
    kind: Literal["jsonl", "table", "text"]
    origin: str  # file or dataset of the records
    first: int  # number of the first record: lines count from 1, rows from 0
    payload: bytes
    after: Place  # the place behind the chunk
    columns: tuple[str, ...] = ()  # all columns of a table; the payload has the read ones


def open_stream(path: Path) -> pa.NativeFile:
    """Open `path` for reading, decompressed by its suffix (.gz, .zst). Raise OSError if that fails.

    Arrow's decompressors, unlike Python's, raise on a truncated stream. They would take a file
    without a byte for one without text, so it is refused here.
    """
    raw = pa.OSFile(str(path))
    compression = COMPRESSION.get(path.suffix.lower())
    if compression is None:
        return raw
    if not raw.size():
        raise OSError(
            f"it is empty, which no {path.suffix} file is: writing or copying it was broken off"
        )
    return pa.CompressedInputStream(raw, compression)


# Columns that datasets usually have, and the keys of `data` that read them.
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
    """Return a message if the columns `names` lack one that `records` reads, else None.

    The message has the keys of `data` that would read usual columns.
    """
    absent = [column for column in records.columns if column not in names]
    if not absent:
        return None
    keys = [keys for columns, keys in _USUAL_COLUMNS.items() if set(columns) <= set(names)]
    remedy = " or ".join(keys) or "data.text to one, or to a template"
    return f"no column `{absent[0]}`; the columns are: {', '.join(names)}. Set {remedy}"


def check_columns(where: str, records: Records, names: Collection[str]) -> None:
    """Raise InputError if a table of the columns `names` lacks one that `records` reads."""
    if message := lacking(records, names):
        raise InputError(f"{where}: {message}")


@dataclass(frozen=True)
class Counts:
    """Counts of documents, tokens and records that were not used."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0  # tokens with a loss
    unknown: int = 0  # tokens for text that the vocabulary lacks
    skipped: int = 0  # malformed records, with on_bad_line: skip
    empty: int = 0  # records without text
    first_skipped: str | None = None  # place and reason
    unread: tuple[str, ...] = ()  # names of columns with a value and no effect, at most 30

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.trained + other.trained,
            self.unknown + other.unknown,
            self.skipped + other.skipped,
            self.empty + other.empty,
            self.first_skipped or other.first_skipped,
            # The keys of some records are data, so their number is unbounded.
            tuple(sorted({*self.unread, *other.unread})[:30]),
        )


def require_documents(settings: DataSettings, counts: Counts) -> None:
    """Raise InputError if a source holds no text."""
    if counts.documents:
        return
    skipped = ""
    if counts.skipped:
        skipped = f" and {counts.skipped:,} malformed (first: {counts.first_skipped})"
    raise InputError(
        f"data.source: {settings.source}: holds no text: "
        f"{plural(counts.empty, 'empty record')}{skipped}"
    )


@dataclass(frozen=True)
class Tokens:
    """Documents as token ids, in the order of their source."""

    tokens: np.ndarray  # [sum of lengths] uint32; tokens without a loss have the bit `UNTRAINED`
    lengths: np.ndarray  # [documents] int64, with EOS
    counts: Counts
    after: Place = field(default_factory=dict)  # the place behind them in the source


def tokenize(
    chunk: Chunk, tokenizer: TextTokenizer, records: Records, settings: DataSettings
) -> Tokens:
    """Return the documents of `chunk` as token ids."""
    documents, counts = read_chunk(chunk, records, settings.on_bad_line == "skip")
    encoded = list(records.encode(tokenizer.tokenizer, documents))
    tokens = np.concatenate([np.zeros(0, np.uint32), *encoded])
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    counts += Counts(
        documents=len(encoded),
        tokens=len(tokens),
        trained=int(np.count_nonzero(tokens < UNTRAINED)),
        unknown=int(np.count_nonzero(tokens & ~UNTRAINED == tokenizer.unknown)),
        empty=max(0, len(documents) - len(encoded)),  # A record may hold several documents.
    )
    return Tokens(tokens, lengths, counts, chunk.after)


def read_chunk(chunk: Chunk, records: Records, skip_bad: bool) -> tuple[list[Any], Counts]:
    """Return the documents of `chunk`, as `records` fill them, and counts of unused records.

    A malformed record raises InputError with its place, or is counted with `skip_bad`.
    """
    documents = []
    skipped = []
    unread = records.unread(dict.fromkeys(chunk.columns, ""))
    for place, record in _records(chunk):
        try:
            if isinstance(record, Path):
                with open_stream(record) as stream:
                    documents.append(_decoded(stream.read()))
            else:
                parsed = _parsed(record, records) if isinstance(record, bytes) else record
                documents.append(records.fill(parsed))
                unread |= records.unread(parsed)
        except (ValueError, OSError) as error:
            message = f"{place}: {error}"
            if not skip_bad:
                raise InputError(
                    f"{message}; or set data.on_bad_line: skip to leave such records out"
                ) from None
            skipped.append(message)
    filled = [document for document in documents if document]
    counts = Counts(
        skipped=len(skipped),
        empty=len(documents) - len(filled),
        first_skipped=skipped[0] if skipped else None,
        unread=tuple(unread),
    )
    return filled, counts


def _decoded(data: bytes) -> str:
    """Return the text of UTF-8 bytes. Raise ValueError for another encoding.

    ASCII in UTF-16 or UTF-32 is valid UTF-8 with NULs. Only a byte order mark names the encoding.
    """
    marked = [name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)]
    remedy = "convert it from its own encoding to UTF-8"
    if marked:
        remedy = f"convert it, as by `iconv -f {marked[0]} -t UTF-8`"
    try:
        text = str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error}); {remedy}") from None
    if "\0" in text:
        raise ValueError(f"holds NUL characters, as UTF-16 and UTF-32 do; {remedy}")
    return text


def _records(chunk: Chunk) -> Iterator[tuple[str, bytes | Path | dict[str, Any]]]:
    """Yield the place of each record, and a line to parse, a text file to read, or its columns."""
    if chunk.kind == "jsonl":
        for number, line in enumerate(chunk.payload.split(b"\n"), chunk.first):
            if line.strip():
                for record in _listed(line):
                    yield f"{chunk.origin}:{number}", record
    elif chunk.kind == "text":
        yield chunk.origin, Path(chunk.origin)
    else:
        table = pa.ipc.open_stream(chunk.payload).read_all()
        for row, record in enumerate(table.to_pylist(), chunk.first):
            yield f"{chunk.origin}, row {row}", record


def _listed(line: bytes) -> list[bytes]:
    """Return the records of a line that is a list of records, else the line itself."""
    if line.lstrip().startswith(b"["):
        with suppress(ValueError):
            return [json.dumps(record).encode() for record in json.loads(line)]
    return [line]


def _parsed(line: bytes, records: Records) -> dict[str, Any]:
    """Return the record of a line. Raise ValueError if it is none, or lacks a column."""
    text = _decoded(line)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the line is not valid JSON: {error}; each is one whole record, as `jq -c .[]` writes "
            "a list"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("the line holds no record but a value; each is one whole record, {...}")
    if message := lacking(records, value):
        raise ValueError(message)
    return value
