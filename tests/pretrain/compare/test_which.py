"""The answer to "which precision": how often its intervals err at any time one looks, and the command from its first step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.errors import InputError
from pretrain.compare import which
from pretrain.compare.differences import EQUIVALENT, WORSE, SeedDifference
from tests.conftest import write_recipe

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


@pytest.mark.parametrize(("mean", "verdict", "most"), [(0.0007, EQUIVALENT, 10), (0.0125, WORSE, 6)])
def test_it_tells_what_was_found_at_14_million_parameters_within_a_few_seeds(mean: float, verdict: str, most: int) -> None:
    """Means and spreads as of FP8 and NVFP4 in docs/evidence.md; in four of five questions, two candidates at once."""
    draw, told, spread = np.random.default_rng(0), [], 0.0012 if verdict == EQUIVALENT else 0.0027
    for _ in range(200):
        words = [each.anytime_verdict(0.003, 0.025) for each in looks(draw.normal(mean, spread, SEEDS))]
        told.append(next((seeds for seeds, word in enumerate(words, start=3) if word == verdict), SEEDS + 1))
    assert np.quantile(told, 0.8) <= most


def test_a_normal_test_at_each_look_would_err_more_often() -> None:
    """Why the usual interval is not taken: it is made for one look."""
    draw, trials = np.random.default_rng(0), 300
    missed = sum(any(abs(each.mean) > each.half_width() for each in looks(draw.normal(0, 1, SEEDS))) for _ in range(trials))
    assert missed / trials > 0.15


@pytest.mark.long
def test_a_question_is_tried_planned_answered_and_taken_up_again(
    low_precision_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round of an emulated precision, as the hours are over then; no speed is claimed of it."""
    recipe = low_precision_recipe | {"data": low_precision_recipe["data"] | {"held_out": 0.05}, "batch": {"tokens": 128}}
    recipe["model"]["config"] |= {"num_hidden_layers": 1}
    del recipe["precision"], recipe["evaluate"], recipe["checkpoint"], recipe["fp8_config"], recipe["train"]
    file = write_recipe(recipe | {"batch": {"tokens": 128, "microbatch": 1}, "train": {"epochs": 1}}, tmp_path)
    command = [str(file), "--run_dir", str(tmp_path / "which"), "--precisions", "fp32,current", "--steps", "80"]
    assert which.main([*command, "--hours", "0.001"]) == 1
    verdict = json.loads((tmp_path / "which" / "verdict.json").read_text())
    (seed,) = verdict["candidates"]["current"]["served"]["by_seed"].values()
    assert seed != 0 and verdict["candidates"]["current"]["speedup"] is None
    assert "current: cannot tell" in capsys.readouterr().out
    assert which.main([*command, "--hours", "0.001"]) == 1 and "1 of 2" not in capsys.readouterr().out  # all is trained already
    with pytest.raises(InputError, match="margin"):
        which.main([*command, "--margin", "1"])


@pytest.mark.parametrize(("arguments", "named"), [(["--precisions", "fp32"], "--precisions"), (["train.steps=9"], "train.steps")])
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    arguments: list[str], named: str, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        which.main([str(write_recipe(small_recipe, tmp_path)), *arguments, "--run_dir", str(tmp_path / "which")])
    assert not (tmp_path / "which").exists()
