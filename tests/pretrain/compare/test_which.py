"""The answer to "which precision": how often its intervals err at any time one looks, and the command from its first step on."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.evidence.tables import Scale
from foundation.errors import InputError
from packing.order import order_of
from packing.store import open_packs
from pretrain.compare import which
from pretrain.compare.differences import (
    BEYOND_MARGIN,
    CANNOT_TELL,
    EQUIVALENT,
    WITHIN_MARGIN,
    WORSE,
    SeedDifference,
    fewest_seeds,
)
from pretrain.compare.seed_groups import grouped
from pretrain.compare.verdicts import NO_GAIN, USE, Protocol, Rounds, Verdict, loss_slope
from pretrain.compare.which import Question
from pretrain.metrics.run_record import RunRecord
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT, write_recipe
from tests.forked_commands import forking
from tests.pretrain.compare.made_runs import RECIPE, leave_behind, rows_of

SEEDS = 20
MISS_RATES = ROOT / "benchmarks/results/loss/which_miss_rates.json"


def looks(values: np.ndarray) -> list[SeedDifference]:
    """What there is to see after each seed from the third on, as shares of a baseline's loss of 1."""
    return [
        SeedDifference(dict(enumerate(values[:seeds].tolist())), 1.0)
        for seeds in range(3, len(values) + 1)
    ]


@pytest.mark.parametrize("error", [0.05, 0.0125])
def test_the_interval_misses_at_most_as_often_as_it_says_whenever_one_looks(error: float) -> None:
    draw, trials = np.random.default_rng(0), 1000
    missed = 0
    for _ in range(trials):
        seen = [
            (each, each.anytime_half_width(error))
            for each in looks(draw.normal(0.002, 0.001, SEEDS))
        ]
        missed += any(half is not None and abs(each.mean - 0.002) > half for each, half in seen)
    assert missed / trials < error


@pytest.mark.parametrize("cost", [0.003, -0.003])
def test_a_cost_of_the_margin_is_called_equivalent_at_most_as_often_as_it_says(cost: float) -> None:
    draw, trials, error = np.random.default_rng(0), 1000, 0.05
    told = [
        [each.anytime_verdict(0.003, error) for each in looks(draw.normal(cost, 0.001, SEEDS))]
        for _ in range(trials)
    ]
    within = [any(word == EQUIVALENT or WITHIN_MARGIN in word for word in words) for words in told]
    assert sum(within) / trials < error


def test_half_a_margin_worse_ends_within_the_margin() -> None:
    """The first verdict that closes a candidate was "worse" in 12 and 27 % of these series."""
    draw, trials, error = np.random.default_rng(0), 300, 0.05
    closing = dict.fromkeys((EQUIVALENT, WORSE + WITHIN_MARGIN, "another"), 0)
    for spread in (0.2 * 0.003, 0.3 * 0.003):
        for _ in range(trials):
            values = draw.normal(0.0015, spread, SEEDS)
            words = [each.anytime_verdict(0.003, error) for each in looks(values)]
            word = next(word for word in words if not Verdict("", word=word).is_open)
            closing[word if word in closing else "another"] += 1
    assert closing["another"] <= error * 2 * trials and min(list(closing.values())[:2]) > 0


def miss_rates() -> tuple[dict[str, float], str]:
    """The simulated rates at a stated 5 %, and how the answer and docs/which.md name them."""
    rates = json.loads(MISS_RATES.read_text())["intervals"]["the product's"]["error 0.05"]["misses"]
    named = f"{rates['exponential']:.0%} of exponential and {rates['lognormal']:.0%} of lognormal"
    return rates, named.replace("%", " %")


def test_a_kept_miss_rate_is_the_simulated_one_and_the_docs_name_it() -> None:
    rates, named = miss_rates()
    assert named in " ".join((ROOT / "docs/which.md").read_text().split())
    draw, missed = np.random.default_rng(1), 0
    for _ in range(500):
        seen = looks(draw.lognormal(size=SEEDS))
        missed += any(abs(each.mean - np.exp(0.5)) > each.anytime_half_width(0.05) for each in seen)
    assert missed / 500 == pytest.approx(rates["lognormal"], abs=0.06)


@pytest.mark.parametrize(("candidates", "seeds"), [(1, 3), (2, 4), (4, 4), (40, 5)])
def test_fewest_seeds_are_the_first_with_a_finite_interval(candidates: int, seeds: int) -> None:
    apart = [SeedDifference(dict(enumerate(range(number))), 1.0) for number in (seeds - 1, seeds)]
    assert fewest_seeds(0.05 / candidates) == seeds
    assert [each.anytime_half_width(0.05 / candidates) is None for each in apart] == [True, False]


