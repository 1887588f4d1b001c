"""`python -m pretrain which RECIPE --on CARD`: predictions, and recorded answers."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from pretrain.__main__ import main
from pretrain.compare.which_plan import Rounds, WhichPlan
from pretrain.run.which_on import ANSWERS, Answer, is_worth_a_run, nearest_answers
from pretrain.settings import commands
from tests.conftest import ROOT, write_recipe

GPT2 = ROOT / "recipes/gpt2_fineweb_edu.yaml"
GPT2_PARAMETERS = 124_475_904
with ANSWERS.open(encoding="utf-8", newline="") as answers_file:
    ROWS: list[Answer] = list(csv.DictReader(answers_file))

RunWhich = Callable[..., tuple[int, str, str]]


@pytest.fixture
def which_on(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Iterator[RunWhich]:
    """Return a function that runs the command and returns exit status, stdout and stderr."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(recipe: Path, *arguments: str) -> tuple[int, str, str]:
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        status = main(["which", str(recipe), *arguments])
        return status, *capsys.readouterr()

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


def tables(out: str) -> list[dict[str, dict[str, str]]]:
    """Return the recorded answers, and the predictions, by precision."""
    parsed = []
    for text in re.findall(r"(?:^\|.*\n)+", out, re.MULTILINE):
        names, _, *rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
        ]
        parsed.append({row[0]: dict(zip(names, row, strict=True)) for row in rows})
    return parsed


# ── The prediction ────────────────────────────────────────────────────────────────────────────────


def test_gpt2_on_an_h100_has_its_recorded_answer_and_a_prediction(which_on: RunWhich) -> None:
    status, out, err = which_on(GPT2, "--on", "H100")
    assert (status, err) == (0, "") and "124 M parameters" in out and "\n1 x H100, " in out
    recorded, predicted = tables(out)
    answer = recorded["delayed"]
    assert (answer["measured with"], answer["verdict"]) == ("GPT-2 124M", "equivalent")
    assert (answer["gain at equal loss"], answer["its interval"]) == ("1.16", "1.02 to 1.30")
    assert predicted.keys() == {"bf16", "delayed", "delayed+head", "current", "block"}
    gain, _, bar = predicted["delayed"]["gain"].partition(" ± ")
    assert 1.1 < float(gain) < 1.25 and bar == "5 %"
    assert "mxfp8, nvfp4: needs a GPU of compute capability 10.0" in out
    assert "--precisions bf16,delayed,current,delayed+head --hours" in out, "block is not faster"


def test_the_time_of_which_is_that_of_its_plan(which_on: RunWhich) -> None:
    arguments = ("--precisions", "bf16,delayed", "--steps", "3000", "--seeds", "4", "--gpus", "2")
    _, out, _ = which_on(GPT2, "--on", "RTX 4090", *arguments, "batch.tokens=262144")
    _, predicted = tables(out)
    seconds = {
        name: 262_144 / float(predicted[name]["tokens/s"].split()[0].replace(",", ""))
        for name in ("bf16", "delayed")
    }
    plan = WhichPlan(None, 0.003, [*seconds], seconds, 10.0, 4, 3000, 600)
    hours = Rounds(plan, 2).planned_seconds() / 3600
    assert "for 4 seeds of 3,000 steps, with 2 runs at a time.\n" in out
    options = commands.read("which", [str(GPT2), *out.splitlines()[-1].split()])
    assert options.hours == pytest.approx(hours, abs=0.11) and options.hours >= hours
    assert options.precisions == ["bf16", "delayed"]


def test_a_card_without_fp8_trains_in_bf16(which_on: RunWhich) -> None:
    status, out, _ = which_on(GPT2, "--on", "A100")
    _, predicted = tables(out)
    assert status == 0 and [*predicted] == ["bf16"]
    assert re.search("(?m)^delayed, .*needs a GPU of compute capability 8.9", out)
    assert out.endswith("train in bf16.\n")


def test_a_model_without_packs_is_predicted(which_on: RunWhich) -> None:
    recipe = ROOT / "benchmarks/llama_3_1_8b.yaml"
    values = ("data.packs=/no/such", "train={steps: 1000}", "batch.microbatch=1", "--hours", "9")
    status, out, err = which_on(recipe, "--on", "H200", *values)
    recorded, _ = tables(out)
    assert (status, err) == (0, "") and recorded["delayed"]["measured with"] == "Qwen3-0.6B"
    tokens_per_parameter = 1000 * 131_072 / 8_030_261_248
    assert "nearest: Qwen3-0.6B, 13 times smaller, 50.1 M tokens; the recipe has " in out
    assert f"has {tokens_per_parameter:.2g} tokens per parameter\n" in out


def test_a_long_recipe_is_measured_by_short_runs(which_on: RunWhich) -> None:
    """The runs of `which` fit into --hours, whatever the recipe's length is."""
    for hours in ((), ("--hours", "8")):
        status, out, _ = which_on(GPT2, "--on", "H200", "train={steps: 600000}", *hours)
        suggested = float(out.split()[-1])
        assert status == 0 and suggested == pytest.approx(float([4, *hours][-1]), rel=0.05)


