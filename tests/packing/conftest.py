"""A real tokenizer and real documents that are small enough for tests."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from packing.settings import DataSettings
from packing.tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Return sources of the standard library of very different lengths, and three edge cases.

    The edge cases are other scripts, control characters, and a single letter.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))[:60]]
    return [text[:5_000] for text in texts if text.strip()] + [
        "Selamat pagi, 世界 🌏",
        "naïve\r\ncafé\t\n",
        "x",
    ]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """Return a byte-level BPE with 600 ids, trained on the first documents.

    It decodes any text exactly.
    """
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    save_tokenizer(train_tokenizer(documents[:10], 600), folder)
    return folder / "tokenizer.json"


@pytest.fixture
def corpus(tmp_path: Path, documents: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def settings(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> DataSettings:
    return DataSettings(
        source=str(corpus), tokenizer=str(tokenizer_file), packs=tmp_path / "packs", length=256
    )
