"""Test the evaluation of a trained model in the precision in which it will be served."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.__main__ import main
from tests.conftest import Finished
from tests.golden.runs import steps_saved


@pytest.fixture
def recipe(low_precision_recipe: dict[str, Any]) -> dict[str, Any]:
    """Recipe in BF16 with checkpoints after the steps 3, 6 and 8."""
    data = low_precision_recipe["data"] | {"held_out": 0.05}
    return low_precision_recipe | {
        "data": data,
        "precision": "bf16",
        "batch": {"tokens": 256, "microbatch": 1},
        "train": {"steps": 8},
        "evaluate": {"packs": 4, "served": "nvfp4", "merge": 2},
        "checkpoint": {"every": 3, "at_end": False},
        "fp8_config": {"on_unsupported": "emulate", "keep_bf16_layers": {"last": 0}},
        "parity": "off",
    }


def served(run: Finished) -> list[dict[str, Any]]:
    return [record for record in run.records() if record.get("event") == "served"]


def printed_loss(output: str, precision: str) -> float:
    """Return the held-out loss that `evaluate` prints."""
    return float(re.findall(rf"^  {precision} +(\d\.\d+)   perplexity", output, re.MULTILINE)[0])


@pytest.mark.parametrize(
    ("weights", "precision"), [("fp32", "nvfp4"), ("bf16_exact", "delayed"), ("bf16", "bf16")]
)
def test_the_served_loss_is_that_of_the_mean_weights(
    train_here: Callable, recipe: dict[str, Any], tmp_path: Path, weights: str, precision: str
) -> None:
    recipe["evaluate"]["served"] = precision
    run = train_here(recipe=recipe | {"weights": weights})
    assert run.status == 0, run.output
    (record,) = served(run)
    assert record["merged"] == ["step-00000008", "step-00000006"]
    assert f"held-out loss served in {precision}: {record['served_loss']:.4f}" in run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["served_loss"] == record["served_loss"] != summary["held_out_loss"]
    # The reference is an export that the command `evaluate` quantizes.
    out = tmp_path / "out"
    export = ["export", str(run.run_dir), "--merge", "2", "--dtype", "fp32", "--out", str(out)]
    assert main(export) == 0
    source = (f"model.source={out}", "model.config=null", f"run_dir={tmp_path / 'none'}")
    evaluated = train_here(
        "evaluate", *source, "--precisions", precision, recipe=recipe | {"weights": weights}
    )
    assert evaluated.status == 0, evaluated.output
    loss = printed_loss(evaluated.out, precision)
    # Delayed scaling of an evaluation has the histories of gradients and inputs in other packs.
    assert record["served_loss"] == pytest.approx(loss, abs=1e-6)


def test_the_served_model_is_that_of_a_folder_named_by_precision(
    train_here: Callable, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The default folder of a run has the precision of the training in its name."""
    recipe["evaluate"] |= {"merge": 1}
    run = train_here("train.steps=3", f"run_dir={tmp_path}/{{precision}}", recipe=recipe)
    assert run.status == 0, run.output
    lines = (tmp_path / "bf16/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["served_precision"] == "nvfp4"
    assert not (tmp_path / "nvfp4").exists()


def test_a_run_without_its_served_loss_is_not_finished(
    train_here: Callable, recipe: dict[str, Any]
) -> None:
    """A checkpoint that an interrupted run has saved in addition is not averaged."""
    run = train_here(recipe=recipe)
    assert run.status == 0, run.output
    records = run.records()
    metrics = run.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    checkpoints = run.run_dir / "checkpoints"
    shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000007")
    again = train_here(recipe=recipe)
    assert again.status == 0, again.output
    assert again.records() == records
    assert train_here(recipe=recipe).records() == records, "a finished run is not evaluated again"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.served=null", "`evaluate.merge: 2` has no effect without `evaluate.served`"),
        ("evaluate.served=nvfp5", "`evaluate.served`"),
        (
            "checkpoint.keep=1",
            "averages more checkpoints than this run saves and keeps, which are 1",
        ),
        ("evaluate.merge=4", "which are 3"),
        ("checkpoint.every=null", "which are 1"),
        ("fp8_config.keep_bf16_layers.last=1", "none would compute in nvfp4"),
    ],
)
def test_a_model_that_cannot_be_evaluated_as_served_is_refused(
    train_here: Callable, recipe: dict[str, Any], override: str, message: str
) -> None:
    run = train_here(override, recipe=recipe)
    assert message in run.refusal
    assert not run.run_dir.exists() or steps_saved(run.run_dir) == []
