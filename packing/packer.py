"""Makes packs: all of them before a run, or the parts of `packing.stream` ahead of it, as far as the disk may hold.

What a part holds follows from the place in the source where it begins, never from who makes it, when, or how often. So whatever
is passed may be deleted: a run that goes back, or on another machine, makes it again from the place that its checkpoint names.
Files are sought to that place, archives unpacked up to it; a hub's dataset begins with the file that it was in.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import FileLock, free_bytes, replace_file
from foundation.progress import Progress, say
from packing.arrow import FIRST, MANIFEST
from packing.pack import Arranged
from packing.prepare import PackMaker, check_counts, holds_packs_of, lock_of, make_packs, summary, usable_cores
from packing.records import Tokens, joined
from packing.settings import DataSettings
from packing.sources import CHUNK_BYTES, Place
from packing.store import text_parts, training_parts
from packing.stream import FAILED, LOOK, PartStart, part_folder, read_part

_LEAST_CHUNK = 2**12  # bytes
_AT_ONCE = 8  # chunks a process that are read before the next ones
_BESIDE = 2**16  # bytes of a part beside its packs


def prepare(settings: DataSettings, progress: bool = True) -> Path:
    """Make the packs that `settings` describe, unless they exist, and return their folder: of each source and of the text to
    validate on; of a stream, the first part of each source.

    Every process may call it: it takes a lock, and who gets it second finds the work done. InputError for what cannot be used and
    for a full disk.
    """
    if not settings.prepares:
        raise InputError("data.source and data.tokenizer are not set, so there is nothing to prepare packs from")
    for part in text_parts(settings):
        if not holds_packs_of(part):  # before any file is touched: packs may be on a read-only disk
            with lock_of(part.packs, progress):
                if not holds_packs_of(part):
                    say(summary(_make_first(part, settings, progress) if part.stream else make_packs(part, progress)), progress)
                    continue
        say(f"{part.packs}: already prepared with these settings", progress)
    return settings.packs


# ── Parts of a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_part(maker: PackMaker, start: PartStart) -> tuple[Arranged, PartStart]:
    """Tokenise and lay out a part; also returns where the next one begins. Where the source ends, it begins again with a part of
    its own."""
    epoch, tokens = start.epoch, _fill(maker, start.place)
    if not tokens.counts.documents and start.number:  # the part before has taken the last document
        epoch, tokens = epoch + 1, _fill(maker, {})
    check_counts(maker.settings, tokens.counts)
    # What is held out of the text's beginning is so each time that the text is gone through.
    arranged = maker.arrange(tokens, held_out=start.number == 0 or epoch > start.epoch)
    first, tokens_before = start.first + len(arranged.layouts["train"]), start.tokens + tokens.counts.tokens
    return arranged, PartStart(start.number + 1, epoch, tokens.after, first, tokens_before)


def _fill(maker: PackMaker, place: Place) -> Tokens:
    """Tokenise from `place` on until a part is full or the source is over."""
    results, done, window, wanted = list[Tokens](), 0, maker.settings.stream.window, maker.processes
    chunks = maker.source.chunks(place, min(CHUNK_BYTES, max(_LEAST_CHUNK, window)))
    while done < window and (batch := list(itertools.islice(chunks, wanted))):
        for result in maker.tokenize(batch):
            if done < window:
                results.append(result)
                done += result.counts.tokens
        wanted = min(_AT_ONCE * maker.processes, max(1, (window - done) * len(results) // max(done, 1)))
    return joined(results, maker.settings.masks, place)


def write_part(maker: PackMaker, start: PartStart, arranged: Arranged, after: PartStart) -> dict[str, Any]:
    """Write a part to its folder: the first one with what is held out, and with the tokenizer. Returns its manifest."""
    stream, folder = {"start": asdict(start), "after": asdict(after)}, part_folder(maker.settings.packs, start.number)
    return maker.write(folder, arranged, stream, whole=start.number == 0)


def _make_first(part: DataSettings, settings: DataSettings, progress: bool) -> dict[str, Any]:
    check_disk(settings)
    with PackMaker(part, processes_of(settings)) as maker, Progress("packing the first part", shown=progress):
        say(f"{part.packs}: packing {maker.source.description} as the run goes on", progress)
        return write_part(maker, PartStart(), *make_part(maker, PartStart()))


def processes_of(settings: DataSettings) -> int:
    """Returns how many processes tokenise each source while the run trains: by default half of the cores, shared out."""
    return max(1, (usable_cores() // 2) // len(settings.shares))


def bytes_below(folder: Path) -> int:
    """Returns the total size in bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_disk(settings: DataSettings) -> None:
    """InputError where the disk has less space than the packs may take, what they take already included."""
    limit, free = settings.stream.disk_gb, (free_bytes(settings.packs) + bytes_below(settings.packs)) / 1e9
    if limit > free:
        raise InputError(
            f"data.streaming.disk_gb: {limit:g}, and the disk of {settings.packs} has {free:.3g} GB for packs; set it to "
            f"{free * 0.95:.2g} or less, or data.packs to another disk"
        )


