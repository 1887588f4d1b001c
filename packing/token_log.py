"""Tokens on their way from text to packs: two files that only grow, and a note of how much of them counts.

`tokens.bin` (uint32) and `lengths.bin` (int64, a number a document) take what the workers return. Every few seconds both are
synced and `progress.json` is replaced in one step; what lies behind the sizes it names is cut off when the log is opened again.
So a kill, a full disk or a power cut loses seconds, and packs are laid out from one memory-mapped array instead of many shards.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packing.workers import Tokenized

_COMMIT_SECONDS = 5.0


@dataclass
class TokenCounts:
    """What the log holds, as of a commit."""

    chunks: int = 0  # of the source, done from the first on
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    first_skipped: str | None = None
    empty: int = 0
    complete: bool = False  # the source's end is reached


class TokenLog:
    """The log in `folder`, for the settings `key`; one with another key is thrown away (`discarded` then says what differs).

    Use inside `with log.writing():` to append; `tokens()` and `lengths()` read once it is complete.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.folder, self.key = folder, key
        self.counts = TokenCounts()
        self.discarded: list[str] = []
        if (folder / "progress.json").is_file():
            state = json.loads((folder / "progress.json").read_text())
            counts = TokenCounts(**state["counts"])
            self.discarded = differences(state["key"], key)
            for name, size in (("tokens.bin", counts.tokens * 4), ("lengths.bin", counts.documents * 8)):
                if not (folder / name).is_file() or (folder / name).stat().st_size < size:
                    self.discarded.append(f"{name} is not all there")
            if not self.discarded:
                self.counts = counts
        if self.counts == TokenCounts():
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open for `append`; commits on leaving, whatever the reason (a full disk excepted, where the last commit stands)."""
        with (
            open(self.folder / "tokens.bin", "ab", buffering=0) as tokens,
            open(self.folder / "lengths.bin", "ab", buffering=0) as lengths,
        ):
            tokens.truncate(self.counts.tokens * 4)
            lengths.truncate(self.counts.documents * 8)
            self._files = (tokens, lengths)
            self._committed = time.monotonic()
            try:
                yield
            finally:
                self._commit()

    def append(self, result: Tokenized) -> None:
        """Add the next chunk's documents."""
        for file, array in zip(self._files, (result.tokens, result.lengths), strict=True):
            _write_all(file, memoryview(array).cast("B"))
        counts = self.counts
        self.counts = TokenCounts(
            chunks=counts.chunks + 1,
            documents=counts.documents + len(result.lengths),
            tokens=counts.tokens + len(result.tokens),
            skipped=counts.skipped + result.skipped,
            first_skipped=counts.first_skipped or result.first_skipped,
            empty=counts.empty + result.empty,
        )
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self._commit()

    def finish(self) -> None:
        """Note that the source has no more."""
        self.counts.complete = True

    def tokens(self) -> np.ndarray:
        """[tokens] uint32, memory-mapped."""
        return np.memmap(self.folder / "tokens.bin", np.uint32, "r", shape=(self.counts.tokens,))

    def lengths(self) -> np.ndarray:
        """[documents] int64."""
        return np.fromfile(self.folder / "lengths.bin", np.int64, self.counts.documents)

    def _commit(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
        temporary = self.folder / "progress.json.new"
        with open(temporary, "w") as file:
            json.dump({"key": self.key, "counts": asdict(self.counts)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / "progress.json")
        self._committed = time.monotonic()


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name: before -> now` for every key whose value differs."""
    names = dict.fromkeys([*before, *now])
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]


def _write_all(file: Any, data: memoryview) -> None:
    """Unbuffered files may take a part, on a nearly full disk for instance; the next call then says why."""
    while data:
        data = data[file.write(data) :]
