"""A run on packs that are made while it trains: the same curve when it goes on, on empty disks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM
from typing import Any

import psutil
import pytest

from packing.prepare import prepare
from packing.settings import DataSettings
from tests.conftest import write_recipe
from tests.golden.runs import steps_logged, steps_saved
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
    }
    return small | {
        "data": data
        | {"length": 32, "held_out": 0.05, "streaming": {"disk_gb": 0.0003, "window": 3000}},
        "train": {"steps": STEPS},
        "evaluate": {"every": 15},
        "checkpoint": {"every": 8},
        "parity": "off",
    }


def part_folders(packs: Path) -> list[Path]:
    return [path for path in packs.glob("**/part-*") if path.is_dir()]


def waiting_for_packs(
    recipe: dict[str, Any], folder: Path
) -> tuple[LauncherProcess, psutil.Process]:
    """A run after its third step, and the process that makes its packs, which stands still."""
    changes = {
        "run_dir": str(folder / "run"),
        "train": {"steps": 100_000},
        "checkpoint": {"every": None},
        "evaluate": {},
    }
    data = recipe["data"] | {"packs": str(folder / "packs")}
    # a daemon, as the run is here, starts no processes that tokenise
    prepare(DataSettings(**data), progress=False)
    there = len(part_folders(folder / "packs"))
    run = LauncherProcess(
        [str(write_recipe(recipe | changes | {"data": data}, folder))],
        folder / "log",
        Moment("logged", "^3$"),
    )
    run.wait_until_it_waits()
    # whoever tokenises for the packer has begun
    run.wait_until(lambda: len(part_folders(folder / "packs")) > there)
    packer = next(
        each
        for each in psutil.Process(run.pid).children()
        if "packing.prepare" in " ".join(each.cmdline())
    )
    packer.suspend()
    run.go_on()
    return run, packer


@pytest.mark.parametrize("packer_dies", [False, True])
def test_a_run_without_packs_saves_its_step_when_signalled_or_its_packer_dies(
    packer_dies: bool, recipe: dict[str, Any], tmp_path: Path
) -> None:
    run, packer = waiting_for_packs(recipe, tmp_path)
    if packer_dies:
        packer.kill()
    else:
        run.send_signal(SIGTERM)
    status, output = run.end(), (tmp_path / "log").read_text()
    assert status == (2 if packer_dies else 128 + SIGTERM) and not packer.is_running(), output
    assert (
        output.count("error: ") == packer_dies
        and ("signal 9" in output) == packer_dies
        and "Traceback" not in output
    )
    assert steps_saved(tmp_path / "run") == [steps_logged(tmp_path / "run")]


@pytest.mark.multi
def test_a_streamed_run_goes_on_with_the_same_curve_on_two_machines_with_empty_disks(
    recipe: dict[str, Any], folder: Path, start_here: Callable, start_as_ranks: Callable
) -> None:
    alone = start_here(recipe, folder)  # beyond the end of the text
    unbroken = alone.losses()
    assert alone.status == 0 and len(unbroken) == STEPS, alone.output
    assert (
        sum(path.stat().st_size for path in (folder / "packs").rglob("*") if path.is_file())
        <= 300_000
    )

    # as if it had been killed before
    for checkpoint in sorted((alone.run_dir / "checkpoints").glob("step-*"))[-2:]:
        shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "packs")
    prepare(DataSettings(**recipe["data"] | {"packs": str(folder / "others")}), progress=False)
    ddp = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
    resumed = start_as_ranks(recipe, folder, f"data.packs={folder}/others", launch=ddp)
    assert resumed.status == 0 and "resumed from" in resumed.output, resumed.output
    assert resumed.losses() == pytest.approx(unbroken, rel=1e-5)
