"""Write files that survive a crash, compare files with recorded hashes, and hold lock files."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import xxhash

from foundation.errors import InputError, as_input_error

# Error numbers that a file system returns for a call that it does not implement.
NOT_IMPLEMENTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK)
# Suffix of the hidden file that `replace_file` writes first. If the process is killed before it has
# renamed this file, the file remains on the disk.
PARTIAL = ".partial"
# Lock file in a folder that is not complete yet. The process that writes the folder holds the lock.
_LOCK = ".lock"
# Content of a lock file, unless the file is empty.
_HOLDER = re.compile(r"process \d+ on .*")
# Folder of results that are computed again if their files are deleted.
CACHE = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "pretrain")


def fsync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk.

    Flushing a file does not flush the file's name, so flush the file's folder too. Raises
    OSError if flushing fails. If `path` is a folder and its file system cannot flush folders,
    nothing is flushed, and no error is raised.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in NOT_IMPLEMENTED):
            # `os.fsync` does not know the name of the file.
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def apply_umask(path: Path) -> None:
    """Set the mode of a file to the read and write permissions of its folder.

    safetensors ignores the umask when it creates a file. The folder was created with the umask, so
    its mode shows which permissions the umask grants. On a file system without modes, such as exFAT
    or an SMB mount, the file keeps its mode.
    """
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def fsync_tree(folder: Path) -> None:
    """Flush `folder` and all files and folders below it. Raise OSError if flushing fails."""
    for directory, _, files in os.walk(folder):
        for name in [*files, "."]:
            fsync(Path(directory, name))


def without_links(name: str, flags: int) -> int:
    """Open a file of this package. This is an `opener` of Python's `open`.

    Raises OSError if `name` is a link. A folder that was copied from elsewhere may contain links to
    files outside of it, which must not be changed.
    """
    # Without O_NONBLOCK, opening a named pipe may wait for its reader.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def remove_tree(path: Path) -> None:
    """Delete a folder with its content. Of a link, delete only the link itself.

    Raises OSError if a file cannot be deleted.
    """
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush the file.

    A crash may leave a partial file. Use this function only in a folder that is renamed to its
    final name when the folder is complete.
    """
    with open(path, "wb", opener=without_links) as file:
        file.write(data)
    fsync(path)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data` atomically, and create its folder if necessary.

    At any moment, even after a crash, other processes read either the old or the new content.
    Raises InputError if the file cannot be written, for instance because the disk is full.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    with as_input_error(
        (OSError,), f"{path}: cannot be written", "its earlier content is unchanged"
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(partial, data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        fsync(path.parent)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields a hidden folder beside `path`, and deletes it at the end.

    Hidden folders of killed processes are deleted too. Those of running processes are locked and
    stay.
    """
    pattern = f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.writing"
    for lock in path.parent.glob(f"{pattern}/{_LOCK}"):
        with suppress(OSError), open(lock, "rb+", opener=without_links) as file:
            # Another process may have created this file without having locked it yet. While the
            # file is locked here, that process waits. `locked` then creates the folder again.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    # The name is random, so that it is neither the name of a user's folder nor of another process.
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    with locked(folder / _LOCK):
        try:
            yield folder
        finally:
            # An incomplete folder would take space on a full disk. A renamed folder stays.
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Context manager that creates the folder `path` with all its files, or not at all.

    Yields a hidden folder beside `path` (`scratch_folder`). The caller writes its files there. At
    the end of the caller's `with` statement, the files are flushed, and the hidden folder is
    renamed to `path`. If an exception is raised, the hidden folder is removed.

    With `replace`, an existing folder `path` is deleted after the files are flushed. Without it,
    OSError is raised if `path` exists and is not an empty folder.
    """
    with scratch_folder(path) as folder:
        yield folder
        fsync_tree(folder)
        if replace:
            shutil.rmtree(path, ignore_errors=True)
        folder.rename(path)
        # Keep the lock file until here: without it, the folder would count as abandoned.
        (path / _LOCK).unlink()
        fsync(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as indented JSON. Replace the file atomically (`replace_file`)."""
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")


def free_bytes(path: Path) -> int:
    """Return the number of free bytes on the disk of `path`.

    `path` need not exist (see `nearest_existing`).
    """
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """Return `path`, or its nearest parent folder that exists, as an absolute path."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


# `check_files` always hashes files whose total size is at most this number of bytes.
ALWAYS_HASHED_BYTES = 2**30
# Largest number of threads that hash files in parallel. Hashing releases the interpreter lock. More
# threads would only wait for the disk.
_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """Name, size and hashes of a file, recorded when it was written."""

    # Path relative to the folder that holds all recorded files.
    name: str
    # Size in bytes.
    size: int
    # Hex digests by algorithm. The dict may be empty.
    hashes: dict[str, str] = field(default_factory=dict)


def hash_of(content: Any) -> str:
    """Return the SHA-256 of a JSON-able value as hex digits. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """Return the hash of a file as hex digits. `algorithm` is a name in hashlib or xxhash.

    Raises InputError if the file cannot be read.
    """
    with as_input_error((OSError,), f"{path}: cannot be read"), open(path, "rb") as file:
        return hashlib.file_digest(file, getattr(xxhash, algorithm, algorithm)).hexdigest()


def find_damage(folder: Path, records: Iterable[FileRecord], *, hashed: bool = True) -> list[str]:
    """Compare the files in `folder` with their records. Return one line for each damaged file.

    With `hashed`, compare the size of each file and all of its recorded hashes. Without `hashed`,
    compare only the sizes.
    """

    def damage(record: FileRecord) -> str | None:
        path = folder / record.name
        if not path.is_file():
            return f"{record.name}: missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{record.name}: the file has {size} bytes instead of {record.size}"
        hashes = record.hashes if hashed else {}
        for algorithm, digest in hashes.items():
            if hash_file(path, algorithm) != digest:
                return f"{record.name}: damaged: its {algorithm} hash differs from the recorded one"
        return None

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(filter(None, threads.map(damage, records)))


def check_files(
    folder: Path, records: Sequence[FileRecord], remedy: str, *, hashed: bool = False
) -> None:
    """Raise InputError, with `remedy`, for the first file that differs from its record.

    Sizes are always compared. Hashes are compared if the files have at most ALWAYS_HASHED_BYTES in
    total, or if `hashed` is set. Comparing sizes alone is fast enough for every start of a run.
    """
    small = sum(record.size for record in records) <= ALWAYS_HASHED_BYTES
    if problems := find_damage(folder, records, hashed=hashed or small):
        raise InputError(f"{folder}/{problems[0]}; {remedy}")


@contextmanager
def locked(path: Path, when_held: Callable[[str], object] | None = None) -> Iterator[bool]:
    """Context manager that locks the file `path` during the caller's `with` statement.

    Yields True if the file is locked, or False if the file system has no locks. The kernel releases
    the lock when the process ends, even if SIGKILL ends the process. So no user ever has to remove
    an old lock file.

    Args:
        path: The lock file. It contains the name of the process that holds the lock.
        when_held: Function that is called if another process holds the lock. Its argument is the
            name of that process, such as "process 4711 on node3". The function may raise an
            exception to give up. If it returns, or if it is None, `locked` waits for the lock.

    Raises:
        InputError: The lock file cannot be created or locked, or it is another program's file.
    """
    remedy = "choose another folder"
    with as_input_error((OSError,), f"{path}: cannot be locked", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", opener=without_links, encoding="utf-8")  # noqa: SIM115
    with file:
        with as_input_error((OSError, UnicodeError), f"{path}: cannot be locked", remedy):
            has_locks = _lock(file, path, when_held)
        if path.exists() and os.path.samefile(path, file.fileno()):
            # Replace the content of the lock file by the name of this process. On a full disk the
            # file stays empty, and other processes report "another process" as the name.
            file.truncate(0)
            with suppress(OSError):
                os.write(file.fileno(), process_name().encode())
            yield has_locks
            return
    # The process that held the lock has deleted the file.
    with locked(path, when_held) as has_locks:
        yield has_locks


def _lock(file: TextIO, path: Path, when_held: Callable[[str], object] | None) -> bool:
    """Wait until the open file `path` is locked. Return False if the file system has no locks.

    If another process holds the lock, call `when_held` with its name before waiting. Raises
    InputError if the file is not a lock file of this program.
    """
    file.seek(0)
    # A crash of the machine may leave zeros in a new file.
    holder = file.read(300).strip("\0")
    if holder and not _HOLDER.fullmatch(holder):
        raise InputError(
            f"{path}: this file is not a lock file of this program; either move it away, or choose "
            "another folder"
        )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if when_held is not None:
            when_held(holder or "another process")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NOT_IMPLEMENTED:
            raise
        warnings.warn(
            f"{path}: this file system has no locks; do not start a second command that uses "
            "this folder",
            stacklevel=4,
        )
        return False
    return True


def process_name() -> str:
    """Return the name of this process in messages: "process 4711 on node3"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_locked(path: Path) -> bool:
    """Return True if a process holds a lock on the file `path`, or if `path` cannot be opened.

    Return False if the file system has no locks.

    This function tests the lock by holding a shared lock for a moment. A process that calls
    `locked` in this moment finds that the file is locked.
    """
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno not in NOT_IMPLEMENTED
    return False
