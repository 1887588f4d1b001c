"""Packs of flat token files hold the tokens that were written."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path

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


def write(path: Path, tokens: object, dtype: str = "uint16") -> Path:
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


def write_npy(path: Path, tokens: object, dtype: str = "uint16") -> Path:
    with open(path, "wb") as file:
        np.save(file, np.asarray(tokens, dtype))
    return path


def write_llm_c(path: Path, tokens: object, magic: int = 20240520, dtype: str = "uint16") -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def write_megatron(path: Path, documents: list[list[list[int]]], dtype: str, number: int) -> Path:
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


def lengths_of(packs: Packs) -> list[list[int]]:
    return [packs[index].lengths.tolist() for index in range(len(packs))]


def tokens_of(packs: Packs) -> list[int]:
    read = [packs[index] for index in range(len(packs))]
    return [token for pack in read for token in pack.input_ids[: pack.lengths.sum()].tolist()]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9))
def test_packs_hold_the_tokens_cut_at_the_end_token(tmp_path_factory, tokens, length):
    folder = tmp_path_factory.mktemp("bin")
    packs = TokenBin(write_npy(folder / "train.npy", tokens), length, end_token=5)
    read = []
    documents = []
    for index in np.random.default_rng(0).permutation(len(packs)).tolist():
        pack = packs[index]
        assert pack.input_ids.shape == (length,) and pack.input_ids.dtype == np.uint32
        assert pack.lengths.min() >= 1
        real = pack.input_ids[: pack.lengths.sum()].tolist()
        read.append((index, real))
        ends = np.cumsum(pack.lengths)
        documents += [real[end - n : end] for end, n in zip(ends, pack.lengths, strict=True)]
    assert [token for _, real in sorted(read) for token in real] == tokens
    assert all(5 not in document[:-1] for document in documents)
    assert len(documents) >= tokens.count(5)


@pytest.mark.parametrize(("suffix", "writer"), [("bin", write_llm_c), ("npy", write_npy)])
def test_a_folder_has_two_splits_and_a_file_has_one(tmp_path, suffix, writer):
    writer(tmp_path / f"train.{suffix}", range(64))
    writer(tmp_path / f"val.{suffix}", range(32))
    data = DataSettings(packs=tmp_path, length=8, held_out=0.5)
    assert (len(open_packs(data, "train")), len(open_packs(data, "held_out"))) == (8, 4)
    data = DataSettings(packs=tmp_path / f"val.{suffix}", length=8)
    assert (len(open_packs(data, "train")), open_packs(data, "held_out")) == (4, None)


def documents_by_loop(tokens: list[int], end: int, begins: bool) -> list[int]:
    """Return the index of the first token of each document except for the first document."""
    starts = []
    is_open = True
    for index, token in enumerate(tokens):
        follows_eos = index > 0 and tokens[index - 1] == end
        if begins and token == end:
            is_last = index + 1 == len(tokens) or tokens[index + 1] == end
            # The first of two EOS tokens ends the open document, and so does the last token.
            is_open = is_last and not follows_eos
            if not is_open and index > 0:
                starts.append(index)
        elif not begins and follows_eos:
            starts.append(index)
    return starts


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
    assert documents_by_loop(tokens, 0, "E " in form) == starts[1:-1]
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


def test_documents_end_with_the_tokenizers_eos_token(tmp_path):
    # The id of its EOS token is 0.
    save_tokenizer(train_tokenizer(["abc"], 260), tmp_path / "tokenizer")
    path = write_npy(tmp_path / "train.npy", [5, 7, 0, 8, 9, 6, 0, 4])
    named = DataSettings(packs=path, length=8, tokenizer=str(tmp_path / "tokenizer"))
    assert open_packs(named, "train")[0].lengths.tolist() == [3, 4, 1]
    assert open_packs(DataSettings(packs=path, length=8), "train")[0].lengths.tolist() == [8]


def write_llmq(path: Path, tokens: np.ndarray, mask: np.ndarray | None = None) -> Path:
    header = (
        b"BIN.TOK\n" + np.array([2, 4, len(tokens), 151_936, mask is not None], "<i4").tobytes()
    )
    bits = b"" if mask is None else np.packbits(mask, bitorder="little").tobytes()
    path.write_bytes(header.ljust(1023, b"*") + b"\n" + tokens.astype("<i4").tobytes() + bits)
    return path


@given(
    count=st.integers(1, 70),
    length=st.integers(1, 30),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tokens_and_masks_of_llmq_are_read(tmp_path_factory, count, length, masked, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 151_936, count)
    mask = rng.integers(0, 2, count).astype(bool)
    path = tmp_path_factory.getbasetemp() / "llmq.bin"
    packs = TokenBin(write_llmq(path, tokens, mask if masked else None), length)
    read = [packs[index].trained for index in range(len(packs))]
    if masked:
        assert np.concatenate(read)[:count].tolist() == mask.tolist()
        assert not np.concatenate(read)[count:].any()
    else:
        assert read == [None] * len(packs)
    assert tokens_of(packs) == tokens.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_the_dtype_of_a_file_without_a_header_is_a_setting(tmp_path, dtype):
    tokens = [50_256, *range(99)]
    path = write(tmp_path / "train.bin", tokens, dtype)
    with pytest.raises(InputError, match=r"train\.bin: .* does not record .* `data\.token_dtype`"):
        open_packs(DataSettings(packs=path, length=10), "train")
    data = DataSettings(packs=tmp_path, length=10, token_dtype=dtype)
    assert tokens_of(open_packs(data, "train")) == tokens


@pytest.mark.parametrize(("dtype", "shown"), [("uint32", 2**32 - 100), ("int64", -100)])
def test_negative_ids_are_refused(tmp_path, dtype, shown):
    path = write(tmp_path / "x.bin", [7, 8, -100, 9], "int32" if dtype == "uint32" else dtype)
    packs = TokenBin(path, 2, dtype=dtype)
    assert packs[0].input_ids.tolist() == [7, 8]
    with pytest.raises(InputError, match=rf"pack 1 has the id {shown}, but ids are from 0"):
        packs[1]


@pytest.mark.parametrize("content", [b"", b"odd"])
def test_an_empty_or_cut_file_without_a_header_is_refused(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.bin: the file is not a complete list of token ids"):
        TokenBin(tmp_path / "x.bin", 8, dtype="uint16")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2", "int32", "uint64"])
def test_files_of_numpy_have_the_dtype_of_their_header(tmp_path, dtype):
    tokens = np.random.default_rng(0).integers(0, 100, 50)
    packs = TokenBin(write_npy(tmp_path / "train.npy", tokens, dtype), 8)
    assert tokens_of(packs) == tokens.tolist()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 8), np.uint16), r"uint16 in the shape \(4, 8\)"),
        (np.zeros(8, np.float32), r"float32 in the shape \(8,\)"),
        (np.zeros(0, np.uint16), "is not a complete list"),
        (np.array([[1], "text"], object), "is not a complete list"),
        # The lower 32 bits are an id.
        (np.array([7, 2**32 + 5]), "has the id 4294967301, but ids are from 0"),
    ],
)
def test_files_of_numpy_without_a_list_of_ids_are_refused(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(InputError, match=rf"x\.npy: .*{message}"):
        TokenBin(tmp_path / "x.npy", 8)[0]


def test_a_cut_file_of_numpy_is_refused(tmp_path):
    path = write_npy(tmp_path / "x.npy", range(100))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"x\.npy: the file is not a complete list of token ids"):
        TokenBin(path, 8)


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=3),
        min_size=1,
        max_size=9,
    ).filter(lambda documents: sum(map(sum_of_lengths, documents)) > 0),
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


def sum_of_lengths(document: list[list[int]]) -> int:
    return sum(map(len, document))


def _fairseq(content: bytes) -> bytes:
    return content[:18] + struct.pack("<Q", 3) + content[34:-24]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"TNTIDX\x00\x00" + content[8:],
        lambda content: b"\x00\x00\x08\x03" + content[4:],
        lambda content: content[:9] + struct.pack("<Q", 2) + content[17:],
        lambda content: content[:17] + b"\x07" + content[18:],
        lambda content: content[:17] + b"\x05" + content[18:],
        lambda content: content[:18] + struct.pack("<Q", 2**63) + content[26:],
        lambda content: content[:-1],
        lambda content: content[:-8] + struct.pack("<q", 2),
        lambda content: content[:34] + struct.pack("<i", -1) + content[38:],
        lambda content: content[:34] + struct.pack("<i", 9) + content[38:],
        _fairseq,
        lambda content: b"",
        None,
    ],
)
def test_an_index_that_does_not_fit_the_file_is_refused(tmp_path, change):
    path = write_megatron(tmp_path / "x.bin", [[[1, 2]], [[3]], [[4, 5]]], "uint16", 8)
    assert lengths_of(TokenBin(path, 4)) == [[2, 1, 1], [1]]
    if change is None:
        path.write_bytes(path.read_bytes() + b"\x00\x00")
    else:
        index = path.with_suffix(".idx")
        index.write_bytes(change(index.read_bytes()))
    with pytest.raises(InputError, match=r"x\.idx: the file is not an index of Megatron-LM for x"):
        TokenBin(path, 4)


def test_shards_of_a_folder_are_read_as_sources(tmp_path):
    rng = np.random.default_rng(0)
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    shards = [write_llm_c(tmp_path / name, rng.integers(0, 50_257, 32)) for name in names]
    with pytest.raises(
        InputError, match=r"data\.sources, as {name: x_train_000001\.bin, weight: 1}"
    ):
        open_packs(DataSettings(packs=tmp_path, length=8), "train")
    sources = [{"name": name, "weight": 1} for name in names]
    packs = open_packs(DataSettings(packs=tmp_path, length=8, sources=sources), "train")
    assert tokens_of(packs) == [token for path in shards for token in tokens_of(TokenBin(path, 8))]


@pytest.mark.parametrize("name", ["corpus.idx", "corpus.jsonl", "folder"])
def test_packs_that_are_no_token_file_are_refused(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_bytes(b"{}")
    with pytest.raises(InputError, match=r"has no packs: .* must end in \.bin or \.npy"):
        open_packs(DataSettings(packs=path, length=8), "train")


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_tokens_behind_a_header_of_llm_c(tmp_path, magic, dtype):
    tokens = np.arange(100, dtype=dtype) * 300
    path = write_llm_c(tmp_path / "train.bin", tokens, magic, dtype)
    header = path.read_bytes()[:1024]
    packs = TokenBin(path, 10)
    assert len(packs) == 10 and packs[0].input_ids.tolist() == tokens[:10].tolist()
    path.write_bytes(header + tokens[:-1].tobytes())
    with pytest.raises(
        InputError, match=rf"complete list of .*: it has {dtype} in the shape \(99,\)"
    ):
        TokenBin(path, 10)


def test_the_fingerprint_changes_with_the_packs(tmp_path):
    path = write_npy(tmp_path / "train.npy", range(64))
    prints = [
        TokenBin(path, 8).fingerprint,
        TokenBin(path, 16).fingerprint,
        TokenBin(path, 8, end_token=3).fingerprint,
    ]
    assert TokenBin(path, 8).fingerprint == prints[0]
    write_npy(path, [*range(63), 5])
    assert len({*prints, TokenBin(path, 8).fingerprint}) == 4
