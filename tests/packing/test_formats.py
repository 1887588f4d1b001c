"""Token files and MDS folders have the packs that the programs of these formats wrote.

mosaicml-streaming 0.13.0 wrote the folders of tests/data/mds, and expected.json has the samples
that it read back. `reference` has the reference's layout: three columns in a custom encoding that
is registered as `uint32` (bytes of arrays without a fixed size), document lengths in
`attention_mask`, and positions that continue in cut documents. `encodings` has all encodings that
the reader supports. `zstd` is compressed with level 7, with positions that restart.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.arrow import Packs
from packing.mds import decoder, read_index
from packing.settings import DataSettings
from packing.store import open_packs
from packing.token_bin import TokenBin
from packing.token_columns import number_documents
from packing.tokenizer import save_tokenizer, train_tokenizer
from tests.conftest import ROOT, flip

FIXTURES = ROOT / "tests/data/mds"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURES / "expected.json").read_text())
READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str": bytes.decode,
    "bytes": list,
}


def opened(path: Path, length: int = 8, **more: Any) -> Packs:
    return open_packs(DataSettings(packs=path, length=length, **more), "train")


# ── Token files ───────────────────────────────────────────────────────────────────────────────────


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
    """Write documents, lists of sequences, as Megatron-LM does: `path` and an index beside it.

    number: Megatron-LM's number for the dtype.
    """
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
    return [pack.lengths.tolist() for pack in packs]


def tokens_of(packs: Packs) -> list[int]:
    return [token for pack in packs for token in pack.input_ids[: pack.lengths.sum()].tolist()]


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


@pytest.mark.parametrize("of_llm_c", [False, True])
@pytest.mark.parametrize("form", ["text E", "E text", "E text E", "ext E text"])
@given(
    texts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=9),
    length=st.integers(1, 12),
)
def test_documents_are_divided_at_eos_in_each_form(tmp_path_factory, form, of_llm_c, texts, length):
    """Only a shard of llm.c may begin within a document whose EOS is in an earlier shard."""
    before = [0] if "E text" in form else []
    after = [0] if form.endswith("E") else []
    is_cut = form == "ext E text"
    documents = [before + text + after for text in texts]
    tokens = list(chain.from_iterable(documents))
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    if is_cut:
        # The file lacks the first token, which is the EOS.
        tokens = tokens[1:]
        starts = [0, *(start - 1 for start in starts[1:])]
    if of_llm_c or is_cut:
        path = write_llm_c(tmp_path_factory.getbasetemp() / "eos.bin", tokens)
    else:
        path = write_npy(tmp_path_factory.getbasetemp() / "eos.npy", tokens)
    packs = TokenBin(path, length, end_token=0)
    assert tokens_of(packs) == tokens
    for number, lengths in enumerate(lengths_of(packs)):
        first, last = number * length, min(number * length + length, starts[-1])
        inside = [start for start in starts if first < start < last]
        assert lengths == np.diff([first, *inside, last]).tolist()
    assert len(packs.notes) == 1 and "each document" in packs.notes[0]
    assert ("begins with EOS (id 0)" in packs.notes[0]) == bool(before)


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
    read = np.concatenate([pack.trained for pack in packs])
    assert read[:count].tolist() == mask.tolist() and not read[count:].any()
    assert tokens_of(packs) == tokens.tolist()


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=3),
        min_size=1,
        max_size=9,
    ).filter(lambda documents: any(chain.from_iterable(documents))),
    dtype_and_number=st.sampled_from([("uint8", 1), ("int32", 4), ("int64", 5), ("uint16", 8)]),
    length=st.integers(1, 12),
)
def test_documents_end_where_the_index_says(tmp_path_factory, documents, dtype_and_number, length):
    path = tmp_path_factory.getbasetemp() / "indexed.bin"
    packs = TokenBin(write_megatron(path, documents, *dtype_and_number), length, end_token=9)
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
        # Another magic number, and another version.
        patched(0, "8s", b"TNTIDX"),
        patched(0, "4s", b"\x00\x00\x08\x03"),
        patched(9, "<Q", 2),
        # The number of another dtype: float32, and int64.
        patched(17, "B", 7),
        patched(17, "B", 5),
        # The number of sequences, and the length of the first one.
        patched(18, "<Q", 2**63),
        patched(34, "<i", -1),
        patched(34, "<i", 9),
        # The last boundary.
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
    if change is None:  # The index has a token less than the file.
        path.write_bytes(path.read_bytes() + b"\x00\x00")
    else:
        index = path.with_suffix(".idx")
        index.write_bytes(change(index.read_bytes()))
    with pytest.raises(InputError, match=r"x\.idx: the file is not an index of Megatron-LM for x"):
        TokenBin(path, 4)


NOT_A_LIST = "the file is not a complete list of token ids"


def npy(array: Any) -> Callable[[Path], object]:
    return lambda path: np.save(path, np.asarray(array))


def truncated(writer: Callable[..., object]) -> Callable[[Path], None]:
    """Return a function that writes 100 ids, and then cuts the file's last two bytes off."""

    def write_truncated(path: Path) -> None:
        writer(path, range(100))
        os.truncate(path, path.stat().st_size - 2)

    return write_truncated


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
        ("x.npy", truncated(write_npy), {}, NOT_A_LIST),
        ("x.bin", truncated(write_llm_c), {}, r"it has uint16 in the shape \(99,\)"),
        ("x.bin", lambda path: write(path, [-100], "int32"), {"dtype": "uint32"}, "id 4294967196,"),
        (
            "x.bin",
            lambda path: write(path, [-100], "int64"),
            {"dtype": "int64"},
            "has the id -100,",
        ),
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


