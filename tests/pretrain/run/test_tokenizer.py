"""A new model takes its vocabulary and special tokens from the tokenizer of its data.

An exported folder encodes text as the packs do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from foundation.errors import InputError
from packing.records import CHATML, PLAIN
from packing.settings import DataSettings
from packing.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.model.configuration import load_config
from pretrain.run.data import open_data
from pretrain.run.tokenizer import (
    encoded_prompt,
    end_of_answers,
    load_tokenizer,
    tokenizer_in,
    tokens_of,
)
from pretrain.settings.recipe import ModelSettings

DEMO = {"name": "demo", "fingerprint": "f", "vocab_size": 4096}
DEMO |= {"bos_id": None, "eos_id": 0, "pad_id": 0}


def completed_config(tokenizer: dict, **config: object) -> dict:
    return tokens_of(tokenizer, config, LlamaConfig())


@given(st.integers(1, 200_000))
def test_the_vocabulary_rounds_up_to_a_multiple_of_128(size: int) -> None:
    vocabulary = completed_config(DEMO | {"vocab_size": size})["vocab_size"]
    assert vocabulary % 128 == 0 and size <= vocabulary < size + 128


def test_special_tokens_of_a_recipe_may_be_null_or_a_list_but_not_other_tokens() -> None:
    assert completed_config(DEMO, pad_token_id=None)["pad_token_id"] is None
    assert completed_config(DEMO, eos_token_id=[0, 7])["eos_token_id"] == [0, 7]
    for key in ("eos_token_id", "pad_token_id"):
        with pytest.raises(InputError, match=f"model.config.{key}: 7`"):
            completed_config(DEMO, **{key: 7})


@pytest.mark.parametrize("kind", ["glm", "llama"])
@pytest.mark.parametrize("special", [{}, {"eos_id": 7}])
def test_a_token_that_the_tokenizer_lacks_is_accepted(kind: str, special: dict) -> None:
    """The class of glm has a default for EOS."""
    absent = {"name": "t", "vocab_size": 4096, "bos_id": None, "eos_id": None, "pad_id": None}
    default = load_config(ModelSettings(config={"model_type": kind}))
    values = tokens_of(absent | special, {"model_type": kind}, default)
    loaded = load_config(ModelSettings(config=values))
    if special:
        assert (loaded.eos_token_id, loaded.bos_token_id) == (7, None)


def test_a_model_without_a_vocabulary_at_the_top_gets_no_key_of_it() -> None:
    """A configuration of text and images has the vocabulary in `text_config`."""
    given = {"model_type": "llava", "text_config": {"vocab_size": 640}}
    default = load_config(ModelSettings(config={"model_type": "llava"}))
    values = tokens_of(DEMO, given, default)
    assert "vocab_size" not in values and values["text_config"] == {"vocab_size": 640}
    load_config(ModelSettings(config=values))


def test_a_new_model_has_the_tokenizer_of_its_source_if_packs_have_none(
    words: Path, small_packs: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(words, tmp_path / "source")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    packs = DataSettings(packs=small_packs, length=32)
    data = open_data(packs, is_main_process=True)
    tokenizer = load_tokenizer(packs, ModelSettings(source=str(folder), from_scratch=True), data)
    assert tokenizer is not None and tokenizer.eos_token == "w60"


# ── Exported folders ──────────────────────────────────────────────────────────────────────────

TEXTS = ["Hello world 12345", "  Hello", "a </s> b", "a<|endoftext|> b", "caf\u00e9 cafe\u0301\n\n"]


def byte_level(folder: Path) -> None:
    """Write a byte-level BPE that keeps runs of digits together."""
    tokenizer = train_tokenizer(["Hello world 12345 the quick 12345 brown fox, Hello"] * 5, 320)
    save_tokenizer(tokenizer, folder)


def sentencepiece(folder: Path) -> None:
    """Write a tokenizer like that of Llama 2, with U+2581 for blanks and before every text."""
    fallback = (f"<0x{byte:02X}>" for byte in range(256))
    pieces = ["<unk>", "<s>", "</s>", *fallback, *"\u2581Helo wrd", "ll"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bpe = models.BPE(vocabulary, [("l", "l")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(blanks)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    special = [AddedToken(token, normalized=False, special=True) for token in pieces[:3]]
    tokenizer.add_special_tokens(special)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def load_for(folder: Path, kind: str, **config: Any) -> PreTrainedTokenizerBase:
    """Load a run's tokenizer for a model of `kind`.

    `config` replaces values in tokenizer_config.json.
    """
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    load_text_tokenizer.cache_clear()
    settings = DataSettings(packs=folder / "packs", length=32, tokenizer=str(folder))
    return load_tokenizer(settings, ModelSettings(config={"model_type": kind}))


BASES = ("Qwen2", "Llama", "GPT2", "Gemma", "T5")
CLASSES = [*(f"{name}Tokenizer" for name in BASES), "LlamaTokenizerFast"]


@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("write", [byte_level, sentencepiece])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_exported_folder_encodes_as_packs_do(
    kind: str, write: Any, tokenizer_class: str, tmp_path: Path
) -> None:
    write(tmp_path / "given")
    auto_map = {"AutoTokenizer": ["code.OfTheRepository", None]}
    special = {"pad_token": "<pad>", "auto_map": auto_map}  # tokenizer.json lacks this token
    run_tokenizer = load_for(tmp_path / "given", kind, tokenizer_class=tokenizer_class, **special)
    config = load_config(ModelSettings(config={"model_type": kind}))
    config.save_pretrained(tmp_path / "final")
    run_tokenizer.save_pretrained(tmp_path / "final")
    packs, final = (load_text_tokenizer(str(tmp_path / name)) for name in ("given", "final"))
    exported = AutoTokenizer.from_pretrained(tmp_path / "final")
    for text in TEXTS:
        ids = packs.tokenizer.encode(text, add_special_tokens=False).ids
        assert exported.encode(text, add_special_tokens=False) == ids
        assert encoded_prompt(run_tokenizer, text, config)["input_ids"].tolist() == [ids]
    assert final.describe() | {"name": ""} == packs.describe() | {"name": ""}
    assert exported.eos_token == run_tokenizer.eos_token
    assert exported.chat_template == run_tokenizer.chat_template


@pytest.mark.parametrize(
    ("write", "kind", "config"),
    [
        (byte_level, "qwen2", {}),
        (sentencepiece, "qwen2", {}),
        (byte_level, "qwen3", {"additional_special_tokens": ["Hello"]}),
        (byte_level, "qwen3", {"split_special_tokens": True}),
    ],
)
def test_a_folder_that_would_encode_differently_is_rejected(
    write: Any, kind: str, config: dict, tmp_path: Path
) -> None:
    """AutoTokenizer ignores the folder and loads Qwen2Tokenizer for qwen2.

    A tokenizer that is saved as the message says is accepted.
    """
    write(tmp_path / "given")
    with pytest.raises(InputError, match=r"AutoTokenizer .* differently; .*save_pretrained\(NEW\)"):
        load_for(tmp_path / "given", kind, **config)
    if write is byte_level and not config:
        saved = transformers.Qwen2Tokenizer.from_pretrained(tmp_path / "given")
        saved.save_pretrained(tmp_path / "new")
        assert load_for(tmp_path / "new", "qwen2").encode("Hello")


# The end of an answer has no loss.
WITHOUT_LOSS = (
    "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}"
    "{% endgeneration %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (PLAIN, END_OF_TEXT),
        # The token before the answer is not its end.
        ("{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}", None),
        (WITHOUT_LOSS, None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_an_answer_ends_with_a_special_token_of_the_template(
    template: str, end: str | None, tmp_path: Path
) -> None:
    tokens = ("<|im_start|>", "<|im_end|>")
    save_tokenizer(train_tokenizer(["So, yes."], 300, tokens), tmp_path / "chats")
    tokenizer = tokenizer_in(str(tmp_path / "chats"))
    tokenizer.chat_template = template
    assert end_of_answers(tokenizer) == (end and tokenizer.convert_tokens_to_ids(end))
