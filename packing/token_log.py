"""Keep tokenised documents on the disk until they are packed: a kill costs seconds of work."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.files import fsync_tree, write_json
from foundation.reading import load_object
from packing.chunks import Counts, Place, Tokens
from packing.settings import describe_changes

_COMMIT_SECONDS = 5.0
_TOKENS = "tokens.bin"  # uint32
_LENGTHS = "lengths.bin"  # int64, one for each document
_PROGRESS = "progress.json"


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
        self._load()
        folder.mkdir(parents=True, exist_ok=True)
        self._truncate()

    def _load(self) -> None:
        path = self.folder / _PROGRESS
        if not path.is_file():
            return
        remedy = f"remove {self.folder} to start over"
        progress = load_object(path, remedy)
        counts = Counts(**progress["counts"])
        if not counts.documents:
            return
        if changes := describe_changes(progress["key"], self.key):
            raise InputError(
                f"{self.folder}: holds {counts.tokens:,} tokens made with other settings or text "
                f"({changes}); set them back, set data.packs to another folder, or {remedy}"
            )
        self.counts = counts
        self.place = progress["place"]
        self.complete = progress["complete"]

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
                file.write(array)
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

    def discard(self) -> None:
        """Forget all documents."""
        self.counts = Counts()
        self.place = {}

    def __exit__(self, *exception: object) -> None:
        self.commit()

    def tokens(self) -> Tokens:
        """Return all documents. Their token ids are memory-mapped."""
        ids = np.memmap(self.folder / _TOKENS, np.uint32, "r", shape=(self.counts.tokens,))
        lengths = np.fromfile(self.folder / _LENGTHS, np.int64)
        return Tokens(ids, lengths, self.counts)
