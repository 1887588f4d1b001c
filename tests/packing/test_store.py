"""Arrow packs, opening packs of any format, and holding packs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation import files
from foundation.errors import InputError
from packing import arrow
from packing.arrow import ArrowPacks, Pack, write_packs
from packing.order import splitmix64
from packing.settings import DataSettings
from packing.store import open_packs, split_by_hash
from tests.conftest import flip
from tests.packing.conftest import PacksInMemory

LENGTH = 16
TOKENIZER = {"name": "tiny", "fingerprint": "f" * 64, "vocab_size": 1000, "eos_id": 0}


def some_packs(count: int, seed: int = 0) -> list[Pack]:
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        covered = int(rng.integers(1, LENGTH + 1))
        count_of_cuts = min(covered - 1, int(rng.integers(0, 5)))
        cuts = np.sort(rng.choice(np.arange(1, covered), size=count_of_cuts, replace=False))
        lengths = np.diff([0, *cuts, covered]).astype(np.int32)
        packs.append(Pack(rng.integers(0, 1000, LENGTH).astype(np.uint32), lengths))
    return packs


def write(
    path: Path,
    train: list[Pack],
    held_out: list[Pack] = (),
    *,
    at_once: int = 7,
    shard_bytes: int = 2**20,
    **more: Any,
) -> dict:
    """Write packs in groups of `at_once` and return the manifest."""
    splits = {
        split: [packs[start : start + at_once] for start in range(0, len(packs), at_once)]
        for split, packs in (("train", train), ("held_out", held_out))
        if packs
    }
    facts = {"settings": {"length": LENGTH}, "statistics": {"documents": 3}, "tokenizer": TOKENIZER}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow, "SHARD_BYTES", shard_bytes)
        return write_packs(path, LENGTH, splits, **facts, **more)


def data_settings(path: Path, **values: object) -> DataSettings:
    return DataSettings(packs=path, **{"length": LENGTH, **values})


@given(
    count=st.integers(1, 60),
    at_once=st.integers(1, 20),
    shard_bytes=st.sampled_from([1, 2000, 2**20]),
    seed=st.integers(0, 9),
)
def test_packs_are_read_as_written_in_any_order(
    tmp_path_factory, count, at_once, shard_bytes, seed
):
    path = tmp_path_factory.mktemp("arrow") / "packs"
    written = some_packs(count, seed)
    write(path, written, at_once=at_once, shard_bytes=shard_bytes)
    packs = ArrowPacks(path)
    assert len(packs) == count
    for index in np.random.default_rng(seed).permutation(count):
        pack = packs[int(index)]
        assert pack.input_ids.dtype == np.uint32 and pack.lengths.dtype == np.int32
        assert pack.input_ids.tolist() == written[index].input_ids.tolist()
        assert pack.lengths.tolist() == written[index].lengths.tolist()
    for outside in (-1, count):
        with pytest.raises(IndexError):
            packs[outside]


def test_huggingface_datasets_reads_each_file(tmp_path):
    import datasets  # slow to import

    packs = some_packs(50)
    write(tmp_path / "packs", packs, shard_bytes=1000)
    files = sorted((tmp_path / "packs" / "train").glob("*.arrow"))
    parts = [datasets.Dataset.from_file(str(file)) for file in files]
    dataset = datasets.concatenate_datasets(parts)
    assert len(files) > 2
    assert dataset["input_ids"][:] == [pack.input_ids.tolist() for pack in packs]
    assert dataset["lengths"][:] == [pack.lengths.tolist() for pack in packs]
    assert dataset["first_position"][:] == [0] * len(packs)


def test_the_fingerprint_depends_on_content_and_order_not_on_shards(tmp_path):
    def fingerprint(packs: list[Pack], at_once: int = 7, shard_bytes: int = 2**20) -> str:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        manifest = write(path, packs, at_once=at_once, shard_bytes=shard_bytes)
        return manifest["splits"]["train"]["fingerprint"]

    packs = some_packs(40)
    same = {fingerprint(packs, *shards) for shards in ((1, 1), (7, 2000), (40, 2**20))}
    assert len(same) == 1
    swapped = [packs[1], packs[0], *packs[2:]]
    recut = [Pack(packs[0].input_ids, np.array([1, 1], np.int32)), *packs[1:]]
    assert len({*same, fingerprint(swapped), fingerprint(recut)}) == 3


def test_damage_is_found_when_packs_are_opened_or_verified(tmp_path, monkeypatch):
    """Files beside the packs, and a large folder, are hashed only by `verify`."""
    path = tmp_path / "packs"
    manifest = write(path, some_packs(4), texts={"tokenizer.json": "{}"})
    assert [file["name"] for file in manifest["files"]] == ["tokenizer.json"]
    packs = ArrowPacks(path)
    packs.verify()
    assert packs.manifest == manifest
    (path / "tokenizer.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer\.json: damaged"):
        ArrowPacks(path).verify()
    shard = path / "train/data-00000.arrow"
    damaged = rf"{shard.name}: damaged.*; prepare the packs again"
    flip(shard, shard.read_bytes().index(some_packs(4)[0].input_ids.tobytes()))
    with pytest.raises(InputError, match=damaged):
        open_packs(data_settings(path), "train")
    monkeypatch.setattr(files, "ALWAYS_HASHED_BYTES", 0)
    large = ArrowPacks(path)
    with pytest.raises(InputError, match=damaged):
        large.verify()
    flip(shard)  # the last byte is not a token, but a part of Arrow's format
    with pytest.raises(InputError, match=damaged):
        ArrowPacks(path)
    for damage in (lambda text: text.replace('"documents": 3', '"documents": 7'), lambda text: "{"):
        (path / "packs.json").write_text(damage((path / "packs.json").read_text()))
        with pytest.raises(InputError, match=r"packs\.json: (this file is damaged|cannot be read)"):
            open_packs(data_settings(path), "train")


def test_an_existing_held_out_split_is_used(tmp_path):
    write(tmp_path / "packs", some_packs(10), some_packs(3))
    for share in (0.0, 0.5):
        data = data_settings(tmp_path / "packs", held_out=share)
        assert (len(open_packs(data, "train")), len(open_packs(data, "held_out"))) == (10, 3)


@given(count=st.integers(2, 300), share=st.floats(0.001, 0.999))
def test_packs_with_the_smallest_hashes_are_held_out(count, share):
    """The same packs must be held out after a resume."""

    packs = PacksInMemory([Pack(np.array([n]), np.array([1])) for n in range(count)])
    held_out_count = max(1, round(share * count))
    if held_out_count >= count:
        with pytest.raises(InputError, match=r"set data\.held_out to 0"):
            split_by_hash(packs, share, "train")
        return
    train, held_out = (split_by_hash(packs, share, split) for split in ("train", "held_out"))
    hashes = splitmix64(np.arange(count, dtype=np.uint64)).tolist()
    chosen = sorted(sorted(range(count), key=hashes.__getitem__)[:held_out_count])
    assert [int(pack.input_ids[0]) for pack in held_out] == chosen
    assert [int(pack.input_ids[0]) for pack in train] == sorted({*range(count)} - {*chosen})
    assert train.fingerprint != held_out.fingerprint
