"""Sources of all formats yield the same documents, from any saved place, of the right files."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.chunks import read_chunk
from packing.prepare import check_sources
from packing.records import UNTRAINED, TextTemplate, TokenColumns
from packing.settings import DataSettings, files_of
from packing.sources import open_source, refuse_common_files
from packing.store import all_sources
from packing.token_columns import TOKEN_COLUMNS
from tests.packing.conftest import open_reader


def texts_of(
    source: Path | str, size: int | None = None, begin: dict | None = None, **more: Any
) -> list[str]:
    """Return the texts of a source from the place `begin` on, read in chunks of `size` bytes."""
    reader = open_reader(source, **more)
    chunks = [read_chunk(chunk, reader.rule)[0] for chunk in reader.chunks(begin or {}, size)]
    return [text for documents in chunks for text in documents]


def write_files(folder: Path, *names: str) -> None:
    """Write files whose text is their name: text files, and JSONL files of one record."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = name
        if path.suffix not in (".txt", ".md"):
            content = json.dumps({"text": name}) + "\n"
        path.write_text(content)


def write_corpus(folder: Path, kind: str, documents: list[str]) -> Path:
    path = folder / f"corpus.{kind}"
    lines = "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in documents).encode()
    table = pa.table({"id": [7] * len(documents), "text": documents})
    if kind.startswith("jsonl"):
        compress = {
            "jsonl": bytes,
            "jsonl.gz": gzip.compress,
            "jsonl.zst": partial(pa.compress, codec="zstd", asbytes=True),
        }[kind]
        path.write_bytes(compress(lines))
    elif kind == "json":
        path.write_text(json.dumps(table.to_pylist(), indent=1, ensure_ascii=False))
    elif kind.startswith(("csv", "tsv")):
        rows = io.StringIO()
        writer = csv.writer(rows, delimiter="\t" if kind == "tsv" else ",")
        writer.writerows([["id", "text"], *([7, text] for text in documents)])
        compress = gzip.compress if kind.endswith(".gz") else bytes
        path.write_bytes(compress(rows.getvalue().encode()))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    elif kind == "dataset":
        import datasets  # slow to import

        datasets.Dataset(table).save_to_disk(path)
    else:
        path.mkdir()
        for number, text in enumerate(documents):
            (path / f"{number:04}.txt").write_bytes(text.encode())
    return path


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "csv.gz", "tsv", "parquet", "dataset"]


@pytest.mark.parametrize("kind", [*KINDS, "text files"])
def test_every_format_yields_the_same_documents_from_any_place(
    kind: str, documents: list[str], tmp_path: Path
) -> None:
    path = write_corpus(tmp_path, kind, documents)
    before = 0
    assert texts_of(path) == texts_of(path, 3000) == documents
    source = open_reader(path)
    for chunk in source.chunks({}, size=60_000):
        before += len(read_chunk(chunk, source.rule)[0])
        place = json.loads(json.dumps(chunk.after))
        assert texts_of(path, 20_000, place) == documents[before:]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_every_format_reads_columns_beside_ids_and_names_the_rest(
    kind: str, tmp_path: Path
) -> None:
    row = {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "id": 7}
    rows = [row | {"labels": [-100, 6, 7, -100]}] * 3
    path = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        import datasets  # slow to import

        datasets.Dataset.from_list(rows).save_to_disk(path)
    rule = TokenColumns(("input_ids",), TOKEN_COLUMNS, 600)
    settings = DataSettings(packs="packs", tokenizer="t", source=str(path), input_ids="input_ids")
    for chunk in open_source(settings, rule).chunks({}):
        filled, counts = read_chunk(chunk, rule)
        for documents in filled:
            assert [ids.tolist() for ids in documents] == [[5 | UNTRAINED, 6, 7]]
        assert len(filled) == 3 and counts.unread == ("id",)


def test_a_streamed_dataset_yields_the_same_documents(documents: list[str], tmp_path: Path) -> None:
    import datasets  # slow to import

    write_corpus(tmp_path, "parquet", documents)
    source = open_reader("parquet", streaming=True)
    source._data = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", streaming=True
    )
    chunks = list(source.chunks({}, size=20_000))
    assert [text for c in chunks for text in read_chunk(c, source.rule)[0]] == documents