def _remove(part: Path) -> None:
    """Its manifest first: what is half deleted is no part."""
    (part / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(part, ignore_errors=True)


def pack_ahead(
    settings: DataSettings,
    makers: Mapping[str, PackMaker],
    starts: Mapping[str, PartStart],
    reading: Mapping[str, tuple[int, int]],
) -> Iterator[bool]:
    """Make parts of all sources from these starts on, in the order in which they will be needed, as far ahead as the disk may
    hold, and delete those that are passed. Yields True after each part, False where the next one waits until another is passed.

    reading: the packs of each source that the step at work reads, from one to another (exclusive); who calls this changes it.
    """
    weights, limit = dict(zip(makers, settings.shares, strict=True)), settings.stream.disk_gb * 1e9
    nexts = dict(starts)  # of the parts that are still to be made
    behind: dict[Path, tuple[str, int]] = {}  # of each part on disk, its source and the first pack of the next part
    for name, maker in makers.items():  # what is there from before, one part after another
        with suppress(InputError):  # damaged: it is made again
            while part := read_part(maker.settings.packs, nexts[name]):
                nexts[name] = part.after
                behind[part.packs.path] = name, part.after.first
        for path in maker.settings.packs.glob("*part-*"):  # also what a killed writer has left
            if path not in behind and path.name != FIRST:
                _remove(path)

    while True:
        name = min(nexts, key=lambda name: nexts[name].first / weights[name])
        start = nexts[name]
        arranged, after = make_part(makers[name], start)
        size = round(1.002 * arranged.bytes()) + _BESIDE
        while True:
            now = dict(reading)
            for path in [path for path, (source, end) in behind.items() if end < now[source][0] and path.name != FIRST]:
                _remove(path)
                del behind[path]
            if (needed := bytes_below(settings.packs) + size) <= limit:
                break
            if start.first < now[name][1]:
                raise InputError(
                    f"data.streaming.disk_gb: {limit / 1e9:g} is too little: a step reads packs of {needed / 1e9:.3g} GB; set it "
                    f"to {needed * 1.05e-9:.2g} or more, or a smaller data.streaming.window, which begins another stream"
                )
            yield False
        write_part(makers[name], start, arranged, after)
        behind[part_folder(makers[name].settings.packs, start.number)] = name, after.first
        nexts[name] = after
        yield True


class PackerProcess:
    """Packs in a process of its own, and in those that tokenise for it; they end with the one that made this, however it ends.

    One run a folder: InputError where another one has it.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None

        def refuse(holder: str) -> None:
            raise InputError(
                f"{settings.packs}: another run trains on this stream, {holder}; set another data.packs, or wait for it"
            )

        self._lock = FileLock(settings.packs / ".lock", refuse)
        check_disk(settings)

    def begin(self, starts: Mapping[str, Any]) -> None:
        self._end_process()
        (self._settings.packs / FAILED).unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from packing.packer import serve; serve()"],
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # as Ctrl-C is for the run, which ends this one
        )
        self.tell([self._settings.model_dump(mode="json"), starts])

    def tell(self, reading: Any) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `check` says
            self._process.stdin.write(json.dumps(reading) + "\n")
            self._process.stdin.flush()

    def check(self) -> None:
        failed, status = self._settings.packs / FAILED, self._process.poll()
        if status is not None and not failed.exists():
            why = f"signal {-status}: if memory ran out, set a smaller window" if status < 0 else f"status {status}; it says why"
            text = f"the process that makes the packs of the stream has ended with {why}. Start the same command again"
            replace_file(failed, f"{self._settings.packs}: {text}".encode())

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """End it, and let others have the folder; closing twice is harmless."""
        self._end_process()
        self._lock.release()


def serve() -> None:
    """Runs in the process that makes parts: from where its stdin says, until the other end of that is closed."""
    values, starts = json.loads(sys.stdin.readline())
    settings, reading = DataSettings.model_validate(values), dict.fromkeys(starts, (0, 0))

    def listen() -> None:
        for line in sys.stdin:
            reading.update(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    try:
        with ExitStack() as stack:
            parts = training_parts(settings)
            makers = {name: stack.enter_context(PackMaker(part, processes_of(settings))) for name, part in parts.items()}
            for made in pack_ahead(settings, makers, {name: PartStart(**each) for name, each in starts.items()}, reading):
                time.sleep(0 if made else LOOK)
    except InputError as error:
        replace_file(settings.packs / FAILED, str(error).encode())
