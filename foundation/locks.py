"""A lock that ends with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from foundation.files import CANNOT, no_room

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


def in_place(file: TextIO, path: Path) -> bool:
    """Returns whether the open `file` is still the one at `path`: nobody has deleted, moved or replaced it or its folder."""
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
                except OSError as error:
                    if error.errno in CANNOT:
                        warnings.warn(f"{path}: this file system has no locks; start no second process on it", stacklevel=2)
                        break
                    if not isinstance(error, BlockingIOError):
                        raise
                    self._file.seek(0)
                    when_held(self._file.read().strip() or "another process")
                    fcntl.flock(self._file, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):  # the holder removes the file: whoever waited for that one takes the new one
                    if os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                        break
            stack.pop_all()
        self._file.truncate(0)
        try:
            os.write(self._file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            if not no_room(error):  # the lock is held, and on a full disk does not say by whom
                raise

    @property
    def in_place(self) -> bool:
        """Whether the file that we lock is still the one at `path`."""
        return in_place(self._file, self.path)

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
