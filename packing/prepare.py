"""Prepare the packs of each source and of the validation text before a run.

The packs of a source are parts, which are packed and shuffled separately. By default, a source is
one part. The parts of a stream have a limited size. Only its first part is prepared here, and
`packing.follow` makes the other parts while the run trains.

Tokenising takes nearly all the time, so the tokens are stored in `.<packs>.tokens/` until they are
packed. After an interruption, the next call continues from the stored tokens. The packs depend
neither on interruptions nor on the number of processes.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.errors import InputError, as_input_error
from foundation.files import hash_of, locked
from foundation.progress import Progress, say
from foundation.storage import is_address
from packing.arrow import MANIFEST, read_manifest
from packing.chunks import Counts, require_documents
from packing.pack_maker import PackMaker, content_settings, usable_cores
from packing.records import CHAT_TEMPLATE, WITHOUT_COLUMNS, chat_template, record_rule
from packing.settings import DataSettings, describe_changes
from packing.sources import open_source, refuse_common_files
from packing.store import all_sources, find_splits, folder_of, is_occupied, training_sources
from packing.stream import PartStart
from packing.token_log import TokenLog
from packing.tokenizer import load_tokenizer

# Warning about packs whose source differs from the recorded one.
_CHANGED = (
    "WARNING: the source has changed since these packs were prepared: its files are missing, or "
    "have other names, sizes or dates. The earlier documents are used. To pack the present "
    "documents, remove these packs"
)


def prepare(
    settings: DataSettings, progress: bool = True, *, reports_existing: bool = False
) -> Path:
    """Return the folder of the packs that `settings` describe. Make packs that do not exist yet.

    All processes may call this function. The first process locks the packs and makes them. The
    other processes wait for the lock, and then find that the packs exist. With `reports_existing`,
    also print a line about each source whose packs exist and whose text has not changed.

    Raises InputError if settings or text cannot be used, if the disk is full, or if several
    processes have to make packs on a file system without locks.
    """
    if not settings.prepares:
        raise InputError(
            "data.source and data.tokenizer are not set, so no packs can be prepared; set both"
        )
    # Packing the first source may take hours, so check the other sources before it.
    check_sources(settings)
    for source in all_sources(settings):
        # Without text, the packs already exist.
        if source.source is None:
            continue
        # Look for the packs before a lock file is written, because they may be on a read-only disk.
        manifest = None if holds_packs_of(source) else _make_alone(source, progress)
        if manifest:
            say(summary(manifest), progress)
        elif progress and _has_changed(source):
            say(f"{source.packs}: {_CHANGED}")
        elif reports_existing:
            say(f"{source.packs}: these packs are already prepared with these settings")
    return settings.packs


def _is_rank() -> bool:
    """Return True if this process is one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _has_changed(source: DataSettings) -> bool:
    """Return True if the source has changed since its packs were prepared. The packs must exist.

    Also return True if the source cannot be opened any more. Return False if the packs do not
    record the identity of their source, or if the source is in object storage, because its objects
    would have to be copied.
    """
    recorded = read_manifest(folder_of(source))["statistics"].get("source_identity")
    if recorded is None or is_address(str(source.source)):
        return False
    with suppress(InputError, OSError):
        opened = open_source(source, WITHOUT_COLUMNS)
        # If a folder was removed, the source may be opened as a dataset on the hub with that name.
        return not opened.is_local or opened.identity != recorded
    return True


def _make_alone(source: DataSettings, progress: bool) -> dict[str, Any] | None:
    """Make the packs of `source` while holding a lock, and return their manifest.

    If the packs already exist, do nothing and return None. Raises InputError if the file system has
    no locks and this process is one of several ranks.
    """
    lock = source.packs.absolute().with_name(f".{source.packs.name}.lock")
    with locked(
        lock, lambda holder: say(f"waiting for {holder} to prepare the packs", progress)
    ) as has_locks:
        if not has_locks and _is_rank():
            raise InputError(
                f"{source.packs}: the packs are not prepared, and the file system has no locks, so "
                "the processes of a training cannot prepare them; first run `python -m pretrain "
                "prepare` with this recipe"
            )
        if holds_packs_of(source):
            return None
        return make_packs(source, progress)


def holds_packs_of(settings: DataSettings) -> bool:
    """Return True if the packs of these settings exist, and False if there are no packs.

    Raises InputError if the folder has packs that were prepared with other settings, or if it has
    other files than packs. For a stream, also raises InputError if the folder with all parts has
    other files, because a stream deletes files in this folder.
    """
    packs = folder_of(settings)
    if not (packs / MANIFEST).is_file():
        # Another process may be writing the first part of a stream in a hidden folder.
        has_files = is_occupied(packs) or (settings.stream and any(settings.packs.glob("[!.]*")))
        if has_files:
            raise _has_no_packs(settings.packs)
        return False
    recorded, requested = _comparable_settings(packs, settings)
    if changes := describe_changes(recorded, requested):
        raise InputError(
            f"{packs}: these packs were prepared with other settings ({changes}); "
            "either set data.packs to another folder, or remove this folder"
        )
    return True


