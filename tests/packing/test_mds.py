"""The MDS reader against folders that the format's own library wrote, and what that library read back (tests/data/mds).

mosaicml-streaming 0.13.0 wrote them: `reference` in the reference's layout, three columns in a custom encoding registered as
`uint32` (raw bytes of arrays, no fixed size), `attention_mask` with lengths of documents, positions that go on in cut ones;
`encodings` in every encoding that the reader takes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.arrow import Packs
from packing.other_formats import decoder, documents, read_index
from packing.settings import DataSettings
from packing.store import open_packs
from tests.conftest import flip

FIXTURES = Path(__file__).parents[1] / "data" / "mds"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURES / "expected.json").read_text())
LENGTH = 32


@pytest.fixture
def fixture(tmp_path: Path):
    """A writable copy of a fixture folder."""
    return lambda name: shutil.copytree(FIXTURES / name, tmp_path / name)


def open_mds(path: Path, length: int = LENGTH) -> Packs:
    return open_packs(DataSettings(packs=path, length=length), "train")


def change_index(folder: Path, old: str, new: str) -> None:
    text = (folder / "index.json").read_text()
    assert old in text
    (folder / "index.json").write_text(text.replace(old, new))


@pytest.mark.parametrize("name", EXPECTED)
def test_every_sample_is_what_the_formats_own_library_reads(fixture, name):
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


def test_reference_packs_have_the_documents_and_first_positions_that_its_columns_say():
    packs, rows = open_mds(FIXTURES / "reference"), EXPECTED["reference"]
    assert len(packs) == len(rows) == 12
    for index in np.random.default_rng(0).permutation(12).tolist():
        pack, row = packs[index], rows[index]
        assert (
            pack.input_ids.dtype == np.uint32
            and pack.input_ids.tolist() == row["input_ids"]["values"]
        )
        assert (
            pack.lengths.dtype == np.int32
            and pack.lengths.tolist() == row["attention_mask"]["values"]
        )
        assert pack.trained is None
        positions = np.concatenate([np.arange(n) for n in pack.lengths])
        positions[: pack.lengths[0]] += pack.first_position
        assert positions.tolist() == row["position_ids"]["values"]
    assert any(packs[index].first_position > 0 for index in range(12))


def test_train_and_val_folders_are_the_two_splits_and_val_alone_is_not_trained_on(
    fixture, tmp_path
):
    fixture("reference").rename(tmp_path / "train")
    one_shard = fixture("reference").rename(tmp_path / "val")
    index = json.loads((one_shard / "index.json").read_text())
    (one_shard / "index.json").write_text(json.dumps(index | {"shards": index["shards"][:1]}))
    settings = DataSettings(packs=tmp_path, length=LENGTH, held_out=0.5)
    assert len(open_packs(settings, "train")) == 12
    assert len(open_packs(settings, "held_out")) == 6
    (tmp_path / "train").rename(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "test")
    with pytest.raises(InputError, match="holds no packs"):
        open_mds(tmp_path)


def test_the_declared_size_tells_the_builtin_uint32_from_the_references():
    data = memoryview(np.array([7, 8], "<u4").tobytes())
    assert decoder("uint32", 4)(data[:4]) == 7
    assert decoder("uint32", None)(data).tolist() == [7, 8]
    assert decoder("pkl", None)(data) == data, "nothing is unpickled"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_flipped_bit_anywhere_is_found_before_anything_is_read(fixture, name):
    folder = fixture(name)
    shard = sorted(folder.glob("shard.*.mds"))[-1]
    for position in (0, shard.stat().st_size // 2, shard.stat().st_size - 1):
        flip(shard, position)
        with pytest.raises(InputError, match=rf"{shard.name}: damaged"):
            read_index(folder)
        flip(shard, position)
    read_index(folder)


def test_compressed_shards_are_read_beside_what_is_in_them_and_else_refused_with_the_command_that_unpacks_them(
    fixture,
):
    change_index(
        folder := fixture("reference"),
        '"zip_data": null',
        '"zip_data": {"basename": "shard.mds.zstd"}',
    )
    assert len(open_mds(folder)) == 12
    (folder / "shard.00000.mds").unlink()
    with pytest.raises(InputError, match=r"shard\.mds\.zstd: is compressed; .*zstd -d"):
        open_mds(folder)
    assert not (folder / "shard.00000.mds").exists(), "nothing is written into a folder of packs"


@pytest.mark.parametrize("outside", ["../shard.00000.mds", "/etc/passwd"])
def test_a_shard_outside_of_its_folder_is_refused(outside: str, fixture):
    change_index(folder := fixture("reference"), '"shard.00000.mds"', f'"{outside}"')
    with pytest.raises(InputError, match=f"index.json: {outside} is outside"):
        open_mds(folder)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(0, 1000),
    st.sampled_from(["uint8", "uint16", "int64"]),
)
def test_documents_are_found_from_lengths_from_positions_and_from_both(
    lengths, first_position, dtype
):
    positions = np.concatenate([np.arange(n) for n in lengths])
    positions[: lengths[0]] += min(first_position, np.iinfo(dtype).max - 20)
    mask, positions = np.array(lengths, np.uint32), positions.astype(dtype)
    width = sum(lengths)
    # documents of one token each: the list of lengths looks like a mask of ones
    if width == len(lengths):
        mask = np.ones(width, np.uint32)
    for given_mask in (mask, None):
        found, first = documents(width, given_mask, positions, "here")
        assert found.tolist() == lengths and first == positions[0]
    if width > len(lengths):
        assert documents(width, mask, None, "here")[0].tolist() == lengths
    padded = np.append(np.ones(width, np.int64), np.zeros(3, np.int64))
    assert documents(width + 3, padded, None, "here")[0].tolist() == [width]


@pytest.mark.parametrize("mask", [[3, 4], [9], [], [-1, 9], [0, 1, 0, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("positions", [None, [0, 1], [-1, *range(7)]])
def test_masks_and_positions_that_make_no_pack_are_refused(mask, positions):
    with pytest.raises(InputError, match="here: attention_mask and position_ids"):
        documents(
            8, np.array(mask, np.int64), None if positions is None else np.array(positions), "here"
        )


def write_labelled(folder: Path, labels: np.ndarray | None, mask: np.ndarray | None = None) -> Path:
    """One sample of 8 tokens with labels, and a mask, if any, in raw MDS."""
    folder.mkdir(parents=True)
    columns = [np.arange(8), *(each for each in (labels, mask) if each is not None)]
    count, sample = len(columns), b"".join(each.astype("<i4").tobytes() for each in columns)
    table = np.array([1, 12, 12 + len(sample)], "<u4").tobytes()
    (folder / "shard.00000.mds").write_bytes(table + sample)
    encodings, names = (
        ["ndarray:uint32:8", "ndarray:int32:8", "ndarray:int32:8"],
        ["input_ids", "labels", "attention_mask"],
    )
    layout = {"column_names": names, "column_encodings": encodings, "column_sizes": [32, 32, 32]}
    columns = {key: values[:count] for key, values in layout.items()}
    raw = {"basename": "shard.00000.mds", "bytes": len(table + sample), "hashes": {}}
    shard = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "samples": 1,
        "raw_data": raw,
        "zip_data": None,
    } | columns
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def test_columns_that_make_no_packs_of_this_length_are_refused(tmp_path: Path):
    for path, length, says in (
        ("encodings", LENGTH, "input_ids"),
        ("reference", 64, r"`data\.length` says 64"),
    ):
        with pytest.raises(InputError, match=says):
            open_mds(FIXTURES / path, length)
    number = write_labelled(tmp_path / "number", None)
    change_index(number, '"ndarray:uint32:8"', '"uint32"')
    change_index(number, "[32]", "[4]")
    with pytest.raises(InputError, match=r"shard\.00000\.mds"):
        open_mds(number, 1)
    with pytest.raises(InputError, match="unshifted"):
        open_mds(write_labelled(tmp_path / "shifted", np.append(np.arange(1, 8), -100)), 8)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(InputError, match="no shards"):
        open_mds(tmp_path, 8)


def test_labels_are_the_mask_of_packs(tmp_path: Path):
    """Padding is not counted as trained on, whatever its labels say."""
    labels, mask = np.array([-100, -100, 2, 3, -100, 5, 6, 7]), np.array([1] * 6 + [0] * 2)
    for name, columns in (("train", (labels, mask)), ("val", (None, None))):
        write_labelled(tmp_path / "mds" / name, *columns)
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
