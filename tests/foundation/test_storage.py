"""Data from object storage, and run folders in it, on an S3 server."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from foundation import storage
from foundation.errors import InputError
from foundation.storage import StoredRun, address_of, fetch, path_for
from tests.conftest import contents
from tests.object_storage import Server

# ── Data ──────────────────────────────────────────────────────────────────────────────────────────


def write(address: str, content: bytes) -> None:
    with fsspec.open(address, "wb") as file:
        file.write(content)


def requests_for(server: Server, name: str) -> list[str]:
    return [method for method, path in server.requests if path.endswith(name)]


@pytest.fixture
def data(bucket: str) -> str:
    """Address of a folder with three objects."""
    for name in ("a.jsonl", "über uns/b.jsonl", "c.txt"):
        write(f"{bucket}/data/{name}", name.encode())
    return f"{bucket}/data"


def test_fetch_copies_a_folder_with_its_names(data: str) -> None:
    copies = contents(fetch(data))
    assert copies == {name: name.encode() for name in ("a.jsonl", "über uns/b.jsonl", "c.txt")}


def test_objects_that_a_console_creates_for_folders_are_ignored(
    data: str, run: Path, address: str
) -> None:
    files, _ = fsspec.url_to_fs(data)
    for folder in (f"{data}/", f"{data}/empty/", f"{address}/", f"{address}/checkpoints/"):
        bucket, _, key = folder.removeprefix("s3://").partition("/")
        files.call_s3("put_object", Bucket=bucket, Key=key, Body=b"")
    assert contents(fetch(data)).keys() == {"a.jsonl", "über uns/b.jsonl", "c.txt"}
    store(address, run)


def test_fetch_copies_the_objects_of_a_pattern(data: str) -> None:
    pattern = fetch(f"{data}/**/*.jsonl")
    assert pattern == path_for(f"{data}/**/*.jsonl")
    assert contents(path_for(data)).keys() == {"a.jsonl", "über uns/b.jsonl"}


def test_fetch_copies_an_object_once(data: str, s3_server: Server) -> None:
    first = fetch(f"{data}/a.jsonl")
    modified = first.stat().st_mtime_ns
    s3_server.requests.clear()
    assert fetch(f"{data}/a.jsonl") == first
    assert "GET" not in requests_for(s3_server, "a.jsonl")
    first.unlink()
    # Packs recognise their source by the time of its files, also on another machine.
    assert fetch(data).joinpath("a.jsonl").stat().st_mtime_ns == modified


@pytest.mark.parametrize("name", ["", "/*.jsonl", "/a.jsonl"])
def test_fetch_replaces_changed_objects(data: str, name: str) -> None:
    fetch(f"{data}{name}")
    open_copy = path_for(f"{data}/a.jsonl").open("rb")
    write(f"{data}/a.jsonl", b"changed")  # the same number of bytes
    fetch(f"{data}{name}")
    assert path_for(f"{data}/a.jsonl").read_bytes() == b"changed"
    # A training that reads the earlier copy keeps it.
    assert open_copy.read() == b"a.jsonl"
    open_copy.close()


def test_fetch_deletes_copies_of_deleted_objects(data: str) -> None:
    fetch(data)
    fsspec.url_to_fs(data)[0].rm(f"{data}/c.txt")
    assert contents(fetch(data)).keys() == {"a.jsonl", "über uns/b.jsonl"}


def test_fetch_repeats_an_interrupted_copy(data: str) -> None:
    copy = path_for(f"{data}/a.jsonl")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"a.j")
    assert fetch(f"{data}/a.jsonl").read_bytes() == b"a.jsonl"


def test_an_object_that_changes_while_it_is_copied_is_copied_again(
    data: str, s3_server: Server
) -> None:
    written = []

    def change(method: str, path: str) -> None:
        if method == "GET" and path.endswith("a.jsonl") and not written:
            written.append(path)
            write(f"{data}/a.jsonl", b"changed")

    s3_server.fault = change
    fetch(data)
    assert fetch(f"{data}/a.jsonl").read_bytes() == b"changed"
    assert requests_for(s3_server, "a.jsonl").count("GET") == 2


def test_processes_wait_for_the_copies_of_another(data: str, s3_server: Server) -> None:
    threads = [threading.Thread(target=fetch, args=(data,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert requests_for(s3_server, "c.txt").count("GET") == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("s3://missing-bucket/a", "The specified bucket does not exist"),
        ("{data}/none", "no such object or folder"),
        ("{data}/*.csv", "no such object or folder"),
        ("s4://bucket/a", "Protocol not known: s4"),
        ("{data}/../a", "has an empty part"),
    ],
)
def test_fetch_names_the_address_that_cannot_be_read(data: str, address: str, reason: str) -> None:
    address = address.format(data=data)
    with pytest.raises(InputError, match=reason) as error:
        fetch(address)
    assert str(error.value).startswith(f"{address}: ")


def test_fetch_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "not_installed.FileSystem", "err": "Install not_installed"}
    registry = sys.modules["fsspec.registry"]
    monkeypatch.setitem(registry.known_implementations, "gs", missing)
    monkeypatch.setattr(registry, "_registry", {})
    with pytest.raises(InputError, match=r"^gs://bucket/a: ImportError: Install not_installed"):
        fetch("gs://bucket/a")


def test_an_object_cannot_be_copied_outside_of_the_folder(bucket: str) -> None:
    write(f"{bucket}/data/x/../../y", b"")
    with pytest.raises(InputError, match="has an empty part"):
        fetch(f"{bucket}/data")


def test_copies_have_the_name_of_their_address() -> None:
    path = path_for("s3://bucket/a b/ü.jsonl")
    assert path == storage.COPIES / "s3/bucket/a b/ü.jsonl"
    assert address_of(path) == "s3://bucket/a b/ü.jsonl"
    assert address_of(Path("packs/a")) == "packs/a"


# ── Runs ──────────────────────────────────────────────────────────────────────────────────────────


def write_checkpoint(run: Path, step: int, content: str = "") -> Path:
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model-00000-of-00001-part-000.safetensors", "state.json", "manifest.json"):
        (folder / name).write_text(f"{name} {step} {content}")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": step}) + "\n")
    (run / "config.yaml").write_text("name: a run")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run folder with the checkpoints of steps 4 and 8."""
    write_checkpoint(tmp_path / "läuft", 4)
    return write_checkpoint(tmp_path / "läuft", 8).parents[1]


