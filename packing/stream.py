"""Read packs that are made while a run trains, from more text than fits on the disk.

A stream consists of parts: folders of packs. This module is used by the run: it reads packs,
publishes the position at which the run reads, and starts the packer process.

    packs/
      part-00000000/    first part, which stays on the disk because it has the held-out documents
      part-00000003/    packs as `prepare` writes them; the manifest has the part's start
      part-00000004/
      position.json     position at which the run reads, written by the run
      packer.log        output of the packer process, if the run has started it
    packs/NAME/part-…   parts of the source NAME, if there are several sources

`packing.follow` makes parts ahead of the run, and deletes parts that the run has read. The packer
and the run communicate only through this folder. The content of a part depends only on the
settings, the text, and the offset in the source where the part starts. So a deleted part can be
made again from the offset that a checkpoint stores.

A run reads parts in the order of their numbers. Within a part, the order of packs depends on the
seed and on the number of the part.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import (
    free_bytes,
    hash_of,
    locked,
    without_links,
    write_json,
)
from foundation.reading import load_object
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Pack, Packs
from packing.order import MixedPacks, Mixture, Order, mixture_of
from packing.settings import DataSettings
from packing.workers import start_python

POSITION = "position.json"
# Lock of the run that reads the stream.
RUN_LOCK = ".lock"
# Number of packs that `len` returns for a stream. The real number is not known.
ENDLESS = 2**40
# Seconds between two checks whether a part exists.
POLL_SECONDS = 0.05
LOG = "packer.log"


# ── Parts and positions on the disk ───────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PartStart:
    """Start of a part: an offset in the source, the last epoch, and numbers of parts and packs."""

    # Number of the part, counted from 0.
    number: int = 0
    # Epoch of the documents of the previous part, or 0 for the first part.
    epoch: int = 0
    # Offset in the source at which the part starts. Files on the disk call it `place`.
    place: dict[str, Any] = field(default_factory=dict)
    # Number of packs in all earlier parts.
    first: int = 0


@dataclass(frozen=True)
class Part:
    """An opened part of a stream on the disk."""

    start: PartStart
    # Start of the next part.
    after: PartStart
    packs: ArrowPacks

    @property
    def epoch(self) -> int:
        """Return the epoch of all documents. A part does not continue after its source's end."""
        return self.after.epoch


def part_folder(folder: Path, number: int) -> Path:
    """Return the folder of a part. `folder` contains all parts of one source."""
    return folder / f"part-{number:08d}"


def read_part(folder: Path, start: PartStart) -> Part | None:
    """Return the part in `folder` that was made from `start`, or None if it does not exist.

    Raises InputError if the part is damaged.
    """
    path = part_folder(folder, start.number)
    if not (path / MANIFEST).exists():
        return None
    packs = ArrowPacks(path)
    recorded = packs.manifest["statistics"]["stream"]
    if PartStart(**recorded["start"]) != start:
        return None
    return Part(start, PartStart(**recorded["after"]), packs)


