"""Packs of token files that datatrove has written (tests/data/datatrove/README.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from foundation.errors import InputError
from packing.arrow import Packs
from packing.order import MixedPacks
from packing.settings import DataSettings
from packing.store import open_packs
from packing.token_bin import DatatrovePacks
from tests.conftest import ROOT

DATA = ROOT / "tests" / "data" / "datatrove"
EOS = 0
# Longer than each file, so that a pack has all documents of one file.
LONG = 64


def open_folder(folder: Path, length: int = LONG, tokenizer: Path | None = None) -> Packs:
    name = str(tokenizer) if tokenizer else None
    return open_packs(DataSettings(packs=folder, length=length, tokenizer=name), "train")


def documents_in(packs: Packs) -> list[list[list[int]]]:
    """Return the token ids of the documents in each pack."""
    documents = []
    for index in range(len(packs)):
        pack = packs[index]
        parts = np.split(pack.input_ids[: pack.lengths.sum()], np.cumsum(pack.lengths)[:-1])
        documents.append([part.tolist() for part in parts])
    return documents


@pytest.fixture(scope="module")
def encoded() -> list[list[list[int]]]:
    """Token ids of the documents of each task, encoded with tokenizers directly."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    tasks = [path.read_text().splitlines() for path in sorted(DATA.glob("text/*.jsonl"))]
    texts = [[json.loads(line)["text"] for line in lines] for lines in tasks]
    # datatrove drops empty texts.
    return [[[*tokenizer.encode(text).ids, EOS] for text in task if text] for task in texts]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Function that copies a folder of the fixtures."""
    return lambda name: shutil.copytree(DATA / name, tmp_path / name)


def test_each_task_has_its_documents_in_the_order_of_the_files(encoded) -> None:
    packs = open_folder(DATA / "two_tasks")
    assert [sorted(task) for task in documents_in(packs)] == [sorted(task) for task in encoded]
    # The tasks have shuffled their documents.
    assert documents_in(packs) != encoded
    one = open_folder(DATA / "two_tasks" / "00001_00000_doc_shuffled.ds")
    assert documents_in(one) == documents_in(packs)[1:]
    (merged,) = documents_in(open_folder(DATA / "merged", 128))
    assert sorted(merged) == sorted(encoded[0] + encoded[1])


@pytest.mark.parametrize("length", [1, 7, 16, 63])
def test_packs_are_consecutive_windows_of_each_file(length: int) -> None:
    packs = open_folder(DATA / "two_tasks", length)
    windows = [[*chain(*documents)] for documents in documents_in(packs)]
    expected = []
    for documents in documents_in(open_folder(DATA / "two_tasks")):
        tokens = [*chain(*documents)]
        expected += [tokens[start : start + length] for start in range(0, len(tokens), length)]
    assert windows == expected
    # A document ends at its EOS or at the end of a pack.
    for documents in documents_in(packs):
        assert all(document.index(EOS) == len(document) - 1 for document in documents[:-1])


def test_the_recorded_tokenizer_is_used_if_it_is_here(copied, monkeypatch) -> None:
    monkeypatch.chdir(DATA)
    assert open_folder(DATA / "two_tasks").tokenizer["eos_id"] == EOS
    # Its fingerprint is compared with the tokenizers of other sources and of the model.
    parts = {"a": open_folder(DATA / "two_tasks"), "b": open_folder(DATA / "wide")}
    with pytest.raises(InputError, match="made with different tokenizers"):
        MixedPacks(DATA, parts, {"a": 0.5, "b": 0.5})


def test_documents_without_eos_of_4_bytes_and_an_empty_task() -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(70_000)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = ["w1 w69999 w3", "w65536 w2"]
    packs = open_folder(DATA / "wide")
    assert documents_in(packs) == [[tokenizer.encode(text).ids] for text in texts]
    assert packs.tokenizer["name"] == "/tmp/datatrove_words.json"


def test_chunks_are_read_where_datatrove_has_cut_documents() -> None:
    for documents in documents_in(open_folder(DATA / "chunks")):
        ends = np.cumsum([len(document) for document in documents])
        for document, end in zip(documents, ends, strict=True):
            assert document[-1] == EOS or end % 8 == 0


def test_the_tokenizer_is_compared_by_name_or_content(copied, tmp_path: Path) -> None:
    folder = copied("two_tasks")
    # Another name of the same tokenizer.
    same = shutil.copy(DATA / "tokenizer.json", tmp_path / "same.json")
    for metadata in folder.glob("*.metadata"):
        metadata.write_text(metadata.read_text().replace("./tokenizer.json", str(same)))
    packs = open_folder(folder, tokenizer=DATA / "tokenizer.json")
    assert packs.tokenizer["vocab_size"] == 257 and packs.tokenizer["eos_id"] == EOS
    # The files do not depend on the name.
    assert packs.fingerprint == open_folder(DATA / "two_tasks").fingerprint
    other = Tokenizer.from_file(str(same))
    other.add_tokens(["more"])
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(InputError, match=r"metadata has the tokenizer .*same.json instead of .*ff"):
        open_folder(folder, tokenizer=tmp_path / "other.json")
    metadata = folder / "00001_00000_doc_shuffled.ds.metadata"
    metadata.write_text(metadata.read_text().replace("same", "other"))
    with pytest.raises(InputError, match=r"00001_00000_doc_shuffled.ds: .*other.json instead of"):
        open_folder(folder)


def damage(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / f"00000_00000_doc_shuffled.ds{suffix}"
        path.write_bytes(change(path.read_bytes()))

    return apply


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda folder: (folder / f"00000_00000_doc_shuffled.ds{suffix}").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage("", lambda data: data[:-2]), "has 61 tokens, its metadata has 62"),
        (damage("", lambda data: data[:-1]), "buffer size must be a multiple"),
        (damage("", lambda data: b""), "has 0 tokens, its metadata has 62"),
        (damage(".index", lambda data: data[:-8]), "must ascend, ends at"),
        (damage(".index", lambda data: data[:-1]), "buffer size must be a multiple"),
        (damage(".index", lambda data: b"\xff" * 8 + data[8:]), "must ascend, ends at 62"),
        (damage(".index", lambda data: data[8:16] + data[:8] + data[16:]), "ends at 62"),
        (damage(".index", lambda data: data[:-8] + b"\x7f" + data[-7:]), "ascend, ends at 127"),
        (damage(".metadata", lambda data: data.replace(b"62", b"63")), "metadata has 63"),
        (damage(".metadata", lambda data: data.replace(b"|2", b"|4")), "has 31 tokens"),
        (damage(".metadata", lambda data: data.replace(b"|2", b"|3")), "KeyError: '3'"),
        (damage(".metadata", lambda data: b"tokenizer.json"), "not enough values to unpack"),
        (damage(".metadata", lambda data: b"\xff\xfe"), "codec can't decode"),
        (remove(".metadata"), "No such file"),
        (remove(".index"), "No such file"),
    ],
)
def test_a_damaged_file_is_named(change: Callable[[Path], None], message: str, copied) -> None:
    folder = copied("two_tasks")
    change(folder)
    with pytest.raises(InputError, match=f"00000_00000_doc_shuffled.ds: the file .*{message}"):
        open_folder(folder)


def test_masks_and_a_folder_without_tokens_are_refused(copied) -> None:
    with pytest.raises(InputError, match=r"00000_unshuffled.ds: .* without a loss are not supp"):
        open_folder(DATA / "masked")
    folder = copied("wide")
    for path in folder.glob("0000[01]*"):
        path.unlink()
    with pytest.raises(InputError, match=r"wide: its .ds files have no tokens"):
        open_folder(folder)


def test_the_fingerprint_depends_on_the_content(copied, monkeypatch) -> None:
    folder = copied("two_tasks")
    before = open_folder(folder)
    assert before.fingerprint != open_folder(folder, 32).fingerprint
    path = folder / "00000_00000_doc_shuffled.ds"
    path.write_bytes(b"\1\0" + path.read_bytes()[2:])
    assert open_folder(folder).fingerprint != before.fingerprint
    # The tokens of a large dataset are not read at the start.
    monkeypatch.setattr("packing.token_bin.ALWAYS_HASHED_BYTES", 100)
    large = open_folder(folder).fingerprint
    path.write_bytes(b"\2\0" + path.read_bytes()[2:])
    assert open_folder(folder).fingerprint == large


def test_held_out_files_are_beside_the_training_files(tmp_path: Path, encoded) -> None:
    shutil.copytree(DATA / "two_tasks", tmp_path / "packs" / "train")
    shutil.copytree(DATA / "merged", tmp_path / "packs" / "validation")
    settings = DataSettings(packs=tmp_path / "packs", length=128)
    assert len(documents_in(open_packs(settings, "train"))) == 2
    (held_out,) = documents_in(open_packs(settings, "held_out"))
    assert sorted(held_out) == sorted(encoded[0] + encoded[1])


def test_many_files_stay_closed(tmp_path: Path) -> None:
    for number in range(300):
        for path in (DATA / "two_tasks").glob("00000*"):
            name = path.name.replace("00000_", f"{number:05d}_", 1)
            (tmp_path / name).hardlink_to(path)
    before = len([*Path("/proc/self/fd").iterdir()])
    packs = DatatrovePacks(sorted(tmp_path.glob("*.ds")), tmp_path, LONG, None)
    assert len(packs) == 300 and packs[299].lengths.sum() == 62
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 10
