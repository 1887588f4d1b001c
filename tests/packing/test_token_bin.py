"""Flat token files against what was written to them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.other_formats import TokenBin
from packing.settings import DataSettings
from packing.store import open_packs


def write(path: Path, tokens: object, dtype: str = "uint16") -> Path:
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9), st.sampled_from(["uint16", "uint32"]))
def test_packs_are_the_files_tokens_in_order_cut_into_documents_at_the_end_token(tmp_path_factory, tokens, length, dtype):
    folder = tmp_path_factory.mktemp("bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype}))
    packs = TokenBin(write(folder / "train.bin", tokens, dtype), length, end_token=5)
    read, documents = [], []
    for index in np.random.default_rng(0).permutation(len(packs)).tolist():
        pack = packs[index]
        assert pack.input_ids.shape == (length,) and pack.input_ids.dtype == np.uint32 and pack.first_position == 0
        assert pack.lengths.min() >= 1
        real = pack.input_ids[: pack.lengths.sum()].tolist()
        read.append((index, real))
        ends = np.cumsum(pack.lengths)
        documents += [real[end - n : end] for end, n in zip(ends, pack.lengths, strict=True)]
    assert [token for _, real in sorted(read) for token in real] == tokens
    assert all(5 not in document[:-1] for document in documents)
    assert len(documents) >= tokens.count(5)


def test_a_folder_gives_train_and_val_and_a_file_gives_itself(tmp_path):
    write(tmp_path / "train.bin", range(64))
    write(tmp_path / "val.bin", range(16))
    settings = DataSettings(packs=tmp_path, length=8, held_out=0.5)
    assert (len(open_packs(settings, "train")), len(open_packs(settings, "held_out"))) == (8, 2)
    settings = DataSettings(packs=tmp_path / "val.bin", length=8)
    assert (len(open_packs(settings, "train")), open_packs(settings, "held_out")) == (2, None)


@pytest.mark.parametrize("vocab_size", [50_257, 2**16, 2**16 + 1])
def test_the_vocabulary_of_meta_tells_the_dtype(tmp_path, vocab_size):
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": vocab_size}))
    dtype, tokens = "uint16" if vocab_size <= 2**16 else "uint32", [0, vocab_size - 1, 1]
    packs = TokenBin(write(tmp_path / "train.bin", tokens, dtype), 3)
    assert packs[0].input_ids.tolist() == tokens and packs.tokenizer == {"vocab_size": vocab_size}


def test_uint32_tokens_without_meta_are_not_read_as_uint16(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 151_936, 1000)
    path = write(tmp_path / "train.bin", tokens, "uint32")
    with pytest.raises(InputError, match=r"looks like uint32 .*meta\.json"):
        TokenBin(path, 10)
    (tmp_path / "meta.json").write_text('{"dtype": "uint32"}')
    assert TokenBin(path, 10)[3].input_ids.tolist() == tokens[30:40].tolist()


def test_the_fingerprint_changes_with_everything_that_changes_the_packs(tmp_path):
    path = write(tmp_path / "train.bin", range(64))
    prints = [TokenBin(path, 8).fingerprint, TokenBin(path, 16).fingerprint, TokenBin(path, 8, end_token=3).fingerprint]
    assert TokenBin(path, 8).fingerprint == prints[0]
    write(path, [*range(63), 5])
    assert len({*prints, TokenBin(path, 8).fingerprint}) == 4
