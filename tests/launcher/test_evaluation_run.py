"""Evaluations of a run: before its first step, of its best checkpoint, alone, and the samples that it records."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from packing.arrow import Pack, PackWriter
from pretrain.__main__ import main
from pretrain.checkpoint.folders import step_folders, step_of
from tests.conftest import contents

BEST = ("checkpoint.best=true", "checkpoint.keep=2", "checkpoint.every=1")


def card_of(checkpoint: Path, out: Path) -> str:
    assert main(["export", str(checkpoint), str(out)]) == 0
    return (out / "README.md").read_text()


def kept(run_dir: Path) -> list[int]:
    return sorted(step_of(folder) for folder in step_folders(run_dir / "checkpoints"))


def evaluations(finished: Any) -> dict[int, float]:
    return {r["step"]: r["held_out_loss"] for r in finished.records() if r.get("event") == "evaluation"}


@pytest.fixture
def worsening(small_recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose held-out loss is lowest after step 6 of 8: the rate is far too high."""
    changed = {"optimizer": {"learning_rate": 0.6}, "schedule": {"kind": "constant"}, "train": {"steps": 8}}
    return small_recipe | changed | {"evaluate": {"every": 2}}


def test_the_best_checkpoint_is_kept_found_again_after_a_kill_and_exported(
    train_here: Callable, worsening: dict[str, Any], tmp_path: Path, capsys: Any
):
    alone = train_here(*BEST, "evaluate.at_start=true", f"run_dir={tmp_path / 'alone'}", recipe=worsening)
    assert alone.status == 0, alone.output
    losses = evaluations(alone)
    assert list(losses) == [0, 2, 4, 6, 8] and min(list(losses)[1:], key=losses.get) == 6
    assert kept(alone.run_dir) == [6, 7, 8]

    shutil.rmtree(alone.run_dir / "final")  # as after a kill between steps 7 and 8: the best is none of the newest two any more
    shutil.rmtree(alone.run_dir / "checkpoints" / "step-00000008")
    resumed = train_here(*BEST, "evaluate.at_start=true", f"run_dir={tmp_path / 'alone'}", recipe=worsening)
    assert resumed.status == 0 and "at step 7" in resumed.out
    assert evaluations(resumed) == losses and kept(resumed.run_dir) == [6, 7, 8]

    assert main(["export", str(alone.run_dir), str(tmp_path / "out"), "--best"]) == 0
    assert "step-00000006 is exported" in capsys.readouterr().out
    before = contents(alone.run_dir)
    source = (f"model.source={tmp_path / 'out'}", "model.config=null", f"run_dir={tmp_path / 'none'}")
    said = train_here("--eval-only", *source, recipe=worsening)
    assert said.status == 0 and not (tmp_path / "none").exists() and contents(alone.run_dir) == before
    found = said_of(said)
    assert list(found) == ["fp32", "bf16"] and found["fp32"] == pytest.approx(losses[6], abs=1e-5)
    assert 0 < abs(found["bf16"] - found["fp32"]) < 0.05

    shutil.rmtree(alone.run_dir / "checkpoints" / "step-00000006")
    assert main(["export", str(alone.run_dir), str(tmp_path / "again"), "--best"]) == 2
    refused = "step 6 has the lowest held-out loss and is not kept; set `checkpoint.best: true`.*: step-00000008, step-00000007$"
    assert re.search(refused, capsys.readouterr().err.strip())
    assert main(["export", str(alone.run_dir)]) == 2 and "name OUT" in capsys.readouterr().err


def test_the_best_until_the_last_evaluation_finds_a_better_one_is_not_kept(train_here: Callable, small_recipe: dict[str, Any]):
    schedule = {"kind": "constant", "warmup": 0}
    recipe = small_recipe | {"schedule": schedule, "train": {"steps": 12}, "evaluate": {"every": 4}}
    run = train_here("checkpoint={best: true, keep: 1, every: 5}", recipe=recipe)
    assert run.status == 0, run.output
    assert min(evaluations(run).items(), key=lambda each: each[1])[0] == 12 and kept(run.run_dir) == [12]


