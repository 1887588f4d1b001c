"""Runs that are killed, stopped, damaged or sent back, and end as the run that was left alone.

Twenty kills under `accelerate launch` are in benchmarks/kill_resume.py, whose training and comparison these tests share.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.kill_resume import differences, kill_in, left_behind, start, write_packs, write_recipe
from pretrain.checkpoint.checkpoint import step_folder, step_folders, step_of
from pretrain.metrics.run_record import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
SETTINGS = [f"train.steps={STEPS}", "evaluate.every=10", "checkpoint.every=8", "checkpoint.keep=3"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STARTUP_SECONDS = 2.0  # kills in the start-up fall within these


@dataclass(frozen=True)
class Training:
    """One recipe, and runs of it in folders of their own."""

    recipe: Path
    folder: Path
    launcher_here: Callable[..., tuple[int, str, str]]

    def command(self, run_dir: Path, *arguments: str) -> list[str]:
        return [sys.executable, "train_accelerate.py", str(self.recipe), f"run_dir={run_dir}", *SETTINGS, *arguments]

    def start(self, run_dir: Path, *arguments: str) -> subprocess.Popen[bytes]:
        return start(self.command(run_dir, *arguments), self.log(run_dir), ONE_THREAD)

    def run(self, run_dir: Path, *arguments: str) -> tuple[int, str]:
        """Exit status and output of the launcher, run to its end in this process."""
        status, out, err = self.launcher_here(*self.command(run_dir, *arguments)[2:])
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


def wait_for_steps(process: subprocess.Popen[bytes], run_dir: Path, beyond: int = 0) -> int:
    """Wait until metrics.jsonl goes beyond that step; returns its last step."""
    while (step := last_step(run_dir)) <= beyond:
        assert process.poll() is None, f"ended with status {process.returncode} before it had trained"
        time.sleep(0.001)
    return step


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


def test_a_run_killed_in_start_up_among_steps_while_saving_and_exporting_equals_the_run_left_alone(
    either: Training, run_dir: Path
):
    rng = random.Random(0)
    alone = either.alone
    for phase in ("start-up", "saving", "exporting") if "gpt2" in either.recipe.stem else ("steps", "saving", "start-up"):
        process = either.start(run_dir)
        assert kill_in(process, phase, run_dir, rng, STARTUP_SECONDS), either.log(run_dir).read_text()
        left_behind(run_dir)  # exits if a checkpoint is not whole
    status, output = either.run(run_dir)
    assert status == 0, output
    assert differences(alone, run_dir) == []
    assert left_behind(run_dir)["partial_files"] == []


# ── Stopped ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_stopped_again_and_again_saves_exits_cleanly_and_goes_on_as_if_nothing_had_been(gpt2: Training, run_dir: Path):
    saved = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        gpt2.log(run_dir).unlink(missing_ok=True)
        process = gpt2.start(run_dir)
        wait_for_steps(process, run_dir, beyond=saved)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
        output = gpt2.log(run_dir).read_text()
        assert f"{number.name} after step" in output and "start the run again" in output
        assert f"at step {saved}" in output or saved == 0
        assert "Traceback" not in output
        saved = saved_as_logged(run_dir)
    status, output = gpt2.run(run_dir)
    assert status == 0 and f"at step {saved}" in output
    assert differences(gpt2.alone, run_dir) == []


def test_a_run_whose_terminal_is_gone_still_saves_when_stopped(qwen3: Training, run_dir: Path):
    """`2>&1 | tee log`: Ctrl-C ends tee first, and every later write of the run fails."""
    process = subprocess.Popen(qwen3.command(run_dir), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for_steps(process, run_dir)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    saved_as_logged(run_dir)


def test_ctrl_c_while_starting_ends_the_process_without_a_traceback(qwen3: Training, run_dir: Path):
    process = qwen3.start(run_dir)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    assert "Traceback" not in qwen3.log(run_dir).read_text()


# ── Damaged, sent back, repeated, changed ─────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_leads_to_the_same_end(gpt2: Training, run_dir: Path):
    newest = step_folders(finished_copy(gpt2, run_dir) / "checkpoints")[0]
    file = next(newest.glob("optimizer-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    status, output = gpt2.run(run_dir)
    assert status == 0, output
    assert f"{newest} is DAMAGED" in output and file.name in output and "at step 56" in output
    assert differences(gpt2.alone, run_dir) == []
    assert newest.with_name(f"{newest.name}.replaced-1").exists(), "the damaged one is set aside, not deleted"


def test_only_the_newest_checkpoints_are_kept(qwen3: Training):
    assert [step_of(path) for path in step_folders(qwen3.alone / "checkpoints")] == [60, 56, 48]


def test_a_run_sent_back_sets_later_checkpoints_aside_and_repeats_the_same_curve(gpt2: Training, run_dir: Path):
    checkpoints = finished_copy(gpt2, run_dir) / "checkpoints"
    status, output = gpt2.run(run_dir, "--resume", str(checkpoints / "step-00000048"))
    assert status == 0, output
    assert {path.name for path in checkpoints.glob("*.replaced-1")} == {f"step-{step:08d}.replaced-1" for step in (56, 60)}
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
    finished_copy(qwen3, run_dir, without=(56, 60))
    status, output = qwen3.run(run_dir, "batch.microbatch=8")
    assert status == 0 and "at step 48" in output
    losses = [[record["loss"] for record in read_metrics(path) if "loss" in record] for path in (qwen3.alone, run_dir)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[1][:48] == losses[0][:48] and len(losses[1]) == STEPS


# ── Two at once ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_launcher_on_the_same_run_folder_is_refused_and_the_first_goes_on(qwen3: Training, run_dir: Path):
    first = qwen3.start(run_dir, "train.steps=1000000", "checkpoint.every=null", "evaluate.every=null")
    try:
        wait_for_steps(first, run_dir)
        status, output = qwen3.run(run_dir)
        assert status == 2 and f"in use by process {first.pid}" in output and "Traceback" not in output
        wait_for_steps(first, run_dir, beyond=last_step(run_dir))
        first.terminate()
        assert first.wait(timeout=60) == 143
    finally:
        first.kill()
