"""`metrics.jsonl`: one JSON object a line, every step exactly once, however often the training is stopped and started."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from foundation.errors import InputError
from foundation.files import replace_file


class JsonlTracker:
    """The file at `path`, flushed at each line: a killed run loses at most the line it was writing, which `start` removes."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self._file: TextIO | None = None

    def start(self) -> None:
        """Remove the steps after the resumed checkpoint's from the file, and open it to append."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_back(self.path, self.resumed_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}; move it away") from None

    def log(self, values: Mapping[str, Any]) -> None:
        """Write `values`, which hold their own `step`; JSON has no infinity and no not-a-number, so these become null."""
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # it cannot flush either; the next start removes a part of a line
                self._file.close()
            remedy = "Raise `ulimit -f`" if error.errno == errno.EFBIG else "Free space there"
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror}; every checkpoint is untouched. {remedy}, then start the same "
                "command again to resume."
            ) from None

    def sync(self) -> None:
        """Flush to the disk before a checkpoint is saved: a power cut must not lose the steps before it."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self._file.close()

    def go_back(self, step: int) -> None:
        """Take the steps after `step` out of the file, and go on after it."""
        self.finish()
        self.resumed_step = step
        self.start()


def cut_back(path: Path, last_step: int) -> None:
    """Rewrite the metrics file at `path` without the steps after `last_step`, and without a last line that is not whole."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= last_step]
    if len(whole) < len(lines):
        replace_file(path, b"".join(whole))


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for one that a crash has left unreadable."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
