"""Packs that are made while the run trains: of more text than the disk holds, in parts that come, are trained on and go.

    packs/                          packs/NAME/ for each of several sources
      first/                        packs of the first part that are kept: a sample to look at, and what is held out
      part-00000003/                packs as `prepare` writes them, and in their manifest from where in the source they were made
      part-00000004/
      failed.json                   why no more parts come

A part ends at a place of the source that follows from the settings and the text alone, and so does what is in it: a part that is
gone can be made again from the place that the one before it, or a checkpoint, remembers. `packing.packer` makes parts; here they
are read. A run goes through the parts in their order and through the packs of each in an order drawn from (seed, part).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foundation.errors import InputError
from foundation.integrity import Size
from foundation.reading import load_object
from foundation.settings import first_mistake
from packing.arrow import ArrowPacks, Pack, Packs
from packing.manifest import FIRST, MANIFEST, REMEDY
from packing.mixture import MixedOrder, MixedPacks, Mixture
from packing.order import PackOrder, permute, splitmix64
from packing.parts import stream_parts
from packing.settings import DataSettings

FAILED = "failed.json"
PART = re.compile(r"part-\d{8}")
ENDLESS = 2**62  # packs, where nobody knows how many there are
_LOOK = 0.05  # seconds between two looks for a part that is still to come


class PartStart(BaseModel):
    """Says from where in its source a part is made, and what was made before it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: Size = 0
    epoch: Size = 0  # how often the source has come to its end
    place: dict[str, Any] = Field(default_factory=dict)  # in the source: `begin` of its `chunks`
    first: Size = 0  # packs of all parts before it, so the place of its first one in the stream
    documents: Size = 0  # of all parts before it, held-out ones included, like the next three
    tokens: Size = 0
    skipped: Size = 0
    empty: Size = 0


