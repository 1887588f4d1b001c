"""`which --served` and `which --candidates`: judging candidates by the loss of the served model."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from lab.compare.differences import BETTER
from lab.experiments import matrix_run, which
from lab.experiments.protocol import Protocol
from lab.experiments.verdicts import USE, Verdict
from lab.experiments.which_answer import answer
from lab.experiments.which_trainings import WhichTrainings
from pretrain.__main__ import main
from pretrain.launch.launcher import CONFIGURATIONS, Launch
from pretrain.launch.processes import Training
from pretrain.plan.checks import check_settings
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import TrainSettings
from tests.conftest import write_recipe
from tests.forked_commands import forking
from tests.lab.made_runs import leave_behind, rows_of

CANDIDATES: dict[str, Any] = {
    "bf16": {"precision": "bf16"},
    "mean": {"precision": "bf16", "evaluate.merge": 3, "checkpoint.every": 8},
    "tail": {
        "precision": [{"until": 0.95, "use": "bf16"}, {"use": "nvfp4"}],
        "schedule": {"decay": 0.4},
    },
}


@pytest.fixture
def recipe(low_precision_recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe of the smallest model that fits NVFP4."""
    recipe = low_precision_recipe | {"data": low_precision_recipe["data"] | {"held_out": 0.05}}
    recipe["model"]["config"] |= {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32}
    for key in ("precision", "evaluate", "checkpoint", "fp8_config", "train", "schedule"):
        del recipe[key]
    return recipe | {
        "batch": {"tokens": 128, "microbatch": 1},
        "train": {"epochs": 1},
        "evaluate": {"packs": 4},
        "fp8_config": {"keep_bf16_layers": {"last": 0}},
    }


@pytest.fixture
def ask(recipe: dict[str, Any], tmp_path: Path) -> Callable[..., int]:
    """Function that writes the candidates, and runs the command with 80 steps for one round."""
    file = write_recipe(recipe, tmp_path)

    def run(candidates: Any, *options: str) -> int:
        (tmp_path / "candidates.yaml").write_text(yaml.safe_dump(candidates))
        command = [
            *(str(file), "--run_dir", str(tmp_path / "which"), "--hours", "0.00001"),
            *("--candidates", str(tmp_path / "candidates.yaml"), *options),
        ]
        return which.main(commands.read("which", command))

    return run


def served_record(run_dir: Path) -> dict[str, Any]:
    """Return the last line of metrics.jsonl, which follows the evaluation in BF16."""
    *_, evaluation, served = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert (evaluation["held_out_precision"], served["event"]) == ("bf16", "served")
    return served


