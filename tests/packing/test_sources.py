from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing import chunks, sources
from packing.chunks import Texts, TextTemplate, read_chunk
from packing.settings import DataSettings
from packing.sources import open_source
from tests.pretrain.compare.made_runs import make_run


def read(source: str | Path, **settings: object) -> Texts:
    """Everything that the source at `source` holds."""
    options = DataSettings(packs=Path("unused"), source=str(source), tokenizer="unused", **settings)
    together = Texts()
    for chunk in open_source(options).chunks():
        texts = read_chunk(chunk, TextTemplate.parse(options.text), options.on_bad_line == "skip")
        together.documents += texts.documents
        together.skipped += texts.skipped
        together.empty += texts.empty
        together.first_skipped = together.first_skipped or texts.first_skipped
    return together


def as_lines(documents: list[str], **more: object) -> bytes:
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in documents).encode()


@pytest.fixture(params=[chunks.CHUNK_BYTES, 3000], ids=["one chunk", "many chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sources, "CHUNK_BYTES", request.param)
    return request.param


def write_as(kind: str, documents: list[str], folder: Path) -> Path:
    path = folder / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_bytes(as_lines(documents))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(as_lines(documents[:20])) + gzip.compress(as_lines(documents[20:])))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(as_lines(documents[:20])) + zstandard.compress(as_lines(documents[20:])))
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in documents], indent=1))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(len(documents)), "text": documents}), path, row_group_size=17)
    elif kind == "dataset":
        datasets.Dataset.from_dict({"text": documents}).save_to_disk(path)
    else:
        path.mkdir()
        for number, text in enumerate(documents):
            (path / f"{number:04}.txt").write_bytes(text.encode())
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet", "dataset", "folder of text"])
def test_every_format_yields_the_same_documents(kind: str, documents: list[str], tmp_path: Path, chunk_bytes: int) -> None:
    assert read(write_as(kind, documents, tmp_path)).documents == documents