@pytest.mark.parametrize("power", [0.1, 0.28, 0.4])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_tokens_for_equal_loss_are_those_of_a_power_law(
    power: float,
    decay: float,
    tmp_path: Path,
) -> None:
    """Ten answers over five seeds, on E + A D^-a: their mean is within 5 % of the solution.

    The loss is 2.5 at the end, its slope 0.18 a unit of ln(tokens), the noise of a step 0.03. A
    decay lowers it further, and a candidate is 0.3 % worse.
    """
    steps, draw, cost = np.arange(1, 1001), np.random.default_rng(0), 0.0075
    share, slope = steps / 1000, 0.18
    losses = 2.5 + slope / power * (share**-power - 1) - 0.1 * np.maximum(0.0, share - 1 + decay)
    config = RECIPE | {"train": {"steps": 1000}, "schedule": {"kind": "wsd", "decay": decay}}
    rounds, found = Rounds(Protocol(None, 0.003, ["bf16"], {"bf16": 1.0}, 0.0, 5, 1000, 200)), []
    for _ in range(10):
        slopes = []
        for _ in range(5):
            noisy = losses + draw.normal(0, 0.03, len(losses))
            pairs = zip(steps.tolist(), noisy.tolist(), strict=True)
            metrics = [{"step": step, "loss": loss} for step, loss in pairs]
            slopes.append(loss_slope(RunRecord(tmp_path, config, {}, metrics, {})))
        found.append(rounds.tokens_for(cost, np.mean(slopes)) - 1)
    expected = (1 - power * cost / slope) ** (-1 / power) - 1
    assert np.mean(found) == pytest.approx(expected, rel=0.05)


def test_it_tells_of_the_kept_seeds_what_their_page_says() -> None:
    """docs/which.md has these numbers of seeds: two candidates at once, at 14 million parameters."""
    kept = Scale.read("14m")

    def told(cell: str, seeds: int) -> str:
        difference = kept.difference(cell)
        by_seed = dict(list(difference.by_seed.items())[:seeds])
        return SeedDifference(by_seed, difference.baseline).anytime_verdict(0.003, 0.025)

    beyond = WORSE + BEYOND_MARGIN
    assert [told("nvfp4_branch", seeds) for seeds in (3, 4, 5)] == [CANNOT_TELL, WORSE, beyond]
    assert [told("block_branch", seeds) for seeds in (3, 4)] == [CANNOT_TELL, EQUIVALENT]
    assert told("delayed_branch", 5) == CANNOT_TELL


