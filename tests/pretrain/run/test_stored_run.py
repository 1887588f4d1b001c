"""Run folders in object storage, on an S3 server (tests/launcher/test_storage_run.py: runs)."""

from __future__ import annotations

import itertools
import json
import shutil
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
    files = conftest.contents(folder) if folder.exists() else {}
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


def delete_checkpoint(run: Path, step: int) -> None:
    shutil.rmtree(run / f"checkpoints/step-{step:08d}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run folder with the checkpoints of steps 4 and 8."""
    write_checkpoint(tmp_path / "läuft", 4)
    return write_checkpoint(tmp_path / "läuft", 8).parents[1]


@pytest.fixture
def address(bucket: str) -> str:
    return f"{bucket}/runs/läuft"


def store(address: str, run: Path) -> None:
    stored = StoredRun(address, run)
    stored.claim()
    stored.close(None, None, None)


def restored(address: str, folder: Path) -> dict[str, bytes]:
    StoredRun(address, folder).restore()
    return contents(folder)


def refusing_after(allowed: int) -> Callable[[str, str], str | None]:
    """Return a fault that refuses requests that change an object after some were allowed."""
    requests = iter(range(allowed))

    def fault(method: str, path: str) -> str | None:
        if method != "GET" and next(requests, None) is None:
            return "403 Forbidden"
        return None

    return fault


def finish(run: Path) -> None:
    write_checkpoint(run, 12)
    delete_checkpoint(run, 4)
    (run / "final").mkdir()
    (run / "final/model.safetensors").write_bytes(bytes(1000))
    (run / "summary.json").write_text("{}")


def keep_only_a_new_one(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    write_checkpoint(run, 12)


def replace(run: Path) -> None:
    write_checkpoint(run, 8, "with another recipe")


# Changes of a run folder after it was stored. None is the first time that it is stored.
CHANGES = [None, finish, keep_only_a_new_one, replace]


@pytest.mark.parametrize("change", CHANGES)
def test_a_store_that_ends_early_leaves_whole_checkpoints(
    change: Callable | None, address: str, run: Path, tmp_path: Path, s3_server: Server
) -> None:
    """The store ends after each second request that changes an object, and begins again."""
    before: dict[str, bytes] = {}
    if change:
        store(address, run)
        before = contents(run)
        change(run)
    after = contents(run)
    for allowed in itertools.count(step=2):
        s3_server.fault = refusing_after(allowed)
        is_complete = True
        try:
            store(address, run)
        except InputError as error:
            assert "Forbidden" in str(error)
            is_complete = False
        s3_server.fault = lambda method, path: None
        files = restored(address, tmp_path / f"restored-{allowed}")
        if is_complete:
            assert files == after and allowed > 1
            return
        folders = {name.rpartition("/")[0] for name in files} - {""}
        assert folders or not before
        for folder in folders:
            now, *whole = (
                {name: form[name] for name in form if name.startswith(folder)}
                for form in (files, before, after)
            )
            assert now in whole, folder
        metrics = [form.get("metrics.jsonl") for form in (before, after)]
        assert files.get("metrics.jsonl") in (None, *metrics)


def test_deleted_checkpoints_are_deleted_and_other_objects_stay(
    address: str, run: Path, tmp_path: Path
) -> None:
    store(address, run)
    others = [
        f"{address}/checkpoints/step-00000004/my notes.txt",
        f"{address}/mine/a.txt",
        f"{address}-2/a.txt",
    ]
    for name in others:
        write(name, b"mine")
    delete_checkpoint(run, 4)
    store(address, run)
    files, root = fsspec.url_to_fs(address)
    assert not any(name.endswith("step-00000004/state.json") for name in files.find(root))
    assert all(map(files.exists, others))


def test_a_run_without_checkpoints_deletes_no_stored_one(
    address: str, run: Path, tmp_path: Path
) -> None:
    """With `checkpoint.keep: 1`, the last one is deleted before the next one is complete."""
    store(address, run)
    shutil.rmtree(run / "checkpoints")
    store(address, run)
    assert any("step-00000008" in name for name in restored(address, tmp_path / "other"))


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_stored(
    address: str, run: Path, tmp_path: Path, s3_server: Server, capfd: pytest.CaptureFixture[str]
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

    def prune(method: str, path: str) -> None:
        # The newest checkpoint is compared before the next older one is stored.
        if method == "GET" and path.endswith("step-00000012/manifest.json"):
            shutil.rmtree(run / "checkpoints/step-00000004", ignore_errors=True)

    write_checkpoint(run, 4, "not stored yet")
    write_checkpoint(run, 12)
    s3_server.fault = prune
    store(address, run)
    assert "WARNING" not in "".join(capfd.readouterr())


def test_a_folder_that_continues_the_stored_run_is_used(address: str, run: Path) -> None:
    store(address, run)
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
    for _ in range(2):
        assert restored(address, other) == contents(run)
        (kept,) = tmp_path.glob("other-*")
        assert contents(kept) == before


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
