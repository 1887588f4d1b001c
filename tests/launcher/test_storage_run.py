"""Runs whose data and run folder are on an S3 server.

benchmarks/kill_resume.py --address kills runs at random moments, each time with an empty disk.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import fsspec
import pytest

from foundation import storage
from pretrain.run.stored_run import StoredRun
from tests.conftest import Trainer, contents
from tests.golden.runs import outcome
from tests.moments import LauncherProcess, Moment
from tests.object_storage import Server

STEPS = 12  # with checkpoints after 4, 8 and 12


@pytest.fixture
def start(train_here: Trainer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Function that trains in the bucket, started in this test's folder."""
    monkeypatch.chdir(train_here.folder)
    train_here.recipe["run_dir"] = f"{bucket}/run"
    return train_here


@pytest.fixture
def run_dir(start: Trainer) -> Path:
    return storage.path_for(start.recipe["run_dir"], Path("runs")).absolute()


# A run is killed just before the server answers this request, of those that store or delete files
# of folders. A checkpoint has four files. None is no kill.
@pytest.mark.parametrize(
    "kills", [(2, 6, None), pytest.param((2, 4, 6, 3, 5, None), marks=pytest.mark.nightly)]
)
def test_a_run_killed_on_machines_without_a_disk_equals_one_left_alone(
    kills: tuple[int | None, ...], run_dir: Path, s3_server: Server, start: Trainer, tmp_path: Path
) -> None:
    alone = start(f"run_dir={tmp_path / 'alone'}").done()
    statuses = []
    for kill in kills:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        s3_server.fault = lambda method, path: None
        launcher = start.process(**s3_server.environment)
        s3_server.fault = killing(launcher, kill)
        statuses.append(launcher.end())
        assert statuses[-1] in (-SIGKILL, 0), (kill, start.log)
    s3_server.fault = lambda method, path: None
    assert statuses[-1] == 0
    # A later run may find everything stored by an earlier one, which was killed at its end.
    assert statuses.count(-SIGKILL) >= min(3, len(kills) - 1)
    assert outcome(run_dir, STEPS) == outcome(alone.run_dir, STEPS)
    StoredRun(start.recipe["run_dir"], tmp_path / "restored").restore()
    assert contents(tmp_path / "restored") == contents(run_dir)


def killing(launcher: LauncherProcess, kill: int | None) -> Callable[[str, str], None]:
    """Return a fault of the server that kills `launcher` at its change number `kill`."""
    changes = itertools.count(1)

    def fault(method: str, path: str) -> None:
        is_in_folder = re.search("/checkpoints/|/final/|/summary", path)
        if method in ("PUT", "DELETE") and is_in_folder and next(changes) == kill:
            launcher.send_signal(SIGKILL)

    return fault


def test_packs_and_text_are_read_from_a_bucket(
    bucket: str, start: Trainer, words: Path, tmp_path: Path
) -> None:
    files, root = fsspec.url_to_fs(bucket)
    files.put(start.recipe["data"]["packs"], f"{root}/packs", recursive=True)
    lines = [json.dumps({"text": f"w1 w2 w{i % 60} w{i % 59} w{i % 53}"}) for i in range(400)]
    files.pipe(f"{root}/text/a.jsonl", "\n".join(lines).encode())
    local = start("train.steps=2", f"run_dir={tmp_path / 'local'}")
    stored = start("train.steps=2", f"data.packs={bucket}/packs", f"run_dir={tmp_path / 'stored'}")
    assert stored.losses() == local.losses()
    config = (tmp_path / "stored/config.yaml").read_text()
    assert f"packs: {bucket}/packs\n" in config
    text = (f"data.source={bucket}/text/*.jsonl", f"data.tokenizer={words}", "data.held_out=0.1")
    made = (f"data.packs={tmp_path / 'packs'}", f"run_dir={tmp_path / 'text'}")
    start("train.steps=2", *text, *made).done()
    both = start(f"data.source={bucket}/text", f"data.tokenizer={words}", f"data.packs={bucket}/x")
    assert "is an address, but packs are prepared on this machine" in both.refusal


