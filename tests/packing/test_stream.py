"""A stream's packs are made during training, are always the same, and take a bounded disk."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation import files
from foundation.errors import InputError
from foundation.files import write_json
from packing import stream
from packing.arrow import FIRST, MANIFEST
from packing.follow import pack_ahead
from packing.pack_maker import PackMaker
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import open_packs, training_sources
from packing.stream import (
    ENDLESS,
    POSITION,
    PackerProcess,
    PartStart,
    StreamedPacks,
    bytes_below,
    order_of,
    read_position,
)
from packing.workers import start_python

LENGTH = 32  # tokens of a pack
STEP = 6  # packs of a step


class InProcessPacker(ExitStack):
    """A packer in this process that works only while a run waits for a part."""

    def __init__(self, data: DataSettings) -> None:
        super().__init__()
        self.data = data
        self.most = 0  # the largest number of bytes on the disk
        self.makers = {
            name: self.enter_context(PackMaker(part, 1))
            for name, part in training_sources(data).items()
        }
        self.parts = pack_ahead(data, self.makers)

    def publish(self, position: dict[str, Any], *, waits: bool) -> None:
        write_json(self.data.packs / POSITION, position)

    def check(self) -> bool:
        has_made_a_part = next(self.parts)
        self.most = max(self.most, bytes_below(self.data.packs))
        return has_made_a_part


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Skip waits and flushes, which the in-process packer does not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "POLL_SECONDS", 0)
        for name in ("fsync", "fsync_tree"):
            patch.setattr(files, name, lambda path: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    for name, size, count in (("web", 500, 90), ("code", 260, 60)):
        starts = [(text, start) for text in documents for start in (0, 3000, 6000) if text[start:]]
        lines = [json.dumps({"text": text[start:][:size]}) + "\n" for text, start in starts]
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    return folder


@pytest.fixture(scope="module")
def values(folder: Path, tokenizer_file: Path) -> dict[str, Any]:
    streaming = {"disk_gb": 0.001, "window": 2000}
    common = {"length": LENGTH, "held_out": 0.1, "streaming": streaming}
    paths = {"source": folder / "web.jsonl", "packs": folder / "packs", "tokenizer": tokenizer_file}
    return common | {key: str(path) for key, path in paths.items()}


def two_sources(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    sources = [
        {"source": str(folder / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("web", 0.7), ("code", 0.3))
    ]
    return {key: value for key, value in values.items() if key != "source"} | {"sources": sources}


def streamed(values: dict[str, Any], packs: Path, **streaming: Any) -> DataSettings:
    """Prepare the first part of a stream, and return its settings."""
    data = DataSettings(**values | {"packs": packs, "streaming": values["streaming"] | streaming})
    prepare(data, progress=False)
    return data


def packed_by(
    packer: Any, data: DataSettings, record: dict[str, Any] | None = None
) -> StreamedPacks:
    """Return the packs that a run reads from the record of a checkpoint on."""
    packs = open_packs(data, "train")
    packs.packer = packer
    packs.start_at(record)
    return packs


def steps(
    packs: StreamedPacks, first: int, last: int, *, ahead: InProcessPacker | None = None
) -> Iterator[tuple[list[bytes], dict[str, Any]]]:
    """Yield the packs of each step, and the record of a checkpoint after it."""
    order = order_of(packs, seed=3)
    for number in range(first, last):
        packs.advance_to(places_of(number))
        while ahead and ahead.check():
            pass
        read = [packs[i].input_ids.tobytes() for i in order.packs_at(places_of(number)).tolist()]
        packs.advance_to(places_of(number + 1))
        yield read, json.loads(json.dumps(packs.state))


def places_of(step: int) -> range:
    """Return the places of the packs of a step of STEP packs."""
    return range(step * STEP, (step + 1) * STEP)


def part_folders(packs: Path) -> list[Path]:
    # A packer may rename folders meanwhile. `os.walk` skips them, and `glob` would raise an error.
    folders = [Path(folder) for folder, _, _ in os.walk(packs)]
    return sorted(path for path in folders if path.match("part-*") and path.name != FIRST)


@settings(max_examples=3)
@given(st.data())
def test_a_resumed_stream_is_the_same_and_within_its_disk(
    values: dict[str, Any],
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    draw: st.DataObject,
) -> None:
    sources = draw.draw(st.sampled_from([values, two_sources(values, folder)]))
    window = draw.draw(st.integers(1200, 4000))
    disk = draw.draw(st.floats(0.00024, 0.0006))
    killed = draw.draw(st.integers(1, 19))
    last = 20
    packs = tmp_path_factory.mktemp("drawn")
    unbounded = streamed(sources, packs / "unbounded", window=window)
    with InProcessPacker(unbounded) as packer:
        unbroken = packed_by(packer, unbounded)
        expected = [read for read, _ in steps(unbroken, 0, last)]

    data = streamed(sources, packs / "bounded", window=window, disk_gb=disk)
    with InProcessPacker(data) as packer:
        first = packed_by(packer, data)
        assert first.fingerprint == unbroken.fingerprint
        before = list(steps(first, 0, killed, ahead=packer))
        list(steps(first, killed, min(killed + 2, last)))  # These steps are lost.
        first.start_at(before[-1][1])  # as a rollback does, in the same process
        again = [read for read, _ in steps(first, killed, min(killed + 2, last))]
    if draw.draw(st.booleans()):  # as on another machine
        for part in part_folders(data.packs):
            shutil.rmtree(part)
    with InProcessPacker(data) as resumed:
        second = packed_by(resumed, data, before[-1][1])
        remaining = [read for read, _ in steps(second, killed, last, ahead=resumed)]
    assert [read for read, _ in before] + remaining == expected
    assert again == expected[killed : killed + 2]
    assert 0 < max(packer.most, resumed.most) <= disk * 1e9


@pytest.mark.parametrize("window", [3000, 10**6], ids=["a part of the text", "all of it"])
def test_held_out_documents_are_not_trained_on_in_later_epochs(
    window: int, values: dict[str, Any], tmp_path: Path
):
    data = streamed(values | {"held_out": 0.2}, tmp_path / "packs", window=window)
    held_out = set().union(*map(documents_in, open_packs(data, "held_out")))
    epochs: list[list[bytes]] = [[], []]
    trained: set[tuple[int, ...]] = set()
    with InProcessPacker(data) as packer:
        packs = packed_by(packer, data)
        order = order_of(packs, seed=1)
        for place in itertools.count():
            packs.advance_to(range(place, place + 1))
            pack = packs[int(order.packs_at(range(place, place + 1))[0])]
            epoch = int(order.metrics(place + 1)["epoch"])
            if epoch == len(epochs):
                break
            epochs[epoch].append(pack.input_ids.tobytes())
            trained |= documents_in(pack)
    assert held_out and not trained & held_out
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def documents_in(pack: Any) -> set[tuple[int, ...]]:
    """Return the pieces with enough different tokens to identify their document."""
    pieces = np.split(pack.input_ids, np.cumsum(pack.lengths))[: len(pack.lengths)]
    return {tuple(piece.tolist()) for piece in pieces if len(np.unique(piece)) >= 12}


def test_a_stream_deletes_no_folder_that_it_did_not_write(
    values: dict[str, Any], tmp_path: Path
) -> None:
    data = streamed(values, tmp_path / "packs")
    names = ["wiki-part-1", "part-time", "part-00000007-old", ".part-00000007.writing", "part-1"]
    theses = [data.packs / name / "thesis.tex" for name in names]
    for thesis in theses:
        thesis.parent.mkdir()
        thesis.touch()
    left_by_a_killed_packer = data.packs / ".part-00000007.0123abcd.writing"
    left_by_a_killed_packer.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / MANIFEST).touch()
    (data.packs / "part-00000009").symlink_to(other)
    with InProcessPacker(data) as packer:
        list(steps(packed_by(packer, data), 0, 30))
    assert all(path.exists() for path in (*theses, other / MANIFEST))
    assert not left_by_a_killed_packer.exists() and (data.packs / "part-00000001").exists()


@pytest.mark.parametrize("name", ["part-00000001/thesis.tex", "packer.log"])
def test_a_stream_does_not_begin_in_a_folder_with_other_files(
    name: str, values: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    two = two_sources(values, folder)
    for source, packs in ((values, tmp_path), (two, tmp_path), (two, tmp_path / "code")):
        file = packs / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        with pytest.raises(InputError, match=f"{packs}: this folder has no"):
            streamed(source, tmp_path)
        assert file.read_text() == "mine"
        shutil.rmtree(packs)


def test_a_resume_with_a_changed_source_is_rejected(values: dict[str, Any], tmp_path: Path) -> None:
    source = Path(shutil.copy(values["source"], tmp_path / "text.jsonl"))
    data = streamed(values | {"source": str(source)}, tmp_path / "packs")
    with InProcessPacker(data) as packer:
        *_, (_, record) = steps(packed_by(packer, data), 0, 30)
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(line.replace("s", "z") for line in lines))
    for part in part_folders(data.packs):
        shutil.rmtree(part)
    with (
        InProcessPacker(data) as packer,
        pytest.raises(InputError, match="data of the source has changed"),
    ):
        list(steps(packed_by(packer, data, record), 30, 31))


# ── The packer as a process ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def streamed_settings(
    values: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DataSettings:
    """Settings of two sources whose parts are not made yet.

    The current folder has a file numpy.py that raises if it is imported.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.02)
    Path("numpy.py").write_text("raise SystemExit('imported from the current folder')")
    return streamed(two_sources(values, folder) | {"text": "{text}."}, tmp_path / "packs")


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_packer_process_makes_parts_of_all_sources(streamed_settings: DataSettings) -> None:
    packs = open_packs(streamed_settings, "train")
    with PackerProcess(streamed_settings, packs.position) as packer:
        with pytest.raises(InputError, match=r"another run, process \d+"):
            PackerProcess(streamed_settings, packs.position)
        packs.packer = packer
        order = order_of(packs, 3)
        packs.advance_to(places_of(0))
        assert len(order.packs_at(places_of(30))) == STEP
        metrics = order.metrics(places_of(30).start)
        assert metrics["share/web"] == pytest.approx(0.7, abs=0.05)
        assert "part/web" in metrics


