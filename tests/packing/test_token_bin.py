"""Packs of flat token files hold the tokens that were written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.arrow import Packs
from packing.settings import DataSettings
from packing.store import open_packs
from packing.token_bin import TokenBin
from packing.tokenizer import save_tokenizer, train_tokenizer


def write(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


def write_npy(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    with open(path, "wb") as file:
        np.save(file, np.asarray(tokens, dtype))
    return path


def write_llm_c(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = {"uint16": 20240520, "uint32": 20240801}[dtype], 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def write_llmq(path: Path, tokens: Any, mask: np.ndarray | None = None) -> Path:
    header = np.array([2, 4, len(tokens), 151_936, mask is not None], "<i4").tobytes()
    bits = b"" if mask is None else np.packbits(mask, bitorder="little").tobytes()
    ids = np.asarray(tokens, "<i4").tobytes()
    path.write_bytes((b"BIN.TOK\n" + header).ljust(1023, b"*") + b"\n" + ids + bits)
    return path


def write_megatron(
    path: Path, documents: list[list[list[int]]], dtype: str = "uint16", number: int = 8
) -> Path:
    """Write documents, lists of sequences, as Megatron-LM does: `path` and an index beside it."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    path.write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    sizes = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = np.cumsum([0, *sizes[:-1]], dtype=np.int64) * np.dtype(dtype).itemsize
    boundaries = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, number, len(sizes), len(boundaries))
        + sizes.tobytes()
        + pointers[: len(sizes)].tobytes()
        + boundaries.tobytes()
    )
    return path


def opened(path: Path, length: int = 8, **more: Any) -> Packs:
    return open_packs(DataSettings(packs=path, length=length, **more), "train")


def lengths_of(packs: Packs) -> list[list[int]]:
    return [packs[index].lengths.tolist() for index in range(len(packs))]


def tokens_of(packs: Packs) -> list[int]:
    read = [packs[index] for index in range(len(packs))]
    return [token for pack in read for token in pack.input_ids[: pack.lengths.sum()].tolist()]


# Writers of each form of file, the dtype, and settings besides `packs` and `length`.
FORMS: dict[str, tuple[Callable, str | None, dict[str, str]]] = {
    **{f"npy {dtype}": (write_npy, dtype, {}) for dtype in ("uint8", ">u2", "int32", "uint64")},
    **{f"llm.c {dtype}": (write_llm_c, dtype, {}) for dtype in ("uint16", "uint32")},
    **{f"bare {d}": (write, d, {"token_dtype": d}) for d in ("uint16", "uint32", "int64")},
    "llmq": (write_llmq, None, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_read_back_as_they_were_written(form: str, tmp_path: Path) -> None:
    writer, dtype, settings = FORMS[form]
    largest = min(np.iinfo(dtype or "int32").max, 2**31)
    tokens = [int(largest) - 1, *range(99)]
    path = tmp_path / ("train.npy" if "npy" in form else "train.bin")
    writer(path, tokens, *([dtype] if dtype else []))
    for packs in (path, tmp_path):
        read = opened(packs, 10, **settings)
        assert len(read) == 10 and tokens_of(read) == tokens
        assert read[0].input_ids.shape == (10,) and read[0].input_ids.dtype == np.uint32


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9))
def test_no_token_is_lost_between_any_end_tokens(tmp_path_factory, tokens, length):
    path = write_npy(tmp_path_factory.getbasetemp() / "cut.npy", tokens)
    packs = TokenBin(path, length, end_token=5)
    assert tokens_of(packs) == tokens
    assert all(min(lengths) >= 1 for lengths in lengths_of(packs))


@pytest.mark.parametrize(("suffix", "writer"), [("bin", write_llm_c), ("npy", write_npy)])
def test_a_folder_has_two_splits_and_a_file_has_one(tmp_path, suffix, writer):
    writer(tmp_path / f"train.{suffix}", range(64))
    writer(tmp_path / f"val.{suffix}", range(32))
    data = DataSettings(packs=tmp_path, length=8, held_out=0.5)
    assert (len(open_packs(data, "train")), len(open_packs(data, "held_out"))) == (8, 4)
    data = DataSettings(packs=tmp_path / f"val.{suffix}", length=8)
    assert (len(open_packs(data, "train")), open_packs(data, "held_out")) == (4, None)