@pytest.mark.nightly
def test_candidates_are_judged_as_served_and_resumed(
    ask: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trains one round. The training of a mean is stopped and continued."""
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    start_training = matrix_run.start_training
    to_stop = ["rounds/mean-seed=42.log"]

    def start_and_stop_once(launch: Launch, environment: dict[str, str], log: Path) -> Training:
        training = start_training(launch, environment, log)
        if to_stop and str(log).endswith(to_stop[0]):
            del to_stop[0]
            metrics = log.with_suffix("") / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count("\n") > 30):
                assert not training.wait(0.01)
            training.signal(signal.SIGTERM)
        return training

    monkeypatch.setattr(matrix_run, "start_training", start_and_stop_once)
    options = ("--served", "nvfp4", "--steps", "80")
    with pytest.raises(InputError, match="mean-seed=42"):
        ask(CANDIDATES, *options)
    assert ask(CANDIDATES, *options) == 1, "one seed gives no verdict"
    output = capsys.readouterr().out
    assert "Judged by the held-out loss of the model served in nvfp4:\nmean: cannot tell" in output
    assert "| candidate | seeds | served in nvfp4 |" in output
    rounds = tmp_path / "which" / "rounds"
    assert not list(tmp_path.glob("which/*/*/checkpoints")) and not list(rounds.glob("*/final"))
    losses = {name: served_record(rounds / f"{name}-seed=42") for name in CANDIDATES}
    assert losses["mean"]["merged"] == [f"step-{step:08d}" for step in (80, 72, 64)]
    assert losses["bf16"]["merged"] == losses["tail"]["merged"] == ["step-00000080"]
    answer = json.loads((tmp_path / "which" / "verdict.json").read_text())
    assert answer["protocol"]["served"] == "nvfp4"
    for name, verdict in answer["candidates"].items():
        difference = losses[name]["served_loss"] - losses["bf16"]["served_loss"]
        assert verdict["served"]["by_seed"] == {"42": pytest.approx(difference, abs=1e-12)}
        assert difference != 0
    runs = [str(rounds / f"{name}-seed=42") for name in CANDIDATES]
    assert main(["report", *runs, "--vary", "train.begin_with", "--vary", "schedule.decay"]) == 0
    shown = rows_of(capsys.readouterr().out)["mean-seed=42"][0]
    assert f"{losses['mean']['served_loss']:.4f}" in shown
    assert ask(CANDIDATES, *options) == 1 and "started" not in capsys.readouterr().out
    for changed, served in (
        (CANDIDATES, "mxfp8"),
        (CANDIDATES | {"mean": CANDIDATES["mean"] | {"evaluate.merge": 2}}, "nvfp4"),
    ):
        key = "served" if served == "mxfp8" else "settings"
        with pytest.raises(InputError, match=f"`{key}`"):
            ask(changed, "--served", served, "--steps", "80")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"x": {"optimizer.lr": 1}}, (), r"candidates\.yaml, cell x: .*optimizer"),
        ({"x": None}, (), r"candidates\.yaml: .*cells\.x"),
        ({"tail": {"seed": 3, "data.length": 64}}, (), "cannot set `data.length, seed`"),
        ({"tail": {"fp8_config.use_autocast_during_eval": True}}, (), "cannot set `fp8_config"),
        (
            {"tail": {"fp8_config": {"keep_bf16": ["q_proj"]}}},
            (),
            "cannot set `fp8_config.keep_bf16`",
        ),
        ({"tail": {"optimizer.name": "muon"}}, (), "cannot set `optimizer.name`"),
        ({"bf16": CANDIDATES["mean"]}, (), "the baseline cannot have it"),
        ({"mean": {"evaluate.merge": 4, "checkpoint.every": 8}}, (), "keeps, which are 3"),
        # A branch saves the steps 40 and 80.
        ({"mean": CANDIDATES["mean"] | {"checkpoint.every": 40}}, (), "keeps, which are 2"),
        # A branch after step 16 saves the steps 32, 48, 64 and 80.
        (
            {"mean": {"evaluate.merge": 5, "checkpoint": {"every": 16, "keep": 9}}},
            (),
            "cell mean-seed=42: .*this run saves and keeps, which are 4",
        ),
        ({"early": {"schedule.kind": "wsd", "schedule.decay": 0.9}}, (), "from step 16 .* later"),
        ({"early": {"schedule.kind": "linear"}}, (), "cell early-seed=42: .* from step 16"),
        (
            {"early": {"precision": [{"until": 0.2, "use": "nvfp4"}, {"use": "bf16"}]}},
            (),
            "phases of precision begin later",
        ),
        ({}, ("--precisions", "bf16,current"), "remove --precisions"),
        ({}, ("--served", "nvfp5"), "`evaluate.served`"),
        ({}, None, "needs --steps"),
    ],
)
def test_a_mistake_in_candidates_is_refused_before_any_training(
    ask: Callable[..., int],
    tmp_path: Path,
    changes: dict[str, Any],
    options: tuple[str, ...] | None,
    message: str,
) -> None:
    more = () if options is None else ("--steps", "80", *options)
    with pytest.raises(InputError, match=message):
        ask(CANDIDATES | changes, "--served", "nvfp4", "--hours", "9", *more)
    assert not list(tmp_path.glob("which/*/*"))


def trainings_of(file: Path, settings: dict[str, Any] | None, **options: Any) -> WhichTrainings:
    """Return the trainings of a question about candidates."""
    accelerate = CONFIGURATIONS / options.pop("config", "cpu.yaml")
    recipe = options.pop("recipe", None) or load_recipe(file)
    folder = file.parent / "which"
    return WhichTrainings(recipe, file, (), accelerate, folder, None, settings, **options)


def test_phases_that_are_too_long_for_the_hours_leave_no_plan(
    recipe: dict[str, Any], tmp_path: Path, ask: Callable[..., int]
) -> None:
    """A step takes 1 s, so 5 rounds of 90 steps fit into the hours. An epoch has 120 steps."""
    late = {"precision": [{"until": 100, "use": "bf16"}, {"use": "nvfp4"}]}
    candidates = {"bf16": {"precision": "bf16"}, "late": late}
    trainings = trainings_of(write_recipe(recipe, tmp_path), candidates)
    for cell in trainings.trials(list(candidates)).cells:
        leave_behind(cell, held_out=2.0, tokens_per_second=128)
    with pytest.raises(InputError, match=r"end after step 100 of (8[0-9]|90)"):
        ask(candidates, "--hours", "0.225")
    assert not (tmp_path / "which" / "which.json").exists()


def test_a_trial_refuses_a_head_that_an_earlier_phase_refuses(
    recipe: dict[str, Any],
    ask: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The vocabulary has 144 tokens, and `mxfp8` needs a multiple of 32."""
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    recipe["model"]["config"]["vocab_size"] = 144
    write_recipe(recipe, tmp_path)
    phases = [{"until": 0.5, "use": "bf16"}, {"until": 0.9, "use": "mxfp8"}, {"use": "current"}]
    head = {"precision": phases, "fp8_config.scope": "linear+head"}
    with pytest.raises(InputError, match="failed in its trial"):
        ask({"bf16": CANDIDATES["bf16"], "head": head}, "--steps", "80")
    assert "144 is not a multiple of 32" in (tmp_path / "which" / "trial" / "head.log").read_text()


def test_candidates_do_not_inherit_a_mean_from_the_recipe(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    evaluate = recipe["evaluate"] | {"served": "nvfp4", "merge": 2}
    checkpoint = {"every": 20, "keep": 2}
    file = write_recipe(recipe | {"evaluate": evaluate, "checkpoint": checkpoint}, tmp_path)
    (tmp_path / "candidates.yaml").write_text("a: {precision: bf16}\nb: {precision: current}")
    command = [str(file), "--candidates", str(tmp_path / "candidates.yaml")]
    for options in ([], ["--served", "nvfp4", "--steps", "80"]):
        parsed = commands.read("which", [*command, *options])
        assert list(which.read_candidates(parsed, CONFIGURATIONS / "cpu.yaml")) == ["a", "b"]


def test_the_decay_of_a_candidate_is_a_share_of_the_trained_steps(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"base": {}, "long": {"schedule.decay": 0.5}}
    trainings = trainings_of(write_recipe(recipe, tmp_path), settings)
    checkpoint = str(tmp_path / "step-00000060")
    seconds = dict.fromkeys(settings, 1.0)
    protocol = Protocol(checkpoint, 0.003, list(settings), seconds, 1.0, 3, 100, 60)
    cells = trainings.rounds(protocol, [1], ["long"]).cells
    decays = [cell.recipe.schedule.decay for cell in cells]
    assert decays == pytest.approx([0.2 * 0.4, 0.5 * 0.4])


@pytest.mark.parametrize("name", ["mean", "tail"])
def test_the_recommended_command_trains_the_candidate(
    name: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    file = write_recipe(recipe, tmp_path)
    (tmp_path / "candidates.yaml").write_text(yaml.safe_dump(CANDIDATES))
    command = [str(file), "--served", "nvfp4", "--candidates", str(tmp_path / "candidates.yaml")]
    options = commands.read("which", [*command, "--steps", "80"])
    settings = which.read_candidates(options, CONFIGURATIONS / "bf16.yaml")
    checked = which.checked_recipe(options)
    trainings = trainings_of(file, settings, config="bf16.yaml", recipe=checked)
    seconds = dict.fromkeys(settings, 1.0)
    steps = (4, 80, 16, "nvfp4", settings)
    protocol = Protocol(None, 0.003, list(settings), seconds, 1.0, *steps)
    gain = {"speedup": 1.0, "tokens": 0.9, "gain_interval": [1.05, 1.2]}
    text = answer(trainings, protocol, [Verdict(name, word=BETTER, advice=USE, **gain)])
    assert text.startswith("Judged by the held-out loss of the model served in nvfp4:\n")
    assert f"Train with {name}: 1.11 times (1.05 to 1.20) bf16's speed" in text
    trained = load_recipe(file, shlex.split(text.rpartition("train_accelerate.py ")[2])[1:])
    cells = trainings.rounds(protocol, [1], [name]).cells
    (judged,) = (cell.recipe for cell in cells if cell.name == f"{name}-seed=1")
    assert trained.precision == judged.precision
    assert trained.schedule.decay == judged.schedule.decay
    assert (trained.evaluate.served, trained.evaluate.merge) == ("nvfp4", judged.evaluate.merge)
    assert trained.checkpoint.every == judged.checkpoint.every or name == "tail"
    check_settings(trained.model_copy(update={"train": TrainSettings(steps=80)}), "bf16", 1)


def test_plans_of_earlier_versions_can_be_read() -> None:
    protocol = Protocol(None, 0.003, ["a", "b"], {"a": 1.0, "b": 1.0}, 1.0, 3, 100, 20)
    earlier = {
        key: value for key, value in asdict(protocol).items() if key not in ("served", "settings")
    }
    assert Protocol(**earlier) == protocol
