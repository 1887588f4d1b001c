"""Makes one part of a stream of packs, from the place in its source where it begins: what `packing.packer` does all the time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from foundation.progress import say
from packing.arrow import PackWriter
from packing.manifest import FIRST, read_manifest
from packing.pack import Arranged
from packing.prepare import check_counts, content_settings, save_tokenizer, tail_of
from packing.records import Counts, records_of
from packing.settings import DataSettings
from packing.sources import CHUNK_BYTES, Chunk, SourceUnreachable, open_source
from packing.stream import PartStart, part_folder
from packing.tokenizer import load_tokenizer
from packing.workers import ChunkTokenizer, TokenizerWorkers, Tokens

SAMPLE = 256  # packs that are kept of the first part, to look at
_LEAST_CHUNK = 2**12  # bytes
_AT_ONCE = 8  # chunks a process that are read before the next ones
_AGAIN_AFTER = (5.0, 30.0, 120.0, 300.0)  # seconds, where a dataset cannot be reached
_BESIDE = 2**16  # bytes of a part beside its packs: its manifest, and what `datasets` wants


class PartTokens:
    """Documents of a part as ids, in memory."""

    def __init__(self) -> None:
        self.counts, self.results = Counts(), list[Tokens]()

    def append(self, result: Tokens) -> None:
        self.counts += result.counts
        self.results.append(result)

    def joined(self) -> Tokens:
        tokens, lengths = (np.concatenate([getattr(each, name) for each in self.results]) for name in ("tokens", "lengths"))
        masked = self.results[0].trained is not None
        trained = np.concatenate([each.trained for each in self.results]) if masked else None
        return Tokens(tokens, lengths, trained, self.counts)


@dataclass(frozen=True)
class PackedPart:
    """A part that is not on disk yet."""

    start: PartStart
    epoch: int  # of the source, which may have begun again before its first document
    place: dict[str, Any]  # behind it
    arranged: Arranged

    @property
    def bytes(self) -> int:
        """The bytes that its files will take, and a few more."""
        return round(1.002 * self.arranged.bytes()) + _BESIDE


class PartMaker(ExitStack):
    """Makes the parts of one source, each from its start alone. Leaving its block ends the processes that tokenise."""

    def __init__(self, settings: DataSettings, processes: int) -> None:
        super().__init__()
        self.settings, self.folder = settings, settings.packs
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.records = records_of(settings, self.tokenizer)
        self.source = open_source(settings, self.records)
        window = settings.stream.window
        self._window, self._chunk_bytes = window, min(CHUNK_BYTES, max(_LEAST_CHUNK, window))
        self._processes, self._workers = processes, None

    @cached_property
    def _first(self) -> dict[str, Any]:
        return read_manifest(self.folder / FIRST)["statistics"]["stream"]

    @property
    def first_fingerprint(self) -> str:
        return str(self._first.get("fingerprint"))

    def make(self, start: PartStart) -> PackedPart:
        """Tokenise a part. Tries again for some minutes where a dataset cannot be reached."""
        for seconds in _AGAIN_AFTER:
            try:
                return self._make(start)
            except SourceUnreachable as error:
                say(f"{error}; trying again in {seconds:.0f} s")
                time.sleep(seconds)
        return self._make(start)

    def _make(self, start: PartStart) -> PackedPart:
        log, place, epoch = PartTokens(), start.place, start.epoch
        place, over = self._fill(log, place)
        if over and not log.counts.documents and start.number:  # the part before has taken the last document
            epoch += 1
            place, over = self._fill(log, {})
        if start.number == 0 or not log.counts.documents:
            check_counts(self.settings, log.counts)
        one_file = self.source.identity.get("kind") == "text"
        # What is held out of the text's beginning is so each time that the text is gone through.
        begins = start.number == 0 or epoch > start.epoch
        settings = self.settings if begins else self.settings.model_copy(update={"held_out": 0.0})
        return PackedPart(start, epoch, place, Arranged.of(log.joined(), settings, one_file=one_file))

    def _fill(self, log: PartTokens, place: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Tokenise from `place` on until the part is full; returns the place behind it, and whether the source is over."""
        chunks = self.source.chunks(place, self._chunk_bytes)
        while True:
            left = self._window - log.counts.tokens
            each = log.counts.tokens / len(log.results) if log.counts.tokens else 0.0
            wanted = min(_AT_ONCE * self._processes, max(1, int(left / each))) if each else self._processes
            if not (batch := list(itertools.islice(chunks, wanted))):
                return place, True
            for chunk, result in zip(batch, self._tokenized(batch), strict=True):
                log.append(result)
                place = chunk.after
                if log.counts.tokens >= self._window:
                    return place, False

    def _tokenized(self, batch: list[Chunk]) -> Iterable[Tokens]:
        skip_bad = self.settings.on_bad_line == "skip"
        tail = tail_of(self.records, self.tokenizer)
        if self._workers is None:
            file = self.folder / FIRST / "tokenizer.json"
            file = file if file.is_file() else self._tokenizer_file()
            self._plain = ChunkTokenizer(file, self.records, skip_bad=skip_bad, tail=tail)
            if self._processes > 1:
                pool = TokenizerWorkers(self._processes, file, self.records, skip_bad=skip_bad, tail=tail)
                self._workers = self.enter_context(pool)
        if self._workers is not None:
            return self._workers.map(batch)
        return map(self._plain, batch)

    def _tokenizer_file(self) -> Path:
        """Before the first part: where processes read the tokenizer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f".{FIRST}.tokenizer.json"
        self.tokenizer.save(file)
        self.callback(file.unlink, missing_ok=True)
        return file

    def write(self, part: PackedPart) -> tuple[PartStart, str]:
        """Write a part to its folder; returns the start of the next, and the fingerprint."""
        start, arranged, path = part.start, part.arranged, part_folder(self.folder, part.start.number)
        with PackWriter(path, self.settings.length) as writer:
            for _ in arranged.write(writer, "train", self.tokenizer.padding):
                pass
            statistics, counts = arranged.statistics(), arranged.tokens.counts
            after = PartStart(
                number=start.number + 1,
                epoch=part.epoch,
                place=part.place,
                first=start.first + len(arranged.layouts["train"]),
                documents=start.documents + counts.documents,
                tokens=start.tokens + counts.tokens,
                skipped=start.skipped + counts.skipped,
                empty=start.empty + counts.empty,
            )
            statistics["stream"] = {"start": start.model_dump(), "after": after.model_dump(), "source": self.source.identity}
            return after, self._finish(writer, statistics)

    def write_first(self, part: PackedPart, fingerprint: str) -> None:
        """Write what is kept of the first part."""
        arranged = part.arranged
        with PackWriter(self.folder / FIRST, self.settings.length) as writer:
            for split, most in (("train", SAMPLE), ("held_out", None)):
                for _ in arranged.write(writer, split, self.tokenizer.padding, most) if split in arranged.layouts else ():
                    pass
            save_tokenizer(writer.folder, self.tokenizer, self.records)
            packs = arranged.layouts["train"]
            rate = float((packs.stop - packs.start).sum()) / len(packs)
            self._finish(writer, {"stream": {"rate": rate, "fingerprint": fingerprint}})

    def _finish(self, writer: PackWriter, statistics: dict[str, Any]) -> str:
        manifest = writer.finish(settings=content_of(self.settings), statistics=statistics, tokenizer=self.tokenizer.describe())
        return manifest["splits"]["train"]["fingerprint"]


def content_of(settings: DataSettings) -> dict[str, Any]:
    """All settings that the parts of a source depend on."""
    return content_settings(settings) | {"window": settings.stream.window}
