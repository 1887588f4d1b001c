"""`which --served` and `which --candidates`: judging candidates by the loss of the served model."""

from __future__ import annotations

import json
import shlex
import signal
from dataclasses import asdict, dataclass
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
from pretrain.launch.launcher import CONFIGURATIONS, Launch
from pretrain.launch.processes import BackgroundTraining
from pretrain.plan.checks import check_settings
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import TrainSettings
from tests.forked_commands import forking
from tests.lab.conftest import Question
from tests.lab.made_runs import leave_behind

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


@dataclass(frozen=True)
class CandidatesQuestion(Question):
    """A question about candidates, which are written before the command runs."""

    def options(self, candidates: Any) -> list[str]:
        file = self.path / "candidates.yaml"
        file.write_text(yaml.safe_dump(candidates))
        return ["--candidates", str(file)]

    def ask_about(self, candidates: Any, *options: str) -> int:
        return self.ask("--hours", "0.00001", *self.options(candidates), *options)


@pytest.fixture
def question(recipe: dict[str, Any], tmp_path: Path) -> CandidatesQuestion:
    return CandidatesQuestion(recipe, tmp_path)


@pytest.mark.nightly
def test_candidates_are_judged_as_served_and_resumed(
    question: CandidatesQuestion,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trains one round. The training of a mean is stopped and continued."""
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    start_training = matrix_run.start_training
    to_stop = ["rounds/mean-seed=42.log"]

    def start_and_stop_once(
        launch: Launch, environment: dict[str, str], log: Path
    ) -> BackgroundTraining:
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
        question.ask_about(CANDIDATES, *options)
    assert question.ask_about(CANDIDATES, *options) == 1, "one seed gives no verdict"
    output = capsys.readouterr().out
    assert "\nmean: cannot tell" in output and "Equal in all rows: seeds 1" in output
    assert "| candidate | served in nvfp4 |" in output
    rounds = question.folder / "rounds"
    assert not list(tmp_path.glob("which/*/*/checkpoints")) and not list(rounds.glob("*/final"))
    losses = {}
    for name in CANDIDATES:
        lines = (rounds / f"{name}-seed=42" / "metrics.jsonl").read_text().splitlines()
        evaluation, losses[name] = map(json.loads, lines[-2:])
        assert evaluation["held_out_precision"] == "bf16"
    assert losses["mean"]["merged"] == [f"step-{step:08d}" for step in (80, 72, 64)]
    assert losses["bf16"]["merged"] == losses["tail"]["merged"] == ["step-00000080"]
    answer = json.loads((question.folder / "verdict.json").read_text())
    assert answer["protocol"]["served"] == "nvfp4"
    for name, verdict in answer["candidates"].items():
        difference = losses[name]["served_loss"] - losses["bf16"]["served_loss"]
        assert verdict["served"]["by_seed"] == {"42": pytest.approx(difference, abs=1e-12)}
        assert difference != 0
    assert question.ask_about(CANDIDATES, *options) == 1
    assert "started" not in capsys.readouterr().out


SERVED = "--served nvfp4 --steps 80"
# Changed candidates, options, and words of the message.
MISTAKES = [
    ("x: {optimizer.lr: 1}", SERVED, r"candidates\.yaml, cell x: .*optimizer"),
    ("x: null", SERVED, r"candidates\.yaml: .*cells\.x"),
    ("tail: {seed: 3, data.length: 64}", SERVED, "cannot set `data.length, seed`"),
    ("tail: {fp8_config.use_autocast_during_eval: true}", SERVED, "cannot set `fp8_config"),
    ("tail: {fp8_config: {keep_bf16: [q_proj]}}", SERVED, "cannot set `fp8_config.keep_bf16`"),
    ("tail: {optimizer.name: muon}", SERVED, "cannot set `optimizer.name`"),
    ("bf16: {evaluate.merge: 3, checkpoint.every: 8}", SERVED, "the baseline cannot have it"),
    ("mean: {evaluate.merge: 4, checkpoint.every: 8}", SERVED, "keeps, which are 3"),
    # A branch saves the steps 40 and 80.
    ("mean: {evaluate.merge: 3, checkpoint.every: 40}", SERVED, "keeps, which are 2"),
    # A branch after step 16 saves the steps 32, 48, 64 and 80.
    (
        "mean: {evaluate.merge: 5, checkpoint: {every: 16, keep: 9}}",
        SERVED,
        "cell mean-seed=42: .*this run saves and keeps, which are 4",
    ),
    ("early: {schedule.kind: wsd, schedule.decay: 0.9}", SERVED, "from step 16 .* later"),
    ("early: {schedule.kind: linear}", SERVED, "cell early-seed=42: .* from step 16"),
    (
        "early: {precision: [{until: 0.2, use: nvfp4}, {use: bf16}]}",
        SERVED,
        "phases of precision begin later",
    ),
    ("{}", f"{SERVED} --precisions bf16,current", "remove --precisions"),
    ("{}", "--served nvfp5 --steps 80", "`evaluate.served`"),
    ("{}", "--served nvfp4", "needs --steps"),
]


@pytest.mark.parametrize(("changes", "options", "message"), MISTAKES)
def test_a_mistake_in_candidates_is_refused_before_any_training(
    changes: str, options: str, message: str, question: CandidatesQuestion
) -> None:
    with pytest.raises(InputError, match=message):
        question.ask_about(CANDIDATES | yaml.safe_load(changes), *options.split())
    assert not list(question.folder.glob("*"))


def test_a_question_about_other_candidates_is_refused(question: CandidatesQuestion) -> None:
    protocol = Protocol(None, 0.003, [], {}, 1.0, 5, 80, 16, "nvfp4", {"bf16": {}})
    question.folder.mkdir()
    (question.folder / "which.json").write_text(json.dumps(asdict(protocol)))
    with pytest.raises(InputError, match="`settings`"):
        question.ask_about(CANDIDATES, *SERVED.split())


def test_phases_that_are_too_long_for_the_hours_leave_no_plan(question: CandidatesQuestion) -> None:
    """A step takes 1 s, so 5 rounds of 90 steps fit into the hours. An epoch has 120 steps."""
    late = {"precision": [{"until": 100, "use": "bf16"}, {"use": "nvfp4"}]}
    candidates = {"bf16": {"precision": "bf16"}, "late": late}
    for cell in question.trainings(candidates=candidates).trials(list(candidates)).cells:
        leave_behind(cell, held_out=2.0, tokens_per_second=128)
    with pytest.raises(InputError, match=r"end after step 100 of (8[0-9]|90)"):
        question.ask_about(candidates, "--hours", "0.225")
    assert not (question.folder / "which.json").exists()


def test_a_trial_refuses_a_head_that_an_earlier_phase_refuses(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary has 144 tokens, and `mxfp8` needs a multiple of 32."""
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    recipe["model"]["config"]["vocab_size"] = 144
    question = CandidatesQuestion(recipe, tmp_path)
    phases = [{"until": 0.5, "use": "bf16"}, {"until": 0.9, "use": "mxfp8"}, {"use": "current"}]
    head = {"precision": phases, "fp8_config.scope": "linear+head"}
    with pytest.raises(InputError, match="failed in its trial"):
        question.ask_about({"bf16": CANDIDATES["bf16"], "head": head}, "--steps", "80")
    assert "144 is not a multiple of 32" in (question.folder / "trial/head.log").read_text()


def test_candidates_do_not_inherit_a_mean_from_the_recipe(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    evaluate = recipe["evaluate"] | {"served": "nvfp4", "merge": 2}
    recipe |= {"evaluate": evaluate, "checkpoint": {"every": 20, "keep": 2}}
    question = CandidatesQuestion(recipe, tmp_path)
    candidates = {"a": {"precision": "bf16"}, "b": {"precision": "current"}}
    command = [str(question.file), *question.options(candidates)]
    for options in ([], SERVED.split()):
        parsed = commands.read("which", [*command, *options])
        assert list(which.read_candidates(parsed, CONFIGURATIONS / "cpu.yaml")) == ["a", "b"]


def test_the_decay_of_a_candidate_is_a_share_of_the_trained_steps(
    question: CandidatesQuestion,
) -> None:
    settings = {"base": {}, "long": {"schedule.decay": 0.5}}
    checkpoint = str(question.path / "step-00000060")
    seconds = dict.fromkeys(settings, 1.0)
    protocol = Protocol(checkpoint, 0.003, list(settings), seconds, 1.0, 3, 100, 60)
    cells = question.trainings(candidates=settings).rounds(protocol, [1], ["long"]).cells
    decays = [cell.recipe.schedule.decay for cell in cells]
    assert decays == pytest.approx([0.2 * 0.4, 0.5 * 0.4])


@pytest.mark.parametrize("name", ["mean", "tail"])
def test_the_recommended_command_trains_the_candidate(
    name: str, question: CandidatesQuestion
) -> None:
    command = [str(question.file), *question.options(CANDIDATES), *SERVED.split()]
    options = commands.read("which", command)
    settings = which.read_candidates(options, CONFIGURATIONS / "bf16.yaml")
    checked = which.checked_recipe(options)
    trainings = question.trainings(config="bf16", recipe=checked, candidates=settings)
    seconds = dict.fromkeys(settings, 1.0)
    steps = (4, 80, 16, "nvfp4", settings)
    protocol = Protocol(None, 0.003, list(settings), seconds, 1.0, *steps)
    gain = {"speedup": 1.0, "tokens": 0.9, "gain_interval": [1.05, 1.2]}
    text = answer(trainings, protocol, [Verdict(name, word=BETTER, advice=USE, **gain)])
    assert f"Train with {name}: 1.11 times (1.05 to 1.20) bf16's speed" in text
    trained = load_recipe(
        question.file, shlex.split(text.rpartition("train_accelerate.py ")[2])[1:]
    )
    cells = trainings.rounds(protocol, [1], [name]).cells
    (judged,) = (cell.recipe for cell in cells if cell.name == f"{name}-seed=1")
    assert trained.precision == judged.precision
    assert trained.schedule.decay == judged.schedule.decay
    assert (trained.evaluate.served, trained.evaluate.merge) == ("nvfp4", judged.evaluate.merge)
    assert trained.checkpoint.every == judged.checkpoint.every or name == "tail"
    check_settings(trained.model_copy(update={"train": TrainSettings(steps=80)}), "bf16", 1, ())


def test_plans_of_earlier_versions_can_be_read() -> None:
    protocol = Protocol(None, 0.003, ["a", "b"], {"a": 1.0, "b": 1.0}, 1.0, 3, 100, 20)
    earlier = {
        key: value for key, value in asdict(protocol).items() if key not in ("served", "settings")
    }
    assert Protocol(**earlier) == protocol
