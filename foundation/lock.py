"""One process at a time: a lock that dies with its holder."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from foundation.errors import InputError


@contextmanager
def exclusive(path: Path, waiting: str | None) -> Iterator[None]:
    """Hold the lock file `path`; while another process holds it, say `waiting` (if given) on stderr and wait.

    The kernel drops the lock when its holder ends, however it ends, so no stale file ever has to be removed by hand. The file
    itself is removed at the end; whoever waited on a removed file sees that and takes a new one. Raises InputError where the
    file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise InputError(f"{path.parent}: cannot be written to: {error.strerror}; set `data.packs` to another place") from None
    while True:
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    print(waiting, file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file):
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_at(path: Path, file: TextIO) -> bool:
    """Whether `file` is still what `path` names, and not one that an earlier holder has removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