class Position(BaseModel):
    """Says how far a run has read one source, which a checkpoint remembers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: PartStart  # of the part that the last pack was of
    fingerprint: str  # of that part


class PartRecord(BaseModel):
    """What the manifest of a part says beyond that of other packs."""

    start: PartStart
    after: PartStart  # that of the next one


@dataclass(frozen=True)
class StreamedPart:
    """A part on disk, opened."""

    start: PartStart
    after: PartStart
    packs: ArrowPacks

    @property
    def fingerprint(self) -> str:
        return self.packs.fingerprint

    @property
    def epoch(self) -> int:
        """The epoch that all of its documents belong to: a source begins again with a part of its own."""
        return self.after.epoch


def part_folder(folder: Path, number: int) -> Path:
    return folder / f"part-{number:08d}"


def read_part(folder: Path, number: int) -> StreamedPart | None:
    """Part `number` of the source whose parts are in `folder`, None where it is not there; InputError where it is damaged."""
    path = part_folder(folder, number)
    if not (path / MANIFEST).exists():
        return None
    packs = ArrowPacks(path)
    try:
        record = PartRecord.model_validate(packs.manifest["statistics"].get("stream"))
    except ValidationError as error:
        raise InputError(f"{path / MANIFEST}: not of a part of a stream: {first_mistake(error)}; remove {path}") from None
    return StreamedPart(record.start, record.after, packs)


class Packing(Protocol):
    """Who makes the parts, as the process that has started it sees it."""

    def begin(self, positions: Mapping[str, Position]) -> None:
        """Make the parts from these on."""

    def needs(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """The step at work reads these packs of each source, the second excluded; none reads what is before."""

    def check(self) -> None:
        """InputError where it has ended, which is left for all that wait for parts."""

    def close(self) -> None:
        """Make no more."""


class SourceStream:
    """The packs of one source, by their place in its stream. Threads may share one."""

    def __init__(self, settings: DataSettings) -> None:
        self.folder = settings.packs
        self.sample = ArrowPacks(self.folder / FIRST)
        said = self.sample.manifest["statistics"].get("stream") or {}
        try:
            self.rate, self.first_fingerprint = float(said["rate"]), str(said["fingerprint"])  # the rate in tokens a pack
        except (KeyError, ValueError, TypeError):
            raise InputError(f"{self.folder / FIRST / MANIFEST}: not of a stream; {REMEDY}") from None
        if self.sample.length != settings.length:
            has = f"packs of {self.sample.length} tokens, but `data.length` is {settings.length}"
            raise InputError(f"{self.folder}: {has}; set it to fit, or name another folder")
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, position: Position | None) -> None:
        """Forget which parts were opened, and read from this one on; None: from the first."""
        with self._lock:
            self._open: dict[int, StreamedPart] = {}
            self._last = position or Position(start=PartStart(), fingerprint=self.first_fingerprint)
            self._begin = self._last.start

    @property
    def position(self) -> Position:
        """The part of the last pack that was released."""
        return self._last

    def part_of(self, place: int, wait: Callable[[int], None]) -> StreamedPart:
        """The part with the pack at `place`, opened. Calls `wait` with its number, again and again, until it is there."""
        with self._lock:
            before = [part for part in self._open.values() if part.start.first <= place]
            start, part = self._begin, max(before, key=lambda each: each.start.first, default=None)
        if part is None and place < start.first:
            raise InputError(
                f"{self.folder}: pack {place:,} of the stream is wanted, and the run goes on from pack {start.first:,}; a stream "
                "does not go back: resume with the checkpoint's `data.sources` and their weights, or from an earlier one"
            )
        while part is None or place >= part.after.first:
            part = self._opened(part.after if part else start, wait)
        return part

    def _opened(self, start: PartStart, wait: Callable[[int], None]) -> StreamedPart:
        with self._lock:
            if start.number in self._open:
                return self._open[start.number]
        while (part := self._read(start)) is None:
            wait(start.number)
        with self._lock:
            return self._open.setdefault(start.number, part)

    def _read(self, start: PartStart) -> StreamedPart | None:
        """The part if it is there; one of another position, or of another text, is about to be replaced."""
        try:
            part = read_part(self.folder, start.number)
        except InputError:
            if (part_folder(self.folder, start.number) / MANIFEST).exists():
                raise
            return None
        known = start != self._last.start or part is None or part.fingerprint == self._last.fingerprint
        return part if part is not None and part.start == start and known else None

    def release(self, place: int) -> None:
        """Packs before `place` are read no more, but for the last of them, whose part a checkpoint names. Their parts are
        closed, or the disk would keep what is deleted."""
        with self._lock:
            for number in sorted(self._open):
                part = self._open[number]
                if part.start.first < place:
                    self._last = Position(start=part.start, fingerprint=part.fingerprint)
                if part.after.first < place:
                    self._begin = part.after
                    del self._open[number]


class StreamedPacks:
    """The packs of one source or several in shares of the tokens, as they come: index n * sources + s is pack n of source s.

    `begin` says where to read, and `packing` who makes what is not there; without, parts are waited for that another process
    makes. A pack that is not there is waited for.
    """

    def __init__(self, settings: DataSettings) -> None:
        parts = stream_parts(settings)
        self.path = settings.packs
        self.sources = {name: SourceStream(part) for name, part in parts.items()}
        self.weights = {name: each.weight for name, each in zip(parts, settings.sources or (), strict=False)}
        first = next(iter(self.sources.values())).sample
        self.length, self.tokenizer = first.length, first.tokenizer
        windows = [part.stream.window for part in parts.values()]
        content = [[name, each.first_fingerprint, self.weights.get(name)] for name, each in self.sources.items()]
        self.fingerprint = hashlib.sha256(json.dumps([content, windows]).encode()).hexdigest()
        self.packing: Packing | None = None
        self._leaving = threading.Event()

    @cached_property
    def mixture(self) -> Mixture:
        """Which places of the stream of all packs belong to which source."""
        return Mixture(
            names=tuple(self.sources),
            counts=(ENDLESS,) * len(self.sources),
            weights=tuple(self.weights.get(name, 1.0) for name in self.sources),
            tokens_per_pack=tuple(each.rate for each in self.sources.values()),
        )

    @property
    def samples(self) -> dict[str, ArrowPacks]:
        """For each source, those packs of its beginning that stay on disk."""
        return {name: each.sample for name, each in self.sources.items()}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pack:
        part, within = self._find(index)
        return part.packs[within]

    def lengths(self, index: int) -> np.ndarray:
        part, within = self._find(index)
        return part.packs.lengths(within)

    def trained(self, index: int) -> np.ndarray | None:
        part, within = self._find(index)
        return part.packs.trained(within)

    def _find(self, index: int) -> tuple[StreamedPart, int]:
        place, number = divmod(index, len(self.sources))
        part = self.part_of(list(self.sources)[number], place)
        return part, place - part.start.first

    def part_of(self, name: str, place: int) -> StreamedPart:
        source = self.sources[name]
        return source.part_of(place, lambda number: self._wait(source.folder, number))

    def _wait(self, folder: Path, number: int) -> None:
        """Look whether a part is still to come, and give it a moment."""
        if self._leaving.wait(_LOOK):
            raise InputError(f"{folder}: nobody waits for part {number} any more")
        if failure := self.failure:
            raise InputError(failure)

    @property
    def failure(self) -> str | None:
        """Why no more parts come, as far as this process can tell; None while they do."""
        if (self.path / FAILED).exists():
            return str(load_object(self.path / FAILED, "start the run again").get("error"))
        try:
            if self.packing is not None:
                self.packing.check()
        except InputError as error:
            return str(error)
        return None

    def verify(self) -> None:
        for sample in self.samples.values():
            sample.verify()

    # ── Where the run is ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, positions: Any) -> None:
        """Go on from what `positions` said, of a checkpoint; from the beginning for None. InputError where it is nothing of that
        kind."""
        if positions is None:
            found = {name: None for name in self.sources}
        elif not isinstance(positions, dict) or positions.keys() != self.sources.keys():
            raise InputError(
                f"{self.path}: the checkpoint has no place in this stream, so it was trained on other data; set another "
                "`run_dir` to begin anew, or `data.streaming: false` to prepare all packs before the run"
            )
        else:
            try:
                found = {name: Position.model_validate(each) for name, each in positions.items()}
            except ValidationError as error:
                raise InputError(
                    f"{self.path}: the checkpoint's place in the stream is damaged: {first_mistake(error)}"
                ) from None
        for name, source in self.sources.items():
            source.begin(found[name])
        if self.packing is not None:
            self.packing.begin(self._positions)

    @property
    def _positions(self) -> dict[str, Position]:
        return {name: source.position for name, source in self.sources.items()}

    def record(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the positions, after `reads`."""
        return {name: position.model_dump() for name, position in self._positions.items()}

    def reads(self, places: range) -> None:
        """The next step reads the packs at `places` of the stream of all sources, and no process reads what is before."""
        self._leaving.clear()
        begin, end = self.mixture.taken(places.start), self.mixture.taken(places.stop)
        ranges = {name: (int(a), int(b)) for name, a, b in zip(self.sources, begin, end, strict=True)}
        for name, (first, _) in ranges.items():
            self.sources[name].release(first)
        if self.packing is not None:
            self.packing.needs(ranges)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block after `reads`; threads that still wait for parts when it is left, end."""
        try:
            yield
        finally:
            self._leaving.set()


@dataclass(frozen=True)
class StreamOrder:
    """Does what `PackOrder` does, for packs that are made meanwhile. `packs_of_step` may have to wait for them."""

    packs: StreamedPacks
    packs_per_step: int
    seed: int
    shift: int = 0

    @property
    def packs_count(self) -> int:
        return len(self.packs)

    def places_of_step(self, step: int) -> range:
        first = step * self.packs_per_step + self.shift
        return range(first, first + self.packs_per_step)

    def packs_of_step(self, step: int) -> np.ndarray:
        """Indices of the packs that step `step` (from 0) trains on; [packs_per_step] int64, in stream order."""
        places = np.array(self.places_of_step(step), np.int64)
        mixture, sources = self.packs.mixture, len(self.packs.sources)
        found = np.full(len(places), -1)
        for number, (name, before, after) in enumerate(
            zip(self.packs.sources, mixture.taken(places), mixture.taken(places + 1), strict=True)
        ):
            own = np.flatnonzero(after > before)
            found[own] = self._shuffled(name, number, before[own]) * sources + number
        return found

    def _shuffled(self, name: str, number: int, places: np.ndarray) -> np.ndarray:
        """The packs of a source that come at `places`, ascending, of it: each another one of the same part."""
        # Sources must not go through their parts in the same order, nor epochs through the same part.
        own = splitmix64(splitmix64(splitmix64(np.uint64([self.seed])) + np.uint64(number)))
        found, done = np.empty_like(places), 0
        while done < len(places):
            part = self.packs.part_of(name, int(places[done]))
            first, end = part.start.first, part.after.first
            within = places[done : int(np.searchsorted(places, end))] - first
            found[done : done + len(within)] = first + permute(
                within, end - first, splitmix64(own + np.uint64(part.start.number))
            )
            done += len(within)
        return found

    def epoch_of(self, step: int) -> float:
        """Returns how often the text was gone through when `step` starts, in whole times; of several sources, the least."""
        return float(min(part.epoch for part in self._reached(step).values()))

    def figures(self, step: int) -> dict[str, float]:
        """Once `step` steps are done, for metrics: in which part of the text each source is, and what is packed up to its end."""
        found: dict[str, float] = {}
        for name, part in self._reached(step).items():
            of = f"/{name}" if name else ""
            found |= {f"part{of}": part.start.number, f"packed_documents{of}": part.after.documents}
            found |= {f"packed_tokens{of}": part.after.tokens, f"left_out_records{of}": part.after.skipped + part.after.empty}
            found |= {f"epoch{of}": float(part.epoch)} if name else {}
        shares = self.packs.mixture.shares(self.places_of_step(step).start) if len(self.packs.sources) > 1 else {}
        return found | {f"share/{name}": share for name, share in shares.items()}

    def _reached(self, step: int) -> dict[str, StreamedPart]:
        """Returns for each source the part with its last pack before `step`, or its first part where there is no such pack."""
        taken = self.packs.mixture.taken(self.places_of_step(step).start)
        return {
            name: self.packs.part_of(name, max(int(place) - 1, 0)) for name, place in zip(self.packs.sources, taken, strict=True)
        }


def order_of(packs: Packs, packs_per_step: int, seed: int, shift: int = 0) -> PackOrder | MixedOrder | StreamOrder:
    """The order in which a run trains on `packs`, its step 0 `shift` packs further on."""
    if isinstance(packs, StreamedPacks):
        return StreamOrder(packs, packs_per_step, seed, shift)
    if isinstance(packs, MixedPacks):
        return MixedOrder(packs.mixture(), packs_per_step, seed, shift)
    return PackOrder(len(packs), packs_per_step, seed, shift)