@given(
    texts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=9),
    form=st.sampled_from(["text E", "E text", "E text E"]),
    length=st.integers(1, 12),
    is_shard=st.booleans(),
)
def test_documents_are_divided_at_eos_in_each_form(tmp_path_factory, texts, form, length, is_shard):
    folder = tmp_path_factory.getbasetemp()
    documents = [[0] * ("E " in form) + text + [0] * (" E" in form) for text in texts]
    tokens = list(chain.from_iterable(documents))
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    path = write_npy(folder / "eos.npy", tokens)
    if form == "E text" and is_shard:
        # A later shard of llm.c, which begins within a document.
        path = write_llm_c(folder / "eos.bin", tokens[1:])
        tokens, starts = tokens[1:], [0, *(start - 1 for start in starts[1:])]
    packs = TokenBin(path, length, end_token=0)
    assert tokens_of(packs) == tokens
    for number, lengths in enumerate(lengths_of(packs)):
        first, last = number * length, min(number * length + length, starts[-1])
        inside = [start for start in starts if first < start < last]
        assert lengths == np.diff([first, *inside, last]).tolist()
    assert len(packs.notes) == 1 and "each document" in packs.notes[0]
    assert ("begins with EOS (id 0)" in packs.notes[0]) == ("E " in form)


def test_the_first_of_two_eos_tokens_ends_a_document_that_eos_began(tmp_path):
    path = write_npy(tmp_path / "train.npy", [0, 0, 0, 7, 0, 0])
    assert lengths_of(TokenBin(path, 6, end_token=0)) == [[1, 1, 3, 1]]


def test_documents_end_with_the_tokenizers_eos_token(tmp_path):
    # The id of its EOS token is 0.
    save_tokenizer(train_tokenizer(["abc"], 260), tmp_path / "tokenizer")
    path = write_npy(tmp_path / "train.npy", [5, 7, 0, 8, 9, 6, 0, 4])
    assert lengths_of(opened(path, tokenizer=str(tmp_path / "tokenizer"))) == [[3, 4, 1]]
    assert lengths_of(opened(path)) == [[8]]


@given(count=st.integers(1, 70), length=st.integers(1, 30), seed=st.integers(0, 99))
def test_the_mask_of_llmq_has_the_trained_tokens(tmp_path_factory, count, length, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 151_936, count)
    mask = rng.integers(0, 2, count).astype(bool)
    path = write_llmq(tmp_path_factory.getbasetemp() / "llmq.bin", tokens, mask)
    packs = TokenBin(path, length)
    read = np.concatenate([packs[index].trained for index in range(len(packs))])
    assert read[:count].tolist() == mask.tolist() and not read[count:].any()
    assert tokens_of(packs) == tokens.tolist()


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=3),
        min_size=1,
        max_size=9,
    ).filter(lambda documents: any(chain.from_iterable(documents))),
    kind=st.sampled_from([("uint8", 1), ("int32", 4), ("int64", 5), ("uint16", 8)]),
    length=st.integers(1, 12),
)
def test_documents_end_where_the_index_says(tmp_path_factory, documents, kind, length):
    path = tmp_path_factory.getbasetemp() / "indexed.bin"
    packs = TokenBin(write_megatron(path, documents, *kind), length, end_token=9)
    whole = [list(chain.from_iterable(document)) for document in documents]
    assert tokens_of(packs) == list(chain.from_iterable(whole))
    ends = np.cumsum([0, *map(len, whole)]).tolist()
    for number, lengths in enumerate(lengths_of(packs)):
        first = number * length
        last = min(first + length, ends[-1])
        expected = np.unique([first, last, *(end for end in ends if first < end < last)])
        assert lengths == np.diff(expected).tolist()