def test_a_bucket_that_cannot_be_written_is_refused_before_training(
    run_dir: Path, start: Trainer, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.fault = lambda method, path: "403 Forbidden" if method == "PUT" else None
    assert f"{start.recipe['run_dir']}: PermissionError: 403 Forbidden" in start().refusal
    assert not (run_dir / "metrics.jsonl").exists()
    # Wrong credentials are refused before packs are opened.
    s3_server.fault = lambda method, path: None
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    assert f"{start.recipe['run_dir']}: PermissionError: " in start("data.packs=none").refusal


def test_a_full_bucket_is_reported_and_the_next_start_stores_the_run(
    run_dir: Path, start: Trainer, s3_server: Server, tmp_path: Path
) -> None:
    """Another machine restores the run and finds it finished."""
    s3_server.fault = lambda method, path: (
        "507 Insufficient Storage" if method == "PUT" and "/checkpoints/" in path else None
    )
    full = start()
    assert full.status == 2, full.output
    warning = r"WARNING  s3://.*Insufficient Storage.* They are complete in runs/s3/"
    assert re.search(warning, full.err)
    assert f"They are complete in {run_dir.relative_to(tmp_path)}; the next save or" in full.err
    s3_server.fault = lambda method, path: None
    start().done()
    StoredRun(start.recipe["run_dir"], tmp_path / "restored").restore()
    assert contents(tmp_path / "restored") == contents(run_dir)
    assert "has been renamed" not in start().output
    shutil.rmtree(tmp_path / "runs")
    again = start()
    assert "this run is already finished" in again.out, again.output


def test_training_does_not_wait_for_a_slow_bucket(
    run_dir: Path, start: Trainer, s3_server: Server
) -> None:
    """Every part of a checkpoint waits until the last step is logged."""
    waited = []

    def slow(method: str, path: str) -> None:
        if method == "PUT" and "/checkpoints/" in path:
            end = time.monotonic() + 60
            while f'"step": {STEPS},' not in (run_dir / "metrics.jsonl").read_text():
                assert time.monotonic() < end, "the run waits for the bucket"
                time.sleep(0.01)
            waited.append(path)

    s3_server.fault = slow
    start().done()
    assert waited


def test_a_second_run_at_the_same_address_ends_the_first(
    start: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second run starts in another folder, as on another machine."""
    first_store = StoredRun._store
    results = []

    def store(stored: StoredRun) -> str:
        if not results:
            results.append(None)
            (tmp_path / "other").mkdir()
            StoredRun(start.recipe["run_dir"], tmp_path / "other").claim()
        return first_store(stored)

    monkeypatch.setattr(StoredRun, "_store", store)
    first = start()
    assert first.status == 2
    assert "another run stores its files there now (process " in first.err


def test_another_training_neither_replaces_nor_is_replaced_by_the_stored_run(
    start: Trainer, run_dir: Path, tmp_path: Path
) -> None:
    """Two machines train at one address. The second begins when the bucket is empty."""
    files, root = fsspec.url_to_fs(start.recipe["run_dir"])
    start().done()
    (tmp_path / "runs").rename(tmp_path / "first")
    files.rm(root, recursive=True)
    start("optimizer.learning_rate=0.02", "train.steps=7").done()
    shutil.rmtree(tmp_path / "runs")
    stored = {name: files.cat_file(name) for name in files.find(root)}
    for is_new in (True, False):
        before = contents(run_dir) if run_dir.exists() else {}
        refusal = start().refusal
        assert "was made by another recipe" in refusal and "learning_rate (was 0.02" in refusal
        assert {name: files.cat_file(name) for name in files.find(root)} == stored
        assert [contents(folder) for folder in run_dir.parent.glob("run-*")] == [before] * bool(
            before
        )
        if is_new:
            shutil.rmtree(tmp_path / "runs")
            (tmp_path / "first").rename(tmp_path / "runs")


def test_a_run_that_went_back_stays_back_after_a_kill(
    start: Trainer, run_dir: Path, s3_server: Server, tmp_path: Path
) -> None:
    start().done()
    shutil.copytree(tmp_path / "runs", tmp_path / "other")
    moment = Moment("logged", "^5$", SIGKILL)
    back = ["--resume", f"{run_dir}/checkpoints/step-00000004"]
    killed = start.process(moment, arguments=back, **s3_server.environment)
    assert killed.end() == -SIGKILL, start.log
    (tmp_path / "runs").rename(tmp_path / "killed")
    files, root = fsspec.url_to_fs(start.recipe["run_dir"])
    # An empty disk, the disk of the killed run, and another machine that has the abandoned steps.
    for number, disk in enumerate((None, "killed", "other"), 2):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        if disk:
            shutil.copytree(tmp_path / disk, tmp_path / "runs")
        assert start.process(moment, **s3_server.environment).end() == -SIGKILL
        assert start.log.count("checkpoints/step-00000004 at step 4") == number, disk
    manifests = [name for name in files.find(root) if name.endswith("/manifest.json")]
    assert manifests == [f"{root}/checkpoints/step-00000004/manifest.json"]
