"""What `pretrain.compare.matrix` does around its runs; real trainings are in tests/launcher/test_matrix_run.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare.matrix import next_of, ranking, write_report
from pretrain.compare.matrix_cell import StartedRun, command_of, environment_on, least_busy, mark
from pretrain.compare.matrix_file import Matrix, MatrixRun, load_matrix
from pretrain.settings.config import resolved

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("blank_curves")


@pytest.fixture
def matrix(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Matrix]:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small_recipe | {"precision": "bf16"}))

    def load(axes: dict[str, list[Any]], **keys: Any) -> Matrix:
        values = {
            "name": "m",
            "recipe": str(tmp_path / "recipe.yaml"),
            "accelerate": str(ROOT / "accelerate_configs" / "cpu.yaml"),
        }
        values |= {"axes": axes, "run_dir": f"{tmp_path}/runs/{{cell}}"} | keys
        (tmp_path / "m.yaml").write_text(yaml.safe_dump(values))
        return load_matrix(tmp_path / "m.yaml")

    return load


def leave_behind(cell: MatrixRun, loss: float | None, *, held_out: float | None = None, done: bool = True) -> None:
    """The files of a run of `cell` that has come to its end, or, not `done`, to its fifth step."""
    cell.run_dir.mkdir(parents=True)
    last = 12 if done else 5
    lines = [{"step": step, "tokens": 256 * step, "epoch": 0.1, "loss": loss, "step_ms": 10.0} for step in range(1, last + 1)]
    if held_out is not None:
        evaluated = {"held_out_loss": held_out, "held_out_perplexity": 2.7, "held_out_tokens": 320}
        lines.append({"step": last, "event": "evaluation"} | evaluated)
    (cell.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (cell.run_dir / "config.yaml").write_text(yaml.safe_dump(resolved(cell.recipe)))
    if done:
        (cell.run_dir / "summary.json").write_text(json.dumps({"steps": last}))
    (cell.run_dir / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12"}))


def started(cell: MatrixRun, script: str, *, slot: int | None = None) -> StartedRun:
    """A cell whose processes are a shell script's."""
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    return StartedRun(cell, process, slot, cell.log.with_suffix(".status"), log_begins=0)