def test_a_length_in_epochs_needs_the_option_steps(which_on: RunWhich) -> None:
    epochs = "train={epochs: 2}"
    status, _, err = which_on(GPT2, "--on", "H100", epochs)
    assert status == 2 and "set --steps" in err
    status, out, _ = which_on(GPT2, "--on", "H100", epochs, "--steps", "100")
    assert status == 0 and "seeds of 100 steps" in out


def test_a_mixture_is_compared_with_mixtures(which_on: RunWhich) -> None:
    status, out, _ = which_on(ROOT / "recipes/olmoe_slimpajama.yaml", "--on", "H100")
    recorded, _ = tables(out)
    assert status == 0 and {row["measured with"] for row in recorded.values()} == {"OLMoE 63M"}
    assert ": experts compute in BF16" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "H101"), "--on H101"),
        (("--on", "8xH100"), "--on 8xH100: a run of `which` trains on one GPU"),
        (
            ("--on", "RTX 4090", "batch.microbatch=512"),
            "bf16: the recipe does not fit; it fits with `batch",
        ),
        (("--on", "H100", "--seeds", "3"), "--seeds 3: a comparison of 4 precisions"),
        (("--on", "H100", "--steps", "79"), "--steps 80 or more"),
        (("--on", "A100", "--precisions", "bf16,delayed"), "--on A100: delayed: needs a GPU of"),
        (("--on", "H100", "--precisions", "bf16,fp8"), "unknown: fp8"),
        (("--on", "H100", "--served", "nvfp4"), "remove --served and --candidates, or --on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_prediction_that_is_impossible_prints_one_error(
    arguments: tuple[str, ...], message: str, which_on: RunWhich
) -> None:
    status, _, err = which_on(GPT2, *arguments)
    assert (status, err.count("error: ")) == (2, 1) and message in err, err


def test_the_time_of_a_small_model_is_not_known(
    which_on: RunWhich, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small_recipe | {"train": {"steps": 500}}
    values = ("data.packs=/no/such",)
    status, out, _ = which_on(write_recipe(recipe, tmp_path), "--on", "H100", *values)
    assert status == 0 and "never measured with so few parameters" in out
    assert out.endswith("The time of `which` is not known.\n")


@pytest.mark.parametrize(
    ("speed", "loss", "expected"),
    [
        (1.2, "+0.10 ± 0.50", True),
        (1.2, "+0.51 ± 0.20", False),
        (None, "+0.51 ± 0.20", False),
        (None, None, True),
        (1.004, None, False),
    ],
)
def test_a_precision_is_worth_a_run_if_it_may_be_faster_at_equal_loss(
    speed: float | None, loss: str | None, expected: bool
) -> None:
    answer = None if loss is None else {"loss in percent": loss}
    assert is_worth_a_run(1.0, speed, answer) == expected


def test_which_without_a_card_imports_no_transformers() -> None:
    code = "import sys, pretrain.run.which_on; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_output_in_the_docs_has_the_form_of_the_output(which_on: RunWhich) -> None:
    """The digits depend on the planner, and the widths of columns on the selected precisions."""
    page = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    arguments, lines = re.findall(
        r"which (recipes/\S+ --on .*)\n```\n[^`]*`[^`]*`[^`]*```\n([^`]*)", page
    )[0]
    recipe, *options = shlex.split(arguments)
    _, out, _ = which_on(ROOT / recipe, *options)

    def forms(text: str) -> set[str]:
        rows = [" ".join(line.split()) for line in text.splitlines() if "--|" not in line]
        return {re.sub(r"[\d.,]+", "0", row) for row in rows}

    assert forms(lines) <= forms(out)


# ── Recorded answers ──────────────────────────────────────────────────────────────────────────────


def test_each_answer_of_which_is_printed_once() -> None:
    answers = [row["file"] for row in ROWS if row["answer"]]
    assert sorted(answers) == sorted({row["file"] for row in ROWS if row["speed"]})


def test_the_nearest_answer_is_of_the_nearest_size_and_the_most_seeds() -> None:
    def nearest(parameters: int, precision: str) -> tuple[str, str]:
        row = nearest_answers(parameters, of_mixtures=False)[precision]
        return row["measured with"], row["seeds"]

    assert nearest(GPT2_PARAMETERS, "delayed") == ("GPT-2 124M", "4")
    assert nearest(8_000_000_000, "delayed") == ("Qwen3-0.6B", "9")
    assert nearest(8_000_000_000, "block") == ("GPT-2 124M", "6")
    assert nearest(40_000_000, "delayed") == ("Qwen3 35M", "5")
    assert nearest(8_000_000_000, "nvfp4") == ("Qwen3 14M", "3")
    models = {
        row["measured with"] for row in nearest_answers(8_000_000_000, of_mixtures=True).values()
    }
    assert models == {"OLMoE 63M"}