# ── MDS ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fixture(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a writable copy of a fixture folder, with unpacked shards."""

    def copy(name: str) -> Path:
        folder = shutil.copytree(FIXTURES / name, tmp_path / name)
        for shard in folder.glob("*.zstd"):
            raw = pa.input_stream(str(shard), compression="zstd").read()
            shard.with_suffix("").write_bytes(raw)
            shard.unlink()
        return folder

    return copy


@pytest.mark.parametrize("name", EXPECTED)
def test_every_sample_equals_that_of_the_formats_library(fixture, name):
    shards = read_index(fixture(name))
    samples = [shard.sample(index) for shard in shards for index in range(shard.samples)]
    for sample, columns in zip(samples, EXPECTED[name], strict=True):
        assert sample.keys() == columns.keys()
        for key, column in columns.items():
            value = sample[key]
            if "dtype" in column:
                assert value.dtype.name == column["dtype"] and list(value.shape) == column["shape"]
                assert value.tolist() == column["values"]
            else:
                assert READ.get(column["type"], json.loads)(value) == column["values"]


@pytest.mark.parametrize("name", ["reference", "zstd"])
def test_packs_have_the_tokens_and_the_documents_of_the_columns(fixture, name):
    packs = opened(fixture(name), 32)
    rows = EXPECTED[name]
    assert len(packs) == len(rows)
    for index in np.random.default_rng(0).permutation(len(rows)).tolist():
        pack = packs[index]
        assert pack.input_ids.dtype == np.uint32 and pack.lengths.dtype == np.int32
        assert pack.input_ids.tolist() == rows[index]["input_ids"]["values"]
        if name == "reference":
            assert pack.lengths.tolist() == rows[index]["attention_mask"]["values"]
        else:
            positions = np.concatenate([np.arange(n) for n in pack.lengths])
            assert positions.tolist() == rows[index]["position_ids"]["values"]
        assert pack.trained is None
    packs.verify()


def test_train_and_val_folders_are_the_splits(fixture, tmp_path):
    fixture("reference").rename(tmp_path / "train")
    one_shard = fixture("reference").rename(tmp_path / "val")
    index = json.loads((one_shard / "index.json").read_text())
    (one_shard / "index.json").write_text(json.dumps(index | {"shards": index["shards"][:1]}))
    settings = DataSettings(packs=tmp_path, length=32, held_out=0.5)
    assert len(open_packs(settings, "train")) == 12
    assert len(open_packs(settings, "held_out")) == 6
    (tmp_path / "train").rename(tmp_path / "test")
    with pytest.raises(InputError, match="has no packs"):
        opened(tmp_path, 32)


