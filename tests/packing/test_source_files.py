"""The files of a source: folders, links, patterns, kinds, and splits in names."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.records import TextTemplate
from packing.settings import DataSettings, matching_files
from packing.sources import open_source
from packing.store import all_parts
from packing.tokenizer import load_tokenizer
from tests.packing.test_sources import open_reader, texts_of, write_corpus


def write_files(folder: Path, *names: str) -> None:
    """Write files whose text is their name: text files, and JSONL files of one record."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name if path.suffix == ".txt" else json.dumps({"text": name}) + "\n")


def test_a_folder_is_read_in_order_without_hidden_files_and_packs(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden.txt", "packs/x.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "packs" / "packs.json").write_text("{}")
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


def test_unknown_files_with_the_most_bytes_are_rejected(tmp_path: Path) -> None:
    write_corpus(tmp_path, "jsonl", ["x"])
    (tmp_path / "a.pdf").write_text("x" * 100)
    with pytest.raises(InputError, match=r"data.source: .*most of the bytes.*\*\*/\*\.txt"):
        open_reader(tmp_path)


def test_a_pattern_matches_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/.hidden.txt", "c.pdf", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
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
    assert matching_files(f"{folder}/{pattern}") == sorted(filter(Path.is_file, expected))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("source", ["", "**/*.txt", "*/*/*.txt"])
