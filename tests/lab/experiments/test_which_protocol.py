"""The protocol of `which`: checks of options, and the length of trainings."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from lab.experiments import which, which_length
from lab.experiments.protocol import Protocol, Rounds
from lab.experiments.verdicts import USE, Verdict
from lab.experiments.which_answer import answer
from lab.experiments.which_length import allowed_steps, fit_steps, steps_in_an_epoch
from lab.experiments.which_trainings import WhichTrainings, candidate_of, train
from packing.store import open_packs
from packing.stream import order_of
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe
from tests.forked_commands import forking
from tests.lab.made_runs import leave_behind


def test_trainings_are_as_long_as_the_hours_allow(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mine"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text('{"progress": {"step": 300}}')
    seconds = {"bf16": 1.0, "delayed": 0.5}

    def fit(
        hours: float, begin_with: Path | None = None, gpus: int = 1, steps: int = 0
    ) -> tuple[int, int]:
        checkpoint = begin_with and str(begin_with)
        protocol = Protocol(checkpoint, 0.003, [], seconds, 10.0, 4, steps, 0)
        allowed = range(350 if begin_with else 80, 1001)
        fitted = fit_steps(protocol, allowed, at_once=gpus, hours=hours, seconds_left=3600 * hours)
        return fitted.steps, fitted.trunk

    assert fit(1) == (628, 126), (
        "4 rounds of 628 steps in bf16, 502 in delayed, and two starts take an hour"
    )
    assert fit(8) == (1000, 200), "the longest allowed run"
    assert fit(0.001, steps=90) == (90, 18), "--steps"
    assert fit(0.25, begin_with=checkpoint) == (436, 300), "136 more steps of each"
    # Runs of n steps take 10 + n and 10 + 0.4 n seconds. Three waves of two, and another one.
    assert fit(0.9, gpus=2) == (1000, 200)
    assert fit(0.5, gpus=2) == (628, 126)
    with pytest.raises(InputError, match="80 steps, which is the minimum") as refused:
        fit(0.1)
    suggested_hours = float(str(refused.value).split()[-3])
    assert fit(suggested_hours)[0] >= 80


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


@pytest.mark.parametrize(("steps", "of_recipe"), [(79, 500), (None, 79)])
def test_too_few_steps_are_refused_before_packs_are_prepared(
    steps: int | None,
    of_recipe: int,
    small_recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(which_length, "steps_in_an_epoch", lambda recipe: pytest.fail("prepared"))
    file = write_recipe(small_recipe | {"train": {"steps": of_recipe}}, tmp_path)
    options = argparse.Namespace(steps=steps, begin_with=None)
    with pytest.raises(InputError, match="only 79 steps per run, but 80 is the minimum"):
        allowed_steps(options, load_recipe(file))


def test_too_few_hours_leave_no_protocol(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """The trials have ended, so more hours continue with them."""
    recipe = small_recipe | {"batch": {"tokens": 32, "microbatch": 1}, "train": {"epochs": 1}}
    file = write_recipe(recipe, tmp_path)
    folder = tmp_path / "which"
    trainings = WhichTrainings(load_recipe(file), file, (), CONFIGURATIONS / "cpu.yaml", folder)
    for cell in trainings.trials(["fp32", "bf16"]).cells:
        leave_behind(cell, held_out=2.0, tokens_per_second=32)
    command = [str(file), "--run_dir", str(folder), "--precisions", "fp32,bf16"]
    with pytest.raises(InputError, match=r"--hours 0\.01: .* set --hours to [0-9.]+ or more"):
        which.main(commands.read("which", [*command, "--hours", "0.01"]))
    assert not (folder / "which.json").exists()


@pytest.mark.parametrize(
    ("arguments", "train", "message"),
    [
        (["--precisions", "fp32"], {}, "--precisions fp32: set at least two"),
        (["--precisions", "fp32,delayd"], {}, "--precisions: delayd: unknown; choose from fp32"),
        (["--precisions", "bf16,bf16+head"], {}, "--precisions: bf16[+]head: unknown"),
        (["fp8_config.scope=linear+head"], {}, "fp8_config.scope"),
        (["train.steps=9"], {}, "train.steps.*--steps"),
        (["train.begin_with=nowhere"], {}, "train.begin_with"),
        (["--from", "nowhere"], {}, "--from"),
        (["--steps", "79"], {}, "--steps"),
        (["--steps", "0"], {}, "0 is not a whole number of at least 1"),
        (["--seeds", "1000"], {}, "--seeds 20 or fewer"),
        (["--steps", "1000000"], {}, "repeated after step [0-9]+, "),
        ([], {"steps": 79}, "train.steps"),
        # All trainings branch from the recipe's checkpoint.
        ([], {"begin_with": "nowhere/step-00000100"}, "nowhere.*--from"),
    ],
)
def test_options_without_an_answer_are_refused_before_anything_runs(
    arguments: list[str],
    train: dict[str, Any],
    message: str,
    small_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    file = write_recipe(small_recipe | {"train": {"steps": 500} | train}, tmp_path)
    with pytest.raises(InputError, match=message):
        which.main(
            commands.read("which", [str(file), *arguments, "--run_dir", str(tmp_path / "which")])
        )
    assert not (tmp_path / "which").exists()


def test_too_few_seeds_for_the_candidates_are_refused_at_once(
    small_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    file = write_recipe(small_recipe | {"train": {"steps": 500}}, tmp_path)
    command = [str(file), "--run_dir", str(tmp_path / "which"), "--seeds", "3"]
    with pytest.raises(InputError, match=r"--seeds 3: .* 5 precisions needs at least 4 seeds"):
        which.main(
            commands.read("which", [*command, "--precisions", "bf16,delayed,current,block,nvfp4"])
        )
    assert not (tmp_path / "which" / "trial").exists()


def test_an_epoch_ends_when_one_source_is_used_up(
    small_recipe: dict[str, Any],
    small_packs: Path,
    tmp_path: Path,
) -> None:
    """Mixes two sources of 120 packs each, with weights 0.75 and 0.25."""
    (tmp_path / "mixed").mkdir()
    for name in ("code", "prose"):
        (tmp_path / "mixed" / name).symlink_to(small_packs)
    small_recipe["batch"] = {"tokens": small_recipe["data"]["length"]}
    assert steps_in_an_epoch(load_recipe(write_recipe(small_recipe, tmp_path))) == 120
    sources = [{"name": "code", "weight": 0.75}, {"name": "prose", "weight": 0.25}]
    small_recipe["data"] |= {"packs": str(tmp_path / "mixed"), "sources": sources}
    recipe = load_recipe(write_recipe(small_recipe, tmp_path))
    steps = steps_in_an_epoch(recipe)
    order = order_of(open_packs(recipe.data, "train"), recipe.seed)
    assert steps == 160 and order.figures(steps)["epoch/code"] == 1


@pytest.mark.parametrize(("window", "steps"), [(1000, math.inf), (10**6, 12)])
def test_a_stream_that_ends_in_its_first_part_is_an_epoch(
    window: int, steps: float, small_recipe: dict[str, Any], words: Path, tmp_path: Path
) -> None:
    """The text has 1,501 tokens, which are 24 packs. A step has two packs."""
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 " * 500)
    small_recipe["batch"] = {"tokens": 128}
    small_recipe["data"] = {
        "source": str(text),
        "tokenizer": str(words),
        "packs": str(tmp_path / "packs"),
        "length": 64,
        "streaming": {"disk_gb": 0.1, "window": window},
    }
    recipe = load_recipe(write_recipe(small_recipe, tmp_path), ["evaluate.every=null"])
    assert steps_in_an_epoch(recipe) == steps


def test_trials_and_rounds_use_several_gpus(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write_recipe(small_recipe, tmp_path)
    trainings = WhichTrainings(
        load_recipe(file), file, (), CONFIGURATIONS / "bf16.yaml", tmp_path / "which", gpus=2
    )
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
    with pytest.raises(InputError, match="--gpus"):
        which.main(commands.read("which", [str(file), "--gpus", "0"]))


def test_no_training_starts_after_a_baseline_that_failed(
    small_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline's learning rate is so large that its first loss after an update is NaN."""
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    file = write_recipe(small_recipe, tmp_path)
    overrides = ("optimizer.learning_rate=1e30", "parity=false")
    trainings = WhichTrainings(
        load_recipe(file, overrides),
        file,
        overrides,
        CONFIGURATIONS / "cpu.yaml",
        tmp_path / "which",
    )
    matrix = trainings.trials(["fp32", "bf16"])
    with pytest.raises(InputError, match=r"fp32\.log: this training has halted"):
        train(matrix, may_fail=False)
    assert [cell.log.exists() for cell in matrix.cells] == [True, False]


