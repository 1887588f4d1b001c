"""Files that survive a crash: written whole, flushed to the disk, and only then given their name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

PARTIAL = ".partial"  # how the hidden file ends that `replace_file` writes first; a killed process leaves it behind


def fsync_folder(folder: Path) -> None:
    """Flush the names in `folder`; a file's own fsync does not cover the entry that leads to it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it. A crash may leave half a file: for folders that are named only when complete."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_tree(folder: Path) -> None:
    """Flush every file below `folder`, which something else has written, and the names that lead to them. Raises OSError."""
    for directory, _, files in os.walk(folder):
        for file in files:
            descriptor = os.open(Path(directory, file), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_folder(Path(directory))


def replace_file(path: Path, data: bytes) -> None:
    """Make `path` hold `data`; whoever opens it at any moment, also after a crash, sees the old content or the new, whole.

    Raises OSError (disk full, no permission); the old content is then untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        write_file(partial, data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(path.parent)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether `error` says that the disk, or what this user may take of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
