"""Flat token files against what was written to them."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from packing import token_bin
from packing.settings import DataSettings
from packing.store import open_packs, with_own_held_out
from packing.token_bin import TokenBin, read_meta


def write(path: Path, tokens: object, dtype: str = "uint16") -> Path:
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


@settings(deadline=None)  # disks take what time they take
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9), st.sampled_from(["uint16", "uint32"]))
def test_packs_are_the_files_tokens_in_order_cut_into_documents_at_the_end_token(tmp_path_factory, tokens, length, dtype):
    folder = tmp_path_factory.mktemp("bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype}))
    packs = TokenBin(write(folder / "train.bin", tokens, dtype), length, end_token=5)
    read, documents = [], []
    for index in range(len(packs)):
        pack = packs[index]
        assert pack.input_ids.shape == (length,) and pack.input_ids.dtype == np.uint32 and pack.first_position == 0
        assert pack.lengths.min() >= 1 and np.array_equal(pack.lengths, packs.lengths(index))
        real = pack.input_ids[: pack.lengths.sum()].tolist()
        read += real
        ends = np.cumsum(pack.lengths)
        documents += [real[end - n : end] for end, n in zip(ends, pack.lengths, strict=True)]
    assert read == tokens
    assert all(5 not in document[:-1] for document in documents)
    assert len(documents) >= tokens.count(5)


def test_without_an_end_token_a_pack_is_one_document_and_the_last_is_padded(tmp_path):
    packs = TokenBin(write(tmp_path / "train.bin", range(10)), 4)
    assert [pack.lengths.tolist() for pack in (packs[0], packs[1], packs[2])] == [[4], [4], [2]]
    assert packs[2].input_ids.tolist() == [8, 9, 0, 0]


def test_an_end_token_that_never_comes_is_refused_and_so_is_one_for_other_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(token_bin, "_SAMPLED_TOKENS", 100)
    path = write(tmp_path / "train.bin", [1, 2, 3] * 100)
    with pytest.raises(InputError, match=r"train\.bin: `data\.end_token` 70000 does not occur in its first 100 tokens"):
        TokenBin(path, 8, end_token=70000)
    assert TokenBin(write(tmp_path / "val.bin", [1, 2, 3] * 10), 8, end_token=0).lengths(0).tolist() == [8]  # too few to tell
    fixture = Path(__file__).parents[1] / "data" / "mds" / "reference"
    with pytest.raises(InputError, match=r"`data\.end_token` is for token \.bin files"):
        open_packs(DataSettings(packs=fixture, length=32, end_token=3), "train")


def test_random_access_equals_sequential(tmp_path):
    packs = TokenBin(write(tmp_path / "train.bin", np.random.default_rng(0).integers(0, 2**16, 4000)), 32)
    sequential = [packs[index].input_ids for index in range(len(packs))]
    for index in np.random.default_rng(1).permutation(len(packs)):
        assert np.array_equal(packs[int(index)].input_ids, sequential[index])
    with pytest.raises(IndexError):
        packs[-1]


def test_a_folder_gives_train_and_val_and_a_file_gives_itself(tmp_path):
    write(tmp_path / "train.bin", range(64))
    write(tmp_path / "val.bin", range(16))
    settings = DataSettings(packs=tmp_path, length=8, held_out=0.5)
    assert (len(open_packs(settings, "train")), len(open_packs(settings, "held_out"))) == (8, 2)
    assert with_own_held_out(settings) == [tmp_path], "the share is of none"
    assert with_own_held_out(DataSettings(packs=tmp_path / "train.bin", length=8, held_out=0.5)) == []
    settings = DataSettings(packs=tmp_path / "val.bin", length=8)
    assert (len(open_packs(settings, "train")), open_packs(settings, "held_out")) == (2, None)


@pytest.mark.parametrize("vocab_size", [65, 50_257, 2**16, 2**16 + 1, 151_936])
def test_nanogpt_meta_pickle_gives_vocabulary_and_dtype(tmp_path, vocab_size):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size, "itos": {0: "a"}, "stoi": {"a": 0}}))
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    tokens = [0, vocab_size - 1, 1, vocab_size // 2]
    packs = TokenBin(write(tmp_path / "train.bin", tokens, dtype), 4)
    assert packs[0].input_ids.tolist() == tokens
    assert packs.tokenizer == {"vocab_size": vocab_size}


def test_a_meta_pickle_that_needs_any_global_is_refused_and_runs_nothing(tmp_path):
    class Dangerous:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for content in (Dangerous(), {"vocab_size": np.int64(5)}, Counter("ab")):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
        with pytest.raises(InputError, match=r"meta\.pkl: cannot be read"):
            read_meta(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["{", "[1]", '{"vocab_size": "many"}', '{"vocab_size": 0}'])
def test_a_broken_meta_is_refused_by_name(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(InputError, match=r"meta\.json"):
        TokenBin(write(tmp_path / "train.bin", range(8)), 4)


def test_a_float_dtype_in_meta_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text('{"dtype": "float32"}')
    with pytest.raises(InputError, match="float32"):
        TokenBin(write(tmp_path / "train.bin", range(8)), 4)


def test_uint32_tokens_without_meta_are_not_read_as_uint16(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 151_936, 1000)
    path = write(tmp_path / "train.bin", tokens, "uint32")
    with pytest.raises(InputError, match=r'looks like uint32 .*meta\.json: \{"dtype": "uint32"\}'):
        TokenBin(path, 10)
    (tmp_path / "meta.json").write_text('{"dtype": "uint32"}')
    assert TokenBin(path, 10)[3].input_ids.tolist() == tokens[30:40].tolist()


def test_a_file_with_a_header_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(np.array([20240520] + [1] * 255, "<i4").tobytes() + bytes(64))
    with pytest.raises(InputError, match="begins with a header"):
        TokenBin(path, 4)


@pytest.mark.parametrize(("dtype", "bytes_lost"), [("uint16", 1), ("uint32", 2)])
def test_a_file_that_ends_within_a_token_is_truncated(tmp_path, dtype, bytes_lost):
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": dtype}))
    path = write(tmp_path / "train.bin", range(100), dtype)
    path.write_bytes(path.read_bytes()[:-bytes_lost])
    with pytest.raises(InputError, match=r"train\.bin: truncated"):
        TokenBin(path, 10)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"train\.bin: is empty"):
        TokenBin(write(tmp_path / "train.bin", []), 10)


def test_a_flipped_byte_changes_the_fingerprint_and_fails_the_checksum_beside_the_file(tmp_path):
    path = write(tmp_path / "train.bin", range(100))
    intact = TokenBin(path, 10).fingerprint
    (tmp_path / "train.bin.sha256").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  train.bin\n")
    assert TokenBin(path, 10).fingerprint == intact
    data = bytearray(path.read_bytes())
    data[51] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"train\.bin: damaged: its sha256"):
        TokenBin(path, 10)
    (tmp_path / "train.bin.sha256").unlink()
    assert TokenBin(path, 10).fingerprint != intact


def test_the_fingerprint_changes_with_everything_that_changes_the_packs(tmp_path):
    path = write(tmp_path / "train.bin", range(64))
    variants = [TokenBin(path, 8), TokenBin(path, 16), TokenBin(path, 8, end_token=3)]
    assert len({packs.fingerprint for packs in variants}) == 3
    assert TokenBin(path, 8).fingerprint == variants[0].fingerprint


def test_a_token_beyond_the_vocabulary_is_refused_at_opening_or_when_its_pack_is_read(tmp_path, monkeypatch):
    (tmp_path / "meta.json").write_text('{"vocab_size": 50}')
    path = write(tmp_path / "train.bin", [*range(40), 50, 1])
    with pytest.raises(InputError, match="holds token id 50, but its meta says vocab_size 50"):
        TokenBin(path, 10)
    monkeypatch.setattr("packing.token_bin._SAMPLED_TOKENS", 20)
    packs = TokenBin(path, 10)
    assert packs[3].input_ids[-1] == 39
    with pytest.raises(InputError, match="holds token id 50"):
        packs[4]
