"""A real tokenizer and real documents that are small enough for tests."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packing.arrow import Pack, Packs
from packing.prepare import prepare
from packing.records import TextTemplate
from packing.settings import DataSettings
from packing.sources import open_source
from packing.store import open_packs
from packing.tokenizer import save_tokenizer, train_tokenizer


class PacksInMemory(Packs):
    path = Path("packs/in_memory")
    fingerprint = "0" * 64
    tokenizer = None

    def __init__(self, packs: Sequence[Pack]) -> None:
        self.packs = packs
        self.length = len(packs[0].input_ids)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Pack:
        return self.packs[index]


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Return sources of the standard library of very different lengths, and three edge cases."""
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


def packed(
    folder: Path, tokenizer: Path, records: list[dict], **more: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prepare records in `folder`. Return the ids of every document and its mask of trained ids."""
    folder.mkdir(exist_ok=True)
    source = folder / "x.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"source": str(source), "tokenizer": str(tokenizer), "length": 1024} | more
    settings = DataSettings(packs=folder / "packs", **options)
    prepare(settings, progress=False)
    documents = []
    for pack in open_packs(settings, "train"):
        trained = np.ones(1024, bool) if pack.trained is None else pack.trained
        ends = np.cumsum(pack.lengths)
        for start, end in zip(ends - pack.lengths, ends, strict=True):
            documents.append((pack.input_ids[start:end], trained[start:end]))
    return documents


def open_reader(source: Path | str, **more: Any) -> Any:
    settings = DataSettings(packs="packs", tokenizer="t", source=str(source), **more)
    return open_source(settings, TextTemplate.parse(settings.text))
