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
from tests.conftest import flip

FIXTURES = Path(__file__).parents[1] / "data" / "mds"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURES / "expected.json").read_text())
LENGTH = 32


@pytest.fixture
def fixture(tmp_path: Path):
    """Return a function that makes a writable copy of a fixture folder, with unpacked shards."""

    def copy(name: str) -> Path:
        folder = shutil.copytree(FIXTURES / name, tmp_path / name)
        for shard in folder.glob("*.zstd"):
            raw = pa.input_stream(str(shard), compression="zstd").read()
            shard.with_suffix("").write_bytes(raw)
            shard.unlink()
        return folder

    return copy


def open_mds(path: Path, length: int = LENGTH) -> Packs:
    return open_packs(DataSettings(packs=path, length=length), "train")


def change_index(folder: Path, old: str, new: str) -> None:
    text = (folder / "index.json").read_text()
    assert old in text
    (folder / "index.json").write_text(text.replace(old, new))


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
                read = {
                    "int": lambda data: int.from_bytes(data, "little", signed=True),
                    "str": bytes.decode,
                }
                assert (
                    read.get(column["type"], list if column["type"] == "bytes" else json.loads)(
                        value
                    )
                    == column["values"]
                )


def test_columns_determine_documents():
    packs = open_mds(FIXTURES / "reference")
    rows = EXPECTED["reference"]
    assert len(packs) == len(rows) == 12
    for index in np.random.default_rng(0).permutation(12).tolist():
        pack = packs[index]
        row = rows[index]
        assert (
            pack.input_ids.dtype == np.uint32
            and pack.input_ids.tolist() == row["input_ids"]["values"]
        )
        assert (
            pack.lengths.dtype == np.int32
            and pack.lengths.tolist() == row["attention_mask"]["values"]
        )
        assert pack.trained is None


def test_train_and_val_folders_are_the_splits(fixture, tmp_path):
    fixture("reference").rename(tmp_path / "train")
    one_shard = fixture("reference").rename(tmp_path / "val")
    index = json.loads((one_shard / "index.json").read_text())
    (one_shard / "index.json").write_text(json.dumps(index | {"shards": index["shards"][:1]}))
    settings = DataSettings(packs=tmp_path, length=LENGTH, held_out=0.5)
    assert len(open_packs(settings, "train")) == 12
    assert len(open_packs(settings, "held_out")) == 6
    (tmp_path / "train").rename(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "test")
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


def test_unpacked_shards_have_the_tokens_and_positions(fixture):
    packs = open_mds(fixture("zstd"))
    rows = EXPECTED["zstd"]
    assert len(packs) == len(rows) == 10
    for index in (9, *range(9)):
        assert packs[index].input_ids.tolist() == rows[index]["input_ids"]["values"]
        positions = np.concatenate([np.arange(n) for n in packs[index].lengths])
        assert positions.tolist() == rows[index]["position_ids"]["values"]
    packs.verify()


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
    if width == len(lengths):
        mask = np.ones(width, np.uint32)
    for columns in (
        {"attention_mask": mask, "position_ids": positions},
        {"position_ids": positions},
    ):
        assert lengths_of(number_documents(width, columns)) == lengths
    for name in ("seq_lengths", "attention_mask")[: 1 + (width > len(lengths))]:
        assert lengths_of(number_documents(width, {name: np.array(lengths, np.uint32)})) == lengths
    assert lengths_of(number_documents(width, {"cu_seqlens": np.cumsum([0, *lengths])})) == lengths
    numbered = np.append(np.repeat(np.arange(len(lengths)), lengths), [-1, -1, -1])
    assert lengths_of(number_documents(width + 3, {"sequence_id": numbered})) == lengths
    padded = np.append(np.ones(width, np.int64), np.zeros(3, np.int64))
    assert lengths_of(number_documents(width + 3, {"attention_mask": padded})) == [width]
    both = {"attention_mask": padded, "position_ids": np.append(positions, [0, 0, 0])}
    assert lengths_of(number_documents(width + 3, both)) == lengths


@pytest.mark.parametrize("mask", [[3, 4], [9], [], [-1, 9]])
@pytest.mark.parametrize("positions", [None, [0, 1], [0, *range(7)]])
def test_inconsistent_document_columns_are_rejected(mask, positions):
    columns = {"attention_mask": np.array(mask, np.int64)}
    with pytest.raises(ValueError):
        number_documents(
            8, columns | ({} if positions is None else {"position_ids": np.array(positions)})
        )


