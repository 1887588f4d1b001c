"""Test `which` and `doctor` on a GPU. Every training of `which` is a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from lab.experiments import which, which_trainings
from lab.experiments.matrix_run import launch_of
from lab.experiments.which_trainings import WhichTrainings
from pretrain.__main__ import main
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.metrics.run_record import read_metrics
from pretrain.precision.selection import support_check_on
from pretrain.precision.settings import PRECISIONS
from pretrain.precision.transformer_engine import unmet_need_of
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT, write_recipe
from tests.gpu.conftest import needs
from tests.pretrain.conftest import QUANTIZED

# Program that imports the modules of the server, and writes the state of a fork to a file.
SERVER = """
import os, sys
from pretrain.launch import preloaded
import torch
if os.fork() == 0:
    with open(sys.argv[1], "w") as file:
        te = "transformer_engine.pytorch" in sys.modules
        print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), te, file=file)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def recipe(low_precision_recipe: dict[str, Any], tmp_path: Path) -> Path:
    """Recipe with one layer that trains for one epoch."""
    recipe = low_precision_recipe | {
        "data": low_precision_recipe["data"] | {"held_out": 0.05},
        "train": {"epochs": 1},
    }
    recipe["batch"] = {"tokens": 128, "microbatch": 1}
    recipe["model"]["config"] |= {"num_hidden_layers": 1}
    for key in ("precision", "fp8_config", "evaluate", "checkpoint", "run_dir"):
        del recipe[key]
    return write_recipe(recipe, tmp_path)


def run_which(recipe: Path, folder: Path, *options: str) -> int:
    command = [str(recipe), "--run_dir", str(folder), "--precisions", "bf16,delayed", *options]
    return which.main(commands.read("which", command))


def test_fork_server_imports_transformer_engine_and_does_not_use_cuda(tmp_path: Path) -> None:
    """CUDA does not work in the forks of a process that has used it."""
    state = tmp_path / "state"
    server = subprocess.run([sys.executable, "-c", SERVER, str(state)], cwd=ROOT)
    assert server.returncode == 0
    assert state.read_text().split() == ["False", "False", "True"]


def test_a_round_measures_speed_memory_and_loss_on_the_hardware(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--hours` allows one round. It takes about 80 s, most of it for four starts."""
    # Earlier tests may hold some memory of the GPU.
    monkeypatch.setattr(which_trainings, "MOST_USED_GIB", 1e3)
    needs("delayed")
    folder = tmp_path / "which"
    assert run_which(recipe, folder, "--steps", "80", "--hours", "0.001") == 1
    verdict = json.loads((folder / "verdict.json").read_text())
    assert list(verdict["protocol"]["seconds"]) == ["bf16", "delayed"]
    candidate = verdict["candidates"]["delayed"]
    assert candidate["speedup"] > 0
    assert candidate["tokens_per_second"] > 0
    assert candidate["memory_gib"] > 0
    (cost,) = candidate["served"]["by_seed"].values()
    assert 0 < abs(cost) < 0.1
    assert not list(folder.glob("rounds/*/checkpoints")), (
        "checkpoints of a finished round are deleted"
    )


def test_forked_trainings_equal_launched_ones(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second training is forked from the process that has forked the first."""
    monkeypatch.setattr(which_trainings, "MOST_USED_GIB", 1e3)
    needs("delayed")
    overrides = ("deterministic=true",)
    loaded = load_recipe(recipe, overrides)
    trainings = WhichTrainings(
        loaded, recipe, overrides, CONFIGURATIONS / "bf16.yaml", tmp_path / "which"
    )
    matrix = trainings.trials(["bf16", "delayed"])
    which_trainings.train(matrix, may_fail=False)
    for cell in matrix.cells:
        launched = tmp_path / "launched" / cell.name
        subprocess.run([*launch_of(matrix, cell).command, f"run_dir={launched}"], check=True)
        runs = [read_metrics(folder) for folder in (cell.run_dir, launched)]
        forked, alone = ([(row["step"], row.get("loss")) for row in rows] for rows in runs)
        assert forked == alone and len(forked) > 12


def test_default_candidates_are_the_precisions_of_the_gpu() -> None:
    unsupported_because = support_check_on("cuda")
    available = [name for name in QUANTIZED if unsupported_because(PRECISIONS[name]) is None]
    heads = [f"{name}+head" for name in available[:1]]
    assert which.default_candidates("fp32") == ["bf16", *(available or ["delayed"]), *heads]


def test_a_gpu_that_other_processes_use_is_refused(recipe: Path, tmp_path: Path) -> None:
    """This process holds 3 GiB of the GPU, which NVML reports."""
    held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(InputError, match="other processes use"):
        run_which(recipe, tmp_path / "which")
    del held


def test_doctor_prints_engines_of_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    available = (name for name in ("current", "mxfp8") if not unmet_need_of(PRECISIONS[name]))
    precisions = ["bf16", "mxfp4", *available]
    assert main(["doctor", "--precisions", ",".join(precisions)]) == 0
    output = capsys.readouterr().out
    assert all(f"\n{name}: " in output for name in precisions)
    assert "Traceback" not in output
    assert "\nmxfp4: emulation; it needs" in output
