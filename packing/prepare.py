"""Prepare packs from text before a run: of each source and of the validation text.

Of a stream only the first part is prepared; `packing.follow` makes the others while the run trains.

Tokenising takes nearly all the time, so tokens are kept in `.<packs>.tokens/` until they are
packed. A later call continues from there. The packs depend neither on interruptions nor on the
number of processes.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.files import fsync_tree, locked, write_json
from foundation.progress import Progress, say
from foundation.reading import load_object, refusing
from packing.arrow import MANIFEST, read_manifest
from packing.chunks import Counts, Place, Tokens, require_documents
from packing.follow import make_first_part
from packing.pack_maker import PackMaker, content_settings, usable_cores
from packing.records import records_of
from packing.settings import DataSettings, describe_changes
from packing.sources import open_source
from packing.store import all_parts, find_splits, folder_of, is_there
from packing.stream import LOOK
from packing.tokenizer import load_tokenizer

_COMMIT_SECONDS = 5.0
_TOKENS = "tokens.bin"  # uint32
_LENGTHS = "lengths.bin"  # int64, one for each document
_PROGRESS = "progress.json"


def prepare(settings: DataSettings, progress: bool = True) -> Path:
    """Make the packs that `settings` describe, unless they exist, and return their folder.

    Every process may call it. The first one takes a lock, and the others find the work done. On a
    file system without locks, the first rank of a launch prepares, the other ranks wait for its
    packs, and a second command raises InputError.

    Raises InputError for settings or text that cannot be used, and if the disk is full.
    """
    if not settings.prepares:
        raise InputError(
            "data.source and data.tokenizer are not set, so there is nothing to prepare packs from"
        )
    for part in all_parts(settings):
        if part.source is None:  # Its packs exist.
            continue
        # Look before any file is touched: packs may be on a read-only disk.
        manifest = None if holds_packs_of(part) else _make_alone(part, settings, progress)
        already = f"{part.packs}: already prepared with these settings"
        say(summary(manifest) if manifest else already, progress)
    return settings.packs


def _make_alone(
    part: DataSettings, settings: DataSettings, progress: bool
) -> dict[str, Any] | None:
    """Make the packs of `part` under a lock. Return their manifest, or None if they exist."""
    lock = part.packs.absolute().with_name(f".{part.packs.name}.lock")

    def wait_for(holder: str) -> None:
        say(f"waiting for {holder} to prepare the packs", progress)

    with locked(lock, wait_for) as has_locks, ExitStack() as claim:
        if not has_locks:
            _claim(part, claim)
        if holds_packs_of(part):
            return None
        if part.stream:
            return make_first_part(part, settings, progress)
        return make_packs(part, progress)


def _claim(part: DataSettings, claim: ExitStack) -> None:
    """Stand in for the lock on the packs of `part` where the file system has no locks.

    The first rank of a launch makes a folder, which only one process can, and removes it when
    `claim` ends. A killed process leaves it behind. Another rank returns once the packs exist.
    Raises InputError if the folder exists.
    """
    if os.environ.get("RANK", "0") != "0":
        while not holds_packs_of(part):
            time.sleep(LOOK)
        return
    folder = part.packs.absolute().with_name(f".{part.packs.name}.preparing")
    with refusing(
        (FileExistsError,),
        f"{folder}: says that a process prepares these packs, as this file system has no locks",
        "wait for it; if it was killed, remove this folder and start again",
    ):
        folder.mkdir()
    claim.callback(folder.rmdir)


def holds_packs_of(settings: DataSettings) -> bool:
    """Return whether packs of these settings exist. Raise InputError if other packs do."""
    packs = folder_of(settings)
    if not is_there(packs):
        return False
    if not (packs / MANIFEST).is_file():
        raise InputError(
            f"{packs}: exists and holds no packs that were prepared; "
            "set data.packs to another folder"
        )
    manifest = read_manifest(packs)
    before = dict(manifest["settings"])
    now = content_settings(settings)
    # A file or dataset may be spelled in several ways.
    if os.path.realpath(before["source"]) == os.path.realpath(now["source"]):
        now["source"] = before["source"]
    # Packs travel without their tokenizer. If it exists here, its content counts, not its name.
    if before["tokenizer"] != now["tokenizer"] or Path(str(settings.tokenizer)).exists():
        before["tokenizer"] = manifest["tokenizer"]["fingerprint"]
        now["tokenizer"] = load_tokenizer(now["tokenizer"]).fingerprint
    if changes := describe_changes(before, now):
        raise InputError(
            f"{packs}: prepared with other settings ({changes}); "
            "set another data.packs, or remove this folder"
        )
    return True


def check_sources(settings: DataSettings) -> None:
    """Raise InputError unless all packs exist, or can be made from sources that exist.

    Only names are looked at. Packs of other settings raise, too.
    """
    for part in all_parts(settings):
        if part.source is None:
            find_splits(part.packs, part.length)
        elif not holds_packs_of(part):
            open_source(part, records_of(part, load_tokenizer(str(part.tokenizer))))


def make_packs(settings: DataSettings, progress: bool) -> dict[str, Any]:
    """Tokenise a source, pack it, and return the manifest of its packs.

    Continues where an earlier call was interrupted. Raises InputError if the source changes
    meanwhile, and if memory or disk run out.
    """
    folder = settings.packs.absolute().parent / f".{settings.packs.name}.tokens"
    remedy = f"fix that and run this again: all tokens so far are kept in {folder}"
    with (
        PackMaker(settings, usable_cores()) as maker,
        refusing((OSError, MemoryError), str(settings.packs), remedy),
    ):
        log = TokenLog(folder, maker.key())
        if not log.complete:
            _tokenize_source(maker, log, progress)
        with Progress("packing", shown=progress):
            manifest = maker.write(settings.packs, maker.arrange(log.tokens()))
    shutil.rmtree(folder)
    return manifest


def _tokenize_source(maker: PackMaker, log: TokenLog, progress: bool) -> None:
    """Append all documents to `log` that it does not hold yet."""
    say(
        f"reading {maker.source.description} with {maker.processes} processes, "
        f"from document {log.counts.documents + 1:,} on",
        progress,
    )
    with Progress("tokenising", "tokens", progress, initial=log.counts.tokens) as line, log:
        for result in maker.tokenize(maker.source.chunks(log.place)):
            log.append(result)
            line.update(log.counts.tokens - line.n)
        require_documents(maker.settings, log.counts)
        if log.key != maker.key():
            log.counts = Counts()  # They are of neither text.
            raise InputError(
                f"data.source: {maker.settings.source}: changed while it was read; "
                "start again once it is complete"
            )
        log.complete = True


class TokenLog(AbstractContextManager):
    """The tokens of a source in `folder`: two files that grow, and a record of their valid sizes.

    Every few seconds, and at the end of the `with` block, the files are flushed and the record is
    replaced. Bytes beyond the recorded sizes are cut off when the log is opened again.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        """Open the log, or create it.

        `key` identifies the tokens: source files, tokenizer and settings. Raises InputError if the
        folder holds tokens of another key. They are not deleted, since tokenising takes hours.
        """
        self.folder = folder
        self.key = key
        self.counts = Counts()
        self.place: Place = {}  # in the source, behind the last tokenised record
        self.complete = False  # the end of the source was reached
        self._committed_at = time.monotonic()
        path = folder / _PROGRESS
        remedy = f"remove {folder} to start over"
        progress = load_object(path, remedy) if path.is_file() else {}
        counts = Counts(**progress.get("counts", {}))
        if counts.documents:
            if changes := describe_changes(progress["key"], key):
                raise InputError(
                    f"{folder}: holds {counts.tokens:,} tokens made with other settings or text "
                    f"({changes}); set them back, set data.packs to another folder, or {remedy}"
                )
            self.counts = counts
            self.place = progress["place"]
            self.complete = progress["complete"]
        folder.mkdir(parents=True, exist_ok=True)
        self._truncate()

    def _truncate(self) -> None:
        """Cut off bytes behind the counted documents, which an interrupted write has left."""
        sizes = {_TOKENS: 4 * self.counts.tokens, _LENGTHS: 8 * self.counts.documents}
        for name, size in sizes.items():
            with open(self.folder / name, "ab") as file:
                file.truncate(size)

    def append(self, result: Tokens) -> None:
        """Append the documents of the next chunk."""
        for name, array in ((_TOKENS, result.tokens), (_LENGTHS, result.lengths)):
            with open(self.folder / name, "ab") as file:
                file.write(array.data)
        self.counts += result.counts
        self.place = result.after
        if time.monotonic() - self._committed_at >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush the appended documents and record that they are valid."""
        self._truncate()
        fsync_tree(self.folder)
        progress = {
            "key": self.key,
            "counts": asdict(self.counts),
            "place": self.place,
            "complete": self.complete,
        }
        write_json(self.folder / _PROGRESS, progress)
        self._committed_at = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self.commit()

    def tokens(self) -> Tokens:
        """Return all documents. Their token ids are memory-mapped."""
        ids = np.memmap(self.folder / _TOKENS, np.uint32, "r", shape=(self.counts.tokens,))
        lengths = np.fromfile(self.folder / _LENGTHS, np.int64)
        return Tokens(ids, lengths, self.counts)


def summary(manifest: dict[str, Any]) -> str:
    """Return the statistics of packs as lines for the user."""
    values = {
        **manifest["statistics"],
        "tokenizer": (manifest["tokenizer"] or {}).get("name"),
        "stream": None,
    }
    return "\n".join(
        f"  {name.replace('_', ' '):<20} {f'{value:,}' if isinstance(value, int) else value}"
        for name, value in values.items()
        if value
    )
