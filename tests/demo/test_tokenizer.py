"""The demo's tokenizer: exact on every text, the same for the same texts, and loadable by AutoTokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from demo.corpus import split_module, standard_library
from demo.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer

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
    save_tokenizer(tokenizer, folder, model_max_length=512)
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
    assert (loaded.eos_token_id, loaded.model_max_length, len(loaded)) == (0, 512, VOCAB_SIZE)


def test_saving_leaves_nothing_beside_the_folder(folder: Path):
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in folder.iterdir()}
