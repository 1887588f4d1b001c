"""The launcher while a checkpoint is being written behind it: it trains on, waits where it must, and says what has failed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM

import pytest

from benchmarks.kill_resume import left_behind, write_packs, write_recipe
from pretrain.checkpoint.folders import step_folders, step_of
from pretrain.metrics.run_record import read_metrics
from tests.conftest import over
from tests.moments import LauncherProcess, Moment

NAMING = Moment("os.rename", r"/step-00000008$")  # the thread waits there, with everything written
OPENING = Moment("open", r"/\.partial-step-00000008/optimizer-")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("behind")
    return write_recipe(folder, "qwen3", write_packs(folder / "packs"))


@pytest.fixture
def started(recipe: Path, tmp_path: Path) -> Callable[..., LauncherProcess]:
    """A run of 24 steps that saves every 8, held at `moment` of writing; further settings as on the command line."""
    settings = ["train.steps=24", "evaluate.every=100", "checkpoint.every=8", f"run_dir={tmp_path / 'run'}"]

    def start(moment: Moment, *arguments: str) -> LauncherProcess:
        process = LauncherProcess([str(recipe), *over(settings, *arguments)], tmp_path / "log", moment)
        process.wait_until_it_waits()
        return process

    return start


def steps_done(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir) if "loss" in record]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(step_of(path) for path in step_folders(run_dir / "checkpoints"))


def test_steps_go_on_while_a_checkpoint_is_written_until_the_next_is_due(started: Callable, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = started(NAMING)
    process.wait_until(lambda: max(steps_done(run_dir)) == 16)  # nothing but the thread is held
    assert saved_steps(run_dir) == [] and not (run_dir / "checkpoints" / ".partial-step-00000016").exists()
    process.go_on()
    assert process.end() == 0, (tmp_path / "log").read_text()
    assert steps_done(run_dir) == list(range(1, 25)) and saved_steps(run_dir) == [16, 24]  # the recipe keeps two
    assert left_behind(run_dir)["partial_files"] == []


def test_a_save_that_fails_is_said_after_the_step_in_hand_and_ends_the_run(started: Callable, tmp_path: Path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    process = started(OPENING)
    shutil.rmtree(run_dir / "checkpoints" / ".partial-step-00000008")
    process.go_on()
    assert process.end() == 2
    output = log.read_text()
    assert output.count("error: ") == 1 and "Traceback" not in output
    assert "the checkpoint of step 8 could not be saved: No such file or directory" in output
    assert 8 <= max(steps_done(run_dir)) <= 16 and saved_steps(run_dir) == []


def test_a_signal_waits_for_the_checkpoint_under_way_and_saves_its_own_step_too(started: Callable, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = started(NAMING)
    process.send_signal(SIGTERM)
    process.wait_until(lambda: "SIGTERM" in (tmp_path / "log").read_text())
    process.go_on()
    assert process.end() == 128 + SIGTERM
    first, second = saved_steps(run_dir)
    assert first == 8 and second == max(steps_done(run_dir))


def test_a_run_that_halts_leaves_the_checkpoint_that_was_being_written(started: Callable, tmp_path: Path):
    run_dir = tmp_path / "run"
    diverging = ("optimizer.learning_rate=1e30", "optimizer.weight_decay=0", "schedule.warmup=0")
    process = started(Moment("os.rename", r"/step-00000001$"), "checkpoint.every=1", *diverging)
    process.wait_until(lambda: "halted" in (run_dir / "metrics.jsonl").read_text())
    process.go_on()
    assert process.end() == 3
    assert saved_steps(run_dir) == [1], "and nothing after the loss that is no number"
