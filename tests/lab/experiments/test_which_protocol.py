"""The protocol of `which`: checks of options, and the length of trainings."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from lab.experiments.protocol import Protocol, Rounds
from lab.experiments.verdicts import USE, Verdict
from lab.experiments.which_answer import answer
from lab.experiments.which_length import allowed_steps, fit_steps, steps_in_an_epoch
from lab.experiments.which_trainings import candidate_of, train
from packing.store import open_packs
from packing.stream import order_of
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe
from tests.forked_commands import forking
from tests.lab.conftest import Question
from tests.lab.made_runs import leave_behind


@pytest.mark.parametrize(
    ("hours", "options", "expected"),
    [
        # 4 rounds of 628 steps in bf16, 502 in delayed, and two starts take an hour.
        (1, {}, (628, 126)),
        # The longest allowed run.
        (8, {}, (1000, 200)),
        (0.001, {"steps": 90}, (90, 18)),
        # 136 more steps of each.
        (0.25, {"branches": True}, (436, 300)),
        # Runs of n steps take 10 + n and 10 + 0.4 n seconds. Three waves of two, and another one.
        (0.9, {"gpus": 2}, (1000, 200)),
        (0.5, {"gpus": 2}, (628, 126)),
        (0.1, {}, None),
    ],
)
def test_trainings_are_as_long_as_the_hours_allow(
    hours: float, options: dict[str, Any], expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text('{"progress": {"step": 300}}')
    branches = "branches" in options
    seconds = {"bf16": 1.0, "delayed": 0.5}
    checkpoint = str(tmp_path) if branches else None
    protocol = Protocol(checkpoint, 0.003, [], seconds, 10.0, 4, options.get("steps", 0), 0)

    def fit(hours: float) -> tuple[int, int]:
        time = {"hours": hours, "seconds_left": 3600 * hours}
        allowed = range(350 if branches else 80, 1001)
        fitted = fit_steps(protocol, allowed, at_once=options.get("gpus", 1), **time)
        return fitted.steps, fitted.trunk

    if expected:
        assert fit(hours) == expected
    else:
        with pytest.raises(InputError, match="80 steps, which is the minimum") as refused:
            fit(hours)
        assert fit(float(str(refused.value).split()[-3]))[0] >= 80


@pytest.mark.parametrize(
    ("overrides", "steps", "allowed"),
    [
        ((), None, range(80, 121)),
        (("train.steps=100",), None, range(80, 101)),
        ((), 90, range(90, 91)),
    ],
)
def test_runs_are_no_longer_than_an_epoch_and_the_recipe(
    overrides: tuple[str, ...],
    steps: int | None,
    allowed: range,
    small_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    small_recipe["batch"] = {"tokens": small_recipe["data"]["length"]}
    file = write_recipe(small_recipe | {"train": {"epochs": 2}}, tmp_path)
    options = argparse.Namespace(steps=steps, begin_with=None)
    assert allowed_steps(options, load_recipe(file, overrides)) == allowed


def test_too_few_hours_leave_no_protocol(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """The trials have ended, so more hours continue with them."""
    recipe = small_recipe | {"batch": {"tokens": 32, "microbatch": 1}, "train": {"epochs": 1}}
    question = Question(recipe, tmp_path)
    for cell in question.trainings().trials(["fp32", "bf16"]).cells:
        leave_behind(cell, held_out=2.0, tokens_per_second=32)
    with pytest.raises(InputError, match=r"--hours 0\.01: .* set --hours to [0-9.]+ or more"):
        question.ask("--precisions", "fp32,bf16", "--hours", "0.01")
    assert not (tmp_path / "which" / "which.json").exists()


# Options, and words of the message. The recipe has 500 steps.
MISTAKES = {
    "--precisions fp32": "--precisions fp32: set at least two",
    "--precisions fp32,delayd": "--precisions: delayd: unknown; choose from fp32",
    "--precisions bf16,bf16+head": "--precisions: bf16[+]head: unknown",
    "fp8_config.scope=linear+head": "fp8_config.scope",
    "train.steps=9": "train.steps.*--steps",
    "train.begin_with=nowhere": "train.begin_with",
    "--from nowhere": "--from",
    # The packs are not prepared first.
    "--steps 79 data.packs=nowhere": "only 79 steps per run, but 80 is the minimum",
    "--steps 0": "0 is not a whole number of at least 1",
    "--seeds 1000": "--seeds 20 or fewer",
    "--gpus 0": "--gpus",
    "--seeds 3 --precisions bf16,delayed,current,block,nvfp4": "5 precisions needs at least 4 seed",
    "--steps 1000000": "repeated after step [0-9]+, ",
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.items())
def test_options_without_an_answer_are_refused_before_anything_runs(
    options: str, message: str, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    question = Question(small_recipe | {"train": {"steps": 500}}, tmp_path)
    with pytest.raises(InputError, match=message):
        question.ask(*options.split())
    assert not list(tmp_path.glob("which/*"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"steps": 79}, "`train.steps` .* only 79 steps per run, but 80 is the minimum"),
        # All trainings branch from the recipe's checkpoint.
        ({"steps": 500, "begin_with": "nowhere/step-00000100"}, "nowhere.*--from"),
    ],
)
def test_recipes_without_an_answer_are_refused_before_anything_runs(
    train: dict[str, Any], message: str, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        Question(small_recipe | {"train": train}, tmp_path).ask()
    assert not list(tmp_path.glob("which/*"))


def test_an_epoch_ends_when_one_source_is_used_up(
    small_recipe: dict[str, Any], small_packs: Path, tmp_path: Path
) -> None:
    """Mixes two sources of 120 packs each, with weights 0.75 and 0.25."""
    small_recipe["batch"] = {"tokens": small_recipe["data"]["length"]}
    assert steps_in_an_epoch(load_recipe(write_recipe(small_recipe, tmp_path))) == 120
    (tmp_path / "mixed").mkdir()
    weights = {"code": 0.75, "prose": 0.25}
    for name in weights:
        (tmp_path / "mixed" / name).symlink_to(small_packs)
    sources = [{"name": name, "weight": weight} for name, weight in weights.items()]
    small_recipe["data"] |= {"packs": str(tmp_path / "mixed"), "sources": sources}
    recipe = load_recipe(write_recipe(small_recipe, tmp_path))
    steps = steps_in_an_epoch(recipe)
    order = order_of(open_packs(recipe.data, "train"), recipe.seed)
    assert steps == 160 and order.metrics(steps)["epoch/code"] == 1


@pytest.mark.parametrize(("window", "steps"), [(1000, math.inf), (10**6, 12)])
def test_a_stream_that_ends_in_its_first_part_is_an_epoch(
    window: int, steps: float, small_recipe: dict[str, Any], words: Path, tmp_path: Path
) -> None:
    """The text has 1,501 tokens, which are 24 packs. A step has two packs."""
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 " * 500)
    data = {"source": str(text), "tokenizer": str(words), "packs": str(tmp_path / "packs")}
    data |= {"length": 64, "streaming": {"disk_gb": 0.1, "window": window}}
    written = write_recipe(small_recipe | {"batch": {"tokens": 128}, "data": data}, tmp_path)
    assert steps_in_an_epoch(load_recipe(written, ["evaluate.every=null"])) == steps


def test_trials_and_rounds_use_several_gpus(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    trainings = Question(small_recipe, tmp_path).trainings(config="bf16", gpus=2)
    assert trainings.trials(["fp32", "bf16"]).at_once == 2
    protocol = Protocol(None, 0.003, [], {"fp32": 1.0, "bf16": 1.0}, 5.0, 5, 400, 80)
    matrix = trainings.rounds(protocol, [42, 43], ["bf16"])
    assert matrix.at_once == 2
    assert [candidate_of(cell) for cell in matrix.cells] == ["fp32", "fp32", "bf16", "bf16"]
    # A run of the baseline takes 405 seconds, and a branch 325 seconds.
    rounds = Rounds(protocol, at_once=2)
    assert rounds.seconds(["bf16"]) == (405 + 325) / 2
    assert rounds.seconds(["bf16", "bf16"]) == 2 * (405 + 325 + 325) / 3
    assert rounds.rounds_together() == 3, "no verdict is possible before three rounds"
    assert rounds.seconds(["bf16"], 3) == 3 * (405 + 325) / 2
    assert rounds.planned_seconds() == 5 * (405 + 325) / 2
    assert Rounds(protocol).rounds_together() == 1
    assert Rounds(protocol).seconds(["bf16"]) == 405 + 325


def test_no_training_starts_after_a_baseline_that_failed(
    small_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline's learning rate is so large that its first loss after an update is NaN."""
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    overrides = ("optimizer.learning_rate=1e30", "parity=false")
    matrix = Question(small_recipe, tmp_path).trainings(*overrides).trials(["fp32", "bf16"])
    with pytest.raises(InputError, match=r"fp32\.log: this training has halted"):
        train(matrix, may_fail=False)
    assert [cell.log.exists() for cell in matrix.cells] == [True, False]