def read_position(folder: Path, sources: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the position of the last run in the stream of `folder`.

    `StreamedPacks.position` describes positions. If no run has read these `sources`, return the
    start of the stream.
    """
    path = folder / POSITION
    if path.is_file():
        position = load_object(path, f"remove {path}")
        if position["starts"].keys() == {*sources}:
            return position
    starts = dict.fromkeys(sources, asdict(PartStart()))
    return {"starts": starts, "ends": dict.fromkeys(sources, 0)}


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below `folder`.

    Another process may remove files and folders meanwhile. `os.walk` skips removed folders.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(Path(parent, name)).st_size
    return total


def check_disk(settings: DataSettings) -> None:
    """Raise InputError if the disk has less space for packs than `data.streaming.disk_gb`.

    The space for packs is the free space and the space of the existing packs of this stream.
    """
    limit = settings.streamed.disk_gb
    room = (free_bytes(settings.packs) + bytes_below(settings.packs)) / 1e9
    if limit > room:
        raise InputError(
            f"data.streaming.disk_gb: {limit:g}: the disk of {settings.packs} has only {room:.3g} "
            "GB for packs; either lower data.streaming.disk_gb, or set data.packs to another disk"
        )


# ── The packer of a run ───────────────────────────────────────────────────────────────────────────


class PackerProcess(ExitStack):
    """Process of `python -m packing.follow` that makes the parts of a stream for this run.

    The process ends when the run ends, even if the run is killed.
    """

    def __init__(self, settings: DataSettings, position: dict[str, Any]) -> None:
        """Start the packer. `position` is the run's reading position.

        Raises InputError if another run reads the stream, or if the disk is too small.
        """
        super().__init__()
        self._packs = settings.packs
        self.enter_context(locked(self._packs / RUN_LOCK, self._refuse))
        check_disk(settings)
        self._write(position)
        with open(self._packs / LOG, "wb", opener=without_links) as log:
            self.process = start_python(
                "packing.follow",
                settings.model_dump_json(),
                str(os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        # Callbacks run in reverse order. So the packer is first killed, even in the midst of its
        # work, and then this process waits for the packer to end.
        self.callback(self.process.wait)
        self.callback(self.process.kill)

    def _refuse(self, holder: str) -> None:
        raise InputError(
            f"{self._packs}: another run, {holder}, trains on this stream; "
            "either wait until it has ended, or set data.packs to another folder"
        )

    def publish(self, position: dict[str, Any], *, waits: bool) -> None:
        """Write `position` if the packer needs it.

        The packer needs it if the run has finished a part, or waits for a part (`waits`).
        """
        if position["starts"] != self._written["starts"] or (waits and position != self._written):
            self._write(position)

    def _write(self, position: dict[str, Any]) -> None:
        write_json(self._packs / POSITION, position)
        self._written = position

    def check(self) -> None:
        """Raise InputError with the packer's error message if the packer has ended."""
        status = self.process.poll()
        if status is None:
            return
        log = self._packs / LOG
        _, has_error, message = f"\n{log.read_text(errors='replace')}".rpartition("\nerror: ")
        if has_error:
            raise InputError(message.strip())
        why = f"signal {-status}" if status < 0 else f"status {status}"
        raise InputError(
            f"{self._packs}: the packer of the stream has ended with {why}; see {log}. Correct the "
            "cause (if the memory was full, set a smaller data.streaming.window), and start the "
            "same command again"
        )


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


class SourceStream:
    """The packs of one source, accessed by their place in the stream of this source.

    One thread may read packs while another thread calls `release`. Then a part may be opened twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first_part = ArrowPacks(folder / FIRST)
        self.start_at(None)

    def start_at(self, state: dict[str, Any] | None) -> None:
        """Close all parts, and read from the part of `state` on. None means the first part.

        `state` has the start and the fingerprint of a part. Checkpoints store it. If the part is
        made again for a resumed run, its fingerprint must equal the one in `state`.
        """
        beginning = {"start": asdict(PartStart()), "fingerprint": self.first_part.fingerprint}
        self.state: dict[str, Any] = state or beginning
        # All open parts, in the order of their numbers.
        self._parts: list[Part] = []

    def part_of(self, place: int, wait: Callable[[], None]) -> Part:
        """Return the part that has the pack at `place`.

        `wait` is called repeatedly until this part is on the disk.
        """
        earlier = [part for part in self._parts if part.start.first <= place]
        part = earlier[-1] if earlier else self._open(PartStart(**self.state["start"]), wait)
        while place >= part.after.first:
            part = self._open(part.after, wait)
        return part

    def _open(self, start: PartStart, wait: Callable[[], None]) -> Part:
        """Open the part that starts at `start`. `wait` is called until it is on the disk.

        Raises InputError if the part was made again from other data than before.
        """
        while (part := read_part(self.folder, start)) is None:
            wait()
        state = _state_at(part)
        if state["start"] == self.state["start"] and state != self.state:
            raise InputError(
                f"{part.packs.path}: the packs in this folder differ from the packs on which the "
                "run was trained, so the data of the source has changed. Either restore the data "
                "(for a dataset of the hub, set its earlier revision as `name@revision`) and "
                "remove this folder, or set another data.packs and another run_dir"
            )
        self._parts.append(part)
        return part

    def release(self, place: int) -> None:
        """Drop all parts before the part with the pack at `place` - 1.

        Checkpoints store `state`, which describes this part.
        """
        for part in self._parts:
            if part.start.first < place:
                self.state = _state_at(part)
        self._parts = [part for part in self._parts if part.after.first >= place]


def _state_at(part: Part) -> dict[str, Any]:
    """Return the state of a source whose packs are read from `part` on."""
    return {"start": asdict(part.start), "fingerprint": part.packs.fingerprint}


class StreamedPacks(Packs):
    """The packs of one or several streamed sources.

    Pack n of source s has the index s * ENDLESS + n. Before the packs of a step are read, call
    `packs_at` of the `StreamOrder` that `order_of` returns. This call waits until the packs exist.
    """

    def __init__(self, settings: DataSettings, sources: Mapping[str, DataSettings]) -> None:
        """Open the first part of each source. `sources` maps the source's name to its settings.

        A single source has the name "".
        """
        self.path = settings.packs
        self.sources = {name: SourceStream(source.packs) for name, source in sources.items()}
        # The first part of each source, which stays on the disk.
        self.first_parts = MixedPacks(
            self.path,
            {name: source.first_part for name, source in self.sources.items()},
            dict(zip(sources, settings.shares, strict=True)),
        )
        self.by_source = self.first_parts.by_source
        self.length = self.first_parts.length
        self.tokenizer = self.first_parts.tokenizer
        part_tokens = [source.streamed.window for source in sources.values()]
        tokens = [
            source.first_part.manifest["statistics"]["tokens"] for source in self.sources.values()
        ]
        # A part with fewer tokens ends at the end of its source. `continues` is False if this is so
        # for the first parts of all sources. Then the first parts are an epoch.
        self.continues = any(
            count >= window for count, window in zip(tokens, part_tokens, strict=True)
        )
        self.fingerprint = hash_of([self.first_parts.content, part_tokens])
        # The packer that this process has started, or None if another rank starts the packer.
        self.packer: PackerProcess | None = None
        # For each source, the place after the last pack that the current step reads.
        self._ends = [0] * len(self.sources)

    @cached_property
    def mixture(self) -> Mixture:
        """Rule that assigns each place in the stream of all packs to one source."""
        return replace(self.first_parts.mixture, counts=(ENDLESS,) * len(self.sources))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pack:
        def wait() -> None:
            raise IndexError(f"{self.path}: pack {index} is not on the disk")

        number, place = divmod(index, ENDLESS)
        part = self.part_of(number, place, wait)
        return part.packs[place - part.start.first]

    def part_of(self, number: int, place: int, wait: Callable[[], None]) -> Part:
        """Return the part of source `number` that has the pack at `place` (see `SourceStream`)."""
        return list(self.sources.values())[number].part_of(place, wait)

    def start_at(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the `state` of a checkpoint, or start at the first pack if it is None."""
        for name, source in self.sources.items():
            source.start_at(state[name] if state else None)
        self._ends = [0] * len(self.sources)
        self.publish()

    @property
    def state(self) -> dict[str, Any]:
        """Map the name of each source to its current part's state, which checkpoints store."""
        return {name: source.state for name, source in self.sources.items()}

    def advance_to(self, places: range) -> None:
        """Close the parts that the run has read, and tell the packer how far the run has read.

        `places` are the indices of the packs that the next step reads, in the stream of all packs.
        """
        starts = self.mixture.packs_before(places.start)
        for source, start in zip(self.sources.values(), starts, strict=True):
            source.release(int(start))
        self._ends = list(map(int, self.mixture.packs_before(places.stop)))
        self.publish()

    @property
    def position(self) -> dict[str, dict[str, Any]]:
        """Position of the run, for the packer: the two dicts `starts` and `ends`.

        `starts` maps each source to the start of the first part that the run may still read, as a
        dict of PartStart. `ends` maps each source to the place after the last pack that the current
        step reads from this source.
        """
        starts = {name: source.state["start"] for name, source in self.sources.items()}
        return {"starts": starts, "ends": dict(zip(self.sources, self._ends, strict=True))}

    def publish(self, *, waits: bool = False) -> None:
        """Pass the position to the packer. `waits` is True if the run waits for a part."""
        if self.packer is not None:
            self.packer.publish(self.position, waits=waits)


@dataclass(frozen=True)
class StreamOrder(Order):
    """Order of packs that are made while the run trains. `packs_at` waits for the packs."""

    packs: StreamedPacks
    # Also for a single source. Otherwise, the order of the packs of existing runs would change.
    is_mixed = True
    _stopped: threading.Event = field(default_factory=threading.Event)

    def stop_waiting(self) -> None:
        """Make a thread that waits for a part raise InputError."""
        self._stopped.set()

    def _wait(self) -> None:
        """Wait POLL_SECONDS. Raise InputError if waiting was stopped or the packer has ended."""
        if self._stopped.wait(POLL_SECONDS):
            raise InputError(
                f"{self.packs.path}: a step needs packs that do not exist yet, but the run has "
                "stopped waiting for packs"
            )
        if self.packs.packer is not None:
            self.packs.packer.check()

    def part_at(self, number: int, place: int) -> tuple[int, range, int]:
        """Return the part of a source that has the pack at `place`. See `Order`."""
        part = self.packs.part_of(number, place, self._wait)
        places = range(part.start.first, part.after.first)
        return part.start.number, places, number * ENDLESS + places.start

    def metrics(self, place: int) -> dict[str, float]:
        """Return the metrics of a run that has read all packs before `place`, by name.

        The epoch of a source is that of its last pack before `place`, counted from 0. The metric
        `epoch` is the smallest epoch of all sources. The dict also has the number of each source's
        current part. Waits for this part if it is not on the disk, as `packs_at` does.
        """
        metrics = super().metrics(place)
        epochs = []
        for number, name in enumerate(self.packs.sources):
            # The part that has the source's last pack before `place`, or the source's first part.
            count = int(self.mixture.packs_before(place)[number])
            part = self.packs.part_of(number, max(count - 1, 0), self._wait)
            epochs.append(float(part.epoch))
            end = f"/{name}" if name else ""
            metrics[f"epoch{end}"] = epochs[-1]
            metrics[f"part{end}"] = part.start.number
        metrics["epoch"] = min(epochs)
        return metrics


def order_of(packs: Packs, seed: int) -> Order:
    """Return the reading order of `packs` in a run."""
    if isinstance(packs, StreamedPacks):
        return StreamOrder(packs.mixture, seed, packs)
    return Order(mixture_of(packs), seed)