@pytest.mark.long
def test_a_question_is_tried_planned_answered_and_taken_up_again(
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One round of an emulated precision, as the hours are over then; no speed is claimed of it. The baseline dies once."""
    recipe = low_precision_recipe | {
        "data": low_precision_recipe["data"] | {"held_out": 0.05},
        "batch": {"tokens": 128},
    }
    recipe["model"]["config"] |= {
        "vocab_size": 125,
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 16,
    }
    del (
        recipe["precision"],
        recipe["evaluate"],
        recipe["checkpoint"],
        recipe["fp8_config"],
        recipe["train"],
    )
    recipe |= {"batch": {"tokens": 128, "microbatch": 1}, "train": {"epochs": 1}}
    file = write_recipe(recipe, tmp_path)
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    popen, dies = subprocess.Popen, ["rounds/fp32"]

    def dying_once(command: list[str], **options: Any) -> subprocess.Popen:
        return popen(
            ["false"] if dies and dies[0] in command[-1] and dies.pop() else command, **options
        )

    monkeypatch.setattr(subprocess, "Popen", dying_once)
    command = [
        str(file),
        "--run_dir",
        str(tmp_path / "which"),
        "--precisions",
        "fp32,current,current+head",
    ]
    with pytest.raises(InputError, match="80 are the least"):
        which.main([*command, "--hours", "0.00001"])
    write_recipe(recipe | {"optimizer": {"learning_rate": 0.02}}, tmp_path)  # nothing is fixed yet
    command += ["--steps", "80"]
    with pytest.raises(InputError, match=r"rounds/fp32-seed=42\.log"):
        which.main([*command, "--hours", "0.00001"])
    assert not list(tmp_path.glob("which/rounds/current*")), (
        "which would have begun with the baseline's checkpoint"
    )
    command[0] = os.path.relpath(file)
    assert which.main([*command, "--hours", "0.00001"]) == 1
    # its head stays in BF16
    (verdict,) = json.loads((tmp_path / "which" / "verdict.json").read_text())[
        "candidates"
    ].values()
    ((seed, cost),) = verdict["served"]["by_seed"].items()
    assert seed == "42" and cost != 0 and verdict["speedup"] is verdict["memory_gib"] is None
    assert "current: cannot tell" in capsys.readouterr().out
    assert (
        which.main([*command, "--hours", "0.00001"]) == 1
        and "started" not in capsys.readouterr().out
    )
    rounds = tmp_path / "which" / "rounds"
    (rounds / "current-seed=42" / "summary.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(f"all folders of its seed in {rounds}: ")):
        which.main([*command, "--hours", "0.00001"])
    for folder in rounds.glob("*-seed=42"):
        shutil.rmtree(folder)
    assert which.main([*command, "--hours", "0.00001"]) == 1
    again = json.loads((tmp_path / "which" / "verdict.json").read_text())["candidates"]
    assert again["current"]["served"] == verdict["served"], "the whole seed was trained again"


def test_every_candidate_gets_a_verdict_its_cost_in_tokens_and_advice(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five rounds that have ended. Speeds are in the baseline's; losses fall to a slope of 0.2."""
    above = {
        "delayed": (1.3, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
        "current": (1.004, [0.0004, 0.0005, 0.0006, 0.0005, 0.0005]),
        "delayed+head": (1.1, [0.0020, 0.0021, 0.0022, 0.0021, 0.0021]),
        "nvfp4": (2.0, [0.049, 0.050, 0.051, 0.050, 0.050]),
        "mxfp8": (1.2, [0.001, 0.004, 0.007, 0.004, 0.004]),
    }
    small_recipe["train"] = {"steps": 400}
    file, folder, names = write_recipe(small_recipe, tmp_path), tmp_path / "which", ["bf16", *above]
    protocol = Protocol(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    folder.mkdir()
    (folder / "which.json").write_text(json.dumps(asdict(protocol)))
    question, noise = (
        Question(load_recipe(file), file, (), which.ON_CPU, folder),
        np.random.default_rng(0),
    )
    rounds = Rounds(protocol)

    def train(slope: float, spread: float = 0.0) -> None:
        """Leave the rounds behind. `slope`: at the last step of a power law with exponent 0.4."""
        rounds.runs.clear()
        for seed in range(5):
            cells = {
                cell.values["cell"]: cell
                for cell in question.round(protocol, 42 + seed, list(above)).cells
            }
            for name, cell in cells.items():
                speed, costs = above.get(name, (1.0, [0.0] * 5))
                speed *= 1 + 0.002 * (seed % 3 - 1) * (name != "bf16")
                leave_behind(
                    cell,
                    400,
                    held_out=2.0 + costs[seed],
                    tokens_per_second=1000.0 * speed * (1 + seed),
                )
                lines = [
                    json.loads(line)
                    for line in (cell.run_dir / "metrics.jsonl").read_text().splitlines()
                ]
                # a branch has its own steps alone
                lines = [line for line in lines if line["step"] > 80 or name == "bf16"]
                for line in lines[:-1]:
                    falling = -slope / 0.4 * (line["step"] / 400) ** -0.4
                    line["loss"] = 3 + falling + spread * noise.normal()
                (cell.run_dir / "metrics.jsonl").write_text(
                    "".join(json.dumps(line) + "\n" for line in lines)
                )
            rounds.runs.append({name: cell.record() for name, cell in cells.items()})

    train(slope=-0.2)
    assert {
        len(group)
        for group in grouped([run for each in rounds.runs for run in each.values()]).values()
    } == {5}
    command = [str(file), "--run_dir", str(folder), "--hours", "0.000001"]
    assert which.main(command) == 1, "mxfp8 is open, and the hours are over"
    said, verdict = (
        capsys.readouterr().out,
        json.loads((folder / "verdict.json").read_text())["candidates"],
    )
    advice = {name: (each["word"], each["advice"].split()[0]) for name, each in verdict.items()}
    assert advice == {
        "delayed": ("equivalent", "use"),
        "current": ("equivalent", "no"),
        "delayed+head": ("worse, within the margin", "pays"),
        "nvfp4": ("worse by more than the margin", "pays"),
        "mxfp8": ("cannot tell", "about"),
    }
    assert verdict["nvfp4"]["tokens"] == pytest.approx(np.exp(0.05 / 0.2))
    assert "pays at 1.28 × the tokens" in said
    gain = 1.3 / np.exp(0.0005 / 0.2)
    assert verdict["delayed"]["gain_at_equal_loss"] == pytest.approx(gain, rel=1e-3)
    for name, (speed, costs) in above.items():
        if name == "mxfp8":  # open
            continue
        low, high = verdict[name]["gain_interval"]
        assert low < speed / np.exp(np.mean(costs) / 0.2) < high
        assert (low > 1) == (name != "current"), "0.1 % faster at equal loss is not shown"
    assert f"Train in delayed: 1.30 times ({verdict['delayed']['gain_interval'][0]:.2f} to " in said
    assert miss_rates()[1] in " ".join(said.split())
    assert max(map(abs, verdict["delayed"]["trained"]["by_seed"].values())) < 1e-9, (
        "their last losses are of the same steps"
    )
    assert verdict["mxfp8"]["more_seconds"] >= 4.0 + 3.2, (
        "a seed is 400 steps and 320, though none was started long ago"
    )
    assert f"train_accelerate.py {file} precision=delayed" in said
    assert (
        rows_of(said)["bf16"][-1][:2] == ["5", "2.0000"] and rows_of(said)["bf16"][-1][3] == "3,000"
    )
    assert "+2.500 ±" in rows_of(said)["nvfp4"][-1][1]
    ((halted := folder / "rounds" / "nvfp4-seed=43") / "summary.json").unlink()
    lines = (halted / "metrics.jsonl").read_text().splitlines(keepends=True)
    (halted / "metrics.jsonl").write_text(
        "".join([*lines[:-1], '{"step": 400, "event": "halted", "reason": "NaN"}\n'])
    )
    assert which.main(command) == 1 and "nvfp4: broke off" in (said := capsys.readouterr().out)
    assert rows_of(said)["mxfp8"][-1][0] == "5" and "started" not in said, (
        "the rounds after it are told of"
    )
    branched = replace(rounds, protocol=replace(protocol, begin_with="step-00000080"))
    assert branched.verdict("nvfp4").tokens == pytest.approx(
        (400 * np.exp(0.05 / 0.2) - 80) / 320
    ), "of those after the first 80"
    assert "train.begin_with=step-00000080" in which.answer(
        question, branched.protocol, branched.verdicts()
    )
    train(slope=0.0, spread=0.1)
    delayed, *_ = verdicts = rounds.verdicts()
    answer = which.answer(question, protocol, verdicts)
    assert not delayed.is_open and delayed.tokens is None
    assert "not known" in delayed.advice and "Stay" not in answer
    slow = Verdict("current", word=EQUIVALENT, advice=NO_GAIN)
    assert which.answer(question, protocol, [slow]).endswith("Stay with bf16.")
    for changed in (["--margin", "1"], ["--seeds", "4"]):
        with pytest.raises(InputError, match=changed[0].strip("-")):
            which.main([*command, *changed])
    write_recipe(small_recipe | {"optimizer": {"learning_rate": 0.5}}, tmp_path)
    with pytest.raises(InputError, match="learning_rate"):
        which.main(command)
    (folder / "which.json").write_text("{")
    with pytest.raises(InputError, match=r"which\.json"):
        which.main(command)


def test_trainings_are_as_long_as_the_hours_and_the_text_allow(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = load_recipe(write_recipe(small_recipe | {"train": {"steps": 5000}}, tmp_path))
    seconds = {"bf16": 1.0, "delayed": 0.5}
    (checkpoint := tmp_path / "mine").mkdir()
    (checkpoint / "state.json").write_text('{"progress": {"step": 300}}')

    def fit(
        hours: float, steps: int | None = None, begin_with: Path | None = None
    ) -> tuple[int, int]:
        options = argparse.Namespace(
            hours=hours, seeds=4, steps=steps, begin_with=begin_with and str(begin_with)
        )
        return which.steps_that_fit(options, recipe, seconds, 10.0, 3600 * hours, in_an_epoch=1000)

    assert fit(1) == (628, 126), (
        "4 rounds of 628 steps of bf16, 502 of delayed and two starts take an hour"
    )
    assert fit(8) == (1000, 200), "code is seen once"
    assert fit(0.25, begin_with=checkpoint) == (436, 300), "136 more steps of each"
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
        (["--steps", "1000000"], {}, "seen again after step [0-9]+, "),
        ([], {"steps": 79}, "train.steps"),
        # the recipe's checkpoint is that of all
        ([], {"begin_with": "nowhere/step-00000100"}, "nowhere.*--from"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    arguments: list[str],
    train: dict[str, Any],
    named: str,
    small_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    file = write_recipe(small_recipe | {"train": {"steps": 500} | train}, tmp_path)
    with pytest.raises(InputError, match=named):
        which.main([str(file), *arguments, "--run_dir", str(tmp_path / "which")])
    assert not (tmp_path / "which").exists()


def test_too_few_seeds_for_the_candidates_are_refused_at_once(
    small_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    file = write_recipe(small_recipe | {"train": {"steps": 500}}, tmp_path)
    command = [str(file), "--run_dir", str(tmp_path / "which"), "--seeds", "3"]
    with pytest.raises(InputError, match=r"--seeds 3: 5 precisions .* fewer than 4 seeds"):
        which.main([*command, "--precisions", "bf16,delayed,current,block,nvfp4"])
    assert not (tmp_path / "which" / "trial").exists()


def test_an_epoch_ends_when_one_source_is_used_up(
    small_recipe: dict[str, Any],
    small_packs: Path,
    tmp_path: Path,
) -> None:
    """Two sources of 120 packs each, in shares of 0.75 and 0.25."""
    (tmp_path / "mixed").mkdir()
    for name in ("code", "prose"):
        (tmp_path / "mixed" / name).symlink_to(small_packs)
    small_recipe["batch"] = {"tokens": small_recipe["data"]["length"]}
    assert which.steps_in_an_epoch(load_recipe(write_recipe(small_recipe, tmp_path))) == 120
    sources = [{"name": "code", "weight": 0.75}, {"name": "prose", "weight": 0.25}]
    small_recipe["data"] |= {"packs": str(tmp_path / "mixed"), "sources": sources}
    recipe = load_recipe(write_recipe(small_recipe, tmp_path))
    steps = which.steps_in_an_epoch(recipe)
    order = order_of(open_packs(recipe.data, "train"), 1, recipe.seed)
    assert steps == 160 and order.figures(steps)["epoch/code"] == 1


def test_a_precision_that_cannot_take_the_packs_is_left_out_and_named(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks take tokens in multiples of 128."""
    file = write_recipe(small_recipe | {"data": small_recipe["data"] | {"length": 64}}, tmp_path)
    question = Question(load_recipe(file), file, (), which.ON_CPU, tmp_path / "which")
    assert [cell.values["cell"] for cell in question.trial(["bf16", "block", "mxfp8"]).cells] == [
        "bf16",
        "mxfp8",
    ]
    assert "block" in (said := capsys.readouterr().out) and "128" in said
    with pytest.raises(InputError, match="128"):
        question.trial(["block", "bf16"])


def test_a_candidate_is_what_its_name_says_with_the_options_that_it_takes(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    file = write_recipe(
        small_recipe | {"fp8_config": {"fp8_format": "E4M3", "margin": 1}}, tmp_path
    )
    given, names = (
        ("fp8_config.on_unsupported=fallback", "fp8_config.scope=linear+head"),
        ["bf16", "delayed", "current", "nvfp4"],
    )
    question = Question(load_recipe(file, given), file, given, which.ON_CPU, tmp_path / "which")
    settings = {cell.values["cell"]: cell.recipe.fp8_config for cell in question.trial(names).cells}
    options = [(each.fp8_format, each.margin) for each in settings.values()]
    assert options == [(None, None), ("E4M3", 1), ("E4M3", None), (None, None)]
    assert {(each.on_unsupported, each.scope) for each in settings.values()} == {
        ("emulate", "linear")
    }, "no override's"
    protocol = Protocol(None, 0.003, names, dict.fromkeys(names, 0.1), 5.0, 5, 400, 80)
    kept = question.round(protocol, 42, ["current"]).cells[0].recipe.checkpoint
    assert kept.every == 80 and kept.keep == 400, (
        "what is saved where it is stopped, however often, leaves the trunk's"
    )
    best = Verdict("current", speedup=1.2, tokens=1.0, gain_interval=[1.1, 1.3], advice=USE)
    answer = which.answer(question, protocol, [best])
    assert load_recipe(file, answer.splitlines()[-1].split()[6:]).fp8_config.margin is None
