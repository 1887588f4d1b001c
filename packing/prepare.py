"""Text to packs: tokenise in several processes, order the documents, lay out packs, write them; all packs before a run, or those
of a stream part by part ahead of it, as far as the disk may hold.

Tokenising takes nearly all the time, so its results are kept in `.<packs>.tokens/`, from where a later call goes on; the rest
starts over after a kill. The packs depend on neither interruptions nor the number of processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.files import fsync_tree, locked, replace_file, write_json
from foundation.progress import Progress, say
from foundation.reading import load_object, refusing
from foundation.units import plural
from packing.arrow import FIRST, MANIFEST, PackWriter, read_manifest
from packing.pack import Arranged
from packing.records import CHAT_TEMPLATE, ChatColumns, Records, records_of
from packing.settings import DataSettings, SourceSettings
from packing.sources import CHUNK_BYTES, Chunk, Counts, Place, Tokens, open_source, tokenize
from packing.store import all_parts, find_splits, folder_of, is_there, training_parts
from packing.stream import FAILED, LOOK, PartStart, bytes_below, check_disk, part_folder, read_part
from packing.tokenizer import TextTokenizer, load_tokenizer

# The settings that decide which tokens there are, and which packs they go to. No other changes the packs.
_TOKEN_KEYS = (*SourceSettings.model_fields, "tokenizer", "on_bad_line")
_LAYOUT_KEYS = ("length", "packing", "held_out")
_COMMIT_SECONDS = 5.0
_PROGRESS = "progress.json"
_LEAST_CHUNK = 2**12  # bytes


def prepare(settings: DataSettings, progress: bool = True) -> Path:
    """Make the packs that `settings` describe, unless they exist, and return their folder: of each source and of the text to
    validate on; of a stream, the first part of each source.

    Every process may call it: it takes a lock, and who gets it second finds the work done. InputError for what cannot be used and
    for a full disk.

    On a file system without locks, the first rank of a launch prepares and the other ranks wait
    for its packs. A second command raises InputError.
    """
    if not settings.prepares:
        raise InputError(
            "data.source and data.tokenizer are not set, so there is nothing to prepare packs from"
        )
    for part in all_parts(settings):
        if part.source is None:  # packs that exist
            continue
        if not holds_packs_of(part):  # before any file is touched: packs may be on a read-only disk
            lock = part.packs.absolute().with_name(f".{part.packs.name}.lock")
            with (
                locked(
                    lock,
                    lambda holder: say(f"waiting for {holder} to prepare the packs", progress),
                ) as has_locks,
                ExitStack() as claimed,
            ):
                if not has_locks:
                    _claim(part, claimed)
                if not holds_packs_of(part):
                    say(
                        summary(
                            _make_first(part, settings, progress)
                            if part.stream
                            else make_packs(part, progress)
                        ),
                        progress,
                    )
                    continue
        say(f"{part.packs}: already prepared with these settings", progress)
    return settings.packs


def _claim(part: DataSettings, claimed: ExitStack) -> None:
    """Stand in for the lock on the packs of `part` where the file system has no locks.

    The first rank of a launch makes a folder, which only one process can, and removes it when
    `claimed` ends. A killed process leaves it behind. Another rank returns once the packs exist.
    Raises InputError if the folder exists.
    """
    if os.environ.get("RANK", "0") != "0":
        while not holds_packs_of(part):
            time.sleep(LOOK)
        return
    claim = part.packs.absolute().with_name(f".{part.packs.name}.preparing")
    with refusing(
        (FileExistsError,),
        f"{claim}: says that a process prepares these packs, as this file system has no locks",
        "wait for it; if it was killed, remove this folder and start again",
    ):
        claim.mkdir()
    claimed.callback(claim.rmdir)


def content_settings(settings: DataSettings) -> dict[str, Any]:
    """All settings that the packs depend on, as the manifest records them; those of a stream also on how much of it is a part."""
    values = settings.model_dump(mode="json")
    content = {key: values[key] for key in (*_TOKEN_KEYS, *_LAYOUT_KEYS)}
    return content | ({"window": settings.stream.window} if settings.stream else {})


def holds_packs_of(settings: DataSettings) -> bool:
    """Returns whether packs are there that were made with these settings. Raises InputError where others are."""
    packs = folder_of(settings)
    if not is_there(packs):
        return False
    if not (packs / MANIFEST).is_file():
        raise InputError(
            f"{packs}: exists and holds no packs that were prepared; set data.packs to another folder"
        )
    manifest = read_manifest(packs)
    before, now = dict(manifest["settings"]), content_settings(settings)
    # one file or dataset, however it is spelled
    if os.path.realpath(before["source"]) == os.path.realpath(now["source"]):
        now["source"] = before["source"]
    # Packs travel without their tokenizer. Where it is here, its content counts, and no name.
    if before["tokenizer"] != now["tokenizer"] or Path(str(settings.tokenizer)).exists():
        before["tokenizer"], now["tokenizer"] = (
            manifest["tokenizer"]["fingerprint"],
            load_tokenizer(now["tokenizer"]).fingerprint,
        )
    if different := differences(before, now):
        raise InputError(
            f"{packs}: prepared with other settings ({different}); set another data.packs, or remove this folder"
        )
    return True


def check_sources(settings: DataSettings) -> None:
    """InputError where packs are not there, nor what they are to be made from, or where others are; as far as names tell."""
    for part in all_parts(settings):
        if part.source is None:
            find_splits(part.packs, part.length)
        elif not holds_packs_of(part):
            open_source(part, records_of(part, load_tokenizer(str(part.tokenizer))))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`name: before -> now` for every key whose value differs."""
    names = dict.fromkeys([*before, *now])
    return "; ".join(
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    )