def write_columns(folder: Path, **columns: Any) -> Path:
    """Write one sample of 8 tokens in raw MDS, with further columns of 8 numbers."""
    folder.mkdir(parents=True)
    columns = {"input_ids": np.arange(8), **columns}
    sample = b"".join(np.asarray(column, "<i4").tobytes() for column in columns.values())
    table = np.array([1, 12, 12 + len(sample)], "<u4").tobytes()
    (folder / "shard.00000.mds").write_bytes(table + sample)
    encodings = ["ndarray:uint32:8", *["ndarray:int32:8"] * (len(columns) - 1)]
    layout = {
        "column_names": list(columns),
        "column_encodings": encodings,
        "column_sizes": [32] * len(columns),
    }
    raw = {"basename": "shard.00000.mds", "bytes": len(table + sample), "hashes": {}}
    shard = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "samples": 1,
        "raw_data": raw,
        "zip_data": None,
    } | layout
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


ONES = [1] * 8


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        ({}, [4, 4]),
        ({"attention_mask": [1] * 6 + [0] * 2}, [4, 2]),
        ({"sequence_id": [0, 0, 1, 1, 1, 2, -1, -1]}, [2, 3, 1]),
        ({"sequence_id": ONES}, [8]),
        ({"position_ids": range(8)}, [8]),
    ],
    ids=["tokens alone", "mask", "numbers", "one number", "positions"],
)
def test_the_end_token_ends_documents_unless_a_column_does(columns, lengths, tmp_path: Path):
    tokenizer = train_tokenizer(["abc"], 260)
    tokenizer.add_special_tokens(["</s>"])
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": tokenizer.id_to_token(3)}))
    path = write_columns(tmp_path / "mds", **columns)
    settings = DataSettings(packs=path, length=8, tokenizer=str(tmp_path / "tokenizer"))
    with_tokenizer = open_packs(settings, "train")
    without_tokenizer = open_mds(path, 8)
    assert with_tokenizer[0].lengths.tolist() == lengths
    assert (with_tokenizer.fingerprint == without_tokenizer.fingerprint) == (
        with_tokenizer[0].lengths.tolist() == without_tokenizer[0].lengths.tolist()
    )


def test_a_loss_mask_is_used_and_an_unread_column_is_named(tmp_path: Path):
    path = write_columns(tmp_path / "mds", loss_mask=[0, 0, 1, 1, 0, 1, 1, 1], token_type_ids=ONES)
    packs = open_mds(path, 8)
    assert packs[0].trained.tolist() == [
        False,
        False,
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    assert packs.notes == [f"{path}: columns not read: token_type_ids"]
    assert not open_mds(write_columns(tmp_path / "read", sequence_id=ONES), 8).notes


def test_a_mask_of_floats_numbers_the_documents(tmp_path: Path):
    path = write_columns(tmp_path / "mds", attention_mask=[1, 1, 1, 2, 2, 3, 0, 0])
    shard = path / "shard.00000.mds"
    data = shard.read_bytes()
    mask = np.frombuffer(data[-32:], "<i4").astype("<f4")
    shard.write_bytes(data[:-32] + mask.tobytes())
    change_index(path, "ndarray:int32:8", "ndarray:float32:8")
    assert open_mds(path, 8)[0].lengths.tolist() == [3, 2, 1]


def test_padding_before_a_token_is_rejected(tmp_path: Path):
    for number, mask in enumerate(([0, 1] * 4, [0] * 8)):
        with pytest.raises(
            InputError, match=r"shard\.00000\.mds, sample 0: .*padding only at its end"
        ):
            open_mds(write_columns(tmp_path / str(number), attention_mask=mask), 8)


def test_columns_without_packs_of_this_length_are_rejected(tmp_path: Path):
    for path, length, message in (
        ("encodings", LENGTH, "input_ids"),
        ("reference", 64, r"`data\.length` is 64"),
    ):
        with pytest.raises(InputError, match=message):
            open_mds(FIXTURES / path, length)
    number = write_columns(tmp_path / "number")
    change_index(number, '"ndarray:uint32:8"', '"uint32"')
    change_index(number, "[32]", "[4]")
    with pytest.raises(InputError, match=r"shard\.00000\.mds"):
        open_mds(number, 1)
    with pytest.raises(InputError, match="without a shift"):
        open_mds(write_columns(tmp_path / "shifted", labels=[*range(1, 8), -100]), 8)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(InputError, match="no shards"):
        open_mds(tmp_path, 8)


def test_labels_determine_the_trained_tokens(tmp_path: Path):
    """Padding is never trained on, even if it has labels."""
    write_columns(
        tmp_path / "mds" / "train",
        labels=[-100, -100, 2, 3, -100, 5, 6, 7],
        attention_mask=[1] * 6 + [0] * 2,
    )
    write_columns(tmp_path / "mds" / "val")
    settings = DataSettings(packs=tmp_path / "mds", length=8)
    assert open_packs(settings, "train")[0].trained.tolist() == [
        False,
        False,
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    assert open_packs(settings, "held_out")[0].trained is None
