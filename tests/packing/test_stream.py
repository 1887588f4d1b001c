"""Packs that are made while a run trains: the same whoever makes them and how often, on a disk that is bounded."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from packing import arrow, stream
from packing.arrow import FIRST
from packing.prepare import PackMaker, pack_ahead, prepare
from packing.settings import DataSettings
from packing.store import open_packs, training_parts
from packing.stream import PackerProcess, PartStart, StreamedPacks, bytes_below

LENGTH, STEP = 32, 6  # tokens of a pack, packs of a step


class PackingHere(ExitStack):
    """Packs in this process, and only what is waited for."""

    def __init__(self, data: DataSettings) -> None:
        super().__init__()
        self.data, self.most, self.steps = data, 0, iter(())
        self.makers = {
            name: self.enter_context(PackMaker(part, 1))
            for name, part in training_parts(data).items()
        }

    def begin(self, starts: Mapping[str, Any]) -> None:
        self.reading = dict.fromkeys(starts, (0, 0))
        parts = {name: PartStart(**each) for name, each in starts.items()}
        self.steps = pack_ahead(self.data, self.makers, parts, self.reading)

    def tell(self, reading: Mapping[str, tuple[int, int]]) -> None:
        self.reading.update(reading)

    def check(self) -> None:
        next(self.steps, None)
        self.measure()

    def run_ahead(self) -> None:
        while next(self.steps, False):
            self.measure()

    def measure(self) -> None:
        self.most = max(self.most, bytes_below(self.data.packs))


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Nothing here cuts the power, and who waits for a part makes it himself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "LOOK", 0)
        for name in ("fsync", "fsync_tree"):
            patch.setattr(arrow, name, lambda path: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """Two sources."""
    folder = tmp_path_factory.mktemp("streams")
    for name, size, count in (("web", 500, 90), ("code", 260, 60)):
        texts = [
            text[begin : begin + size]
            for text in documents
            for begin in (0, 3000, 6000)
            if text[begin:]
        ][:count]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return folder


@pytest.fixture(scope="module")
def values(folder: Path, tokenizer_file: Path) -> dict[str, Any]:
    streaming = {"disk_gb": 0.001, "window": 2000}
    common = {
        "tokenizer": str(tokenizer_file),
        "length": LENGTH,
        "held_out": 0.1,
        "streaming": streaming,
    }
    return common | {"source": str(folder / "web.jsonl"), "packs": str(folder / "packs")}


def two_sources(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    both = [
        {"source": str(folder / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("web", 0.7), ("code", 0.3))
    ]
    return {key: value for key, value in values.items() if key != "source"} | {"sources": both}


def streamed(values: dict[str, Any], packs: Path, **streaming: Any) -> DataSettings:
    data = DataSettings(**values | {"packs": packs, "streaming": values["streaming"] | streaming})
    prepare(data, progress=False)
    return data


def packed_by(
    packing: Any, data: DataSettings, record: dict[str, Any] | None = None
) -> StreamedPacks:
    """The packs that a run reads, from where a checkpoint was."""
    packs = open_packs(data, "train")
    packs.packing = packing
    packs.begin(record)
    return packs


def steps(
    packs: StreamedPacks, first: int, last: int, *, ahead: PackingHere | None = None
) -> Iterator[tuple[list[bytes], dict[str, Any]]]:
    """Of each step the packs that it trains on, and what a checkpoint after it says."""
    order = packs.order(STEP, seed=3)
    for number in range(first, last):
        packs.reads(order.places_of_step(number))
        if ahead:
            ahead.run_ahead()
        read = [packs[index].input_ids.tobytes() for index in order.packs_of_step(number).tolist()]
        packs.reads(order.places_of_step(number + 1))
        yield read, json.loads(json.dumps(packs.record()))


def part_folders(packs: Path) -> list[Path]:
    return sorted(path for path in packs.glob("**/part-*") if path.name != FIRST)


@settings(max_examples=3)
@given(st.data())
def test_resumed_anywhere_a_stream_is_the_same_and_never_exceeds_its_disk(
    values: dict[str, Any],
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    draw: st.DataObject,
) -> None:
    sources = draw.draw(st.sampled_from([values, two_sources(values, folder)]))
    window, disk = draw.draw(st.integers(1200, 4000)), draw.draw(st.floats(0.00024, 0.0006))
    killed, last = draw.draw(st.integers(1, 19)), 20
    packs = tmp_path_factory.mktemp("drawn")
    with PackingHere(whole := streamed(sources, packs / "whole", window=window)) as packing:
        unbounded = packed_by(packing, whole)
        expected = [read for read, _ in steps(unbounded, 0, last)]

    with PackingHere(
        data := streamed(sources, packs / "bounded", window=window, disk_gb=disk)
    ) as packing:
        first = packed_by(packing, data)
        assert first.fingerprint == unbounded.fingerprint
        before = list(steps(first, 0, killed, ahead=packing))
        with first.waiting():
            list(steps(first, killed, min(killed + 2, last)))  # which are lost
        first.begin(before[-1][1])  # as a rollback does, in the same process
        again = [read for read, _ in steps(first, killed, min(killed + 2, last))]
    if draw.draw(st.booleans()):  # another machine, or all of it was passed long ago
        for part in part_folders(data.packs):
            shutil.rmtree(part)
    with PackingHere(data) as resumed:
        second = packed_by(resumed, data, before[-1][1])
        rest = [read for read, _ in steps(second, killed, last, ahead=resumed)]
    assert [read for read, _ in before] + rest == expected and again == expected[
        killed : killed + 2
    ]
    assert 0 < max(packing.most, resumed.most) <= disk * 1e9


@pytest.mark.parametrize("window", [3000, 10**6], ids=["a part of the text", "all of it"])
def test_what_is_held_out_is_not_trained_on_where_the_text_begins_again(
    window: int, values: dict[str, Any], tmp_path: Path
):
    data = streamed(values | {"held_out": 0.2}, tmp_path / "packs", window=window)
    held_out = open_packs(data, "held_out")
    of_evaluation = {
        tuple(document)
        for index in range(len(held_out))
        for document in documents_in(held_out[index])
    }
    with PackingHere(data) as packing:
        packs = packed_by(packing, data)
        order, epochs = packs.order(1, seed=1), list[list[bytes]]()
        trained: set[tuple[int, ...]] = set()
        for step in itertools.count():
            packs.reads(order.places_of_step(step))
            pack = packs[int(order.packs_of_step(step)[0])]
            if (epoch := int(order.epoch_of(step + 1))) == 3:
                break
            epochs += [[]] if epoch == len(epochs) else []
            epochs[epoch].append(pack.input_ids.tobytes())
            trained |= {tuple(document) for document in documents_in(pack)}
    assert of_evaluation and not trained & of_evaluation
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and epochs[0] != epochs[1]


def documents_in(pack: Any) -> list[list[int]]:
    """Pieces of documents that are long enough to be of one only."""
    pieces = np.split(pack.input_ids, np.cumsum(pack.lengths))[: len(pack.lengths)]
    return [piece.tolist() for piece in pieces if len(piece) >= 16]


def test_text_that_has_changed_where_a_run_goes_on_is_refused(
    values: dict[str, Any], tmp_path: Path
) -> None:
    source = Path(shutil.copy(values["source"], tmp_path / "text.jsonl"))
    data = streamed(values | {"source": str(source)}, tmp_path / "packs")
    with PackingHere(data) as packing:
        *_, (_, record) = steps(packed_by(packing, data), 0, 30)
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(line.replace("s", "z") for line in lines))
    for part in part_folders(data.packs):
        shutil.rmtree(part)
    with PackingHere(data) as packing, pytest.raises(InputError, match="text has changed"):
        list(steps(packed_by(packing, data, record), 30, 31))


def test_packs_come_from_a_process_of_their_own_whose_end_is_told(
    values: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stream, "LOOK", 0.02)
    Path("numpy.py").write_text("raise SystemExit('imported from the current folder')")
    data = streamed(two_sources(values, folder) | {"text": "{text}."}, tmp_path / "packs")
    # so that it has to make the first ones again, by the same settings
    for part in part_folders(data.packs):
        shutil.rmtree(part)

    packing = PackerProcess(data)
    try:
        with pytest.raises(InputError, match=r"another run, process \d+"):
            PackerProcess(data)
        packs = packed_by(packing, data)
        order = packs.order(STEP, 3)
        with packs.waiting():
            packs.reads(order.places_of_step(0))
            assert len(order.packs_of_step(30)) == STEP  # of a part that was not there
            assert order.figures(30)["share/web"] == pytest.approx(
                0.7, abs=0.05
            ) and "part/web" in order.figures(30)
            packing._process.kill()
            packing._process.wait()
            with pytest.raises(
                InputError,
                match="the process that makes the packs of the stream has ended with signal 9",
            ):
                order.packs_of_step(10**4)
    finally:
        packing.close()
    bad = tmp_path / "bad.jsonl"
    bad.write_text(Path(values["source"]).read_text() + '{"tixt": "a"}\n')
    data = streamed(values | {"source": str(bad)}, tmp_path / "of bad")
    packing = PackerProcess(data)
    try:
        packs = packed_by(packing, data)
        with pytest.raises(InputError, match=r"bad\.jsonl:\d+: no column `text`"):
            packs.order(STEP, 3).packs_of_step(10**4)
    finally:
        packing.close()
