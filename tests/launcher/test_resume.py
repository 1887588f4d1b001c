"""Runs that are killed, stopped, damaged or sent back, and end as the run that was left alone.

Kills at random moments, under `accelerate launch`, are in benchmarks/kill_resume.py, whose training and comparison these tests
share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1

import pytest

from benchmarks.kill_resume import differences, left_behind, write_packs, write_recipe
from pretrain.checkpoint.folders import step_folder, step_folders, step_of
from pretrain.metrics.run_record import read_metrics
from tests.moments import LauncherProcess, Moment

ROOT = Path(__file__).resolve().parents[2]
STEPS = 44
# A step has 8 packs, two microbatches; the 300 packs of an epoch end within step 38.
SETTINGS = [f"train.steps={STEPS}", "batch.tokens=512", "evaluate.every=10", "checkpoint.every=8", "checkpoint.keep=3"]


@dataclass(frozen=True)
class Training:
    """One recipe, and runs of it in folders of their own."""

    recipe: Path
    folder: Path
    launcher_here: Callable[..., tuple[int, str, str]]

    def arguments(self, run_dir: Path, *more: str) -> list[str]:
        return [str(self.recipe), f"run_dir={run_dir}", *SETTINGS, *more]

    def start(self, run_dir: Path, *moments: Moment) -> LauncherProcess:
        return LauncherProcess(self.arguments(run_dir), self.log(run_dir), *moments)

    def run(self, run_dir: Path, *arguments: str) -> tuple[int, str]:
        """Exit status and output of the launcher, run to its end in this process."""
        status, out, err = self.launcher_here(*self.arguments(run_dir, *arguments))
        return status, out + err

    def log(self, run_dir: Path) -> Path:
        return self.folder / f"{run_dir.name}.log"

    @property
    def alone(self) -> Path:
        """The run that nothing happened to; made on first use."""
        run_dir = self.folder / f"{self.recipe.stem}-alone"
        if not run_dir.exists():
            status, output = self.run(run_dir)
            assert status == 0, output
        return run_dir


@pytest.fixture(scope="module", params=["qwen3", "gpt2_with_dropout"])
def either(request: pytest.FixtureRequest, folder: Path, launcher_here: Callable) -> Training:
    return Training(write_recipe(folder, request.param, folder / "packs"), folder, launcher_here)


@pytest.fixture(scope="module")
def gpt2(folder: Path, launcher_here: Callable) -> Training:
    """With dropout: a run that goes on with other random numbers is another run."""
    return Training(write_recipe(folder, "gpt2_with_dropout", folder / "packs"), folder, launcher_here)


@pytest.fixture(scope="module")
def qwen3(folder: Path, launcher_here: Callable) -> Training:
    return Training(write_recipe(folder, "qwen3", folder / "packs"), folder, launcher_here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_packs(folder / "packs")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def last_step(run_dir: Path) -> int:
    return read_metrics(run_dir)[-1]["step"] if (run_dir / "metrics.jsonl").exists() and read_metrics(run_dir) else 0


def saved_as_logged(run_dir: Path) -> int:
    """The step of the newest checkpoint, which must be the last in metrics.jsonl, and short of the horizon."""
    saved = step_of(step_folders(run_dir / "checkpoints")[0])
    assert saved == last_step(run_dir) < STEPS
    return saved


def finished_copy(training: Training, run_dir: Path, without: tuple[int, ...] = ()) -> Path:
    """The run left alone, copied to `run_dir` without its exported model and the checkpoints of these steps."""
    shutil.copytree(training.alone, run_dir)
    shutil.rmtree(run_dir / "final")
    for step in without:
        shutil.rmtree(step_folder(run_dir / "checkpoints", step))
    return run_dir


# ── Killed ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


# Where a run is killed, one start after the other, and what must then be there: the newest checkpoint, and the last step logged,
# or what came before it in a thread: training goes on while a checkpoint is written, at most until the next one is due.
KILLS = {
    "qwen3": [
        (Moment("os.rename", r"/config\.yaml$", SIGKILL), 0, None),  # starting
        (Moment("logged", "^13$", SIGKILL), 13, 8),  # among steps
        (Moment("os.rename", r"/step-00000024$", SIGKILL), 24, 16),  # saving: whole, but not named
        (Moment("open", r"/\.partial-step-00000032/state.json$", SIGKILL), 32, 24),  # saving: all tensors, no manifest
    ],
    "gpt2_with_dropout": [
        (Moment("open", r"/\.partial-step-00000008/optimizer-", SIGKILL), 8, None),  # saving: the first of all, half written
        (Moment("shutil.rmtree", r"/\.removed-step-00000008$", SIGKILL), 32, 32),  # pruning
        (Moment("os.rename", r"/\.final\.writing$", SIGKILL), STEPS, STEPS),  # exporting
    ],
}


def test_a_run_killed_again_and_again_equals_the_run_left_alone(either: Training, run_dir: Path):
    for moment, step, saved in KILLS[either.recipe.stem]:
        assert either.start(run_dir, moment).end() == -SIGKILL, either.log(run_dir).read_text()
        found = left_behind(run_dir)  # exits if a checkpoint is not whole
        assert found["checkpoints"][:1] == ([] if saved is None else [f"step-{saved:08d}"])
        assert step <= found["last_step_logged"] <= (step if moment.event == "logged" else min(step + 8, STEPS))
        assert found["partial_files"] or moment.event == "logged", "files were half written"
    status, output = either.run(run_dir)
    assert status == 0, output
    assert differences(either.alone, run_dir) == []
    assert left_behind(run_dir)["partial_files"] == []


# ── Stopped ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_stopped_twice_saves_each_time_and_goes_on_as_if_it_had_not_been(gpt2: Training, run_dir: Path):
    # While it trains a step, and while a checkpoint is written behind it: a step or more later.
    for moment, step in ((Moment("logged", "^3$", SIGHUP), 3), (Moment("os.rename", "/step-00000008$", SIGINT), 8)):
        gpt2.log(run_dir).unlink(missing_ok=True)
        assert gpt2.start(run_dir, moment).end() == 128 + moment.signal
        output = gpt2.log(run_dir).read_text()
        stopped_at = saved_as_logged(run_dir)
        assert f"{moment.signal.name} after step {stopped_at};" in output and "Traceback" not in output
        assert stopped_at == step if moment.event == "logged" else stopped_at >= step
    assert "at step 3" in output, "the second went on from where the first had stopped"
    assert step_folder(run_dir / "checkpoints", 8).exists(), "what was being written was waited for"
    status, output = gpt2.run(run_dir)
    assert status == 0 and f"at step {stopped_at}" in output
    assert differences(gpt2.alone, run_dir) == []


def test_a_signal_while_the_last_step_is_saved_loses_nothing_of_it(gpt2: Training, run_dir: Path):
    finished_copy(gpt2, run_dir, without=(STEPS,))
    assert gpt2.start(run_dir, Moment("os.rename", f"/step-{STEPS:08d}$", SIGTERM)).end() == 128 + SIGTERM
    output = gpt2.log(run_dir).read_text()
    assert f"stopped by SIGTERM after step {STEPS}, the last one" in output and "Traceback" not in output
    assert step_of(step_folders(run_dir / "checkpoints")[0]) == STEPS and not (run_dir / "final").exists()
    status, output = gpt2.run(run_dir)
    assert status == 0 and f"at step {STEPS}" in output
    assert differences(gpt2.alone, run_dir) == []


def test_a_run_whose_terminal_is_gone_still_saves_when_stopped(qwen3: Training, run_dir: Path, tmp_path: Path):
    """`2>&1 | tee log`: Ctrl-C ends tee first, and every later write of the run fails."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    tee = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = LauncherProcess(qwen3.arguments(run_dir), pipe, Moment("logged", "^3$"))
    process.wait_until_it_waits()
    os.close(tee)
    process.send_signal(SIGINT)
    process.go_on()
    assert process.end() == 130
    assert saved_as_logged(run_dir) == 3


