"""The lock between real processes, files that are replaced whole, and damage of every kind."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from foundation.errors import InputError
from foundation.files import free_bytes, fsync, name_aside, remove_own_folder, replace_file, save_file
from foundation.integrity import STAMP, FileRecord, InnerName, check_files, find_damage, hash_file
from foundation.locks import FileLock

HOLD = """
import sys
from pathlib import Path
from foundation.locks import FileLock
with FileLock(Path(sys.argv[1]), print):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def test_what_is_set_aside_gets_the_first_name_that_is_free(tmp_path: Path) -> None:
    (tmp_path / "a.1").mkdir()
    (tmp_path / "a.2").symlink_to("nowhere")
    assert [path.name for path in (name_aside(tmp_path / "a", "."), name_aside(tmp_path / "a"))] == ["a.3", "a.replaced-1"]


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


def test_a_file_that_cannot_be_saved_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "file"
    with pytest.raises(InputError, match=r"new/file: cannot be written: No such file or directory; take another$"):
        save_file(file, b"", "take another")
    assert not file.parent.exists()
    save_file(file, b"whole", "take another", asked_for=True)
    assert file.read_bytes() == b"whole"

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"file: cannot be written: Disk quota exceeded; the disk is full; free some space"):
        save_file(file, b"new", "take another")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_what_it_leads_to_is_written(there: bool, tmp_path: Path) -> None:
    real, link = tmp_path / "other disk" / "real.png", tmp_path / "link.png"
    link.symlink_to("other disk/real.png")
    if there:
        real.parent.mkdir()
        real.write_bytes(b"old")
    save_file(link, b"new", asked_for=True)
    assert link.is_symlink() and [(path.name, path.read_bytes()) for path in real.parent.iterdir()] == [("real.png", b"new")]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_that_leads_to_no_file_is_replaced_itself(tmp_path: Path) -> None:
    (null := tmp_path / "null").symlink_to("/dev/null")
    (itself := tmp_path / "itself").symlink_to("itself")
    for path in (null, itself):
        save_file(path, b"new", asked_for=True)
        assert path.read_bytes() == b"new" and not path.is_symlink()
    assert Path("/dev/null").is_char_device()


def test_a_link_in_a_folder_of_ours_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (theirs := tmp_path / "recipe.yaml").write_bytes(b"theirs")
    for write, name in ((replace_file, "progress.json"), (save_file, "config.yaml")):
        (link := tmp_path / name).symlink_to(theirs)
        write(link, b"ours")
        assert (link.read_bytes(), link.is_symlink(), theirs.read_bytes()) == (b"ours", False, b"theirs")


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


@pytest.mark.parametrize("kind", ["a link", "a file", "a pipe", "a folder"])
def test_a_lock_that_is_somebody_elses_file_is_refused_and_kept(kind: str, tmp_path: Path) -> None:
    thesis, lock = tmp_path / "thesis.tex", tmp_path / ".lock"
    thesis.write_text("years of work")
    if kind == "a link":
        lock.symlink_to(thesis)
    elif kind == "a file":
        lock.write_text("years of work")
    elif kind == "a pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(OSError):
        FileLock(lock, refuse)
    assert thesis.read_text() == "years of work" and (kind != "a file" or lock.read_text() == "years of work")
    assert lock.exists()


def test_only_a_folder_of_nothing_but_our_own_files_is_removed(tmp_path: Path) -> None:
    folder, own = tmp_path / ".packs.partial", re.compile("tokens|train")
    remove_own_folder(folder, own)  # nothing there
    folder.mkdir()
    (folder / "tokens").touch()
    (folder / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"\.packs\.partial: .*thesis\.tex is not ours; move it away"):
        remove_own_folder(folder, own)
    assert sorted(os.listdir(folder)) == ["thesis.tex", "tokens"]
    (folder / "thesis.tex").unlink()
    remove_own_folder(folder, own)
    assert not folder.exists()
    folder.symlink_to(tmp_path)
    with pytest.raises(InputError, match="is not ours"):
        remove_own_folder(folder, own)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "x/../../a", "", "a\0b"])
def test_a_name_in_a_manifest_that_leads_out_of_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(InnerName).validate_python(name)


def test_a_recorded_file_that_is_a_link_out_of_its_folder_is_refused_but_for_the_hubs_cache(tmp_path: Path) -> None:
    snapshot, outside = tmp_path / "snapshots" / "abc", tmp_path / "elsewhere"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for path in (tmp_path / "blobs" / "1", outside, snapshot / "plain"):
        path.write_bytes(b"x")
    (snapshot / "cached").symlink_to("../../blobs/1")
    (snapshot / "inside").symlink_to("plain")
    records = [FileRecord(name, 1) for name in ("plain", "cached", "inside")]
    assert find_damage(snapshot, records) == []
    (snapshot / "out").symlink_to(outside)
    assert find_damage(snapshot, [FileRecord("out", 1)]) == [
        "out: a link that leads outside its folder; copy the file itself to its place"
    ]


def test_the_room_for_a_folder_that_is_not_there_is_that_of_the_nearest_one_above(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") > 0
    assert free_bytes(Path("/proc/not/there")) == 0, "a file system without room, on that of /"


def test_a_file_system_without_locks_or_flushes_of_folders_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", cannot)
    with pytest.warns(UserWarning, match="no locks"), FileLock(tmp_path / ".lock", pytest.fail) as lock:
        assert lock.in_place
    monkeypatch.setattr("os.fsync", cannot)
    with pytest.warns(UserWarning, match="cannot flush a folder"):
        fsync(tmp_path)