def test_a_precision_that_the_packs_do_not_suit_is_skipped_and_named(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`block` needs a multiple of 128 tokens."""
    file = write_recipe(small_recipe | {"data": small_recipe["data"] | {"length": 64}}, tmp_path)
    trainings = WhichTrainings(
        load_recipe(file), file, (), CONFIGURATIONS / "cpu.yaml", tmp_path / "which"
    )
    cells = trainings.trials(["bf16", "block", "mxfp8"]).cells
    assert [candidate_of(cell) for cell in cells] == ["bf16", "mxfp8"]
    output = capsys.readouterr().out
    assert "block" in output and "128" in output
    with pytest.raises(InputError, match="128"):
        trainings.trials(["block", "bf16"])


def test_a_candidate_has_the_options_that_its_precision_accepts(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    file = write_recipe(
        small_recipe | {"fp8_config": {"fp8_format": "E4M3", "margin": 1}}, tmp_path
    )
    overrides = ("fp8_config.on_unsupported=fallback", "fp8_config.scope=linear+head")
    names = ["bf16", "delayed", "current", "nvfp4"]
    recipe = load_recipe(file, overrides)
    trainings = WhichTrainings(
        recipe, file, overrides, CONFIGURATIONS / "cpu.yaml", tmp_path / "which"
    )
    settings = [cell.recipe.fp8_config for cell in trainings.trials(names).cells]
    options = [(fp8_config.fp8_format, fp8_config.margin) for fp8_config in settings]
    assert options == [(None, None), ("E4M3", 1), ("E4M3", None), (None, None)]
    common = {(fp8_config.on_unsupported, fp8_config.scope) for fp8_config in settings}
    assert common == {("emulate", "linear")}, "the command's values precede the overrides"
    protocol = Protocol(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    checkpoint = trainings.rounds(protocol, [42], ["current"]).cells[0].recipe.checkpoint
    assert checkpoint.every == 80 and checkpoint.keep == 400, (
        "checkpoints of interrupted runs must not displace the trunk's checkpoint"
    )
    best = Verdict("current", speedup=1.2, tokens=1.0, gain_interval=[1.1, 1.3], advice=USE)
    text = answer(trainings, protocol, [best])
    assert load_recipe(file, text.splitlines()[-1].split()[6:]).fp8_config.margin is None