def test_ctrl_c_while_starting_ends_the_process_without_a_traceback(qwen3: Training, run_dir: Path):
    """In an interpreter of its own, as a user starts it, once torch is imported."""
    program = "import os, runpy, signal, sys\n"
    program += "sys.addaudithook(lambda event, args: event == 'import' and args[0] == 'accelerate' and os.kill(os.getpid(), 2))\n"
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", f"import sys; del sys.argv[0]\n{program}", "train_accelerate.py", *qwen3.arguments(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-SIGINT, "", "")


# ── Damaged, sent back, repeated, changed ─────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_leads_to_the_same_end(gpt2: Training, run_dir: Path):
    newest = step_folders(finished_copy(gpt2, run_dir) / "checkpoints")[0]
    file = next(newest.glob("optimizer-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    status, output = gpt2.run(run_dir)
    assert status == 0, output
    assert f"{newest} is DAMAGED" in output and file.name in output and "at step 40" in output
    assert differences(gpt2.alone, run_dir) == []
    assert newest.with_name(f"{newest.name}.replaced-1").exists(), "the damaged one is set aside, not deleted"


def test_only_the_newest_checkpoints_are_kept(qwen3: Training):
    assert [step_of(path) for path in step_folders(qwen3.alone / "checkpoints")] == [44, 40, 32]


@pytest.mark.parametrize("own", [True, False])
def test_a_run_sent_back_sets_later_checkpoints_aside_and_repeats_the_same_curve(own: bool, gpt2: Training, run_dir: Path):
    checkpoints = finished_copy(gpt2, run_dir) / "checkpoints"
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_bytes()
    status, output = gpt2.run(run_dir, "--resume", str((run_dir if own else gpt2.alone) / "checkpoints" / "step-00000032"))
    assert status == 0, output
    assert metrics.with_name("metrics.jsonl.replaced-1").read_bytes() == whole, "the abandoned steps are kept"
    assert f"{metrics} holds steps after 32, which are abandoned; they are kept in metrics.jsonl.replaced-1" in output
    assert {path.name for path in checkpoints.glob("*.replaced-1")} == {f"step-{step:08d}.replaced-1" for step in (40, 44)}
    assert differences(gpt2.alone, run_dir) == []


def test_a_checkpoint_set_aside_does_not_go_on_with_the_curve_that_came_after_it(gpt2: Training, run_dir: Path):
    checkpoints = finished_copy(gpt2, run_dir) / "checkpoints"
    aside = (checkpoints / "step-00000040").rename(checkpoints / "step-00000040.replaced-1")
    metrics = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    next(line for line in lines if line["step"] == 40 and "event" not in line)["loss"] += 0.5
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, output = gpt2.run(run_dir, "--resume", str(aside))
    assert status != 0 and f"{aside}: is of another run than the steps in {metrics}" in output


def test_a_run_that_goes_on_from_a_checkpoint_set_aside_has_it_as_the_one_of_its_step(gpt2: Training, run_dir: Path):
    """Which a resume takes that comes before the next save, and a rollback."""
    checkpoints = finished_copy(gpt2, run_dir) / "checkpoints"
    other, aside = checkpoints / "step-00000040", checkpoints / "step-00000040.replaced-1"
    shutil.copytree(other, aside)
    (other / "of the other training").touch()
    status, output = gpt2.run(run_dir, "--resume", str(aside))
    assert status == 0, output
    assert f"resumed from {aside} at step 40" in output and f"{aside} is this run's again, as {other.name}" in output
    assert not (other / "of the other training").exists() and not aside.exists()
    assert (checkpoints / f"{other.name}.replaced-2" / "of the other training").exists(), "nothing that was saved is lost"
    assert differences(gpt2.alone, run_dir) == []


def test_a_finished_run_started_again_does_what_a_kill_left_undone_and_changes_nothing_else(qwen3: Training, run_dir: Path):
    """Killed between its last save and its last evaluation: neither that nor the exported model is there."""
    metrics = finished_copy(qwen3, run_dir) / "metrics.jsonl"
    whole = metrics.read_bytes()
    *before, evaluation = whole.splitlines(keepends=True)
    assert b"held_out_loss" in evaluation
    metrics.write_bytes(b"".join(before))
    status, output = qwen3.run(run_dir)
    assert status == 0, output
    assert metrics.read_bytes() == whole
    assert differences(qwen3.alone, run_dir) == []


def test_another_microbatch_may_take_over_and_sums_to_the_same_losses(qwen3: Training, run_dir: Path):
    finished_copy(qwen3, run_dir, without=(40, 44))
    status, output = qwen3.run(run_dir, "batch.microbatch=8")
    assert status == 0 and "at step 32" in output
    losses = [[record["loss"] for record in read_metrics(path) if "loss" in record] for path in (qwen3.alone, run_dir)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[1][:32] == losses[0][:32] and len(losses[1]) == STEPS


# ── Two at once ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_launcher_on_the_same_run_folder_is_refused_and_the_first_goes_on(qwen3: Training, run_dir: Path):
    first = qwen3.start(run_dir, Moment("logged", "^3$"), Moment("logged", "^6$", SIGTERM))
    first.wait_until_it_waits()
    status, output = qwen3.run(run_dir)
    first.go_on()
    assert first.end() == 128 + SIGTERM
    assert status == 2 and re.search(rf"in use by process {first.pid}\b", output) and "Traceback" not in output
    assert saved_as_logged(run_dir) == 6


def test_a_run_whose_hours_are_over_saves_and_says_so_in_its_status(qwen3: Training) -> None:
    """The process is older than the limit from the beginning, so it ends after one step, and another start does one more."""
    run_dir, status_file = qwen3.folder / "hours", qwen3.folder / "hours.status"
    for step in (1, 2):
        process = LauncherProcess(
            qwen3.arguments(run_dir, "train.max_hours=1e-9"), qwen3.log(run_dir), PRETRAIN_STATUS_FILE=str(status_file)
        )
        assert process.end() == 128 + SIGUSR1 and status_file.read_text() == "138\n"
        assert f"stopped by `train.max_hours: 1e-09` after step {step}; start the run again" in qwen3.log(run_dir).read_text()
    assert [step_of(folder) for folder in step_folders(run_dir / "checkpoints")] == [2, 1]