def test_a_killed_packer_of_an_earlier_run_is_replaced(streamed_settings: DataSettings) -> None:
    data = streamed_settings
    with InProcessPacker(data) as packer:
        expected = [read for read, _ in steps(packed_by(packer, data), 0, 40)]
    for part in part_folders(data.packs):
        shutil.rmtree(part)
    (data.packs / POSITION).unlink()
    prepare(data, progress=False)
    made = len(part_folders(data.packs))

    first = start_python("packing.follow", data.model_dump_json(), str(os.getpid()))
    with ExitStack() as ended:
        ended.callback(first.wait)
        ended.callback(first.kill)
        wait_until(lambda: len(part_folders(data.packs)) > made)
        packs = open_packs(data, "train")
        with PackerProcess(data, packs.position) as packs.packer:
            log = data.packs / "packer.log"
            wait_until(lambda: f"waiting for process {first.pid} on" in log.read_text())
            read = [packs for packs, _ in steps(packs, 0, 10)]
            first.kill()
            read += [packs for packs, _ in steps(packs, 10, 40)]
    assert read == expected


def test_a_position_of_other_sources_is_the_start_of_the_stream(tmp_path: Path) -> None:
    start = asdict(PartStart())
    position = {"starts": {"web": start | {"number": 3}}, "ends": {"web": 95}}
    write_json(tmp_path / POSITION, position)
    assert read_position(tmp_path, ["web"]) == position
    both = read_position(tmp_path, ["web", "code"])
    assert both == {"starts": {"web": start, "code": start}, "ends": {"web": 0, "code": 0}}


def test_sources_with_differently_full_packs_advance_together(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """A source with half empty packs has twice the packs for its share of the tokens."""
    sources = []
    for name, words in (("full", LENGTH - 1), ("half", LENGTH // 2 + 1)):
        source = tmp_path / f"{name}.jsonl"
        text = json.dumps({"text": "a " * words}) + "\n"
        source.write_text(text * 3000)
        sources.append({"source": str(source), "weight": 0.5})
    both = {key: value for key, value in values.items() if key != "source"}
    both |= {"sources": sources, "packing": "best_fit", "held_out": 0.0}
    data = streamed(both, tmp_path / "packs", disk_gb=0.0002)
    order = order_of(open_packs(data, "train"), seed=3)
    first, second = (order.packs_of_source(number, np.arange(20)) % ENDLESS for number in range(2))
    assert first.tolist() != second.tolist(), "each source has an order of its own"
    with InProcessPacker(data) as packer:
        for _ in steps(packed_by(packer, data), 0, 80, ahead=packer):
            pass
        assert packer.most <= 200_000
