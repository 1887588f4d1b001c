"""Make packs of one source: tokenise in worker processes, lay out documents, write packs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from foundation.errors import as_input_error
from foundation.progress import Progress
from packing.arrow import Split, write_packs
from packing.chunks import Tokens
from packing.pack import Arranged
from packing.records import CHAT_TEMPLATE, WITHOUT_COLUMNS, ChatColumns, record_rule
from packing.settings import LAYOUT_KEYS, TOKEN_KEYS, DataSettings
from packing.sources import CHUNK_BYTES, open_source, reading_settings
from packing.stream import PartStart, part_folder
from packing.token_log import PartTokens
from packing.tokenizer import load_tokenizer
from packing.workers import Workers

# Smallest size of a chunk, in bytes.
_LEAST_CHUNK = 2**12


def usable_cores(shared_by: int = 1) -> int:
    """Return the number of cores that this process may use, divided by `shared_by`, at least 1.

    In a container, a process may be allowed to use fewer cores than the machine has.
    """
    return max(1, len(os.sched_getaffinity(0)) // shared_by)


def content_settings(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that determine the content of packs, as their manifest records them."""
    values = settings.model_dump(mode="json")
    return {key: values[key] for key in (*TOKEN_KEYS, *LAYOUT_KEYS)} | _window_of(settings)


def _window_of(settings: DataSettings) -> dict[str, int]:
    """Return the number of tokens in a part of a stream, as a manifest records it."""
    return {"window": settings.stream.window} if settings.stream else {}


class PackMaker(ExitStack):
    """Make the packs of one source.

    Worker processes tokenise the documents. They end with the caller's `with` statement.
    """

    def __init__(self, settings: DataSettings, processes: int) -> None:
        super().__init__()
        self.processes = processes
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.source = open_source(settings, WITHOUT_COLUMNS)
        # The manifest of the packs records `settings`, without the changes of `reading_settings`.
        # These changes depend on the columns of the source.
        reading = reading_settings(settings, self.source)
        default = "best_fit" if reading.messages else "truncate"
        packing = {"packing": settings.packing or default}
        self.settings = settings.model_copy(update=packing)
        self.reading_settings = reading.model_copy(update=packing)
        self.rule = record_rule(self.reading_settings, self.tokenizer)
        self.source.rule = self.rule
        self._workers = self.enter_context(Workers(self.reading_settings, processes))

    def key(self) -> dict[str, Any]:
        """Return all values that determine the tokens of this source.

        The value `records` is the hash of the rule that reads records, including its chat template.
        """
        included = {*TOKEN_KEYS} - {"source", "tokenizer"}
        key = self.settings.model_dump(mode="json", include=included)
        key["source files"] = self.source.identity
        key["tokenizer fingerprint"] = self.tokenizer.fingerprint
        key["records"] = sha256(repr(self.rule).encode()).hexdigest()
        return key | _window_of(self.settings)

    def tokenize(self, part: PartTokens, progress: bool = False) -> None:
        """Append documents to `part` until it is complete, or until the source ends.

        A part of a stream is complete if it has `data.streaming.window` tokens. Raises InputError
        if a record is malformed, or if a worker dies.
        """
        part_tokens = math.inf
        chunk_bytes = None
        if stream := self.settings.stream:
            part_tokens = stream.window
            chunk_bytes = min(CHUNK_BYTES, max(_LEAST_CHUNK, stream.window))
        results = self._workers.tokenize(self.source.chunks(part.offset, chunk_bytes))
        with Progress("tokenising", "tokens", progress, initial=part.counts.tokens) as line:
            while part.counts.tokens < part_tokens and (result := next(results, None)):
                part.append(result)
                # `line.n` is the number of tokens that the line shows.
                line.update(part.counts.tokens - line.n)

    def arrange(self, tokens: Tokens, *, held_out: bool = True) -> Arranged:
        """Lay out documents in packs. With `held_out`, hold out the share in the settings."""
        share = self.settings.held_out if held_out else 0.0
        settings = self.reading_settings.model_copy(update={"held_out": share})
        return Arranged(tokens, settings, text_files=self.source.kind == "text")

    def write(self, start: PartStart, arranged: Arranged, epoch: int = 0) -> dict[str, Any]:
        """Write the packs of a part, whose documents are from `epoch`, and return their manifest.

        `start` is the start of the part. Packs of a source that is not a stream are the first part.
        A part after the first one has neither held-out packs nor a tokenizer.
        """
        statistics = arranged.statistics()
        # Only the identity of a local source is recorded: to compare that of a dataset of the hub,
        # every start would need the network.
        if self.source.is_local:
            statistics["source_identity"] = self.source.identity
        path = self.settings.packs
        splits: Iterable[Split] = ["train"]
        texts: dict[str, str] = {}
        if start.number == 0:
            splits = arranged.layouts
            texts["tokenizer.json"] = self.tokenizer.tokenizer.to_str(pretty=True)
            if isinstance(self.rule, ChatColumns):
                texts[CHAT_TEMPLATE] = self.rule.template
        if self.settings.stream:
            path = part_folder(path, start.number)
            first = start.first + len(arranged.layouts["train"])
            after = PartStart(
                start.number + 1, epoch=epoch, place=arranged.tokens.after, first=first
            )
            statistics["stream"] = {"start": asdict(start), "after": asdict(after)}
        packs = {split: arranged.packs(split, self.tokenizer.padding) for split in splits}
        with as_input_error(
            (OSError,), f"{path}: cannot be written", "correct the cause and run the command again"
        ):
            return write_packs(
                path,
                self.settings.length,
                packs,
                settings=content_settings(self.settings),
                statistics=statistics,
                tokenizer=self.tokenizer.describe(),
                texts=texts,
            )
