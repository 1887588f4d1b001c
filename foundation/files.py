"""Files that survive a crash, because they are flushed before they get their name."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from foundation.errors import InputError

CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK)  # what a file system says of a call that it has not
PARTIAL = ".partial"  # suffix of the hidden file that `replace_file` writes first; a killed process leaves it behind
PROOF = "proof"  # `.proof.<rank>.partial`: the token by which processes prove that they see one folder


def cache_folder(part: str) -> Path:
    """Returns the folder for what can be made again, by the XDG base directory specification, which wants an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # no home folder
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pretrain" / part
    return Path(__file__).resolve().parent.parent / f".{part}"


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, which fsync of the files in it does not do. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in CANNOT):
            raise
        warnings.warn(f"{path}: this file system cannot flush a folder; a crash may lose names in it", stacklevel=2)
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

    A symbolic link is itself replaced, and what it leads to stays as it is. Raises OSError (disk full, no permission); the old
    content is then untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        write_file(partial, data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


def _real(path: Path) -> Path:
    """Returns where the file at `path` is or will be: `path`, or where it leads if it is a link to a file or to nothing yet."""
    real = Path(os.path.realpath(path))
    return real if real.is_file() or not real.exists() else path


def save_file(
    path: Path, data: bytes, remedy: str = "name another file", *, asked_for: bool = False, makes_folder: bool = False
) -> None:
    """Does what `replace_file` does, with InputError in place of OSError: it says why the file cannot be written, and what to do,
    which is `remedy` unless there is no room.

    `asked_for`: the user chooses `path`, so its folder is made where there is none, and where it is a symbolic link, the file
    that the link leads to is replaced. In a folder of ours the link is, as it may lead to a file that is not ours.
    `makes_folder`: it may be the first in such a folder."""
    place = path
    try:
        if asked_for:
            place = _real(path)
        if asked_for or makes_folder:
            place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, data)
    except OSError as error:
        full = no_room(error)
        remedy = f"{full}, then run the same command again" if full else remedy
        raise InputError(f"{path}: cannot be written: {error.strerror}; {remedy}") from None


WRITTEN_BY = "written by python -m pretrain"  # in each picture that a command writes where it is told to
MARKDOWN_MARK = f"<!-- {WRITTEN_BY} -->"  # in each Markdown file, which does not show it
_MARKED_BYTES = 2**16  # at a file's beginning and at its end: one of these marks stands there


def check_replaceable(path: Path, named: str = "--out") -> None:
    """InputError where `path`, which the option `named` asks for, cannot be written, or is a file that no command here has
    written. An empty one holds nothing to lose."""
    if reason := why_unwritable(_real(path).parent):
        raise InputError(f"{named} {path}: cannot be written there: {reason}; name another file")
    if not path.exists():
        return
    if not path.is_file():
        raise InputError(f"{named} {path}: is there and is no file; name another")
    try:
        with path.open("rb") as file:
            first = file.read(_MARKED_BYTES)
            file.seek(-len(first), os.SEEK_END)
            last = file.read(_MARKED_BYTES)
    except OSError as error:
        raise InputError(f"{named} {path}: is there and cannot be read: {error.strerror}; name another file") from None
    if first and not any(WRITTEN_BY.encode() in part for part in (first, last)):
        raise InputError(
            f"{named} {path}: is a file that no command here has written, so it is not written over; move it away, or give "
            "another name"
        )


REPLACED = ".replaced-"  # in the name of what was set aside


def name_aside(path: Path, why: str = REPLACED) -> Path:
    """The first of `<name>.replaced-1`, `<name>.replaced-2`, ... beside `path` that is not taken, not by a dangling link either.
    `why`: what stands between the name and the number."""
    names = (path.with_name(f"{path.name}{why}{number}") for number in itertools.count(1))
    return next(aside for aside in names if not aside.exists() and not aside.is_symlink())


def why_unwritable(folder: Path) -> str | None:
    """Returns why nothing can be written into `folder`, or, where it is not there, why it cannot be made; None where it can.

    A folder that is there is not touched. Where none is, rights do not tell enough: another is made in the nearest one above, and
    removed at once.
    """
    there = folder.absolute()
    if there.is_dir():
        return None if os.access(there, os.W_OK | os.X_OK) else "no permission, or a read-only disk"
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
    """Returns what is wrong and what to do, where `error` says that the disk, the user's quota on it, or a file may hold no more;
    else None."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EFBIG:
        return "a file may not become so large here; raise `ulimit -f`, or take another disk"
    return "the disk is full; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None


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
