"""Locks between real processes, atomic replacement of files, and detection of damage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.files import (
    FileRecord,
    check_files,
    find_damage,
    fsync,
    locked,
    new_folder,
    replace_file,
)

HOLD = """
import sys
from pathlib import Path
from foundation.files import locked
with locked(Path(sys.argv[1]), print):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(path)], text=True, **pipes)


def refuse(holder: str) -> None:
    raise InputError(holder)


def test_a_waiting_process_gets_the_lock_when_it_is_released(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holder = hold(lock)
    assert holder.stdout.readline() == "locked\n"
    name = f"process {holder.pid} on {socket.gethostname()}"
    for _ in range(2):  # a refused attempt must not disturb the holder
        with pytest.raises(InputError, match=name), locked(lock, refuse):
            pass
    second = hold(lock)
    assert name in second.stdout.readline()  # printed before it waits
    holder.communicate("done\n")
    assert second.stdout.readline() == "locked\n"
    with pytest.raises(InputError, match=f"process {second.pid}"), locked(lock, refuse):
        pass
    second.communicate("done\n")


@pytest.mark.parametrize("content", ["mine", "process 1 on a machine\nand more", "\udc80"])
@pytest.mark.parametrize("link", [True, False])
def test_a_lock_replaces_no_other_file(tmp_path: Path, content: str, link: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(content.encode(errors="surrogateescape"))
    before = file.read_bytes()
    if link:
        (tmp_path / "lock").symlink_to(file)
    lock = tmp_path / "lock" if link else file
    with pytest.raises(InputError, match=f"^{lock}: "), locked(lock, refuse):
        pass
    assert file.read_bytes() == before


@pytest.mark.parametrize("has_new_file", [False, True])
def test_a_waiting_process_creates_a_deleted_lock_again(has_new_file: bool, tmp_path: Path) -> None:
    lock = tmp_path / "folder" / "lock"
    lock.parent.mkdir()
    lock.write_bytes(bytes(20))  # left by a crash of the machine
    with locked(lock, refuse):
        waiting = hold(lock)
        waiting.stdout.readline()  # printed before it waits
        shutil.rmtree(lock.parent)
        if has_new_file:
            lock.parent.mkdir()
            lock.touch()
    assert waiting.stdout.readline() == "locked\n"
    assert str(waiting.pid) in lock.read_text()
    waiting.communicate("done\n")


def test_folders_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    """A process may be killed before it has written its name, or on a full disk."""
    mine = [".final.01234567.writing", ".final.0123456789.writing", ".other.01234567.writing"]
    for name in (*mine, ".final.89abcdef.writing"):
        (tmp_path / name).mkdir()
    (tmp_path / mine[1] / ".lock").touch()
    (tmp_path / ".final.89abcdef.writing/.lock").write_text("process 1 on a machine")
    process = hold(tmp_path / ".final.76543210.writing/.lock")
    assert process.stdout.readline() == "locked\n"
    with new_folder(tmp_path / "final", replace=True) as first:
        (first / "a").touch()
        # Another writer of the folder finishes first.
        with new_folder(tmp_path / "final", replace=True) as second:
            assert first.is_dir() and first != second
        (first / "b").touch()
    assert sorted(os.listdir(tmp_path / "final")) == ["a", "b"]
    names = {".final.76543210.writing", "final", *mine}
    assert {path.name for path in tmp_path.iterdir()} == names
    process.communicate("done\n")


def cannot(number: int) -> Callable[..., None]:
    """Return a function that raises the error of the system with this number."""

    def call(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_failed_call_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be replaced keeps its content."""
    replace_file(tmp_path / "new" / "file", b"old")
    with pytest.raises(OSError, match=r"Invalid argument: '/dev/null'"):
        fsync(Path("/dev/null"))
    monkeypatch.setattr(os, "fsync", cannot(errno.ENOSPC))
    with pytest.raises(InputError, match=r"new/file: .*No space"):
        replace_file(tmp_path / "new" / "file", b"new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_bytes() == b"old"
    monkeypatch.setattr(fcntl, "flock", cannot(errno.EIO))
    lock = tmp_path / "lock"
    with pytest.raises(InputError, match=f"^{lock}: .*Input/output error"), locked(lock, refuse):
        pass


@pytest.mark.filterwarnings("ignore:.*has no locks")
def test_a_file_system_needs_neither_locks_nor_flushed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_fsync = os.fsync

    def fsync_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        original_fsync(descriptor)

    monkeypatch.setattr(fcntl, "flock", cannot(errno.ENOSYS))
    monkeypatch.setattr(os, "fsync", fsync_files_only)
    with locked(tmp_path / "lock", refuse):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"sec", "the file has 3 bytes"), (b"seconds", "the file has 7"), (b"secand", "damaged")],
)
def test_damage_names_the_file_and_its_kind(tmp_path: Path, content: bytes, problem: str) -> None:
    contents = {"a": b"first", "b": b"second", "c": b"third"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    records = [
        FileRecord(name, len(data), {"sha256": hashlib.sha256(data).hexdigest()})
        for name, data in contents.items()
    ]
    assert find_damage(tmp_path, records) == []
    (tmp_path / "b").write_bytes(content)
    assert bool(find_damage(tmp_path, records, hashed=False)) == (problem != "damaged")
    with pytest.raises(InputError, match=rf"{tmp_path}/b: {problem}.*; fetch it again"):
        check_files(tmp_path, records, "fetch it again", hashed=True)
    (tmp_path / "a").unlink()
    assert find_damage(tmp_path, records)[0].startswith("a: missing")


def test_a_folder_is_replaced_only_after_the_new_files_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "final"
    for text in ("first", "second"):
        with new_folder(folder, replace=True) as writing:
            (writing / "file").write_text(text)
    with pytest.raises(OSError, match="not empty"), new_folder(folder) as writing:
        (writing / "file").write_text("refused")
    monkeypatch.setattr("foundation.files.fsync_tree", cannot(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"), new_folder(folder, replace=True) as writing:
        (writing / "file").write_text("third")
    assert (folder / "file").read_text() == "second"
    assert [*tmp_path.iterdir()] == [folder]
