"""What `pretrain.compare.matrix` does around its runs; real trainings are in tests/launcher/test_matrix_run.py."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from pretrain.compare.matrix import StartedRun, environment_on, least_busy, mark, write_report
from pretrain.compare.matrix_file import Matrix, MatrixRun, load_matrix
from pretrain.settings.config import resolved

ROOT = Path(__file__).parents[3]


@pytest.fixture
def matrix(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Matrix]:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small_recipe))

    def load(axes: dict[str, list[Any]]) -> Matrix:
        values = {
            "name": "m",
            "recipe": str(tmp_path / "recipe.yaml"),
            "accelerate": str(ROOT / "accelerate_configs" / "cpu.yaml"),
        }
        values |= {"axes": axes, "run_dir": f"{tmp_path}/runs/{{cell}}"}
        (tmp_path / "m.yaml").write_text(yaml.safe_dump(values))
        return load_matrix(tmp_path / "m.yaml")

    return load


def leave_behind(cell: MatrixRun, loss: float) -> None:
    """The files of a run of `cell` that has come to its end."""
    cell.run_dir.mkdir(parents=True)
    lines = [{"step": step, "tokens": 256 * step, "epoch": 0.1, "loss": loss, "step_ms": 10.0} for step in range(1, 13)]
    (cell.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (cell.run_dir / "config.yaml").write_text(yaml.safe_dump(resolved(cell.recipe)))
    (cell.run_dir / "summary.json").write_text(json.dumps({"data_fingerprint": "ab12"}))


def started(cell: MatrixRun, script: str, *, gpu: int | None = None, log_begins: int = 0) -> StartedRun:
    """A cell whose processes are a shell script's."""
    return StartedRun(cell, subprocess.Popen(["sh", "-c", script], start_new_session=True), gpu=gpu, log_begins=log_begins)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_that_ever_shared_its_machine_stays_marked(matrix):
    found = matrix({"weights": ["fp32"]})
    [cell] = found.runs
    for side_by_side, marked in ((False, False), (True, True), (False, True)):
        mark(found, cell, side_by_side=side_by_side)
        content = json.loads((cell.run_dir / "matrix.json").read_text())
        assert content == {"matrix": "m", "cell": {"weights": "fp32"}, "side_by_side": marked}


def test_a_cell_has_ended_when_nothing_of_its_group_runs_any_more(matrix):
    """As when `accelerate launch` is signalled, and goes while its trainer is still saving."""
    one = started(matrix({"weights": ["fp32"]}).runs[0], "sleep 600 & exit 0")
    one.process.wait()
    assert not one.has_ended()
    one.signal(signal.SIGTERM)
    wait_until(one.has_ended)
    one.signal(signal.SIGTERM)  # to nobody: no error


def test_the_last_words_of_a_cell_are_those_since_this_start(matrix):
    cell = matrix({"weights": ["fp32"]}).runs[0]
    cell.log.parent.mkdir(parents=True)
    before = "error: of an earlier start\n"
    cell.log.write_text(before + "".join(f"line {i}\n" for i in range(30)))
    words = started(cell, "true", log_begins=len(before)).end_of_log()
    assert words == [f"line {i}" for i in range(18, 30)]


def test_cells_are_spread_over_the_gpus_that_we_see_one_gpu_a_cell(matrix, monkeypatch: pytest.MonkeyPatch):
    [cell] = matrix({"weights": ["fp32"]}).runs
    running: list[StartedRun] = []
    for _ in range(5):
        running.append(started(cell, "true", gpu=least_busy(2, running)))
    assert [one.gpu for one in running] == [0, 1, 0, 1, 0] and least_busy(2, running[1:3]) == 0 and least_busy(None, []) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [environment_on(gpu)["CUDA_VISIBLE_DEVICES"] for gpu in (None, 0, 1)] == ["3,5", "3", "5"]
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES names 2, which is fewer; lower `gpus`"):
        environment_on(2)


def test_the_report_is_over_the_finished_cells_against_the_baseline(matrix):
    found = matrix({"weights": ["fp32", "bf16", "bf16_exact"]})
    assert "nothing to report" in write_report(found)
    for cell, loss in zip(found.runs[:2], (2.0, 2.25), strict=True):
        leave_behind(cell, loss)
    said = write_report(found)
    assert "minus fp32" in said and "+0.2500" in said and "1 of 3 cells are not finished" in said
    assert {"m.md", "m.png"} <= {path.name for path in found.folder.iterdir()}


def test_no_axis_of_the_matrix_leaves_a_cell_out_of_the_report(matrix):
    found = matrix({"optimizer.learning_rate": [0.01, 0.02], "weights": ["fp32", "bf16"]})
    for cell in found.runs:
        leave_behind(cell, 2.0)
    said = write_report(found)
    assert "left out" not in said and all(f"| {cell.name} " in said.partition("\n\n")[0] for cell in found.runs)
