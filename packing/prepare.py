"""Text to packs: tokenise in several processes, order the documents, lay out packs, write them.

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
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.files import FileLock, fsync_tree, no_room, replace_file
from foundation.progress import Progress, say
from foundation.reading import load_object
from packing.arrow import MANIFEST, PackWriter, read_manifest
from packing.pack import Arranged
from packing.records import CHAT_TEMPLATE, ChatColumns, Counts, Tokens, records_of, tokenize
from packing.settings import DataSettings
from packing.sources import Chunk, Place, Records, open_source
from packing.store import folder_of, is_there
from packing.tokenizer import load_tokenizer

# The settings that decide which tokens there are, and which packs they go to. No other changes the packs.
_TOKEN_KEYS = (
    *("source", "subset", "split", "text", "messages", "prompt", "response", "chat_template", "input_ids", "labels"),
    *("tokenizer", "on_bad_line"),
)
_LAYOUT_KEYS = ("length", "packing", "held_out")
_COMMIT_SECONDS = 5.0
_PROGRESS = "progress.json"


def lock_of(packs: Path, progress: bool) -> FileLock:
    path = packs.absolute().parent / f".{packs.name}.lock"
    return FileLock(path, lambda holder: say(f"{packs} is being prepared by {holder}; waiting for it", progress))


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
        raise InputError(f"{packs}: exists and holds no packs that were prepared; set data.packs to another folder")
    manifest = read_manifest(packs)
    before, now = dict(manifest["settings"]), content_settings(settings)
    if Path(str(settings.tokenizer)).exists():  # packs travel without it; where it is here, its content may have changed
        before["tokenizer fingerprint"] = (manifest["tokenizer"] or {}).get("fingerprint")
        now["tokenizer fingerprint"] = load_tokenizer(str(settings.tokenizer)).fingerprint
    if different := differences(before, now):
        raise InputError(
            f"{packs}: holds packs prepared with other settings ({different}); set data.packs to another folder, or remove this "
            "one to prepare it anew"
        )
    return True


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`name: before -> now` for every key whose value differs."""
    names = dict.fromkeys([*before, *now])
    return "; ".join(f"{name}: {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name))


def make_packs(settings: DataSettings, progress: bool) -> dict[str, Any]:
    """Tokenise, from where an earlier run stopped, lay out the packs of both splits and write them; returns the manifest."""
    kept, processes = settings.packs.absolute().parent / f".{settings.packs.name}.tokens", usable_cores()
    with PackMaker(settings, processes) as maker:
        try:
            log = TokenLog(kept, maker.key(), masked=settings.masks)
            if not log.complete:
                first = log.counts.documents + 1
                say(f"reading {maker.source.description} with {processes} processes, from document {first:,} on", progress)
                with Progress("tokenising", "tokens", progress, log.counts.tokens) as line, log:
                    for result in maker.tokenize(maker.source.chunks(log.place)):
                        log.append(result)
                        line.update(log.counts.tokens, result.progress, f"{log.counts.documents:,} documents")
                    check_counts(settings, log.counts)
                    log.complete = True
            with Progress("packing", shown=progress):
                manifest = maker.write(settings.packs, maker.arrange(log.tokens()))
        except OSError as error:
            if not (full := no_room(error)):
                raise
            raise InputError(f"{settings.packs}: {full} and run this again; what is tokenised is kept in {kept}") from None
    shutil.rmtree(kept)
    return manifest


class PackMaker:
    """Makes packs of one source; worker processes tokenise, until the end of its `with` block or of this process.

    Forking would copy whatever the caller has loaded (torch, a CUDA context, threads), so the workers are spawned.
    """

    def __init__(self, settings: DataSettings, processes: int) -> None:
        self.settings, self.processes = settings, processes
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.records = records_of(settings, self.tokenizer)
        self.source = open_source(settings, self.records)
        how = self.tokenizer.tokenizer, self.records, settings
        self._pool = ProcessPoolExecutor(processes, mp_context=START, initializer=_begin, initargs=how)

    def __enter__(self) -> PackMaker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def key(self) -> dict[str, Any]:
        """What tokens follow from. `on_bad_line` is not part of it: after a bad line hours into the work, setting it to `skip`
        goes on from there."""
        content = content_settings(self.settings)
        key = {name: content[name] for name in _TOKEN_KEYS if name != "on_bad_line"}
        key |= {"source files": self.source.identity, "tokenizer fingerprint": self.tokenizer.fingerprint}
        if isinstance(self.records, ChatColumns):
            key["chat template fingerprint"] = sha256(repr((self.records.template, self.records.tokens)).encode()).hexdigest()
        return key

    def tokenize(self, chunks: Iterable[Chunk]) -> Iterator[Tokens]:
        """Results in the order of `chunks`, up to 3 chunks a worker ahead. Raises the InputError of the first bad record."""
        waiting: deque[Future[Tokens]] = deque()
        try:
            for chunk in chunks:
                with _importing_nothing_of_the_caller():
                    waiting.append(self._pool.submit(_tokenize, chunk))
                if len(waiting) >= 3 * self.processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                "a tokenizer process has ended; if memory ran out, leave the run fewer cores (taskset). What is done is kept"
            ) from None

    def arrange(self, tokens: Tokens, *, held_out: bool = True) -> Arranged:
        """Lay out packs. held_out: set a part apart as the settings say."""
        settings = self.settings if held_out else self.settings.model_copy(update={"held_out": 0.0})
        return Arranged.of(tokens, settings, one_file=self.source.identity["kind"] == "text")

    def write(self, path: Path, arranged: Arranged, stream: dict[str, Any] | None = None, whole: bool = True) -> dict[str, Any]:
        """Write packs to the folder `path`, `whole` with what is held out and the tokenizer, and return their manifest. stream:
        the place of a part."""
        with PackWriter(path, self.settings.length) as writer:
            for split in arranged.layouts if whole else ("train",):
                arranged.write(writer, split, self.tokenizer.padding)
            if whole:
                self.tokenizer.save(writer.folder / "tokenizer.json")
            if whole and isinstance(self.records, ChatColumns):
                (writer.folder / CHAT_TEMPLATE).write_text(self.records.template, encoding="utf-8")
            statistics = arranged.statistics() | ({"stream": stream} if stream else {})
            content = content_settings(self.settings)
            return writer.finish(settings=content, statistics=statistics, tokenizer=self.tokenizer.describe())


