"""Packs that are made while the run trains: of more text than the disk holds, in parts that come, are trained on and go.

    packs/                    packs/NAME/ for each of several sources
      part-00000000/          stays, to look at and for what is held out
      part-00000003/          packs as `prepare` writes them, and in their manifest from where in the source they were made
      part-00000004/          the next ones
    packs/failed              why no more parts come

A part ends at a place of the source that follows from the settings and the text alone, and so does what is in it: a part that
is gone can be made again from the place that the one before it, or a checkpoint, remembers. `packing.prepare` makes parts and
deletes those that are passed; here they are read. A run goes through the parts in their order and through the packs of each in an
order drawn from (seed, part).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.files import free_bytes, hash_of, locked, replace_file
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Pack, Packs
from packing.order import Mixture, Order, permute, splitmix64
from packing.settings import DataSettings

FAILED = "failed"
ENDLESS = 2**62  # packs, where nobody knows how many there are
LOOK = 0.05  # seconds between two looks for a part that is still to come


@dataclass(frozen=True)
class PartStart:
    """Says from where in its source a part is made, and what was made before it."""

    number: int = 0
    epoch: int = 0  # how often the source has come to its end
    place: dict[str, Any] = field(default_factory=dict)  # in the source: `begin` of its `chunks`
    first: int = 0  # packs of all parts before it, so the place of its first one in the stream


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
    if not (path / MANIFEST).exists():
        return None
    packs = ArrowPacks(path)
    made = packs.manifest["statistics"]["stream"]
    return (
        Part(start, PartStart(**made["after"]), packs)
        if PartStart(**made["start"]) == start
        else None
    )


class SourceStream:
    """The packs of one source, by their place in its stream. One thread reads, while another may `release`."""

    def __init__(self, folder: Path, wait: Callable[[], None]) -> None:
        """wait: called again and again until a part is there."""
        self.folder, self._wait = folder, wait
        self.sample = ArrowPacks(folder / FIRST)
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, record: dict[str, Any] | None) -> None:
        """Close the parts that are open, and read from the one of this `record` on; None: from the first. Such a record is what
        a checkpoint keeps, so that a resume makes the part again and knows it."""
        self.record = record or {
            "start": asdict(PartStart()),
            "fingerprint": self.sample.fingerprint,
        }
        self._parts: list[Part] = []  # that are open, one after another

    def part_of(self, place: int) -> Part:
        """The part with the pack at `place`, opened once it is there."""
        with self._lock:
            before = [part for part in self._parts if part.start.first <= place]
        part = before[-1] if before else self._open(PartStart(**self.record["start"]))
        while place >= part.after.first:
            part = self._open(part.after)
        return part

    def _open(self, start: PartStart) -> Part:
        while (part := read_part(self.folder, start)) is None:
            self._wait()
        if (
            asdict(start) == self.record["start"]
            and part.packs.fingerprint != self.record["fingerprint"]
        ):
            raise InputError(
                f"{part.packs.path}: is not the part that was trained on, so its text has changed. Put the text back as it was, "
                "of a hub's dataset by `name@revision`, and remove this folder; or set another data.packs and run_dir"
            )
        with self._lock:
            self._parts.append(part)
        return part

    def release(self, place: int) -> None:
        """Close the parts before the one with the last pack before `place`: nobody reads them any more."""
        with self._lock:
            if read := [part for part in self._parts if part.start.first < place]:
                self.record = {
                    "start": asdict(read[-1].start),
                    "fingerprint": read[-1].packs.fingerprint,
                }
            self._parts = [part for part in self._parts if part.after.first >= place]


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_disk(settings: DataSettings) -> None:
    """InputError where the disk has less space than the packs may take, what they take already included."""
    limit, free = (
        settings.stream.disk_gb,
        (free_bytes(settings.packs) + bytes_below(settings.packs)) / 1e9,
    )
    if limit > free:
        raise InputError(
            f"data.streaming.disk_gb: {limit:g}: {settings.packs} has room for {free:.3g} GB; lower it, or take another disk"
        )


class PackerProcess(ExitStack):
    """Packs in a process of its own, and in those that tokenise for it; they end with the one that made this, however it ends.

    One run a folder: InputError where another one has it. `close` ends the process, and lets others have the folder.
    """

    def __init__(self, settings: DataSettings) -> None:
        super().__init__()
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None

        def refuse(holder: str) -> None:
            raise InputError(
                f"{settings.packs}: another run, {holder}, trains on this stream; wait, or set another data.packs"
            )

        self.enter_context(locked(settings.packs / ".lock", refuse))
        self.callback(self._end_process)
        check_disk(settings)

    def begin(self, starts: Mapping[str, Any]) -> None:
        """Make the parts of each source from the start that is named, and no others. It is the `asdict` of a `PartStart`."""
        self._end_process()
        (self._settings.packs / FAILED).unlink(missing_ok=True)
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")])
        )
        self._process = subprocess.Popen(
            # It ends in the midst of its work, and what frees its semaphores then would warn of them.
            [
                sys.executable,
                "-P",
                "-Wignore:resource_tracker",
                "-c",
                "from packing.prepare import serve; serve()",
            ],
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # as Ctrl-C is for the run, which ends this one
        )
        self.tell([self._settings.model_dump(mode="json"), starts])

    def tell(self, reading: Any) -> None:
        """The step at work reads these packs of each source, from one to another (exclusive); those before it may go."""
        with suppress(BrokenPipeError):  # it has ended, which `check` says
            self._process.stdin.write(json.dumps(reading) + "\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Where it has ended, leave why in the file `FAILED`, for all that wait for parts."""
        failed, status = self._settings.packs / FAILED, self._process.poll()
        if status is not None and not failed.exists():
            why = (
                f"signal {-status}: if memory ran out, set a smaller window"
                if status < 0
                else f"status {status}; it says why"
            )
            text = f"the process that makes the packs of the stream has ended with {why}. Start the same command again"
            replace_file(failed, f"{self._settings.packs}: {text}".encode())

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):
                self._process.stdin.close()


