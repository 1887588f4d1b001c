"""Read packs that are made while a run trains, of more text than the disk holds.

The run's side of a stream: the position of the reader, and the process of its packer.

    packs/
      part-00000000/    stays on the disk: it has the held-out documents
      part-00000003/    packs as `prepare` writes them, and where they start in the source
      part-00000004/
      position.json     where the run reads, written by the run
      packer.log        output of the packer that the run has started
    packs/NAME/part-…   parts of each of several sources

`packing.follow` makes parts ahead of the run and deletes passed ones. The two processes share
nothing but this folder. What a part holds follows from the settings, the text and the place in the
source where the part starts. So a deleted part can be made again from the place that a checkpoint
remembers.

A run reads the parts in their order. Within a part, (seed, part) decides the order of packs.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foundation.errors import InputError
from foundation.files import free_bytes, hash_of, is_locked, locked, replace_file, write_json
from foundation.reading import load_object
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Pack, Packs
from packing.order import Mixture, Order, permute, splitmix64
from packing.settings import DataSettings

POSITION = "position.json"
RUN_LOCK = ".lock"  # held by the run that reads the stream
ENDLESS = 2**62  # packs of a stream, whose number nobody knows
LOOK = 0.05  # seconds between two looks for a part
LOG = "packer.log"
_RECIPE = "packer.yaml"
# Variables that make the processes of a launcher report their end.
_OF_THE_LAUNCHER = ("TORCHELASTIC_ERROR_FILE", "PRETRAIN_STATUS_FILE")


# ── Parts and positions on the disk ───────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PartStart:
    """The start of a part: its place in the source, and counts of earlier parts."""

    number: int = 0
    epoch: int = 0  # how often the source has ended before
    place: dict[str, Any] = field(default_factory=dict)  # `begin` of the source's `chunks`
    first: int = 0  # packs in all parts before it


@dataclass(frozen=True)
class Part:
    """A part on the disk, opened."""

    start: PartStart
    after: PartStart  # start of the next part; its epoch is that of all documents in this part
    packs: ArrowPacks


def part_folder(folder: Path, number: int) -> Path:
    """Return the folder of a part; `folder` has all parts of one source."""
    return folder / f"part-{number:08d}"


def read_part(folder: Path, start: PartStart) -> Part | None:
    """Return the part in `folder` that was made from `start`, or None if it does not exist.

    Raises InputError if it is damaged.
    """
    path = part_folder(folder, start.number)
    if not (path / MANIFEST).exists():
        return None
    try:
        packs = ArrowPacks(path)
    except InputError:
        if (path / MANIFEST).exists():
            raise
        return None  # The packer has deleted it meanwhile.
    places = packs.manifest["statistics"]["stream"]
    if PartStart(**places["start"]) != start:
        return None
    return Part(start, PartStart(**places["after"]), packs)


def read_position(folder: Path, sources: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return where the last run has read the stream in `folder`; see `StreamedPacks.position`.

    If no run has read these `sources`, return the start of the stream.
    """
    path = folder / POSITION
    start = dict.fromkeys(sources, asdict(PartStart()))
    position = load_object(path, f"remove {path}") if path.is_file() else {"starts": {}}
    is_of_these = position["starts"].keys() == start.keys()
    return position if is_of_these else {"starts": start, "ends": dict.fromkeys(sources, 0)}


