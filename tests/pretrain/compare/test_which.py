"""The answer to "which precision": how often its intervals err at any time one looks, and the command from its first step on."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.evidence.tables import Scale
from foundation.errors import InputError
from pretrain.compare import which
from pretrain.compare.differences import CANNOT_TELL, EQUIVALENT, WORSE, SeedDifference
from pretrain.compare.seed_groups import grouped
from pretrain.compare.verdicts import USE, Protocol, Rounds, Verdict
from pretrain.compare.which import Question
from pretrain.metrics.run_record import RunRecord
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe
from tests.forked_commands import forking
from tests.pretrain.compare.made_runs import leave_behind, rows_of

SEEDS = 20


def looks(values: np.ndarray) -> list[SeedDifference]:
    """What there is to see after each seed from the third on, as shares of a baseline's loss of 1."""
    return [SeedDifference(dict(enumerate(values[:seeds].tolist())), 1.0) for seeds in range(3, len(values) + 1)]


@pytest.mark.parametrize("error", [0.05, 0.0125])
def test_the_interval_misses_at_most_as_often_as_it_says_whenever_one_looks(error: float) -> None:
    draw, trials = np.random.default_rng(0), 1000
    missed = 0
    for _ in range(trials):
        seen = [(each, each.anytime_half_width(error)) for each in looks(draw.normal(0.002, 0.001, SEEDS))]
        missed += any(half is not None and abs(each.mean - 0.002) > half for each, half in seen)
    assert missed / trials < error


@pytest.mark.parametrize("cost", [0.003, -0.003])
def test_a_cost_of_the_margin_is_called_equivalent_at_most_as_often_as_it_says(cost: float) -> None:
    draw, trials, error = np.random.default_rng(0), 1000, 0.05
    told = [[each.anytime_verdict(0.003, error) for each in looks(draw.normal(cost, 0.001, SEEDS))] for _ in range(trials)]
    assert sum(EQUIVALENT in words for words in told) / trials < error


def test_it_tells_of_the_kept_seeds_what_their_page_says() -> None:
    """docs/which.md has these numbers of seeds: two candidates at once, at 14 million parameters."""
    kept = Scale.read("14m")

    def told(cell: str, seeds: int) -> str:
        difference = kept.difference(cell)
        by_seed = dict(list(difference.by_seed.items())[:seeds])
        return SeedDifference(by_seed, difference.baseline).anytime_verdict(0.003, 0.025)

    assert [told("nvfp4_branch", seeds) for seeds in (3, 4, 5)] == [CANNOT_TELL, WORSE, WORSE]
    assert [told("block_branch", seeds) for seeds in (3, 4)] == [CANNOT_TELL, EQUIVALENT]
    assert told("delayed_branch", 5) == CANNOT_TELL


