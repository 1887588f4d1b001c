"""Run folders in object storage, on an S3 server."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from foundation.errors import InputError
from pretrain.run.stored_run import StoredRun
from tests import conftest
from tests.object_storage import Server


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run folder, without the name of its last process."""
    files = conftest.contents(folder)
    return {name: files[name] for name in files if name != ".writer"}


def write(address: str, content: bytes) -> None:
    with fsspec.open(address, "wb") as file:
        file.write(content)


def write_checkpoint(run: Path, step: int, content: str = "") -> Path:
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model-00000-of-00001-part-000.safetensors", "state.json", "manifest.json"):
        (folder / name).write_text(json.dumps([name, step, content]))
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


def refusing_after(allowed: int, *methods: str) -> Callable[[str, str], str | None]:
    """Return a fault that refuses requests of these methods after some were allowed."""
    requests = iter(range(allowed))
    return lambda method, path: (
        "403 Forbidden" if method in methods and next(requests, None) is None else None
    )


def is_well(method: str, path: str) -> None:
    """Let all requests pass."""


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
        stored = StoredRun(address, run)
        s3_server.fault = refusing_after(allowed, "PUT", "POST", "DELETE")
        with pytest.raises(InputError, match="Forbidden"):
            stored.claim()
            stored.close(None, None, None)
        s3_server.fault = is_well
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
    shutil.rmtree(run / "checkpoints/step-00000004")
    store(address, run)
    assert restored(address, tmp_path / "other") == contents(run)
    files, root = fsspec.url_to_fs(address)
    names = files.find(root)
    assert f"{root}/checkpoints/step-00000004/my notes.txt" in names
    assert f"{root}/mine/a.txt" in names
    assert files.exists(f"{root}-2/a.txt")


def test_a_deletion_that_ends_early_leaves_no_part_of_a_checkpoint(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    store(address, run)
    shutil.rmtree(run / "checkpoints/step-00000004")
    stored = StoredRun(address, run)
    s3_server.fault = refusing_after(1, "DELETE")
    with pytest.raises(InputError, match="Forbidden"):
        stored.claim()
        stored.close(None, None, None)
    s3_server.fault = is_well
    assert restored(address, tmp_path / "other") == contents(run)


def test_the_only_stored_checkpoint_is_not_deleted(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    """With `checkpoint.keep: 1`, the next checkpoint is stored before the last one is deleted."""
    store(address, run)
    shutil.rmtree(run / "checkpoints")
    store(address, run)
    assert any("step-00000008" in name for name in restored(address, tmp_path / "without"))
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


def test_a_replaced_checkpoint_is_stored_and_its_folder_is_used(
    address: str, run: Path, tmp_path: Path
) -> None:
    store(address, run)
    write_checkpoint(run, 8, "with another recipe")
    store(address, run)
    assert restored(address, tmp_path / "other") == contents(run)
    write_checkpoint(run, 12)
    before = contents(run)
    assert restored(address, run) == before


@pytest.mark.parametrize("step", [4, 12])
def test_a_folder_that_another_has_replaced_is_kept_under_another_name(
    address: str, run: Path, tmp_path: Path, step: int
) -> None:
    """Another machine has stored the run since, perhaps after it went back to an earlier step."""
    other = tmp_path / "other"
    write_checkpoint(other, step, "of this machine")
    store(address, other)
    before = contents(other)
    StoredRun(address, run).claim()
    store(address, run)
    assert restored(address, other) == contents(run)
    (kept,) = tmp_path.glob("other-*")
    assert contents(kept) == before
    assert restored(address, other) == contents(run)
    assert len([*tmp_path.glob("other-*")]) == 1


def test_a_run_without_a_stored_checkpoint_starts_anywhere(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    """The first process is killed after each of the objects that it stores first."""
    for allowed in range(4):
        there = f"{address}-{allowed}"
        first = StoredRun(there, run)
        s3_server.fault = refusing_after(allowed, "PUT")
        with pytest.raises(InputError, match="Forbidden"):
            first.claim()
            first.close(None, None, None)
        s3_server.fault = is_well
        assert restored(there, tmp_path / "other") == {}
        store(there, run)
        assert restored(there, tmp_path / f"restored-{allowed}") == contents(run)


def test_the_run_that_has_started_last_stores_its_files(
    address: str, run: Path, tmp_path: Path
) -> None:
    first = StoredRun(address, run)
    first.claim()
    (tmp_path / "second").mkdir()
    StoredRun(address, tmp_path / "second").claim()
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
    address: str, run: Path, tmp_path: Path, s3_server: Server, capsys: pytest.CaptureFixture[str]
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


def test_a_run_that_went_back_is_restored_at_the_earlier_step(
    address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    store(address, run)
    stored = StoredRun(address, run)
    stored.claim()
    s3_server.fault = lambda method, path: "403 Forbidden" if method == "DELETE" else None
    with pytest.raises(InputError, match="Forbidden"):
        stored.go_back(4)
    s3_server.fault = lambda method, path: None
    stored.go_back(8)
    assert any("step-00000008" in name for name in restored(address, tmp_path / "at-8"))
    stored.go_back(4)
    names = restored(address, tmp_path / "at-4")
    assert any("step-00000004" in name for name in names)
    assert not any("step-00000008" in name for name in names)
