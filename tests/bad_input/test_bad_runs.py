"""Run folders, checkpoints and disks that stand in the way: nothing saved is touched, and what was saved can be resumed."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from foundation.errors import InputError
from packing.arrow import Pack, PackWriter
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.trackers import JsonlTracker, cut_back
from tests.bad_input.conftest import contents
from tests.moments import LauncherProcess, Moment


@pytest.fixture
def checkpoints(launch: Callable, small_recipe: dict[str, Any]) -> Path:
    """Those of a run of 8 steps: step 4 and step 8."""
    small_recipe["train"]["steps"] = 8
    assert launch().status == 0
    folder = Path(small_recipe["run_dir"]) / "checkpoints"
    assert sorted(os.listdir(folder)) == ["step-00000004", "step-00000008"]
    return folder


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def weights_of(checkpoint: Path) -> Path:
    return next(checkpoint.glob("model-*.safetensors"))


def test_a_run_folder_that_cannot_be_used_is_refused(refusal, launch, small_recipe, tmp_path):
    run_dir = Path(small_recipe["run_dir"])
    with RunFolder(run_dir):
        message = refusal()
        assert f"{run_dir}: the run folder is in use by process {os.getpid()} on " in message
        assert "set another `run_dir`" in message
        assert launch("--plan").status == 0
    (tmp_path / "file").touch()
    message = refusal(f"run_dir={tmp_path / 'file'}")
    assert re.search(r"file: cannot be used as the run folder: .*; set another `run_dir`", message)


def test_a_checkpoint_of_another_recipe_is_continued_only_if_that_is_accepted(checkpoints, refusal, launch, tmp_path):
    other = tmp_path / "other"
    with PackWriter(other, 32) as writer:
        for _ in range(20):
            writer.add("train", Pack(np.zeros(32, np.uint32), np.array([32], np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    assert "data.fingerprint: saved " in refusal(f"data.packs={other}", "evaluate.every=null")

    message = refusal("optimizer.learning_rate=0.02", "train.steps=10")
    assert f"{checkpoints / 'step-00000008'}: the checkpoint was made by another recipe:" in message
    assert "optimizer.learning_rate: saved 0.01, now 0.02" in message and "train.steps: saved 8, now 10" in message
    assert "another `run_dir`" in message and "--accept-changes" in message and "None" not in message

    continued = launch("optimizer.learning_rate=0.02", "train.steps=10", "--accept-changes")
    assert continued.status == 0
    assert "the recipe has changed: optimizer.learning_rate: saved 0.01, now 0.02" in continued.out + continued.err
    assert (checkpoints / "step-00000010").is_dir()


def test_a_checkpoint_that_was_removed_is_said_not_to_exist_and_the_others_are_listed(checkpoints, refusal):
    gone = checkpoints / "step-00000002"
    said = refusal("--resume", str(gone))
    assert f"{gone}: no such checkpoint" in said and "holds step-00000008, step-00000004" in said


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_without_any_the_run_refuses(checkpoints, refusal, caplog):
    newest, before = checkpoints / "step-00000008", checkpoints / "step-00000004"
    flip_a_bit(weights_of(newest))
    assert re.search(rf"{newest}: cannot be used: model-.*: damaged: .*--resume takes", refusal("--resume", str(newest)))
    assert Checkpoints(checkpoints, keep=3).newest() == before
    assert f"{newest} is DAMAGED and is not used; trying the one before it" in caplog.text

    weights_of(before).unlink()
    message = refusal()
    assert f"{checkpoints}: every checkpoint is damaged" in message and "name another `run_dir`" in message


# ── Disks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    """Write to `path` until its disk is full."""
    with open(path, "wb", buffering=0) as ballast:
        try:
            while ballast.write(bytes(4096)):
                pass
        except OSError:
            return


def test_a_disk_too_small_for_the_checkpoints_is_found_at_the_start(small_disk, launch):
    message = launch(f"run_dir={small_disk / 'run'}", "checkpoint.keep=100", "checkpoint.every=1").refusal
    assert re.search(r"run: checkpoints need .* free.*`checkpoint.keep`.*`run_dir`", message)


def test_metrics_that_no_longer_fit_end_the_run_with_one_message(small_disk):
    metrics = JsonlTracker(small_disk / "metrics.jsonl")
    metrics.start()
    metrics.log({"step": 1, "loss": 2.0})
    fill(small_disk / "ballast")
    with pytest.raises(InputError, match=r"metrics.jsonl: .*No space left on device.*checkpoint.* untouched"):
        for step in range(2, 1000):
            metrics.log({"step": step, "loss": 2.0})
    (small_disk / "ballast").unlink()
    cut_back(metrics.path, last_step=1)
    assert metrics.path.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_metrics_beyond_the_limit_of_a_files_size_say_what_raises_it(tmp_path):
    metrics, (soft, hard) = JsonlTracker(tmp_path / "metrics.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics.start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(InputError, match=r"metrics.jsonl: .*File too large.*untouched. Raise `ulimit -f`, then start"):
            for step in range(1, 100):
                metrics.log({"step": step, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_from_which_the_same_command_goes_on(
    small_disk, small_recipe, tmp_path, launcher_here
):
    steps, run_dir = 12, small_disk / "run"
    changes = {"run_dir": str(run_dir), "train": {"steps": steps}, "checkpoint": {"every": 2, "keep": 1}, "evaluate": {}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small_recipe | changes))
    log = tmp_path / "log"
    process = LauncherProcess([str(path)], log, Moment("logged", "^3$"))  # one checkpoint later
    process.wait_until_it_waits()
    process.wait_until((run_dir / "checkpoints" / "step-00000002").is_dir)  # its thread may not be through
    fill(small_disk / "ballast")
    process.go_on()
    assert process.end() == 2
    said = log.read_text().partition("error: ")[2]
    assert "No space left on device" in said and said.count("\n") == 1 and "start the same command again" in said, said

    saved = Checkpoints(run_dir / "checkpoints", keep=1).newest()
    assert saved is not None
    (small_disk / "ballast").unlink()
    status, printed, said = launcher_here(str(path))
    assert status == 0 and f"resumed from {saved}" in printed, said
    assert (run_dir / "checkpoints" / f"step-{steps:08d}").is_dir() and (run_dir / "final" / "model.safetensors").is_file()


def test_a_finished_run_is_started_again_on_a_full_disk(small_disk, small_recipe, tmp_path, launcher_here):
    path, run_dir = tmp_path / "recipe.yaml", small_disk / "run"
    path.write_text(yaml.safe_dump(small_recipe | {"run_dir": str(run_dir), "checkpoint": {"keep": 1}, "parity": "off"}))
    assert launcher_here(str(path))[0] == 0
    before = contents(run_dir)
    fill(small_disk / "ballast")
    status, printed, said = launcher_here(str(path))
    assert status == 0 and "run: done" in printed and said == "", said
    assert contents(run_dir) == before
