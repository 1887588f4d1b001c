"""Packs that are made while the run trains: of more text than the disk holds, in parts that come, are trained on and go.

    packs/                    packs/NAME/ for each of several sources
      part-00000000/          stays, to look at and for what is held out
      part-00000003/          packs as `prepare` writes them, and in their manifest from where in the source they were made
      part-00000004/          the next ones
    packs/state.json          why no more parts come: there is no room, or something went wrong

A part ends at a place of the source that follows from the settings and the text alone, and so does what is in it: a part that is
gone can be made again from the place that the one before it, or a checkpoint, remembers. `packing.packer` makes parts; here they
are read. A run goes through the parts in their order and through the packs of each in an order drawn from (seed, part).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import load_object
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Packs, PacksOfOthers
from packing.order import MixedPacks, Mixture, Order, permute, splitmix64
from packing.settings import DataSettings

STATE = "state.json"
ENDLESS = 2**62  # packs, where nobody knows how many there are
LOOK = 0.05  # seconds between two looks for a part that is still to come


@dataclass(frozen=True)
class PartStart:
    """Says from where in its source a part is made, and what was made before it."""

    number: int = 0
    epoch: int = 0  # how often the source has come to its end
    place: dict[str, Any] = field(default_factory=dict)  # in the source: `begin` of its `chunks`
    first: int = 0  # packs of all parts before it, so the place of its first one in the stream
    documents: int = 0  # of all parts before it, held-out ones included, like the next two
    tokens: int = 0
    left_out: int = 0  # records


@dataclass(frozen=True)
class Position:
    """Says how far a run has read one source, which a checkpoint remembers."""

    start: PartStart  # of the part that the last pack was of
    fingerprint: str  # of that part

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Position:
        """The position of which `record` is the `asdict`."""
        return cls(PartStart(**record["start"]), record["fingerprint"])


@dataclass(frozen=True)
class Part:
    """A part on disk, opened."""

    start: PartStart
    after: PartStart  # of the next part; its epoch is that of all documents in this one
    packs: ArrowPacks


def part_folder(folder: Path, number: int) -> Path:
    return folder / f"part-{number:08d}"


def read_part(folder: Path, start: PartStart) -> Part | None:
    """The part in `folder` that was made from `start`, None where it is not there; InputError where it is damaged."""
    path = part_folder(folder, start.number)
    try:
        if not (path / MANIFEST).exists():
            return None
        packs = ArrowPacks(path)
    except InputError:
        if (path / MANIFEST).exists():
            raise
        return None  # it has just been removed
    made = packs.manifest["statistics"]["stream"]
    part = Part(PartStart(**made["start"]), PartStart(**made["after"]), packs)
    return part if part.start == start else None


def remove_part(part: Path) -> None:
    """Its manifest first: what is half deleted is no part."""
    (part / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(part, ignore_errors=True)


def bytes_below(folder: Path) -> int:
    """Returns the total size in bytes of all files below `folder`, while the run may be deleting some."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def room_for(settings: DataSettings, size: int) -> float:
    """Returns how many bytes would be left of what packs may take, with `size` bytes more of them."""
    return settings.stream.disk_gb * 1e9 - bytes_below(settings.packs) - size


def check_room(settings: DataSettings, size: int, why: str) -> None:
    """InputError where there is no room for `size` bytes of packs, which are needed now."""
    if (room := room_for(settings, size)) < 0:
        limit = settings.stream.disk_gb
        raise InputError(
            f"data.streaming.disk_gb: {limit:g} is too little: {why} {limit - room / 1e9:.3g} GB; set it to "
            f"{(limit - room / 1e9) * 1.05:.2g} or more, or a smaller data.streaming.window, which begins another stream"
        )


def state_of(packs: Path) -> dict[str, Any]:
    """Returns what the packer says: `error`, or in `waits` the part for which there is no room."""
    return load_object(packs / STATE, "start the run again") if (packs / STATE).exists() else {}


def leave_state(packs: Path, state: dict[str, Any]) -> None:
    packs.mkdir(parents=True, exist_ok=True)
    replace_file(packs / STATE, json.dumps(state).encode())


class Packing(Protocol):
    """Who makes the parts, as the process that has started it sees it."""

    def begin(self, positions: Mapping[str, Position]) -> None:
        """Make the parts from these on, and no others."""

    def check(self) -> None:
        """Where it has ended, leave why for all that wait for parts: `leave_state`."""

    def close(self) -> None:
        """Make no more."""


