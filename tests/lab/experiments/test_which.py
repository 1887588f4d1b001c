"""`python -m pretrain which`: error rates of its intervals, and the command to its answer."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.errors import InputError
from lab.compare.comparison import group_names
from lab.compare.differences import (
    EQUIVALENT,
    WITHIN_MARGIN,
    WORSE,
    LossDifference,
)
from lab.experiments import matrix_run, which
from lab.experiments.protocol import Protocol, Rounds
from lab.experiments.verdicts import NO_GAIN, Verdict, verdict_of, verdicts_after
from lab.experiments.which_answer import answer
from lab.experiments.which_trainings import WhichTrainings, candidate_of
from pretrain.launch.launcher import CONFIGURATIONS, Launch
from pretrain.launch.processes import Training
from pretrain.settings import commands
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT, write_recipe
from tests.forked_commands import forking
from tests.lab.made_runs import leave_behind, rows_of

SEEDS = 20
MISS_RATES = ROOT / "benchmarks/results/loss/which_miss_rates.json"


def looks(values: np.ndarray) -> list[LossDifference]:
    """Return the differences after each seed from the third on, with a baseline's loss of 1."""
    return [
        LossDifference(dict(enumerate(values[:seeds].tolist())), 1.0)
        for seeds in range(3, len(values) + 1)
    ]


def test_the_anytime_interval_misses_no_more_often_than_stated() -> None:
    draw = np.random.default_rng(0)
    trials = 1000
    missed = {0.05: 0, 0.0125: 0}
    for _ in range(trials):
        differences = looks(draw.normal(0.002, 0.001, SEEDS))
        for error in missed:
            halves = [difference.half_width(error) for difference in differences]
            missed[error] += any(
                half is not None and abs(difference.mean - 0.002) > half
                for difference, half in zip(differences, halves, strict=True)
            )
    assert all(count / trials < error for error, count in missed.items())


def test_a_cost_of_the_margin_is_rarely_called_equivalent() -> None:
    draw = np.random.default_rng(0)
    trials = 400
    error = 0.05
    equivalent = 0
    for _ in range(trials):
        words = anytime_verdicts(draw.normal(0.003, 0.001, SEEDS), error)
        equivalent += any(word == EQUIVALENT or WITHIN_MARGIN in word for word in words)
    assert equivalent / trials < error


def anytime_verdicts(values: np.ndarray, error: float) -> list[str]:
    """Return the verdicts after each seed from the third on, with a margin of 0.003."""
    return [difference.verdict(0.003, error) for difference in looks(values)]


def test_half_a_margin_worse_ends_within_the_margin() -> None:
    """A verdict "worse" closes no candidate. It came first in 12 and 27 % of these series."""
    draw = np.random.default_rng(0)
    trials = 300
    error = 0.05
    closing = dict.fromkeys((EQUIVALENT, WORSE + WITHIN_MARGIN, "another"), 0)
    for spread in (0.2 * 0.003, 0.3 * 0.003):
        for _ in range(trials):
            words = anytime_verdicts(draw.normal(0.0015, spread, SEEDS), error)
            word = next(word for word in words if not Verdict("", word=word).is_open)
            closing[word if word in closing else "another"] += 1
    assert closing["another"] <= error * 2 * trials and min(list(closing.values())[:2]) > 0


def miss_rates() -> tuple[dict[str, float], str]:
    """Return the recorded rates at a stated 5 %, and their text in the answer."""
    rates = json.loads(MISS_RATES.read_text())["intervals"]["the product's"]["error 0.05"]["misses"]
    text = f"{rates['exponential']:.0%} of exponential and {rates['lognormal']:.0%} of lognormal"
    return rates, text.replace("%", " %")


def test_the_recorded_miss_rate_is_reproduced() -> None:
    rates, _ = miss_rates()
    draw = np.random.default_rng(1)
    missed = 0
    for _ in range(500):
        missed += any(
            abs(difference.mean - np.exp(0.5)) > difference.half_width(0.05)
            for difference in looks(draw.lognormal(size=SEEDS))
        )
    assert missed / 500 == pytest.approx(rates["lognormal"], abs=0.06)


