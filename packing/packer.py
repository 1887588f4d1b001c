"""Makes the packs of `packing.stream`, ahead of a run that trains on them: as far ahead as the disk may hold.

What a part holds follows from the place in the source where it begins, never from who makes it, when, or how often. So whatever
is passed may be deleted: a run that goes back, or on another machine, makes it again from the place that its checkpoint names.
Files are sought to that place, archives unpacked up to it; a hub's dataset begins with the file that it was in.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import FileLock, free_bytes
from foundation.progress import Progress, say
from packing.arrow import FIRST, PackWriter
from packing.pack import Arranged
from packing.prepare import (
    check_counts,
    content_settings,
    holds_packs_of,
    lock_of,
    prepare_part,
    save_tokenizer,
    tail_of,
    usable_cores,
)
from packing.records import Counts, TextTemplate, records_of
from packing.settings import DataSettings
from packing.sources import CHUNK_BYTES, SourceAbsent, open_source
from packing.store import folder_of, naming, text_parts, training_parts
from packing.stream import (
    LOOK,
    STATE,
    PartStart,
    Position,
    bytes_below,
    check_room,
    leave_state,
    part_folder,
    read_part,
    remove_part,
    room_for,
    state_of,
)
from packing.tokenizer import load_tokenizer
from packing.workers import TokenizerWorkers, Tokens, joined

_LEAST_CHUNK = 2**12  # bytes
_AT_ONCE = 8  # chunks a process that are read before the next ones
_BESIDE = 2**16  # bytes of a part beside its packs


@dataclass(frozen=True)
class PackedPart:
    """A part that is not on disk yet."""

    start: PartStart
    after: PartStart  # of the next part
    arranged: Arranged

    @property
    def bytes(self) -> int:
        """The bytes that its files will take, and a few more."""
        return round(1.002 * self.arranged.bytes()) + _BESIDE


class PartMaker:
    """Makes the parts of one source, each from its start alone. It has `workers` to tokenise, which a `with` block ends."""

    def __init__(self, settings: DataSettings, processes: int) -> None:
        self.settings, self.folder, self.processes = settings, settings.packs, processes
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.records = records_of(settings, self.tokenizer)
        self.source = open_source(settings, self.records)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / ".tokenizer.json"  # where processes read it
        self.tokenizer.save(file)
        skip_bad, tail = settings.on_bad_line == "skip", tail_of(self.records, self.tokenizer)
        self.workers = TokenizerWorkers(processes, file, self.records, skip_bad=skip_bad, tail=tail)

    def make(self, start: PartStart) -> PackedPart:
        """Tokenise a part. Where the source ends, it begins again with a part of its own."""
        epoch, (tokens, place) = start.epoch, self._fill(start.place)
        if not tokens.counts.documents and start.number:  # the part before has taken the last document
            epoch, (tokens, place) = epoch + 1, self._fill({})
        if start.number == 0 or not tokens.counts.documents:
            check_counts(self.settings, tokens.counts)
        # What is held out of the text's beginning is so each time that the text is gone through.
        begins = start.number == 0 or epoch > start.epoch
        settings = self.settings if begins else self.settings.model_copy(update={"held_out": 0.0})
        arranged = Arranged.of(tokens, settings, one_file=self.source.identity["kind"] == "text")
        after = PartStart(
            number=start.number + 1,
            epoch=epoch,
            place=place,
            first=start.first + len(arranged.layouts["train"]),
            documents=start.documents + tokens.counts.documents,
            tokens=start.tokens + tokens.counts.tokens,
            left_out=start.left_out + tokens.counts.skipped + tokens.counts.empty,
        )
        return PackedPart(start, after, arranged)

    def _fill(self, place: dict[str, Any]) -> tuple[Tokens, dict[str, Any]]:
        """Tokenise from `place` on until a part is full or the source is over; returns what, and the place behind it."""
        counts, results, window = Counts(), list[Tokens](), self.settings.stream.window
        chunks, wanted = self.source.chunks(place, min(CHUNK_BYTES, max(_LEAST_CHUNK, window))), self.processes
        while counts.tokens < window and (batch := list(itertools.islice(chunks, wanted))):
            for chunk, result in zip(batch, self.workers.map(batch), strict=True):
                counts, place = counts + result.counts, chunk.after
                results.append(result)
                if counts.tokens >= window:
                    break
            to_fill = (window - counts.tokens) * len(results) // max(counts.tokens, 1)
            wanted = min(_AT_ONCE * self.processes, max(1, to_fill))
        return joined(results), place

    def write(self, part: PackedPart) -> None:
        """Write a part to its folder: the first one with what is held out, and with the tokenizer."""
        arranged, first = part.arranged, part.start.number == 0
        with PackWriter(part_folder(self.folder, part.start.number), self.settings.length) as writer:
            for split in arranged.layouts if first else ("train",):
                for _ in arranged.write(writer, split, self.tokenizer.padding):
                    pass
            if first:
                save_tokenizer(writer.folder, self.tokenizer, self.records)
            statistics = arranged.statistics() | {"stream": {"start": asdict(part.start), "after": asdict(part.after)}}
            writer.finish(settings=content_of(self.settings), statistics=statistics, tokenizer=self.tokenizer.describe())


def content_of(settings: DataSettings) -> dict[str, Any]:
    """All settings that packs depend on: those of a stream also on how much of it is a part."""
    return content_settings(settings) | ({"window": settings.stream.window} if settings.stream else {})


def check_preparing(settings: DataSettings, *, elsewhere: bool = False) -> list[str]:
    """Checks for a plan what can be checked without packs; returns what cannot be, to be printed. Raises InputError where a run
    would refuse the data before it reads any text.

    `elsewhere`: they may be made on another machine. Text that is not on this one is then no error, and is not checked.
    """
    notes = []
    for key, part in text_parts(settings).items():
        with naming(key):
            if holds_packs_of(part, folder_of(part), content_of(part)):
                continue
            try:
                # Of a tokenizer that is still to be trained nothing is known.
                named = Path(str(part.tokenizer)).exists()
                open_source(part, records_of(part, load_tokenizer(str(part.tokenizer))) if named else TextTemplate.parse("text"))
            except SourceAbsent as error:
                if not elsewhere:
                    raise
                notes.append(f"{error}; it is not checked")
            if part.stream and not elsewhere:
                check_disk(settings)
    return notes


def prepare(settings: DataSettings, progress: bool = True) -> Path:
    """Make the packs that `settings` describe, unless they exist, and return their folder: of each source and of the text to
    validate on; of a stream, the first part of each source.

    Every process may call it: it takes a lock, and who gets it second finds the work done. InputError for what cannot be used and
    for a full disk.
    """
    if not settings.prepares:
        raise InputError("data.source and data.tokenizer are not set, so there is nothing to prepare packs from")
    for key, part in text_parts(settings).items():
        with naming(key):
            if not part.stream:
                prepare_part(part, progress)
            elif not holds_packs_of(part, folder_of(part), content_of(part)):
                with lock_of(settings.packs, progress):
                    if not holds_packs_of(part, folder_of(part), content_of(part)):
                        _make_first(part, settings, progress)
    return settings.packs


def _make_first(part: DataSettings, settings: DataSettings, progress: bool) -> None:
    check_disk(settings)
    for path in part.packs.glob("part-*"):  # of an earlier stream, or of work that was killed
        remove_part(path)
    limit = settings.stream.disk_gb
    maker = PartMaker(part, processes_of(settings))
    with maker.workers, Progress("packing the first part", shown=progress):
        say(f"{part.packs}: packing {maker.source.description} as the run goes on, {limit:g} GB ahead at most", progress)
        made = maker.make(PartStart())
        check_room(settings, made.bytes, "the first part takes")
        maker.write(made)


def check_disk(settings: DataSettings) -> None:
    """InputError where the disk has less space than the packs may take, what they take already included."""
    limit, free = settings.stream.disk_gb, (free_bytes(settings.packs) + bytes_below(settings.packs)) / 1e9
    if limit > free:
        raise InputError(
            f"data.streaming.disk_gb: {limit:g}, and the disk of {settings.packs} has {free:.3g} GB for packs; set it to "
            f"{free * 0.95:.2g} or less, or data.packs to another disk"
        )


def processes_of(settings: DataSettings) -> int:
    """Returns how many processes tokenise each source while the run trains: by default half of the cores, shared out."""
    return max(1, (usable_cores() // 2) // max(1, len(settings.sources or ())))


def pack_ahead(settings: DataSettings, makers: Mapping[str, PartMaker], positions: Mapping[str, Position]) -> Iterator[bool]:
    """Make parts of all sources from these positions on, in the order in which they will be needed, as far ahead as the disk may
    hold. Yields True after each part, and False where the next one has to wait until the run has deleted another."""
    weights = dict(zip(makers, [each.weight for each in settings.sources or ()] or [1.0], strict=True))
    starts, there = {name: position.start for name, position in positions.items()}, set[Path]()
    for name, start in starts.items():  # what is there from before, one part after another
        with suppress(InputError):  # damaged: it is made again
            while part := read_part(makers[name].folder, start):
                starts[name] = start = part.after
                there.add(part.packs.path)
    for path in (path for maker in makers.values() for path in (*maker.folder.glob("part-*"), *maker.folder.glob(".part-*"))):
        if path not in there and path.name != FIRST:
            remove_part(path)

    while True:
        name = min(starts, key=lambda name: starts[name].first / weights[name])
        part = makers[name].make(starts[name])
        if room_for(settings, part.bytes) < 0:
            leave_state(settings.packs, {"waits": {"source": name, "part": part.start.number, "bytes": part.bytes}})
            while room_for(settings, part.bytes) < 0:
                yield False
            leave_state(settings.packs, {})
        makers[name].write(part)
        starts[name] = part.after
        yield True


class PackerProcess:
    """Packs in a process of its own, and in those that tokenise for it; they end with the one that made this, however it ends.

    One run a folder: InputError where another one has it.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        check_disk(settings)

        def refuse(holder: str) -> None:
            raise InputError(
                f"{settings.packs}: another run trains on this stream, {holder}; set another data.packs, or wait for it"
            )

        self._lock = FileLock(settings.packs / ".lock", refuse)
        (settings.packs / STATE).unlink(missing_ok=True)

    def begin(self, positions: Mapping[str, Position]) -> None:
        self._end_process()
        path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from packing.packer import serve; serve()"],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # as Ctrl-C is for the run, which ends this one
        )
        what = [self._settings.model_dump(mode="json"), {name: asdict(position) for name, position in positions.items()}]
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        packs, status = self._settings.packs, self._process.poll() if self._process else None
        if status is not None and not state_of(packs).get("error"):
            why = f"signal {-status}: if memory ran out, set a smaller window" if status < 0 else f"status {status}; it says why"
            text = f"{packs}: the process that makes the packs of the stream has ended with {why}. Start the same command again"
            leave_state(packs, {"error": text})

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()

    def close(self) -> None:
        """End it, and let others have the folder; closing twice is harmless."""
        self._end_process()
        self._lock.release()


def serve() -> None:
    """Runs in the process that makes parts: from where its stdin says, until the other end of that is closed."""
    stdin = os.fdopen(0, "rb")
    what, positions = json.loads(stdin.readline())
    settings = DataSettings.model_validate(what)
    threading.Thread(target=lambda: (stdin.read(), os._exit(0)), daemon=True).start()
    try:
        with ExitStack() as stack:
            makers = {name: PartMaker(part, processes_of(settings)) for name, part in training_parts(settings).items()}
            for maker in makers.values():
                stack.enter_context(maker.workers)
            for done in pack_ahead(settings, makers, {name: Position.of(each) for name, each in positions.items()}):
                time.sleep(0 if done else LOOK)
    except InputError as error:
        leave_state(settings.packs, {"error": str(error)})