class StreamedPacks(Packs):
    """The packs of one source, or of several by their shares of the tokens. Index n * sources + s is pack n of source s.

    `begin` says where to read. `packing` makes the parts; None: another process does. A pack that is not there is waited for.

    parts: the settings of each source, by name, "" where there is one only.
    """

    def __init__(self, settings: DataSettings, parts: Mapping[str, DataSettings]) -> None:
        self.path = settings.packs
        self.sources = {name: SourceStream(part.packs, self._wait) for name, part in parts.items()}
        self.weights = dict(zip(parts, settings.shares, strict=True))
        # those packs of each that stay on disk
        self.samples = {name: each.sample for name, each in self.sources.items()}
        first = next(iter(self.samples.values()))
        self.length, self.tokenizer = first.length, first.tokenizer
        content = [
            [name, sample.fingerprint, self.weights[name]] for name, sample in self.samples.items()
        ]
        windows = [part.stream.window for part in parts.values()]
        self.fingerprint = hash_of([content, windows])
        self.packing: PackerProcess | None = None
        self._leaving = threading.Event()

    @cached_property
    def mixture(self) -> Mixture:
        """Which places of the stream of all packs belong to which source."""
        tokens = tuple(sample.tokens / len(sample) for sample in self.samples.values())
        return Mixture(
            tuple(self.sources), (ENDLESS,) * len(tokens), tuple(self.weights.values()), tokens
        )

    def order(self, packs_per_step: int, seed: int, shift: int = 0) -> Order:
        """The order in which a run trains on these packs, its step 0 `shift` packs further on."""
        return StreamOrder(self.mixture, packs_per_step, seed, shift, packs=self)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pack:
        place, number = divmod(index, len(self.sources))
        part = list(self.sources.values())[number].part_of(place)
        return part.packs[place - part.start.first]

    def _wait(self) -> None:
        """Give a part a moment to come; InputError where none comes any more."""
        if self._leaving.wait(LOOK):
            raise InputError(f"{self.path}: nobody waits for packs any more")
        if self.packing is not None:
            self.packing.check()
        if (file := self.path / FAILED).exists():
            raise InputError(file.read_text(encoding="utf-8"))

    def begin(self, record: Mapping[str, Any] | None) -> None:
        """Go on from what `record` returned for a checkpoint; from the beginning for None."""
        for name, source in self.sources.items():
            source.begin(record and record[name])
        if self.packing is not None:
            self.packing.begin({name: each["start"] for name, each in self.record().items()})

    def record(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of where each source is, after `reads`."""
        return {name: source.record for name, source in self.sources.items()}

    def reads(self, places: range) -> None:
        """The next step reads the packs at `places` of the stream of all sources, and no process reads what is before."""
        self._leaving.clear()
        begins, ends = (
            [int(n) for n in self.mixture.packs_before(place)]
            for place in (places.start, places.stop)
        )
        for source, begin in zip(self.sources.values(), begins, strict=True):
            source.release(begin)
        if self.packing is not None:
            self.packing.tell(dict(zip(self.sources, zip(begins, ends, strict=True), strict=True)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Entered after `reads`. When it is left, threads that still wait for parts end."""
        try:
            yield
        finally:
            self._leaving.set()


@dataclass(frozen=True)
class StreamOrder(Order):
    """The order of packs that are made meanwhile. `packs_of_step` may have to wait for them."""

    packs: StreamedPacks = field(kw_only=True)

    def packs_of_source(self, number: int, places: np.ndarray) -> np.ndarray:
        """Within a part, an order drawn for it says which pack comes at a place."""
        source = list(self.packs.sources.values())[number]
        # Sources must not go through their parts in the same order, nor epochs through the same part.
        key = splitmix64(splitmix64(splitmix64(np.uint64([self.seed])) + np.uint64(number)))
        packs, done = np.empty_like(places), 0
        while done < len(places):
            part = source.part_of(int(places[done]))
            first, end = part.start.first, part.after.first
            within = places[done : int(np.searchsorted(places, end))] - first
            of_part = permute(within, end - first, splitmix64(key + np.uint64(part.start.number)))
            packs[done : done + len(within)] = first + of_part
            done += len(within)
        return packs * len(self.packs.sources) + number

    def epoch_of(self, step: int) -> float:
        """Returns how often the text was gone through when `step` starts, in whole times; of several sources, the least."""
        return float(min(part.after.epoch for part in self._reached(step).values()))

    def figures(self, step: int) -> dict[str, float]:
        """Once `step` steps are done, for metrics: in which part of the text each source is."""
        figures: dict[str, float] = {}
        for name, part in self._reached(step).items():
            of = f"/{name}" if name else ""
            figures |= {f"part{of}": part.start.number} | (
                {f"epoch{of}": float(part.after.epoch)} if name else {}
            )
        shares = (
            self.mixture.shares(self.places_of_step(step).start)
            if len(self.packs.sources) > 1
            else {}
        )
        return figures | {f"share/{name}": share for name, share in shares.items()}

    def _reached(self, step: int) -> dict[str, Part]:
        """Returns for each source the part with its last pack before `step`, or its first part where there is no such pack."""
        before = zip(
            self.packs.sources.items(),
            self.mixture.packs_before(self.places_of_step(step).start),
            strict=True,
        )
        return {name: source.part_of(max(int(n) - 1, 0)) for (name, source), n in before}