def bytes_below(folder: Path) -> int:
    """Return the size of all files below `folder`. Another process may remove files meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def check_disk(settings: DataSettings) -> None:
    """Raise InputError if the disk is smaller than `data.streaming.disk_gb`."""
    limit = settings.streamed.disk_gb
    room = (free_bytes(settings.packs) + bytes_below(settings.packs)) / 1e9
    if limit > room:
        raise InputError(
            f"data.streaming.disk_gb: {limit:g}: {settings.packs} has room for {room:.3g} GB; "
            "lower it, or take another disk"
        )


# ── The packer of a run ───────────────────────────────────────────────────────────────────────────


class PackerProcess(ExitStack):
    """A process of `python -m packing follow` beside the run that reads its parts.

    It ends with the run, however that ends. If another process makes the parts already, it takes
    over when that one ends.
    """

    def __init__(self, settings: DataSettings, position: dict[str, Any]) -> None:
        """Start to make parts from `position` on.

        Raises InputError if another run reads the stream, or if the disk is too small.
        """
        super().__init__()
        self._packs = settings.packs
        self.enter_context(locked(self._packs / RUN_LOCK, self._refuse))
        check_disk(settings)
        self._write(position)
        recipe = self._packs / _RECIPE
        values = {"data": settings.model_dump(mode="json")}
        replace_file(recipe, yaml.safe_dump(values, allow_unicode=True).encode())
        # Python's -P keeps it from importing modules of the current folder.
        command = [sys.executable, "-P", "-m", "packing", "follow", str(recipe)]
        environment = {
            name: value for name, value in os.environ.items() if name not in _OF_THE_LAUNCHER
        }
        search_path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
        with open(self._packs / LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which ends the packer.
            )
        self.callback(self.process.wait)
        self.callback(self.process.kill)  # which comes first, in the midst of its work

    def _refuse(self, holder: str) -> None:
        time.sleep(0.1)
        if is_locked(self._packs / RUN_LOCK):  # and not only looked at by a packer
            raise InputError(
                f"{self._packs}: another run, {holder}, trains on this stream; "
                "wait, or set another data.packs"
            )

    def publish(self, position: dict[str, Any], *, waits: bool) -> None:
        """Write the position if the packer needs it: a part is passed, or the run `waits`."""
        if position["starts"] != self._written["starts"] or (waits and position != self._written):
            self._write(position)

    def _write(self, position: dict[str, Any]) -> None:
        write_json(self._packs / POSITION, position)
        self._written = position

    def check(self) -> None:
        """Raise InputError with the error of the packer if it has ended."""
        status = self.process.poll()
        if status is None:
            return
        log = self._packs / LOG
        _, has_error, message = f"\n{log.read_text(errors='replace')}".rpartition("\nerror: ")
        if has_error:
            raise InputError(message.strip())
        why = f"status {status}; {log} says why"
        if status < 0:
            why = f"signal {-status}: if memory ran out, set a smaller data.streaming.window"
        raise InputError(
            f"{self._packs}: the packer of the stream has ended with {why}. "
            "Start the same command again"
        )


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


class SourceStream:
    """The packs of one source, by their place in its stream.

    One thread may read while another calls `release`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sample = ArrowPacks(folder / FIRST)
        self._lock = threading.Lock()
        self.start_at(None)

    def start_at(self, record: dict[str, Any] | None) -> None:
        """Close all parts and read from the part of `record` on, or from the first one.

        A checkpoint holds the record, so that a resumed run recognises the part when it is made
        again.
        """
        first = {"start": asdict(PartStart()), "fingerprint": self.sample.fingerprint}
        with self._lock:
            self.record: dict[str, Any] = record or first
            self._parts: list[Part] = []  # the open parts, in their order

    def part_of(self, place: int, wait: Callable[[], None]) -> Part:
        """Return the part that has the pack at `place`.

        `wait` is called again and again until the part is on the disk.
        """
        with self._lock:
            earlier = [part for part in self._parts if part.start.first <= place]
        part = earlier[-1] if earlier else self._open(PartStart(**self.record["start"]), wait)
        while place >= part.after.first:
            part = self._open(part.after, wait)
        return part

    def _open(self, start: PartStart, wait: Callable[[], None]) -> Part:
        while (part := read_part(self.folder, start)) is None:
            wait()
        is_recorded = asdict(start) == self.record["start"]
        if is_recorded and part.packs.fingerprint != self.record["fingerprint"]:
            raise InputError(
                f"{part.packs.path}: is not the part that was trained on, so its text has changed. "
                "Put the text back as it was, of a hub's dataset by `name@revision`, and remove "
                "this folder; or set another data.packs and run_dir"
            )
        with self._lock:
            self._parts.append(part)
        return part

    def release(self, place: int) -> None:
        """Close the parts before the one that has the last pack before `place`."""
        with self._lock:
            for part in self._parts:
                if part.start.first < place:
                    fingerprint = part.packs.fingerprint
                    self.record = {"start": asdict(part.start), "fingerprint": fingerprint}
            self._parts = [part for part in self._parts if part.after.first >= place]


