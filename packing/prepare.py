"""Text to packs: tokenise in several processes, order the documents, lay out packs, write them.

Tokenising takes nearly all the time, so its results are kept in `<packs>.partial/` (`packing.token_log`), from where a later call
goes on; the rest starts over after a kill. The packs depend on neither interruptions nor the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from foundation.errors import InputError
from foundation.files import free_bytes, no_room, remove_own_folder, why_unwritable
from foundation.locks import FileLock
from foundation.progress import Progress, say
from foundation.units import plural
from packing.arrow import IGNORE, PackWriter
from packing.chat import CHAT_TEMPLATE, ChatColumns, chat_template
from packing.chunks import CHUNK_BYTES, Records, TextTemplate, read_chunk
from packing.manifest import FIRST, MANIFEST, read_manifest
from packing.parts import by_key, check_parts, folder_of, is_there, said_of, training_parts, validation_parts
from packing.records import records_of
from packing.settings import DataSettings
from packing.sources import DatasetSource, FileSource, open_source
from packing.statistics import draw_lengths
from packing.token_log import OWN, SOURCE_FILES, TokenCounts, TokenLog, differences
from packing.tokenizer import ROLES, TextTokenizer, load_tokenizer
from packing.workers import TokenizerWorkers
from packing.writing import Arranged

# The settings that decide which tokens there are, and which packs they go to. No other (processes, streaming, mask_boundaries,
# ...) changes the packs.
_TOKEN_KEYS = ("source", "format", "subset", "split", "text", "tokenizer", "add_bos", "add_eos", "on_bad_line")
# These came later. At its default none of them is recorded, so that packs from before are still those that are asked for.
_LATER_KEYS = (
    *("revision", "messages", "prompt", "response", "train_on", "chat_template"),
    *("input_ids", "labels", "document_lengths"),
)
_ANY_SOURCE = 2**20  # tokens: of packs so long a few are no burden, however short the text
_LAYOUT_KEYS = ("length", "packing", "positions", "shuffle", "held_out", "seed")


def prepare(settings: DataSettings, progress: bool = True) -> Path:
    """Make the packs that `settings` describe, unless they exist, and return their folder: of each source and of the text to
    validate on.

    Waits for another process that prepares the same folder. Raises InputError for what cannot be used and for a full disk.
    """
    if not settings.prepares:
        raise InputError("data.source and data.tokenizer are not set, so there is nothing to prepare packs from")
    if settings.stream:
        raise ValueError("the packs of a stream are made by packing.packer")
    validation = by_key(validation_parts(settings), "data.validation")
    training = by_key(training_parts(settings) or {"": settings.model_copy(update={"validation": None})})
    parts = {key: part for key, part in {**training, **validation}.items() if part.source is not None}
    check_missing(parts, settings, progress)
    for key, part in parts.items():
        with said_of(key):
            prepare_part(part, progress)
    return settings.packs


def check_missing(parts: Mapping[str, DataSettings], settings: DataSettings, progress: bool) -> None:
    """InputError where packs of one of several `parts`, by what a message calls it, are not there and cannot be made: before
    hours go into another."""
    missing = {key: part for key, part in parts.items() if not is_there(folder_of(part))}
    if missing and (settings.sources or settings.validation is not None):
        for note in check_parts(settings):
            say(note, progress)
        for key, part in missing.items():
            with said_of(key):
                check_first_records(part)


def check_first_records(settings: DataSettings) -> None:
    """InputError where there are no records or the first cannot be read."""
    tokenizer = load_tokenizer(str(settings.tokenizer))
    records = prepared_records(settings, tokenizer)
    if (chunk := next(open_source(settings).chunks(), None)) is None:
        check_counts(settings, TokenCounts(), masked=False)
    else:
        read_chunk(chunk, records, settings.on_bad_line == "skip")


def prepare_part(settings: DataSettings, progress: bool) -> Path:
    packs, partial = settings.packs, _partial_of(settings)
    if not prepared_already(settings):  # before any file is touched: packs may be on a read-only disk
        with lock_of(packs, progress):
            if not prepared_already(settings):
                manifest = _prepare_anew(settings, partial, progress)
                say(summary(manifest), progress)
                return packs
    say(f"{packs}: already prepared with these settings", progress)
    _note_changed_source(settings, progress)
    with suppress(InputError):  # somebody else's is no reason to refuse packs that are there
        remove_own_folder(partial, OWN)  # left by a kill in the last moment
    return packs


def _partial_of(settings: DataSettings) -> Path:
    return settings.packs.absolute().parent / f"{settings.packs.name}.partial"


def lock_of(packs: Path, progress: bool) -> FileLock:
    path = packs.absolute().parent / f"{packs.name}.lock"
    try:
        return FileLock(path, lambda holder: say(f"{packs} is being prepared by {holder}; waiting for it", progress))
    except OSError as error:
        raise _unwritable(path.parent, error.strerror) from None


def check_part(settings: DataSettings, *, elsewhere: bool) -> None:
    """InputError where `prepare_part` would refuse a part before it reads any text. Of a tokenizer that is not here nothing is
    known, and where packs are made `elsewhere` nothing of their disk."""
    if Path(str(settings.tokenizer)).exists():
        tokenizer = load_tokenizer(str(settings.tokenizer))
        around(prepared_records(settings, tokenizer), settings, tokenizer)
    leads = settings.packs.is_symlink() and not settings.stream  # of a stream the folder itself is made, which a link is not
    if not elsewhere and (reason := why_unwritable(Path(os.path.realpath(settings.packs)) if leads else settings.packs)):
        raise _unwritable(settings.packs, reason)


def _unwritable(path: Path, reason: str) -> InputError:
    return InputError(f"{path}: cannot be written to: {reason}; set `data.packs`, or --out, to another place")


def _prepare_anew(settings: DataSettings, partial: Path, progress: bool) -> dict[str, Any]:
    """Tokenise, from where an earlier run stopped, and pack; returns the manifest."""
    try:
        tokenizer = load_tokenizer(str(settings.tokenizer))
        log = _tokenize(settings, tokenizer, partial, progress)
        manifest = _write_packs(settings, tokenizer, log, progress)
    except OSError as error:
        if not (full := no_room(error)):
            raise
        kept = f"; what is tokenised is kept in {partial}" if partial.exists() else ""  # nothing, where it was the first
        raise InputError(f"{settings.packs}: {full} and run this again{kept}") from None
    with suppress(InputError):
        remove_own_folder(partial, OWN)
    return manifest


def prepared_already(settings: DataSettings) -> bool:
    """Returns whether the folder holds packs of these settings. Raises InputError if it holds others."""
    return holds_packs_of(settings, settings.packs, content_settings(settings))


def holds_packs_of(settings: DataSettings, packs: Path, content: dict[str, Any]) -> bool:
    """Returns whether `packs` holds packs that record `content` as their settings. Raises InputError if it holds others."""
    if not is_there(packs):
        return False
    if not (packs / MANIFEST).is_file():
        raise InputError(
            f"{packs}: exists and holds no packs that were prepared; set data.packs to another folder, or move it away"
        )
    manifest = read_manifest(packs)
    then, now = recorded_settings(settings, manifest["settings"]), dict(content)
    template = None
    if settings.is_chat and (packs / CHAT_TEMPLATE).is_file():
        template = (packs / CHAT_TEMPLATE).read_text(encoding="utf-8")
    if then.get("tokenizer") == now["tokenizer"] and Path(now["tokenizer"]).exists():  # its content may have changed
        tokenizer, made_with = load_tokenizer(now["tokenizer"]), manifest["tokenizer"] or {}
        then |= {"tokenizer fingerprint": made_with.get("fingerprint")} | _special(settings, template, made_with)
        now |= {"tokenizer fingerprint": tokenizer.fingerprint} | _special(settings, template, tokenizer.describe())
    if template is not None:
        try:  # packs travel without their tokenizer
            now["chat template"] = chat_template(settings.chat_template, str(settings.tokenizer))
            then["chat template"] = template
        except InputError:
            now.pop("chat template", None)
    if different := differences(then, now):
        remedy = "set data.packs to another folder, or remove this one to prepare it anew"
        if any(line.startswith("window:") for line in different):  # of each source of a stream it follows from their weights
            remedy = "another window, or other weights of data.sources, make another stream: set another data.packs and run_dir"
        raise InputError(f"{packs}: holds packs prepared with other settings ({'; '.join(different)}); {remedy}")
    return True


def _special(settings: DataSettings, template: str | None, tokenizer: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the ids of those special tokens that documents hold by these settings, of chats by their template. Which tokens
    they are is said beside a tokenizer, so its fingerprint does not cover it. `tokenizer`: as it describes itself."""
    if template is not None:
        roles = [role for role in ROLES if f"{role}_token" in template]
    else:
        texts = not settings.is_chat and settings.input_ids is None
        roles = [role for role, asked in (("bos", settings.add_bos), ("eos", settings.add_eos)) if asked and texts]
    return {f"{role}_id": tokenizer.get(f"{role}_id") for role in roles}


