"""The files of a source: folders, links, patterns and kinds."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.records import TextTemplate
from packing.settings import DataSettings, files_of
from packing.sources import open_source, refuse_common_files
from packing.store import all_sources
from tests.packing.conftest import open_reader
from tests.packing.test_sources import texts_of, write_corpus


def write_files(folder: Path, *names: str) -> None:
    """Write files whose text is their name: text files, and JSONL files of one record."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name if path.suffix == ".txt" else json.dumps({"text": name}) + "\n")


def test_a_folder_is_read_in_order_without_hidden_files_and_packs(tmp_path: Path) -> None:
    write_files(tmp_path, "b.txt", "a/z.txt", ".hidden.txt", "packs/x.txt", "packs/packs.json")
    (tmp_path / "README.md").write_text("README.md")
    assert texts_of(tmp_path) == ["README.md", "a/z.txt", "b.txt"]


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


def test_a_pattern_matches_files_in_order(tmp_path: Path) -> None:
    write_files(tmp_path, "b.txt", "a/z.txt", "a/.hidden.txt", "c.pdf", "[x].txt")
    assert texts_of(tmp_path / "*.txt") == ["[x].txt", "b.txt"]
    assert texts_of(tmp_path / "**" / "*.txt") == ["[x].txt", "a/z.txt", "b.txt"]
    assert texts_of(tmp_path / "[x].txt") == ["[x].txt"]  # an existing path is no pattern
    assert texts_of(tmp_path / "[ab].*") == ["b.txt"]
    with pytest.raises(InputError, match=r"data.source: .*\.md: no such file.*no file matches"):
        open_reader(tmp_path / "*.md")


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
    pairs = (("a*.txt", "a1.txt"), ("a*.txt", "*1.txt"), ("", "b*.txt"), ("b*.txt", ""))
    for training, more in (*((a, {"source": b}) for a, b in pairs), ("saved", {"split": "train"})):
        with pytest.raises(InputError, match="is also used for training"):
            validate(training, **more)