def make_packs(settings: DataSettings, progress: bool) -> dict[str, Any]:
    """Tokenise, from where an earlier run stopped, lay out the packs of both splits and write them; returns the manifest."""
    kept, processes = (
        settings.packs.absolute().parent / f".{settings.packs.name}.tokens",
        usable_cores(),
    )
    left = f"mend that and run this again: what is tokenised is kept in {kept}"
    with (
        PackMaker(settings, processes) as maker,
        refusing((OSError, MemoryError), str(settings.packs), left),
    ):
        log = TokenLog(kept, maker.key())
        if not log.complete:
            first = log.counts.documents + 1
            say(
                f"reading {maker.source.description} with {processes} processes, from document {first:,} on",
                progress,
            )
            with Progress("tokenising", "tokens", progress, initial=log.counts.tokens) as line, log:
                for result in maker.tokenize(maker.source.chunks(log.place)):
                    log.append(result)
                    line.update(log.counts.tokens - line.n)
                check_counts(settings, log.counts)
                if log.key != maker.key():
                    log.counts, log.place = Counts(), {}  # they are of neither text
                    raise InputError(
                        f"data.source: {settings.source}: changed while it was read; start again once it is whole"
                    )
                log.complete = True
        with Progress("packing", shown=progress):
            manifest = maker.write(settings.packs, maker.arrange(log.tokens()))
    shutil.rmtree(kept)
    return manifest


class PackMaker(AbstractContextManager):
    """Makes packs of one source; worker processes tokenise, until the end of its `with` block or of this process.

    Forking would copy whatever the caller has loaded (torch, a CUDA context, threads), so the workers are spawned.
    """

    def __init__(self, settings: DataSettings, processes: int) -> None:
        self.settings, self.processes = settings, processes
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.records = records_of(settings, self.tokenizer)
        known = self.tokenizer.tokenizer.token_to_id("<|im_start|>") is not None
        if settings.chat_template == "chatml" and not known:
            say("warning: data.chat_template: chatml: <|im_start|> is several tokens here")
        self.source = open_source(settings, self.records)
        # Workers load the tokenizer: handing one to a worker that dies meanwhile, more than a pipe holds, would never end.
        with _apart_from_the_caller():  # the pool starts multiprocessing's resource tracker
            self._pool = ProcessPoolExecutor(processes, START, _begin, (settings,))

    def __exit__(self, *exception: object) -> None:
        # or a result that is broken off would be waited for
        self._pool._result_queue._writer.close()
        # nobody takes what they are at; Python 3.14: `kill_workers`
        for worker in list((self._pool._processes or {}).values()):
            worker.kill()
        self._pool.shutdown(cancel_futures=True)

    def key(self) -> dict[str, Any]:
        """What tokens follow from. Not `on_bad_line`: after a bad line hours into the work, `skip` goes on from that line."""
        content = content_settings(self.settings)
        key = {
            name: content[name]
            for name in _TOKEN_KEYS
            if name not in ("on_bad_line", "source", "tokenizer")
        }
        key |= {
            "source files": self.source.identity,
            "tokenizer fingerprint": self.tokenizer.fingerprint,
        }
        # with the content of a chat template's file
        return key | {"records": sha256(repr(self.records).encode()).hexdigest()}

    def tokenize(self, chunks: Iterable[Chunk]) -> Iterator[Tokens]:
        """Results in the order of `chunks`, up to 3 chunks a worker ahead. Raises the InputError of the first bad record."""
        waiting: deque[Future[Tokens]] = deque()
        try:
            for chunk in chunks:
                with _apart_from_the_caller():
                    waiting.append(self._pool.submit(_tokenize, chunk))
                if len(waiting) >= 3 * self.processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                "a tokenizer process died: if memory ran out, use fewer cores (taskset). The work is kept"
            ) from None

    def arrange(self, tokens: Tokens, *, held_out: bool = True) -> Arranged:
        """Lay out packs. held_out: set a part apart as the settings say."""
        settings = self.settings if held_out else self.settings.model_copy(update={"held_out": 0.0})
        return Arranged(tokens, settings, one_file=self.source.kind == "text")

    def write(
        self, path: Path, arranged: Arranged, part: tuple[PartStart, PartStart] | None = None
    ) -> dict[str, Any]:
        """Write packs to the folder `path` and return their manifest. part: of a stream, where it and the next one begin; parts
        behind the first have neither held-out packs nor the tokenizer."""
        whole = part is None or part[0].number == 0
        with PackWriter(path, self.settings.length) as writer:
            for split in arranged.layouts if whole else ("train",):
                arranged.write(writer, split, self.tokenizer.padding)
            if whole:
                (writer.folder / "tokenizer.json").write_text(
                    self.tokenizer.tokenizer.to_str(pretty=True), encoding="utf-8"
                )
            if whole and isinstance(self.records, ChatColumns):
                (writer.folder / CHAT_TEMPLATE).write_text(self.records.template, encoding="utf-8")
            place = {"stream": {"start": asdict(part[0]), "after": asdict(part[1])}} if part else {}
            content = content_settings(self.settings)
            return writer.finish(
                settings=content,
                statistics=arranged.statistics() | place,
                tokenizer=self.tokenizer.describe(),
            )