def test_a_folder_that_may_not_be_read_is_named(source: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        write_files(folder, "a/b.txt", "a/secret/c.txt")
        folder.chmod(0o755)
        (folder / "a" / "secret").chmod(0)
        os.seteuid(65534)
        try:
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


SPLITS = {
    "data/train-00000-of-00001.parquet": "train",
    "validation-00000-of-00002.parquet": "validation",
    "train/x.jsonl": "train",
    "my-dev_1.jsonl": "validation",
    "en/TEST.jsonl": "test",
    "test/x.jsonl": "test",
    "test data/x.jsonl": "test",
    "eval/train.jsonl": "train",
    "my_test_notes.txt": "test",
    "latest.jsonl": "train",
    "tests/x.jsonl": "train",
    "contest.jsonl": "train",
    "x.val.jsonl": "validation",
    "corpus.jsonl": "train",
    "data-00000-of-00003.jsonl": "train",
    "test/data-00000-of-00003.jsonl": "test",
    "en/my-test-00000-of-00003.jsonl": "test",
    "en/c4-train.00000-of-01024.jsonl": "train",
}


@pytest.mark.parametrize(("name", "split"), SPLITS.items())
def test_a_split_is_read_from_names_as_in_datasets(name: str, split: str, tmp_path: Path) -> None:
    others = {"train": "1.jsonl", "validation": "dev.jsonl", "test": "test.jsonl"}
    kind = Path(name).suffix
    others = {other: f"z/{path.replace('.jsonl', kind)}" for other, path in others.items()}
    for path in (name, *others.values()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    for choice, path in others.items():
        expected = {path, name} if choice == split else {path}
        source = open_reader(tmp_path, split=choice)
        if choice == "train" and kind == ".txt":
            continue
        assert {str(file.relative_to(tmp_path)) for file in source.paths} == expected


SYNONYMS = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
SYNONYMS |= dict.fromkeys(["valid", "dev", "val"], "validation")
# The last five words are no words for splits.
WORDS = ["train", "training", "validation", "valid", "dev", "val", "test", "testing", "eval"]
WORDS += ["evaluation", "latest", "tests", "contest", "trains", "devel"]


@given(
    st.tuples(
        st.sampled_from(["", "data/", "x/y/"]),
        st.sampled_from(["", "my", "c4", "9", "é"]),
        st.sampled_from(["", "-", "_", ".", " ", "+"]),
        st.sampled_from(WORDS),
        st.sampled_from(["", "-1", "_sft", ".0", " b", "+", "3", "-00000-of-00002"]),
        st.sampled_from(["", "/x", "/train"]),
    )
)
@settings(max_examples=15)
def test_words_for_splits_are_those_of_datasets(
    tmp_path_factory: pytest.TempPathFactory, parts: tuple[str, ...]
) -> None:
    from datasets.data_files import get_data_patterns  # slow to import

    name = f"{''.join(parts)}.jsonl"
    # Hidden files are not read. In `datasets`, any name before the number of a shard is a split.
    is_split = parts[3] in WORDS[:10] and not parts[1] + parts[2]
    assume("/." not in f"/{name}" and (is_split or "-of-" not in name))
    root = tmp_path_factory.mktemp("splits")
    write_files(root, name)
    try:
        split = str(next(iter(get_data_patterns(str(root)))))
    except ValueError:  # a name that cannot be a split, such as "my-test"
        return
    # In `datasets`, words in names of folders come before those in names of files.
    split = "train" if parts[-1] == "/train" else split
    # In `datasets`, the split of data/dev-00000-of-00002 is dev, and that of dev.jsonl validation.
    split = SYNONYMS.get(split, split)
    write_files(root, "z/train-0.jsonl", "z/test-0.jsonl")
    assert name in texts_of(root, split=split)


def test_a_folder_with_several_splits_reads_train(tmp_path: Path) -> None:
    splits = ("train", "train_1M", "test_sft")
    shards = [f"data/{split}-00000-of-00001.jsonl" for split in splits]
    write_files(tmp_path, *shards, "README.md")
    description = open_reader(tmp_path).description
    assert "\nfiles by split: 1 test_sft, 1 train, 1 train_1M; files read: 1" in description
    assert texts_of(tmp_path) == shards[:1]
    for split, shard in zip(splits, shards, strict=True):
        assert texts_of(tmp_path, split=split) == [shard]
        assert texts_of(tmp_path / shard) == [shard]
    # A pattern is read completely.
    assert len(texts_of(tmp_path / "**" / "*.jsonl")) == 3
    assert texts_of(tmp_path / "data" / "t*", split="test_sft") == [shards[2]]
    with pytest.raises(
        InputError, match=r"data.split: dev: .* no jsonl file .*: 1 test_sft, 1 tra"
    ):
        open_reader(tmp_path, split="dev")
    (tmp_path / shards[0]).unlink()
    with pytest.raises(InputError, match=r"data.split: train: .* 1 test_sft, 1 train_1M; set"):
        open_reader(tmp_path)


def test_a_folder_without_train_needs_a_split_if_it_has_several(tmp_path: Path) -> None:
    write_files(tmp_path, "test-0.jsonl", "test-1.jsonl")
    assert len(texts_of(tmp_path)) == 2
    write_files(tmp_path, "validation.jsonl")
    with pytest.raises(InputError, match=r"data.split: train: .* but: 2 test, 1 validation; set"):
        open_reader(tmp_path)
    assert texts_of(tmp_path, split="validation") == ["validation.jsonl"]


def test_only_texts_with_names_of_splits_are_divided(tmp_path: Path) -> None:
    write_files(tmp_path, "train.txt", "valid.txt", "test.txt")
    (tmp_path / "README.md").write_text("about")
    assert texts_of(tmp_path) == ["about", "train.txt"]
    write_files(tmp_path, "model/a.txt", "model/b.txt", "model/layers.txt")
    assert len(texts_of(tmp_path)) == 7
    assert (
        "files by split: 1 test, 5 train, 1 validation; files read: 7"
        in open_reader(tmp_path).description
    )
    assert texts_of(tmp_path, split="test") == ["test.txt"]
    (tmp_path / "train.txt").unlink()
    (tmp_path / "valid.txt").write_text("x" * 1000)
    assert len(texts_of(tmp_path)) == 6


def test_sources_and_validation_choose_their_splits(tmp_path: Path) -> None:
    write_files(
        tmp_path, "a/train.jsonl", "a/test.jsonl", "b/train.jsonl", "b/dev.jsonl", "c.jsonl"
    )

    def texts(**values: Any) -> list[list[str]]:
        settings = DataSettings(packs="p", tokenizer="t", **values)
        template = TextTemplate.parse("text")
        sources = [open_source(part, template) for part in all_parts(settings)]
        return [[str(path.relative_to(tmp_path)) for path in source.paths] for source in sources]

    a, b, c = (str(tmp_path / name) for name in ("a", "b", "c.jsonl"))
    assert texts(source=a, validation={"split": "test"}) == [["a/train.jsonl"], ["a/test.jsonl"]]
    assert texts(source=a, split="test", validation={"split": "train"}) == [
        ["a/test.jsonl"],
        ["a/train.jsonl"],
    ]
    sources = [{"source": source, "weight": 1} for source in (a, c)]
    assert texts(sources=sources, split="test") == [["a/test.jsonl"], ["c.jsonl"]]
    sources = [{"source": a, "weight": 1}, {"source": b, "weight": 1, "split": "validation"}]
    assert texts(sources=sources) == [["a/train.jsonl"], ["b/dev.jsonl"]]


@pytest.mark.parametrize("source", ["", "*"])
def test_no_file_is_trained_on_and_evaluated(source: str, tmp_path: Path) -> None:
    """Without `validation`, all of these files are read."""
    write_files(tmp_path, "a.txt", "b.txt", "test.txt")
    folder = os.path.join(tmp_path, source)

    def texts(**values: Any) -> list[list[str]]:
        settings = DataSettings(packs="p", tokenizer="t", **values)
        template = TextTemplate.parse("text")
        sources = [open_source(part, template) for part in all_parts(settings)]
        return [[path.name for path in source.paths] for source in sources]

    assert texts(source=folder) == [["a.txt", "b.txt", "test.txt"]]
    divided = [["a.txt", "b.txt"], ["test.txt"]]
    assert texts(source=folder, validation={"split": "test"}) == divided
    assert texts(source=folder, split="test", validation={"split": "train"}) == divided[::-1]
    same = {"source": f"{tmp_path}/../{tmp_path.name}/{source}", "split": "test"}
    mixture = {"source": folder, "weight": 1, "name": "x"}
    assert texts(sources=[mixture], validation=same) == divided
    assert (
        texts(sources=[mixture | {"split": "test"}], validation={"source": folder})
        == (divided[::-1])
    )


def test_validation_may_not_share_files_with_a_pattern(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b1.txt"):
        (tmp_path / name).write_text(name)

    def validate(training: str, validation: str) -> None:
        DataSettings(
            packs="p",
            tokenizer="t",
            source=str(tmp_path / training),
            validation={"source": str(tmp_path / validation)},
        )

    validate("a*.txt", "b*.txt")
    validate("a1.txt", "[b]1.txt")
    for pair in (("a*.txt", "a1.txt"), ("a*.txt", "*1.txt"), ("", "b*.txt"), ("b*.txt", "")):
        with pytest.raises(ValueError, match="is also used for training"):
            validate(*pair)


def test_splits_of_the_same_files_need_the_same_pattern(tmp_path: Path) -> None:
    """With another pattern, training would read the files of all splits."""
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}')

    def validate(pattern: str) -> None:
        validation = {"source": f"{tmp_path}/{pattern}", "split": "test"}
        source = f"{tmp_path}/*.jsonl"
        DataSettings(packs="p", tokenizer="t", source=source, validation=validation)

    validate("*.jsonl")
    with pytest.raises(ValueError, match="is also used for training"):
        validate("t*.jsonl")


def test_a_similar_name_is_suggested_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_text").mkdir()
    (tmp_path / "my_text" / "corpus.jsonl").touch()
    (tmp_path / "t.csv").touch()
    for wrong, right in (
        ("my_txt", "my_text"),
        ("my_text/corpus.josnl", "my_text/corpus.jsonl"),
        ("My_Text", "my_text"),
        ("t.cvs", "t.csv"),
    ):
        with pytest.raises(InputError, match=f"data.source: {wrong}: .*did you mean {right}\\?"):
            open_reader(wrong)
    for name in ("my_txt@main", "other", "my_text/corpus"):
        assert open_reader(name).kind == "dataset"
    with pytest.raises(InputError, match=r"data.tokenizer: my_txt: .*did you mean my_text\?"):
        load_tokenizer("my_txt")
