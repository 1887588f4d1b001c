"""Running and reporting a matrix without trainings. tests/launcher/test_matrix_run.py trains."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace

import pytest

from foundation.errors import InputError
from foundation.signals import StopRequest
from lab.experiments import matrix_run
from lab.experiments.matrix import NO_PAGE, page_of, write_report
from lab.experiments.matrix_run import (
    StartedCell,
    devices_of,
    launch_of,
    mark,
    next_of,
    run_all,
    start,
)
from pretrain.__main__ import main
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.metrics.run_folder import RunFolder
from pretrain.optimizer.schedule import fit_to_command_line
from tests.lab.made_runs import append, leave_behind, rows_of


def test_a_run_that_ever_shared_its_machine_stays_marked(matrix):
    loaded = matrix(axes={"weights": ["fp32"]})
    [cell] = loaded.cells
    for side_by_side, marked in ((False, False), (True, True), (False, True)):
        mark(loaded.settings.name, cell, side_by_side=side_by_side)
        assert json.loads((cell.run_dir / "matrix.json").read_text())["side_by_side"] == marked


def test_a_cell_gets_one_gpu_per_process(matrix, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matrix_run, "visible_gpus", lambda: [*"13579"])
    ddp = {"accelerate": str(CONFIGURATIONS / "ddp.yaml"), "axes": {"weights": ["fp32", "bf16"]}}
    loaded = matrix(**ddp, gpus=5, processes=2)
    assert (loaded.slots, loaded.at_once) == (2, 2), "one GPU remains unused"
    devices = [devices_of(loaded, slot) for slot in (None, 0, 1)]
    assert devices == [{}, {"CUDA_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "5,7"}]
    command = launch_of(loaded, loaded.cells[0]).command
    option = command.index("--num_processes")
    assert command[option + 1] == "2" and option < command.index("weights=fp32")
    with pytest.raises(InputError, match="`gpus: 6`: only 5 GPUs can be used"):
        run_all(matrix(**ddp, gpus=6), loaded.cells, StopRequest())


@pytest.mark.parametrize(
    ("busy", "expected"), [(True, ["1", "0", "1", "0"]), (False, ["1", "1", "0", "0"])]
)
def test_each_seed_begins_with_another_gpu(
    busy: bool, expected: list[str], matrix, monkeypatch: pytest.MonkeyPatch
):
    """Either the previous cell is still running, or none."""
    gpus = []
    monkeypatch.setattr(matrix_run, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(
        matrix_run,
        "start_training",
        lambda launch, environment, *_: gpus.append(environment["CUDA_VISIBLE_DEVICES"]),
    )
    axes = {"seed": [3, 4], "weights": ["fp32", "bf16"]}
    loaded = matrix(axes=axes, accelerate=str(CONFIGURATIONS / "bf16.yaml"), gpus=2)
    running: list[StartedCell] = []
    for cell in loaded.cells:
        started = start(loaded, cell, running, side_by_side=False)
        running = [started] if busy else []
    assert gpus == expected


def test_a_branch_waits_for_the_checkpoint_of_another_cell(matrix):
    source, branch = matrix(axes={"precision": ["fp32", "bf16"]}).cells
    checkpoint = source.run_dir / "checkpoints" / "step-00000004"
    train = branch.recipe.train.model_copy(update={"begin_with": str(checkpoint)})
    branch = replace(branch, recipe=branch.recipe.model_copy(update={"train": train}))
    assert next_of([branch, source], alone=True) is source
    assert next_of([branch], alone=False) is None
    assert next_of([branch], alone=True) is branch, "no cell will write the checkpoint"
    checkpoint.mkdir(parents=True)
    assert next_of([branch, source], alone=False) is branch


@pytest.mark.parametrize(
    "data",
    [
        {"packs": "nowhere"},
        {"packs": "p", "source": "a.txt", "tokenizer": "nowhere", "held_out": 0.1},
        None,
    ],
)
def test_no_cell_starts_without_its_data_or_in_a_folder_of_others(
    data, matrix, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = matrix(overrides={f"data.{key}": value for key, value in (data or {}).items()})
    if data is None:
        loaded.cells[-1].run_dir.mkdir(parents=True)
        (loaded.cells[-1].run_dir / "nowhere.txt").write_text("years of work")
    assert main(["matrix", "m.yaml"]) == 2
    assert "nowhere" in capsys.readouterr().err and not list(tmp_path.rglob("*.log"))


@pytest.mark.parametrize("content", ["", "[]", "[" * 5000], ids=["empty", "list", "deep"])
def test_no_cell_starts_if_the_mark_of_one_is_damaged(content, matrix, tmp_path, capsys):
    last = matrix().cells[-1]
    last.run_dir.mkdir(parents=True)
    last.mark.write_text(content)
    assert main(["matrix", str(tmp_path / "m.yaml")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {last.mark}: ") and message.count("\n") == 1
    last.mark.unlink()
    os.mkfifo(last.log)
    assert main(["matrix", str(tmp_path / "m.yaml")]) == 2
    assert f"error: {last.log}: " in capsys.readouterr().err


def test_a_second_command_of_a_matrix_is_pointed_to_at_once(matrix, tmp_path, capsys):
    with RunFolder(matrix().folder):
        assert main(["matrix", str(tmp_path / "m.yaml")]) == 2
    error = capsys.readouterr().err
    assert "/runs: the folder is in use by process" in error and "set --at-once" in error


# ── The report ────────────────────────────────────────────────────────────────────────────────────


def test_finished_cells_are_ranked_by_held_out_loss(matrix, monkeypatch: pytest.MonkeyPatch):
    rates = [0.01, 0.02, 0.03]
    loaded = matrix(axes={"optimizer.learning_rate": rates, "weights": ["fp32", "bf16"]})
    assert "There is no report" in write_report(loaded)
    for cell, held_out in zip(loaded.cells[:4], (2.5, 2.25, 2.254, None), strict=True):
        leave_behind(cell, held_out=held_out)
    leave_behind(loaded.cells[4], 5, held_out=1.0, done=False)
    names = [cell.name for cell in loaded.cells]
    rows = [name for name in rows_of(write_report(loaded)) if name in names]
    assert rows == names[:4], "the baseline is first"
    text = write_report(loaded)
    assert text.startswith(f"Lowest held-out loss: 2.2500, {names[1]}.\n")
    assert text.endswith(f"Not finished, and so not in this report: {', '.join(names[4:])}.")
    page = page_of(loaded)
    assert f"Written: {page}" in text
    append(loaded.cells[4].run_dir, {"step": 5, "event": "halted", "reason": "NaN"})
    with_halted = write_report(loaded)
    assert with_halted.startswith(text.splitlines()[0]) and names[4] in rows_of(with_halted)
    shutil.rmtree(loaded.cells[4].run_dir)
    page.unlink()
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if the package were not installed
    assert write_report(loaded) == text.replace(f"Written: {page}", NO_PAGE) and not page.exists()


def test_cells_with_shortened_schedules_are_compared(matrix):
    schedule = {"schedule.kind": "wsd", "schedule.warmup": 4}
    loaded = matrix(axes={"train.steps": [12, 4]}, overrides=schedule)
    for cell in loaded.cells:
        steps = cell.recipe.train.steps
        recipe, _ = fit_to_command_line(cell.recipe, cell.overrides, steps)
        leave_behind(replace(cell, recipe=recipe), steps, held_out=2.0)
        mark("m", cell, side_by_side=False)
    assert set(rows_of(write_report(loaded))) >= {cell.name for cell in loaded.cells}


def test_no_cell_is_the_best_if_they_were_evaluated_on_different_data(matrix):
    loaded = matrix(axes={"evaluate.packs": [2, 4]})
    for cell, held_out in zip(loaded.cells, (2.5, 2.25), strict=True):
        leave_behind(cell, held_out=held_out)
    report = write_report(loaded)
    assert "Lowest" not in report and "were evaluated on other data than the baseline" in report
