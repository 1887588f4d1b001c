"""A text of any length has the tokens of the whole text, and needs little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from foundation.errors import InputError
from packing import encoding
from packing.chunks import Chunk, tokenize
from packing.encoding import encode_in_windows
from packing.records import UNTRAINED, record_rule
from packing.settings import DataSettings
from packing.tokenizer import TextTokenizer, train_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
WORDS = "the quick brown fox's def self.x() 12345 naïve cafe\u0301 世界 日本 नमस्ते 😀 ß İ ﬁ"
PIECES = [
    *WORDS.split(),
    *(" ", "  ", "      ", "\n", "\n\n", "\r\n", "\t", "a", "123", "''", "==", "!!!", "Σ", "▁"),
    *("\u0301", "\u200b", "\u00a0", "\u3000", "\x07"),
    *("<|end|>", "<mask>", "[R]", "def"),
    *("x" * 40, "0" * 40, " " * 40, "\n" * 40, "世" * 40, "Hello, world. " * 20),
]
texts = st.builds(
    lambda pieces, times: "".join(pieces * times),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=300),
    st.integers(1, 40),
).map(lambda text: text[:4000])


def trained(
    model: Any, trainer: Any, pre: Any = None, normalizer: Any = None, **more: Any
) -> Tokenizer:
    """Return a tokenizer that is trained on `WORDS`, with added tokens of all kinds.

    `more` replaces parts of the trained tokenizer, as in tokenizer.json.
    """
    tokenizer = Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([WORDS, WORDS.replace(" ", "\n"), WORDS * 2], trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, normalized=False),
            AddedToken("[R]", rstrip=True, normalized=True),
            AddedToken("def", single_word=True, normalized=True),
        ]
    )
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | more))


def byte_level(regex: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make(name: str) -> Tokenizer:
    """Return a small tokenizer with the parts of a well-known one."""
    bytes_trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    unk: dict[str, Any] = {"special_tokens": ["<unk>"], "show_progress": False}
    bpe = trainers.BpeTrainer(vocab_size=150, **unk)
    pieces = trainers.UnigramTrainer(vocab_size=100, unk_token="<unk>", **unk)
    words = trainers.WordPieceTrainer(vocab_size=150, **unk)
    sequence = normalizers.Sequence
    metaspace = pre_tokenizers.Metaspace
    fused: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True}
    llama2 = sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    split = pre_tokenizers.Split
    blanks = normalizers.Replace(Regex(" {2,}"), " ")
    # The merges of llama2 and gemma cross words, because no pre-tokenizer divides a text.
    parts: dict[str, tuple] = {
        "gpt2": (models.BPE(), bytes_trainer, pre_tokenizers.ByteLevel()),
        "llama3": (models.BPE(ignore_merges=True), bytes_trainer, byte_level(LLAMA3)),
        "qwen": (models.BPE(), bytes_trainer, byte_level(QWEN), normalizers.NFC()),
        "mistral": (models.BPE(**fused), bpe, metaspace(prepend_scheme="first")),
        "llama2": (
            models.BPE(**fused, byte_fallback=True),
            bpe,
            split(Regex(r"\S+ \S+|\s+"), "isolated"),
            llama2,
        ),
        "gemma": (
            models.BPE(unk_token="<unk>"),
            bpe,
            split(" ", "merged_with_previous"),
            normalizers.Replace(" ", "▁"),
        ),
        "t5": (
            models.Unigram(),
            pieces,
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace()]),
            sequence([normalizers.NFKC(), blanks]),
        ),
        "albert": (
            models.Unigram(),
            pieces,
            metaspace(prepend_scheme="always"),
            sequence([normalizers.Strip(), normalizers.NFKD(), normalizers.StripAccents()]),
        ),
        "bert": (
            models.WordPiece(unk_token="<unk>"),
            words,
            pre_tokenizers.BertPreTokenizer(),
            normalizers.BertNormalizer(),
        ),
        "words": (models.WordPiece(unk_token="<unk>"), words, pre_tokenizers.Whitespace()),
    }
    return trained(*parts[name], **({"pre_tokenizer": None} if name == "llama2" else {}))


NAMES = ("gpt2", "llama3", "qwen", "mistral", "llama2", "gemma", "t5", "albert", "bert", "words")


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode texts of more than 2,048 characters in windows of 512."""
    monkeypatch.setattr(encoding, "WINDOW", 512)


