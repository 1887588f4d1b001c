"""Test runs whose packs are made during training: a resume has the same losses.

The disk of the resumed run may be empty.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil
import pytest
import torch

from packing.prepare import prepare
from packing.settings import DataSettings
from tests.conftest import Finished, Trainer, command_here, contents
from tests.golden.runs import losses_changed, steps_logged, steps_saved
from tests.moments import LauncherProcess, Moment

STEPS = 36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    texts = [" ".join(f"w{i * j % 60}" for j in range(i % 40 + 5)) for i in range(240)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return folder


@pytest.fixture(scope="module")
def recipe(
    folder: Path, words: Path, recipe_for: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    small = recipe_for(folder / "run")
    data = {
        "source": str(folder / "texts.jsonl"),
        "tokenizer": str(words),
        "packs": str(folder / "packs"),
        "length": 32,
        "held_out": 0.05,
        "streaming": {"disk_gb": 0.0003, "window": 3000},
    }
    return small | {
        "data": data,
        "train": {"steps": STEPS},
        "evaluate": {"every": 15},
        "checkpoint": {"every": 8},
    }


@pytest.fixture(scope="module")
def alone(recipe: dict[str, Any], folder: Path, start_here: Callable) -> Finished:
    """Finished run without interruption. It reads the documents more than once."""
    finished = start_here(recipe, folder).done()
    assert len(finished.losses()) == STEPS, finished.output
    return finished


def elsewhere(recipe: dict[str, Any], folder: Path, **data: Any) -> dict[str, Any]:
    """Return the recipe with its packs and its run in another folder, and prepare the packs.

    A LauncherProcess is a daemonic process, which may not start tokenizing processes.
    """
    data = recipe["data"] | {"packs": str(folder / "packs")} | data
    prepare(DataSettings(**data), progress=False)
    return recipe | {"data": data, "run_dir": str(folder / "run")}


@pytest.fixture
def train_here(recipe: dict[str, Any], start_here: Callable, tmp_path: Path) -> Trainer:
    """Function that trains the recipe in this test's folder."""
    return Trainer(start_here, elsewhere(recipe, tmp_path), tmp_path)


def part_folders(packs: Path) -> list[Path]:
    # `os.walk` skips a folder that the packer renames meanwhile. `Path.glob` fails.
    folders = (Path(parent, name) for parent, names, _ in os.walk(packs) for name in names)
    return [folder for folder in folders if folder.name.startswith("part-")]


def packer_of(run: LauncherProcess) -> psutil.Process:
    return next(
        child
        for child in psutil.Process(run.pid).children()
        if "packing.follow" in " ".join(child.cmdline())
    )


@pytest.mark.parametrize("packer_dies", [False, True])
def test_a_waiting_run_saves_its_step_when_it_or_its_packer_is_ended(
    packer_dies: bool, train_here: Trainer, tmp_path: Path
) -> None:
    changes = {"train": {"steps": 100_000}, "checkpoint": {"every": None}, "evaluate": {}}
    train_here.recipe |= changes
    first_parts = len(part_folders(tmp_path / "packs"))
    run = train_here.process(Moment("logged", "^3$"))
    run.wait_until_it_waits()
    # When a further part exists, the packer has started its tokenizing processes.
    run.wait_until(lambda: len(part_folders(tmp_path / "packs")) > first_parts)
    packer = packer_of(run)
    # The run waits for packs.
    packer.suspend()
    run.go_on()
    if packer_dies:
        packer.kill()
    else:
        run.send_signal(SIGTERM)
    status = run.end()
    output = train_here.log
    assert status == (2 if packer_dies else 128 + SIGTERM), output
    assert not packer.is_running(), output
    assert output.count("error: ") == packer_dies
    assert "Traceback" not in output
    assert ("signal 9" in output) == packer_dies
    assert steps_saved(train_here.run_dir) == [steps_logged(train_here.run_dir)]