START = multiprocessing.get_context("spawn")
_how: tuple[TextTokenizer, Records, DataSettings] | None = None  # in a worker, how it tokenises


@contextmanager
def _apart_from_the_caller() -> Iterator[None]:
    """Processes started in this block import neither the caller's script (the launcher's would import torch) nor modules of the
    current folder. They ignore Ctrl-C: the caller gets it too, and ends them."""
    main, safe = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
    sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = ModuleType("__main__"), "1"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = main, safe  # empty means unset


def _begin(settings: DataSettings) -> None:
    """Runs first in each worker."""
    global _how
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    # threads of a worker would compete with the other workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded = load_tokenizer(str(settings.tokenizer))
    # it would add special tokens that nobody asks for, and take blanks out of offsets
    loaded.tokenizer.post_processor = None
    _how = loaded, records_of(settings, loaded), settings


def _tokenize(chunk: Chunk) -> Tokens:
    return tokenize(chunk, *_how)


class TokenLog(AbstractContextManager):
    """Tokens on their way from text to packs, in `folder`: files that only grow, and a note of how much of them is complete.

    Every few seconds, and at the end of its `with` block, `tokens.bin` (uint32) and `lengths.bin` (int64, one a document) are
    flushed and `progress.json` is replaced. Bytes beyond the sizes it names are cut off when the log is opened again, so a kill
    or a power cut loses seconds. `key`: what the tokens follow from; InputError where the folder holds tokens of another one, as
    tokens take hours.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.folder, self.key, self._committed = folder, key, time.monotonic()
        self.counts, self.complete = Counts(), False  # complete: the source's end is reached
        self.place: Place = {}  # in the source, behind what is tokenised
        remedy = f"remove {folder} to start over"
        state = load_object(folder / _PROGRESS, remedy) if (folder / _PROGRESS).is_file() else None
        if state and state["counts"]["documents"]:
            if different := differences(state["key"], key):
                raise InputError(
                    f"{folder}: holds {state['counts']['tokens']:,} tokens made with other settings or text ({different}); set "
                    f"them back, set data.packs to another folder, or {remedy}"
                )
            self.counts, self.place, self.complete = (
                Counts(**state["counts"]),
                state["place"],
                state["complete"],
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._cut()

    def _cut(self) -> None:
        """Leave what is complete: a killed process, or a full disk, has broken off what it appended."""
        for name, size in (
            ("tokens.bin", 4 * self.counts.tokens),
            ("lengths.bin", 8 * self.counts.documents),
        ):
            with open(self.folder / name, "ab") as file:
                file.truncate(size)

    def append(self, result: Tokens) -> None:
        """Add the next chunk's documents."""
        for name, array in (("tokens.bin", result.tokens), ("lengths.bin", result.lengths)):
            with open(self.folder / name, "ab") as file:
                file.write(array)
        self.counts, self.place = self.counts + result.counts, result.after
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush what was appended, and vouch for it."""
        self._cut()
        fsync_tree(self.folder)
        state = {
            "key": self.key,
            "counts": asdict(self.counts),
            "place": self.place,
            "complete": self.complete,
        }
        write_json(self.folder / _PROGRESS, state)
        self._committed = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self.commit()

    def tokens(self) -> Tokens:
        """All documents; their ids are memory-mapped."""
        tokens = np.memmap(self.folder / "tokens.bin", np.uint32, "r", shape=(self.counts.tokens,))
        return Tokens(tokens, np.fromfile(self.folder / "lengths.bin", np.int64), self.counts)


def check_counts(settings: DataSettings, counts: Counts) -> None:
    """InputError where a source holds no text."""
    if not counts.documents:
        skipped = (
            f" and {counts.skipped:,} malformed (first: {counts.first_skipped})"
            if counts.skipped
            else ""
        )
        raise InputError(
            f"data.source: {settings.source}: holds no text: {plural(counts.empty, 'empty record')}{skipped}"
        )


def summary(manifest: dict[str, Any]) -> str:
    """The lines that `prepare` ends with."""
    numbers = {
        **manifest["statistics"],
        "tokenizer": (manifest["tokenizer"] or {}).get("name"),
        "stream": None,
    }
    written = {
        name: f"{value:,}" if isinstance(value, int) else value
        for name, value in numbers.items()
        if value
    }
    return "\n".join(f"  {name.replace('_', ' '):<20} {value}" for name, value in written.items())


def usable_cores(among: int = 1) -> int:
    """Each one's cores of those that this process may use; in a container they can be fewer than the machine has."""
    return max(1, len(os.sched_getaffinity(0)) // among)


# What a part holds follows from the place in the source where it begins, never from who makes it, when, or how often. So whatever
# is passed may be deleted: a run that goes back, or on another machine, makes it again from the place that its checkpoint names.
# Files are sought to that place, archives unpacked up to it; a hub's dataset begins with the file that it was in.


def make_part(maker: PackMaker, start: PartStart) -> tuple[Arranged, PartStart]:
    """Tokenise and lay out a part; also returns where the next part begins. A source that ended begins anew in another part."""
    epoch, tokens = start.epoch, _fill(maker, start.place)
    if not tokens.counts.documents and start.number:  # the part before has taken the last document
        epoch, tokens = epoch + 1, _fill(maker, {})
    check_counts(maker.settings, tokens.counts)
    # What is held out of the text's beginning is so each time that the text is gone through.
    arranged = maker.arrange(tokens, held_out=start.number == 0 or epoch > start.epoch)
    return arranged, PartStart(
        start.number + 1, epoch, tokens.after, start.first + len(arranged.layouts["train"])
    )


def _fill(maker: PackMaker, place: Place) -> Tokens:
    """Tokenise from `place` on until a part is full or the source is over."""
    results = [Tokens(np.zeros(0, np.uint32), np.zeros(0, np.int64), Counts(), place)]
    done, window = 0, maker.settings.stream.window
    for result in maker.tokenize(
        maker.source.chunks(place, min(CHUNK_BYTES, max(_LEAST_CHUNK, window)))
    ):
        results.append(result)
        done += result.counts.tokens
        if done >= window:
            break
    tokens, lengths = (
        np.concatenate(arrays)
        for arrays in zip(*((each.tokens, each.lengths) for each in results), strict=True)
    )
    return Tokens(
        tokens, lengths, sum((each.counts for each in results), Counts()), results[-1].after
    )


def _make_first(part: DataSettings, settings: DataSettings, progress: bool) -> dict[str, Any]:
    check_disk(settings)
    with (
        PackMaker(part, usable_cores(2 * len(settings.shares))) as maker,
        Progress("packing the first part", shown=progress),
    ):
        say(f"{part.packs}: packing {maker.source.description} as the run goes on", progress)
        arranged, after = make_part(maker, PartStart())
        return maker.write(part.packs / FIRST, arranged, (PartStart(), after))


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
    # of each part on disk, its source and the first pack of the next part
    behind: dict[Path, tuple[str, int]] = {}
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
        size = round(1.002 * arranged.bytes()) + 2**16  # with what lies beside its packs
        while True:
            now = dict(reading)
            for path in [
                path
                for path, (source, end) in behind.items()
                if end < now[source][0] and path.name != FIRST
            ]:
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
        folder = part_folder(makers[name].settings.packs, start.number)
        makers[name].write(folder, arranged, (start, after))
        behind[folder] = name, after.first
        nexts[name] = after
        yield True


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
            processes = usable_cores(2 * len(parts))  # half of the cores: the run needs some, too
            makers = {
                name: stack.enter_context(PackMaker(part, processes))
                for name, part in parts.items()
            }
            for made in pack_ahead(
                settings,
                makers,
                {name: PartStart(**each) for name, each in starts.items()},
                reading,
            ):
                time.sleep(0 if made else LOOK)
    except (InputError, OSError) as error:
        replace_file(settings.packs / FAILED, str(error).encode())