def test_a_streamed_dataset_yields_what_the_loaded_one_does(
    documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write_as("jsonl", documents, tmp_path / "data")
    options = {"format": "dataset"}
    assert read(tmp_path / "data", **options, streaming=True).documents == documents
    assert read(tmp_path / "data", **options).documents == documents


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a.jsonl", "b/10.jsonl.gz", ".hidden.jsonl", ".git/x.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = as_lines([name])
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read(tmp_path).documents == ["a.jsonl", "b/10.jsonl.gz", "b/2.jsonl"]


def test_a_folder_may_hold_the_packs_that_are_made_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for name in ("packs", "packs.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    options = DataSettings(packs=tmp_path / "packs", source=str(tmp_path), tokenizer="unused")
    assert open_source(options).paths == [tmp_path / "a.txt"]


def test_a_run_that_lies_in_a_folder_of_text_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (final := make_run(tmp_path / "runs" / "mine") / "final").mkdir()
    (final / "merges.txt").write_text("o n")
    (tmp_path / "runs" / "recipe.yaml").unlink()
    assert read(tmp_path).documents == ["one"]


def test_a_folder_of_source_code_gives_a_document_for_each_file(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import this\n")
    (tmp_path / "m.so").write_bytes(b"\x7fELF\xff")
    (tmp_path / "z.rst").write_text("\ufeffText\n", encoding="utf-8")
    assert read(tmp_path).documents == ["import this\n", "Text\n"]
    with pytest.raises(InputError, match=r"m\.so: not UTF-8 text"):
        read(tmp_path, format="text")
    assert read(tmp_path, format="text", on_bad_line="skip").skipped == 1


def test_a_folder_of_two_kinds_asks_which_is_meant(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "data.json").write_bytes(as_lines(["a"]))
    with pytest.raises(InputError, match=r"1 json files and 1 text files; set its `format`"):
        read(tmp_path)
    assert read(tmp_path, format="jsonl").documents == ["a"]
    (tmp_path / "data.jsonl").write_bytes(as_lines(["b"]))
    with pytest.raises(InputError, match="1 jsonl files and 1 json files; put each kind into its own folder"):
        read(tmp_path, format="jsonl")


def test_a_template_sets_columns_into_text(tmp_path: Path) -> None:
    rows = [{"title": "One", "body": "text", "n": 1}, {"title": None, "body": "x", "n": 2}, {"title": None, "body": None, "n": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        texts = read(tmp_path / name, text="{title}\n\n{body}")
        assert (texts.documents, texts.empty) == (["One\n\ntext", "\n\nx"], 1)
        assert read(tmp_path / name, text="{{{n}}}").documents == ["{1}", "{2}", "{3}"]


@pytest.mark.parametrize("value", [["a", "b"], {"a": 1}, b"a", []], ids=str)
def test_what_a_template_could_write_only_as_python_does_is_refused(value: object, tmp_path: Path) -> None:
    pq.write_table(pa.table({"title": ["One", "Two"], "choices": [value, None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"a\.parquet, row 0: column `choices` holds {type(value).__name__}, which a template"):
        read(tmp_path / "a.parquet", text="{title} {choices}")
    texts = read(tmp_path / "a.parquet", text="{title} {choices}", on_bad_line="skip")
    assert (texts.documents, texts.skipped) == (["Two "], 1)


@pytest.mark.parametrize("template", ["{", "{}", "{a!r}", "{a:>3}", "{{}}"])
def test_a_template_that_cannot_be_filled_is_refused(template: str) -> None:
    with pytest.raises(InputError, match=r"data\.text"):
        TextTemplate.parse(template)


BAD_LINES = {
    '{"text": "cut': "the line is not valid JSON: Unterminated string starting at character 10; each line is to be one whole",
    "[1, 2]": "an object",
    '{"text": 3}': "holds int, not text",
    '{"other": "x"}': "no column `text`; the columns are: other",
    '{"text": "\\ud800"}': "surrogate",
    f'{{"text": "a", "n": {"9" * 5000}}}': "not JSON that can be read",
    "[" * 100_000: "not JSON that can be read",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_malformed_line_is_named_or_skipped_and_counted(line: str, tmp_path: Path, chunk_bytes: int) -> None:
    good = as_lines(["a"]) * 500 + b"\n"
    (tmp_path / "c.jsonl").write_bytes(good + line.encode() + b"\n" + as_lines(["b"]))
    with pytest.raises(InputError, match=rf"c\.jsonl:502: .*{re.escape(BAD_LINES[line])}"):
        read(tmp_path / "c.jsonl")
    texts = read(tmp_path / "c.jsonl", on_bad_line="skip")
    assert (len(texts.documents), texts.skipped) == (501, 1)
    assert "c.jsonl:502" in texts.first_skipped


def test_a_line_that_is_not_utf8_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(InputError, match=r"c\.jsonl:1: not UTF-8"):
        read(tmp_path / "c.jsonl")


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_an_absent_column_is_named_with_those_there_are(kind: str, documents: list[str], tmp_path: Path) -> None:
    path = write_as(kind, documents, tmp_path)
    with pytest.raises(InputError, match=r"no column `body`; the columns are: .*text"):
        read(path, text="body")


def test_a_column_of_numbers_is_no_text(tmp_path: Path, documents: list[str]) -> None:
    with pytest.raises(InputError, match=r"column `id` holds int64, not text; .* Set data\.text to one of text, or write"):
        read(write_as("parquet", documents, tmp_path), text="id")


def test_a_named_column_that_a_table_has_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([["a"], [1], [2]], names=["text", "id", "id"])
    pq.write_table(table, tmp_path / "twice.parquet")
    assert read(tmp_path / "twice.parquet").documents == ["a"]
    for text in ("id", "{id} {text}"):
        with pytest.raises(InputError, match=r"twice\.parquet: column `id` is there 2 times; write it once"):
            read(tmp_path / "twice.parquet", text=text)


def test_an_absent_split_is_named_with_those_there_are(tmp_path: Path) -> None:
    datasets.DatasetDict({"a": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match=r"no split `train`; it has: a"):
        read(tmp_path / "d")
    assert read(tmp_path / "d", split="a").documents == ["x"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_truncated_file_is_an_error_and_no_shorter_corpus(kind: str, documents: list[str], tmp_path: Path) -> None:
    path = write_as(kind, documents, tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=rf"corpus\.{re.escape(kind)}: cannot be read"):
        read(path)


def test_what_is_not_there_or_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(InputError, match="no file to read"):
        read(tmp_path)
    for name, says in (
        ("a.dat", "suffix does not tell its format; set its `format`"),
        ("val.bin", "set `data.packs` to the folder"),
    ):
        (tmp_path / name).write_bytes(b"1")
        with pytest.raises(InputError, match=says):
            read(tmp_path / name)
    (tmp_path / "train.bin").write_bytes(b"1")
    with pytest.raises(InputError, match=r"set `data\.packs` to the folder"):
        read(tmp_path)
    for name, target in (("dead", "nothing"), ("circle", "circle")):  # not a dataset of the hub that is called so
        (tmp_path / name).symlink_to(target)
        with pytest.raises(InputError, match="is a dead link"):
            read(tmp_path / name)


@pytest.mark.parametrize("setting", [{"split": "validation"}, {"subset": "ms"}, {"streaming": True}, {"text": "body"}])
def test_a_setting_that_files_do_not_have_is_refused(setting: dict, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match=rf"data\.{next(iter(setting))}: .* is read as text"):
        read(tmp_path, **setting)


def test_a_setting_that_a_saved_dataset_does_not_have_is_refused(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"text": ["x", "y", "z"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([2])}).save_to_disk(tmp_path / "splits")
    both = [{"subset": "en"}, {"revision": "v2"}]
    for name, settings in (("one", [*both, {"split": "test"}, {"split": "train[:2]"}]), ("splits", both)):
        for setting in settings:
            wanted = rf"data\.{next(iter(setting))}: .*{name} is read as a saved dataset: it was saved without any; leave it out"
            with pytest.raises(InputError, match=wanted):
                read(tmp_path / name, **setting)
    assert read(tmp_path / "one", streaming=True).documents == ["x", "y", "z"]
    assert read(tmp_path / "splits", split="test").documents == ["z"]


LINE_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(texts=st.lists(LINE_TEXT), size=st.integers(1, 50), end=st.sampled_from([b"", b"\n", b"\r\n", b"\n\n"]))
def test_lines_survive_any_way_of_cutting_into_chunks(tmp_path_factory, texts: list[str], size: int, end: bytes) -> None:
    path = tmp_path_factory.mktemp("cut") / "c.jsonl"
    path.write_bytes(as_lines(texts).removesuffix(b"\n") + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", size)
        assert read(path).documents == texts