def test_a_precision_that_the_packs_do_not_suit_is_skipped_and_named(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`block` needs a multiple of 128 tokens."""
    small_recipe["data"]["length"] = 64
    trainings = Question(small_recipe, tmp_path).trainings()
    cells = trainings.trials(["bf16", "block", "mxfp8"]).cells
    assert [candidate_of(cell) for cell in cells] == ["bf16", "mxfp8"]
    output = capsys.readouterr().out
    assert "block" in output and "128" in output
    with pytest.raises(InputError, match="128"):
        trainings.trials(["block", "bf16"])


def test_a_candidate_has_the_options_that_its_precision_accepts(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The values of the command precede the overrides."""
    overrides = ("fp8_config.on_unsupported=fallback", "fp8_config.scope=linear+head")
    names = ["bf16", "delayed", "current", "nvfp4"]
    recipe = small_recipe | {"fp8_config": {"fp8_format": "E4M3", "margin": 1}}
    trainings = Question(recipe, tmp_path).trainings(*overrides)
    settings = [cell.recipe.fp8_config for cell in trainings.trials(names).cells]
    options = [(fp8_config.fp8_format, fp8_config.margin) for fp8_config in settings]
    assert options == [(None, None), ("E4M3", 1), ("E4M3", None), (None, None)]
    common = {(fp8_config.on_unsupported, fp8_config.scope) for fp8_config in settings}
    assert common == {("emulate", "linear")}
    protocol = Protocol(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    checkpoint = trainings.rounds(protocol, [42], ["current"]).cells[0].recipe.checkpoint
    # Checkpoints of interrupted runs must not displace the trunk's checkpoint.
    assert checkpoint.every == 80 and checkpoint.keep == 400
    best = Verdict("current", speedup=1.2, tokens=1.0, gain_interval=[1.1, 1.3], advice=USE)
    command = answer(trainings, protocol, [best]).splitlines()[-1].split()
    assert load_recipe(tmp_path / "recipe.yaml", command[6:]).fp8_config.margin is None