def test_the_declared_size_identifies_the_uint32_encoding():
    data = memoryview(np.array([7, 8], "<u4").tobytes())
    assert decoder("uint32", 4)(data[:4]) == 7
    assert decoder("uint32", None)(data).tolist() == [7, 8]
    assert decoder("pkl", None)(data) == data, "nothing is unpickled"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_flipped_bit_is_found_when_a_folder_is_opened(fixture, name):
    folder = fixture(name)
    shard = sorted(folder.glob("shard.*"))[-1]
    for position in (0, shard.stat().st_size // 2, shard.stat().st_size - 1):
        flip(shard, position)
        with pytest.raises(InputError, match=rf"{shard.name}: damaged"):
            read_index(folder)
        flip(shard, position)
    read_index(folder)


def test_compressed_shards_must_be_unpacked():
    with pytest.raises(InputError, match=r"shard\.00000\.mds: missing; .* `zstd -d FOLDER/\*"):
        opened(FIXTURES / "zstd", 32)


def test_missing_hashes_do_not_prevent_a_fingerprint(fixture):
    folder = fixture("zstd")
    index = json.loads((folder / "index.json").read_text())
    for entry in index["shards"]:
        entry["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    packs = opened(folder, 32)
    assert packs[9].input_ids.tolist() == EXPECTED["zstd"][9]["input_ids"]["values"]
    for shard in folder.glob("*.mds"):
        flip(shard, shard.stat().st_size - 1)
    assert opened(folder, 32).fingerprint != packs.fingerprint


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(0, 1000),
    st.sampled_from(["uint8", "uint16", "int64"]),
)
def test_documents_follow_from_lengths_or_positions_or_both(lengths, first_position, dtype):
    positions = np.concatenate([np.arange(n) for n in lengths])
    positions[: lengths[0]] += min(first_position, np.iinfo(dtype).max - 20)
    mask = np.array(lengths, np.uint32)
    positions = positions.astype(dtype)
    width = sum(lengths)
    # Lengths of documents of one token look like a mask of ones.
    ones = width == len(lengths)
    both = {"attention_mask": np.ones(width, np.uint32) if ones else mask}
    numbered = np.append(np.repeat(np.arange(len(lengths)), lengths), [-1, -1, -1])
    padded = np.append(np.ones(width, np.int64), np.zeros(3, np.int64))
    padded_positions = np.append(positions, [0, 0, 0])
    for padding, columns in (
        (0, both | {"position_ids": positions}),
        (0, {"position_ids": positions}),
        (0, {"seq_lengths": mask}),
        (0, {"position_ids": positions} if ones else {"attention_mask": mask}),
        (0, {"cu_seqlens": np.cumsum([0, *lengths])}),
        (3, {"sequence_id": numbered}),
        (3, {"attention_mask": padded, "position_ids": padded_positions}),
    ):
        numbers = number_documents(width + padding, columns)
        assert np.bincount(numbers[numbers >= 0]).tolist() == lengths
    numbers = number_documents(width + 3, {"attention_mask": padded})
    assert numbers.tolist() == [0] * width + [-1] * 3


@pytest.mark.parametrize("mask", [[3, 4], [9], [], [-1, 9]])
@pytest.mark.parametrize("positions", [{}, {"position_ids": [0, 1]}, {"position_ids": range(8)}])
def test_inconsistent_document_columns_are_rejected(mask, positions):
    columns = {"attention_mask": mask} | positions
    with pytest.raises(ValueError):
        number_documents(8, {name: np.array(column) for name, column in columns.items()})


def write_columns(folder: Path, dtype: str = "int32", **columns: Any) -> Path:
    """Write one sample of 8 tokens in raw MDS, with further columns of 8 numbers."""
    folder.mkdir(parents=True)
    columns = {"input_ids": range(8), **columns}
    dtypes = ["uint32", *[dtype] * (len(columns) - 1)]
    pairs = zip(columns.values(), dtypes, strict=True)
    sample = b"".join(np.array(column, kind).tobytes() for column, kind in pairs)
    table = np.array([1, 12, 12 + len(sample)], "<u4").tobytes()
    (folder / "shard.00000.mds").write_bytes(table + sample)
    shard = {
        **{"version": 2, "format": "mds", "compression": None, "zip_data": None, "samples": 1},
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(table + sample), "hashes": {}},
        "column_names": list(columns),
        "column_encodings": [f"ndarray:{kind}:8" for kind in dtypes],
        "column_sizes": [32] * len(columns),
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


AS_NUMBER = '["uint32"], "column_sizes": [4'
ONES = [1] * 8
PADDED = [1] * 6 + [0] * 2
LABELS = [-100, -100, 2, 3, -100, 5, 6, 7]
LOSS_MASK = [0, 0, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("columns", "lengths", "trained"),
    [
        ({}, [4, 4], None),
        ({"input_ids": [3, 1, 2, 3, 4, 5, 6, 7]}, [3, 5], None),
        ({"attention_mask": PADDED}, [4, 2], None),
        ({"sequence_id": [0, 0, 1, 1, 1, 2, -1, -1]}, [2, 3, 1], None),
        ({"sequence_id": ONES}, [8], None),
        ({"position_ids": range(8)}, [8], None),
        ({"dtype": "float32", "attention_mask": [1, 1, 1, 2, 2, 3, 0, 0]}, [3, 2, 1], None),
        ({"loss_mask": LOSS_MASK, "token_type_ids": ONES}, [4, 4], [2, 3, 5, 6, 7]),
        # Padding is never trained on, even if it has labels.
        ({"labels": LABELS, "attention_mask": PADDED}, [4, 2], [2, 3, 5]),
    ],
)
def test_columns_and_the_end_token_determine_documents_and_losses(
    columns: dict, lengths: list[int], trained: list[int] | None, tmp_path: Path
) -> None:
    """The end token, whose id is 3, ends or begins documents unless a column does."""
    tokenizer = train_tokenizer(["abc"], 260)
    tokenizer.add_special_tokens(["</s>"])
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": tokenizer.id_to_token(3)}))
    path = write_columns(tmp_path / "mds", **columns)
    packs = opened(path, tokenizer=str(tmp_path / "tokenizer"))
    without_tokenizer = opened(path)
    assert packs[0].lengths.tolist() == lengths
    mask = packs[0].trained
    assert trained == (None if mask is None else np.flatnonzero(mask).tolist())
    unread = f"{path}: columns not read: token_type_ids"
    assert (unread in packs.notes) == ("token_type_ids" in columns)
    if lengths != without_tokenizer[0].lengths.tolist():
        assert packs.fingerprint != without_tokenizer.fingerprint


@pytest.mark.parametrize(
    ("columns", "change", "length", "message"),
    [
        ({"attention_mask": [0, 1] * 4}, None, 8, r"00000\.mds, sample 0: .*padding only at its"),
        ({"attention_mask": [0] * 8}, None, 8, r"00000\.mds, sample 0: .*padding only at its end"),
        ({"labels": [*range(1, 8), -100]}, None, 8, "without a shift"),
        ({}, ("input_ids", "ids"), 8, "input_ids"),
        ({}, None, 64, r"`data\.length` is 64"),
        ({}, ('["ndarray:uint32:8"], "column_sizes": [32', AS_NUMBER), 1, r"0\.mds"),
        ({}, ('"shards": [', '"shards": [], "x": ['), 8, "no shards"),
    ],
)
def test_columns_that_make_no_packs_are_rejected(columns, change, length, message, tmp_path: Path):
    path = write_columns(tmp_path / "mds", **columns)
    index = (path / "index.json").read_text()
    if change:
        assert change[0] in index
        (path / "index.json").write_text(index.replace(*change))
    with pytest.raises(InputError, match=message):
        opened(path, length)
