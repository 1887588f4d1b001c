"""`python -m pretrain matrix`: cells that fail, finish, are stopped and go on, each a launcher under accelerate."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.checkpoint.folders import step_folders, step_of
from pretrain.compare import matrix_cell
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import read_metrics
from tests.ranks import ForkedLaunch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def matrix_file(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """A matrix of two cells over the small recipe, in FP32 and BF16 on the CPU."""
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "matrix.yaml"
    recipe.write_text(yaml.safe_dump(small_recipe))

    def write(**keys: Any) -> Path:
        values = {"name": "precisions", "recipe": str(recipe), "accelerate": "accelerate_configs/cpu.yaml"}
        values |= {"axes": {"precision": ["fp32", "bf16"]}, "run_dir": f"{tmp_path}/{{matrix}}/{{cell}}"} | keys
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return path

    return write


# Found by every Python that has its folder in PYTHONPATH: a trainer that has saved step 4 waits until the test lets it go on.
WAIT_IN_SAVING = """
import os, sys, time
from pathlib import Path
here = Path(__file__).parent
def watch(event, values):
    if event == "os.rename" and str(values[1]).endswith("step-00000004"):
        (here / f"waits-{os.getpid()}").touch()
        while not (here / "go_on").exists():
            time.sleep(0.01)
sys.addaudithook(watch)
"""


def start(path: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment = ours | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "pretrain", "matrix", str(path), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def run_here(capfd, monkeypatch):
    """The command in this process, its cells in their own, which are forked: exit status and output."""

    def call(path, *arguments):
        monkeypatch.setattr(matrix_cell, "subprocess", SimpleNamespace(Popen=ForkedLaunch, STDOUT=subprocess.STDOUT))
        monkeypatch.chdir(ROOT)
        for variable in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            monkeypatch.delenv(variable)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        capfd.readouterr()
        status = main(["matrix", str(path), *arguments])
        return status, "".join(capfd.readouterr())

    return call


def last_step(run_dir: Path) -> int:
    try:
        return read_metrics(run_dir)[-1]["step"]
    except (InputError, IndexError):  # not begun
        return 0


@pytest.mark.long
def test_a_stopped_matrix_lets_its_cells_save_and_goes_on_though_one_fails(matrix_file, tmp_path, run_here):
    """One matrix from its first start to its report. The first start is all real: matrix, accelerate and trainers."""
    path, folder = matrix_file(at_once=2, overrides={"evaluate.every": None}), tmp_path / "precisions"
    cells = [folder / cell for cell in ("fp32", "bf16")]
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(WAIT_IN_SAVING)
    process = start(path, PYTHONPATH=str(hook))

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)

    # Stopped: both save.
    wait_until(lambda: len(list(hook.glob("waits-*"))) == 2)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: all("SIGINT: finishing this step" in Path(f"{cell}.log").read_text() for cell in cells))
    (hook / "go_on").touch()
    output = process.communicate()[0]
    assert process.returncode == 130, output
    assert "SIGINT: passed on to fp32, bf16" in output and "stopped; the same command goes on" in output
    for cell in cells:
        saved, *_ = step_folders(cell / "checkpoints")
        assert step_of(saved) == last_step(cell) < 12
        RunFolder(cell).close()  # would raise if anything were still running there

    # One fails: the other goes on from there, and finishes.
    stopped_at = last_step(folder / "fp32")
    with RunFolder(folder / "fp32"):  # somebody else is training there
        status, output = run_here(path)
    assert status == 1, output
    assert "fp32: failed" in output and "exit status 2" in output and f"the last of {folder / 'fp32.log'}" in output
    assert f"the run folder is in use by process {os.getpid()}" in output
    assert "bf16: finished" in output and "1 of 2 cells are not finished" in output
    assert last_step(folder / "bf16") == 12 and last_step(folder / "fp32") == stopped_at

    # What failed is run again, alone.
    trained = (folder / "bf16" / "metrics.jsonl").stat().st_mtime_ns
    status, output = run_here(path)
    assert status == 0, output
    assert "1 of 2 cells are finished already" in output
    assert (folder / "bf16" / "metrics.jsonl").stat().st_mtime_ns == trained, "left alone"
    for cell in cells:
        assert [record["step"] for record in read_metrics(cell) if "loss" in record] == list(range(1, 13))
    assert output.index("Best first:") < output.index("| 1 |") < output.index("| 2 |")
    page = (folder / "precisions.md").read_text()
    assert "| run  | minus fp32, all |" in page and page.partition("\n\n![")[0] in output
    assert "shared its machine with others" in page, "what ran side by side has no speed of its own"
    assert (folder / "precisions.png").exists()


def test_a_dry_run_prints_commands_that_check_out_and_starts_nothing(matrix_file, tmp_path, launcher_here, run_here):
    status, output = run_here(matrix_file(), "--dry-run", "--only", "precision=bf16", "train.steps=5")
    assert status == 0 and not (tmp_path / "precisions").exists()
    heading, command = output.splitlines()
    assert heading == "# bf16" and "train.steps=5 precision=bf16 run_dir=" in command
    accelerate, _, arguments = command.partition(" train_accelerate.py ")
    assert "accelerate.commands.launch" in accelerate and accelerate.endswith("--config_file accelerate_configs/cpu.yaml")
    status, planned, said = launcher_here(*shlex.split(arguments), "--plan")
    assert status == 0 and "5 steps" in planned, said
