"""What a run has trained otherwise than its recipe says at its end, and what is said of that wherever runs are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from pretrain.checkpoint.folders import step_of
from pretrain.compare.fairness import check_comparable, describe_unfairness, setting
from pretrain.compare.report import write
from pretrain.metrics.run_record import read_run
from tests.conftest import Finished


@pytest.fixture
def start(start_here: Callable[..., Finished], small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Finished]:
    small_recipe |= {"train": {"steps": 4}, "evaluate": {}, "checkpoint": {"every": 1, "keep": 9}}
    small_recipe["model"]["config"]["num_hidden_layers"] = 1
    return lambda folder, *arguments: start_here(small_recipe, tmp_path, f"run_dir={tmp_path / folder}", *arguments)


@pytest.fixture
def started(start: Callable[..., Finished]) -> Callable[..., Path]:
    def start_well(folder: str, *arguments: str) -> Path:
        run = start(folder, *arguments)
        assert run.status == 0, run.output
        return run.run_dir

    return start_well


def past(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "environment.json").read_text()).get("past", {})


def test_settings_that_a_resume_has_changed_are_told_and_make_a_comparison_unfair(started: Callable[..., Path]) -> None:
    changes = ["precision=bf16", "optimizer.learning_rate=0.001", "train.steps=5"]
    started("mixed")
    mixed, plain = started("mixed", *changes, "--accept-changes"), started("plain", *changes)
    runs = [read_run(mixed), read_run(plain)]
    with pytest.raises(InputError, match=r"`precision`: fp32 to step 4, then bf16 and bf16.*--vary precision"):
        check_comparable(runs)
    assert "`optimizer.learning_rate`: 0.01 to step 4, then 0.001 and 0.001" in describe_unfairness(*runs)
    assert describe_unfairness(*runs, vary=["precision", "optimizer", "train"]) is None
    assert setting(runs[0], "precision") == "fp32 to step 4, then bf16"
    told = "`precision` was fp32 to step 4, then bf16"
    assert f"mixed was not trained by one recipe: `optimizer.learning_rate` was 0.01 to step 4, then 0.001; {told}" in write(
        [mixed]
    )
    assert told in (mixed / "final" / "README.md").read_text()

    # It belongs to the checkpoints: a resume elsewhere without a further change knows it too.
    more = started(
        "more", *changes[:-1], "--resume", str(mixed / "checkpoints" / "step-00000005"), "train.steps=6", "--accept-changes"
    )
    assert past(more)["changed"][0] == past(mixed)["changed"][0]
    assert not past(plain)


def test_what_an_earlier_end_has_written_is_not_said_of_the_run_as_it_is_now(
    start: Callable[..., Finished], started: Callable[..., Path]
) -> None:
    started("run")
    changes = ["seed=5", "batch.tokens=128", "train.steps=5", "--accept-changes"]
    run = started("run", *changes)
    assert {key: read_run(run).summary[key] for key in ("seed", "tokens_per_step")} == {"seed": 5, "tokens_per_step": 128}

    whole = read_run(run)
    stale = whole.summary | {"tokens_per_step": 256, "data_fingerprint": "of other packs"}  # as it lies there until the next end
    (run / "summary.json").write_text(json.dumps(stale))
    assert (read_run(run).tokens_per_step, read_run(run).data_fingerprint) == (128, whole.data_fingerprint)
    (run / "summary.json").write_text(json.dumps(stale)[:-9])
    assert read_run(started("run", *changes)).summary == whole.summary

    kept = (run / "summary.json").read_bytes()
    (run / "metrics.jsonl").unlink()
    assert start("run", *changes).err.endswith(f"python -m pretrain export {run}\n")
    assert (run / "summary.json").read_bytes() == kept


def test_a_longer_horizon_that_no_step_has_felt_is_no_change(started: Callable[..., Path]) -> None:
    stable = ["schedule={kind: wsd, warmup: 1, decay: 0.5}"]
    short = started("short", *stable)
    early, late = (["--resume", f"{short}/checkpoints/step-0000000{step}", "--accept-changes"] for step in (3, 4))
    assert not past(started("early", *stable, "train.steps=6", *early))
    assert [change["was"] for change in past(started("late", *stable, "train.steps=6", *late))["changed"]] == [{"train.steps": 4}]

    shares = ["precision=[{until: 0.5, use: current}, {use: bf16}]", "fp8_config.on_unsupported=emulate"]
    shares += ["schedule.kind=constant", "data.length=32"]
    started("shares", *shares)
    assert past(started("shares", *shares, "train.steps=8", "--accept-changes"))["changed"] == [
        {"step": 4, "was": {"train.steps": 4}}
    ]


def test_a_prolonged_run_keeps_the_checkpoint_that_a_longer_one_is_told_to_go_on_from(
    start: Callable[..., Finished], started: Callable[..., Path]
) -> None:
    wsd = "schedule={kind: wsd, decay: 0.5}"
    run = started("run", wsd)
    started("run", wsd, "train.steps=6", "checkpoint.keep=1", "--accept-changes")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000006"]
    advice = f"go on from there with --resume {run}/checkpoints/step-00000002 --accept-changes"
    assert advice in start("run", wsd, "train.steps=8", "--accept-changes", "--plan").output

    longer = [wsd, "train.steps=16", "checkpoint.keep=1", "--accept-changes"]
    assert advice in start("run", *longer).output
    for _ in range(2):
        assert sorted(step_of(path) for path in (run / "checkpoints").iterdir()) == [2, 8, 16], "though 8 is from no decay itself"
        shutil.rmtree(run / "checkpoints" / "step-00000016")
        started("run", *longer)


def test_branches_of_checkpoints_that_lay_in_one_place_are_told_apart(started: Callable[..., Path]) -> None:
    base = started("base")
    begins = [f"train.begin_with={base}/checkpoints/step-00000002"]
    first, again = started("first", *begins), started("again", *begins)
    assert describe_unfairness(read_run(first), read_run(again)) is None
    assert (
        f"| started from | the checkpoint {base}/checkpoints/step-00000002 of another" in (first / "final/README.md").read_text()
    )

    shutil.rmtree(base)
    started("base", "seed=5")
    other, gone_on = started("other", *begins), started("first", *begins)
    assert past(gone_on)["begin_with"] != past(other)["begin_with"]
    assert describe_unfairness(read_run(gone_on), read_run(other)).startswith(f"`train.begin_with`: {base}/checkpoints")


def test_another_runs_checkpoint_does_not_go_on_in_a_folder_that_has_a_curve(
    start: Callable[..., Finished], started: Callable[..., Path], tmp_path: Path
) -> None:
    """Steps of one run and then of another would stand there as one, and a rollback would go to the first one's checkpoints."""
    ours, theirs = started("ours"), started("theirs", "seed=5")
    before = {path: path.read_bytes() for path in ours.rglob("*.json*")}
    foreign = ["--resume", f"{theirs}/checkpoints/step-00000002", "--accept-changes"]
    refusal = start("ours", *foreign).refusal
    assert refusal.startswith(f"--resume {theirs}/checkpoints/step-00000002: is of another run than the steps in {ours}/metrics")
    assert refusal.endswith("set another `run_dir`") and start("ours", *foreign, "--plan").refusal == refusal
    assert {path: path.read_bytes() for path in ours.rglob("*.json*")} == before

    for made in ("checkpoints", "final"):  # as of a run that was killed before it had saved
        shutil.rmtree(ours / made)
    (ours / "summary.json").unlink()
    begins = f"train.begin_with={theirs}/checkpoints/step-00000002"
    assert "`train.begin_with`: " in start("ours", begins).refusal
    copy = shutil.copytree(theirs / "checkpoints" / "step-00000002", tmp_path / "step-00000002")
    started("theirs", "seed=5", "--resume", str(copy))  # its own, from wherever it was kept
