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
from tests.conftest import ROOT, contents, write_recipe
from tests.forked_commands import forking
from tests.golden.runs import steps_saved
from tests.moments import WAIT_IN_SAVING

STARTED = [sys.executable, "-m", "pretrain", "matrix"]


class Matrix:
    """A matrix of two cells, whose processes run the `sitecustomize.py` in its folder."""

    def __init__(self, recipe: dict[str, Any], folder: Path, *cells: str, **keys: Any) -> None:
        self.folder = folder
        self.path = folder / "matrix.yaml"
        matrix = {
            "name": "precisions",
            "recipe": str(write_recipe(recipe | {"evaluate": {}}, folder)),
            "accelerate": "accelerate_configs/cpu.yaml",
            "cells": {name: {"precision": name} for name in cells},
            "run_dir": f"{folder}/{{matrix}}/{{cell}}",
        }
        self.path.write_text(yaml.safe_dump(matrix | keys, sort_keys=False))
        self.cells = [folder / "precisions" / name for name in cells]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*STARTED, str(self.path)],
            cwd=ROOT,
            env=forking(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_until_cells_wait(self) -> subprocess.Popen[str]:
        """Start the matrix, and return once all cells wait in saving step 4."""
        (self.folder / "sitecustomize.py").write_text(WAIT_IN_SAVING)
        process = self.start()
        wait_until(process, lambda: len(list(self.folder.glob("waits-*"))) == len(self.cells))
        return process

    def check_finished(self) -> None:
        for cell in self.cells:
            steps = [record["step"] for record in read_metrics(cell) if "loss" in record]
            assert steps == [*range(1, 13)]


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.long
def test_a_stopped_matrix_lets_its_cells_save_and_the_same_command_ends_it(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    matrix = Matrix(small_recipe, tmp_path, "fp32", "bf16", at_once=2)
    process = matrix.start_until_cells_wait()
    process.send_signal(signal.SIGINT)
    logs = [Path(f"{cell}.log") for cell in matrix.cells]
    notice = "SIGINT: finishing this step"
    wait_until(process, lambda: all(notice in log.read_text() for log in logs))
    (tmp_path / "go_on").touch()
    output = process.communicate()[0]
    assert process.returncode == 130, output
    for cell in matrix.cells:
        assert steps_saved(cell)[-1] == read_metrics(cell)[-1]["step"] < 12

    second = matrix.start()
    output = second.communicate()[0]
    assert second.returncode == 0, output
    matrix.check_finished()
    assert "Against fp32, held-out loss, margin ± 0.3 %: bf16 (" in output
    assert (tmp_path / "precisions" / "precisions.html").exists()
    assert "shared their machine with other runs" in output, (
        "speeds of runs at the same time must not be compared"
    )


@pytest.mark.nightly
def test_cells_of_a_killed_matrix_end_before_the_next_start_goes_on(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    matrix = Matrix(small_recipe, tmp_path, "fp32", "bf16", at_once=2)
    process = matrix.start_until_cells_wait()
    _, number, *_ = (tmp_path / "precisions" / ".lock").read_text().split()
    os.kill(int(number), signal.SIGKILL)
    process.wait()
    second = matrix.start()
    assert second.stdout
    assert "fp32, bf16" in second.stdout.readline(), "it waits for both cells"
    (tmp_path / "go_on").touch()
    output = second.communicate()[0]
    assert second.returncode == 0 and "started" not in output, output
    matrix.check_finished()


@pytest.mark.nightly
def test_forked_cells_equal_launched_runs(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """Every cell after the first is forked from a server that has forked another training."""
    changes = {"train": {"steps": 3}, "fp8_config": {"on_unsupported": "emulate"}}
    matrix = Matrix(small_recipe | changes, tmp_path, "current", "bf16")
    assert matrix.start().wait() == 0
    loaded = load_matrix(matrix.path, ())
    for cell in loaded.cells:
        command = launch_of(loaded, cell).command
        launched = tmp_path / "launched" / cell.name
        subprocess.run([*command, f"run_dir={launched}"], check=True, env=forking(), cwd=ROOT)
        assert contents(cell.run_dir).keys() == contents(launched).keys() | {"matrix.json"}
        assert exact_figures(cell.run_dir) == exact_figures(launched)
        for name in ("audit.json", "checkpoints/step-00000003/manifest.json"):
            assert (cell.run_dir / name).read_bytes() == (launched / name).read_bytes()


def exact_figures(folder: Path) -> list[list[float]]:
    """Return the figures of each step that do not depend on the machine's speed."""
    keys = ("step", "loss", "gradient_norm", "held_out_loss")
    return [[record.get(key) for key in keys] for record in read_metrics(folder)]