def test_a_checkpoints_card_says_after_which_step_its_held_out_loss_was_measured(
    train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path
):
    changes = ("evaluate.at_start=true", "evaluate.every=4", "checkpoint.every=3", "train.steps=8")
    finished = train_here(*changes, recipe=small_recipe)
    assert finished.status == 0, finished.output
    losses, folder = evaluations(finished), finished.run_dir / "checkpoints"
    assert list(losses) == [0, 4, 8] and kept(finished.run_dir) == [3, 6, 8]
    before, between, at_end = (card_of(folder / f"step-0000000{step}", tmp_path / f"out{step}") for step in (3, 6, 8))
    assert "in 3 steps.\n" in before and "| held-out loss |" not in before, "that of step 0 is of a model without training"
    assert f"Its held-out loss after 4 of these steps was {losses[4]:.4f} nats a token." in between
    assert re.search(rf"\| held-out loss \| {losses[4]:.4f} .*, after 4 of these steps \|", between)
    assert f"Its held-out loss is {losses[8]:.4f} nats a token." in at_end and "of these steps" not in at_end


def test_a_best_evaluation_at_the_end_has_its_checkpoint_where_no_last_one_is_wanted(train_here: Callable):
    asked = ("train.steps=4", "evaluate.every=2", "checkpoint.best=true", "checkpoint.every=null", "checkpoint.at_end=false")
    run = train_here(*asked, "checkpoint.keep=1", "optimizer.learning_rate=0.003")
    losses = evaluations(run)
    assert run.status == 0 and losses[4] < losses[2], run.output
    assert kept(run.run_dir) == [4] and not (run.run_dir / "final").exists()
    memory = json.loads((run.run_dir / "audit.json").read_text())["memory"]
    held, planned = memory["held"], memory["planned"]
    assert [held["weights"], held["gradients"], held["moments"]] == [
        planned[part] for part in ("parameters", "gradients", "optimizer moments")
    ], "what shapes decide is planned exactly"


def said_of(finished: Any) -> dict[str, float]:
    """The held-out losses that --eval-only says, by precision."""
    return {name: float(loss) for name, loss in re.findall(r"^  (\w+) +(\d\.\d+)   perplexity", finished.out, re.MULTILINE)}


def test_eval_only_says_the_losses_in_low_precision_and_in_bf16_and_writes_nothing(
    train_here: Callable, low_precision_recipe: dict[str, Any]
):
    recipe = low_precision_recipe | {"train": {"steps": 2}, "batch": {"tokens": 256, "microbatch": 2}, "parity": "off"}
    recipe |= {"fp8_config": recipe["fp8_config"] | {"use_autocast_during_eval": True}}
    run = train_here(recipe=recipe)
    assert run.status == 0, run.output
    before = contents(run.run_dir)
    said = train_here("--eval-only", recipe=recipe)
    assert said.status == 0 and contents(run.run_dir) == before, said.output
    assert "held-out loss of" in said.out and "step-00000002" in said.out
    found = said_of(said)
    assert list(found) == ["current", "bf16"] and found["current"] == pytest.approx(evaluations(run)[2], abs=1e-6)
    assert 0 < abs(found["bf16"] - found["current"]) < 0.02


def test_eval_only_in_a_precision_that_the_checkpoint_was_not_trained_in(train_here: Callable, tmp_path: Path):
    """Its scales are those of the trained weights, not of those with which the model was built."""
    shared = ["parity=off", "evaluate.every=null", "train.steps=40", "checkpoint.every=40", "optimizer.learning_rate=0.05"]
    assert train_here(*shared).status == 0
    there = ["--eval-only", "--resume", f"{tmp_path}/run/checkpoints/step-00000040", f"run_dir={tmp_path}/other"]
    low = ["precision=delayed", "fp8_config.on_unsupported=emulate", "fp8_config.use_autocast_during_eval=true"]
    found = said_of(train_here(*shared, *there, *low))
    assert found["delayed"] == pytest.approx(found["bf16"], abs=0.005) and found["bf16"] < 0.2, "random weights' make it 3"