class SourceStream:
    """The packs of one source, by their place in its stream. One thread reads, while another may `release`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sample = ArrowPacks(folder / FIRST)
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, position: Position | None) -> None:
        """Close the parts that are open, and read from this one on; None: from the first."""
        self.position = position or Position(PartStart(), self.sample.fingerprint)
        self._parts: list[Part] = []  # that are open, one after another

    def part_of(self, place: int, wait: Callable[[PartStart], None]) -> Part:
        """The part with the pack at `place`, opened. Calls `wait` with its start, again and again, until it is there."""
        with self._lock:
            before = [part for part in self._parts if part.start.first <= place]
        part = before[-1] if before else self._open(self.position.start, wait)
        if place < part.start.first:
            raise InputError(f"{self.folder}: a stream does not go back to pack {place:,}; resume from an earlier checkpoint")
        while place >= part.after.first:
            part = self._open(part.after, wait)
        return part

    def _open(self, start: PartStart, wait: Callable[[PartStart], None]) -> Part:
        while (part := read_part(self.folder, start)) is None:
            wait(start)
        if start == self.position.start and part.packs.fingerprint != self.position.fingerprint:
            raise InputError(
                f"{part.packs.path}: is not the part that was trained on, so its text has changed. Put the text back as it was, "
                "of a hub's dataset by `name@revision`, and remove this folder; or begin anew with another data.packs and run_dir"
            )
        with self._lock:
            self._parts.append(part)
        return part

    def release(self, place: int) -> list[Part]:
        """Packs before `place` are read no more: close their parts and return them, but for that of the last pack, which a
        checkpoint names."""
        with self._lock:
            read = [part for part in self._parts if part.start.first < place]
            if read:
                self.position = Position(read[-1].start, read[-1].packs.fingerprint)
            passed = [part for part in self._parts if part.after.first < place]
            self._parts = self._parts[len(passed) :]
        return passed


class StreamedPacks(PacksOfOthers):
    """The packs of one source or several in shares of the tokens, as they come: index n * sources + s is pack n of source s.

    `begin` says where to read, and `packing` who makes what is not there; without, parts are waited for that another process
    makes. A pack that is not there is waited for.

    parts: the settings of each source, by name, "" where there is one only.
    """

    def __init__(self, settings: DataSettings, parts: Mapping[str, DataSettings]) -> None:
        self.path, self.settings = settings.packs, settings
        self.sources = {name: SourceStream(part.packs) for name, part in parts.items()}
        self.weights = dict(zip(parts, [each.weight for each in settings.sources or ()] or [1.0], strict=True))
        first = next(iter(self.sources.values())).sample
        self.length, self.tokenizer = first.length, first.tokenizer
        content = [[name, each.sample.fingerprint, self.weights[name]] for name, each in self.sources.items()]
        windows = [part.stream.window for part in parts.values()]
        self.fingerprint = hashlib.sha256(json.dumps([content, windows]).encode()).hexdigest()
        self.packing: Packing | None = None
        self._leaving = threading.Event()
        self._needed: dict[str, int] = {}  # the pack of each source up to which, exclusive, the step at work reads

    @cached_property
    def mixture(self) -> Mixture:
        """Which places of the stream of all packs belong to which source."""
        tokens = tuple(each.sample.tokens / len(each.sample) for each in self.sources.values())
        return Mixture(tuple(self.sources), (ENDLESS,) * len(tokens), tuple(self.weights.values()), tokens)

    @property
    def samples(self) -> dict[str, ArrowPacks]:
        """For each source, those packs of its beginning that stay on disk."""
        return {name: each.sample for name, each in self.sources.items()}

    def __len__(self) -> int:
        return ENDLESS

    def locate(self, index: int) -> tuple[Packs, int]:
        place, number = divmod(index, len(self.sources))
        part = self.part_of(list(self.sources)[number], place)
        return part.packs, place - part.start.first

    def part_of(self, name: str, place: int) -> Part:
        """The part of this source with the pack at `place` of its stream."""
        return self.sources[name].part_of(place, lambda start: self._wait(name, start))

    def _wait(self, name: str, start: PartStart) -> None:
        """Look whether the part that begins there is still to come, and give it a moment."""
        if self._leaving.wait(LOOK):
            raise InputError(f"{self.path}: nobody waits for part {start.number} any more")
        if failure := self.failure:
            raise InputError(failure)
        waits = state_of(self.path).get("waits", {})
        needed = start.first < self._needed.get(name, 0) and (waits.get("source"), waits.get("part")) == (name, start.number)
        if self.packing is not None and needed:  # it deletes what is passed, and nothing is before the step is done
            try:
                check_room(self.settings, waits["bytes"], "a step reads packs of")
            except InputError as error:
                leave_state(self.path, {"error": str(error)})
                raise

    @property
    def failure(self) -> str | None:
        """Why no more parts come, as far as this process can tell; None while they do."""
        if self.packing is not None:
            self.packing.check()
        return state_of(self.path).get("error")

    def verify(self) -> None:
        for sample in self.samples.values():
            sample.verify()

    # ── Where the run is ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, record: Mapping[str, Any] | None) -> None:
        """Go on from what `record` returned for a checkpoint; from the beginning for None."""
        for name, source in self.sources.items():
            source.begin(record and Position.of(record[name]))
        if self.packing is not None:
            self.packing.begin(self._positions)

    @property
    def _positions(self) -> dict[str, Position]:
        return {name: source.position for name, source in self.sources.items()}

    def record(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the positions, after `reads`."""
        return {name: asdict(position) for name, position in self._positions.items()}

    def reads(self, places: range) -> None:
        """The next step reads the packs at `places` of the stream of all sources, and no process reads what is before."""
        self._leaving.clear()
        self._needed = dict(zip(self.sources, map(int, self.mixture.packs_before(places.stop)), strict=True))
        for source, first in zip(self.sources.values(), self.mixture.packs_before(places.start), strict=True):
            for part in source.release(int(first)):
                if self.packing is not None and part.packs.path.name != FIRST:
                    remove_part(part.packs.path)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block after `reads`; threads that still wait for parts when it is left, end."""
        try:
            yield
        finally:
            self._leaving.set()


@dataclass(frozen=True)
class StreamOrder(Order):
    """The order of packs that are made meanwhile. `packs_of_step` may have to wait for them."""

    packs: StreamedPacks = field(kw_only=True)

    def packs_of_source(self, number: int, places: np.ndarray) -> np.ndarray:
        """Each place has another pack of its part."""
        # Sources must not go through their parts in the same order, nor epochs through the same part.
        key = splitmix64(splitmix64(splitmix64(np.uint64([self.seed])) + np.uint64(number)))
        packs, done = np.empty_like(places), 0
        while done < len(places):
            part = self.packs.part_of(list(self.packs.sources)[number], int(places[done]))
            first, end = part.start.first, part.after.first
            within = places[done : int(np.searchsorted(places, end))] - first
            packs[done : done + len(within)] = first + permute(
                within, end - first, splitmix64(key + np.uint64(part.start.number))
            )
            done += len(within)
        return packs * len(self.packs.sources) + number

    def epoch_of(self, step: int) -> float:
        """Returns how often the text was gone through when `step` starts, in whole times; of several sources, the least."""
        return float(min(part.after.epoch for part in self._reached(step).values()))

    def figures(self, step: int) -> dict[str, float]:
        """Once `step` steps are done, for metrics: in which part of the text each source is, and what is packed up to its end."""
        figures: dict[str, float] = {}
        for name, part in self._reached(step).items():
            of, after = f"/{name}" if name else "", part.after
            figures |= {f"part{of}": part.start.number, f"packed_documents{of}": after.documents}
            figures |= {f"packed_tokens{of}": after.tokens, f"left_out_records{of}": after.left_out}
            figures |= {f"epoch{of}": float(after.epoch)} if name else {}
        shares = self.mixture.shares(self.places_of_step(step).start) if len(self.packs.sources) > 1 else {}
        return figures | {f"share/{name}": share for name, share in shares.items()}

    def _reached(self, step: int) -> dict[str, Part]:
        """Returns for each source the part with its last pack before `step`, or its first part where there is no such pack."""
        before = self.mixture.packs_before(self.places_of_step(step).start)
        return {name: self.packs.part_of(name, max(int(n) - 1, 0)) for name, n in zip(self.packs.sources, before, strict=True)}


def order_of(packs: Packs, packs_per_step: int, seed: int, shift: int = 0) -> Order:
    """The order in which a run trains on `packs`, its step 0 `shift` packs further on."""
    if isinstance(packs, StreamedPacks):
        return StreamOrder(packs.mixture, packs_per_step, seed, shift, packs=packs)
    mixture = packs.mixture() if isinstance(packs, MixedPacks) else Mixture.alone(len(packs))
    return Order(mixture, packs_per_step, seed, shift)
