"""What `pretrain.compare.matrix` does around its runs; real trainings are in tests/launcher/test_matrix_run.py."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from foundation.signals import StopRequest
from packing.store import open_packs
from pretrain.__main__ import main
from pretrain.compare.matrix import Hours, next_of, require_beginnings, run_all, write_report
from pretrain.compare.matrix_cell import StartedRun, command_of, environment_on, least_busy, mark, status_file
from pretrain.compare.matrix_file import Matrix, MatrixRun, load_matrix
from pretrain.compare.ranking import OTHER_TEXT, Ranking
from pretrain.compare.report import EMULATED
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
        (cell.run_dir / "summary.json").write_text(json.dumps({"data_fingerprint": "ab12", "steps": last}))


def started(cell: MatrixRun, script: str, *, slot: int | None = None, log_begins: int = 0, **environment: str) -> StartedRun:
    """A cell whose processes are a shell script's."""
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True, env=os.environ | environment)
    return StartedRun(cell, process.pid, process, slot=slot, log_begins=log_begins)


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


def test_a_cell_writes_nothing_into_somebody_elses_folder(matrix):
    found = matrix({"weights": ["fp32"]})
    folder = found.runs[0].run_dir
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds thesis\.tex and is no run folder"):
        StartedRun.start(found, found.runs[0], None, side_by_side=False)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


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


