"""A real tokenizer and real documents, small enough for a test."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Sources of the standard library, of very different lengths, and a few lines that are not ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))[:60]]
    return [text[:20_000] for text in texts if text.strip()] + ["Selamat pagi, 世界 🌏", "naïve\r\ncafé\t\n", "x"]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """A byte-level BPE with 600 ids, trained on the first documents; it gives any text back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents[:10], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
