"""What `pretrain.compare.matrix` does around its runs; real trainings are in tests/launcher/test_matrix_run.py."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare.matrix import write_report
from pretrain.compare.matrix_run import StartedCell, command_of, environment_on, mark, next_of
from tests.conftest import ROOT
from tests.pretrain.compare.made_runs import leave_behind, rows_of


def test_a_run_that_ever_shared_its_machine_stays_marked(matrix):
    found = matrix(axes={"weights": ["fp32"]})
    [cell] = found.cells
    for side_by_side, marked in ((False, False), (True, True), (False, True)):
        mark(found.settings.name, cell, side_by_side=side_by_side)
        assert json.loads((cell.run_dir / "matrix.json").read_text())["side_by_side"] == marked


def test_a_cell_has_ended_when_nothing_of_its_group_runs_any_more(matrix):
    """As when `accelerate launch` is signalled, and goes while its trainer is still saving."""
    [cell] = matrix(axes={"weights": ["fp32"]}).cells
    cell.log.parent.mkdir()
    one = StartedCell(cell, ["sh", "-c", "sleep 600 & exit 0"], os.environ, None)
    one.process.wait()
    assert not one.has_ended()
    one.signal(signal.SIGTERM)
    deadline = time.monotonic() + 120
    while not one.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    one.signal(signal.SIGTERM)  # to nobody: no error


def test_a_cell_sees_the_gpus_of_its_slot_of_those_that_we_see(
    matrix, monkeypatch: pytest.MonkeyPatch
):
    found = matrix(axes={"weights": ["fp32"]}, gpus=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [environment_on(found, slot)["CUDA_VISIBLE_DEVICES"] for slot in (None, 0, 1)] == [
        "3,5",
        "3",
        "5",
    ]
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES names 2"):
        environment_on(found, 2)


def test_cells_of_several_processes_get_as_many_gpus_each(matrix, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = matrix(
        axes={"weights": ["fp32", "bf16"]},
        accelerate=str(ROOT / "accelerate_configs" / "ddp.yaml"),
        gpus=8,
        processes=3,
    )
    assert (found.slots, found.at_once) == (2, 2), "two GPUs are left over"
    assert [environment_on(found, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == [
        "0,1,2",
        "3,4,5",
    ]
    command = command_of(found, found.cells[0])
    assert command[command.index("--num_processes") + 1] == "3" and command.index(
        "--num_processes"
    ) < command.index("weights=fp32")


def test_a_cell_waits_for_the_checkpoint_of_another_with_which_it_begins(matrix):
    made, begins = matrix(axes={"precision": ["fp32", "bf16"]}).cells
    checkpoint = made.run_dir / "checkpoints" / "step-00000004"
    train = begins.recipe.train.model_copy(update={"begin_with": str(checkpoint)})
    begins = replace(begins, recipe=begins.recipe.model_copy(update={"train": train}))
    assert next_of([begins, made], alone=True) is made
    assert next_of([begins], alone=False) is None
    assert next_of([begins], alone=True) is begins, (
        "nothing will make it any more, and it says what it lacks"
    )
    checkpoint.mkdir(parents=True)
    assert next_of([begins, made], alone=False) is begins


@pytest.mark.parametrize(
    "data",
    [
        {"packs": "nowhere"},
        {"packs": "p", "source": "a.txt", "tokenizer": "nowhere", "held_out": 0.1},
    ],
)
def test_no_cell_is_started_where_one_lacks_its_data(data, matrix, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    matrix(overrides={f"data.{key}": value for key, value in data.items()})
    assert main(["matrix", "m.yaml"]) == 2
    assert "nowhere" in capsys.readouterr().err and not list(tmp_path.glob("runs/*.log"))


# ── The report ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_finished_cells_are_best_first_by_held_out_loss_below_the_baseline(matrix):
    found = matrix(
        axes={
            "optimizer.learning_rate": [0.01, 0.02, 0.03],
            "weights": ["fp32", "bf16"],
            "seed": [1],
        }
    )
    assert "nothing to report" in write_report(found)
    for cell, held_out in zip(found.cells[:4], (2.5, 2.258, 2.25, None), strict=True):
        leave_behind(cell, held_out=held_out)
    leave_behind(found.cells[4], 5, held_out=1.0, done=False)
    rows = [
        name for name in rows_of(write_report(found)) if name in {cell.name for cell in found.cells}
    ]
    assert rows == [found.cells[place].name for place in (0, 1, 2, 3)], (
        "the baseline first, and equals as they come"
    )
    assert "2 of 6 cells are not finished" in write_report(found)


def test_the_baselines_other_seeds_stand_for_one_that_is_not_finished(matrix):
    found = matrix(
        axes={"seed": [1, 2, 3, 4], "weights": ["fp32", "bf16"]}, baseline={"weights": "fp32"}
    )
    for cell in found.cells[1:]:
        leave_behind(cell)
    said = write_report(found)
    assert said.startswith("Against fp32 over 3 seeds") and "stands in its place" not in said
    for cell in found.cells[2::2]:
        (cell.run_dir / "summary.json").unlink()
    said = write_report(found)
    assert "The baseline seed=1-fp32 is not finished: seed=1-bf16 stands in its place." in said