START = multiprocessing.get_context("spawn")
_how: tuple[Tokenizer, Records, DataSettings] | None = None  # in a worker, how it tokenises


@contextmanager
def _importing_nothing_of_the_caller() -> Iterator[None]:
    """Processes that are started in the block import neither the caller's script again, as the launcher with torch, nor modules
    that lie in the current folder."""
    main, safe = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
    sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = main, safe  # empty means unset


def _begin(tokenizer: Tokenizer, records: Records, settings: DataSettings) -> None:
    """Runs first in each worker."""
    global _how
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a worker would compete with the other workers
    tokenizer.post_processor = None  # it would add special tokens that nobody asks for, and take blanks out of offsets
    _how = tokenizer, records, settings


def _tokenize(chunk: Chunk) -> Tokens:
    return tokenize(chunk, *_how)


class TokenLog:
    """Tokens on their way from text to packs, in `folder`: files that only grow, and a note of how much of them is complete.

    Every few seconds, and at the end of its `with` block, `tokens.bin` (uint32), `lengths.bin` (int64, one a document) and, where
    some tokens are not to be learnt, `trained.bin` (a byte a token) are flushed and `progress.json` is replaced. Bytes beyond the
    sizes it names are cut off when the log is opened again, so a kill or a power cut loses seconds. `key`: what the tokens follow
    from; InputError where the folder holds tokens of another one, as tokens take hours.
    """

    def __init__(self, folder: Path, key: dict[str, Any], *, masked: bool = False) -> None:
        self.folder, self.key, self.masked, self._committed = folder, key, masked, time.monotonic()
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
            self.counts, self.place, self.complete = Counts(**state["counts"]), state["place"], state["complete"]
        folder.mkdir(parents=True, exist_ok=True)
        tokens, documents = self.counts.tokens, self.counts.documents
        for name, size in (("tokens.bin", 4 * tokens), ("lengths.bin", 8 * documents), ("trained.bin", tokens * masked)):
            with open(folder / name, "ab") as file:
                file.truncate(size)

    def append(self, result: Tokens) -> None:
        """Add the next chunk's documents."""
        for name, array in (("tokens.bin", result.tokens), ("lengths.bin", result.lengths), ("trained.bin", result.trained)):
            if array is not None:
                with open(self.folder / name, "ab") as file:
                    file.write(array)
        self.counts, self.place = self.counts + result.counts, result.after
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush what was appended, and vouch for it."""
        fsync_tree(self.folder)
        state = {"key": self.key, "counts": asdict(self.counts), "place": self.place, "complete": self.complete}
        replace_file(self.folder / _PROGRESS, json.dumps(state, indent=1).encode())
        self._committed = time.monotonic()

    def __enter__(self) -> TokenLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.commit()

    def tokens(self) -> Tokens:
        """All documents; what there is for each token is memory-mapped."""
        tokens = np.memmap(self.folder / "tokens.bin", np.uint32, "r", shape=(self.counts.tokens,))
        trained = np.memmap(self.folder / "trained.bin", np.bool_, "r", shape=tokens.shape) if self.masked else None
        return Tokens(tokens, np.fromfile(self.folder / "lengths.bin", np.int64), trained, self.counts)


def check_counts(settings: DataSettings, counts: Counts) -> None:
    """InputError where a source holds no text."""
    if not counts.documents:
        raise InputError(
            f"data.source: {settings.source}: no document with any text: {counts.empty:,} records have none, and "
            f"{counts.skipped:,} malformed ones were skipped (first: {counts.first_skipped})"
        )


def summary(manifest: dict[str, Any]) -> str:
    """The lines that `prepare` ends with."""
    numbers, tokenizer = manifest["statistics"], manifest["tokenizer"]
    lengths, trained = numbers["lengths"], numbers.get("trained_tokens", numbers["tokens"])
    lines = {
        "documents": f"{numbers['documents']:,} ({numbers['held_out_documents']:,} held out)",
        "tokens": f"{numbers['tokens']:,}; a document has {lengths['median']:,.0f} in the median, {lengths['longest']:,} at most",
        "trained tokens": f"{trained:,}, {trained / max(numbers['tokens'], 1):.2%}",
        "packs": f"{numbers['packs']:,} of {manifest['length']:,} tokens ({numbers['held_out_packs']:,} held out)",
        "fill": f"{numbers['fill']:.2%}",
        "cut documents": f"{numbers['cut_documents']:,}",
        "left out": f"{numbers['skipped_lines']:,} malformed records, {numbers['empty_documents']:,} without text",
        "first left out": numbers["first_skipped"],
        "tokenizer": f"{tokenizer['name']}, {tokenizer['vocab_size']:,} ids, fingerprint {tokenizer['fingerprint'][:16]}",
    }
    return "\n".join(f"  {name:<15} {value}" for name, value in lines.items() if value)


def usable_cores() -> int:
    """Cores this process may use; in a container they can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
