"""The table of docs/results.md, from a result file made up here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.throughput_report import BEGIN, END, write
from benchmarks.throughput_run import Settings, finish
from benchmarks.ways.entries import MODELS
from foundation.errors import InputError
from pretrain.settings.config import load_recipe

ROOT = Path(__file__).resolve().parents[2]
QWEN = MODELS["qwen3_1_7b"]
SPEED = {"hf_eager": 25_000, "hf_compiled": 50_000, "reference": 40_000, "reference_bf16": 45_000, "delayed_exact": 67_500}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """Five ways, of which the compiled one trains with a twelfth of the gradient, and one that timed out."""
    settings = Settings("qwen3_1_7b", ROOT / QWEN.recipe, QWEN.configuration, warm_up=1, steps=2, timeout=1)
    ways: dict[str, Any] = {}
    for entry in QWEN.entries:
        described = dataclasses.asdict(entry) | {"ours": entry.ours, "floor": entry.floor}
        if entry.name == "torchao":
            ways[entry.name] = described | {"status": "timeout", "reason": "it said nothing"}
        elif entry.name in SPEED:
            norm = 0.12 if entry.name == "hf_compiled" else 1.5
            milliseconds = 131_072 / SPEED[entry.name] * 1e3
            ways[entry.name] = described | {
                "status": "ok",
                "losses": [12.3, 12.0, 11.8],
                "gradient_norms": [norm] * 3,
                "step_ms": [9000.0, milliseconds, milliseconds],
                "data_wait_ms": [0.0] * 3,
                "memory_gib": 81.4,
                "microbatch": 4,
                "microbatches_that_did_not_fit": [8] if entry.name == "hf_eager" else [],
            }
    environment = {"gpus": ["NVIDIA H200"], "processor": "a processor", "packages": {"torch": "2.11.0"}}
    limits = {"status": "ok", "floors": {"bf16": 1.83, "fp8": 131_072 / 112_500, "fp8+head": 1.05}}
    packs = {"sum_squared_lengths_per_token": 523.6}
    content = {"settings": settings.record(), "environment": environment, "limits": limits, "packs": packs, "ways": ways}
    finish(content, settings)
    file = tmp_path / "result.json"
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "results.md"
    file.write_text(f"before\n\n{BEGIN}\nan older table\n{END}\n\nafter\n")
    return file


def rows_of(page: Path) -> dict[tuple[str, str], list[str]]:
    """Cells of each row, by way and weights, in the table's order."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.read_text().splitlines() if line[:1] == "|"]
    return {(row[0], row[2]): row for row in cells[2:]}


def test_the_fastest_stands_first_and_what_is_wrong_is_not_ranked(result: Path, page: Path):
    write([result], page)
    rows = rows_of(page)
    assert [key[0] for key in rows] == [
        "**ours, delayed**",
        "the reference: te.Linear + Liger",
        "the reference: te.Linear + Liger",
        "Hugging Face, eager",
        "Hugging Face, compiled",
        "torchtitan's float8: torchao, compiled",
    ]
    assert rows["**ours, delayed**", "bf16_exact"][3:7] == ["67,500", "67,500 to 67,500", "1.50", "60.0 %"]
    compiled = rows["Hugging Face, compiled", "fp32"]
    assert "Hugging Face, compiled, weights fp32: gradient norm 0.08 times" in " ".join(page.read_text().split())
    assert compiled[5] == "–" and compiled[-1].startswith("no [") and rows["Hugging Face, eager", "fp32"][-1].startswith("yes [")


def test_a_page_without_a_place_and_a_result_without_figures_are_refused(result: Path, page: Path, tmp_path: Path):
    (tmp_path / "empty.json").write_text('{"ways": {}}')
    for file in ("none.json", "empty.json"):
        with pytest.raises(InputError, match=file):
            write([tmp_path / file], page)
    page.write_text("no place\n")
    with pytest.raises(InputError, match=page.name):
        write([result], page)


@pytest.mark.parametrize(
    ("model", "name"), [(model, entry.name) for model in MODELS for entry in MODELS[model].entries if entry.ours]
)
def test_our_variants_are_settings_that_the_launcher_knows(model: str, name: str):
    entry = next(entry for entry in MODELS[model].entries if entry.name == name)
    recipe = load_recipe(ROOT / MODELS[model].recipe, entry.overrides)
    assert (recipe.precision, recipe.weights) == (entry.precision, entry.weights)