# Names of files, their content, settings, and the texts.
READ: list[tuple[str, str, dict[str, str], list[str]]] = [
    ("x.json", json.dumps([{"text": "one"}, {"text": "zwei, ü"}]), {}, ["one", "zwei, ü"]),
    ("x.json", '\ufeff[\n{"text": "a"},\r\n {"text": "b"}\n]\n', {}, ["a", "b"]),
    ("x.json", '[{"text": "a"},\n{"text": "\u2028b\\n"}]', {}, ["a", "\u2028b\n"]),
    ("x.json", '\ufeff[{"text": "a"}, {"text": "b"}]', {}, ["a", "b"]),
    ("x.json", "[\n]", {}, []),
    ("x.csv", '\ufefftext,n\n007,1\n1.0,"a, ""b""\n"\n,\n', {}, ["007", "1.0"]),
    ("x.csv", 'text,n\n007,1\n1.0,"a"\n,\n', {"text": "{text}|{n}"}, ["007|1", "1.0|a"]),
]


@pytest.mark.parametrize(("name", "content", "settings", "texts"), READ)
def test_files_of_other_forms_are_read(
    name: str, content: str, settings: dict[str, str], texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert texts_of(tmp_path / name, **settings) == texts
    if name == "x.csv":
        assert texts_of(tmp_path / name, begin={"file": 0, "at": 1}, **settings) == texts[1:]


def another_encoding(encoding: str, text: str) -> bytes:
    """Return a JSON line in an encoding. A byte order mark of the text comes first."""
    mark = "\ufeff" if "\ufeff" in text else ""
    return f'{mark}{{"text": "{text.strip(mark)}"}}\n'.encode(encoding)


ENCODINGS = [
    ("utf-16-le", "\ufeffcaf\xe9", "not UTF-8.*iconv -f utf16 -t utf8"),
    ("utf-16-be", "\ufeffcafe", "not UTF-8.*iconv -f utf16 -t utf8"),
    ("utf-32-le", "\ufeffcafe", "not UTF-8.*convert the file"),
    ("utf-32-be", "\ufeffcafe", "not UTF-8.*convert the file"),
    ("utf-16-le", "cafe", "NUL characters, as UTF-16 and UTF-32 have; convert the file to UTF-8"),
    ("utf-32-be", "cafe", "NUL characters, as UTF-16 and UTF-32 have; convert the file to UTF-8"),
    ("latin-1", "caf\xe9", "not UTF-8.*convert the file to UTF-8"),
    ("shift-jis", "\u4e16\u754c", "not UTF-8.*convert the file to UTF-8"),
]
CONTENTS = {
    # A fixed time, because all workers must collect the same names of tests.
    "gzip": gzip.compress(b'{"text": "a"}\n', mtime=0),
    "zstd": pa.compress(b'{"text": "a"}\n', codec="zstd", asbytes=True),
    "xz": lzma.compress(b'{"text": "a"}\n'),
    "zip": b"PK\x03\x04\x14\x00",
    "Arrow": b"ARROW1\0\0",
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
FILES = ("x.jsonl", "x.json", "x.parquet", "x.csv", "x.txt")
BAD_LINES = [
    '{"text": "a"',
    "[1]",
    '{"texts": "a"}',
    '{"text": "\\ud800"}',
    '{"text": ["a"]}',
    '{"text": "\xff"}',
    '{"text": "a", "n": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"text": "a", "n": ' + '{"n": ' * 990 + "0" + "}" * 991,
]
ROWS = [{"text": f"line\n[{n}]", "l": [[n]]} for n in range(9)]
BAD_ROWS = [*ROWS, {"body": "x"}, *ROWS]
TWO = [{"text": "one"}, {"text": "zwei"}]
LONG = b"text\n" + b"a\n" * 99_999
LATIN1 = r"x\.csv: .*UTF-8.*`iconv -f latin1 -t utf8`"

# Names of files, their content, and words of the message.
Unreadable = list[tuple[str, bytes, str]]


def in_other_encodings() -> Unreadable:
    files = []
    for encoding, text, message in ENCODINGS:
        content = another_encoding(encoding, text)
        message_of_csv = "UTF-8: convert it.*iconv -f utf16"
        if "NUL" in message:
            message_of_csv = "no column `text`"
        files += [
            ("x.txt", content, message),
            ("x.jsonl", content, message),
            ("x.csv", content, message_of_csv),
        ]
    return files


def between_good_lines(line: str) -> bytes:
    return b'{"text": "good"}\n' + line.encode("latin-1") + b'\n{"text": "too"}\n'


UNREADABLE: Unreadable = [
    *in_other_encodings(),
    *(("x.jsonl", between_good_lines(line), "x.jsonl:2[:,] ") for line in BAD_LINES),
    *(
        (name, POINTER, rf"{name}: this is a Git LFS pointer; .*git lfs pull")
        for name in (*FILES, "x.txt.gz")
    ),
    *((name, content, name) for name in FILES for content in CONTENTS.values()),
    *(("x.txt.zst", content, "x.txt.zst") for kind, content in CONTENTS.items() if kind != "zstd"),
    ("x.jsonl", b'{"text": "one"}\n' + bytes(3), r":2: has NUL characters.*remove the zeros"),
    ("x.xlsx", b"text\na\n", "data.source: .*JSONL, JSON arrays, Parquet, CSV"),
    ("x.jsonl", b'{"title": "x", "body": "y"}', r"title, body\. Set data\.text to a"),
    ("x.jsonl", json.dumps(TWO, indent=1).encode(), r"x\.jsonl:1: .*jq -c"),
    ("x.jsonl", json.dumps(TWO).encode(), r"x\.jsonl:1: .*write each record on one line"),
    ("x.json", json.dumps(BAD_ROWS, indent=4).encode(), r"x\.json.*, record 9: no column `text`"),
    ("x.json", b'[\n{"text": "a"},\n{"text"', r"x\.json"),
    ("x.jsonl", b'[{"text": "a"}]\n[{"text": "b"},\n', r"x\.json"),
    ("x.csv", b"body\na\n", r"x\.csv: no column `text`; the columns are: body"),
    ("x.csv", b"text\ncaf\xe9\n", LATIN1),
    ("x.csv", LONG + b"caf\xe9\n", LATIN1),
    ("x.csv", b"\n", r"x\.csv: cannot be read: .*Empty CSV file"),
    ("x.csv", b"id,text\n1,a\n2\n", r"x\.csv: .*Row #3: Expected 2 columns, got 1: 2"),
    ("x.tsv", b"id\ttext\n1\ta\n\n2\tb\tc\n", r"x\.tsv: .*Row #3: Expected 2 columns, got 3: 2"),
]


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Set Python's default, because torch.compile raises the limit of a process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("usual_recursion_limit")
@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE, ids=lambda v: str(v)[:30])
def test_a_file_that_cannot_be_read_is_named_with_a_remedy(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts_of(tmp_path / name)


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_truncated_file_or_missing_column_is_named(
    kind: str, documents: list[str], tmp_path: Path
) -> None:
    path = write_corpus(tmp_path, kind, documents)
    with pytest.raises(InputError, match=r"id, text\. Set data\.text to a"):
        texts_of(path, text="body")
    content = path.read_bytes()
    for damaged in (content[:-20], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=str(path)):
            texts_of(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet", "text files"])
def test_names_of_files_may_have_any_bytes(kind: str, tmp_path: Path) -> None:
    path = write_corpus(tmp_path, kind, ["one", "two"])
    renamed = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9" + path.suffix.encode()))
    if kind == "jsonl.gz":
        renamed = renamed.with_suffix(".jsonl.gz")
    path.rename(renamed)
    assert texts_of(renamed) == ["one", "two"]


def test_a_text_file_ignores_columns_of_the_data_section(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    (tmp_path / "x.jsonl").write_text('{"story": "so"}\n')
    write_files(tmp_path, "texts/x.txt")
    paths = {"packs": tmp_path / "packs", "tokenizer": str(tokenizer_file)}
    training = {"source": str(tmp_path / "x.jsonl"), "text": "story"}
    validation = {"source": str(tmp_path / "texts")}
    check_sources(DataSettings(**paths, **training, validation=validation))
    with pytest.raises(InputError, match=r"data.text: .* is read as text, which has no such"):
        check_sources(DataSettings(**paths, **training, validation=validation | {"text": "title"}))


@given(
    st.lists(st.tuples(st.text(), st.text('",;\t\r\n\ufeff \\a')), min_size=1),
    st.sampled_from(["csv", "tsv", "csv.gz"]),
    st.integers(1, 60),
)
def test_rows_of_csv_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], kind: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"x.{kind}"
    content = io.StringIO()
    writer = csv.writer(content, delimiter="\t" if kind == "tsv" else ",")
    writer.writerows([("text", "b"), *rows])
    compress = gzip.compress if kind.endswith(".gz") else bytes
    path.write_bytes(compress(content.getvalue().encode()))
    reader = open_reader(path, text="{text}<|{b}")
    chunks = list(reader.chunks({}, size=size))
    texts = [read_chunk(chunk, reader.rule)[0] for chunk in chunks]
    expected = [f"{text}<|{b}" for text, b in rows if text or b]
    assert [text for chunk_texts in texts for text in chunk_texts] == expected


@given(
    st.lists(st.text().filter(bool)), st.integers(1, 60), st.sampled_from([b"\n", b"\r\n", b"\n\n"])
)
def test_lines_are_complete_for_any_size_of_chunks(
    tmp_path_factory, texts: list[str], size: int, end: bytes
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + end for text in texts))
    assert texts_of(path, size) == texts


# ── Files of a source ─────────────────────────────────────────────────────────────────────────────


def test_a_folder_or_pattern_is_read_in_order_without_hidden_files_and_packs(
    tmp_path: Path,
) -> None:
    write_files(tmp_path, "b.txt", "a/z.txt", ".hidden.txt", "[x].txt")
    write_files(tmp_path, "packs/x.txt", "packs/packs.json", "README.md")
    assert texts_of(tmp_path) == ["README.md", "[x].txt", "a/z.txt", "b.txt"]
    assert texts_of(tmp_path / "[x].txt") == ["[x].txt"], "an existing path is no pattern"
    with pytest.raises(InputError, match=r"data.source: .*\.rs: no such file.*no file matches"):
        open_reader(tmp_path / "*.rs")


def test_files_of_the_kind_with_the_most_bytes_are_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about this data set")
    (tmp_path / "a.csv").write_text("text\nb\n")
    assert open_reader(tmp_path).description.endswith("\nfiles not read: 1 .csv")
    for name in ("b.csv", "a.tsv"):
        (tmp_path / name).write_text("text\n" + f"{name}\n" * 4)
    assert texts_of(tmp_path) == ["b", *["a.tsv"] * 4, *["b.csv"] * 4]
    write_corpus(tmp_path, "jsonl", ["x" * 100])
    assert texts_of(tmp_path) == ["x" * 100]
    assert open_reader(tmp_path).description.endswith("files not read: 2 .csv, 1 .md, 1 .tsv")
    (tmp_path / "README.md").write_text("x" * 1000)
    with pytest.raises(InputError, match=r"data.source: .*smaller JSONL or Parquet files"):
        open_reader(tmp_path)
    (tmp_path / "a.pdf").write_text("x" * 9000)
    with pytest.raises(InputError, match=r"data.source: .*most of the bytes.*\*\*/\*\.txt"):
        open_reader(tmp_path)


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    write_files(tmp_path, "far/more/x.txt", "corpus/a.txt", "corpus/m/y.txt", "corpus/m/n/z.txt")
    corpus = tmp_path / "corpus"
    for link, target in (
        ("l", "../far"),  # a folder elsewhere
        ("b", "m"),  # a folder beside its link
        ("m/n/up", "../.."),  # a cycle
        ("m/self", "self"),
        ("more", "../far/more"),  # a folder that is also reached through `l`
    ):
        (corpus / link).symlink_to(target)
    (corpus / "m" / "self").unlink()
    expected = ["corpus/a.txt", "far/more/x.txt", "corpus/m/y.txt", "corpus/m/n/z.txt"]
    for source in (corpus, corpus / "**" / "*.txt", corpus / "**", corpus / "**" / "**" / "*.t*"):
        assert sorted(texts_of(source)) == sorted(expected)
    assert sorted(texts_of(corpus / "*" / "*.txt")) == ["corpus/m/y.txt", "far/more/x.txt"]
    assert texts_of(tmp_path / "*" / "m*" / "[y]*") == ["corpus/m/y.txt"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "a/c", "a/c/d", "."]), st.sampled_from(["x.txt", ".y.txt"])
        ),
        min_size=1,
    ),
    st.sampled_from(["*.txt", "**/*.txt", "*/*.txt", "a/**/x.txt", "**/c/*", "a/**", "[ab]/?.txt"]),
)
def test_a_pattern_without_links_matches_as_in_glob(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, str]], pattern: str
) -> None:
    folder = tmp_path_factory.mktemp("pattern")
    write_files(folder, *(f"{parent}/{name}" for parent, name in files))
    expected = [Path(path) for path in glob.glob(f"{folder}/{pattern}", recursive=True)]
    assert files_of(f"{folder}/{pattern}") == sorted(filter(Path.is_file, expected))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_folder_that_may_not_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        write_files(folder, "a/b.txt", "a/secret/c.txt")
        folder.chmod(0o755)
        (folder / "a" / "secret").chmod(0)
        os.seteuid(65534)
        try:
            for source in ("", "**/*.txt", "*/*/*.txt"):
                with pytest.raises(InputError, match=f"Permission denied: '{folder}/a/secret'"):
                    texts_of(folder / source)
        finally:
            os.seteuid(0)


