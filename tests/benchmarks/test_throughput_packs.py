"""Packs to measure speed on: the same from the same seed, with documents and tokens like a text's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.throughput_packs import write, zipf
from packing.arrow import Packs
from packing.settings import DataSettings
from packing.store import open_packs


def packs_at(folder: Path, length: int = 4096, vocabulary: int = 151_936, count: int = 64) -> Packs:
    write(folder, length, vocabulary, count)
    return open_packs(DataSettings(packs=folder, length=length), "train")


def test_the_same_packs_are_made_everywhere(tmp_path: Path):
    once, again = (packs_at(tmp_path / name, 256, 512, 8) for name in ("once", "again"))
    assert once.fingerprint == again.fingerprint


def test_documents_and_tokens_are_like_an_encyclopaedias(tmp_path: Path):
    packs = packs_at(tmp_path / "packs")
    lengths = [packs[index].lengths.astype(np.int64) for index in range(len(packs))]
    assert all(each.sum() == 4096 for each in lengths), "packs are full"
    assert 160 < 8 * np.mean([len(each) for each in lengths]) < 200, "in 32,768 tokens"
    assert 420 < np.mean([np.square(each).sum() / 4096 for each in lengths]) < 620
    tokens = np.concatenate([packs[index].input_ids for index in range(len(packs))])
    assert tokens.max() < 150_000
    counts = np.sort(np.bincount(tokens))[::-1]
    cumulative, identity = zipf(151_936, np.random.default_rng(0))
    assert np.array_equal(np.sort(identity), np.arange(150_000))
    assert abs(counts[:100].sum() / counts.sum() - cumulative[99]) < 0.01
