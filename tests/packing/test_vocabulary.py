"""Tokenizers that are learnt from a source: exact on every text, the same for the same texts, and loadable by AutoTokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from demo.corpus import split_module, standard_library
from packing.__main__ import main
from packing.vocabulary import END_OF_TEXT, save_tokenizer, train_tokenizer

VOCAB_SIZE = 600


def some_texts() -> list[str]:
    root = standard_library()
    modules = (split_module(name, (root / name).read_text(encoding="utf-8")) for name in ("textwrap.py", "heapq.py", "queue.py"))
    return [document.text for module in modules for document in module]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(some_texts(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tokenizer"
    save_tokenizer(tokenizer, folder)
    return folder


def test_the_vocabulary_has_the_asked_size_the_end_token_first_and_every_byte(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_text_like_the_corpus_takes_far_fewer_tokens_than_bytes(tokenizer: Tokenizer):
    text = some_texts()[0]
    assert len(tokenizer.encode(text).ids) < 0.5 * len(text.encode())


def test_the_same_texts_give_the_same_tokenizer(tokenizer: Tokenizer):
    assert train_tokenizer(some_texts(), VOCAB_SIZE).to_str() == tokenizer.to_str()


def test_autotokenizer_loads_the_folder_and_encodes_alike(tokenizer: Tokenizer, folder: Path):
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "def area(self): return a , b  # Σ"
    assert loaded(text, add_special_tokens=False).input_ids == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded.eos_token == loaded.pad_token == END_OF_TEXT
    assert (loaded.eos_token_id, len(loaded)) == (0, VOCAB_SIZE)


def test_saving_leaves_nothing_beside_the_folder(folder: Path):
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocabulary", "200"], "257 ids are bytes and special tokens"),
        (["--vocabulary", "300", "--special", END_OF_TEXT], "is there already"),
        (["--vocabulary", "300", "--out", "."], "exists already and is never written over"),
        (["--vocabulary", "5000000000"], "16,777,216 tokens are the most that can be learnt"),
        (["--vocabulary", "300", "--special", "\udcff"], "--special: text that is not UTF-8"),
        (["--vocabulary", "300", "--most-bytes", "0"], "argument --most-bytes: 0: a whole number of 1 or more is wanted"),
        (["--vocabulary", "300", "--out", "/dev/null/tokenizer"], "cannot be made: Not a directory; name another folder"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], message: str
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "words"}\n')
    assert main(["tokenizer", str(source), "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_beside_the_tokenizer_is_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, theirs, link = tmp_path / "texts.txt", tmp_path / "out.unfinished" / "notes.txt", tmp_path / "link"
    source.write_text("words")
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    link.symlink_to("nowhere")
    assert main(["tokenizer", str(source), "--vocabulary", "300", "--out", str(tmp_path / "out")]) == 2
    assert "notes.txt is not ours; move it away" in capsys.readouterr().err and theirs.read_text() == "theirs"
    assert main(["tokenizer", str(source), "--vocabulary", "300", "--out", str(link)]) == 2
    assert "exists already" in capsys.readouterr().err and not (tmp_path / "link.unfinished").exists()