def test_a_killed_run_ends_its_packer_and_resumes_exactly(
    alone: Finished, train_here: Trainer
) -> None:
    moments = (Moment("logged", "^5$"), Moment("logged", "^20$", SIGKILL))
    run = train_here.process(*moments)
    run.wait_until_it_waits()
    packer = packer_of(run)
    run.go_on()
    assert run.end() == -SIGKILL
    packer.wait(60)  # It raises TimeoutExpired if the packer still runs.
    resumed = train_here().done()
    assert "resumed from" in resumed.output, resumed.output
    assert resumed.losses() == alone.losses()


def test_a_streamed_run_is_evaluated_on_a_file(alone: Finished, folder: Path) -> None:
    text = folder / "texts.jsonl"
    assert f"loss on {text} of" in command_here("evaluate", alone.run_dir, text).done().output


def test_a_streamed_run_goes_back_to_parts_that_are_deleted(
    train_here: Trainer, tmp_path: Path
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    is_poisoned = False

    def poison(loss: torch.Tensor) -> torch.Tensor:
        """Return an infinite loss once, in step 31, when the part of step 16 is deleted."""
        nonlocal is_poisoned
        if is_poisoned or not metrics.exists() or steps_logged(metrics.parent) != 30:
            return loss
        records = map(json.loads, metrics.read_text().splitlines())
        part_of_checkpoint = [record["part"] for record in records if "part" in record][15]
        assert part_of_checkpoint > 0  # The first part is never deleted.
        end = time.monotonic() + 60
        name = f"part-{part_of_checkpoint:08d}"
        while name in {path.name for path in part_folders(tmp_path / "packs")}:
            assert time.monotonic() < end
            time.sleep(0.02)
        is_poisoned = True
        return loss * math.inf

    with losses_changed(poison):
        finished = train_here("health.on_nan=rollback", "checkpoint.every=16").done()
    assert len(finished.losses()) == STEPS, finished.output
    [event] = [record for record in finished.records() if record.get("event") == "rollback"]
    assert event["resumed_from"] == 16
    assert event["left_out"] == 31 - 16


@pytest.mark.multi
def test_a_streamed_run_resumes_on_two_ranks_with_an_empty_disk(
    alone: Finished, folder: Path, train_here: Trainer, tmp_path: Path
) -> None:
    assert sum(map(len, contents(folder / "packs").values())) <= 300_000
    run_dir = shutil.copytree(alone.run_dir, tmp_path / "run")
    # Delete two checkpoints, as if the run had been killed earlier.
    for checkpoint in sorted((run_dir / "checkpoints").glob("step-*"))[-2:]:
        shutil.rmtree(checkpoint)
    resumed = train_here(topology="ddp").done()
    assert "resumed from" in resumed.output, resumed.output
    assert resumed.losses() == pytest.approx(alone.losses(), rel=1e-5)


@pytest.mark.multi
def test_a_packers_error_before_the_first_step_ends_all_ranks(
    recipe: dict[str, Any], start_here: Callable, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = Path(recipe["data"]["source"]).read_text().splitlines(keepends=True)
    texts.write_text("".join(lines[:60]) + '{"tixt": "no text"}\n')
    streaming = {"disk_gb": 0.0003, "window": 300}
    recipe = elsewhere(recipe, tmp_path, source=str(texts), streaming=streaming)
    recipe |= {"batch": {"tokens": 2048, "microbatch": 2}}
    ended = start_here(recipe, tmp_path, topology="ddp")
    assert ended.status != 0, ended.output
    assert "texts.jsonl:61: no column `text`" in ended.output, ended.output
    assert "another process has no more packs" in ended.output
    assert "step-0000" not in ended.output


def test_accepted_changes_read_another_stream_from_its_first_pack(
    recipe: dict[str, Any], start_here: Callable, tmp_path: Path
) -> None:
    recipe = elsewhere(recipe, tmp_path) | {"train": {"steps": 4}, "evaluate": {}}
    start_here(recipe, tmp_path).done()
    texts = Path(recipe["data"]["source"]).read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(texts)))
    changed = {"source": str(tmp_path / "other.jsonl"), "packs": str(tmp_path / "other")}
    other = elsewhere(recipe, tmp_path, **changed) | {"train": {"steps": 6}}
    assert "data.fingerprint (was " in start_here(other, tmp_path).err
    accepted = start_here(other, tmp_path, "--accept-changes").done()
    assert len(accepted.losses()) == 6