@pytest.mark.long
def test_a_question_is_answered_and_resumed(
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trains one round of an emulated precision, which has no speed. Three trainings die."""
    recipe = low_precision_recipe | {"data": low_precision_recipe["data"] | {"held_out": 0.05}}
    recipe["model"]["config"] |= {
        "vocab_size": 125,
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 16,
    }
    for key in ("precision", "evaluate", "checkpoint", "fp8_config", "train"):
        del recipe[key]
    recipe |= {"batch": {"tokens": 128, "microbatch": 1}, "train": {"epochs": 1}}
    file = write_recipe(recipe, tmp_path)
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    start_training = matrix_run.start_training
    to_kill = ["trial/current.log", "trial/current+head.log", "rounds/fp32-seed=42.log"]

    def start_and_kill_once(launch: Launch, environment: dict[str, str], log: Path) -> Training:
        training = start_training(launch, environment, log)
        if to_kill and str(log).endswith(to_kill[0]):
            training.signal(signal.SIGKILL)
            del to_kill[0]
        return training

    monkeypatch.setattr(matrix_run, "start_training", start_and_kill_once)
    command = [
        str(file),
        "--run_dir",
        str(tmp_path / "which"),
        "--precisions",
        "fp32,current,current+head",
        "--steps",
        "80",
    ]
    with pytest.raises(InputError, match="nothing to compare"):
        which.main(commands.read("which", [*command, "--hours", "0.00001"]))
    # The recipe may still change, because no protocol is written yet.
    write_recipe(recipe | {"optimizer": {"learning_rate": 0.02}}, tmp_path)
    with pytest.raises(InputError, match=r"rounds/fp32-seed=42\.log"):
        which.main(commands.read("which", [*command, "--hours", "0.00001"]))
    assert not list(tmp_path.glob("which/rounds/current*")), "there is no checkpoint to branch from"
    command[0] = os.path.relpath(file)
    assert which.main(commands.read("which", [*command, "--hours", "0.00001"])) == 1
    # There is one candidate, because the vocabulary does not suit current+head.
    (verdict,) = json.loads((tmp_path / "which" / "verdict.json").read_text())[
        "candidates"
    ].values()
    ((seed, cost),) = verdict["served"]["by_seed"].items()
    assert seed == "42" and cost != 0
    assert verdict["speedup"] is None and verdict["memory_gib"] is None
    assert "current: cannot tell" in capsys.readouterr().out
    assert which.main(commands.read("which", [*command, "--hours", "0.00001"])) == 1
    assert "started" not in capsys.readouterr().out
    rounds = tmp_path / "which" / "rounds"
    (rounds / "current-seed=42" / "summary.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(f"all folders of this seed in {rounds}, ")):
        which.main(commands.read("which", [*command, "--hours", "0.00001"]))


# Speed relative to the baseline's, and loss above the baseline's by seed.
CANDIDATES = {
    "delayed": (1.3, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
    "current": (1.004, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
    "delayed+head": (1.1, [0.0020, 0.0021, 0.0022, 0.0021, 0.0021]),
    "nvfp4": (2.0, [0.049, 0.050, 0.051, 0.050, 0.050]),
    "mxfp8": (1.2, [-0.002, 0.003, 0.001, -0.001, 0.002]),
}
NAMES = ["bf16", *CANDIDATES]
PROTOCOL = Protocol(None, 0.003, NAMES, dict.fromkeys(NAMES, 0.1), 5.0, 5, 400, 80)


@dataclass
class TrainedRounds:
    """A question whose five rounds have ended, written without training."""

    file: Path
    folder: Path
    trainings: WhichTrainings
    rounds: Rounds

    def write_rounds(self, slope: float, noise: float = 0.0) -> None:
        """Write the rounds.

        Training losses are a power law with exponent 0.4 that has `slope` at the last step, with
        noise of standard deviation `noise`.
        """
        draw = np.random.default_rng(0)
        self.rounds.runs.clear()
        for seed in range(5):
            matrix = self.trainings.rounds(PROTOCOL, [42 + seed], list(CANDIDATES))
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

    def ask(self, *options: str) -> int:
        """Run the command, which has no time to train, and return its exit status."""
        command = [str(self.file), "--run_dir", str(self.folder), "--hours", "0.000001"]
        return which.main(commands.read("which", [*command, *options]))

    def candidates(self) -> dict[str, Any]:
        """Return the candidates in verdict.json."""
        return json.loads((self.folder / "verdict.json").read_text())["candidates"]


def new_question(recipe: dict[str, Any], path: Path) -> TrainedRounds:
    """Return a question in the folder `path` before its first round."""
    file = write_recipe(recipe | {"train": {"steps": 400}}, path)
    folder = path / "which"
    folder.mkdir()
    (folder / "which.json").write_text(json.dumps(asdict(PROTOCOL)))
    trainings = WhichTrainings(load_recipe(file), file, (), CONFIGURATIONS / "cpu.yaml", folder)
    return TrainedRounds(file, folder, trainings, Rounds(PROTOCOL))


@pytest.fixture
def question(small_recipe: dict[str, Any], tmp_path: Path) -> TrainedRounds:
    """A question before its first round."""
    return new_question(small_recipe, tmp_path)


@pytest.fixture(scope="module")
def shared_rounds(
    recipe_for: Callable[[Path], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> TrainedRounds:
    """A question after five rounds. Tests must not change its runs and their files."""
    path = tmp_path_factory.mktemp("which")
    shared = new_question(recipe_for(path / "run"), path)
    shared.write_rounds(slope=-0.2)
    return shared


@pytest.fixture
def trained_rounds(question: TrainedRounds) -> TrainedRounds:
    """A question after five rounds, whose files a test may change."""
    question.write_rounds(slope=-0.2)
    return question


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
    matrix = which.matrix_of(question.trainings, rounds, names, 2)
    baselines = [cell for cell in matrix.cells if candidate_of(cell) == "bf16"]
    assert len(matrix.cells) == (1 + len(names)) * len(baselines)
    assert [cell.recipe.seed for cell in baselines] == [44, 45]
    rounds.runs = [{}] * 4
    assert which.affordable_rounds(rounds, names, 1e6) == 1
    assert which.affordable_rounds(rounds, names, 0) == 0


def test_every_candidate_gets_a_verdict_a_cost_in_tokens_and_advice(
    shared_rounds: TrainedRounds, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run for by_name in shared_rounds.rounds.runs for run in by_name.values()]
    assert set(Counter(group_names(runs)).values()) == {5}
    assert shared_rounds.ask() == 1, "mxfp8 is open, and the hours are over"
    message = r"takes about (\S+) s, but only 0 s of --hours are left.*with --hours (\S+) or more"
    ((seconds, hours),) = re.findall(message, capsys.readouterr().out)
    assert float(seconds) < float(hours) * 3600 < 2 * float(seconds)
    candidates = shared_rounds.candidates()
    words_and_advice = {
        name: (candidate["word"], candidate["advice"].split()[0])
        for name, candidate in candidates.items()
    }
    assert words_and_advice == {
        "delayed": ("equivalent", "use"),
        "current": ("equivalent", "not"),
        "delayed+head": ("worse, within the margin", "smaller"),
        "nvfp4": ("worse by more than the margin", "faster"),
        "mxfp8": ("cannot tell", "more"),
    }
    assert candidates["nvfp4"]["tokens"] == pytest.approx(np.exp(0.05 / 0.2))
    gain = 1.3 / np.exp(0.0005 / 0.2)
    assert candidates["delayed"]["gain_at_equal_loss"] == pytest.approx(gain, rel=1e-3)
    for name, (speed, costs) in CANDIDATES.items():
        if name == "mxfp8":  # still open
            continue
        low, high = candidates[name]["gain_interval"]
        assert low < speed / np.exp(np.mean(costs) / 0.2) < high
        assert (low > 1) == (name != "current"), "0.1 % faster at equal loss is not shown"
    assert max(map(abs, candidates["delayed"]["trained"]["by_seed"].values())) < 1e-9, (
        "the last losses are of the same steps"
    )


def test_the_answer_calls_gains_upper_estimates_if_the_rate_decays_early(
    question: TrainedRounds,
) -> None:
    trainings = question.trainings

    def is_reserved(*overrides: str) -> bool:
        recipe = load_recipe(question.file, overrides)
        text = answer(replace(trainings, recipe=recipe), PROTOCOL, [])
        return "All gains are upper estimates" in text

    assert is_reserved("schedule.kind=cosine") and is_reserved("schedule.kind=linear")
    assert is_reserved("schedule.kind=wsd", "schedule.decay=0.51")
    assert not is_reserved("schedule.kind=wsd", "schedule.decay=0.5")
    assert not is_reserved("schedule.kind=constant", "schedule.decay=0.8")


def test_the_answer_has_a_table_a_recommendation_and_the_miss_rates(
    shared_rounds: TrainedRounds, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared_rounds.ask() == 1
    output = capsys.readouterr().out
    assert "faster than bf16 at equal loss, with 1.28 × the tokens" in output
    low = shared_rounds.candidates()["delayed"]["gain_interval"][0]
    assert f"Train in delayed: 1.30 times ({low:.2f} to " in output
    assert f"train_accelerate.py {shared_rounds.file} precision=delayed" in output
    assert output.count(miss_rates()[1]) == 1
    rows = rows_of(output)
    assert rows["bf16"][-1][:2] == ["5", "2.0000"] and rows["bf16"][-1][3] == "3,000"
    assert "+2.500 ±" in rows["nvfp4"][-1][1]


def test_the_line_of_a_candidate_within_the_margin_shows_its_interval(
    shared_rounds: TrainedRounds,
) -> None:
    verdicts = verdicts_after(shared_rounds.rounds)
    text = answer(shared_rounds.trainings, PROTOCOL, verdicts)
    interval = r" \((.*) % interval: (.*) to (.*) %, within ± 0.3 %\)"
    for verdict in verdicts:
        line = next(line for line in text.splitlines() if line.startswith(f"{verdict.name}:"))
        shown = re.match(re.escape(f"{verdict.name}: {verdict.word}") + interval, line)
        is_within = verdict.name in ("delayed", "current", "delayed+head")
        assert bool(shown) == is_within, line
        if shown:
            confidence, low, high = (float(text.replace("−", "-")) for text in shown.groups())
            assert confidence == 98.0, "two one-sided tests, each with 1 % for one of 5 candidates"
            half = verdict.held_out.half_width(0.02)
            ends = [verdict.held_out.mean - half, verdict.held_out.mean + half]
            assert [low, high] == pytest.approx([100 * end / 2 for end in ends], abs=0.0006)
            assert -0.3 < low < high < 0.3


def test_a_halted_candidate_is_done_and_later_rounds_count(
    trained_rounds: TrainedRounds, capsys: pytest.CaptureFixture[str]
) -> None:
    halted = trained_rounds.folder / "rounds" / "nvfp4-seed=43"
    (halted / "summary.json").unlink()
    lines = (halted / "metrics.jsonl").read_text().splitlines(keepends=True)
    halt = '{"step": 400, "event": "halted", "reason": "NaN"}\n'
    (halted / "metrics.jsonl").write_text("".join([*lines[:-1], halt]))
    assert trained_rounds.ask() == 1
    output = capsys.readouterr().out
    assert "nvfp4: broke off" in output
    assert rows_of(output)["mxfp8"][-1][0] == "5"
    assert "started" not in output


def test_only_the_tokens_of_a_branch_count(shared_rounds: TrainedRounds) -> None:
    protocol = replace(PROTOCOL, begin_with="step-00000080")
    branched = replace(shared_rounds.rounds, protocol=protocol)
    tokens = (400 * np.exp(0.05 / 0.2) - 80) / 320
    assert verdict_of(protocol, branched.runs, "nvfp4").tokens == pytest.approx(tokens)
    text = answer(shared_rounds.trainings, protocol, verdicts_after(branched))
    assert "train.begin_with=step-00000080" in text
    assert "This answer is about the checkpoint step-00000080." in text


def test_the_gain_is_unknown_if_the_loss_does_not_fall(question: TrainedRounds) -> None:
    question.write_rounds(slope=0.0, noise=0.1)
    verdicts = verdicts_after(question.rounds)
    delayed = verdicts[0]
    assert not delayed.is_open and delayed.tokens is None
    assert "not known" in delayed.advice
    trainings = question.trainings
    assert "Stay" not in answer(trainings, PROTOCOL, verdicts)
    slow = Verdict("current", word=EQUIVALENT, advice=NO_GAIN)
    assert answer(trainings, PROTOCOL, [slow]).endswith("Stay with bf16.")


def test_a_question_with_other_settings_is_refused(
    trained_rounds: TrainedRounds, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    for options in (["--margin", "1"], ["--seeds", "4"]):
        with pytest.raises(InputError, match=options[0].strip("-")):
            trained_rounds.ask(*options)
    changed = {"train": {"steps": 400}, "optimizer": {"learning_rate": 0.5}}
    write_recipe(small_recipe | changed, tmp_path)
    with pytest.raises(InputError, match="learning_rate"):
        trained_rounds.ask()
    (trained_rounds.folder / "which.json").write_text("{")
    with pytest.raises(InputError, match=r"which\.json"):
        trained_rounds.ask()