class StreamedPacks(Packs):
    """The packs of one or several streamed sources. Index n * sources + s is pack n of source s.

    Its `StreamOrder` waits for parts. Then the packs of that step can be read.
    """

    def __init__(self, settings: DataSettings, parts: Mapping[str, DataSettings]) -> None:
        """`parts` has the settings of each source by name, "" if there is only one."""
        self.path = settings.packs
        self.sources = {name: SourceStream(part.packs) for name, part in parts.items()}
        self.weights = dict(zip(parts, settings.shares, strict=True))
        # The packs of each source that stay on the disk.
        self.samples = {name: source.sample for name, source in self.sources.items()}
        sample = next(iter(self.samples.values()))
        self.length = sample.length
        self.tokenizer = sample.tokenizer
        content = [
            [name, sample.fingerprint, self.weights[name]] for name, sample in self.samples.items()
        ]
        windows = [part.streamed.window for part in parts.values()]
        self.fingerprint = hash_of([content, windows])
        # The packer that this process has started; None on the other ranks.
        self.packer: PackerProcess | None = None
        self._ends = dict.fromkeys(self.sources, 0)

    @cached_property
    def mixture(self) -> Mixture:
        """The rule that assigns each place in the stream of all packs to one source."""
        tokens = tuple(sample.tokens / len(sample) for sample in self.samples.values())
        return Mixture(
            tuple(self.sources), (ENDLESS,) * len(tokens), tuple(self.weights.values()), tokens
        )

    def order(self, packs_per_step: int, seed: int, shift: int = 0) -> StreamOrder:
        """Return the order of these packs in a training; see `Order`."""
        return StreamOrder(self.mixture, packs_per_step, seed, shift, packs=self)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pack:
        def wait() -> None:
            raise IndexError(f"{self.path}: pack {index} is not on the disk")

        place, number = divmod(index, len(self.sources))
        part = list(self.sources.values())[number].part_of(place, wait)
        return part.packs[place - part.start.first]

    def start_at(self, record: Mapping[str, Any] | None) -> None:
        """Continue from the `record` of a checkpoint, or start at the first pack for None."""
        for name, source in self.sources.items():
            source.start_at(record[name] if record else None)
        self._ends = dict.fromkeys(self.sources, 0)
        self.publish()

    @property
    def record(self) -> dict[str, Any]:
        """The place in each source, as a checkpoint stores it."""
        return {name: source.record for name, source in self.sources.items()}

    def advance_to(self, places: range) -> None:
        """Close the parts before `places`, which the next step reads in the stream of all packs."""
        starts = self.mixture.packs_before(places.start)
        ends = self.mixture.packs_before(places.stop)
        for (name, source), start, end in zip(self.sources.items(), starts, ends, strict=True):
            source.release(int(start))
            self._ends[name] = int(end)
        self.publish()

    @property
    def position(self) -> dict[str, dict[str, Any]]:
        """Where the run reads, for the packer. Two mappings by the name of a source.

        `starts`: start of the first part that the run may still read. `ends`: the step at work
        reads no pack at this place or behind it.
        """
        starts = {name: record["start"] for name, record in self.record.items()}
        return {"starts": starts, "ends": dict(self._ends)}

    def publish(self, *, waits: bool = False) -> None:
        """Tell the packer where the run reads. `waits`: the run waits for a part."""
        if self.packer is not None:
            self.packer.publish(self.position, waits=waits)


@dataclass(frozen=True)
class StreamOrder(Order):
    """The order of packs that are made meanwhile. `packs_of_step` waits for them."""

    packs: StreamedPacks = field(kw_only=True)
    _stopped: threading.Event = field(default_factory=threading.Event, kw_only=True)

    def stop_waiting(self) -> None:
        """Make the thread that waits for a part raise InputError."""
        self._stopped.set()

    def _wait(self) -> None:
        """Wait a moment for a part. Raise InputError if none will come."""
        if self._stopped.wait(LOOK):
            raise InputError(f"{self.packs.path}: the run does not wait for packs any more")
        if self.packs.packer is not None:
            self.packs.packer.check()

    def packs_of_source(self, number: int, places: np.ndarray) -> np.ndarray:
        """Return the packs at `places` of a source; each part has an order of its own."""
        source = list(self.packs.sources.values())[number]
        # Sources must not go through their parts in the same order, nor epochs through the same
        # part.
        key = splitmix64(
            splitmix64(splitmix64(np.array([self.seed], np.uint64)) + np.uint64(number))
        )
        packs = np.empty_like(places)
        done = 0
        while done < len(places):
            part = source.part_of(int(places[done]), self._wait)
            first = part.start.first
            end = part.after.first
            within = places[done : int(np.searchsorted(places, end))] - first
            order = permute(within, end - first, splitmix64(key + np.uint64(part.start.number)))
            packs[done : done + len(within)] = first + order
            done += len(within)
        return packs * len(self.packs.sources) + number

    def epochs(self, step: int) -> dict[str, float]:
        """Return how often each source was read to its end when `step` starts."""
        return {name: float(part.after.epoch) for name, part in self._parts_before(step).items()}

    def epoch_of(self, step: int) -> float:
        """Return the least of `epochs`."""
        return min(self.epochs(step).values())

    def figures(self, step: int) -> dict[str, float]:
        """Return metrics after `step` steps: part, epoch and share of the tokens of each source."""
        figures: dict[str, float] = {}
        for name, part in self._parts_before(step).items():
            figures[f"part/{name}" if name else "part"] = part.start.number
        return figures | super().figures(step)

    def _parts_before(self, step: int) -> dict[str, Part]:
        """Return the part of each source with the last pack before `step`, or its first part."""
        counts = self.mixture.packs_before(self.places_of_step(step).start)
        return {
            name: source.part_of(max(int(count) - 1, 0), self._wait)
            for (name, source), count in zip(self.packs.sources.items(), counts, strict=True)
        }
