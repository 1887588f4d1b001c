"""Makes the packs of `packing.stream`, ahead of a run that trains on them: as far ahead as the disk may hold.

What a part holds follows from the place in the source where it begins, never from who makes it, when, or how often. So whatever
is passed may be deleted: a run that goes back, or on another machine, makes it again from the place that its checkpoint names,
and its fingerprint says whether the text is still the same. Files are sought to that place, but for archives, which are unpacked
up to it; a hub's dataset begins with the file that it was in.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from foundation.errors import InputError, permissions_named
from foundation.files import free_bytes, no_room, replace_file
from foundation.locks import FileLock
from foundation.progress import Progress, say
from foundation.reading import one_line
from packing.arrow import DiskFull
from packing.manifest import FIRST, MANIFEST
from packing.part_maker import SAMPLE, PackedPart, PartMaker, content_of
from packing.parts import by_key, folder_of, naming, stream_parts, training_parts, validation_parts
from packing.prepare import content_settings, holds_packs_of, lock_of, prepare_part, usable_cores
from packing.records import TextTemplate, records_of
from packing.settings import DataSettings
from packing.sources import SourceAbsent, SourceUnreachable, open_source
from packing.stream import FAILED, PART, PartStart, Position, part_folder, read_part
from packing.tokenizer import load_tokenizer


def check_preparing(settings: DataSettings, *, elsewhere: bool = False) -> list[str]:
    """Checks for a plan what can be checked without packs; returns what cannot be, to be printed. Raises InputError where a run
    would refuse the data before it reads any text.

    `elsewhere`: they may be made on another machine. Text that is not on this one is then no error, and is not checked.
    """
    notes = []
    training = stream_parts(settings) if settings.stream else training_parts(settings) or {"": settings}
    for key, part in (by_key(training) | by_key(validation_parts(settings), "data.validation")).items():
        if part.source is None:
            continue
        with naming(key):
            if holds_packs_of(part, folder_of(part), content_of(part) if part.stream else content_settings(part)):
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


def prepare_stream(settings: DataSettings, progress: bool = True) -> Path:
    """Make the first part of each source, unless it was made, and the text to validate on; returns their folder.

    Every process may call it: it takes a lock, and who gets it second finds the work done. InputError for what cannot be used.
    """
    validation, parts = by_key(validation_parts(settings), "data.validation"), by_key(stream_parts(settings))
    for key, part in validation.items():
        if part.source is not None:
            with naming(key):
                prepare_part(part, progress)
    for key, part in parts.items():
        if not holds_packs_of(part, part.packs / FIRST, content_of(part)):
            with naming(key), lock_of(settings.packs, progress):
                if not holds_packs_of(part, part.packs / FIRST, content_of(part)):
                    _make_first(part, settings, progress)
    return settings.packs


def _make_first(part: DataSettings, settings: DataSettings, progress: bool) -> None:
    check_disk(settings)
    for path in part.packs.glob("part-*"):  # of an earlier stream, or of work that was killed
        _remove(path)
    limit = settings.stream.disk_gb
    with PartMaker(part, processes_of(settings)) as maker, Progress("packing the first part", shown=progress):
        say(f"{part.packs}: packing {maker.source.description} as the run goes on, {limit:g} GB ahead at most", progress)
        made = maker.make(PartStart())
        kept = bytes_below(settings.packs) + made.bytes + 4 * settings.length * SAMPLE
        if kept > limit * 1e9:
            raise InputError(_too_small(settings, kept, "the first part takes"))
        _, fingerprint = maker.write(made)
        maker.write_first(made, fingerprint)


def check_disk(settings: DataSettings) -> None:
    """InputError where the disk has less space than the packs may take, what they take already included."""
    limit, free = settings.stream.disk_gb, (free_bytes(settings.packs) + bytes_below(settings.packs)) / 1e9
    if limit > free:
        raise InputError(
            f"data.streaming.disk_gb: {limit:g}, and the disk of {settings.packs} has {free:.3g} GB for packs; set it to "
            f"{free * 0.95:.2g} or less, or data.packs to another disk"
        )


def _too_small(settings: DataSettings, needed: float, why: str) -> str:
    return (
        f"data.streaming.disk_gb: {settings.stream.disk_gb:g} is too little: {why} {needed / 1e9:.3g} GB; set it to "
        f"{needed * 1.05 / 1e9:.2g} or more, or a smaller data.streaming.window, which begins another stream"
    )


def processes_of(settings: DataSettings) -> int:
    """Returns how many processes tokenise each source while the run trains: by default half of the cores, shared out."""
    return max(1, (usable_cores() // 2) // max(1, len(settings.sources or ())))


def bytes_below(folder: Path) -> int:
    """Returns the total size in bytes of all files below `folder`."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has gone meanwhile
                total += os.stat(os.path.join(parent, name), follow_symlinks=False).st_size
    return total


