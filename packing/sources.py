"""Read documents in chunks from files, folders and Hugging Face datasets.

A chunk is the unit of work: one process cuts chunks from the source, and other processes turn them
into documents. If the first process also parsed the chunks, it would be the bottleneck on machines
with more than a few dozen cores.

`FileSource` and `DatasetSource` have the same attributes:

* `description` is a text for the user.
* `identity` is a JSON-able value that changes if the documents may have changed.
* `is_local` is False for a dataset of the hub.
* `chunks({})` yields the chunks. Every call yields the same chunks as long as the source does not
  change. If a file or a row cannot be read, InputError names the file or the row.
* `chunks(begin)` continues after the chunk whose `after` is `begin`. It yields the same records as
  `chunks({})`, but may divide them into other chunks.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from foundation.errors import InputError, as_input_error, one_line, require_package
from foundation.files import hash_of
from foundation.progress import say
from foundation.storage import fetch, is_address
from foundation.units import plural
from packing.chunks import (
    COMPRESSION,
    Chunk,
    Offset,
    column_names,
    decoded,
    lacking,
    open_stream,
)
from packing.records import RecordRule
from packing.settings import (
    HUB_NAME,
    RECORD,
    DataSettings,
    SourceSettings,
    files_of,
    split_revision,
)

if TYPE_CHECKING:
    import datasets

# Size of a chunk. A core needs about 50 ms for a chunk. This is short enough to keep all cores
# busy, and long enough that the time for sending a chunk to another process does not matter.
CHUNK_BYTES = 2**20
# Number of rows of a table that are read at once, and then divided into chunks.
_ROWS = 1024
# Largest size of a row of a CSV file in bytes.
_CSV_ROW = 2**24
# Suffixes of each kind of file.
_SUFFIXES = {
    "jsonl": ".jsonl .ndjson .json",
    "parquet": ".parquet",
    "csv": ".csv .tsv",
    "text": (
        ".txt .text .md .rst .tex .html .htm .xml .yaml .yml .toml .ini .cfg .py .pyi .c .h .cc "
        ".cpp .hpp .cu .cuh .rs .go .java .kt .scala .swift .js .jsx .ts .tsx .rb .php .pl .lua .r "
        ".jl .hs .ml .ex .erl .clj .sh .sql .css"
    ),
}
# Columns of chats that are recognised. If a source has both, the first one is used.
_CHAT_COLUMNS = ("messages", "conversations")
# Splits of a dataset in the names of its files.
_SPLITS = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
_KINDS = {suffix: kind for kind, text in _SUFFIXES.items() for suffix in text.split()}
_READABLE = (
    "JSONL, JSON arrays, Parquet, CSV, TSV and text files (.txt, .md, .py, ...) can be read, also "
    "as .gz or .zst; convert an .arrow file, such as one in the cache of `datasets`, with "
    "`datasets.Dataset.from_file(FILE).to_parquet('x.parquet')`; set data.packs to read a token "
    ".bin file"
)


def open_source(settings: DataSettings, rule: RecordRule) -> FileSource | DatasetSource:
    """Return the source that `settings` name. The content of its files is not read.

    Objects in object storage are copied to this machine first.

    Raises InputError if the source does not exist, if its format is not known, or if `settings` has
    a setting of this source that its kind does not use.
    """
    name = str(settings.source)
    if is_address(name):
        name = str(fetch(name))
        settings = settings.model_copy(update={"source": name})
    path = Path(name)
    # Datasets of `save_to_disk` have one of these files.
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return DatasetSource(settings, rule)
    with as_input_error(
        (OSError,),
        f"data.source: {name}: cannot be read",
        "correct the permissions, or restore the file to which a link points",
    ):
        files = files_of(name)
        if not files and not os.path.lexists(path):
            if HUB_NAME.fullmatch(split_revision(name)[0]) and kind_of(path) is None:
                return DatasetSource(settings, rule)
            raise InputError(
                f"data.source: {name}: no such file or folder, and no file matches it "
                "(relative paths start at the current directory)"
            )
        kind, paths, unread = _choose_files(name, files)
        # For a link to a missing file, `stat` raises OSError with the name of the link.
        size = sum(path.stat().st_size for path in paths)
    _refuse_unused_settings(settings, kind)
    count = plural(len(paths), f"{kind} file")
    return FileSource(f"{name}: {count}, {size / 1e6:,.1f} MB{unread}", paths, kind, rule)


def _refuse_unused_settings(settings: DataSettings, kind: str) -> None:
    """Raise InputError if a setting of this source has no effect on files of this kind."""
    # Text files have no columns, and files have neither subsets nor splits.
    columns = ("text", "messages", "input_ids") if kind == "text" else ()
    unused = settings.chosen(("subset", "split", *columns))
    if settings.streaming is True:
        unused.append("streaming")
    if unused:
        raise InputError(
            f"data.{unused[0]}: {settings.source} is read as {kind}, which has no such setting; "
            "remove it (the files of a split are chosen by a pattern as data.source, such as "
            "'FOLDER/test*')"
        )


def suffix_of(path: Path) -> str:
    """Return the suffix of a file in lower case, without .gz or .zst."""
    name = Path(path.stem) if path.suffix.lower() in COMPRESSION else path
    return name.suffix.lower()


def kind_of(path: Path) -> str | None:
    """Return the kind of a file by its suffix, or None if it is unknown."""
    return _KINDS.get(suffix_of(path))


def _choose_files(name: str, files: list[Path]) -> tuple[str, list[Path], str]:
    """Return the kind of the files to read, their paths, and a note about files that are not read.

    `name` is the folder or the pattern of `files`. Files of the kind with the most bytes are read.
    Raises InputError if the files of unknown kinds have the most bytes, or if text files, such as a
    README, have more bytes than JSONL or Parquet files.
    """
    sizes: Counter[str | None] = Counter()
    for path in files:
        # A link to a missing file has no size. Files of unknown kinds have the kind None.
        sizes[kind_of(path)] += path.stat().st_size if path.exists() else 0
    kind = max(sizes, key=sizes.__getitem__, default=None)
    if kind is None:
        raise InputError(
            f"data.source: {name}: there are no files of a known kind, or files of unknown kinds "
            "have most of the bytes; set data.source to a file with a known suffix, or to a "
            f"pattern that matches such files, such as 'FOLDER/**/*.txt'; {_READABLE}"
        )
    if kind == "text" and sizes.keys() & {"jsonl", "parquet"}:
        raise InputError(
            f"data.source: {name}: has text files, and smaller JSONL or Parquet files; set "
            "data.source to a pattern that matches the files to read, such as 'FOLDER/*.jsonl'"
        )
    paths = [path for path in files if kind_of(path) == kind]
    if kind != "text" and os.path.isdir(name):
        _refuse_several_splits(name, paths)
    suffixes = Counter(path.suffix for path in files if kind_of(path) != kind)
    unread = ", ".join(
        f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.most_common(8)
    )
    return kind, paths, unread and f"\nfiles not read: {unread}"


def _refuse_several_splits(folder: str, paths: list[Path]) -> None:
    """Raise InputError if files of `folder` are named after training and another split."""
    names = [path.relative_to(folder).as_posix() for path in paths]
    splits = {word for name in names for word in _SPLITS.findall(name)}
    if "train" in splits and len(splits) > 1:
        raise InputError(
            f"data.source: {folder}: has files of several splits ({', '.join(sorted(splits))}); "
            "set data.source to a pattern that matches the files to read, such as "
            f"'{folder}/**/train*', or '{folder}/**' for all files"
        )


def refuse_common_files(settings: DataSettings) -> None:
    """Raise InputError if a file, or a split of a dataset, is used for training and validation.

    Copies of files are not detected.
    """
    validation = settings.validation
    if validation is None:
        return
    for source in settings.sources or (settings,):
        if _have_common_files(source, validation):
            raise InputError(
                f"`data.validation`: {validation.source} is also used for training "
                f"({source.source}); either choose another file or split, or set `data.held_out` "
                "instead of `data.validation`"
            )


def _have_common_files(one: SourceSettings, other: SourceSettings) -> bool:
    """Return True if two sources read the same file, or the same split of a dataset."""
    first, second = str(one.source), str(other.source)
    if os.path.realpath(first) == os.path.realpath(second):
        return (one.subset, one.split) == (other.subset, other.split)
    return not _real_files(first).isdisjoint(_real_files(second))


def _real_files(name: str) -> set[str]:
    """Return the real paths of a source's files. The set is empty for a `DatasetDict` on the disk.

    Its splits are compared by their names in `_have_common_files`.
    """
    is_dataset = os.path.exists(os.path.join(name, "dataset_dict.json"))
    return set() if is_dataset else set(map(os.path.realpath, files_of(name)))


def reading_settings(settings: DataSettings, source: FileSource | DatasetSource) -> DataSettings:
    """Return `settings`, changed for reading `source` if necessary.

    For text files, which have no columns, the keys that choose columns are set to their defaults.

    If `settings` choose no columns and the source has a column of chats, `messages` is set to this
    column. But if the source also has a column `text` or `input_ids`, `messages` is set only if
    `settings` choose a chat template.
    """
    if source.kind == "text":
        return settings.model_copy(
            update={key: SourceSettings.model_fields[key].default for key in RECORD}
        )
    if settings.changed(("text", "messages", "input_ids")):
        return settings
    names = source.columns
    if names & {"text", "input_ids"} and settings.chat_template is None:
        return settings
    column = next((name for name in _CHAT_COLUMNS if name in names), None)
    if column is None:
        return settings
    say(f"{settings.source}: the source has chats, which are read with data.messages={column}")
    return settings.model_copy(update={"messages": column})


@dataclass
class FileSource:
    """Source that reads files of one kind: jsonl, parquet, csv or text."""

    is_local: ClassVar = True
    description: str
    paths: list[Path]
    kind: str
    rule: RecordRule

    @property
    def identity(self) -> dict[str, Any]:
        """Kind of the files, and a hash of their present names, sizes and dates.

        Names are relative, so that the identity stays if a source and its packs are moved.
        """
        folder = os.path.commonpath([path.parent for path in self.paths])
        listing = [
            [str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns]
            for path in self.paths
        ]
        return {"kind": self.kind, "files": hash_of(listing)}

    @property
    def columns(self) -> set[str]:
        """Names of all columns in the first records. A source of text files has none."""
        first = next(self.chunks({}), None)
        return column_names(first) if first else set()

    def chunks(self, begin: Offset, size: int | None = None) -> Iterator[Chunk]:
        """Yield chunks of about `size` bytes.

        `Chunk.after` is the offset at which reading resumes after a chunk. `begin` is such an
        offset, or {} for the beginning of the source. An offset has the number of a file (`file`).
        Within a file, it has the next byte and the number of its line (`at`, `line`), the next row
        of a table (`at`), or the next record of a JSON array (`record`).

        A text file is one chunk. The chunk has only the path, because a worker reads the file.
        """
        first = begin.get("file", 0)
        for number, path in enumerate(self.paths[first:], first):
            if self.kind == "text":
                after = {"file": number + 1}
                yield Chunk("text", origin=str(path), first=0, payload=b"", after=after)
                continue
            offset = begin if number == first else {}
            readers = {
                "jsonl": self._jsonl_chunks,
                "parquet": self._parquet_chunks,
                "csv": self._csv_chunks,
            }
            with as_input_error(
                (OSError, pa.ArrowException, ValueError, RecursionError),
                f"{path}: cannot be read",
                "the file is damaged, not of this format, or not in UTF-8: convert it, for example "
                "with `iconv -f latin1 -t utf8` or `iconv -f utf16 -t utf8`",
            ):
                for chunk in readers[self.kind](path, size or CHUNK_BYTES, offset):
                    yield replace(chunk, after={"file": number} | chunk.after)

    def _jsonl_chunks(self, path: Path, size: int, offset: Offset) -> Iterator[Chunk]:
        """Yield chunks of complete lines. A chunk is longer if a line is longer than `size`.

        A .json file may have one JSON array instead of lines.
        """
        if suffix_of(path) == ".json" and _has_array(path):
            yield from self._array_chunks(path, size, offset)
            return
        byte_offset = offset.get("at", 0)
        line = offset.get("line", 1)
        with open_stream(path) as stream:
            _skip(stream, byte_offset)
            pending = bytearray()
            # The ends of chunks are the ends of a stream's parts, so they never change. The empty
            # block at the end yields the bytes that are still pending: a last line without a
            # newline.
            for block in chain(iter(partial(stream.read, size), b""), [b""]):
                pending += block
                cut = len(pending)
                if block:
                    cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
                if payload := bytes(pending[:cut]):
                    del pending[:cut]
                    first = line
                    byte_offset += cut
                    line += payload.count(b"\n")
                    after = {"at": byte_offset, "line": line}
                    yield Chunk(
                        "jsonl", origin=f"{path}:", first=first, payload=payload, after=after
                    )

    def _array_chunks(self, path: Path, size: int, offset: Offset) -> Iterator[Chunk]:
        """Yield chunks of records of a JSON array. Each record becomes one line."""
        with open_stream(path) as stream:
            records = json.loads(decoded(stream.read()))
        first = offset.get("record", 0)
        payload = bytearray()
        for number, record in enumerate(records[first:], first + 1):
            payload += json.dumps(record).encode() + b"\n"
            if len(payload) >= size or number == len(records):
                yield Chunk(
                    "jsonl",
                    origin=f"{path}, record ",
                    first=first,
                    payload=bytes(payload),
                    after={"record": number},
                )
                first = number
                payload.clear()

    def _csv_chunks(self, path: Path, size: int, offset: Offset) -> Iterator[Chunk]:
        """Yield chunks of rows. All values are texts. Rows before `offset` are read and skipped."""
        from pyarrow import csv

        separator = "\t" if suffix_of(path) == ".tsv" else ","
        parsing = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        reading = csv.ReadOptions(use_threads=False, block_size=_CSV_ROW)
        with open_stream(path) as stream, csv.open_csv(stream, reading, parsing) as reader:
            names = reader.schema.names
        # Read the file again, with the chosen columns as texts. A name may occur twice in `names`.
        read_columns = self.rule.read_columns or names
        columns = [*dict.fromkeys(name for name in names if name in read_columns)]
        texts = csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()), include_columns=columns
        )
        with open_stream(path) as stream, csv.open_csv(stream, reading, parsing, texts) as batches:
            yield from _table_chunks(
                batches,
                names,
                self.rule,
                origin=str(path),
                next_row=offset.get("at", 0),
                first_row=0,
                size=size,
            )

    def _parquet_chunks(self, path: Path, size: int, offset: Offset) -> Iterator[Chunk]:
        """Yield chunks of rows. Row groups before `offset` are not read."""
        import pyarrow.parquet as pq

        next_row = offset.get("at", 0)
        with (
            open_stream(path) as stream,
            pq.ParquetFile(stream, page_checksum_verification=True) as file,
        ):
            names = file.schema_arrow.names
            groups = range(file.num_row_groups)
            ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
            first_group = bisect_right(ends, next_row)
            first_row = ends[first_group - 1] if first_group else 0
            batches = file.iter_batches(
                _ROWS,
                row_groups=list(groups[first_group:]),
                # Request the optional columns too. pyarrow ignores names that the file lacks.
                columns=self.rule.read_columns,
            )
            yield from _table_chunks(
                batches,
                names,
                self.rule,
                origin=str(path),
                next_row=next_row,
                first_row=first_row,
                size=size,
            )


class DatasetSource:
    """Source that reads a Hugging Face dataset, from `save_to_disk` or with `load_dataset`."""

    kind = "dataset"

    def __init__(self, settings: DataSettings, rule: RecordRule) -> None:
        self.settings = settings
        self.rule = rule
        self.name = str(settings.source)
        self.is_local = Path(self.name).exists()
        streaming = ", streaming" if settings.streaming else ""
        part = f"{settings.subset or 'default'}, {settings.split}{streaming}"
        self.description = f"Hugging Face dataset {self.name} ({part})"

    @property
    def identity(self) -> dict[str, Any]:
        """Name, subset, split and fingerprint. A streamed dataset has None as its fingerprint."""
        is_streamed = self.settings.streaming and not self.is_local
        fingerprint = None if is_streamed else self._data._fingerprint
        name = os.path.realpath(self.name) if self.is_local else self.name
        return {
            "kind": self.kind,
            "name": name,
            "subset": self.settings.subset,
            "split": self.settings.split,
            "fingerprint": fingerprint,
        }

    @property
    def columns(self) -> set[str]:
        """Names of all columns. The set is empty if a streamed dataset does not state them."""
        return set(self._data.features or ())

    def chunks(self, begin: Offset, size: int | None = None) -> Iterator[Chunk]:
        """Yield chunks of about `size` bytes.

        `Chunk.after` is the offset at which reading resumes after a chunk. `begin` is such an
        offset, or {} for the beginning of the source. An offset has three values: the number of the
        next row (`row`), the state of the dataset before the batch that has this row (`state`), and
        the number of earlier rows in this batch (`skip`).
        """
        # Names of all columns, or an empty list if the dataset does not state them.
        names = list(self._data.features or ())
        import datasets

        row = begin.get("row", 0)
        first_row_of_batch = row - begin.get("skip", 0)
        try:
            for state, table in self._batches(begin.get("state")):
                read = [name for name in table.schema.names if name in self.rule.read_columns]
                # When reading resumes within a batch, the dataset yields the batch from its first
                # row. `_table_chunks` skips the rows before `next_row`, which were read earlier.
                for chunk in _table_chunks(
                    [table.select(read)],
                    # All columns, because `_table_chunks` checks that no required one is missing.
                    names or table.schema.names,
                    self.rule,
                    origin=self.name,
                    next_row=row,
                    first_row=first_row_of_batch,
                    size=size or CHUNK_BYTES,
                ):
                    row = chunk.after["at"]  # the number of the row after the chunk
                    after = {"row": row, "skip": row - first_row_of_batch, "state": state}
                    yield replace(chunk, after=after)
                first_row_of_batch += len(table)
        except (OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"data.source: {self.name}: cannot be read after row {row}: {one_line(error)}"
            ) from None

    def _batches(
        self, state: dict[str, Any] | None
    ) -> Iterator[tuple[dict[str, Any] | None, pa.Table]]:
        """Yield the batches of rows from `state` on, each after the dataset's state before it.

        `state` is None at the beginning of the dataset.
        """
        data = self._data
        import datasets

        if isinstance(data, datasets.Dataset):
            data = data.to_iterable_dataset()
        if data.features:
            columns = [name for name in data.features if name in self.rule.read_columns]
            data = data.select_columns(columns)
        data = data.with_format("arrow")
        if state is not None:
            data.load_state_dict(state)
        for table in data.iter(_ROWS):
            yield state, table
            state = data.state_dict()

    @cached_property
    def _data(self) -> datasets.Dataset | datasets.IterableDataset:
        """The loaded dataset. Raises InputError if it cannot be loaded, or has no such split."""
        require_package("datasets", "hub", f"`data.source: {self.name}`: a Hugging Face dataset")
        import datasets

        settings = self.settings
        # RuntimeError is raised for a dataset with a loading script, because its code is not run.
        refusals = (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
            datasets.exceptions.DatasetsError,
        )
        what = (
            f"`data.source: {self.name}` is neither an existing file or folder nor a dataset that "
            f"can be loaded with `data.subset: {settings.subset}` and `data.split: "
            f"{settings.split}`"
        )
        with as_input_error(refusals, what, "correct these keys, or check the network"):
            if self.is_local:
                data = datasets.load_from_disk(self.name)
                if not isinstance(data, datasets.DatasetDict):
                    return data
                if settings.split not in data:
                    raise InputError(
                        f"`data.split: {settings.split}`: {self.name} has no such split; "
                        f"set `data.split` to one of {', '.join(data)}"
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


def _skip(stream: pa.NativeFile, count: int) -> None:
    """Move a stream from its beginning to the offset `count`, in bytes."""
    if stream.seekable():
        stream.seek(count)
        return
    # The stream of a compressed file cannot seek, so read up to the offset.
    for skipped in range(0, count, CHUNK_BYTES):
        stream.read(min(CHUNK_BYTES, count - skipped))


def _has_array(path: Path) -> bool:
    """Return True if a file begins with a JSON array."""
    with open_stream(path) as stream:
        return stream.read(2**10).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _table_chunks(
    tables: Iterable[pa.RecordBatch | pa.Table],
    columns: list[str],
    rule: RecordRule,
    *,
    origin: str,
    next_row: int,
    first_row: int,
    size: int,
) -> Iterator[Chunk]:
    """Yield the rows of consecutive `tables` from `next_row` on, in chunks of about `size` bytes.

    `columns` are the names of all columns of the source, and `origin` is the source's name.
    `first_row` is the number of the first table's first row in the source. The offset after a chunk
    (`Chunk.after`) is the number of the next row. Raises InputError if `columns` lack a column that
    `rule` requires.
    """
    if message := lacking(rule, columns):
        raise InputError(f"{origin}: {message}")
    # Number of the row after the tables that were read so far.
    end_row = first_row
    for table in tables:
        unread = table.slice(max(0, next_row - end_row))
        end_row += len(table)
        rows_in_chunk = max(1, len(unread) * size // max(unread.nbytes, 1))
        for start in range(0, len(unread), rows_in_chunk):
            piece = unread.slice(start, rows_in_chunk)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, piece.schema) as writer:
                writer.write(piece)
            first = end_row - len(unread) + start
            yield Chunk(
                "table",
                origin=f"{origin}, row ",
                first=first,
                payload=sink.getvalue().to_pybytes(),
                after={"at": first + len(piece)},
                columns=tuple(columns),
            )
