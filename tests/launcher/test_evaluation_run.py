"""Test evaluations: the best checkpoint, the command `evaluate`, samples, and served models."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pretrain.metrics.run_record import read_metrics
from pretrain.run import evaluate, evaluate_command
from tests.conftest import BLOCK_LENGTH, Finished, Trainer, command_here, contents
from tests.golden.runs import steps_saved


def evaluations(finished: Finished) -> dict[int, float]:
    return {
        record["step"]: record["held_out_loss"]
        for record in finished.records()
        if record.get("event") == "evaluation"
    }


def losses_printed(finished: Finished) -> dict[str, float]:
    """Return the held-out losses that `evaluate` prints, by precision."""
    return {
        name: float(loss)
        for name, loss in re.findall(
            r"^  (\w+) +(\d\.\d+)   perplexity", finished.out, re.MULTILINE
        )
    }


def evaluated(train: Trainer, folder: Path, *options: str) -> dict[str, float]:
    """Return the losses of the model in a folder, with a run folder that cannot be written."""
    none = folder / "config.json" / "none"
    source = (f"model.source={folder}", "model.config=null", f"run_dir={none}")
    finished = train("evaluate", *source, *options).done()
    assert not none.exists()
    return losses_printed(finished)


def test_the_best_checkpoint_is_kept_and_exported(train_here: Trainer, tmp_path: Path) -> None:
    """The learning rate is far too high, so the held-out loss is lowest after step 6 of 8."""
    train_here.recipe["model"]["config"]["num_hidden_layers"] = 2
    train_here.recipe |= {
        "optimizer": {"learning_rate": 0.6},
        "schedule": {"kind": "constant"},
        "train": {"steps": 8},
        "evaluate": {"every": 2},
        "checkpoint": {"best": True, "keep": 2, "every": 1},
    }
    run = train_here().done()
    losses = evaluations(run)
    assert min(losses, key=losses.get) == 6
    assert steps_saved(run.run_dir) == [6, 7, 8]

    # Restore the state of a kill between steps 7 and 8. The best checkpoint is not among the two
    # newest ones then.
    shutil.rmtree(run.run_dir / "final")
    shutil.rmtree(run.run_dir / "checkpoints" / "step-00000008")
    assert evaluations(train_here().done()) == losses
    assert steps_saved(run.run_dir) == [6, 7, 8]
    out = tmp_path / "out"
    export = command_here("export", run.run_dir, "--out", out, "--best").done()
    assert "step-00000006" in export.out
    assert evaluated(train_here, out)["fp32"] == pytest.approx(losses[6], abs=1e-4)


def test_an_earlier_best_checkpoint_is_deleted_after_the_last_evaluation(
    train_here: Trainer,
) -> None:
    train_here.recipe |= {"train": {"steps": 4}, "evaluate": {"every": 2}}
    run = train_here("checkpoint.best=true", "checkpoint.keep=1").done()
    losses = evaluations(run)
    assert losses[4] < losses[2] and steps_saved(run.run_dir) == [4]


def test_an_fp32_run_is_evaluated_in_bf16_and_in_precisions_that_suit_its_model(
    train_here: Trainer, block_packs: Path, tmp_path: Path
) -> None:
    train_here.recipe["data"] = {"packs": str(block_packs), "length": BLOCK_LENGTH}
    train_here.recipe["model"]["config"]["max_position_embeddings"] = BLOCK_LENGTH
    train_here.recipe["batch"]["tokens"] = 2 * BLOCK_LENGTH
    # As by default, the name of the folder has the precision of the training.
    run_dir = f"run_dir={tmp_path}/{{precision}}"
    train_here("train.steps=6", run_dir).done()
    printed = losses_printed(train_here("evaluate", run_dir))
    rounded = losses_printed(train_here("evaluate", run_dir, "--precisions", "bf16"))
    assert [*printed, *rounded] == ["fp32", "bf16"]
    assert 0 < abs(rounded["bf16"] - printed["fp32"]) < 0.02
    both = train_here("evaluate", run_dir, "--precisions", "fp32,bf16")
    assert both.refusal.endswith("in `evaluate --precisions`, name one of them in each command")
    evaluated = train_here("evaluate", run_dir, "--precisions", "all")
    assert [*losses_printed(evaluated)] == ["delayed", "current", "mxfp8", "nvfp4", "mxfp4", "bf16"]
    skipped = re.findall("skipped: .*", evaluated.output)
    assert len(skipped) == 1 and "32 is not a multiple of 128" in skipped[0]


def test_a_run_is_evaluated_in_the_precision_of_the_accelerate_file(
    train_here: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ((), ("evaluate",)):
        # A process removes the variable.
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        evaluated = train_here("train.steps=2", *command)
    assert [*losses_printed(evaluated)] == ["bf16"], evaluated.output


def test_evaluate_prints_the_loss_in_every_precision_and_writes_nothing(
    train_here: Trainer, low_precision_recipe: dict[str, Any]
) -> None:
    recipe = low_precision_recipe | {"train": {"steps": 2}, "precision": "nvfp4", "log": {}}
    recipe["evaluate"] = {"every": 2, "packs": 2}
    recipe["fp8_config"] |= {"use_autocast_during_eval": True}
    run = train_here(recipe=recipe).done()
    before = contents(run.run_dir)
    alone = losses_printed(train_here("evaluate", recipe=recipe))
    evaluated = train_here("evaluate", "--precisions", "all", recipe=recipe).done()
    assert contents(run.run_dir) == before
    printed = losses_printed(evaluated)
    assert [*printed] == ["delayed", "current", "block", "mxfp8", "nvfp4", "mxfp4", "bf16"]
    assert {name: printed[name] for name in ("nvfp4", "bf16")} == alone
    assert printed["nvfp4"] == pytest.approx(evaluations(run)[2], abs=1e-4)
    # Two precisions may agree in all digits that are printed.
    assert len({*printed.values()}) >= len(printed) - 1
    some = train_here("evaluate", "--precisions", "delayed,mxfp8", recipe=recipe)
    assert losses_printed(some) == {name: printed[name] for name in ("delayed", "mxfp8", "bf16")}
    # Other precisions do not accept the options of the recipe.
    recipe |= {"precision": "delayed", "fp8_config": {"margin": 1}}
    one = train_here("evaluate", "--precisions", "block", recipe=recipe)
    assert losses_printed(one) == {name: printed[name] for name in ("block", "bf16")}
    refusal = train_here("evaluate", "--precisions", "mxfp9", recipe=recipe).refusal
    assert "--precisions: mxfp9: unknown" in refusal


def test_samples_are_recorded_and_other_validation_data_is_evaluated(
    train_here: Trainer, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The column does not apply to the text file below.
    train_here.recipe["data"]["text"] = "story"
    settings = ("evaluate.samples=[w1 w2, w1 w2]", f"data.tokenizer={words}")
    run = train_here(*settings, "log.trackers=[tensorboard]", "train.steps=6").done()
    early, late = (
        [*record["samples"]] for record in run.records() if record.get("event") == "samples"
    )
    assert [sample["prompt"] for sample in late] == ["w1 w2"] * 2
    assert late[0]["text"] != late[1]["text"]
    assert [sample["seed"] for sample in early] == [sample["seed"] for sample in late], (
        "samples of different steps must have the same seeds"
    )
    logged = b"".join(path.read_bytes() for path in run.run_dir.rglob("events.out.tfevents*"))
    assert late[0]["text"][:20].encode() in logged
    before = contents(run.run_dir)
    text = tmp_path / "own.txt"
    text.write_text("w1 w2 w3 " * 100)
    held_out_metrics = evaluate_command.held_out_metrics
    modes = []

    def with_modes(*arguments: Any) -> dict[str, Any]:
        """Record the modes of the temporary folders that `evaluate` makes."""
        made = [folder for folder in temporary.iterdir() if folder != foreign]
        modes.extend(stat.S_IMODE(folder.stat().st_mode) for folder in made)
        return held_out_metrics(*arguments)

    temporary = tmp_path / "temporary"
    # A folder of somebody else, with a name that `evaluate` could choose.
    foreign = temporary / f"evaluate-{os.getpid()}"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("years of work")
    abandoned = temporary / f".evaluate-{os.getuid()}.01234567.writing"
    abandoned.mkdir()
    (abandoned / ".lock").write_text("process 1 on a machine")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(evaluate_command, "held_out_metrics", with_modes)
    evaluated = train_here("evaluate", f"data.tokenizer={words}", str(text)).done()
    assert len(losses_printed(evaluated)) > 0, evaluated.output
    assert contents(run.run_dir) == before
    assert f"loss on {text} of" in evaluated.output and "held-out loss" not in evaluated.output
    assert next(iter(losses_printed(evaluated).values())) != evaluations(run)[6]
    assert {*modes} == {0o700}, "other users can read the packed text"
    assert [*temporary.iterdir()] == [foreign]
    assert [*contents(foreign)] == ["thesis.tex"]


def test_an_evaluation_that_is_killed_before_its_samples_is_repeated(
    train_here: Trainer, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("evaluate.samples=[w1 w2]", f"data.tokenizer={words}", "train.steps=2")
    with monkeypatch.context() as killed:
        killed.setattr(evaluate, "draw_samples", lambda run: os.kill(os.getpid(), signal.SIGINT))
        assert train_here(*settings).status == 130
    run = train_here(*settings).done()
    events = [record["event"] for record in run.records() if "event" in record]
    assert sorted(events) == ["evaluation", "samples"]


def test_evaluate_accepts_the_length_that_train_has_shortened_to(train_here: Trainer) -> None:
    """A step has 8 of 120 packs."""
    recipe = train_here.recipe | {
        "schedule": {"kind": "cosine", "warmup": 60},
        "train": {"steps": 700},
    }
    trained = train_here("train.epochs=0.2", recipe=recipe)
    assert "the schedule is shortened to cosine: warmup 2 + cosine 1 = 3 steps" in trained.out
    assert steps_saved(trained.run_dir) == [3]
    evaluated = train_here("evaluate", "train.epochs=0.2", recipe=recipe)
    assert losses_printed(evaluated)["fp32"] == pytest.approx(evaluations(trained)[3], abs=1e-6)


# ── The loss in the precision in which a model will be served ──


@pytest.fixture
def served(train_here: Trainer, low_precision_recipe: dict[str, Any]) -> Trainer:
    """Function that trains in BF16 with checkpoints after the steps 3, 6 and 8."""
    train_here.recipe = low_precision_recipe | {
        "data": low_precision_recipe["data"] | {"held_out": 0.05},
        "precision": "bf16",
        "batch": {"tokens": 256, "microbatch": 1},
        "train": {"steps": 8},
        "evaluate": {"packs": 4, "served": "nvfp4", "merge": 2},
        "checkpoint": {"every": 3, "at_end": False},
        "fp8_config": {"on_unsupported": "emulate", "keep_bf16_layers": {"last": 0}},
    }
    return train_here


@pytest.mark.parametrize(
    ("weights", "precision"), [("fp32", "nvfp4"), ("bf16_exact", "delayed"), ("bf16", "bf16")]
)
def test_the_served_loss_is_that_of_the_mean_weights(
    served: Trainer, tmp_path: Path, weights: str, precision: str
) -> None:
    """As by default, the name of the run folder has the precision of the training."""
    served.recipe |= {"weights": weights, "run_dir": f"{tmp_path}/{{precision}}"}
    served.recipe["evaluate"]["served"] = precision
    run = served().done()
    run_dir = tmp_path / "bf16"
    record = read_metrics(run_dir)[-1]
    assert record["merged"] == ["step-00000008", "step-00000006"]
    assert f"held-out loss served in {precision}: {record['served_loss']:.4f}" in run.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["served_loss"] == record["served_loss"] != summary["held_out_loss"]
    # The reference is an export that the command `evaluate` quantizes.
    out = tmp_path / "out"
    command_here("export", run_dir, "--merge", 2, "--dtype", "fp32", "--out", out).done()
    loss = evaluated(served, out, "--precisions", precision)[precision]
    # Delayed scaling of an evaluation has the histories of gradients and inputs in other packs.
    assert record["served_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_run_without_its_served_loss_is_not_finished(served: Trainer) -> None:
    """A checkpoint that an interrupted run has saved in addition is not averaged."""
    run = served().done()
    records = run.records()
    metrics = run.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    checkpoints = run.run_dir / "checkpoints"
    shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000007")
    for _ in range(2):  # A finished run is not evaluated again.
        assert served().done().records() == records
