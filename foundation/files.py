"""Files that survive a crash: flushed before they get their name, hashed when they are written, and one owner a folder."""

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

# what a file system says of a call that it has not
CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK)
# suffix of the hidden file that `replace_file` writes first; a killed process leaves it behind
PARTIAL = ".partial"


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, which fsync of the files in it does not do. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in CANNOT):
            raise
    finally:
        os.close(descriptor)


def by_umask(path: Path) -> None:
    """Give a file the mode that the umask would have given it, as its folder has it. safetensors
    ignores the umask.

    A file system without modes, such as exFAT or an SMB mount, may refuse. The file then keeps its
    mode.
    """
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def fsync_tree(folder: Path) -> None:
    """Flush every file below `folder` and the names that lead to them, whoever wrote them. Raises OSError."""
    for directory, _, files in os.walk(folder):
        for name in [*files, "."]:
            fsync(Path(directory, name))


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it. A crash may leave half a file: for folders that are named only when complete."""
    path.write_bytes(data)
    fsync(path)


def replace_file(path: Path, data: bytes) -> None:
    """Make `path` hold `data`. Whoever opens it at any moment, also after a crash, sees all of the old content or of the new.

    Makes its folder where there is none. InputError where it cannot be written: disk full, no permission.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    with refusing((OSError,), f"{path}: cannot be written", "what it held before is untouched"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(partial, data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        fsync(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Do what `replace_file` does, with `content` as JSON that a person can read."""
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")


# in each picture and page that a command writes where the user says
WRITTEN_BY = "written by python -m pretrain"


def check_replaceable(path: Path, named: str = "--out") -> None:
    """InputError where `path`, which the option `named` asks for, is something that no command here has written. An empty file
    holds nothing to lose."""
    if not path.exists():
        return
    content = path.read_bytes() if path.is_file() else b"a folder"
    if content and WRITTEN_BY.encode() not in content:
        raise InputError(
            f"{named} {path}: is there, and no command here has written it; move it away, or give another name"
        )


def free_bytes(path: Path) -> int:
    """Bytes free on the disk of `path`, or, where it is not there, of the nearest folder above that is."""
    path = path.absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free


ALWAYS_HASHED_BYTES = 2**30
_THREADS = 8  # hashing releases the interpreter lock; more threads than this only queue at the disk


@dataclass(frozen=True)
class FileRecord:
    """What a file's writer recorded about it."""

    name: str  # relative to the folder that holds all recorded files
    size: int  # bytes
    hashes: dict[str, str] = field(default_factory=dict)  # algorithm -> hex digest; may be empty


def hash_of(content: Any) -> str:
    """SHA-256 of what JSON can hold, as a manifest does, in hexadecimal digits; the order of keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """The hex digest of a file by any of hashlib's or xxhash's algorithms; InputError where it cannot be read."""
    with refusing((OSError,), f"{path}: cannot be read"), open(path, "rb") as file:
        return hashlib.file_digest(file, getattr(xxhash, algorithm, algorithm)).hexdigest()


def find_damage(folder: Path, records: Iterable[FileRecord], *, hashed: bool = True) -> list[str]:
    """One line for each file that is not what was written; none where all are intact. Reads every byte, if `hashed`; of a file
    without recorded hashes the size alone counts."""

    def damage(record: FileRecord) -> str | None:
        path = folder / record.name
        if not path.is_file():
            return f"{record.name}: missing"
        if (size := path.stat().st_size) != record.size:
            return f"{record.name}: has {size} bytes, and {record.size} were written"
        wrong = [
            algorithm
            for algorithm, digest in record.hashes.items()
            if hashed and hash_file(path, algorithm) != digest
        ]
        return (
            f"{record.name}: damaged: its {wrong[0]} is not that of what was written"
            if wrong
            else None
        )

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(filter(None, threads.map(damage, records)))


def check_files(
    folder: Path, records: Iterable[FileRecord], remedy: str, *, hashed: bool = False
) -> None:
    """InputError that names the first file that is missing, of another size or damaged. Without `hashed`, as at every start,
    files that are large together are compared by their sizes alone."""
    records = list(records)
    small = sum(record.size for record in records) <= ALWAYS_HASHED_BYTES
    if problems := find_damage(folder, records, hashed=hashed or small):
        raise InputError(f"{folder}/{problems[0]}; {remedy}")


@contextmanager
def locked(path: Path, when_held: Callable[[str], object]) -> Iterator[bool]:
    """While entered, holds the lock file `path`. Yields whether the file system has locks.

    The kernel drops the lock when its holder ends, even by SIGKILL, so nobody ever has to remove a stale file. While another
    process holds it, `when_held` is called with that holder, such as "process 4711 on node3": raise there to refuse, return to
    wait. InputError where the file cannot be made.
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
                f"{path}: this file system has no locks; start no second command on it",
                stacklevel=3,
            )
            has_locks = False
        file.truncate(0)
        with suppress(OSError):  # on a full disk it does not say who holds it
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
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        return True
    return False