def test_eval_only_begins_histories_anew_for_the_turn_that_reads_them_alone(train_here: Callable):
    low = ["precision=delayed", "fp8_config.on_unsupported=emulate", "parity=off", "evaluate.every=null", "train.steps=2"]
    assert train_here(*low).status == 0
    said = train_here(*low, "--eval-only", "fp8_config.fp8_format=E4M3")
    assert list(said_of(said)) == ["delayed", "bf16"], said.output
    assert said.out.count("tensors of delayed scaling begin with packs under the checkpoint's weights") == 1


def test_eval_only_without_a_checkpoint_or_a_source_of_weights_is_refused(train_here: Callable, tmp_path: Path):
    """A mistyped `run_dir`, whose random weights would have a loss, too."""
    refused = train_here("--eval-only", f"run_dir={tmp_path}/mistyped", f"data.packs={tmp_path}/not_prepared")
    assert f"the run folder, {tmp_path}/mistyped, has no checkpoint, and this recipe begins with random" in refused.refusal
    assert "held-out loss of" not in refused.out and not (tmp_path / "mistyped").exists(), "before packs are prepared"
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty, has no checkpoint" in train_here("--eval-only", f"run_dir={tmp_path}/empty").refusal


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("--eval-only", "`--eval-only` needs held-out packs and there are none; set `data.held_out`"),
        ("evaluate.at_start=true", "`evaluate.at_start: true` needs held-out packs and there are none; set `data.held_out`"),
        ("checkpoint.best=true", "`checkpoint.best: true` goes by the held-out loss of evaluations; set `evaluate.every`, and"),
    ],
)
def test_what_goes_by_held_out_loss_is_refused_without_held_out_packs(
    asked: str, says: str, train_here: Callable, tmp_path: Path
):
    with PackWriter(tmp_path / "packs", 32) as writer:
        writer.add("train", Pack(np.zeros(32, dtype=np.uint32), np.array([32], dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    (tmp_path / "begun").mkdir()
    settings = (f"data.packs={tmp_path / 'packs'}", "evaluate.every=null", f"run_dir={tmp_path / 'begun'}")
    assert says in train_here(asked, *settings).refusal


def test_samples_are_recorded_with_a_seed_a_prompt_and_shown_by_tensorboard(train_here: Callable, tmp_path: Path):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w60").save_pretrained(tmp_path / "words")
    wanted = ("evaluate.samples=[w1 w2, w1 w2]", "evaluate.sample_tokens=12", "evaluate.temperature=0.7", "evaluate.top_p=0.9")
    tracked = ("log.trackers=[tensorboard]", f"data.tokenizer={tmp_path / 'words'}", "train.steps=6")
    run = train_here(*wanted, *tracked)
    assert run.status == 0, run.output
    found = [record for record in run.records() if record.get("event") == "samples"]
    assert [record["step"] for record in found] == [5, 6]
    assert (found[0]["temperature"], found[0]["top_p"], found[0]["tokens"]) == (0.7, 0.9, 12)
    one, other = found[1]["samples"]
    assert one["prompt"] == other["prompt"] == "w1 w2" and one["seed"] != other["seed"] and one["text"] != other["text"]
    assert [each["seed"] for each in found[0]["samples"]] == [one["seed"], other["seed"]], "to compare over steps"
    logged = b"".join(path.read_bytes() for path in run.run_dir.rglob("events.out.tfevents*"))
    assert b"samples/0" in logged and one["text"][:20].encode() in logged