def test_cells_side_by_side_on_a_cpu_share_its_cores(matrix, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert environment_on(matrix({"weights": ["fp32"]}, at_once=3), None)["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in environment_on(matrix({"weights": ["fp32"]}), None), "as accelerate chooses"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert environment_on(matrix({"weights": ["fp32"]}, at_once=3), None)["OMP_NUM_THREADS"] == "1", "the user's word"


def test_what_a_killed_matrix_left_running_is_found_and_waited_for(matrix):
    found = matrix({"weights": ["fp32", "bf16"]})
    first, second = found.runs
    left = started(first, "sleep 600", PRETRAIN_STATUS_FILE=str(status_file(first)))
    again = StartedRun.found(found, first)
    assert again.group == left.group and not again.has_ended() and StartedRun.found(found, second) is None
    again.signal(signal.SIGTERM)
    wait_until(lambda: left.process.poll() is not None and again.has_ended())
    assert again.exit_status() is None and StartedRun.found(found, first) is None


def test_a_run_of_other_settings_that_was_found_running_is_said_to_be_of_these(matrix, tmp_path: Path, capsys):
    found = matrix({"seed": [1]})
    [cell] = found.runs
    leave_behind(cell, 2.0)
    started(cell, 'sleep 0.3; echo 0 > "$PRETRAIN_STATUS_FILE"', PRETRAIN_STATUS_FILE=str(status_file(cell)))
    changed = matrix({"seed": [1]}, overrides={"optimizer.learning_rate": 0.5})
    with StopRequest(passed_on=True) as stop:
        [outcome] = run_all(changed, changed.runs, stop, Ranking(changed))
    assert (outcome.status, outcome.exit_status) == ("failed", 0)
    said = capsys.readouterr().out
    assert "came to its end with other settings (now, and then): `optimizer.learning_rate`: 0.5 and " in said
    assert "  | " not in said, "nor the log of a run that went well"


def test_a_matrix_starts_nothing_in_place_of_what_still_runs(matrix, tmp_path: Path):
    found = matrix({"seed": [1, 2, 3]}, at_once=2)
    for cell in found.runs[1:]:
        started(cell, f"until test -e {tmp_path}/end; do sleep 0.05; done", PRETRAIN_STATUS_FILE=str(status_file(cell)))
    leave_behind(found.runs[0], 2.0)
    said = io.StringIO()

    def end_what_runs() -> None:
        try:
            wait_until(lambda: said.getvalue().count("is running still, started by a matrix that has ended") == 2)
        finally:
            (tmp_path / "end").touch()

    watching = threading.Thread(target=end_what_runs)
    watching.start()
    with StopRequest(passed_on=True) as stop, redirect_stdout(said):
        outcomes = run_all(found, found.runs, stop, Ranking(found))
    watching.join()
    assert [outcome.status for outcome in outcomes] == ["finished before", "failed", "failed"], "they trained nothing"
    assert said.getvalue().count("is running still, started by a matrix that has ended") == 2
    assert "started; its output" not in said.getvalue()


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


def test_a_cell_whose_beginning_nothing_will_make_is_refused_with_the_cell_to_train_first(matrix, tmp_path: Path, capsys):
    checkpoints = tmp_path / "runs" / "origin" / "checkpoints"
    begins = {"precision": "bf16", "train.begin_with": f"{checkpoints}/step-00000004"}
    found = matrix({}, groups=[{"cells": {"branch": begins, "plain": {"precision": "bf16"}, "origin": {"precision": "fp32"}}}])
    runs, file = {run.name: run for run in found.runs}, str(found.path)

    def refused(*options: str) -> str:
        assert main(["matrix", file, *options]) == 2
        assert not Path(f"{runs['branch'].run_dir}.log").exists(), "nothing is started"
        return capsys.readouterr().err

    lacks = f"m.yaml, cell branch: `train.begin_with`: {checkpoints}/step-00000004 of cell origin is not there"
    index = list(runs).index("origin")
    first = f"{lacks}; train that cell first (`--cell {index}`), or wait where it is training"
    assert first in refused("--cell", str(list(runs).index("branch")))
    assert "train that cell first (which `--only` leaves out)" in refused("--only", "cell=branch", "--only", "cell=plain")
    require_beginnings(found, found.runs, found.runs)  # where the origin is still to be trained

    leave_behind(runs["origin"], 2.0)
    (checkpoints / "step-00000012").mkdir(parents=True)
    assert f"{lacks}: it is finished, and has kept step-00000012; name one of these" in refused()
    own = runs["branch"].run_dir / "checkpoints" / "step-00000008"
    own.mkdir(parents=True)
    require_beginnings(found, found.runs, found.runs)  # where it goes on from a checkpoint of its own
    own.rmdir()
    (checkpoints / "step-00000004").mkdir()
    require_beginnings(found, found.runs, found.runs)


def test_when_the_hours_are_over_what_runs_is_told_and_nothing_else_is_started(matrix, capsys):
    found = matrix({"seed": [1, 2, 3]}, at_once=1, max_hours=1e-9)
    left = started(found.runs[1], "sleep 600", PRETRAIN_STATUS_FILE=str(status_file(found.runs[1])))
    with StopRequest(passed_on=True) as stop:
        outcomes = run_all(found, found.runs, stop, Ranking(found))
    assert [outcome.status for outcome in outcomes] == ["not started", "stopped", "not started"]
    assert left.process.wait() == -signal.SIGTERM and "`max_hours: 1e-09` are over" in capsys.readouterr().out


def test_the_hours_of_a_matrix_are_over_once():
    now = [0.0]
    hours = Hours(0.5, clock=lambda: now[0])
    assert not hours.over and not hours.just_over()
    now[0] = 1800.0
    assert hours.just_over() and not hours.just_over() and hours.over
    assert not Hours(None).over


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cells_are_best_first_by_held_out_loss_with_every_key_that_was_varied(matrix):
    found = matrix({"optimizer.learning_rate": [0.01, 0.02, 0.03], "weights": ["fp32", "bf16"], "seed": [1]})
    ranking = Ranking(found)
    assert ranking.table() == "No cell has trained a step yet."
    for cell, held_out in zip(found.runs[:4], (2.5, 2.25, 2.75, None), strict=True):
        leave_behind(cell, 2.0, held_out=held_out)
    leave_behind(found.runs[4], 1.0, held_out=1.0, done=False)
    table = ranking.table()
    assert table.splitlines()[0].split()[1:6:2] == ["#", "optimizer.learning_rate", "weights"], "seed is the same in all"
    assert [row[:6] for row in rows(table)] == [
        ["1", "0.01", "bf16", "2.2500", "2.0000", "12"],
        ["2", "0.01", "fp32", "2.5000", "2.0000", "12"],
        ["3", "0.02", "fp32", "2.7500", "2.0000", "12"],
        ["4", "0.02", "bf16", "–", "2.0000", "12"],
        ["5", "0.03", "fp32", "1.0000", "1.0000", "5, not finished"],
    ]
    assert "1 of 6 cells have not begun" in table
    assert len(rows(ranking.table(best=2))) == 2 and "3 more" in ranking.table(best=2)


def test_a_table_of_chosen_cells_has_these_alone(matrix, tmp_path, capsys):
    found = matrix({"seed": [1, 2], "weights": ["fp32", "bf16"]})
    for cell in found.runs[:3]:
        leave_behind(cell, 2.0, held_out=2.0)
    for options, cells in ((["--only", "weights=bf16"], [["1", "bf16"]]), (["--cell", "0"], [["1", "fp32"]])):
        assert main(["matrix", str(tmp_path / "m.yaml"), "--table", *options]) == 0
        out = capsys.readouterr().out
        assert [row[1:3] for row in rows(out)] == cells and ("1 of 2 cells have not begun" in out) == ("--only" in options)


def test_figures_of_another_training_in_a_cells_folder_are_not_shown_as_the_cells(matrix, tmp_path, capsys):
    found = matrix({"seed": [1, 2]})
    for cell in found.runs:
        leave_behind(cell, 2.0, held_out=2.0)
    assert main(["matrix", str(tmp_path / "m.yaml"), "--table", "optimizer.weight_decay=0.5"]) == 0
    out = capsys.readouterr().out
    assert "2.0000" not in out and "of other settings: seed=1, seed=2" in out
    assert f"{found.runs[0].run_dir} (now, and then): `optimizer.weight_decay`: 0.5 and 0.1; give the `key=value`" in out
    leave_behind(matrix({"seed": [3]}).runs[0], 3.0)
    table = Ranking(matrix({"seed": [1, 3]}, overrides={"train.steps": 12})).table()
    assert [row[1] for row in rows(table)] == ["1", "3"], "what is the same training is shown"


def test_a_cell_that_sets_no_value_for_a_varied_key_shows_its_recipes(matrix):
    found = matrix({"seed": [1, 2]}, cells=[{"optimizer.learning_rate": 0.5}])
    for cell in found.runs:
        leave_behind(cell, 2.0, held_out=2.0 + found.runs.index(cell))
    assert [row[1:3] for row in rows(Ranking(found).table())] == [["1", "0.01"], ["2", "0.01"], ["42", "0.5"]]


def test_cells_without_a_finite_loss_come_last_and_other_text_is_said(matrix, tmp_path):
    for other_text, axis in ((True, "evaluate.packs"), (False, "seed")):  # as the report tells it: not every seed is other text
        found = matrix({axis: [1, 2, 3]}, run_dir=f"{tmp_path}/{axis}/{{cell}}")
        for cell, loss in zip(found.runs, (None, 3.0, 2.0), strict=True):
            leave_behind(cell, loss, held_out=loss)
        table = Ranking(found).table()
        assert [row[1] for row in rows(table)] == ["3", "2", "1"] and (OTHER_TEXT in table) == other_text


def test_where_the_report_cannot_be_written_the_cells_are_ranked_all_the_same(matrix, tmp_path, capsys):
    for cell in matrix({"seed": [1, 2]}).runs:
        leave_behind(cell, 2.0)
    (tmp_path / "runs" / "m.png").symlink_to("x" * 250)  # which leaves no room for the name of what is written first
    assert main(["matrix", str(tmp_path / "m.yaml")]) == 2
    out, err = capsys.readouterr()
    assert f"error: {tmp_path / 'runs' / 'm.png'}: cannot be written" in err and "| 2 | 2 " in out.partition("Best first:")[2]


@pytest.mark.parametrize("name", ["m.png", "m.md", "m.html"])
def test_a_report_that_would_be_written_over_another_file_is_refused_before_any_cell_starts(name, matrix, tmp_path, capsys):
    leave_behind(matrix({"seed": [1]}).runs[0], 2.0)
    theirs, arguments = tmp_path / "runs" / name, ["matrix", str(tmp_path / "m.yaml")]
    theirs.write_text("what I think of these runs")
    matrix({"seed": [1, 2]})
    assert main(arguments) == 2 and not (tmp_path / "runs" / "seed=2").exists()
    said = f"error: {arguments[1]}, its report {theirs}: is a file that no command here has written, so it is not written over"
    assert said in capsys.readouterr().err and theirs.read_text() == "what I think of these runs"
    matrix({"seed": [1]})  # which is finished
    theirs.unlink()
    for _ in range(2):
        assert main(arguments) == 0 and theirs.stat().st_size > 0


def run_at(cell: MatrixRun, speed: float | None) -> None:
    """The files of a finished run of `cell` that was so fast, in tokens/s."""
    leave_behind(cell, 2.0)
    lines = [json.loads(line) for line in (cell.run_dir / "metrics.jsonl").read_text().splitlines()]
    with_speed = [line | ({"tokens_per_second": speed} if speed else {}) for line in lines]
    (cell.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in with_speed))


def test_where_speed_is_looked_for_the_fastest_cell_comes_first(matrix):
    found = matrix({"seed": [1, 2, 3]})
    for cell, speed in zip(found.runs, (30.0, None, 90.0), strict=True):
        run_at(cell, speed)
    assert [row[1] for row in rows(Ranking(found, by_speed=True).table())] == ["3", "1", "2"]


def test_an_emulated_speed_is_marked_in_the_table_of_cells(matrix):
    found = matrix({"seed": [1, 2]})
    run_at(found.runs[0], 30.0)
    assert EMULATED not in Ranking(found).table()
    run_at(found.runs[1], 90.0)
    (found.runs[1].run_dir / "audit.json").write_text(json.dumps({"backend": "emulation"}))
    table = Ranking(found).table()
    assert [row[-1] for row in rows(table)] == ["30", "90 (emulated)"] and EMULATED in table


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
        trained_on = open_packs(cell.recipe.data, "train").fingerprint
        (cell.run_dir / "environment.json").write_text(json.dumps({"data_fingerprint": trained_on}))
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
        trained_on = open_packs(cell.recipe.data, "train").fingerprint
        (cell.run_dir / "environment.json").write_text(json.dumps({"data_fingerprint": trained_on}))
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
    assert "left out" not in said and all(f"| {cell.name} " in said.partition("\n\n")[0] for cell in found.runs)