def test_a_link_to_a_missing_file_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, "a.txt")
    (tmp_path / "notes.zip").symlink_to("gone")  # is not read anyway
    assert open_reader(tmp_path).description.endswith("files not read: 1 .zip")
    (tmp_path / "b.txt").symlink_to("gone")
    for source in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(InputError, match=r"No such file or directory: '.*/b.txt'; .*link"):
            texts_of(source)
    (tmp_path / "self.txt").symlink_to("self.txt")
    with pytest.raises(InputError, match=r"/self.txt: cannot be read: Too many levels"):
        texts_of(tmp_path / "self.txt")


def test_patterns_choose_the_files_of_splits(tmp_path: Path) -> None:
    write_files(tmp_path, "train-0.jsonl", "train-1.jsonl", "test-0.jsonl")

    def names(**values: Any) -> list[list[str]]:
        settings = DataSettings(packs="p", tokenizer="t", **values)
        refuse_common_files(settings)
        template = TextTemplate.parse("text")
        sources = [open_source(part, template) for part in all_sources(settings)]
        return [[path.name for path in source.paths] for source in sources]

    train, test = (f"{tmp_path}/{split}*" for split in ("train", "test"))
    assert len(names(source=f"{tmp_path}/**")[0]) == 3
    with pytest.raises(InputError, match=r"several splits \(test, train\).*train\*'"):
        names(source=str(tmp_path))
    expected = [["train-0.jsonl", "train-1.jsonl"], ["test-0.jsonl"]]
    assert names(source=train, validation={"source": test}) == expected
    mixture = {"source": train, "weight": 1, "name": "x"}
    assert names(sources=[mixture], validation={"source": test}) == expected
    for more in ({"split": "test"}, {"validation": {"split": "test"}}):
        with pytest.raises(InputError, match=r"data.split: .* as jsonl.*by a pattern as data.so"):
            names(source=train, **more)


def test_validation_may_not_share_files_with_training(tmp_path: Path) -> None:
    write_files(tmp_path, "a1.txt", "a2.txt", "b1.txt")
    write_files(tmp_path / "saved", "dataset_dict.json", "train/data.txt", "test/data.txt")

    def validate(training: str, **validation: str) -> None:
        if "source" in validation:
            validation["source"] = str(tmp_path / validation["source"])
        source = str(tmp_path / training)
        settings = DataSettings(packs="p", tokenizer="t", source=source, validation=validation)
        refuse_common_files(settings)

    validate("a*.txt", source="b*.txt")
    validate("a1.txt", source="[b]1.txt")
    validate("saved", split="test")
    validate("saved", source="saved/test")
    validate("saved", source="saved", subset="de", split="train")
    pairs = (("a*.txt", "a1.txt"), ("a*.txt", "*1.txt"), ("", "b*.txt"), ("b*.txt", ""))
    for training, more in (*((a, {"source": b}) for a, b in pairs), ("saved", {"split": "train"})):
        with pytest.raises(InputError, match="is also used for training"):
            validate(training, **more)
