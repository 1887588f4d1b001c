"""What a run has trained otherwise than its recipe says at its end, and what is said of that wherever runs are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from pretrain.compare.fairness import check_comparable, describe_unfairness, setting
from pretrain.compare.report import write
from pretrain.metrics.run_record import read_run
from tests.conftest import Finished


@pytest.fixture
def started(start_here: Callable[..., Finished], small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    small_recipe |= {"train": {"steps": 4}, "evaluate": {}, "checkpoint": {"every": 1, "keep": 9}}
    small_recipe["model"]["config"]["num_hidden_layers"] = 1

    def start(folder: str, *arguments: str) -> Path:
        run = start_here(small_recipe, tmp_path, f"run_dir={tmp_path / folder}", *arguments)
        assert run.status == 0, run.output
        return tmp_path / folder

    return start


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
        "more", *changes, "--resume", str(mixed / "checkpoints" / "step-00000005"), "train.steps=6", "--accept-changes"
    )
    assert past(more)["changed"][0] == past(mixed)["changed"][0]
    assert not past(plain)


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
