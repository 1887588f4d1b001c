"""`python -m pretrain plan` as a user starts it, in this process and on its CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState

from foundation.tables import UNKNOWN
from pretrain.__main__ import main
from pretrain.plan.preflight import measured_speed
from tests.conftest import write_recipe

Planned = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(small_recipe: dict[str, Any], tmp_path: Path, capsys, monkeypatch) -> Iterator[Planned]:
    """Exit status, stdout and stderr."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(*arguments: str, of: Path | None = None) -> tuple[int, str, str]:
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        status = main(["plan", str(of or write_recipe(small_recipe, tmp_path)), *arguments])
        out, err = capsys.readouterr()
        return status, re.sub(r"\n {2,}", " ", out), err

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


def cells(out: str, first: str) -> list[str]:
    """Of the first line of a table that begins with this cell."""
    [line, *_] = [line for line in out.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_plan_needs_no_packs_and_counts_tokens_and_steps_both_ways(plan):
    missing = "data.packs=/no/such"
    status, out, err = plan(missing, "train.tokens=1000000", "--on", "8xB200", "--mfu", "0.4")
    assert (status, err) == (0, "") and "/no/such is not prepared yet" in out
    assert "3,907 steps x 256 tokens = 1,000,192 tokens" in out and "1 x 8, 2 x 4, 4 x 2, 8 x 1" in out
    assert cells(out, "8 x B200")[1] == "40 % of the bf16 peak, stated"
    memory = out[out.index("Microbatch, by the estimate") :]
    assert cells(memory, "8 x B200")[2] == "1 pack: all of a step", "the recipe's two are more than a device gets"
    assert "5,000 steps x 256 tokens = 1,280,000 tokens" in plan(missing, "train.steps=5000")[1]
    out = plan("data.validation.source=/no/such.jsonl", "data.tokenizer=/no/such", "train={epochs: 1}")[1]
    assert " = 1.00 epochs" in out and "`data.validation`: " in out and "`data.packs`" not in out


def test_what_is_far_outside_of_what_is_known_is_not_forecast(plan):
    status, out, _ = plan("--on", "H100")
    assert status == 0 and cells(out, "1 x H100")[1:] == ["30 to 50 % of the bf16 peak, assumed", UNKNOWN, UNKNOWN]
    assert "no share of a peak says" in out
    assert cells(plan("--on", "H100", "--mfu", "0.4")[1], "1 x H100")[2] != UNKNOWN, "one that is stated is taken"


def test_prices_hours_and_a_budget_are_reckoned_with(plan):
    said = plan("--on", "H200", "--on", "H100", "--price-per-hour", "H200=3600", "--hours", "2", "--mfu", "0.5")
    assert said[0] == 0, said
    of_h200, of_h100 = cells(said[1], "1 x H200"), cells(said[1], "1 x H100")
    assert of_h200[4] == "0.00" and of_h100[4] == UNKNOWN, "twelve steps of it take a thousandth of a second; H100 has no price"
    steps = int(of_h200[5].replace(",", ""))
    assert steps == pytest.approx(float(of_h200[2].replace(",", "")) * 7200 / 256, rel=1e-3)


def test_a_run_of_ones_own_is_reckoned_by(plan, start_here, small_recipe, tmp_path):
    finished = start_here(small_recipe | {"evaluate": {}, "checkpoint": {"at_end": False}}, tmp_path)
    assert finished.status == 0, finished.output
    for arguments in (("--run", str(finished.run_dir)), ()):  # the recipe's own run is found by itself
        status, out, _ = plan("precision=fp32", "--on", "H100", "--price-per-hour", "CPU=3600", *arguments)
        assert status == 0 and cells(out, "1 x CPU")[4] != UNKNOWN == cells(out, "1 x H100")[4]
        assert "run run: 1 x CPU, measured over 10 steps" in cells(out, "1 x CPU")[1]
    median = yaml.safe_load((finished.run_dir / "summary.json").read_text())["tokens_per_second"]
    assert float(cells(out, "1 x CPU")[2].replace(",", "")) == pytest.approx(median, rel=0.05)
    assert "run run computed in fp32, this plan in bf16" in plan("--on", "H100")[1]
    measured = partial(measured_speed, finished.run_dir)
    assert measured({"fp32", "bf16"}, (1, "CPU")) == median and measured({"bf16"}, (1, "CPU")) is None
    assert measured({"fp32"}, (2, "CPU")) is None and measured({"fp32"}, (1, "NVIDIA H200")) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    {
        ("--on", "Q9"): "--on Q9",
        ("--mfu", "1.2"): "--mfu: 1.2",
        ("--hours", "soon"): "--hours: soon",
        ("--price-per-hour", "H200=cheap"): "--price-per-hour H200=cheap",
        ("--price-per-hour", "H20=3"): "--price-per-hour H20=...",
        ("--run", "/no/such"): "/no/such: there is no such run folder",
        ("train.epochs=2", "data.packs=/no/such"): "`train.epochs` counts its packs",
    }.items(),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned_is_one_message(arguments, named, plan):
    status, out, err = plan(*arguments)
    assert (status, out, err.count("error: ")) == (2, "", 1), err
    assert named in err