def _remove(part: Path) -> None:
    """Its manifest first: what is half deleted is no part."""
    (part / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(part, ignore_errors=True)


class SourceAhead:
    """Knows how far the parts of one source are made."""

    def __init__(self, maker: PartMaker, weight: float) -> None:
        self.maker, self.folder, self.weight = maker, maker.folder, weight
        self.next, self.known = PartStart(), dict[int, str]()  # what comes next, and fingerprints that are known beforehand
        self.needed = (0, 1)  # packs that the step at work reads: from, to (exclusive)
        self.ends: dict[int, int] = {}  # of the parts that are there: the place behind each

    @property
    def ahead(self) -> float:
        """Packs that are made and not yet read, by the source's share of the stream."""
        return (self.next.first - self.needed[0]) / self.weight

    @property
    def is_needed(self) -> bool:
        """Whether the step at work waits for the next part."""
        return self.next.first < self.needed[1]

    def there(self) -> list[int]:
        """The numbers of all part folders."""
        return sorted(int(path.name.removeprefix("part-")) for path in self.folder.glob("part-*") if PART.fullmatch(path.name))

    def passed(self) -> list[int]:
        """Parts that no process reads any more. The part of the last pack read is not among them: a checkpoint names it."""
        lowest = min(self.ends, default=self.next.number)
        return [n for n in self.there() if n < lowest or self.ends.get(n, self.needed[0]) < self.needed[0]]

    def lost(self) -> list[Path]:
        """Folders of parts that were made, are still to be read, and are not there any more."""
        to_read = (part_folder(self.folder, number) for number, end in self.ends.items() if end > self.needed[0])
        return [path for path in to_read if not (path / MANIFEST).exists()]

    def left_behind(self) -> list[int]:
        """Parts of an earlier run that lie further ahead than what is made now."""
        return [number for number in self.there() if number > self.next.number]


def _changed(source: SourceAhead, how: str) -> str:
    return (
        f"{source.maker.source.description}: its text has changed: {how}. Put the text back as it was, of a hub's dataset by "
        "`name@revision`; or set another data.packs and run_dir to begin anew"
    )


class StreamPacker:
    """Makes parts of all sources in the order in which they will be needed, as far ahead as the disk may hold."""

    def __init__(self, settings: DataSettings, makers: Mapping[str, PartMaker]) -> None:
        self.settings, self.limit = settings, round(settings.stream.disk_gb * 1e9)
        weights = [each.weight for each in settings.sources or ()] or [1.0]
        pairs = zip(makers.items(), weights, strict=True)
        self.sources = {name: SourceAhead(maker, weight) for (name, maker), weight in pairs}
        self._waiting: tuple[SourceAhead, PackedPart] | None = None  # for room

    def begin(self, positions: Mapping[str, Position]) -> None:
        """Make the parts from these on, that of each position included."""
        self._waiting = None
        for name, position in positions.items():
            source = self.sources[name]
            source.next, source.ends = position.start, {}
            source.known = {0: source.maker.first_fingerprint, position.start.number: position.fingerprint}
            source.needed = (position.start.first, position.start.first + 1)
            for leftover in source.folder.glob(".part-*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)

    def needs(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Takes note of what `packing.stream.Packing.needs` tells. Raises InputError where what was made for it has been removed:
        the run would wait for it."""
        for name, needed in ranges.items():
            self.sources[name].needed = needed
            if lost := self.sources[name].lost():
                raise InputError(
                    f"{lost[0]}: is gone, and the run has still to read it; leave data.packs alone while a run trains on it, and "
                    "start the same command again, which packs it anew"
                )

    def step(self) -> bool:
        """Do the next thing; False where there is nothing to do before the run has gone on."""
        source = min(self.sources.values(), key=lambda each: (not each.is_needed, each.ahead))
        if self._waiting and not source.is_needed:
            source = self._waiting[0]
        if self._is_there(source):
            return True
        part = self._waiting[1] if self._waiting and self._waiting[0] is source else self._make(source)
        self._waiting = source, part
        if not self._make_room(source, part):
            return False
        self._waiting = None
        after, fingerprint = self._write(source, part)
        known = source.known.get(part.start.number)
        if known not in (None, fingerprint):
            _remove(part_folder(source.folder, part.start.number))
            found = f"packed again, part {part.start.number} of the stream ({source.folder}) is {fingerprint[:12]}, and was"
            raise InputError(_changed(source, f"{found} {known[:12]} when the run was trained on it"))
        self._go_on(source, after)
        return True

    def _make(self, source: SourceAhead) -> PackedPart:
        try:
            return source.maker.make(source.next)
        except SourceUnreachable:
            raise
        except InputError as error:
            if source.next.number not in source.known:
                raise
            # What it was made of once can be read: a place in other text may be in the middle of a record.
            raise InputError(_changed(source, f"of part {source.next.number} of the stream, {error}")) from None

    def _is_there(self, source: SourceAhead) -> bool:
        """Returns whether the next part is there from before, with which it goes on; another one in its place is removed."""
        number = source.next.number
        path = part_folder(source.folder, number)
        if not path.exists():
            return False
        with suppress(InputError):  # it is damaged
            part = read_part(source.folder, number)
            if part and part.start == source.next and source.known.get(number, part.fingerprint) == part.fingerprint:
                self._go_on(source, part.after)
                return True
        _remove(path)
        return False

    def _go_on(self, source: SourceAhead, after: PartStart) -> None:
        source.ends[source.next.number] = after.first
        source.next = after

    def _make_room(self, source: SourceAhead, part: PackedPart) -> bool:
        """Delete what is passed until the part fits. InputError where the step at work cannot be had."""
        sources = self.sources.values()
        passed = sorted(((number, each) for each in sources for number in each.passed()), key=itemgetter(0))
        far = sorted(((number, each) for each in sources for number in each.left_behind()), key=itemgetter(0), reverse=True)
        for number, its in [*passed, *far]:
            if bytes_below(self.settings.packs) + part.bytes <= self.limit:
                return True
            _remove(part_folder(its.folder, number))
            its.ends.pop(number, None)
        if (used := bytes_below(self.settings.packs)) + part.bytes <= self.limit:
            return True
        if source.is_needed:
            raise InputError(_too_small(self.settings, used + part.bytes, "a step reads packs of"))
        return False

    def _write(self, source: SourceAhead, part: PackedPart) -> tuple[PartStart, str]:
        try:
            return source.maker.write(part)
        except DiskFull:
            fits = bytes_below(self.settings.packs) / 1e9
            raise InputError(
                f"{self.settings.packs}: the disk is full with {fits:.3g} GB of packs in it; set data.streaming.disk_gb to "
                f"{fits:.2g}, which changes nothing in the packs, or free some space"
            ) from None


# ── A process of its own, so that training does not wait for it ───────────────────────────────────────────────────────────────


class PackerProcess:
    """Packs in a process of its own, and in those that tokenise for it; they end with the one that made this, however it ends.

    One run a folder: InputError where another one has it. `begin`, `needs` and `check` as `packing.stream.Packing` says.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        check_disk(settings)
        try:
            self._lock = FileLock(settings.packs / ".lock", self._refuse)
        except OSError as error:
            raise InputError(
                f"{settings.packs}: cannot be written to: {error.strerror}; set data.packs to another place"
            ) from None
        (settings.packs / FAILED).unlink(missing_ok=True)

    def _refuse(self, holder: str) -> None:
        raise InputError(
            f"{self._settings.packs}: another run trains on this stream, {holder}; a stream serves one run at a time: "
            "wait for it, or set data.packs to another folder"
        )

    def begin(self, positions: Mapping[str, Position]) -> None:
        if self._process is None:
            self._start()
            self._tell("settings", self._settings.model_dump(mode="json"))
        self._tell("begin", {name: position.model_dump() for name, position in positions.items()})

    def needs(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        self._tell("needs", dict(ranges))

    def _start(self) -> None:
        """Starts the process in a process group of its own, as Ctrl-C is for the run, which ends this one."""
        found = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from packing.packer import serve; serve()"],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": found},
            start_new_session=True,
        )

    def _tell(self, what: str, content: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it has ended, which `check` says
            self._process.stdin.write(json.dumps([what, content]).encode() + b"\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Does what `Packing.check` does, and leaves what it says for the other processes, too."""
        status = self._process.poll() if self._process else None
        if status is None or (self._settings.packs / FAILED).exists():
            return
        cause, remedy = f"signal {-status}", "if memory ran out, set a smaller data.streaming.window"
        if status >= 0:  # and could not leave what it has to say
            cause, remedy = f"status {status}", "it has printed why: mend that"
        text = (
            f"{self._settings.packs}: the process that makes the packs of the stream has ended with {cause}; {remedy}, and start "
            "the same command again"
        )
        _leave_failure(self._settings.packs, text)
        raise InputError(text)

    def close(self) -> None:
        """End it, and let others have the folder; closing twice is harmless."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(OSError):  # what it has not read
                self._process.stdin.close()
        self._lock.release()


def _leave_failure(packs: Path, text: str) -> None:
    try:
        packs.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        replace_file(packs / FAILED, json.dumps({"error": text}).encode())
    except OSError:
        print(text, file=sys.stderr)


def serve() -> None:
    """Runs in the process that makes parts: does what its stdin says, until the other end of that is closed."""
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            inbox.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    settings = DataSettings.model_validate(inbox.get()[1])
    try:
        with permissions_named(), ExitStack() as stack:
            makers = {name: PartMaker(part, processes_of(settings)) for name, part in stream_parts(settings).items()}
            for maker in makers.values():
                stack.enter_context(maker)
            packer, busy, begun = StreamPacker(settings, makers), False, False
            while True:
                while not busy or not inbox.empty():
                    what, content = inbox.get()
                    if what == "begin":
                        packer.begin({name: Position.model_validate(each) for name, each in content.items()})
                        begun = True
                    else:
                        packer.needs(content)
                    busy = begun
                busy = packer.step()
    except InputError as error:
        _leave_failure(settings.packs, str(error))
    finally:
        error = sys.exception()
        if full := no_room(error):
            _leave_failure(settings.packs, f"{settings.packs}: {full} or lower data.streaming.disk_gb")
        elif error is not None:
            traceback.print_exception(error)
            ended = f"the process that makes the packs of the stream has ended with {one_line(error, named=True)}"
            _leave_failure(settings.packs, f"{settings.packs}: {ended}; mend that, and start the same command again")
        os._exit(0)  # at once: the thread that reads stdin holds a lock of it, over which the interpreter's own end stumbles
