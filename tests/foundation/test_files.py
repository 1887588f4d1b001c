"""The lock between real processes, files that are replaced whole, and damage of every kind."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import InputError
from foundation.files import (
    WRITTEN_BY,
    FileRecord,
    check_files,
    check_replaceable,
    find_damage,
    locked,
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
        with (
            pytest.raises(InputError, match=f"process {holder.pid} on {socket.gethostname()}"),
            locked(tmp_path / "lock", refuse),
        ):
            pass


def test_whoever_waits_gets_the_lock_when_it_is_released_and_holds_it_alone(
    holder, tmp_path: Path
) -> None:
    second = hold(tmp_path / "lock")
    assert f"process {holder.pid}" in second.stdout.readline()  # what it was told; now it waits
    holder.communicate("done\n")
    assert second.stdout.readline() == "locked\n"
    with (
        pytest.raises(InputError, match=f"process {second.pid}"),
        locked(tmp_path / "lock", refuse),
    ):
        pass
    second.communicate("done\n")


def cannot(number: int):
    def call(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_file_that_cannot_be_replaced_keeps_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "new" / "file", b"old")
    monkeypatch.setattr(os, "fsync", cannot(errno.ENOSPC))
    with pytest.raises(InputError, match=r"new/file: .*No space"):
        replace_file(tmp_path / "new" / "file", b"new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_bytes() == b"old"


@pytest.mark.filterwarnings("ignore:.*has no locks")
def test_a_file_system_without_locks_that_flushes_no_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    monkeypatch.setattr(fcntl, "flock", cannot(errno.ENOSYS))
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: (
            cannot(errno.EINVAL)() if stat.S_ISDIR(os.fstat(file).st_mode) else fsync(file)
        ),
    )
    with locked(tmp_path / "lock", refuse):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_only_what_a_command_has_written_is_written_over(tmp_path: Path) -> None:
    for name, content in (
        ("empty", b""),
        ("ours", b"x" * 10**6 + WRITTEN_BY.encode()),
        ("absent", None),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        check_replaceable(tmp_path / name)
    (tmp_path / "thesis").write_bytes(b"years of work")
    for name in ("thesis", "."):
        with pytest.raises(InputError, match=f"--out {tmp_path / name}"):
            check_replaceable(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"sec", "has 3 bytes"), (b"seconds", "has 7 bytes"), (b"secand", "damaged")],
)
def test_damage_names_the_file_and_its_kind(tmp_path: Path, content: bytes, what: str) -> None:
    contents = {"a": b"first", "b": b"second", "c": b"third"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    records = [
        FileRecord(name, len(data), {"sha256": hashlib.sha256(data).hexdigest()})
        for name, data in contents.items()
    ]
    assert find_damage(tmp_path, records) == []
    (tmp_path / "b").write_bytes(content)
    assert bool(find_damage(tmp_path, records, hashed=False)) == (what != "damaged")
    with pytest.raises(InputError, match=rf"{tmp_path}/b: {what}.*; fetch it again"):
        check_files(tmp_path, records, "fetch it again", hashed=True)
    (tmp_path / "a").unlink()
    assert find_damage(tmp_path, records)[0].startswith("a: missing")