@pytest.mark.long
def test_a_question_is_tried_planned_answered_and_taken_up_again(
    low_precision_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of an emulated precision, as the hours are over then; no speed is claimed of it. The baseline dies once."""
    recipe = low_precision_recipe | {"data": low_precision_recipe["data"] | {"held_out": 0.05}, "batch": {"tokens": 128}}
    recipe["model"]["config"] |= {"vocab_size": 125, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    del recipe["precision"], recipe["evaluate"], recipe["checkpoint"], recipe["fp8_config"], recipe["train"]
    recipe |= {"batch": {"tokens": 128, "microbatch": 1}, "train": {"epochs": 1}}
    file = write_recipe(recipe, tmp_path)
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    popen, dies = subprocess.Popen, ["rounds/fp32"]

    def dying_once(command: list[str], **options: Any) -> subprocess.Popen:
        return popen(["false"] if dies and dies[0] in command[-1] and dies.pop() else command, **options)

    monkeypatch.setattr(subprocess, "Popen", dying_once)
    command = [str(file), "--run_dir", str(tmp_path / "which"), "--precisions", "fp32,current,current+head"]
    with pytest.raises(InputError, match="80 are the least"):
        which.main([*command, "--hours", "0.00001"])
    write_recipe(recipe | {"optimizer": {"learning_rate": 0.02}}, tmp_path)  # nothing is fixed yet
    command += ["--steps", "80"]
    with pytest.raises(InputError, match=r"rounds/fp32-seed=42\.log"):
        which.main([*command, "--hours", "0.00001"])
    assert not list(tmp_path.glob("which/rounds/current*")), "which would have begun with the baseline's checkpoint"
    command[0] = os.path.relpath(file)
    assert which.main([*command, "--hours", "0.00001"]) == 1
    (verdict,) = json.loads((tmp_path / "which" / "verdict.json").read_text())["candidates"].values()  # its head stays in BF16
    ((seed, cost),) = verdict["served"]["by_seed"].items()
    assert seed == "42" and cost != 0 and verdict["speedup"] is verdict["memory_gib"] is None
    assert "current: cannot tell" in capsys.readouterr().out
    assert which.main([*command, "--hours", "0.00001"]) == 1 and "started" not in capsys.readouterr().out


def test_every_candidate_gets_a_verdict_its_cost_in_tokens_and_advice(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five rounds that have ended. Speeds are in the baseline's; the loss falls by 0.2 a unit of ln(tokens)."""
    above = {
        "delayed": (1.3, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
        "current": (0.9, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
        "nvfp4": (2.0, [0.049, 0.050, 0.051, 0.050, 0.050]),
        "mxfp8": (1.2, [0.0, 0.004, 0.008, 0.004, 0.004]),
    }
    small_recipe["train"] = {"steps": 400}
    file, folder, names = write_recipe(small_recipe, tmp_path), tmp_path / "which", ["bf16", *above]
    protocol = Protocol(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    folder.mkdir()
    (folder / "which.json").write_text(json.dumps(asdict(protocol)))
    question, noise = Question(load_recipe(file), file, (), which.ON_CPU, folder), np.random.default_rng(0)
    rounds = Rounds(protocol)

    def train(slope: float, spread: float = 0.0) -> None:
        rounds.runs.clear()
        for seed in range(5):
            cells = {cell.values["cell"]: cell for cell in question.round(protocol, 42 + seed, list(above)).cells}
            for name, cell in cells.items():
                speed, costs = above.get(name, (1.0, [0.0] * 5))
                leave_behind(cell, 400, held_out=2.0 + costs[seed], tokens_per_second=1000.0 * speed * (1 + seed))
                lines = [json.loads(line) for line in (cell.run_dir / "metrics.jsonl").read_text().splitlines()]
                lines = [line for line in lines if line["step"] > 80 or name == "bf16"]  # a branch has its own steps alone
                for line in lines[:-1]:
                    line["loss"] = 3 + slope * np.log(line["step"]) + spread * noise.normal()
                (cell.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            rounds.runs.append({name: cell.record() for name, cell in cells.items()})

    train(slope=-0.2)
    assert {len(group) for group in grouped([run for each in rounds.runs for run in each.values()]).values()} == {5}
    command = [str(file), "--run_dir", str(folder), "--hours", "0.000001"]
    assert which.main(command) == 1, "mxfp8 is open, and the hours are over"
    said, verdict = capsys.readouterr().out, json.loads((folder / "verdict.json").read_text())["candidates"]
    advice = {name: (each["word"], each["advice"].split()[0]) for name, each in verdict.items()}
    assert advice == {
        "delayed": ("equivalent", "use"),
        "current": ("equivalent", "not"),
        "nvfp4": ("worse", "pays"),
        "mxfp8": ("cannot tell", "about"),
    }
    assert verdict["nvfp4"]["tokens"] == pytest.approx(np.exp(0.05 / 0.2)) and "pays only over 1.28 times" in said
    assert verdict["delayed"]["gain_at_equal_loss"] == pytest.approx(1.3 / np.exp(0.0005 / 0.2))
    assert max(map(abs, verdict["delayed"]["trained"]["by_seed"].values())) < 1e-9, "their last losses are of the same steps"
    assert verdict["mxfp8"]["more_seconds"] >= 4.0 + 3.2, "a seed is 400 steps and 320, though none was started long ago"
    assert f"train_accelerate.py {file} precision=delayed" in said
    assert rows_of(said)["bf16"][-1][:2] == ["5", "2.0000"] and rows_of(said)["bf16"][-1][3] == "3,000"
    assert "+2.500 ±" in rows_of(said)["nvfp4"][-1][1]
    ((halted := folder / "rounds" / "nvfp4-seed=43") / "summary.json").unlink()
    lines = (halted / "metrics.jsonl").read_text().splitlines(keepends=True)
    (halted / "metrics.jsonl").write_text("".join([*lines[:-1], '{"step": 400, "event": "halted", "reason": "NaN"}\n']))
    assert which.main(command) == 1 and "nvfp4: broke off" in (said := capsys.readouterr().out)
    assert rows_of(said)["mxfp8"][-1][0] == "5" and "started" not in said, "the rounds after it are told of"
    branched = replace(rounds, protocol=replace(protocol, begin_with="step-00000080"))
    assert branched.verdict("nvfp4").tokens == pytest.approx((400 * np.exp(0.05 / 0.2) - 80) / 320), "of those after the first 80"
    assert "train.begin_with=step-00000080" in which.answer(question, branched.protocol, branched.verdicts())
    train(slope=0.0, spread=0.1)
    delayed, *_ = verdicts = rounds.verdicts()
    answer = which.answer(question, protocol, verdicts)
    assert delayed.word == EQUIVALENT and delayed.tokens is None and "not known" in delayed.advice and "Stay" not in answer
    for changed in (["--margin", "1"], ["--seeds", "4"]):
        with pytest.raises(InputError, match=changed[0].strip("-")):
            which.main([*command, *changed])
    write_recipe(small_recipe | {"optimizer": {"learning_rate": 0.5}}, tmp_path)
    with pytest.raises(InputError, match="learning_rate"):
        which.main(command)
    (folder / "which.json").write_text("{")
    with pytest.raises(InputError, match=r"which\.json"):
        which.main(command)


def test_trainings_are_as_long_as_the_hours_and_the_text_allow(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(small_recipe | {"train": {"steps": 5000}}, tmp_path))
    figures = {"step": 12, "epoch": 0.005, "epoch/code": 0.012, "epoch/prose": 0.004}
    record, seconds = RunRecord(tmp_path, {}, {}, [figures], {"steps": 12}), {"bf16": 1.0, "delayed": 0.5}
    (checkpoint := tmp_path / "mine").mkdir()
    (checkpoint / "state.json").write_text('{"progress": {"step": 300}}')

    def fit(hours: float, steps: int | None = None, begin_with: Path | None = None) -> tuple[int, int]:
        options = argparse.Namespace(hours=hours, seeds=4, steps=steps, begin_with=begin_with and str(begin_with))
        return which.steps_that_fit(options, recipe, record, seconds, 10.0, 3600 * hours)

    assert fit(1) == (628, 126), "4 rounds of 628 steps of bf16, 502 of delayed and two starts take an hour"
    assert fit(8) == (1000, 200), "code is seen once"
    assert fit(0.25, begin_with=checkpoint) == (436, 300), "136 more steps of each"
    with pytest.raises(InputError, match="seen again"):
        fit(8, steps=1001)
    seconds["delayed"] = 0.45  # 0.143 hours
    with pytest.raises(InputError, match="80 are the least") as refused:
        fit(0.1)
    assert fit(float(str(refused.value).split()[-2]))[0] >= 80


@pytest.mark.parametrize(
    ("arguments", "train", "named"),
    [
        (["--precisions", "fp32"], {}, "--precisions"),
        (["train.steps=9"], {}, "train.steps"),
        (["train.begin_with=nowhere"], {}, "train.begin_with"),
        (["--from", "nowhere"], {}, "--from"),
        (["--steps", "79"], {}, "--steps"),
        ([], {"steps": 79}, "train.steps"),
        ([], {"begin_with": "nowhere/step-00000100"}, "nowhere.*--from"),  # the recipe's checkpoint is that of all
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    arguments: list[str], train: dict[str, Any], named: str, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    file = write_recipe(small_recipe | {"train": {"steps": 500} | train}, tmp_path)
    with pytest.raises(InputError, match=named):
        which.main([str(file), *arguments, "--run_dir", str(tmp_path / "which")])
    assert not (tmp_path / "which").exists()


def test_a_precision_that_cannot_take_the_packs_is_left_out_and_named(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks take tokens in multiples of 128."""
    file = write_recipe(small_recipe | {"data": small_recipe["data"] | {"length": 64}}, tmp_path)
    question = Question(load_recipe(file), file, (), which.ON_CPU, tmp_path / "which")
    assert [cell.values["cell"] for cell in question.trial(["bf16", "block", "mxfp8"]).cells] == ["bf16", "mxfp8"]
    assert "block" in (said := capsys.readouterr().out) and "128" in said
    with pytest.raises(InputError, match="128"):
        question.trial(["block", "bf16"])


def test_a_candidate_is_what_its_name_says_with_the_options_that_it_takes(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write_recipe(small_recipe | {"fp8_config": {"fp8_format": "E4M3", "margin": 1}}, tmp_path)
    given, names = ("fp8_config.on_unsupported=fallback", "fp8_config.scope=linear+head"), ["bf16", "delayed", "current", "nvfp4"]
    question = Question(load_recipe(file, given), file, given, which.ON_CPU, tmp_path / "which")
    settings = {cell.values["cell"]: cell.recipe.fp8_config for cell in question.trial(names).cells}
    options = [(each.fp8_format, each.margin) for each in settings.values()]
    assert options == [(None, None), ("E4M3", 1), ("E4M3", None), (None, None)]
    assert {(each.on_unsupported, each.scope) for each in settings.values()} == {("emulate", "linear")}, "no override's"
    protocol = Protocol(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    kept = question.round(protocol, 42, ["current"]).cells[0].recipe.checkpoint
    assert kept.every == 80 and kept.keep == 400, "what is saved where it is stopped, however often, leaves the trunk's"
    answer = which.answer(question, protocol, [Verdict("current", speedup=1.2, tokens=1.0, word=EQUIVALENT, advice=USE)])
    assert load_recipe(file, answer.splitlines()[-1].split()[6:]).fp8_config.margin is None