def patched(offset: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    """Return a function that replaces bytes of a file at an offset."""
    packed = struct.pack(form, *values)
    return lambda content: content[:offset] + packed + content[offset + len(packed) :]


@pytest.mark.parametrize(
    "change",
    [
        patched(0, "8s", b"TNTIDX"),
        patched(0, "4s", b"\x00\x00\x08\x03"),
        patched(9, "<Q", 2),
        patched(17, "B", 7),
        patched(17, "B", 5),
        patched(18, "<Q", 2**63),
        patched(34, "<i", -1),
        patched(34, "<i", 9),
        lambda content: content[:-1],
        lambda content: content[:-8] + struct.pack("<q", 2),
        lambda content: content[:18] + struct.pack("<Q", 3) + content[34:-24],  # as fairseq
        lambda content: b"",
        None,
    ],
)
def test_an_index_that_does_not_fit_the_file_is_refused(tmp_path, change):
    path = write_megatron(tmp_path / "x.bin", [[[1, 2]], [[3]], [[4, 5]]])
    assert lengths_of(TokenBin(path, 4)) == [[2, 1, 1], [1]]
    if change is None:
        path.write_bytes(path.read_bytes() + b"\x00\x00")
    else:
        index = path.with_suffix(".idx")
        index.write_bytes(change(index.read_bytes()))
    with pytest.raises(InputError, match=r"x\.idx: the file is not an index of Megatron-LM for x"):
        TokenBin(path, 4)


NOT_A_LIST = "the file is not a complete list of token ids"


def npy(array: Any) -> Callable[[Path], object]:
    return lambda path: np.save(path, np.asarray(array))


@pytest.mark.parametrize(
    ("name", "writer", "options", "message"),
    [
        ("x.bin", lambda path: write(path, [1]), {}, "does not record .* `data\\.token_dtype`"),
        ("x.bin", lambda path: path.write_bytes(b""), {"dtype": "uint16"}, NOT_A_LIST),
        ("x.bin", lambda path: path.write_bytes(b"odd"), {"dtype": "uint16"}, NOT_A_LIST),
        ("x.npy", npy(np.zeros((4, 8), np.uint16)), {}, r"uint16 in the shape \(4, 8\)"),
        ("x.npy", npy(np.zeros(8, np.float32)), {}, r"float32 in the shape \(8,\)"),
        ("x.npy", npy(np.zeros(0, np.uint16)), {}, "is not a complete list"),
        ("x.npy", npy(np.array([[1], "text"], object)), {}, "is not a complete list"),
        # The lower 32 bits are an id.
        ("x.npy", npy([7, 2**32 + 5]), {}, "has the id 4294967301, but ids are from 0"),
        ("x.idx", lambda path: path.touch(), {}, r"must end in \.bin or \.npy"),
        ("x.jsonl", lambda path: path.touch(), {}, r"must end in \.bin or \.npy"),
        ("folder", lambda path: path.mkdir(), {}, r"must end in \.bin or \.npy"),
    ],
)
def test_a_file_without_a_list_of_ids_is_refused(tmp_path, name, writer, options, message):
    writer(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: .*{message}"):
        if options:
            TokenBin(tmp_path / name, 8, **options)[0]
        else:
            opened(tmp_path / name)[0]


@pytest.mark.parametrize(
    ("suffix", "writer", "message"),
    [
        ("npy", write_npy, NOT_A_LIST),
        ("bin", write_llm_c, r"complete list of .*: it has uint16 in the shape \(99,\)"),
    ],
)
def test_a_cut_file_is_refused(tmp_path, suffix, writer, message):
    path = writer(tmp_path / f"x.{suffix}", range(100))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=message):
        TokenBin(path, 8)


@pytest.mark.parametrize(("dtype", "shown"), [("uint32", 2**32 - 100), ("int64", -100)])
def test_negative_ids_are_refused(tmp_path, dtype, shown):
    path = write(tmp_path / "x.bin", [7, 8, -100, 9], "int32" if dtype == "uint32" else dtype)
    packs = TokenBin(path, 2, dtype=dtype)
    assert packs[0].input_ids.tolist() == [7, 8]
    with pytest.raises(InputError, match=rf"pack 1 has the id {shown}, but ids are from 0"):
        packs[1]


def test_shards_of_a_folder_are_read_as_sources(tmp_path):
    rng = np.random.default_rng(0)
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    shards = [write_llm_c(tmp_path / name, rng.integers(0, 50_257, 32)) for name in names]
    with pytest.raises(InputError, match=r"data\.sources, as {name: x_train_000001\.bin, weight"):
        opened(tmp_path)
    packs = opened(tmp_path, sources=[{"name": name, "weight": 1} for name in names])
    assert tokens_of(packs) == [token for path in shards for token in tokens_of(TokenBin(path, 8))]


def test_the_fingerprint_changes_with_the_packs(tmp_path):
    path = write_npy(tmp_path / "train.npy", range(64))
    options = [{"length": 8}, {"length": 16}, {"length": 8, "end_token": 3}]
    prints = [TokenBin(path, **more).fingerprint for more in options]
    assert TokenBin(path, 8).fingerprint == prints[0]
    write_npy(path, [*range(63), 5])
    assert len({*prints, TokenBin(path, 8).fingerprint}) == 4
