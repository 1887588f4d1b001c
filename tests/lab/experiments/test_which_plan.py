"""The plan of `python -m pretrain which`: checks of options, and the length of trainings."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from lab.experiments import which
from lab.experiments.verdicts import USE, Verdict
from lab.experiments.which_answer import answer
from lab.experiments.which_plan import Rounds, WhichPlan
from lab.experiments.which_trainings import WhichTrainings, candidate_of, train
from packing.store import open_packs
from packing.stream import order_of
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe
from tests.forked_commands import forking


def test_trainings_are_as_long_as_hours_and_data_allow(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = load_recipe(write_recipe(small_recipe | {"train": {"steps": 5000}}, tmp_path))
    seconds = {"bf16": 1.0, "delayed": 0.5}
    checkpoint = tmp_path / "mine"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text('{"progress": {"step": 300}}')

    def fit(
        hours: float,
        steps: int | None = None,
        begin_with: Path | None = None,
        gpus: int = 1,
        epoch: int = 1000,
    ) -> tuple[int, int]:
        planned = WhichPlan(begin_with and str(begin_with), 0.003, [], seconds, 10.0, 4, 0, 0)
        fitted = which.fit_steps(
            planned,
            options=argparse.Namespace(hours=hours, steps=steps),
            recipe=recipe,
            in_an_epoch=epoch,
            at_once=gpus,
            seconds_left=3600 * hours,
        )
        return fitted.steps, fitted.trunk

    assert fit(1) == (628, 126), (
        "4 rounds of 628 steps in bf16, 502 in delayed, and two starts take an hour"
    )
    assert fit(8) == (1000, 200), "one epoch is the limit"
    assert fit(1, steps=80) == (80, 16)
    assert fit(0.25, begin_with=checkpoint) == (436, 300), "136 more steps of each"
    # With n steps, three rounds together take about 40 + 2.2 n seconds, and another round 10 + n.
    assert fit(0.9, gpus=2) == (997, 200)
    # With n more steps, three rounds together take 30 + 2.5 n seconds, and another round 10 + n.
    assert fit(0.25, begin_with=checkpoint, gpus=2) == (545, 300)
    seconds["delayed"] = 0.45  # 80 steps take 0.143 hours
    with pytest.raises(InputError, match="80 steps, which is the minimum") as refused:
        fit(0.1)
    suggested_hours = float(str(refused.value).split()[-3])
    assert fit(suggested_hours)[0] >= 80
    with pytest.raises(InputError, match="only 79 steps per run, but 80 is the minimum"):
        fit(1, epoch=79)


def test_too_few_hours_are_refused_before_the_trials(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small_recipe | {"batch": {"tokens": 32, "microbatch": 1}, "train": {"epochs": 1}}
    file = write_recipe(recipe, tmp_path)
    command = [str(file), "--run_dir", str(tmp_path / "which"), "--precisions", "fp32,bf16"]
    with pytest.raises(InputError, match=r"--hours 0\.01: .* set --hours to 0\.0[0-9]+ or more"):
        which.main(commands.read("which", [*command, "--hours", "0.01"]))
    assert not (tmp_path / "which").exists()


@pytest.mark.parametrize(
    ("arguments", "train", "message"),
    [
        (["--precisions", "fp32"], {}, "--precisions"),
        (["--precisions", "fp32,delayd"], {}, "; unknown: delayd$"),
        (["--precisions", "bf16,bf16+head"], {}, "; unknown: bf16[+]head$"),
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
    assert which.steps_in_an_epoch(load_recipe(write_recipe(small_recipe, tmp_path))) == 120
    sources = [{"name": "code", "weight": 0.75}, {"name": "prose", "weight": 0.25}]
    small_recipe["data"] |= {"packs": str(tmp_path / "mixed"), "sources": sources}
    recipe = load_recipe(write_recipe(small_recipe, tmp_path))
    steps = which.steps_in_an_epoch(recipe)
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
    assert which.steps_in_an_epoch(recipe) == steps


def test_trials_and_rounds_use_several_gpus(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write_recipe(small_recipe, tmp_path)
    trainings = WhichTrainings(
        load_recipe(file), file, (), CONFIGURATIONS / "bf16.yaml", tmp_path / "which", gpus=2
    )
    assert trainings.trial(["fp32", "bf16"]).at_once == 2
    plan = WhichPlan(None, 0.003, [], {"fp32": 1.0, "bf16": 1.0}, 5.0, 5, 400, 80)
    matrix = trainings.rounds(plan, [42, 43], ["bf16"])
    assert matrix.at_once == 2
    assert [candidate_of(cell) for cell in matrix.cells] == ["fp32", "fp32", "bf16", "bf16"]
    rounds = Rounds(plan, at_once=2)
    assert rounds.seconds(["bf16"]) == 0.2 * 405 + 325, "bf16 waits for a fifth of fp32"
    assert rounds.seconds(["bf16", "bf16"]) == 405 + 325
    assert rounds.rounds_together() == 3, "no verdict is possible before three rounds"
    # The GPUs train fp32 and fp32, then fp32 and bf16, then bf16 and bf16.
    assert rounds.seconds(["bf16"], 3) == 405 + 405 + 325
    assert rounds.planned_seconds() == 405 + 405 + 325 + 2 * (81 + 325)
    assert Rounds(plan).rounds_together() == 1
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
    matrix = trainings.trial(["fp32", "bf16"])
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
    cells = trainings.trial(["bf16", "block", "mxfp8"]).cells
    assert [candidate_of(cell) for cell in cells] == ["bf16", "mxfp8"]
    output = capsys.readouterr().out
    assert "block" in output and "128" in output
    with pytest.raises(InputError, match="128"):
        trainings.trial(["block", "bf16"])


def test_a_plan_is_continued_if_only_the_settings_of_trials_are_new(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    file = write_recipe(small_recipe, tmp_path)
    trainings = WhichTrainings(
        load_recipe(file), file, (), CONFIGURATIONS / "cpu.yaml", tmp_path / "which"
    )
    trial = trainings.trial(["fp32"]).baseline
    trial.run_dir.mkdir(parents=True)
    plan = WhichPlan(None, 0.003, ["fp32", "bf16"], {"fp32": 1.0, "bf16": 1.0}, 5.0, 5, 250, 50)
    (trainings.folder / which.PLAN_FILE).write_text(json.dumps(asdict(plan)))
    options = commands.read("which", [str(file)])
    for key, value in {"evaluate.packs": 3, "schedule.warmup": 1}.items():
        trial.mark.write_text(json.dumps({"settings": trial.settings | {key: value}}))
        assert which.load_plan(trainings, options) == plan
    trial.mark.write_text(json.dumps({"settings": trial.settings | {"batch.tokens": 64}}))
    with pytest.raises(InputError, match=r"batch\.tokens"):
        which.load_plan(trainings, options)


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
    settings = [cell.recipe.fp8_config for cell in trainings.trial(names).cells]
    options = [(fp8_config.fp8_format, fp8_config.margin) for fp8_config in settings]
    assert options == [(None, None), ("E4M3", 1), ("E4M3", None), (None, None)]
    common = {(fp8_config.on_unsupported, fp8_config.scope) for fp8_config in settings}
    assert common == {("emulate", "linear")}, "the command's values precede the overrides"
    plan = WhichPlan(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    checkpoint = trainings.rounds(plan, [42], ["current"]).cells[0].recipe.checkpoint
    assert checkpoint.every == 80 and checkpoint.keep == 400, (
        "checkpoints of interrupted runs must not displace the trunk's checkpoint"
    )
    best = Verdict("current", speedup=1.2, tokens=1.0, gain_interval=[1.1, 1.3], advice=USE)
    text = answer(trainings, plan, [best])
    assert load_recipe(file, text.splitlines()[-1].split()[6:]).fp8_config.margin is None
