"""Write files that survive a crash, hash them, compare them with records, and lock folders."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from foundation.errors import InputError
from foundation.reading import refusing

# Error numbers of a file system that does not implement a call.
CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK)
# Suffix of the hidden file that `replace_file` writes first. A killed process leaves it behind.
PARTIAL = ".partial"


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk.

    Flushing a file does not flush its name; flush its folder as well. Raises OSError. A file system
    that cannot flush folders is accepted.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in CANNOT):
            raise
    finally:
        os.close(descriptor)


def by_umask(path: Path) -> None:
    """Give a file the mode that the umask grants, taken from its folder.

    safetensors ignores the umask. A file system without modes, such as exFAT or an SMB mount, may
    refuse; the file then keeps its mode.
    """
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, whoever wrote them. Raises OSError."""
    for directory, _, files in os.walk(folder):
        for name in [*files, "."]:
            fsync(Path(directory, name))


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it.

    A crash may leave a partial file. Use this in a folder that gets its final name only when it is
    complete.
    """
    path.write_bytes(data)
    fsync(path)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data` atomically, and create its folder if necessary.

    A reader sees either the old or the new content at any moment, even after a crash. Raises
    InputError if the file cannot be written, for instance because the disk is full.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    with refusing((OSError,), f"{path}: cannot be written", "its earlier content is unchanged"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(partial, data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        fsync(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the content of `path` by `content` as indented JSON; see `replace_file`."""
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, or of its nearest parent that exists."""
    path = path.absolute()
    return shutil.disk_usage(
        next(folder for folder in (path, *path.parents) if folder.exists())
    ).free


ALWAYS_HASHED_BYTES = 2**30
# Hashing releases the interpreter lock. More threads than this only wait for the disk.
_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """Name, size and hashes of a file, recorded when it was written."""

    name: str  # relative to the folder that holds all recorded files
    size: int  # bytes
    hashes: dict[str, str] = field(default_factory=dict)  # algorithm -> hex digest; may be empty


def hash_of(content: Any) -> str:
    """Return the SHA-256 of a JSON value as hex digits. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """Return the hex digest of a file by an algorithm of hashlib or xxhash.

    Raises InputError if the file cannot be read.
    """
    with refusing((OSError,), f"{path}: cannot be read"), open(path, "rb") as file:
        return hashlib.file_digest(file, getattr(xxhash, algorithm, algorithm)).hexdigest()


def find_damage(folder: Path, records: Iterable[FileRecord], *, hashed: bool = True) -> list[str]:
    """Compare the files in `folder` with their records. Return one line for each damaged file.

    With `hashed`, every byte of a file that has recorded hashes is read. Otherwise only the sizes
    are compared.
    """

    def damage(record: FileRecord) -> str | None:
        path = folder / record.name
        if not path.is_file():
            return f"{record.name}: missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{record.name}: has {size} bytes instead of {record.size}"
        for algorithm, digest in record.hashes.items() if hashed else ():
            if hash_file(path, algorithm) != digest:
                return f"{record.name}: damaged: its {algorithm} differs from the recorded one"
        return None

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(filter(None, threads.map(damage, records)))


def check_files(
    folder: Path, records: Iterable[FileRecord], remedy: str, *, hashed: bool = False
) -> None:
    """Raise InputError, with `remedy`, for the first file that is missing, resized or damaged.

    Files that hold at most ALWAYS_HASHED_BYTES together are hashed. Larger ones are hashed only
    with `hashed`; otherwise their sizes are compared, which is fast enough for every start.
    """
    records = list(records)
    small = sum(record.size for record in records) <= ALWAYS_HASHED_BYTES
    if problems := find_damage(folder, records, hashed=hashed or small):
        raise InputError(f"{folder}/{problems[0]}; {remedy}")


@contextmanager
def locked(path: Path, when_held: Callable[[str], object]) -> Iterator[bool]:
    """Hold the lock file `path`. Yield False if the file system has no locks.

    The kernel releases the lock when the process ends, even by SIGKILL, so a stale lock file never
    has to be removed.

    Args:
        path: The lock file. It names the process that holds it.
        when_held: Called with the holder, such as "process 4711 on node3", if another process
            holds the lock. Raise there to give up, or return to wait for the lock.

    Raises:
        InputError: The lock file cannot be created.
    """
    with refusing((OSError,), f"{path.parent}: cannot be written", "name another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    has_locks = True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            when_held(file.read() or "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            warnings.warn(
                f"{path}: this file system has no locks; do not start a second command on it",
                stacklevel=3,
            )
            has_locks = False
        file.truncate(0)
        # On a full disk the lock file stays empty, and its holder has no name.
        with suppress(OSError):
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield has_locks


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file `path`.

    It takes the lock for a moment, which another process may notice. On a file system without
    locks, return True.
    """
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, *CANNOT):
            raise
        return True
    return False
