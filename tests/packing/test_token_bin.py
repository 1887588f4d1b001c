"""Packs of flat token files hold the tokens that were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.settings import DataSettings
from packing.store import open_packs
from packing.token_bin import TokenBin
from packing.tokenizer import save_tokenizer, train_tokenizer


def write(path: Path, tokens: object, dtype: str = "uint16") -> Path:
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9))
def test_packs_hold_the_tokens_cut_at_the_end_token(tmp_path_factory, tokens, length):
    folder = tmp_path_factory.mktemp("bin")
    packs = TokenBin(write(folder / "train.bin", tokens), length, end_token=5)
    read = []
    documents = []
    for index in np.random.default_rng(0).permutation(len(packs)).tolist():
        pack = packs[index]
        assert (
            pack.input_ids.shape == (length,)
            and pack.input_ids.dtype == np.uint32
            and pack.first_position == 0
        )
        assert pack.lengths.min() >= 1
        real = pack.input_ids[: pack.lengths.sum()].tolist()
        read.append((index, real))
        ends = np.cumsum(pack.lengths)
        documents += [real[end - n : end] for end, n in zip(ends, pack.lengths, strict=True)]
    assert [token for _, real in sorted(read) for token in real] == tokens
    assert all(5 not in document[:-1] for document in documents)
    assert len(documents) >= tokens.count(5)


def test_a_folder_has_two_splits_and_a_file_has_one(tmp_path):
    write(tmp_path / "train.bin", range(64))
    write(tmp_path / "val.bin", range(16))
    settings = DataSettings(packs=tmp_path, length=8, held_out=0.5)
    assert (len(open_packs(settings, "train")), len(open_packs(settings, "held_out"))) == (8, 2)
    settings = DataSettings(packs=tmp_path / "val.bin", length=8)
    assert (len(open_packs(settings, "train")), open_packs(settings, "held_out")) == (2, None)


def test_documents_end_with_the_tokenizers_eos_token(tmp_path):
    # The id of its EOS token is 0.
    save_tokenizer(train_tokenizer(["abc"], 260), tmp_path / "tokenizer")
    path = write(tmp_path / "train.bin", [5, 7, 0, 8, 9, 6, 0, 4])
    named = DataSettings(packs=path, length=8, tokenizer=str(tmp_path / "tokenizer"))
    assert open_packs(named, "train")[0].lengths.tolist() == [3, 4, 1]
    assert open_packs(DataSettings(packs=path, length=8), "train")[0].lengths.tolist() == [8]


@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    [
        ("uint16", 60),
        ("uint16", 50_257),
        ("uint32", 151_936),
        ("int64", 50_257),
        ("int64", 151_936),
    ],
)
def test_the_dtype_is_inferred_from_the_file(tmp_path, dtype, vocab_size):
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1000)
    packs = TokenBin(write(tmp_path / "train.bin", tokens, dtype), 10)
    assert packs[3].input_ids.tolist() == tokens[30:40].tolist() and len(packs) == 100


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_tokens_behind_a_header_of_llm_c(tmp_path, magic, dtype):
    tokens = np.arange(100, dtype=dtype) * 300
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens)
    path = tmp_path / "train.bin"
    path.write_bytes(header.tobytes() + tokens.tobytes())
    packs = TokenBin(path, 10)
    assert len(packs) == 10 and packs[0].input_ids.tolist() == tokens[:10].tolist()
    path.write_bytes(header.tobytes() + tokens[:-1].tobytes())
    with pytest.raises(InputError, match=rf"bytes of {dtype} tokens, which is not the size"):
        TokenBin(path, 10)


def test_the_fingerprint_changes_with_the_packs(tmp_path):
    path = write(tmp_path / "train.bin", range(64))
    prints = [
        TokenBin(path, 8).fingerprint,
        TokenBin(path, 16).fingerprint,
        TokenBin(path, 8, end_token=3).fingerprint,
    ]
    assert TokenBin(path, 8).fingerprint == prints[0]
    write(path, [*range(63), 5])
    assert len({*prints, TokenBin(path, 8).fingerprint}) == 4
