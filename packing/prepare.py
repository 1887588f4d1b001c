"""Prepare the packs of each source and of the validation text before a run.

For a stream, only the first part is prepared. `packing.follow` makes the other parts while the run
trains.

Tokenising takes nearly all the time, so the tokens are stored in `.<packs>.tokens/` until they are
packed. After an interruption, the next call continues from the stored tokens. The packs depend
neither on interruptions nor on the number of processes.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError, as_input_error
from foundation.files import fsync_tree, hash_of, locked, without_links, write_json
from foundation.progress import Progress, say
from foundation.reading import load_object
from foundation.storage import is_address
from packing.arrow import MANIFEST, read_manifest
from packing.chunks import Counts, Offset, Tokens, require_documents
from packing.follow import make_first_part
from packing.pack_maker import PackMaker, content_settings, usable_cores
from packing.records import CHAT_TEMPLATE, Records, chat_template, records_of
from packing.settings import DataSettings, describe_changes
from packing.sources import open_source, refuse_common_files
from packing.store import all_parts, find_splits, folder_of, is_there, training_parts
from packing.tokenizer import load_tokenizer

# Least number of seconds between two commits of tokens.
_COMMIT_SECONDS = 5.0
# File of token ids, uint32.
_TOKENS = "tokens.bin"
# File of the number of tokens of each document, int64.
_LENGTHS = "lengths.bin"
_PROGRESS = "progress.json"
# Warning about packs whose source differs from the recorded one.
_CHANGED = (
    "WARNING: the source has changed since then: its files are missing, or have other names, sizes "
    "or dates. The earlier documents are used. To pack the present documents, remove these packs"
)


def prepare(settings: DataSettings, progress: bool = True) -> Path:
    """Return the folder of the packs that `settings` describe. Make packs that do not exist yet.

    All processes may call this function. The first process locks the packs and makes them. The
    other processes wait for the lock, and then find that the packs exist.

    Raises InputError if settings or text cannot be used, if the disk is full, or if several
    processes have to make packs on a file system without locks.
    """
    if not settings.prepares:
        raise InputError(
            "data.source and data.tokenizer are not set, so no packs can be prepared; set both"
        )
    refuse_common_files(settings)
    # Packing the first source may take hours, so check the other sources before it. Ranks would
    # copy objects of object storage at the same time.
    if os.environ.get("WORLD_SIZE", "1") == "1":
        check_sources(settings)
    _check_folder_of_streams(settings)
    for part in all_parts(settings):
        # Without a source, the packs of a part already exist.
        if part.source is None:
            continue
        # Look for the packs before a lock file is written, because they may be on a read-only disk.
        manifest = None if holds_packs_of(part) else _make_alone(part, progress)
        if progress:
            say(summary(manifest) if manifest else _exists_message(part))
    return settings.packs


def _exists_message(part: DataSettings) -> str:
    """Return a message about packs that exist, with a warning if their source has changed.

    There is no warning if the packs do not record the identity of their source, or if the source is
    in object storage. Its objects would have to be copied.
    """
    message = f"{part.packs}: these packs are already prepared with these settings"
    if is_address(str(part.source)):
        return message
    recorded = read_manifest(folder_of(part))["statistics"].get("source_identity")
    present = None
    with suppress(InputError, OSError):
        source = open_source(part, Records((), ()))
        # The name of a folder that is gone may be the name of a dataset of the hub.
        present = source.identity if recorded and source.is_local else None
    return message if present == recorded else f"{message}. {_CHANGED}"


def _make_alone(part: DataSettings, progress: bool) -> dict[str, Any] | None:
    """Make the packs of `part` while holding a lock, and return their manifest.

    If the packs already exist, do nothing and return None. Raises InputError if the file system has
    no locks and this process is one of several ranks.
    """
    lock = part.packs.absolute().with_name(f".{part.packs.name}.lock")
    with locked(
        lock, lambda holder: say(f"waiting for {holder} to prepare the packs", progress)
    ) as has_locks:
        if not has_locks and os.environ.get("WORLD_SIZE", "1") != "1":
            raise InputError(
                f"{part.packs}: the packs are not prepared, and the file system has no locks, so "
                "the processes of a training cannot prepare them; first run `python -m pretrain "
                "prepare` with this recipe"
            )
        if holds_packs_of(part):
            return None
        if part.stream:
            return make_first_part(part, progress)
        return make_packs(part, progress)


def holds_packs_of(settings: DataSettings) -> bool:
    """Return True if the packs of these settings exist, and False if there are no packs.

    Raises InputError if the folder has packs that were prepared with other settings, or if it has
    other files. The folder of a stream has no other files either, because a stream deletes parts.
    """
    packs = folder_of(settings)
    # Another process may be writing the first part of a stream in a hidden folder.
    has_files = is_there(packs) or (settings.stream and any(settings.packs.glob("[!.]*")))
    if not (packs / MANIFEST).is_file():
        if has_files:
            raise _has_no_packs(settings.packs)
        return False
    manifest = read_manifest(packs)
    recorded = dict(manifest["settings"])
    requested = content_settings(settings)
    # Ignore a different path or name of the source if both mean the same file or dataset.
    if os.path.realpath(recorded["source"]) == os.path.realpath(requested["source"]):
        requested["source"] = recorded["source"]
    requested["packing"] = requested["packing"] or recorded["packing"]
    # Compare the fingerprints of the tokenizers if their names differ, or if the name is a path,
    # whose content may have changed. Otherwise do not load the tokenizer: packs may be copied to a
    # machine that does not have it.
    if recorded["tokenizer"] != requested["tokenizer"] or Path(str(settings.tokenizer)).exists():
        recorded["tokenizer"] = manifest["tokenizer"]["fingerprint"][:12]
        requested["tokenizer"] = load_tokenizer(requested["tokenizer"]).fingerprint[:12]
    # The text of a chat template in a file may have changed too.
    if (packs / CHAT_TEMPLATE).is_file() and os.path.exists(
        settings.chat_template or str(settings.tokenizer)
    ):
        try:
            template = chat_template(settings.chat_template, str(settings.tokenizer))
        except InputError:
            raise InputError(
                f"{packs}: these packs were prepared with a chat template that "
                f"{settings.chat_template or settings.tokenizer} no longer has; copy "
                f"{packs / CHAT_TEMPLATE} to the folder of the tokenizer"
            ) from None
        recorded["chat template"] = hash_of((packs / CHAT_TEMPLATE).read_bytes().decode())[:12]
        requested["chat template"] = hash_of(template)[:12]
    if changes := describe_changes(recorded, requested):
        raise InputError(
            f"{packs}: these packs were prepared with other settings ({changes}); "
            "either set data.packs to another folder, or remove this folder"
        )
    return True


def _has_no_packs(folder: Path) -> InputError:
    """Return the error of a folder with other files than packs."""
    return InputError(
        f"{folder}: this folder has no prepared packs, and it has other files, is the current "
        "folder, or is a mount point; set data.packs to another folder"
    )


def _check_folder_of_streams(settings: DataSettings) -> None:
    """Raise InputError if several streams would have a folder with other files than theirs.

    Before the first part of a source is there, the folder has only the folders of sources.
    """
    if not (settings.stream and settings.sources):
        return
    parts = training_parts(settings).values()
    if not any((folder_of(part) / MANIFEST).is_file() for part in parts):
        names = {part.packs.name for part in parts}
        if any(path.name not in names for path in settings.packs.glob("[!.]*")):
            raise _has_no_packs(settings.packs)


def check_sources(settings: DataSettings) -> None:
    """Raise InputError unless the packs of each source exist, or the source itself exists.

    The content of the sources is not read. Packs that were prepared with other settings, and text
    for validation that is also used for training, raise InputError too.
    """
    refuse_common_files(settings)
    _check_folder_of_streams(settings)
    for part in all_parts(settings):
        if part.source is None:
            find_splits(part.packs, part.length)
        elif not holds_packs_of(part):
            open_source(part, records_of(part, load_tokenizer(str(part.tokenizer))))


def make_packs(settings: DataSettings, progress: bool) -> dict[str, Any]:
    """Tokenise a source, pack it, and return the manifest of its packs.

    If an earlier call was interrupted, its tokens are used. Raises InputError if the source changes
    while it is read, or if memory or disk space is exhausted.
    """
    folder = settings.packs.absolute().parent / f".{settings.packs.name}.tokens"
    remedy = (
        "correct the cause and run the command again; the tokens that were made so far are kept in "
        f"{folder}"
    )
    with (
        PackMaker(settings, usable_cores()) as maker,
        as_input_error((OSError, MemoryError), str(settings.packs), remedy),
    ):
        log = TokenLog(folder, maker.key())
        _tokenize_source(maker, log, progress)
        with Progress("packing", shown=progress):
            manifest = maker.write(settings.packs, maker.arrange(log.tokens()))
    # The packs are complete, so files that cannot be removed are not an error.
    shutil.rmtree(folder, ignore_errors=True)
    say(f"{folder}: cannot be removed; remove this folder", folder.exists())
    return manifest


def _tokenize_source(maker: PackMaker, log: TokenLog, progress: bool) -> None:
    """Tokenise all documents that `log` does not have yet, and append them to `log`."""
    if log.counts.documents:
        say(f"continuing after document {log.counts.documents:,}", progress)
    say(f"reading with {maker.processes} processes: {maker.source.description}", progress)
    with Progress("tokenising", "tokens", progress, initial=log.counts.tokens) as line, log:
        for result in maker.tokenize(log.offset):
            log.append(result)
            line.update(log.counts.tokens - line.n)
        require_documents(maker.settings, log.counts)
        if log.key != maker.key():
            # Drop the tokens, which are partly from the old and partly from the new content.
            log.counts = Counts()
            raise InputError(
                f"data.source: {maker.settings.source}: the source was changed while it was read; "
                "run the command again when the source is complete"
            )


class TokenLog(AbstractContextManager):
    """Tokens of a source, stored in `folder` so that an interrupted tokenisation can continue.

    `append` appends token ids to one file and the lengths of documents to another file. A third
    file records the valid sizes of these two files. Every few seconds, and at the end of the
    caller's `with` statement, the two files are flushed and the record is replaced. When a log is
    opened, bytes beyond the recorded sizes are cut off.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        """Open the log, or create it if it does not exist.

        `key` identifies the tokens: source files, tokenizer and settings. Raises InputError if the
        folder has tokens with another key. These tokens are not deleted automatically, because
        tokenising them may have taken hours.
        """
        self.folder = folder
        self.key = key
        path = folder / _PROGRESS
        remedy = f"remove {folder} to start over"
        # The first commit is before the first token, so only a log has files of tokens.
        if not path.is_file() and any((folder / name).exists() for name in (_TOKENS, _LENGTHS)):
            raise InputError(f"{folder}: has files, but no {_PROGRESS} of this program; {remedy}")
        progress = load_object(path, remedy) if path.is_file() else {}
        # If the log has no documents, start over: its key and offset may be from another source.
        if not progress.get("counts", {}).get("documents"):
            progress = {"key": key, "counts": {}, "place": {}}
        with as_input_error((TypeError,), f"{path}: was written by another version", remedy):
            self.counts = Counts(**progress["counts"])
        # Offset in the source after the last tokenised record.
        self.offset: Offset = progress["place"]
        if changes := describe_changes(progress["key"], key):
            raise InputError(
                f"{folder}: the folder has {self.counts.tokens:,} tokens that were made with other "
                f"settings or from other text ({changes}); either restore the earlier settings "
                f"and text, set data.packs to another folder, or {remedy}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.commit()
        # Cut off bytes after the counted documents. An interrupted write may have left them.
        for name, size in (
            (_TOKENS, 4 * self.counts.tokens),
            (_LENGTHS, 8 * self.counts.documents),
        ):
            with open(folder / name, "ab", opener=without_links) as file:
                file.truncate(size)

    def append(self, result: Tokens) -> None:
        """Append the documents of the next chunk to the files.

        Raises InputError, and drops all tokens, if another process has changed the files. Only a
        file system without locks allows this.
        """
        for name, array, size in (
            (_TOKENS, result.tokens, 4 * self.counts.tokens),
            (_LENGTHS, result.lengths, 8 * self.counts.documents),
        ):
            with open(self.folder / name, "ab", opener=without_links) as file:
                if file.tell() != size:
                    self.counts = Counts()
                    raise InputError(
                        f"{self.folder}: another process prepares these packs too; wait until it "
                        "has ended, and run the command again"
                    )
                file.write(array.data)
        self.counts += result.counts
        self.offset = result.after
        if time.monotonic() - self._committed_at >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush the appended documents and record the sizes of the files as valid."""
        fsync_tree(self.folder)
        write_json(
            self.folder / _PROGRESS,
            {"key": self.key, "counts": asdict(self.counts), "place": self.offset},
        )
        self._committed_at = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self.commit()

    def tokens(self) -> Tokens:
        """Return all documents of the log. Their token ids are memory-mapped."""
        return Tokens(
            tokens=np.memmap(self.folder / _TOKENS, np.uint32, "r", shape=(self.counts.tokens,)),
            lengths=np.fromfile(self.folder / _LENGTHS, np.int64),
            counts=self.counts,
        )


def summary(manifest: dict[str, Any]) -> str:
    """Return the statistics in a manifest as lines for the user, which every terminal can print."""
    values = {
        **manifest["statistics"],
        **{
            f"{split}_tokens": entry["tokens"]
            for split, entry in manifest["splits"].items()
            if split != "train"
        },
        "tokenizer": (manifest["tokenizer"] or {}).get("name"),
        # Do not print nested dicts. None is skipped below.
        "source_identity": None,
        "stream": None,
    }
    if values.get("control_tokens"):
        values["control_tokens"] = (
            f"{values['control_tokens']:,} inside texts, which end documents or turns there; "
            "rewrite them in the source unless this is intended"
        )
    if "fill" in values:
        values["fill"] = f"{100 * values['fill']:.2f} %"
    return (
        "\n".join(
            f"  {name.replace('_', ' '):<20} {f'{value:,}' if isinstance(value, int) else value}"
            for name, value in values.items()
            if value
        )
        .encode(errors="backslashreplace")
        .decode()
    )
