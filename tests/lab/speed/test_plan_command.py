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


def run_in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command. Return its exit status, its output and its errors."""
    AcceleratorState._reset_state(reset_partial_state=True)
    capsys.readouterr()
    status = main(["plan", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plan(small_recipe: dict[str, Any], tmp_path: Path, capsys) -> RunPlan:
    """Return a function that plans the small recipe."""
    return lambda *more: run_in_process(capsys, str(write_recipe(small_recipe, tmp_path)), *more)


@pytest.fixture
def plan_benchmark(capsys) -> RunPlan:
    """Return a function that plans a recipe of the benchmarks without packs."""

    def run(recipe: str, *arguments: str) -> tuple[int, str, str]:
        return run_in_process(capsys, str(ROOT / recipe), "data.packs=/no/such", *arguments)

    return run


@pytest.fixture
def plan_llama(plan_benchmark: RunPlan) -> RunPlan:
    """Return a function that plans Llama-3.1-8B, whose steps were measured on one H200."""
    recipe = "benchmarks/llama_3_1_8b.yaml"
    settings = ("model.gradient_checkpointing=none", "batch.tokens=65536", "batch.microbatch=1")
    return partial(plan_benchmark, recipe, *settings, "optimizer.moments=bf16")


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


def lines_on(out: str, on: str) -> list[str]:
    """Return the lines below the table of a device."""
    _, _, after = out.partition(f"\n{on}, ")
    return [line for line in after.partition("\n\n")[0].splitlines()[1:] if line[0] != "|"]


def test_a_plan_needs_no_packs_and_counts_steps_and_epochs(plan: RunPlan) -> None:
    status, out, err = plan("data.packs=/no/such", "train.tokens=1000000", "--on", "8xB200")
    assert (status, err) == (0, "") and "3,907 steps = 1.00 M tokens" in " ".join(out.split())
    assert "no packs are prepared here" in " ".join(out.split())
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


def test_the_docs_show_the_output_of_the_command(plan_benchmark: RunPlan) -> None:
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    block = page.partition("```\npython -m pretrain plan ")[2].partition("```")[0]
    command, *shown = block.replace("\\\n", "").splitlines()
    out = plan_benchmark(*shlex.split(command))[1].splitlines()
    assert len(shown) > 5 and [line for line in shown if line not in (*out, "...")] == []


def test_a_table_has_all_precisions_the_fastest_first(plan_llama: RunPlan) -> None:
    on = ("--on", "H200,B200", "--price", "h200=3.5")
    status, out, err = plan_llama(
        "optimizer.moments=bf16", "optimizer.gradients=fp32", "train.steps=1000", *on
    )
    rows = table(out, "1 x H200")
    assert (status, err) == (0, "")
    assert list(rows) == ["delayed+head", "delayed", "current", "block", "bf16"]
    cells = ["delayed", "16,829 ± 7 %", "1.45 ± 5 %", "8 x 1", rows["delayed"]["needs"]]
    cells += ["1 h 05 m", f"{3.5 * 65_536_000 / 16_829 / 3600:.2f}"]
    assert list(rows["delayed"].values()) == cells
    assert (rows["bf16"]["tokens/s"], rows["bf16"]["gain"]) == ("11,599 ± 7 %", "1.00")
    published = table(out, "1 x B200")
    assert published["nvfp4"]["tokens/s"].endswith(" ± 15 %") and "dollars" not in published["bf16"]
    assert "\n1 x B200, 178.4 GiB, compute capability 10.0, speed by steps of NeMo, 8 B" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_precision_that_a_card_lacks_has_a_reason_and_no_row(plan_llama: RunPlan) -> None:
    out = plan_llama("--on", "rtx5090,a100")[1]
    known = ["delayed+head", "delayed", "current", "bf16", "block"]
    assert list(table(out, "1 x RTX 5090")) == known
    assert list(table(out, "1 x A100")) == ["bf16"]
    assert lines_on(out, "1 x RTX 5090")[-1].startswith("mxfp8, nvfp4: needs a GPU of compute")
    assert "delayed, current, delayed+head: needs a GPU of compute capability 8.9 or higher" in (
        lines_on(out, "1 x A100")
    )


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
    heads = ("model.config.hidden_size=128", "model.config.head_dim=64")
    status, out, err = plan(f"model.attention={attention}", *heads, "--on", "H100")
    assert (status, err) == (0, "") and table(out, "1 x H100")["bf16"]["needs"]


def test_a_plan_that_does_not_fit_shows_no_speed(plan_llama: RunPlan) -> None:
    offload = ("optimizer.moments=null", "optimizer.offload=moments")
    _, out, err = plan_llama(*offload, "--on", "RTX 4090", "--on", "H200")
    small = table(out, "1 x RTX 4090")["bf16"]
    large = table(out, "1 x H200")["bf16"]
    assert (err, small["tokens/s"], "time" in small) == ("", "does not fit", False)
    assert "\n1 x RTX 4090, 23.5 GiB, compute capability 8.9, speed by" in out
    assert float(small["needs"].split()[0]) > 23.5
    assert large["needs"].endswith(" + 59.8 GiB host")
    assert "±" in large["tokens/s"] and large["time"] != "–"
    assert ": does not fit; to save memory, set a smaller" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "H100,Q9"), "--on Q9"),
        (("--price", "Q9=2"), "--price Q9"),
        (("--price", "A100=2"), "no plan on A100 is requested; add --on 'A100'"),
        (("--price", "H100=free"), "argument --price: free is not a number above 0"),
        (("--config", "zero", "--on", "H100"), "--config zero: set several devices"),
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
    config = "model_type=qwen3_moe num_experts=4 num_experts_per_tok=2 moe_intermediate_size=64"
    mixture = [f"model.config.{setting}" for setting in config.split()]
    e4m3 = ("precision=delayed", "fp8_config.fp8_format=E4M3")
    _, out, err = plan(*mixture, *e4m3, "--on", "H100", "--on", "B200")
    assert err == "" and lines_on(out, "1 x B200")[0].startswith("delayed: experts compute in BF16")
    assert not any("experts compute" in line for line in lines_on(out, "1 x H100"))