@pytest.mark.parametrize("name", NAMES)
def test_windows_have_the_tokens_of_the_whole_text(
    name: str, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary text is always encoded. Other text may have a run that cannot be cut."""
    tokenizer = make(name)

    def parts_of(text: str) -> int:
        expected = tokenizer.encode(text, add_special_tokens=False)
        parts = list(encode_in_windows(tokenizer, text))
        assert np.concatenate([part.ids for part in parts]).tolist() == expected.ids
        offsets = np.concatenate([part.offsets for part in parts])
        assert list(map(tuple, offsets.tolist())) == expected.offsets
        return len(parts)

    @given(texts)
    @settings(max_examples=40, deadline=None)
    def check(text: str) -> None:
        try:
            parts_of(text)
        except ValueError as error:
            # A word or a run of characters is longer than the overlap of 64 characters.
            assert "cannot be encoded in parts" in str(error)

    monkeypatch.setattr(encoding, "WINDOW", 2048)
    more = "naïve cafe\u0301 世界 😀 <|end|>\r\n" * 9
    assert parts_of("\n".join([*documents[:2], more, documents[3]])) > 4
    monkeypatch.setattr(encoding, "WINDOW", 512)
    check()


def read(tokenizer: Tokenizer, record: dict[str, str], **more: Any) -> np.ndarray:
    """Return the tokens that a worker reads from a file with a short record and `record`."""
    chosen = DataSettings(source="x", tokenizer="t", packs="p", **more)
    text_tokenizer = TextTokenizer("t", tokenizer, {"eos": 0})
    short = {name: "x" for name in record}
    lines = f"{json.dumps(short)}\n{json.dumps(record)}\n".encode()
    chunk = Chunk("jsonl", "x.jsonl:", 1, lines, {})
    result = tokenize(chunk, text_tokenizer, record_rule(chosen, text_tokenizer))
    return result.tokens[result.lengths[0] :]


@pytest.mark.usefixtures("small_windows")
def test_a_long_text_and_chat_have_the_tokens_of_the_whole_text(
    tokenizer_file: Path, documents: list[str]
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    text = "\n".join(WORDS * n for n in range(1, 9))
    assert len(text) > 2048
    assert read(tokenizer, {"text": text}).tolist() == [*tokenizer.encode(text).ids, 0]
    chat = read(tokenizer, {"p": text, "r": text}, messages=["{p}", "r"], chat_template="plain")
    prompt = f"User:\n{text}\n\nAssistant:\n"
    expected = tokenizer.encode(f"{prompt}{text}<|endoftext|>")
    assert (chat & ~UNTRAINED).tolist() == expected.ids
    is_answer = [end > len(prompt) for _, end in expected.offsets]
    assert (chat < UNTRAINED).tolist() == is_answer


@pytest.mark.usefixtures("small_windows")
def test_a_long_text_that_cannot_be_cut_is_named() -> None:
    message = r"jsonl:1 or one of the next .* 3,000 characters .*'xxx.* near character 512; divide"
    with pytest.raises(InputError, match=message):
        read(make("bert"), {"text": "x" * 3000})


def test_a_long_text_needs_little_memory(
    tokenizer_file: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "WINDOW", 2**13)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    text = "\n".join(documents)[:400_000]

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    # Reset the peak of the resident memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    tokens = sum(len(part.ids) for part in encode_in_windows(tokenizer, text))
    assert tokens > len(text) / 5
    # The library needs 150 bytes for each byte of a text.
    assert memory("VmHWM") - before < 20 * len(text)


def test_a_tokenizer_trained_on_one_text_is_that_of_the_library(documents: list[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    text = "\n".join(documents)[:250_000]
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(
        [text], 400, 0, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained = train_tokenizer([text], 400)
    assert trained.to_str() == library.to_str()
