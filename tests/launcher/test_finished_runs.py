"""What a run that has finished without a checkpoint of its end does when the same command starts it again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from pretrain.metrics.run_record import read_finished
from tests.conftest import over
from tests.moments import LauncherProcess, Moment

SHORT = ("train.steps=6", "checkpoint.at_end=false", "evaluate.every=null", "parity=off")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("every", ["null", "4"])
def test_a_finished_run_without_a_last_checkpoint_says_so_and_keeps_its_files(every: str, train_here: Callable) -> None:
    asked = (*SHORT, f"checkpoint.every={every}")
    run = train_here(*asked)
    assert run.status == 0, run.output
    before = contents(run.run_dir)
    assert ("checkpoints/step-00000004/state.json" in before) == (every == "4")
    planned = train_here(*asked, "--plan")
    assert planned.status == 0 and "the run has finished after 6 steps" in planned.out and "would resume" not in planned.out
    refused = train_here(*asked, "--profile")
    assert refused.status == 2 and "`--profile` records a step to come" in refused.err
    (run.run_dir / "loss.png").unlink()
    again = train_here(*asked)
    assert again.status == 0 and again.err == "", again.output
    assert "the run has finished after 6 steps" in again.out
    assert "run: done" in again.out and str(run.run_dir / "metrics.jsonl") in again.out
    assert contents(run.run_dir) == before, "all there, loss.png drawn again, and nothing written over"


def test_a_longer_run_replaces_a_link_in_place_of_its_picture_and_not_what_it_leads_to(
    train_here: Callable, tmp_path: Path
) -> None:
    asked = ("evaluate.every=null", "parity=off", "checkpoint.every=null")
    picture, theirs = train_here(*asked, "train.steps=4").run_dir / "loss.png", tmp_path / "theirs.png"
    drawn = picture.read_bytes()
    theirs.write_bytes(b"theirs")
    picture.unlink()
    picture.symlink_to(theirs)
    longer = train_here(*asked, "train.steps=6", "--accept-changes")
    assert longer.status == 0, longer.output
    assert (picture.is_symlink(), picture.read_bytes(), theirs.read_bytes()) == (False, drawn, b"theirs")


def test_a_finished_run_without_a_checkpoint_is_not_trained_over_by_any_recipe(train_here: Callable) -> None:
    run = train_here(*SHORT, "checkpoint.every=null")
    before = contents(run.run_dir)
    for change in ("checkpoint.at_end=true", "train.steps=7", "optimizer.learning_rate=0.02"):
        refused = train_here(*over(SHORT, "checkpoint.every=null", change)).refusal
        assert f"{run.run_dir / 'summary.json'}: is the summary of a finished run" in refused
        assert contents(run.run_dir) == before
    assert "is the summary of a finished run" in train_here(*over(SHORT, "train.steps=7", "--plan")).refusal


def test_what_another_training_left_that_came_to_no_checkpoint_is_set_aside(train_here: Callable) -> None:
    run = train_here(*SHORT, "checkpoint.every=null")
    (run.run_dir / "summary.json").unlink()  # as if it had been killed
    metrics, records = run.run_dir / "metrics.jsonl", run.records()
    again = train_here(*SHORT, "checkpoint.every=null")
    assert again.status == 0 and not list(run.run_dir.glob("*.replaced-*")), "the same training, whose steps are the same again"
    (run.run_dir / "summary.json").unlink()
    written = metrics.read_bytes()
    other = train_here(*over(SHORT, "checkpoint.every=4", "train.steps=7", "schedule.warmup=0"))
    assert other.status == 0 and f"{metrics} was set aside as metrics.jsonl.replaced-1" in other.err
    assert metrics.with_name("metrics.jsonl.replaced-1").read_bytes() == written
    assert len(other.losses()) == 7 and other.losses() != [line["loss"] for line in records if "loss" in line]
    exported = train_here(*over(SHORT, "train.steps=7", "schedule.warmup=0", "checkpoint.at_end=true"))
    assert exported.status == 0 and "at step 4" in exported.out, exported.output
    assert (run.run_dir / "final").is_dir() and exported.losses() == other.losses()


def test_another_trainings_evaluation_before_its_first_step_is_set_aside(train_here: Callable) -> None:
    quick = (*SHORT, "checkpoint.every=null", "evaluate.at_start=true", "log.trackers=[tensorboard]")
    run = train_here(*quick)
    (run.run_dir / "summary.json").unlink()
    metrics, own = run.run_dir / "metrics.jsonl", run.records()[0]
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])  # as if it had been killed before its first step
    same = train_here(*quick)
    assert same.records()[0] == own and not list(run.run_dir.glob("*.replaced-*")), "the same training has evaluated it already"
    (run.run_dir / "summary.json").unlink()
    other = train_here(*quick, "seed=5")
    first = other.records()[0]
    assert other.status == 0 and first["step"] == own["step"] == 0 and first["held_out_loss"] != own["held_out_loss"]
    assert {path.name for path in run.run_dir.glob("*.replaced-1")} == {"metrics.jsonl.replaced-1", "tensorboard.replaced-1"}
    assert "seed: 5" in next((run.run_dir / "tensorboard").rglob("hparams.yml")).read_text()


@pytest.mark.parametrize("then", ["fp32", "bf16"])
def test_a_finished_run_keeps_its_model_whatever_weights_are_asked_for_next(then: str, train_here: Callable) -> None:
    asked = ("train.steps=4", "parity=off", "precision=bf16")
    run = train_here(*asked, "weights=bf16_exact")
    before = contents(run.run_dir)
    again = train_here(*asked, f"weights={then}", "--accept-changes")
    assert again.status == 0 and f'weights: saved "bf16_exact", now "{then}"' in again.out, again.output
    assert "the run has finished and stays as it was" in again.out and contents(run.run_dir) == before
    for left in ([], ["config.json"]):
        for path in (path for path in (run.run_dir / "final").iterdir() if path.name not in left):
            path.unlink()
        assert train_here(*asked, "weights=bf16_exact").status == 0 and contents(run.run_dir) == before


def test_a_run_sent_back_and_killed_in_its_export_exports_the_model_that_it_has_trained(train_here: Callable) -> None:
    asked = ("train.steps=4", "parity=off", "checkpoint.every=2")
    run = train_here(*asked)
    final, summary = run.run_dir / "final", run.run_dir / "summary.json"
    first, aside = contents(final), run.run_dir.with_name("aside")
    shutil.copytree(final, aside)
    back = ("optimizer.learning_rate=0.02", "--accept-changes")
    assert train_here(*asked, *back, "--resume", str(run.run_dir / "checkpoints" / "step-00000002")).status == 0
    trained = contents(final)
    assert trained["model.safetensors"] != first["model.safetensors"]
    shutil.rmtree(final)
    aside.rename(final)
    summary.unlink()  # which is written last
    assert train_here(*asked, *back).status == 0 and contents(final) == trained and summary.exists()


@pytest.mark.parametrize(
    ("event", "what"), [("os.rename", r"\.config\.yaml"), ("os.remove", r"\.final\.previous/model\.safetensors")]
)
def test_a_run_sent_back_and_killed_is_no_end_and_goes_on(event: str, what: str, train_here: Callable, tmp_path: Path) -> None:
    asked = ("train.steps=4", "parity=off", "checkpoint.every=2")
    run = train_here(*asked)
    back = (*asked, "optimizer.learning_rate=0.02", "--accept-changes")
    there = ("--resume", str(run.run_dir / "checkpoints" / "step-00000002"))
    process = LauncherProcess([str(tmp_path / "recipe.yaml"), *back, *there], tmp_path / "log", Moment(event, what, SIGKILL))
    assert process.end() == -SIGKILL and read_finished(run.run_dir) is None
    again = train_here(*back)
    assert again.status == 0, again.output
    assert read_finished(run.run_dir) is not None and not list(run.run_dir.glob(".final.*"))


@pytest.mark.parametrize("about_to", [r"\.metrics\.jsonl\.replaced-1", r"step-00000004\.replaced-1", r"\.metrics\.jsonl\.\d"])
def test_a_run_sent_back_and_killed_has_lost_no_line_of_its_metrics(about_to: str, train_here: Callable, tmp_path: Path) -> None:
    asked = ("train.steps=4", "parity=off", "checkpoint.every=2")
    run = train_here(*asked)
    whole = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    back = (*asked, "optimizer.learning_rate=0.02", "--accept-changes")
    there = ("--resume", str(run.run_dir / "checkpoints" / "step-00000002"))
    process = LauncherProcess(
        [str(tmp_path / "recipe.yaml"), *back, *there], tmp_path / "log", Moment("os.rename", about_to, SIGKILL)
    )
    assert process.end() == -SIGKILL
    assert train_here(*back).status == 0
    left = [line for path in run.run_dir.glob("metrics.jsonl*") for line in path.read_text().splitlines()]
    assert set(whole) <= set(left) and not list(run.run_dir.glob(".*.partial"))


def test_an_earlier_summary_goes_when_steps_are_trained_again(train_here: Callable) -> None:
    asked = ("train.steps=4", "parity=off", "checkpoint.every=2")
    run = train_here(*asked)
    back = ("--resume", str(run.run_dir / "checkpoints" / "step-00000002"), "train.max_hours=1e-9")
    stopped = train_here(*asked, *back)
    assert "stopped by `train.max_hours" in stopped.out and not (run.run_dir / "summary.json").exists(), stopped.output


def test_a_checkpoint_that_is_named_sends_a_finished_run_back(train_here: Callable) -> None:
    run = train_here(*SHORT, "checkpoint.every=4")
    back = train_here(*SHORT, "checkpoint.every=4", "--resume", str(run.run_dir / "checkpoints" / "step-00000004"))
    assert back.status == 0 and "at step 4" in back.out and len(back.losses()) == 6


def test_a_run_stopped_before_its_summary_is_not_finished(train_here: Callable) -> None:
    run = train_here(*SHORT, "checkpoint.every=4")
    (run.run_dir / "summary.json").unlink()
    again = train_here(*SHORT, "checkpoint.every=4")
    assert again.status == 0 and "at step 4" in again.out and (run.run_dir / "summary.json").exists()


def test_several_processes_agree_that_a_run_has_finished(train_as_ranks: Callable) -> None:
    def run(*arguments: str) -> Any:
        return train_as_ranks(*SHORT, "checkpoint.every=4", *arguments, launch=["--config_file", "accelerate_configs/ddp.yaml"])

    whole = run()
    assert whole.status == 0, whole.output
    before = contents(whole.run_dir)
    again = run()
    assert again.status == 0 and again.out.count("the run has finished after 6 steps") == 1, again.output
    assert contents(whole.run_dir) == before