def rows(table: str) -> list[list[str]]:
    """The cells of a table in Markdown, without its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:] if line.startswith("|")]


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


def test_cells_are_spread_over_the_gpus_that_we_see_one_gpu_a_cell(matrix, monkeypatch: pytest.MonkeyPatch):
    found = matrix({"weights": ["fp32"]}, gpus=3)
    [cell] = found.runs
    running: list[StartedRun] = []
    for _ in range(5):
        running.append(started(cell, "true", slot=least_busy(2, running)))
    assert [one.slot for one in running] == [0, 1, 0, 1, 0] and least_busy(2, running[1:3]) == 0 and least_busy(None, []) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [environment_on(found, slot)["CUDA_VISIBLE_DEVICES"] for slot in (None, 0, 1)] == ["3,5", "3", "5"]
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES names 2, which is fewer; lower `gpus`"):
        environment_on(found, 2)


def test_cells_of_several_processes_get_as_many_gpus_each(matrix, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = matrix({"weights": ["fp32", "bf16"]}, accelerate=str(ROOT / "accelerate_configs" / "ddp.yaml"), gpus=8, processes=3)
    assert (found.slots, found.at_once) == (2, 2), "two GPUs are left over"
    assert [environment_on(found, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["0,1,2", "3,4,5"]
    command = command_of(found, found.runs[0])
    assert command[command.index("--num_processes") + 1] == "3" and command.index("--num_processes") < command.index(
        "weights=fp32"
    )


def test_a_cell_waits_for_the_checkpoint_of_another_with_which_it_begins(matrix):
    made, begins = matrix({"precision": ["fp32", "bf16"]}).runs
    checkpoint = made.run_dir / "checkpoints" / "step-00000004"
    train = begins.recipe.train.model_copy(update={"begin_with": str(checkpoint)})
    begins = replace(begins, recipe=begins.recipe.model_copy(update={"train": train}))
    assert next_of([begins, made], []) is made
    assert next_of([begins], [made]) is None
    assert next_of([begins], []) is begins, "nothing will make it any more, and it says what it lacks"
    checkpoint.mkdir(parents=True)
    assert next_of([begins, made], []) is begins
    assert next_of([], [made]) is None
    checkpoint.rmdir()
    relative = replace(made, run_dir=Path(os.path.relpath(made.run_dir)))
    assert next_of([begins, relative], []) is relative


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cells_are_best_first_by_held_out_loss_with_every_key_that_was_varied(matrix):
    found = matrix({"optimizer.learning_rate": [0.01, 0.02, 0.03], "weights": ["fp32", "bf16"], "seed": [1]})
    assert "6 of 6 cells have not begun" in ranking(found, found.runs)
    for cell, held_out in zip(found.runs[:4], (2.5, 2.25, 2.75, None), strict=True):
        leave_behind(cell, 2.0, held_out=held_out)
    leave_behind(found.runs[4], 1.0, held_out=1.0, done=False)
    table = ranking(found, found.runs)
    assert table.splitlines()[0].split()[1:6:2] == ["#", "optimizer.learning_rate", "weights"], "seed is the same in all"
    assert [row[:6] for row in rows(table)] == [
        ["1", "0.01", "bf16", "2.2500", "2.0000 (of 12)", "12"],
        ["2", "0.01", "fp32", "2.5000", "2.0000 (of 12)", "12"],
        ["3", "0.02", "fp32", "2.7500", "2.0000 (of 12)", "12"],
        ["4", "0.02", "bf16", "–", "2.0000 (of 12)", "12"],
        ["5", "0.03", "fp32", "1.0000", "1.0000 (of 5)", "5, not finished"],
    ]
    assert "1 of 6 cells have not begun" in table
    assert len(rows(best := ranking(found, found.runs, best=2))) == 2 and "3 more" in best
    assert len(rows(ranking(found, found.only(["weights=bf16"])))) == 2


def test_figures_of_another_training_in_a_cells_folder_are_not_shown_as_the_cells(matrix, tmp_path, capsys):
    found = matrix({"seed": [1, 2]})
    for cell in found.runs:
        leave_behind(cell, 2.0, held_out=2.0)
    assert main(["matrix", str(tmp_path / "m.yaml"), "--table", "optimizer.weight_decay=0.5"]) == 0
    out = capsys.readouterr().out
    assert "2.0000" not in out and "seed=1, seed=2" in out and "`optimizer.weight_decay`: 0.5 and 0.1" in out
    leave_behind(matrix({"seed": [3]}).runs[0], 3.0)
    third = matrix({"seed": [1, 3]}, overrides={"train.steps": 12})
    table = ranking(third, third.runs)
    assert [row[1] for row in rows(table)] == ["1", "3"], "what is the same training is shown"


def test_cells_without_a_finite_loss_come_last_and_other_text_is_said(matrix, tmp_path):
    for other_text, axis in ((True, "evaluate.packs"), (False, "seed")):  # as the report tells it: not every seed is other text
        found = matrix({axis: [1, 2, 3]}, run_dir=f"{tmp_path}/{axis}/{{cell}}")
        for cell, loss in zip(found.runs, (None, 3.0, 2.0), strict=True):
            leave_behind(cell, loss, held_out=loss)
        table = ranking(found, found.runs)
        assert [row[1] for row in rows(table)] == ["3", "2", "1"] and ("different text" in table) == other_text


def test_the_report_is_over_the_finished_cells_against_the_baseline(matrix):
    found = matrix({"weights": ["fp32", "bf16", "bf16_exact"]})
    assert "nothing to report" in write_report(found)
    for cell, loss in zip(found.runs[:2], (2.0, 2.25), strict=True):
        leave_behind(cell, loss)
    said = write_report(found)
    assert "minus fp32" in said and "+0.2500" in said and "1 of 3 cells are not finished" in said
    assert {"m.md", "m.png"} <= {path.name for path in found.folder.iterdir()}


def test_a_cell_of_which_a_seed_was_halted_has_no_mean_of_the_others(matrix):
    found = matrix({"seed": [1, 2, 3, 4], "weights": ["fp32", "bf16"]})
    for cell in found.runs:
        lost = cell.values == {"seed": 4, "weights": "bf16"}
        leave_behind(cell, 2.0, done=not lost)
        if lost:
            metrics = cell.run_dir / "metrics.jsonl"
            *steps, last = metrics.read_text().splitlines()
            metrics.write_text("\n".join([*steps, json.dumps(json.loads(last) | {"halted": "the loss is nan"})]) + "\n")
    said = write_report(found)
    assert "broke off: 1 run of 4: bf16" in said and "are not finished" not in said


def test_the_baselines_other_seeds_stand_for_one_that_is_not_finished(matrix):
    found = matrix({"seed": [1, 2, 3, 4], "weights": ["fp32", "bf16"]})
    for cell in found.runs[1:]:
        leave_behind(cell, 2.0)
    said = write_report(found)
    assert said.startswith("Against fp32 over 3 seeds") and "stands in its place" not in said
    for cell in found.runs[2::2]:
        (cell.run_dir / "summary.json").unlink()
    said = write_report(found)
    assert said.startswith("bf16 over 4 seeds")
    assert "The baseline seed=1-fp32 is not finished: seed=1-bf16 stands in its place." in said


def test_no_axis_of_the_matrix_leaves_a_cell_out_of_the_report(matrix):
    found = matrix({"optimizer.learning_rate": [0.01, 0.02], "weights": ["fp32", "bf16"]})
    for cell in found.runs:
        leave_behind(cell, 2.0)
    said = write_report(found)
    assert "is left out:" not in said and all(f"| {cell.name} " in said for cell in found.runs)


def test_a_matrix_with_seeds_as_an_axis_ends_with_their_comparison(matrix, tmp_path, capsys):
    compared = matrix({"weights": ["bf16", "fp32"], "seed": [1, 2, 3]}, baseline={"weights": "fp32"})
    assert compared.baseline.name == "seed=1-fp32" or compared.baseline.name == "fp32-seed=1", "the baseline is all of its seeds"
    for cell in compared.runs:
        loss = 2.0 + cell.recipe.seed / 10 + (0.5 if cell.recipe.weights == "bf16" else 0.0)
        leave_behind(cell, 3.0, held_out=loss)
    assert main(["matrix", str(tmp_path / "m.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "Against fp32 over 3 seeds, within 0.3 %: worse: bf16." in printed and "Best first" not in printed
    assert {"m.png", "m.md", "m.html"} <= {path.name for path in compared.folder.iterdir()}
