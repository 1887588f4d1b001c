"""Collect the tokens of one part of a source, in memory or on the disk."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.files import fsync_tree, without_links, write_json
from foundation.reading import load_object
from packing.chunks import Counts, Offset, Tokens
from packing.settings import describe_changes

# Least number of seconds between two commits of tokens.
_COMMIT_SECONDS = 5.0
# File of token ids, uint32.
_TOKENS = "tokens.bin"
# File of the number of tokens of each document, int64.
_LENGTHS = "lengths.bin"
_PROGRESS = "progress.json"


class PartTokens:
    """Tokens of a part in memory. A part is a number of consecutive documents of a source."""

    def __init__(self, offset: Offset) -> None:
        """Begin at `offset` in the source."""
        self.counts = Counts()
        # Offset in the source after the last tokenised record.
        self.offset = offset
        self._results = [Tokens(np.zeros(0, np.uint32), np.zeros(0, np.int64), self.counts)]

    def append(self, result: Tokens) -> None:
        """Append the documents of the next chunk."""
        self._results.append(result)
        self._count(result)

    def _count(self, result: Tokens) -> None:
        self.counts += result.counts
        self.offset = result.after

    def tokens(self) -> Tokens:
        """Return all documents of the part."""
        ids = np.concatenate([result.tokens for result in self._results])
        lengths = np.concatenate([result.lengths for result in self._results])
        return Tokens(ids, lengths, self.counts, self.offset)


class TokenLog(PartTokens, AbstractContextManager):
    """Tokens of a part in a folder, so that an interrupted tokenisation can continue.

    `append` appends token ids to one file and the lengths of documents to another file. A third
    file records the valid numbers of tokens and documents. Every few seconds, and at the end of the
    caller's `with` statement, the two files are flushed and the record is replaced. When a log is
    opened, bytes after the valid ones are cut off.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        """Open the log, or create it if it does not exist.

        `key` identifies the tokens: source files, tokenizer and settings. Raises InputError if the
        folder has tokens with another key. These tokens are not deleted automatically, because
        tokenising them may have taken hours.
        """
        super().__init__({})
        self.folder = folder
        self.key = key
        path = folder / _PROGRESS
        remedy = f"remove {folder} to start over"
        if path.is_file():
            self._continue_from(load_object(path, remedy), remedy)
        # A log commits its progress before it creates files of tokens. Without progress, they are
        # from another program.
        elif any((folder / name).exists() for name in self._sizes()):
            raise InputError(f"{folder}: has files, but no {_PROGRESS} of this program; {remedy}")
        folder.mkdir(parents=True, exist_ok=True)
        self.commit()
        # Cut off bytes after the counted documents. An interrupted write may have left them.
        for name, size in self._sizes().items():
            with open(folder / name, "ab", opener=without_links) as file:
                file.truncate(size)

    def _continue_from(self, progress: dict[str, Any], remedy: str) -> None:
        """Continue from the recorded progress, or start over if it has no documents.

        Without documents, the recorded key and offset may be from another source.
        """
        counts = progress["counts"]
        if not counts.get("documents"):
            return
        if changes := describe_changes(progress["key"], self.key):
            raise InputError(
                f"{self.folder}: an unfinished `prepare` left {counts['tokens']:,} tokens, made "
                f"with other settings or from other text ({changes}); either restore the earlier "
                f"settings and text, set data.packs to another folder, or {remedy}"
            )
        # Progress of an earlier version may have further counts.
        self.counts = Counts(**{name: counts[name] for name in asdict(Counts())})
        self.offset = progress["place"]

    def _sizes(self) -> dict[str, int]:
        """Return the valid bytes of each file."""
        return {_TOKENS: 4 * self.counts.tokens, _LENGTHS: 8 * self.counts.documents}

    def append(self, result: Tokens) -> None:
        """Append the documents of the next chunk to the files.

        Raises InputError, and drops all tokens, if another process has changed the files. Only a
        file system without locks allows this.
        """
        sizes = self._sizes()
        for name, array in ((_TOKENS, result.tokens), (_LENGTHS, result.lengths)):
            with open(self.folder / name, "ab", opener=without_links) as file:
                if file.tell() != sizes[name]:
                    self.counts = Counts()
                    raise InputError(
                        f"{self.folder}: another process prepares these packs too; wait until it "
                        "has ended, and run the command again"
                    )
                file.write(array.data)
        self._count(result)
        if time.monotonic() - self._committed_at >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush the appended documents and record them as valid."""
        fsync_tree(self.folder)
        progress = {"key": self.key, "counts": asdict(self.counts), "place": self.offset}
        write_json(self.folder / _PROGRESS, progress)
        self._committed_at = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self.commit()

    def tokens(self) -> Tokens:
        """Return all documents of the log. Their token ids are memory-mapped."""
        ids = np.memmap(self.folder / _TOKENS, np.uint32, "r", shape=(self.counts.tokens,))
        lengths = np.fromfile(self.folder / _LENGTHS, np.int64)
        return Tokens(ids, lengths, self.counts, self.offset)
