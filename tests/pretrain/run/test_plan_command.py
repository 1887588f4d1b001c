"""`python -m pretrain plan` in this process, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState

from pretrain.__main__ import main
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT, write_recipe

RunPlan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(small_recipe: dict[str, Any], tmp_path: Path, capsys, monkeypatch) -> Iterator[RunPlan]:
    """Return a function that runs the command and returns exit status, stdout and stderr."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(*arguments: str) -> tuple[int, str, str]:
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        status = main(["plan", str(write_recipe(small_recipe, tmp_path)), *arguments])
        return status, *capsys.readouterr()

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


def row(out: str, on: str) -> dict[str, str]:
    """Return the table's row of a device by column."""
    header, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("| ")
    ]
    return next(dict(zip(header, line, strict=True)) for line in lines if line[0] == on)


def test_a_plan_needs_no_packs_and_counts_steps_and_epochs(plan: RunPlan) -> None:
    status, out, err = plan("data.packs=/no/such", "train.tokens=1000000", "--on", "8xB200")
    assert (status, err) == (0, "") and "3,907 steps = 1.00 M tokens" in " ".join(out.split())
    assert "no packs are prepared here" in " ".join(out.split())
    assert row(out, "8 x B200")["microbatch"] == "1 x 1 pack", (
        "a device gets fewer packs than the recipe's microbatch of two"
    )
    assert " = 1.00 epochs" in plan("train={epochs: 1}")[1]


@pytest.mark.parametrize("attention", ["flash_attn", "triton"])
def test_a_plan_may_request_an_attention_that_needs_a_gpu(plan: RunPlan, attention: str) -> None:
    status, out, err = plan(f"model.attention={attention}", "--on", "H100")
    assert (status, err) == (0, "") and row(out, "1 x H100")["needs"]


@pytest.mark.parametrize(
    ("on", "settings", "fits"),
    [
        ("2xH200", "precision=bf16", True),
        ("2xH200", "precision=delayed", False),
        ("2xH200", "precision=delayed optimizer.moments=bf16", True),
        ("4xH200", "precision=delayed", True),
        ("1xH200", "precision=delayed batch.tokens=524288", False),
        ("1xH200", "precision=delayed optimizer.offload=moments batch.tokens=524288", True),
    ],
)
def test_qwen2_5_14b_fits_where_its_recipe_says(
    on: str, settings: str, fits: bool, plan: RunPlan
) -> None:
    recipe = load_recipe(ROOT / "recipes/qwen2_5_14b_openmath.yaml")
    shape = yaml.safe_load((ROOT / "benchmarks/qwen2_5_14b.yaml").read_text())["model"]["config"]
    overrides = {
        "weights": recipe.weights,
        "batch.tokens": recipe.batch.tokens,
        "data.length": recipe.data.length,
    }
    overrides |= {"model.gradient_checkpointing": recipe.model.gradient_checkpointing}
    values = [f"{key}={value}" for key, value in overrides.items()] + ["data.packs=/no/such"]
    values += [f"model.config={json.dumps(shape)}", "batch.microbatch=auto", *settings.split()]
    _, out, err = plan(*values, "--on", on)
    shown = row(out, on.replace("x", " x "))
    assert err == "" and ("does not fit" not in shown["microbatch"]) == fits
    assert shown["needs"].endswith(" + 110.0 GiB host") == ("offload" in settings)


def test_a_plan_that_does_not_fit_shows_no_speed(plan: RunPlan) -> None:
    vocabulary = "model.config.vocab_size=40000000"
    _, out, err = plan(vocabulary, "batch.microbatch=2", "--on", "RTX 4090", "--on", "H200")
    small = row(out, "1 x RTX 4090")
    large = row(out, "1 x H200")
    assert err == "" and small["microbatch"].endswith("does not fit")
    assert small["available"] == "23.5 GiB"
    assert small["tokens/s"] == small["basis"] == "–" != large["basis"]
    assert "fit" not in large["microbatch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "Q9"), "--on Q9"),
        (("train.epochs=2", "data.packs=/no/such"), "`train.epochs` needs the number of packs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_plan_that_is_impossible_prints_one_error(
    arguments: tuple[str, ...], message: str, plan: RunPlan
) -> None:
    status, out, err = plan(*arguments)
    assert (status, out, err.count("error: ")) == (2, "", 1), err
    assert message in err


def test_devices_whose_experts_stay_in_bf16_are_named(plan: RunPlan) -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    mixture = [f"model.config.{key}={value}" for key, value in config.items()]
    _, out, err = plan(
        *mixture, "precision=delayed", "fp8_config.fp8_format=E4M3", "--on", "H100", "--on", "B200"
    )
    assert err == "" and "* 1 x B200: experts compute in BF16" in out and "1 x H100:" not in out
