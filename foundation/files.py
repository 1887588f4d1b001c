"""Files that survive a crash, because they are flushed before they get their name; and a lock that ends with its holder."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from foundation.errors import InputError

PARTIAL = ".partial"  # suffix of the hidden file that `replace_file` writes first; a killed process leaves it behind
PROOF = "proof"  # `.proof.<rank>.partial`: the token by which processes prove that they see one folder


def cache_folder(part: str) -> Path:
    """Where what can be made again is kept, by the XDG base directory specification, which wants an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # no home folder
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pretrain" / part
    return Path(__file__).resolve().parent.parent / f".{part}"


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, which fsync of the files in it does not do. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush every file below `folder` and the names that lead to them, whoever wrote them. Raises OSError."""
    for directory, _, files in os.walk(folder):
        for name in [*files, "."]:
            fsync(Path(directory, name))


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it. A crash may leave half a file: for folders that are named only when complete."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Make `path` hold `data`. Whoever opens it at any moment, also after a crash, sees all of the old content or of the new.

    Raises OSError (disk full, no permission); the old content is then untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        write_file(partial, data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


def save_file(path: Path, data: bytes, remedy: str = "name another file", *, in_new_folder: bool = False) -> None:
    """As `replace_file`, with InputError in place of OSError: why it cannot be written, and what to do, which is `remedy` unless
    there is no room. `in_new_folder`: make its folder where there is none."""
    try:
        if in_new_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        full = no_room(error)
        remedy = f"{full}, then run the same command again" if full else remedy
        raise InputError(f"{path}: cannot be written: {error.strerror}; {remedy}") from None


REPLACED = ".replaced-"  # in the name of what was set aside


def name_aside(path: Path) -> Path:
    """The first of `<name>.replaced-1`, `<name>.replaced-2`, ... beside `path` that is not taken, a dangling link included."""
    names = (path.with_name(f"{path.name}{REPLACED}{number}") for number in itertools.count(1))
    return next(aside for aside in names if not aside.exists() and not aside.is_symlink())


def why_unwritable(folder: Path) -> str | None:
    """Why nothing can be written into `folder`, or, where it is not there, why it cannot be made; None where it can.

    A folder that is there is not touched. Where none is, rights do not tell enough: another is made in the nearest one above, and
    removed at once."""
    there = folder.absolute()
    if there.is_dir():
        return None if os.access(there, os.W_OK | os.X_OK) else "no permission"
    while not os.path.lexists(there):
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=there))
    except OSError as error:
        return error.strerror
    return None


def free_bytes(path: Path) -> int:
    """Bytes free on the disk of `path`, or, where it is not there, of the nearest folder above that is."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def no_room(error: BaseException | None) -> str | None:
    """What is wrong and what to do, where `error` says that the disk, the user's quota on it, or a file may hold no more."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EFBIG:
        return "a file may not become so large here; raise `ulimit -f`, or take another disk"
    return "the disk is full; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None


_HOLDER = re.compile(r"(process \d+ on \S*\n?)?")  # what a lock file holds


def _open_lock(path: Path) -> TextIO:
    """The lock file at `path`, made where there is none. Raises OSError for a link, and for any file that is no lock of ours."""
    if path.is_symlink():
        raise FileExistsError(errno.EEXIST, f"{path.name} in it is a link, and no lock file of ours; move it away")
    opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    file = os.fdopen(opened, "r+", encoding="utf-8", errors="replace") if stat.S_ISREG(os.fstat(opened).st_mode) else None
    if file is None or not _HOLDER.fullmatch(file.read(4096)):
        os.close(opened) if file is None else file.close()
        raise FileExistsError(errno.EEXIST, f"{path.name} in it is no lock file of ours; move it away")
    file.seek(0)
    return file


def remove_own_folder(folder: Path, own: re.Pattern[str]) -> None:
    """Delete what a killed process has left at `folder`, if anything. InputError where something is there that is not `own`:
    a name beside `folder` that is not fully matched is somebody else's, and so is a link."""
    if not folder.exists() and not folder.is_symlink():
        return
    strange = "" if folder.is_dir() and not folder.is_symlink() else folder.name
    strange = strange or next((name for name in sorted(os.listdir(folder)) if not own.fullmatch(name)), "")
    if strange:
        raise InputError(
            f"{folder}: stands where a folder for unfinished work is wanted, and {strange} is not ours; move it away"
        )
    shutil.rmtree(folder, ignore_errors=True)


def in_place(file: TextIO, path: Path) -> bool:
    """Whether the open `file` is still the one at `path`: nobody has deleted, moved or replaced it or its folder."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


class FileLock:
    """Holds the lock file `path`; a context manager that releases it.

    The kernel drops the lock when its holder ends, even by SIGKILL, so nobody ever has to remove a stale file. While another
    process holds it, `when_held` is called with that holder, such as "process 4711 on node3": raise there to refuse, return to
    wait. Raises OSError where the file cannot be made, or is none of ours: nobody else's file is emptied and removed.
    """

    def __init__(self, path: Path, when_held: Callable[[str], object]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            while True:
                self._file = stack.enter_context(_open_lock(path))
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._file.seek(0)
                    when_held(self._file.read().strip() or "another process")
                    fcntl.flock(self._file, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):  # the holder removes the file: whoever waited for that one takes the new one
                    if os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                        break
            stack.pop_all()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @property
    def in_place(self) -> bool:
        """Whether the file that we lock is still the one at `path`."""
        return in_place(self._file, self.path)

    def moved_to(self) -> Path | None:
        """Where the file that we lock is now, as far as the system says it."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}"))
        except OSError:
            return None
        return path if path.exists() else None

    def fileno(self) -> int:
        """The open file, for `pass_fds`: a child that has it holds the lock too, until both have ended."""
        return self._file.fileno()

    def release(self) -> None:
        """Remove the file, unless another has taken its place, and let go of the lock; releasing twice is harmless."""
        if not self._file.closed:
            if self.in_place:
                self.path.unlink(missing_ok=True)
            self._file.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
