"""Test `python -m pretrain matrix` with separate processes for matrix, accelerate and training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.experiments.matrix_file import load_matrix
from lab.experiments.matrix_run import launch_of
from pretrain.metrics.run_record import read_metrics
from tests.forked_commands import forking
from tests.golden.runs import steps_saved
from tests.moments import WAIT_IN_SAVING

ROOT = Path(__file__).parents[2]


def start(path: Path, hook: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pretrain", "matrix", str(path)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=forking(hook),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_a_stopped_matrix_lets_its_cells_save_and_the_same_command_ends_it(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    path, hook = two_cells_that_wait(small_recipe, tmp_path)
    folder = tmp_path / "precisions"
    cells = [folder / cell for cell in ("fp32", "bf16")]
    process = start(path, hook)

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)

    wait_until(lambda: len(list(hook.glob("waits-*"))) == 2)
    process.send_signal(signal.SIGINT)
    notice = "SIGINT: finishing this step"
    wait_until(lambda: all(notice in Path(f"{cell}.log").read_text() for cell in cells))
    (hook / "go_on").touch()
    output = process.communicate()[0]
    assert process.returncode == 130, output
    for cell in cells:
        assert steps_saved(cell)[-1] == read_metrics(cell)[-1]["step"] < 12

    second = start(path, hook)
    output = second.communicate()[0]
    assert second.returncode == 0, output
    for cell in cells:
        assert steps_of(cell) == [*range(1, 13)]
    assert "Against fp32, margin ± 0.3 %: bf16 (" in output
    assert (folder / "precisions.html").exists()
    assert "shared their machine with other runs" in output, (
        "speeds of runs at the same time must not be compared"
    )


def two_cells_that_wait(recipe: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Return a matrix file, and a folder with a hook that lets its cells wait in saving step 4."""
    path = folder / "matrix.yaml"
    hook = folder / "hook"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"evaluate": {}}))
    matrix = {
        "name": "precisions",
        "recipe": str(folder / "recipe.yaml"),
        "accelerate": "accelerate_configs/cpu.yaml",
        "cells": {"fp32": {"precision": "fp32"}, "bf16": {"precision": "bf16"}},
        "run_dir": f"{folder}/{{matrix}}/{{cell}}",
        "at_once": 2,
    }
    path.write_text(yaml.safe_dump(matrix, sort_keys=False))
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(WAIT_IN_SAVING)
    return path, hook


def steps_of(cell: Path) -> list[int]:
    return [record["step"] for record in read_metrics(cell) if "loss" in record]


@pytest.mark.long
def test_cells_of_a_killed_matrix_end_before_the_next_start_goes_on(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    path, hook = two_cells_that_wait(small_recipe, tmp_path)
    process = start(path, hook)
    while len(list(hook.glob("waits-*"))) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    _, number, *_ = (tmp_path / "precisions" / ".lock").read_text().split()
    os.kill(int(number), signal.SIGKILL)
    process.wait()
    second = start(path, hook)
    assert second.stdout
    assert second.stdout.readline() == "0 of 2 cells are already finished\n"
    assert "fp32, bf16" in second.stdout.readline(), "it waits for both cells"
    (hook / "go_on").touch()
    output = second.communicate()[0]
    assert second.returncode == 0 and "started" not in output, output
    for cell in ("fp32", "bf16"):
        assert steps_of(tmp_path / "precisions" / cell) == [*range(1, 13)]


@pytest.mark.long
def test_forked_cells_equal_launched_runs(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """Every cell after the first is forked from a server that has forked another training."""
    recipe = small_recipe | {
        "evaluate": {},
        "train": {"steps": 3},
        "fp8_config": {"on_unsupported": "emulate"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    matrix = {
        "name": "precisions",
        "recipe": str(tmp_path / "recipe.yaml"),
        "accelerate": "accelerate_configs/cpu.yaml",
        "cells": {name: {"precision": name} for name in ("current", "bf16")},
        "run_dir": f"{tmp_path}/forked/{{cell}}",
    }
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump(matrix, sort_keys=False))
    assert start(path, tmp_path).wait() == 0
    for cell in load_matrix(path).cells:
        command = launch_of(load_matrix(path), cell).command
        launched = tmp_path / "launched" / cell.name
        subprocess.run([*command, f"run_dir={launched}"], check=True, env=forking(), cwd=ROOT)
        assert files_of(cell.run_dir) == files_of(launched) | {"matrix.json"}
        assert exact_figures(cell.run_dir) == exact_figures(launched)
        for name in ("audit.json", "checkpoints/step-00000003/manifest.json"):
            assert (cell.run_dir / name).read_bytes() == (launched / name).read_bytes()


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def exact_figures(folder: Path) -> list[list[float]]:
    """Return the figures of each step that do not depend on the machine's speed."""
    keys = ("step", "loss", "gradient_norm", "held_out_loss")
    return [[record.get(key) for key in keys] for record in read_metrics(folder)]
