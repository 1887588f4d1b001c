"""The MDS reader against folders that the format's own library wrote, and what that library read back (tests/data/mds)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.__main__ import main
from packing.mds import MDSPacks, MDSReader, decoder, documents
from packing.settings import DataSettings
from packing.store import open_packs, with_own_held_out

FIXTURES = Path(__file__).parents[1] / "data" / "mds"
LENGTH = 32


@pytest.fixture
def fixture(tmp_path: Path):
    """A writable copy of a fixture folder, for those that get decompressed or damaged."""
    return lambda name: shutil.copytree(FIXTURES / name, tmp_path / name)


def expected(name: str) -> list[dict[str, Any]]:
    return json.loads((FIXTURES / f"{name}.expected.json").read_text())


def open_mds(path: Path, length: int = LENGTH):
    return open_packs(DataSettings(packs=path, length=length), "train")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def forget_hashes(folder: Path) -> None:
    """As many writers do: MDSWriter records none unless told to."""
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["reference", "zstd", "parts", "encodings", "scalar_uint32"])
def test_every_sample_is_what_the_formats_own_library_reads(fixture, name):
    reader = MDSReader([fixture(name)])
    assert len(reader) == len(expected(name))
    for index, columns in enumerate(expected(name)):
        sample = reader.sample(index)
        assert sample.keys() == columns.keys()
        for key, column in columns.items():
            value = sample[key]
            if "dtype" in column:
                assert value.dtype.name == column["dtype"] and list(value.shape) == column["shape"]
                assert value.tolist() == column["values"]
            else:
                read = {"int": lambda data: int.from_bytes(data, "little", signed=True), "str": bytes.decode}
                assert read.get(column["type"], list if column["type"] == "bytes" else json.loads)(value) == column["values"]


def test_reference_packs_have_the_documents_and_first_positions_that_its_columns_say():
    packs = open_mds(FIXTURES / "reference")
    rows = expected("reference")
    assert len(packs) == len(rows) == 12
    for index, row in enumerate(rows):
        pack = packs[index]
        assert pack.input_ids.dtype == np.uint32 and pack.input_ids.tolist() == row["input_ids"]["values"]
        assert pack.lengths.dtype == np.int32 and pack.lengths.tolist() == row["attention_mask"]["values"]
        assert packs.lengths(index).tolist() == row["attention_mask"]["values"]
        positions = np.concatenate([np.arange(n) for n in pack.lengths])
        positions[: pack.lengths[0]] += pack.first_position
        assert positions.tolist() == row["position_ids"]["values"]
    assert any(packs[index].first_position > 0 for index in range(12))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_an_open_shard_keeps_no_file_open():
    before = len(os.listdir("/proc/self/fd"))
    reader = MDSReader([FIXTURES / "reference"])
    assert len(os.listdir("/proc/self/fd")) == before and len(reader.sample(0)) > 0


def test_random_access_equals_sequential():
    packs = open_mds(FIXTURES / "reference")
    sequential = [packs[index].input_ids.copy() for index in range(len(packs))]
    for index in np.random.default_rng(0).permutation(len(packs)):
        assert np.array_equal(packs[int(index)].input_ids, sequential[index])
    with pytest.raises(IndexError):
        packs[len(packs)]


def test_documents_come_from_position_resets_where_there_is_no_mask(fixture):
    packs = open_mds(fixture("zstd"))
    for index, row in enumerate(expected("zstd")):
        positions = np.array(row["position_ids"]["values"])
        assert packs[index].lengths.tolist() == np.diff([*np.flatnonzero(positions == 0), LENGTH]).tolist()


def test_a_pack_is_one_document_where_only_tokens_are_stored_and_merged_parts_equal_parts(fixture):
    merged_folder = fixture("parts")
    merged = open_mds(merged_folder)
    (merged_folder / "index.json").unlink()
    parts = open_mds(merged_folder)
    assert len(merged) == len(parts) == 6
    for index, row in enumerate(expected("parts")):
        assert merged[index].lengths.tolist() == [LENGTH] and merged[index].first_position == 0
        assert merged[index].input_ids.tolist() == parts[index].input_ids.tolist() == row["input_ids"]["values"]
    assert merged.fingerprint == parts.fingerprint


def test_train_and_val_folders_are_the_two_splits(fixture, tmp_path):
    fixture("parts").rename(tmp_path / "train")
    fixture("reference").rename(tmp_path / "val")
    settings = DataSettings(packs=tmp_path, length=LENGTH, held_out=0.5)
    assert len(open_packs(settings, "train")) == 6
    assert len(open_packs(settings, "held_out")) == 12
    assert with_own_held_out(settings) == [tmp_path], "the share is of none"


def test_folders_side_by_side_that_are_no_parts_of_one_dataset_are_refused_by_name(fixture, tmp_path):
    fixture("reference"), fixture("zstd")
    with pytest.raises(InputError, match=r"holds the MDS folders reference, zstd, with different columns.*name one of them"):
        open_mds(tmp_path)
    (tmp_path / "zstd").rename(tmp_path / "train")
    assert len(open_mds(tmp_path)) == len(expected("zstd"))  # then the other is none of this training's business


def test_a_held_out_split_beside_parts_is_not_trained_on(fixture):
    parts = fixture("parts")
    (parts / "index.json").unlink()
    (parts / "1").rename(parts / "val")
    with pytest.raises(InputError, match=r"holds the MDS folders 0, val, and val is a split's name"):
        open_mds(parts)


def test_a_builtin_scalar_column_of_token_ids_is_refused_and_not_read_as_one_token():
    with pytest.raises(InputError, match=r"shard\.00000\.mds, sample 0: column `input_ids` holds one number"):
        open_mds(FIXTURES / "scalar_uint32", length=1)


def test_the_declared_size_tells_the_builtin_uint32_from_the_references():
    data = memoryview(np.array([7, 8], "<u4").tobytes())
    assert decoder("uint32", 4)(data[:4]) == 7
    assert decoder("uint32", None)(data).tolist() == [7, 8]
    assert decoder("uint32", None)(data[:4]).tolist() == [7]


def test_a_pickle_column_is_never_unpickled():
    data = pickle.dumps({"a": 1})
    assert decoder("pkl", None)(memoryview(data)) == data


def test_another_length_is_refused_by_name():
    with pytest.raises(InputError, match=r"holds 32 tokens, `data\.length` says 64"):
        open_mds(FIXTURES / "reference", length=64)


@pytest.mark.parametrize("name", ["reference", "zstd", "encodings"])
def test_a_flipped_bit_anywhere_is_found_before_anything_is_read(fixture, name):
    folder = fixture(name)
    shard = sorted(folder.glob("shard.*"))[-1]
    for position in (0, shard.stat().st_size // 2, shard.stat().st_size - 1):
        flip(shard, position)
        with pytest.raises(InputError, match=rf"{shard.name}: damaged: .* fetch"):
            MDSReader([folder])
        flip(shard, position)
    MDSReader([folder])


@pytest.mark.parametrize("name", ["reference", "zstd"])
def test_a_truncated_or_missing_shard_is_named(fixture, name):
    folder = fixture(name)
    shard = sorted(folder.glob("shard.*"))[0]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(InputError, match=rf"{shard.name}: truncated: .* fetch"):
        open_mds(folder)
    shard.unlink()
    with pytest.raises(InputError, match=rf"{shard.name}: missing"):
        open_mds(folder)


def test_only_one_recorded_hash_needs_to_differ(fixture):
    folder = fixture("reference")
    index = json.loads((folder / "index.json").read_text())
    hashes = index["shards"][0]["raw_data"]["hashes"]
    assert hashes["xxh64"] == xxhash.xxh64((folder / "shard.00000.mds").read_bytes()).hexdigest()
    hashes["xxh64"] = "0" * 16
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="its xxh64 is"):
        open_mds(folder)


@pytest.mark.parametrize("position", range(0, 1942, 61))
def test_damage_without_hashes_gives_an_input_error_or_another_fingerprint(fixture, position):
    """Nothing can tell a changed token from a right one here; but it is never mistaken for the data of an earlier run."""
    folder = fixture("reference")
    forget_hashes(folder)
    intact = open_mds(folder).fingerprint
    flip(folder / "shard.00000.mds", position)
    try:
        packs = open_mds(folder)
        for index in range(len(packs)):
            packs[index]
        assert packs.fingerprint != intact
    except InputError as error:
        assert "shard.00000.mds" in str(error)


def test_compressed_shards_are_unpacked_once_and_then_verified_as_they_lie(fixture):
    folder = fixture("zstd")
    fingerprint = open_mds(folder).fingerprint
    for packed in folder.glob("*.zstd"):
        packed.unlink()  # the format's library removes them too, unless told to keep them
    assert open_mds(folder).fingerprint == fingerprint
    flip(folder / "shard.00001.mds", 400)
    with pytest.raises(InputError, match=r"shard\.00001\.mds: damaged"):
        open_mds(folder)


def test_nothing_is_unpacked_through_a_link_out_of_the_folder(fixture, tmp_path: Path):
    folder, outside = fixture("zstd"), tmp_path / "outside"
    outside.mkdir()
    (folder / "linked").symlink_to(outside)
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(index.replace('"shard.00000.mds"', '"linked/shard.00000.mds"'))
    with pytest.raises(InputError, match="leads out of its folder"):
        open_mds(folder)
    assert not list(outside.iterdir())


def test_an_index_that_is_torn_or_leads_out_of_its_folder_is_refused(fixture):
    folder = fixture("reference")
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text[:-20])
    with pytest.raises(InputError, match=r"index\.json: cannot be read"):
        open_mds(folder)
    (folder / "index.json").write_text(text.replace("shard.00000.mds", "../shard.00000.mds"))
    with pytest.raises(InputError, match="outside its folder"):
        open_mds(folder)
    (folder / "index.json").write_text('{"version": 2}')
    with pytest.raises(InputError, match=r"index\.json: not an MDS index"):
        open_mds(folder)


def test_unknown_compression_is_refused_by_name(fixture):
    folder = fixture("reference")
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(index.replace('"compression": null', '"compression": "snappy"'))
    with pytest.raises(InputError, match="compressed with snappy"):
        open_mds(folder)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 1000), st.sampled_from(["uint8", "uint16", "int64"]))
def test_documents_are_found_from_lengths_from_positions_and_from_both(lengths, first_position, dtype):
    positions = np.concatenate([np.arange(n) for n in lengths])
    positions[: lengths[0]] += min(first_position, np.iinfo(dtype).max - 20)
    mask, positions = np.array(lengths, np.uint32), positions.astype(dtype)
    width = sum(lengths)
    if width == len(lengths):  # documents of one token each: the list of lengths looks like a mask of ones
        mask = np.ones(width, np.uint32)
    for given_mask in (mask, None):
        found, first = documents(width, given_mask, positions, "here")
        assert found.tolist() == lengths and first == positions[0]
    if width > len(lengths):
        assert documents(width, mask, None, "here")[0].tolist() == lengths


@given(st.integers(1, 30), st.integers(0, 30))
def test_an_ordinary_mask_covers_the_real_tokens_and_is_no_list_of_lengths(real, padding):
    mask = np.array([1] * real + [0] * padding)
    assert documents(real + padding, mask, None, "here")[0].tolist() == [real]


@pytest.mark.parametrize("mask", [[3, 4], [9], [], [-1, 9], [0, 1, 0, 1, 1, 1, 1, 1]])
def test_lengths_that_do_not_fill_the_pack_are_refused(mask):
    with pytest.raises(InputError, match="attention_mask"):
        documents(8, np.array(mask, np.int64), None, "here")


@pytest.mark.parametrize(
    ("positions", "says"), [([-1, 0, 1, 2], "-1, which"), ([0, 1, 2**31, 3], "2147483648, which"), ([0, 1], "2 positions for 4")]
)
def test_positions_that_are_none_are_named(positions, says):
    with pytest.raises(InputError, match=f"here: position_ids holds {says}"):
        documents(4, None, np.array(positions), "here")


def test_opening_packs_of_no_tokens_names_the_columns_there_are():
    with pytest.raises(InputError, match=r"an_int.*packs need one named input_ids"):
        MDSPacks([FIXTURES / "encodings"], FIXTURES / "encodings", LENGTH)


def write_labelled(folder: Path, labels: np.ndarray | None, mask: np.ndarray | None = None) -> Path:
    """One sample of 8 tokens with labels, and a mask, if any, in raw MDS."""
    folder.mkdir(parents=True)
    columns = [np.arange(8), *(each for each in (labels, mask) if each is not None)]
    count, sample = len(columns), b"".join(each.astype("<i4").tobytes() for each in columns)
    table = np.array([1, 12, 12 + len(sample)], "<u4").tobytes()
    (folder / "shard.00000.mds").write_bytes(table + sample)
    encodings, names = ["ndarray:uint32:8", "ndarray:int32:8", "ndarray:int32:8"], ["input_ids", "labels", "attention_mask"]
    layout = {"column_names": names, "column_encodings": encodings, "column_sizes": [32, 32, 32]}
    columns = {key: values[:count] for key, values in layout.items()}
    raw = {"basename": "shard.00000.mds", "bytes": len(table + sample), "hashes": {}}
    shard = {"version": 2, "format": "mds", "compression": None, "samples": 1, "raw_data": raw, "zip_data": None} | columns
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def test_labels_are_the_mask_of_packs_and_an_import_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture):
    labels = np.array([-100, -100, 2, 3, -100, 5, 6, 7])
    packs = open_mds(write_labelled(tmp_path / "mds", labels), 8)
    assert packs[0].trained.tolist() == packs.trained(0).tolist() == (labels >= 0).tolist()
    assert main(["import", str(tmp_path / "mds"), "--out", str(tmp_path / "arrow")]) == 0
    assert "trained on    5 tokens, by its labels" in capsys.readouterr().out
    imported = open_packs(DataSettings(packs=tmp_path / "arrow", length=8), "train")
    assert imported.trained(0).tolist() == (labels >= 0).tolist()
    assert main(["import", str(FIXTURES / "reference"), "--out", str(tmp_path / "all")]) == 0
    assert "every token" in capsys.readouterr().out


def joined(first: Path, second: Path) -> Path:
    """`first`, whose index has the shard of `second` too."""
    (second / "shard.00000.mds").rename(first / "shard.00001.mds")
    index, more = (json.loads((folder / "index.json").read_text()) for folder in (first, second))
    more["shards"][0]["raw_data"]["basename"] = "shard.00001.mds"
    index["shards"] += more["shards"]
    (first / "index.json").write_text(json.dumps(index))
    return first


def test_shards_of_one_index_may_differ_in_columns_that_each_sample_is_asked_for(tmp_path: Path):
    mask, labels = np.array([1] * 6 + [0] * 2), np.arange(8)
    masked, plain = (write_labelled(tmp_path / str(number), labels, each) for number, each in enumerate((mask, None)))
    packs = open_mds(joined(plain, masked), 8)
    assert [packs.trained(index).sum() for index in range(2)] == [8, 6]


def test_shards_of_one_index_with_and_without_labels_are_refused(tmp_path: Path):
    first = joined(*(write_labelled(tmp_path / name, labels) for name, labels in (("mds", None), ("more", np.arange(8)))))
    with pytest.raises(InputError, match=r"shard.00001.mds: has other columns than .*shard.00000.mds; take the shards of one"):
        open_mds(first, 8)


def test_padding_is_not_counted_as_trained_on_whatever_its_labels_say(tmp_path: Path, capsys: pytest.CaptureFixture):
    labels, mask = np.array([-100, 1, 2, 3, 4, 5, 6, 7]), np.array([1, 1, 1, 1, 0, 0, 0, 0])
    packs = open_mds(write_labelled(tmp_path / "mds", labels, mask), 8)
    assert packs.trained(0).tolist() == [False] + [True] * 3 + [False] * 4
    assert main(["inspect", str(tmp_path / "mds")]) == 0
    assert "trained on    75.00% of the tokens" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "mds"), "--out", str(tmp_path / "arrow")]) == 0
    assert "trained on    3 tokens, by its labels" in capsys.readouterr().out


@pytest.mark.parametrize("labelled", ["train", "val"])
def test_labels_in_one_split_alone_leave_the_other_wholly_trained_on(labelled: str, tmp_path: Path, capsys: Any):
    for name in ("train", "val"):
        write_labelled(tmp_path / "mds" / name, np.array([-100] * 6 + [6, 7]) if name == labelled else None)
    assert main(["inspect", str(tmp_path / "mds")]) == 0
    assert capsys.readouterr().out.count("trained on") == 1
    assert main(["import", str(tmp_path / "mds"), "--out", str(tmp_path / "arrow")]) == 0
    assert "trained on    10 tokens, by its labels" in capsys.readouterr().out
    settings = DataSettings(packs=tmp_path / "arrow", length=8)
    found = {name: open_packs(settings, split).trained(0).sum() for name, split in (("train", "train"), ("val", "held_out"))}
    assert found == {"train": 8, "val": 8} | {labelled: 2}


def test_labels_that_are_shifted_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"neither its tokens nor -100.*not shifted"):
        open_mds(write_labelled(tmp_path / "mds", np.append(np.arange(1, 8), -100)), 8)
