"""`python -m pretrain which`: the command to its answer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.errors import InputError
from lab.compare.comparison import group_names
from lab.compare.differences import EQUIVALENT
from lab.experiments import matrix_run, which
from lab.experiments.protocol import Protocol, Rounds
from lab.experiments.verdicts import NO_GAIN, Verdict, verdict_of, verdicts_after
from lab.experiments.which_answer import answer, conditions
from lab.experiments.which_trainings import candidate_of
from pretrain.launch.launcher import Launch
from pretrain.launch.processes import BackgroundTraining
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import write_recipe
from tests.forked_commands import forking
from tests.lab.conftest import Question
from tests.lab.made_runs import leave_behind, rows_of


@pytest.mark.long
def test_a_question_is_answered_and_resumed(
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trains one round of an emulated precision, which has no speed. Three trainings die."""
    recipe = low_precision_recipe | {"data": low_precision_recipe["data"] | {"held_out": 0.05}}
    sizes = {"vocab_size": 125, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    recipe["model"]["config"] |= sizes
    for key in ("precision", "evaluate", "checkpoint", "fp8_config", "train"):
        del recipe[key]
    recipe |= {"batch": {"tokens": 128, "microbatch": 1}, "train": {"epochs": 1}}
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    start_training = matrix_run.start_training
    to_kill = ["trial/current.log", "trial/current+head.log", "rounds/fp32-seed=42.log"]

    def start_and_kill_once(
        launch: Launch, environment: dict[str, str], log: Path
    ) -> BackgroundTraining:
        training = start_training(launch, environment, log)
        if to_kill and str(log).endswith(to_kill[0]):
            training.signal(signal.SIGKILL)
            del to_kill[0]
        return training

    monkeypatch.setattr(matrix_run, "start_training", start_and_kill_once)
    command = ["--run_dir", str(tmp_path / "which"), "--precisions", "fp32,current,current+head"]
    command += ["--steps", "80", "--hours", "0.00001"]

    def ask(file: str) -> int:
        return which.main(commands.read("which", [file, *command]))

    file = str(write_recipe(recipe, tmp_path))
    with pytest.raises(InputError, match="nothing to compare"):
        ask(file)
    # The recipe may still change, because no protocol is written yet.
    write_recipe(recipe | {"optimizer": {"learning_rate": 0.02}}, tmp_path)
    with pytest.raises(InputError, match=r"rounds/fp32-seed=42\.log"):
        ask(file)
    assert not list(tmp_path.glob("which/rounds/current*")), "there is no checkpoint to branch from"
    assert ask(os.path.relpath(file)) == 1
    # There is one candidate, because the vocabulary does not suit current+head.
    answer = json.loads((tmp_path / "which" / "verdict.json").read_text())
    (verdict,) = answer["candidates"].values()
    ((seed, cost),) = verdict["served"]["by_seed"].items()
    assert seed == "42" and cost != 0
    assert verdict["speedup"] is None and verdict["memory_gib"] is None
    output = capsys.readouterr().out
    assert "current: cannot tell" in output and "No recommendation: speeds of emul" in output
    assert ask(file) == 1
    assert "started" not in capsys.readouterr().out
    rounds = tmp_path / "which" / "rounds"
    (rounds / "current-seed=42" / "summary.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(f"all folders of this seed in {rounds}, ")):
        ask(file)


# Speed relative to the baseline's, and loss above the baseline's by seed.
CANDIDATES = {
    "delayed": (1.3, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
    "current": (1.004, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
    "delayed+head": (1.1, [0.0020, 0.0021, 0.0022, 0.0021, 0.0021]),
    "nvfp4": (2.0, [0.049, 0.050, 0.051, 0.050, 0.050]),
    "mxfp8": (1.2, [-0.002, 0.003, 0.001, -0.001, 0.002]),
}
NAMES = ["bf16", *CANDIDATES]
NO_TIME = ("--hours", "0.000001")
PROTOCOL = Protocol(None, 0.003, NAMES, dict.fromkeys(NAMES, 0.1), 5.0, 5, 400, 80)


@dataclass(frozen=True)
class TrainedRounds(Question):
    """A question whose rounds have ended, written without training."""

    rounds: Rounds = field(default_factory=lambda: Rounds(PROTOCOL))

    def __post_init__(self) -> None:
        write_recipe(self.recipe | {"train": {"steps": 400}}, self.path)
        self.folder.mkdir()
        (self.folder / "which.json").write_text(json.dumps(asdict(PROTOCOL)))

    def write_rounds(self, slope: float, noise: float = 0.0, rounds: int = 5) -> None:
        """Write the rounds.

        Training losses are a power law with exponent 0.4 that has `slope` at the last step, with
        noise of standard deviation `noise`.
        """
        draw = np.random.default_rng(0)
        trainings = self.trainings()
        for seed in range(rounds):
            matrix = trainings.rounds(PROTOCOL, [42 + seed], list(CANDIDATES))
            runs = {}
            for cell in matrix.cells:
                name = candidate_of(cell)
                speed, costs = CANDIDATES.get(name, (1.0, [0.0] * 5))
                speed *= 1 + 0.002 * (seed % 3 - 1) * (name != "bf16")
                tokens_per_second = 1000.0 * speed * (1 + seed)
                held_out = 2.0 + costs[seed]
                leave_behind(cell, 400, held_out=held_out, tokens_per_second=tokens_per_second)
                file = cell.run_dir / "metrics.jsonl"
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                # A branch has only its own steps.
                lines = [line for line in lines if line["step"] > 80 or name == "bf16"]
                for line in lines[:-1]:
                    falling = -slope / 0.4 * (line["step"] / 400) ** -0.4
                    line["loss"] = 3 + falling + noise * draw.normal()
                file.write_text("".join(json.dumps(line) + "\n" for line in lines))
                runs[name] = cell.record()
            self.rounds.runs.append(runs)

    def candidates(self) -> dict[str, Any]:
        """Return the candidates in verdict.json."""
        return json.loads((self.folder / "verdict.json").read_text())["candidates"]


@pytest.fixture
def question(small_recipe: dict[str, Any], tmp_path: Path) -> TrainedRounds:
    """A question before its first round."""
    return TrainedRounds(small_recipe, tmp_path)


@pytest.fixture(scope="module")
def shared_rounds(
    recipe_for: Callable[[Path], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> TrainedRounds:
    """A question after five rounds. Tests must not change its runs and their files."""
    path = tmp_path_factory.mktemp("which")
    shared = TrainedRounds(recipe_for(path / "run"), path)
    shared.write_rounds(slope=-0.2)
    return shared


@pytest.fixture(scope="module")
def output(shared_rounds: TrainedRounds) -> str:
    """The output of the command. One candidate is open, and the hours are over."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert shared_rounds.ask(*NO_TIME) == 1
    return text.getvalue()


def test_rounds_before_the_first_verdict_share_the_gpus(question: TrainedRounds) -> None:
    """As many of these rounds are trained together as end within the time limit."""
    rounds = Rounds(PROTOCOL, at_once=4)
    names = PROTOCOL.candidates
    assert which.affordable_rounds(rounds, names, 1e6) == 4, "needed with five candidates"
    assert rounds.seconds(names, 3) < rounds.seconds(names, 4) < 4 * rounds.seconds(names)
    assert which.affordable_rounds(rounds, names, 0.95 * rounds.seconds(names, 4)) == 3
    assert which.affordable_rounds(rounds, names, 0) == 1, "the first round ignores the time limit"
    rounds.runs = [{}, {}]
    assert which.affordable_rounds(rounds, names, 1e6) == 2
    matrix = which.matrix_of(question.trainings(), rounds, names, 2)
    baselines = [cell for cell in matrix.cells if candidate_of(cell) == "bf16"]
    assert len(matrix.cells) == (1 + len(names)) * len(baselines)
    assert [cell.recipe.seed for cell in baselines] == [44, 45]
    rounds.runs = [{}] * 4
    assert which.affordable_rounds(rounds, names, 1e6) == 1
    assert which.affordable_rounds(rounds, names, 0) == 0


def test_the_answer_about_five_rounds_is_as_before(
    shared_rounds: TrainedRounds, output: str, stored: Callable[[str, str], None]
) -> None:
    """which.txt has the output, and the verdicts in verdict.json."""
    runs = [run for by_name in shared_rounds.rounds.runs for run in by_name.values()]
    assert set(Counter(group_names(runs)).values()) == {5}
    message = r"takes about (\S+) s, but only 0 s of --hours are left.*with --hours (\S+) or more"
    ((seconds, hours),) = re.findall(message, output)
    assert float(seconds) < float(hours) * 3600 < 2 * float(seconds)
    text = output.replace(f"{seconds} s", "SECONDS s").replace(f"--hours {hours}", "--hours HOURS")
    verdicts = json.dumps(shared_rounds.candidates(), indent=1)
    verdicts = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.4f}", verdicts)
    stored("which.txt", f"{text}\n{verdicts}\n".replace(str(shared_rounds.path), ""))
    assert all(len(line) <= 100 for line in output.splitlines() if line[:1] == "|")
    candidates = shared_rounds.candidates()
    assert candidates["nvfp4"]["tokens"] == pytest.approx(np.exp(0.05 / 0.2))
    gain = 1.3 / np.exp(0.0005 / 0.2)
    assert candidates["delayed"]["gain_at_equal_loss"] == pytest.approx(gain, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "is_reserved"),
    [
        ({"kind": "cosine"}, True),
        ({"kind": "linear"}, True),
        ({"kind": "wsd", "decay": 0.51}, True),
        ({"kind": "wsd", "decay": 0.5}, False),
        ({"kind": "constant", "decay": 0.8}, False),
    ],
)
def test_gains_are_upper_estimates_if_the_rate_decays_early(
    schedule: dict[str, Any], is_reserved: bool, question: TrainedRounds
) -> None:
    recipe = load_recipe(question.file, [f"schedule.{key}={schedule[key]}" for key in schedule])
    text = conditions(replace(question.trainings(), recipe=recipe), PROTOCOL)
    assert ("All gains are upper estimates" in text) == is_reserved


def test_a_halted_candidate_is_done_and_later_rounds_count(
    question: TrainedRounds, capsys: pytest.CaptureFixture[str]
) -> None:
    question.write_rounds(slope=-0.2, rounds=4)
    halted = question.folder / "rounds" / "nvfp4-seed=43"
    (halted / "summary.json").unlink()
    lines = (halted / "metrics.jsonl").read_text().splitlines(keepends=True)
    halt = '{"step": 400, "event": "halted", "reason": "NaN"}\n'
    (halted / "metrics.jsonl").write_text("".join([*lines[:-1], halt]))
    assert question.ask(*NO_TIME) == 1
    output = capsys.readouterr().out
    assert "nvfp4: broke off" in output and "started" not in output
    assert rows_of(output)["mxfp8"][0][0] == "4"


def test_only_the_tokens_of_a_branch_count(shared_rounds: TrainedRounds) -> None:
    protocol = replace(PROTOCOL, begin_with="step-00000080")
    branched = replace(shared_rounds.rounds, protocol=protocol)
    tokens = (400 * np.exp(0.05 / 0.2) - 80) / 320
    assert verdict_of(protocol, branched.runs, "nvfp4").tokens == pytest.approx(tokens)
    text = answer(shared_rounds.trainings(), protocol, verdicts_after(branched))
    assert "train.begin_with=step-00000080" in text
    limits = conditions(shared_rounds.trainings(), protocol)
    assert "This answer is about the checkpoint step-00000080." in limits


def test_the_gain_is_unknown_if_the_loss_does_not_fall(question: TrainedRounds) -> None:
    question.write_rounds(slope=0.0, noise=0.1, rounds=4)
    verdicts = verdicts_after(question.rounds)
    delayed = verdicts[0]
    assert not delayed.is_open and delayed.tokens is None
    assert "not known" in delayed.advice
    trainings = question.trainings()
    assert "Stay" not in answer(trainings, PROTOCOL, verdicts)
    slow = Verdict("current", word=EQUIVALENT, advice=NO_GAIN)
    assert answer(trainings, PROTOCOL, [slow]).endswith("Stay with bf16.")
    rounds = replace(question.rounds, runs=question.rounds.runs * 5)
    *_, last = verdicts_after(rounds)
    assert which.open_candidates(rounds) == [] and last.is_open
    lines = " ".join(answer(trainings, PROTOCOL, [last]).split())
    assert "all 20 seeds are trained" in lines and "another --run_dir" in lines


def test_a_question_with_other_settings_is_refused(
    question: TrainedRounds, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    question.write_rounds(slope=-0.2, rounds=1)
    for key, value in {"margin": "1", "seeds": "4", "served": "nvfp4", "steps": "300"}.items():
        with pytest.raises(InputError, match=f"has set or chosen other values .*`{key}`: "):
            question.ask(*NO_TIME, f"--{key}", value)
    changed = {"train": {"steps": 400}, "optimizer": {"learning_rate": 0.5}}
    write_recipe(small_recipe | changed, tmp_path)
    with pytest.raises(InputError, match="learning_rate"):
        question.ask(*NO_TIME)
    (question.folder / "which.json").write_text("{")
    with pytest.raises(InputError, match=r"which\.json"):
        question.ask(*NO_TIME)
