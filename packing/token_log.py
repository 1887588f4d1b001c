"""Tokens on their way from text to packs: files that only grow, and a note of how much of them is complete.

Every few seconds `tokens.bin` (uint32), `lengths.bin` (int64, one a document) and, where some tokens are not to be learnt,
`trained.bin` (a byte a token) are flushed and `progress.json` is replaced. Bytes beyond the sizes it names are cut off when the
log is opened again, so a kill or a power cut loses seconds.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from foundation.errors import InputError
from foundation.files import name_aside, remove_own_folder, replace_file
from foundation.integrity import Size
from foundation.reading import load_object
from foundation.settings import first_mistake
from packing.tokenizer import ROLES
from packing.workers import Tokenized

SOURCE_FILES = "source files"  # the part of a log's key that no setting changes
_SPECIAL = {f"{role}_id" for role in ROLES}  # parts that logs from before them lack, and those of other settings
_COMMIT_SECONDS = 5.0
_PROGRESS = "progress.json"
OWN = re.compile(
    r"tokens\.bin|lengths\.bin|trained\.bin|tokenizer\.json|progress\.json|\.progress\.json\.\d+\.partial"
)  # all that a log holds


@dataclass
class TokenCounts:
    """What the log holds."""

    chunks: Size = 0  # of the source, done from the first on
    documents: Size = 0
    tokens: Size = 0
    trained: Size = 0  # of the tokens, those that are to be learnt; 0 where all are
    skipped: Size = 0
    first_skipped: str | None = None
    empty: Size = 0
    complete: bool = False  # the source's end is reached

    def with_chunk(self, result: Tokenized, masked: bool) -> TokenCounts:
        """Returns these counts with those of one more chunk added."""
        return TokenCounts(
            chunks=self.chunks + 1,
            documents=self.documents + len(result.lengths),
            tokens=self.tokens + len(result.tokens),
            trained=self.trained + (int(mask_of(result).sum()) if masked else 0),
            skipped=self.skipped + result.skipped,
            first_skipped=self.first_skipped or result.first_skipped,
            empty=self.empty + result.empty,
        )


class TokenLog:
    """The log in `folder`, for the settings `key`. Append inside `with log.writing():`; read once it is complete. `masked`: some
    tokens are not to be learnt.

    Tokens take hours, so none are ever thrown away. InputError where `folder` holds tokens of other settings, or lacks some.
    Where the source has changed since (SOURCE_FILES), the folder is moved aside (`moved_to`) and an empty log begins.
    """

    def __init__(self, folder: Path, key: dict[str, Any], *, masked: bool = False) -> None:
        self.folder, self.key, self.masked = folder, key, masked
        self.moved_to: Path | None = None
        self.counts, made_with = TokenCounts(), {}
        if (folder / _PROGRESS).is_file():
            file, remedy = folder / _PROGRESS, f"remove {folder} to start over"
            state = load_object(file, remedy)
            try:
                self.counts = TypeAdapter(TokenCounts).validate_python(state.get("counts"))
                made_with = TypeAdapter(dict[str, Any]).validate_python(state.get("key"))
            except ValidationError as error:
                raise InputError(
                    f"{folder / _PROGRESS}: damaged: {first_mistake(error)}; remove {folder} to start over"
                ) from None
        if not self.counts.documents:
            remove_own_folder(folder, OWN)
            self.counts = TokenCounts()
        else:
            self._check(made_with)
            if made_with.get(SOURCE_FILES) != key.get(SOURCE_FILES):
                self.moved_to = folder.rename(name_aside(folder, "."))
                self.counts = TokenCounts()
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open for `append`; commits on leaving for whatever reason. On a full disk the last commit remains."""
        with ExitStack() as stack:
            self._files = []
            for name, size in self._sizes().items():
                file = stack.enter_context(open(self.folder / name, "ab", buffering=0))
                file.truncate(size)
                self._files.append(file)
            self._committed = time.monotonic()
            try:
                yield
            finally:
                self._commit()

    def append(self, result: Tokenized) -> None:
        """Add the next chunk's documents."""
        columns = (result.tokens, result.lengths, *([mask_of(result)] if self.masked else ()))
        for file, array in zip(self._files, columns, strict=True):
            _write_all(file, memoryview(array).cast("B"))
        self.counts = self.counts.with_chunk(result, self.masked)
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self._commit()

    def tokens(self) -> np.ndarray:
        """[tokens] uint32, memory-mapped."""
        return np.memmap(self.folder / "tokens.bin", np.uint32, "r", shape=(self.counts.tokens,))

    def trained(self) -> np.ndarray | None:
        """[tokens] bool, memory-mapped: which are to be learnt; None where all are."""
        if not self.masked:
            return None
        return np.memmap(self.folder / "trained.bin", np.bool_, "r", shape=(self.counts.tokens,))

    def lengths(self) -> np.ndarray:
        """[documents] int64."""
        return np.fromfile(self.folder / "lengths.bin", np.int64, self.counts.documents)

    def _sizes(self) -> dict[str, int]:
        """Returns how many bytes of each file of the log `progress.json` vouches for."""
        sizes = {"tokens.bin": self.counts.tokens * 4, "lengths.bin": self.counts.documents * 8}
        return sizes | ({"trained.bin": self.counts.tokens} if self.masked else {})

    def _commit(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
        state = {"key": self.key, "counts": asdict(self.counts)}
        replace_file(self.folder / _PROGRESS, json.dumps(state, indent=1).encode())
        self._committed = time.monotonic()

    def _check(self, made_with: dict[str, Any]) -> None:
        """InputError where other settings made what is here, or where some of it is missing."""
        aside = {SOURCE_FILES} | (_SPECIAL & (made_with.keys() ^ self.key.keys()))
        before, now = ({name: key[name] for name in key if name not in aside} for key in (made_with, self.key))
        if different := differences(before, now):
            raise InputError(
                f"{self.folder}: holds {self.counts.tokens:,} tokens made with other settings ({'; '.join(different)}); set them "
                "back, set data.packs to another folder, or remove this one to start over"
            )
        for name, wanted in self._sizes().items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < wanted:
                raise InputError(f"{path}: is not all there; remove {self.folder} to start over")


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name: before -> now` for every key whose value differs."""
    names = dict.fromkeys([*before, *now])
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]


def mask_of(result: Tokenized) -> np.ndarray:
    """[tokens] bool; a chunk without documents knows of no mask."""
    return np.ones(len(result.tokens), bool) if result.trained is None else result.trained


def _write_all(file: Any, data: memoryview) -> None:
    """Unbuffered files may take only a part, as on a nearly full disk; the next call then raises the reason."""
    while data:
        data = data[file.write(data) :]
