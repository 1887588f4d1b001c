"""Tokenizers trained on a source are exact, reproducible, and loadable by AutoTokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from foundation.errors import InputError
from packing.tokenizer import END_OF_TEXT, find_file, load_tokenizer, train_tokenizer
from pretrain.__main__ import main

VOCABULARY = 600
TEXT = "def area(self): return a , b  # Σ"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


@given(st.text())
def test_any_text_is_decoded_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_training_is_reproducible_and_autotokenizer_loads_the_result(
    tokenizer: Tokenizer, tokenizer_file: Path, documents: list[str]
) -> None:
    assert train_tokenizer(documents[:10], VOCABULARY).to_str() == tokenizer.to_str()
    assert len(tokenizer.encode(documents[0]).ids) < 0.5 * len(documents[0].encode())
    loaded = AutoTokenizer.from_pretrained(tokenizer_file.parent)
    assert loaded(TEXT, add_special_tokens=False).input_ids == tokenizer.encode(TEXT).ids
    assert loaded.eos_token == loaded.pad_token == END_OF_TEXT
    assert (loaded.eos_token_id, len(loaded)) == (0, VOCABULARY)


def test_the_message_about_old_files_converts_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    old = tmp_path / "old"
    old.mkdir()
    tokenizer.model.save(str(old))
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    message = rf"AutoTokenizer\.from_pretrained\('{old}'\)\.save_pretrained\(FOLDER\)"
    for name in (old, old / "vocab.json"):
        with pytest.raises(InputError, match=message):
            load_tokenizer(str(name))
    AutoTokenizer.from_pretrained(old).save_pretrained(tmp_path / "new")
    new = load_tokenizer(str(tmp_path / "new")).tokenizer
    assert new.encode(TEXT).ids == tokenizer.encode(TEXT).ids


ADDED = {"__type": "AddedToken", "content": "<|stop|>", "lstrip": False, "normalized": False}
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, END_OF_TEXT),
        # The file of GPT-2.
        ({CONFIG: {"model_max_length": 1024}}, END_OF_TEXT),
        ({CONFIG: {"eos_token": ADDED, "bos_token": None}}, "<|stop|>"),
        ({CONFIG: {"pad_token": "<|stop|>"}, MAP: {"eos_token": ADDED}}, "<|stop|>"),
        ({CONFIG: {"eos_token": END_OF_TEXT}, MAP: {"eos_token": "<|stop|>"}}, END_OF_TEXT),
        ({MAP: {"eos_token": "<|stop|>"}}, "<|stop|>"),
        ({CONFIG: {"eos_token": None}, MAP: {"eos_token": "<|stop|>"}}, None),
    ],
)
def test_the_files_of_a_tokenizer_name_its_eos_token(
    files: dict[str, dict], eos: str | None, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    more = Tokenizer.from_str(tokenizer.to_str())
    more.add_special_tokens(["<|stop|>"])
    more.save(str(tmp_path / "tokenizer.json"))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    loaded = load_tokenizer(str(tmp_path))
    expected = {} if eos is None else {"eos": more.token_to_id(eos)}
    assert {role: number for role, number in loaded.special.items() if role == "eos"} == expected


def test_a_special_token_that_is_no_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for token in (7, ["</s>", "<|stop|>"], {"text": "</s>"}):
        (tmp_path / CONFIG).write_text(json.dumps({"pad_token": token}))
        with pytest.raises(InputError, match=r"`pad_token` is not the text of a token: .*fetch"):
            load_tokenizer(str(tmp_path))


def test_an_eos_token_that_the_tokenizer_lacks_is_named(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot|>"}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"json lacks <\|eot\|>; .*save_pretrained\(FOLDER\)"):
        load_tokenizer(str(folder)).end_of_text  # noqa: B018
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "new")
    assert load_tokenizer(str(tmp_path / "new")).end_of_text == VOCABULARY


def test_a_tokenizer_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "words"}\n')
    command = ["tokenizer", str(source), "--vocabulary", "300", "--special", "<|x|>", "--out"]
    for out in (".", "texts.jsonl"):
        assert main([*command, str(tmp_path / out)]) == 2
        assert "--out" in capsys.readouterr().err
    assert source.read_text() == '{"text": "words"}\n' and not (tmp_path / "new").exists()
    assert main([*command, str(tmp_path / "new")]) == 0
    assert "too few different words for 300 tokens" in capsys.readouterr().out
    assert Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json")).token_to_id("<|x|>") == 1


def test_a_tokenizer_is_trained_on_the_words_of_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "words"}, {"role": "assistant", "content": "answers"}]
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": chat}))
    vocabularies = []
    for out, settings in (("a", []), ("b", ["data.messages=messages"])):
        options = ["--out", str(tmp_path / out), "--vocabulary", "290"]
        assert main(["tokenizer", str(source), *settings, *options]) == 0
        vocabularies.append(load_tokenizer(str(tmp_path / out)).tokenizer.get_vocab())
    assert vocabularies[0] == vocabularies[1]
    assert {"words", "answers"} <= vocabularies[0].keys()


def test_a_downloaded_tokenizer_of_the_hub_is_used_without_a_network(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--somebody--tokens"
    snapshot = cached / "snapshots" / ("0" * 40)
    shutil.copytree(tokenizer_file.parent, snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expected = load_tokenizer(str(tokenizer_file)).fingerprint
    for name in ("somebody/tokens", "somebody/tokens@main", f"somebody/tokens@{'0' * 40}"):
        assert load_tokenizer(name).fingerprint == expected
    assert find_file("somebody/tokens", "chat_template.jinja") is None
    with pytest.raises(InputError, match=r"nobody/tokens cannot be loaded from the hub: .*; set"):
        load_tokenizer("nobody/tokens")