def _note_changed_source(settings: DataSettings, progress: bool) -> None:
    """Tell the user if the source has changed since; the packs do not."""
    if not Path(str(settings.source)).exists():
        return  # packs travel without their source
    try:
        source = open_source(settings)
    except InputError as error:
        say(f"{settings.packs}: used as they are; with these settings they could not be made again: {error}", progress)
        return
    then = read_manifest(settings.packs)["statistics"].get("source_bytes")
    if isinstance(source, FileSource) and then is not None and source.bytes != then:
        say(
            f"{settings.packs}: made when {settings.source} had {then:,} bytes; now it has {source.bytes:,}. "
            "The packs are used as they are; remove them to prepare anew",
            progress,
        )


def recorded_settings(settings: DataSettings, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a manifest has `recorded`, with the present `format` where the source is the same files of the same kind by
    either, as JSON Lines are by `auto` and `jsonl`."""
    found, own = dict(recorded), settings.format
    if found.get("format") == own:
        return found
    with suppress(InputError, ValidationError):  # the source may not be here any more
        other = DataSettings.model_validate(settings.model_dump() | {"format": found.get("format")})
        if open_source(settings).identity == open_source(other).identity:
            found["format"] = own
    return found


def content_settings(settings: DataSettings) -> dict[str, Any]:
    """All settings that the packs depend on, as the manifest records them."""
    values = settings.model_dump(mode="json")
    later = [key for key in _LATER_KEYS if getattr(settings, key) != DataSettings.model_fields[key].default]
    return {key: values[key] for key in [*_TOKEN_KEYS, *later, *_LAYOUT_KEYS]}


def _tokenize(settings: DataSettings, tokenizer: TextTokenizer, partial: Path, progress: bool) -> TokenLog:
    """All documents as ids, in the order of the source."""
    records = prepared_records(settings, tokenizer)
    source = open_source(settings)
    # `on_bad_line` is not part of the key: after a bad line hours into the work, setting it to `skip` goes on from there.
    key = {name: value for name, value in content_settings(settings).items() if name not in (*_LAYOUT_KEYS, "on_bad_line")}
    key |= {SOURCE_FILES: source.identity, "tokenizer fingerprint": tokenizer.fingerprint, "chunk bytes": CHUNK_BYTES}
    template = records.template if isinstance(records, ChatColumns) else None
    if template is not None:
        key["chat template fingerprint"] = sha256(template.encode()).hexdigest()
    key |= _special(settings, template, tokenizer.describe())
    log = TokenLog(partial, key, masked=settings.masks)
    if log.moved_to:
        say(f"{settings.source}: has changed, so this starts over; what was tokenised before is in {log.moved_to}", progress)
    if settings.on_bad_line == "error" and log.counts.skipped:
        raise InputError(
            f"{log.counts.first_skipped}; {partial} was made with data.on_bad_line: skip, and left that out. Set it to skip "
            "again, or remove that folder"
        )
    if log.counts.complete:
        return log
    file = partial / "tokenizer.json"
    tokenizer.save(file)
    skip_bad = settings.on_bad_line == "skip"
    processes = settings.processes or usable_cores()
    say(f"reading {source.description} with {processes} processes", progress)
    if log.counts.chunks:
        say(f"going on after {log.counts.documents:,} documents that an earlier run has tokenised", progress)
    try:
        with (
            TokenizerWorkers(processes, file, records, skip_bad=skip_bad, **around(records, settings, tokenizer)) as workers,
            log.writing(),
            Progress("tokenising", "tokens", progress, log.counts.tokens) as line,
        ):
            for result in workers.map(islice(source.chunks(), log.counts.chunks, None)):
                log.append(result)
                line.update(log.counts.tokens, result.progress, f"{log.counts.documents:,} documents")
            _check_unchanged(source)
            log.counts.complete = True
    finally:
        if not log.counts.documents:
            remove_own_folder(partial, OWN)  # nothing worth resuming
    check_counts(settings, log.counts, masked=log.masked)
    return log


def _check_unchanged(source: FileSource | DatasetSource) -> None:
    """InputError where files have other sizes or dates than when they were listed: what was read of them belongs to no text."""
    if isinstance(source, FileSource) and (changed := source.changed()):
        raise InputError(f"{changed}: has changed while it was read; wait until nothing writes to it, and run this again")


def check_counts(settings: DataSettings, counts: TokenCounts, *, masked: bool) -> None:
    """InputError where a source holds nothing to train on."""
    if not counts.documents:
        parts = [f"{plural(counts.empty, 'record')} without any"] if counts.empty else []
        if counts.skipped:
            parts.append(f"{counts.skipped:,} malformed ones were skipped, the first at {counts.first_skipped}")
        why = f": {' and '.join(parts)}" if parts else "; the source is empty"
        raise InputError(f"data.source: {settings.source}: no document with any text{why}")
    if masked and not counts.trained:
        raise InputError(
            f"data.source: {settings.source}: none of its {counts.tokens:,} tokens is trained on: `{settings.labels}` is "
            f"{IGNORE} everywhere; write the tokens themselves where there is to be a loss, or leave data.labels out"
        )


def check_length(settings: DataSettings, tokens: int) -> None:
    """InputError where a pack is so much longer than all text that memory, and the disk, would be filled with padding."""
    if settings.length > max(tokens, _ANY_SOURCE):
        where, remedy = ("in its first part", ", or a larger data.streaming.window") if settings.stream else ("in all", "")
        raise InputError(
            f"data.length: {settings.length:,}, and {settings.source} has {tokens:,} tokens {where}; set a shorter one{remedy}"
        )


def around(records: Records, settings: DataSettings, tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """The ids before (`head`) and after (`tail`) each document: BOS and EOS, where those are asked for and texts have them."""
    head = [tokenizer.required("bos", "data.add_bos")] if settings.add_bos else []
    tail = [tokenizer.required("eos", "data.add_eos")] if settings.add_eos and isinstance(records, TextTemplate) else []
    return {"head": head, "tail": tail}


def prepared_records(settings: DataSettings, tokenizer: TextTokenizer) -> Records:
    """Returns what makes documents of records, for chats with the template that writes them. Raises InputError where there is
    none, or where it writes an EOS that the tokenizer does not name, unless tokens were made so before."""
    records = records_of(settings, tokenizer.vocab_size)
    if not isinstance(records, ChatColumns):
        return records
    tokens = {f"{role}_token": tokenizer.tokenizer.id_to_token(number) for role, number in tokenizer.special.items()}
    records = records.written_by(chat_template(settings.chat_template, tokenizer.name), tokens)
    made = settings.packs / FIRST if settings.stream else _partial_of(settings)
    if not made.is_dir() and records.lacks_end():
        raise InputError(
            f"data.chat_template: writes `eos_token`, and the tokenizer {tokenizer.name} names no EOS token, so answers would "
            "have no end; name one in its tokenizer_config.json as `eos_token`, or set a template without it"
        )
    return records


def _write_packs(settings: DataSettings, tokenizer: TextTokenizer, log: TokenLog, progress: bool) -> dict[str, Any]:
    """Lay out the packs of both splits and write them; returns the manifest."""
    check_length(settings, log.counts.tokens)
    arranged = Arranged.of(log, settings, one_file=log.key[SOURCE_FILES].get("kind") == "text")
    free = free_bytes(Path(os.path.realpath(settings.packs)))
    if (needed := arranged.bytes()) > free:
        raise InputError(
            f"{settings.packs}: the packs need {needed / 1e9:,.2f} GB and the disk has {free / 1e9:,.2f} GB; what is tokenised "
            "is kept. Free some space and run this again"
        )
    with PackWriter(settings.packs, settings.length) as writer, Progress("packing", "packs", progress) as line:
        written = 0
        for split in arranged.layouts:
            for count in arranged.write(writer, split, tokenizer.padding):
                written += count
                line.update(written, written / arranged.packs)
        copy_tokenizer(writer.folder, settings, tokenizer)
        statistics = arranged.statistics() | {"source_bytes": log.key[SOURCE_FILES].get("bytes")}
        draw_lengths(log.lengths(), settings.length, writer.folder / "lengths.png")
        return writer.finish(settings=content_settings(settings), statistics=statistics, tokenizer=tokenizer.describe())


def copy_tokenizer(folder: Path, settings: DataSettings, tokenizer: TextTokenizer) -> None:
    """Put the tokenizer into `folder`, of chats with the template that writes them."""
    tokenizer.save(folder / "tokenizer.json")
    if isinstance(records := prepared_records(settings, tokenizer), ChatColumns):
        (folder / CHAT_TEMPLATE).write_text(records.template, encoding="utf-8")


def summary(manifest: dict[str, Any]) -> str:
    """The lines that `prepare` ends with."""
    numbers, tokenizer = manifest["statistics"], manifest["tokenizer"]
    lengths, trained, tail = numbers["lengths"], numbers.get("trained_tokens"), numbers.get("held_out_tail")
    held_out = f"its last {tail:,} tokens" if tail else f"{numbers['held_out_documents']:,}"
    lines = {
        "documents": f"{numbers['documents']:,} ({held_out} held out)",
        "tokens": f"{numbers['tokens']:,}; a document has {lengths['median']:,.0f} in the median, {lengths['longest']:,} at most",
        **({"trained tokens": f"{trained:,}, {trained / max(numbers['tokens'], 1):.2%}"} if trained is not None else {}),
        "packs": f"{numbers['packs']:,} of {manifest['length']:,} tokens ({numbers['held_out_packs']:,} held out)",
        "fill": f"{numbers['fill']:.2%}",
        "cut documents": f"{numbers['cut_documents']:,}",
        "left out": f"{numbers['skipped_lines']:,} malformed records, {numbers['empty_documents']:,} without text",
        "tokenizer": f"{tokenizer['name']}, {tokenizer['vocab_size']:,} ids, fingerprint {tokenizer['fingerprint'][:16]}",
    }
    if numbers["first_skipped"]:
        lines["first left out"] = numbers["first_skipped"]
    return "\n".join(f"  {name:<15} {value}" for name, value in lines.items())


def usable_cores() -> int:
    """Cores this process may use; in a container they can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