@pytest.fixture
def address(bucket: str) -> str:
    return f"{bucket}/runs/läuft"


def store(address: str, run: Path) -> StoredRun:
    stored = StoredRun(address, run)
    stored.claim()
    stored.close(None, None, None)
    return stored


def restored(address: str, folder: Path) -> dict[str, bytes]:
    StoredRun(address, folder).restore()
    return contents(folder) if folder.exists() else {}


def test_a_stored_run_is_restored_with_all_bytes(address: str, run: Path, tmp_path: Path) -> None:
    (run / "final").mkdir()
    (run / "final/model.safetensors").write_bytes(bytes(1000))
    (run / "summary.json").write_text("{}")
    store(address, run)
    assert restored(address, tmp_path / "other") == contents(run)


def test_a_part_of_a_checkpoint_is_never_restored(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    """Store a second checkpoint, and end after each request that changes an object."""
    store(address, run)
    before = contents(run)
    write_checkpoint(run, 12)
    after = contents(run)
    whole = {step: {name for name in after if f"step-{step:08d}" in name} for step in (4, 8, 12)}
    for allowed in range(12):
        changes = iter(range(allowed))

        def fault(method: str, path: str, changes: Iterator[int] = changes) -> str | None:
            is_change = method in ("PUT", "POST", "DELETE")
            return "403 Forbidden" if is_change and next(changes, None) is None else None

        stored = StoredRun(address, run)
        s3_server.fault = fault
        with pytest.raises(InputError, match="Forbidden"):
            stored.claim()
            stored.close(None, None, None)
        s3_server.fault = lambda method, path: None
        files = restored(address, tmp_path / f"restored-{allowed}")
        for names in whole.values():
            assert names <= files.keys() or not names & files.keys()
        for name in before.keys() - {"metrics.jsonl"}:
            assert files[name] == before[name]
        assert files["metrics.jsonl"] in (before["metrics.jsonl"], after["metrics.jsonl"])
        if whole[12] <= files.keys():
            assert files == after
            return
    raise AssertionError("the checkpoint was never stored")


def test_deleted_checkpoints_are_deleted_and_other_objects_stay(
    address: str, run: Path, tmp_path: Path
) -> None:
    store(address, run)
    mine = f"{address}/checkpoints/step-00000004/my notes.txt"
    write(mine, b"mine")
    write(f"{address}/mine/a.txt", b"mine")
    write(f"{address}-2/a.txt", b"mine")
    write_checkpoint(run, 12)
    for file in (run / "checkpoints/step-00000004").iterdir():
        file.unlink()
    (run / "checkpoints/step-00000004").rmdir()
    store(address, run)
    assert restored(address, tmp_path / "other") == contents(run)
    files, root = fsspec.url_to_fs(address)
    names = files.find(root)
    assert f"{root}/checkpoints/step-00000004/my notes.txt" in names
    assert f"{root}/mine/a.txt" in names
    assert files.exists(f"{root}-2/a.txt")


def test_the_only_stored_checkpoint_is_not_deleted(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    """With `checkpoint.keep: 1`, the next checkpoint is stored before the last one is deleted."""
    store(address, run)
    for step in (4, 8):
        for file in (run / f"checkpoints/step-{step:08d}").iterdir():
            file.unlink()
    write_checkpoint(run, 12)
    stored = StoredRun(address, run)
    stored.claim()
    s3_server.fault = lambda method, path: (
        "507 Insufficient Storage" if method == "PUT" and "step-00000012" in path else None
    )
    with pytest.raises(InputError, match="Insufficient Storage"):
        stored.close(None, None, None)
    names = restored(address, tmp_path / "other")
    assert any("step-00000008" in name for name in names)


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_stored(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    """A bucket that is slower than the run stores the checkpoint that it has begun."""
    before = contents(run)

    def delete(method: str, path: str) -> None:
        for file in (run / "checkpoints/step-00000008").glob("[ms]*"):
            if method == "PUT" and path.endswith("part-000.safetensors"):
                file.unlink()

    s3_server.fault = delete
    store(address, run)
    names = restored(address, tmp_path / "other")
    assert names.items() >= {n: b for n, b in before.items() if "step-00000004" in n}.items()


def test_storing_does_not_stop_the_run(address: str, run: Path, s3_server: Server) -> None:
    stored = StoredRun(address, run)
    stored.claim()
    released = threading.Event()
    s3_server.fault = lambda method, path: (released.wait(10), None)[1]
    start = time.monotonic()
    for _ in range(5):
        stored.store()
    assert time.monotonic() - start < 5
    released.set()
    stored.close(None, None, None)


def test_a_replaced_checkpoint_is_stored_again(address: str, run: Path, tmp_path: Path) -> None:
    store(address, run)
    write_checkpoint(run, 8, "with another recipe")
    store(address, run)
    assert restored(address, tmp_path / "other") == contents(run)


def test_an_older_folder_is_kept_under_another_name(
    address: str, run: Path, tmp_path: Path
) -> None:
    store(address, run)
    older = tmp_path / "older"
    write_checkpoint(older, 4, "of this machine")
    before = contents(older)
    assert restored(address, older) == contents(run)
    (kept,) = tmp_path.glob("older-*")
    assert contents(kept) == before


def test_a_newer_folder_is_used(address: str, run: Path) -> None:
    store(address, run)
    write_checkpoint(run, 12)
    before = contents(run)
    assert restored(address, run) == before


def test_the_run_that_has_started_last_stores_its_files(
    address: str, run: Path, tmp_path: Path
) -> None:
    first = StoredRun(address, run)
    first.claim()
    second = StoredRun(address, tmp_path / "second")
    second.restore()
    second.claim()
    with pytest.raises(InputError, match=r"another run stores its files there now \(process "):
        first.close(None, None, None)
    assert restored(address, tmp_path / "third") == {}


def test_a_folder_with_other_objects_is_refused(address: str, run: Path) -> None:
    write(f"{address}/config.yaml", b"of another program")
    with pytest.raises(InputError, match=r"has config\.yaml, but no stored run; set another"):
        StoredRun(address, run)


def test_names_that_lead_out_of_the_folder_are_ignored(
    address: str, run: Path, tmp_path: Path
) -> None:
    store(address, run)
    write(f"{address}/final/../../../escaped.txt", b"")
    write(f"{address}/.profile", b"")
    assert restored(address, tmp_path / "other") == contents(run)


def test_files_that_could_not_be_stored_are_stored_later(
    address: str,
    run: Path,
    tmp_path: Path,
    s3_server: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored = StoredRun(address, run)
    stored.claim()
    failures = iter(range(1))

    def once(method: str, path: str) -> str | None:
        is_file = method == "PUT" and "step-" in path
        return "403 Forbidden" if is_file and next(failures, None) is not None else None

    s3_server.fault = once
    problem = stored._store()
    assert "403 Forbidden" in problem and "WARNING  " + problem in capsys.readouterr().err
    stored.close(None, None, None)
    assert restored(address, tmp_path / "other") == contents(run)