def _comparable_settings(
    packs: Path, settings: DataSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recorded settings of packs, and `settings` in the same form.

    The two are equal if the packs were prepared with `settings`. Names and paths whose content may
    have changed are replaced by hashes of the content.
    """
    manifest = read_manifest(packs)
    recorded = {
        key: value for key, value in manifest["settings"].items() if key not in settings.REMOVED
    }
    requested = content_settings(settings)
    # Ignore a different path or name of the source if both mean the same file or dataset.
    if os.path.realpath(recorded["source"]) == os.path.realpath(requested["source"]):
        requested["source"] = recorded["source"]
    # Without `data.packing`, packs of each kind are accepted.
    requested["packing"] = requested["packing"] or recorded["packing"]
    # Compare the fingerprints of the tokenizers if their names differ, or if the name is a path,
    # whose content may have changed. Otherwise do not load the tokenizer: packs may be copied to a
    # machine that does not have it.
    if recorded["tokenizer"] != requested["tokenizer"] or Path(str(settings.tokenizer)).exists():
        recorded["tokenizer"] = manifest["tokenizer"]["fingerprint"][:12]
        requested["tokenizer"] = load_tokenizer(requested["tokenizer"]).fingerprint[:12]
    # The text of a chat template in a file may have changed too.
    saved = packs / CHAT_TEMPLATE
    name = settings.chat_template or str(settings.tokenizer)
    if saved.is_file() and os.path.exists(name):
        template = chat_template(settings.chat_template, str(settings.tokenizer))
        recorded["chat template"] = hash_of(saved.read_bytes().decode())[:12]
        requested["chat template"] = hash_of(template)[:12]
    return recorded, requested


def _has_no_packs(folder: Path) -> InputError:
    """Return the error of a folder with other files than packs."""
    return InputError(
        f"{folder}: this folder has no prepared packs, and it has other files, is the current "
        "folder, or is a mount point; set data.packs to another folder"
    )


def _check_folder_of_streams(settings: DataSettings) -> None:
    """Raise InputError if the common folder of several streams has files of another program.

    `data.streaming.disk_gb` limits the size of all files in this folder. Once a source has its
    first part, the folder may also have the files of the run and its packer.
    """
    if not (settings.stream and settings.sources):
        return
    sources = training_sources(settings).values()
    names = {source.packs.name for source in sources}
    files = {path.name for path in settings.packs.glob("[!.]*")}
    if files - names and not any((folder_of(source) / MANIFEST).is_file() for source in sources):
        raise _has_no_packs(settings.packs)


def check_sources(settings: DataSettings) -> None:
    """Raise InputError unless the packs of each source exist, or the source itself exists.

    The content of the sources is not read. Packs that were prepared with other settings, and text
    for validation that is also used for training, raise InputError too.
    """
    refuse_common_files(settings)
    _check_folder_of_streams(settings)
    for source in all_sources(settings):
        if source.source is None:
            # Raise InputError if there are no packs.
            find_splits(source.packs, source.length)
        # Raise InputError if there is no such source. Ranks do not open it, because they would copy
        # objects of object storage at the same time.
        elif not holds_packs_of(source) and not _is_rank():
            open_source(source, record_rule(source, load_tokenizer(str(source.tokenizer))))


def make_packs(settings: DataSettings, progress: bool) -> dict[str, Any]:
    """Tokenise a source, or the first part of a stream. Pack it, and return the packs' manifest.

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
            arranged = maker.arrange(log.tokens())
            manifest = maker.write(PartStart(), arranged)
    # The packs are complete, so files that cannot be removed are not an error.
    shutil.rmtree(folder, ignore_errors=True)
    return manifest


def _tokenize_source(maker: PackMaker, log: TokenLog, progress: bool) -> None:
    """Tokenise the documents that `log` does not have yet, and append them to `log`."""
    if log.counts.documents:
        say(f"continuing after document {log.counts.documents:,}", progress)
    part = "the first part with" if maker.settings.stream else "with"
    say(f"reading {part} {maker.processes} processes: {maker.source.description}", progress)
    with log:
        maker.tokenize(log, progress)
        require_documents(maker.settings, log.counts)
        if log.key != maker.key():
            # Drop the tokens, which are partly from the old and partly from the new content.
            log.counts = Counts()
            raise InputError(
                f"data.source: {maker.settings.source}: the source was changed while it was read; "
                "run the command again when the source is complete"
            )


def summary(manifest: dict[str, Any]) -> str:
    """Return the statistics in a manifest as lines for the user, which every terminal can print."""
    values = dict(manifest["statistics"])
    if held_out := manifest["splits"].get("held_out"):
        values["held_out_tokens"] = held_out["tokens"]
    if "fill" in values:
        values["fill"] = f"{100 * values['fill']:.2f} %"
    lines = []
    for name, value in values.items():
        text = f"{value:,}" if isinstance(value, int) else value
        # The nested dicts are not for the user.
        if value and not isinstance(value, dict):
            lines.append(f"  {name.replace('_', ' '):<20} {text}")
    return "\n".join(lines).encode(errors="backslashreplace").decode()
