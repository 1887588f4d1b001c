"""MDS folders are read like the format's own library reads them (tests/data/mds).

mosaicml-streaming 0.13.0 wrote the folders, and expected.json has the samples that it read back.
`reference` has the reference's layout: three columns in a custom encoding that is registered as
`uint32` (bytes of arrays without a fixed size), document lengths in `attention_mask`, and positions
that continue in cut documents. `encodings` has all encodings that the reader supports. `zstd` is
compressed with level 7, with positions that restart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
from packing.token_columns import number_documents
from packing.tokenizer import save_tokenizer, train_tokenizer
from tests.conftest import ROOT, flip

FIXTURES = ROOT / "tests/data/mds"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURES / "expected.json").read_text())
LENGTH = 32
READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str": bytes.decode,
    "bytes": list,
}


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


def open_mds(path: Path, length: int = LENGTH, **more: Any) -> Packs:
    return open_packs(DataSettings(packs=path, length=length, **more), "train")


def change_index(folder: Path, change: Callable[[str], str]) -> None:
    text = (folder / "index.json").read_text()
    assert change(text) != text
    (folder / "index.json").write_text(change(text))


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
    packs = open_mds(fixture(name))
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
    settings = DataSettings(packs=tmp_path, length=LENGTH, held_out=0.5)
    assert len(open_packs(settings, "train")) == 12
    assert len(open_packs(settings, "held_out")) == 6
    (tmp_path / "train").rename(tmp_path / "test")
    with pytest.raises(InputError, match="has no packs"):
        open_mds(tmp_path)


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
        open_mds(FIXTURES / "zstd")


def test_missing_hashes_do_not_prevent_a_fingerprint(fixture):
    folder = fixture("zstd")
    index = json.loads((folder / "index.json").read_text())
    for entry in index["shards"]:
        entry["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    packs = open_mds(folder)
    assert packs[9].input_ids.tolist() == EXPECTED["zstd"][9]["input_ids"]["values"]
    for shard in folder.glob("*.mds"):
        flip(shard, shard.stat().st_size - 1)
    assert open_mds(folder).fingerprint != packs.fingerprint


def lengths_of(numbers: np.ndarray) -> list[int]:
    return np.bincount(numbers[numbers >= 0]).tolist()


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
        assert lengths_of(number_documents(width + padding, columns)) == lengths
    assert lengths_of(number_documents(width + 3, {"attention_mask": padded})) == [width]


@pytest.mark.parametrize("mask", [[3, 4], [9], [], [-1, 9]])
@pytest.mark.parametrize("positions", [{}, {"position_ids": [0, 1]}, {"position_ids": range(8)}])
def test_inconsistent_document_columns_are_rejected(mask, positions):
    columns = {"attention_mask": mask} | positions
    with pytest.raises(ValueError):
        number_documents(8, {name: np.array(column) for name, column in columns.items()})


def write_columns(folder: Path, dtype: str = "int32", **columns: Any) -> Path:
    """Write one sample of 8 tokens in raw MDS, with further columns of 8 numbers."""
    folder.mkdir(parents=True)
    dtypes = ["uint32", *[dtype] * len(columns)]
    columns = {"input_ids": range(8), **columns}
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


ONES = [1] * 8
AS_NUMBER = '["uint32"], "column_sizes": [4'


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        ({}, [4, 4]),
        ({"attention_mask": [1] * 6 + [0] * 2}, [4, 2]),
        ({"sequence_id": [0, 0, 1, 1, 1, 2, -1, -1]}, [2, 3, 1]),
        ({"sequence_id": ONES}, [8]),
        ({"position_ids": range(8)}, [8]),
        ({"dtype": "float32", "attention_mask": [1, 1, 1, 2, 2, 3, 0, 0]}, [3, 2, 1]),
    ],
    ids=["tokens alone", "mask", "numbers", "one number", "positions", "floats"],
)
def test_the_end_token_ends_documents_unless_a_column_does(columns, lengths, tmp_path: Path):
    tokenizer = train_tokenizer(["abc"], 260)
    tokenizer.add_special_tokens(["</s>"])
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": tokenizer.id_to_token(3)}))
    path = write_columns(tmp_path / "mds", **columns)
    with_tokenizer = open_mds(path, 8, tokenizer=str(tmp_path / "tokenizer"))
    without_tokenizer = open_mds(path, 8)
    assert with_tokenizer[0].lengths.tolist() == lengths
    same_lengths = lengths == without_tokenizer[0].lengths.tolist()
    same_packs = with_tokenizer.fingerprint == without_tokenizer.fingerprint
    assert same_packs == same_lengths or columns.get("dtype") == "float32"


@pytest.mark.parametrize(
    ("columns", "trained", "unread"),
    [
        ({"loss_mask": [0, 0, 1, 1, 0, 1, 1, 1], "token_type_ids": ONES}, [2, 3, 5, 6, 7], True),
        ({"sequence_id": ONES}, None, False),
        # Padding is never trained on, even if it has labels.
        (
            {"labels": [-100, -100, 2, 3, -100, 5, 6, 7], "attention_mask": [1] * 6 + [0] * 2},
            [2, 3, 5],
            False,
        ),
    ],
)
def test_a_mask_or_labels_determine_the_trained_tokens(columns, trained, unread, tmp_path: Path):
    write_columns(tmp_path / "train", **columns)
    write_columns(tmp_path / "val")
    packs = open_mds(tmp_path, 8)
    mask = packs[0].trained
    assert trained == (None if mask is None else np.flatnonzero(mask).tolist())
    notes = [f"{tmp_path}: columns not read: token_type_ids"]
    assert list(packs.notes) == (notes if unread else [])
    assert open_packs(DataSettings(packs=tmp_path, length=8), "held_out")[0].trained is None


@pytest.mark.parametrize(
    ("columns", "change", "length", "message"),
    [
        ({"attention_mask": [0, 1] * 4}, None, 8, r"00000\.mds, sample 0: .*padding only at its"),
        ({"attention_mask": [0] * 8}, None, 8, r"00000\.mds, sample 0: .*padding only at its end"),
        ({"labels": [*range(1, 8), -100]}, None, 8, "without a shift"),
        ({}, ("input_ids", "ids"), 8, "input_ids"),
        ({}, None, 64, r"`data\.length` is 64"),
        (
            {},
            ('["ndarray:uint32:8"], "column_sizes": [32', '["uint32"], "column_sizes": [4'),
            1,
            r"0\.mds",
        ),
        ({}, ('"shards": [', '"shards": [], "x": ['), 8, "no shards"),
    ],
)
def test_columns_that_make_no_packs_are_rejected(columns, change, length, message, tmp_path: Path):
    path = write_columns(tmp_path / "mds", **columns)
    if change:
        change_index(path, lambda text: text.replace(*change))
    with pytest.raises(InputError, match=message):
        open_mds(path, length)
