"""The lock between real processes, files that are replaced whole, and damage of every kind."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.files import FileLock, replace_file
from foundation.integrity import STAMP, FileRecord, check_files, find_damage, hash_file

HOLD = """
import sys
from pathlib import Path
from foundation.files import FileLock
with FileLock(Path(sys.argv[1]), print):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(path)], text=True, **pipes)


@pytest.fixture
def holder(tmp_path: Path):
    process = hold(tmp_path / "lock")
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def refuse(holder: str) -> None:
    raise InputError(holder)


def test_a_held_lock_names_its_holder_to_whoever_refuses_to_wait(holder, tmp_path: Path) -> None:
    for _ in range(2):  # a refused attempt must not disturb the holder
        with pytest.raises(InputError) as error:
            FileLock(tmp_path / "lock", refuse)
        assert f"process {holder.pid}" in str(error.value) and socket.gethostname() in str(error.value)


def test_whoever_waits_gets_the_lock_when_it_is_released_and_holds_it_alone(holder, tmp_path: Path) -> None:
    second = hold(tmp_path / "lock")
    assert f"process {holder.pid}" in second.stdout.readline()  # what it was told; now it waits
    holder.communicate("done\n")
    assert second.stdout.readline() == "locked\n"
    with pytest.raises(InputError, match=f"process {second.pid}"):  # the file it holds is the one at the path
        FileLock(tmp_path / "lock", refuse)
    second.communicate("done\n")
    assert not list(tmp_path.iterdir()), "nothing is left to remove by hand"


def test_a_killed_holder_leaves_no_lock_behind(holder, tmp_path: Path) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    told: list[str] = []
    with FileLock(tmp_path / "lock", told.append):
        assert told == []


def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"


@pytest.fixture
def records(tmp_path: Path) -> list[FileRecord]:
    contents = {"a": b"first", "b": b"second", "c": b"third"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return [FileRecord(name, len(data), {"sha256": hashlib.sha256(data).hexdigest()}) for name, data in contents.items()]


@pytest.mark.parametrize(("content", "what"), [(b"sec", "truncated"), (b"seconds", "overlong"), (b"secand", "damaged")])
def test_damage_names_the_file_and_its_kind_and_leaves_no_stamp(tmp_path, records, content: bytes, what: str) -> None:
    assert find_damage(tmp_path, records) == []
    (tmp_path / "b").write_bytes(content)
    (problem,) = find_damage(tmp_path, records)
    assert problem.startswith(f"b: {what}")
    with pytest.raises(InputError, match=rf"{tmp_path}/b: {what}.*; fetch it again"):
        check_files(tmp_path, records, "fetch it again")
    assert not (tmp_path / STAMP).exists()


def test_every_missing_file_is_named(tmp_path, records) -> None:
    for name in "ac":
        (tmp_path / name).unlink()
    assert [problem.split(":")[0] for problem in find_damage(tmp_path, records)] == ["a", "c"]


def test_a_file_that_cannot_be_read_is_one_message_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone: cannot be read"):
        hash_file(tmp_path / "gone", ["sha256"])
