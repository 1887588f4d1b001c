"""`python -m pretrain plan` in this process, on a CPU."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.state import AcceleratorState

from lab.speed import plan_command
from packing.prepare import prepare
from pretrain.__main__ import main
from pretrain.run.data import open_data
from pretrain.settings.config import load_data
from tests.conftest import ROOT, write_recipe

RunPlan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPlan]:
    """Return a function that runs the command: its exit status, its output and its errors."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[int, str, str]:
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        status = main(["plan", *arguments])
        return status, *capsys.readouterr()

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plan(run: RunPlan, small_recipe: dict[str, Any], tmp_path: Path) -> RunPlan:
    """Return a function that plans the small recipe."""
    return partial(run, str(write_recipe(small_recipe, tmp_path)))


# Llama-3.1-8B, whose steps were measured on one H200.
LLAMA = (str(ROOT / "benchmarks/llama_3_1_8b.yaml"), "data.packs=/no/such", "batch.tokens=65536")
LLAMA += ("model.gradient_checkpointing=none", "batch.microbatch=1", "optimizer.moments=bf16")


def table(out: str, on: str) -> dict[str, dict[str, str]]:
    """Return the table of a device: rows by precision, cells by column."""
    _, _, after = out.partition(f"\n{on}, ")
    lines = after.partition("\n\n")[0].splitlines()
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_a_plan_needs_no_packs_and_counts_steps_and_epochs(plan: RunPlan) -> None:
    status, out, err = plan("data.packs=/no/such", "train.tokens=1000000", "--on", "8xB200")
    assert (status, err) == (0, "") and "3,907 steps = 1.00 M tokens" in " ".join(out.split())
    assert "no packs are prepared here" in " ".join(out.split())
    assert "* packs: " in out and "* tokens/s: " not in out, "tokens/s is no column of the table"
    assert table(out, "8 x B200")["bf16"]["packs"] == "1 x 1, ddp", (
        "a device gets fewer packs than the recipe's microbatch of two"
    )
    assert " = 1.00 epochs" in plan("train={epochs: 1}")[1]


@pytest.fixture
def text_data(words: Path, tmp_path: Path) -> list[str]:
    """Settings of a text with 24 packs."""
    (tmp_path / "text.txt").write_text("w1 w2 w3 " * 500)
    data = (f"source={tmp_path / 'text.txt'}", f"tokenizer={words}", "length=64")
    return [f"data.{key}" for key in (*data, f"packs={tmp_path / 'packs'}")]


def test_the_packs_are_opened_once_for_all_precisions(
    plan: RunPlan, text_data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(load_data(text_data), progress=False)
    opened = mock.Mock(wraps=open_data)
    monkeypatch.setattr(plan_command, "open_data", opened)
    status, out, err = plan(*text_data, "evaluate.every=null", "--on", "B200")
    assert (status, err) == (0, "")
    assert len(table(out, "1 x B200")) > 3
    assert opened.call_count == 1


@pytest.mark.parametrize(("window", "known"), [(1000, False), (10**6, True)])
def test_a_stream_that_ends_in_its_first_part_has_epochs(
    window: int, known: bool, plan: RunPlan, text_data: list[str]
) -> None:
    data = [*text_data, "data.streaming.disk_gb=0.1", f"data.streaming.window={window}"]
    prepare(load_data(data), progress=False)
    status, out, err = plan(*data, "batch.tokens=768", "train.steps=6", "evaluate.every=null")
    assert status == 0, err
    assert ("6 steps = 4.61k tokens = 3.00 epochs of 24 packs" in " ".join(out.split())) == known


def test_the_docs_show_the_output_of_the_command(run: RunPlan) -> None:
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    block = page.partition("```\npython -m pretrain plan ")[2].partition("```")[0]
    command, *shown = block.replace("\\\n", "").splitlines()
    recipe, *options = shlex.split(command)
    out = run(str(ROOT / recipe), "data.packs=/no/such", *options)[1].splitlines()
    assert len(shown) > 5 and [line for line in shown if line not in (*out, "...")] == []


def test_the_plan_of_a_large_model_is_as_before(
    run: RunPlan, stored: Callable[[str, str], None]
) -> None:
    """plan.txt has the fastest precision first, and reasons for precisions without a row.

    The second plan fits on one of its cards only, and keeps moments in host memory.
    """
    prices = ("--price", "h200=3.5", "--on", "H200,B200,rtx5090,a100")
    offload = ("optimizer.offload=moments", "optimizer.moments=null", "--on", "RTX 4090,2xH200")
    outputs = []
    for options in (("optimizer.gradients=fp32", *prices), offload):
        status, out, err = run(*LLAMA, "train.steps=1000", *options)
        assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
        outputs.append(out)
    stored("plan.txt", "\n".join(outputs))
    dollars = 3.5 * 65_536_000 / 16_829 / 3600
    assert list(table(outputs[0], "1 x H200")["delayed"].values())[-1] == f"{dollars:.2f}"


def test_a_requested_precision_is_compared_with_bf16_alone(plan: RunPlan) -> None:
    size = "model.config.vocab_size=64"
    head = ("precision=delayed", "fp8_config.scope=linear+head", size, "--on", "H100")
    assert list(table(plan(*head)[1], "1 x H100")) == ["delayed+head", "bf16"]
    assert list(table(plan("precision=bf16", "--on", "H100")[1], "1 x H100")) == ["bf16"]
    phases = "precision=[{until: 0.5, use: current}, {use: bf16}]"
    out = plan(phases, "--on", "H100")[1]
    assert set(table(out, "1 x H100")) == {"current to 50 %, then bf16", "bf16"}


def test_a_precision_that_does_not_suit_the_recipe_has_a_reason(plan: RunPlan) -> None:
    out = plan("--on", "H100")[1]
    assert "block" not in table(out, "1 x H100") and "* block: `data.length: 32` is not" in out


@pytest.mark.parametrize("attention", ["flash_attn", "triton"])
def test_a_plan_may_request_an_attention_that_needs_a_gpu(plan: RunPlan, attention: str) -> None:
    heads = ("model.config.hidden_size=128", "model.config.head_dim=64", "precision=bf16")
    status, out, err = plan(f"model.attention={attention}", *heads, "--on", "H100")
    assert (status, err) == (0, "") and table(out, "1 x H100")["bf16"]["needs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--price Q9=2", "--price Q9"),
        ("--price H100=free", "argument --price: free is not a number above 0"),
        ("--config zero --on H100", "--config zero: set several devices"),
        ("train.epochs=2 data.packs=/no/such", "`train.epochs` needs the number of packs"),
    ],
)
def test_a_plan_that_is_impossible_prints_one_error(
    arguments: str, message: str, plan: RunPlan
) -> None:
    status, out, err = plan(*arguments.split())
    assert (status, out, err.count("error: ")) == (2, "", 1), err
    assert message in err


def test_devices_whose_experts_stay_in_bf16_are_named(plan: RunPlan) -> None:
    config = "model_type=qwen3_moe num_experts=4 num_experts_per_tok=2 moe_intermediate_size=64"
    mixture = [f"model.config.{setting}" for setting in config.split()]
    e4m3 = ("precision=delayed", "fp8_config.fp8_format=E4M3")
    _, out, err = plan(*mixture, *e4m3, "--on", "H100", "--on", "B200")
    on_h100, _, on_b200 = out.partition("\n1 x B200, ")
    assert err == "" and "\ndelayed: experts compute in BF16" in on_b200
    assert "experts compute" not in on_h100
