"""Test the comparison of ways on a CPU: correct ways, a way with wrong labels, and failing ways."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.machine import without_padding
from benchmarks.speed import bench, limits, shapes
from benchmarks.speed.__main__ import tables
from benchmarks.speed.bench import Bench, Settings
from benchmarks.speed.libraries.entries import CPU, MODELS, Entry
from benchmarks.speed.libraries.judge import LOSES, RIGHT, UNKNOWN, WRONG, judge
from pretrain.launch.environment import with_precision
from pretrain.metrics.run_folder import describe_environment
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT
from tests.forked_commands import forking
from tests.lab.made_runs import rows_of

TINY = {entry.name: entry for entry in MODELS["tiny"].entries}
BROKEN = Entry(
    "broken", "labels shifted twice", "bf16", "fp32", module="tests.benchmarks.shifted_labels"
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipe of the tiny model with short packs and small steps. A few steps can learn its data."""
    values = yaml.safe_load((ROOT / "benchmarks/tiny.yaml").read_text())
    values["data"]["length"] = 64
    values["batch"] = {"tokens": 256, "microbatch": 2}
    values["optimizer"]["learning_rate"] = 0.01
    path = tmp_path_factory.mktemp("throughput") / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def measured(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result file of a run with three ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(Settings, "packs", recipe.parent / "packs")
        # Describe the environment in this process, which has imported torch and holds no GPU.
        patch.setattr(bench, "environment_from_elsewhere", partial(describe_environment, {}))
        for key, value in (forking() | {"CUDA_VISIBLE_DEVICES": ""}).items():
            patch.setenv(key, value)
        settings = Settings("tiny", recipe, CPU, warm_up=2, steps=4, timeout=600)
        out = tmp_path_factory.mktemp("results") / "result.json"
        Bench(settings, out, "a test").run([TINY["hf_eager"], TINY["fp32"], BROKEN])
        return json.loads(out.read_text())


def test_ours_and_plain_hugging_face_train_the_same(measured: dict[str, Any]):
    """Differences of gradient norms grow from step to step, by rounding only."""
    launcher, eager = (measured["ways"][name] for name in ("fp32", "hf_eager"))
    assert launcher["verdict"] == eager["verdict"] == RIGHT and eager["command"]
    assert launcher["losses"] == pytest.approx(eager["losses"], abs=1e-3)
    assert launcher["losses"][-1] < launcher["losses"][0] - 0.1, "updates are compared too"
    assert launcher["gradient_norms"][0] == pytest.approx(eager["gradient_norms"][0], rel=1e-4)
    assert launcher["gradient_norms"] == pytest.approx(eager["gradient_norms"], rel=5e-2)


def test_figures_are_medians_and_wrong_labels_are_judged_wrong(measured: dict[str, Any]):
    way = measured["ways"]["fp32"]
    speeds = sorted(256 / (ms / 1e3) for ms in way["step_ms"][2:])
    spread = way["tokens_per_second"]
    assert len(way["step_ms"]) == 6
    assert spread["median"] == pytest.approx((speeds[1] + speeds[2]) / 2)
    assert spread["min"] <= spread["q1"] <= spread["median"] <= spread["q3"] <= spread["max"]
    assert way["first_step_seconds"] == way["step_ms"][0] / 1e3 and way["memory_gib"] > 0
    floor = measured["limits"]["floors"]["fp32"]
    slow, fast = (256 / spread[extreme] for extreme in ("min", "max"))
    assert floor / slow <= way["share_of_limit"] <= floor / fast
    broken = measured["ways"]["broken"]
    assert (broken["status"], broken["verdict"]) == ("ok", WRONG) and broken["reasons"]


def test_a_way_that_breaks_down_is_recorded_with_its_error(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    settings = Settings("tiny", recipe, CPU, 1, 1, timeout=600)
    failed = Bench(settings, tmp_path / "out.json", "a test").worker(["benchmarks.no_way"], {})
    assert failed["status"] == "failed" and "No module named benchmarks.no_way" in failed["reason"]
    hasty = Bench(replace(settings, timeout=0.01), tmp_path / "out.json", "a test")
    limits_of = ["benchmarks.speed.limits", "--recipe", str(recipe)]
    assert hasty.worker(limits_of, {})["status"] == "timeout"


def run_of(losses: list[float], norms: list[float], **more: int) -> dict[str, Any]:
    counts = {"parameters": 100, "updated_parameters": 100} | more
    return {"losses": losses, "gradient_norms": norms} | counts


EAGER = run_of([12.34, 12.0, 11.5, 11.1], [4.5, 4.0, 3.7, 4.4])
NEAR = run_of([12.37, 12.0, 11.5, 11.11], [3.8, 3.3, 3.1, 3.7])
# A run that loses small updates in BF16.
SLOW = run_of([12.34, 12.26, 12.0, 11.86], EAGER["gradient_norms"])


@pytest.mark.parametrize(
    ("precision", "weights", "run", "verdict"),
    [
        ("delayed", "bf16_exact", NEAR, RIGHT),
        ("bf16", "bf16_exact", NEAR, WRONG),
        # Current scaling does not clip gradients.
        ("current", "bf16_exact", NEAR, WRONG),
        # Delayed scaling clips the first gradient, because the history is empty.
        ("delayed", "fp32", run_of(EAGER["losses"], [0.9, 4.0, 3.7, 4.4]), RIGHT),
        ("delayed", "fp32", run_of(EAGER["losses"], [0.4, 0.4, 0.4, 0.4]), WRONG),
        ("bf16", "bf16", SLOW, LOSES),
        # Only their first gradient is compared.
        ("bf16", "bf16", SLOW | {"gradient_norms": [4.5, 9.0, 9.0, 9.0]}, LOSES),
        ("bf16", "fp32", SLOW, WRONG),
        ("delayed", "fp32", EAGER | {"updated_parameters": 90}, WRONG),
        # The head is not tied.
        ("delayed", "fp32", EAGER | {"parameters": 130, "updated_parameters": 130}, WRONG),
        ("bf16", "fp32", run_of([12.34, float("nan")], [4.5, 4.0]), WRONG),
    ],
)
def test_the_tolerances_of_the_judge_depend_on_the_precision(
    precision: str, weights: str, run: dict[str, Any], verdict: str
):
    entry = Entry("way", "a way", precision, weights)
    assert judge(entry, run, EAGER)[0] == verdict
    assert judge(entry, EAGER, None)[0] == UNKNOWN


@pytest.mark.parametrize("precision", limits.BLOCK_SCALES)
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_limits_with_scales_of_blocks_are_calls_that_torch_accepts(precision: str, gemm: str):
    """On the meta device, torch checks the shapes, the dtypes and the number of scales."""
    meta = torch.device("meta")
    product = limits.Product("down", inputs=416, outputs=192, count=1)
    m, k, n = product.sizes(128)[gemm]
    result = limits.block_product(gemm, m, k, n, precision, meta)()
    assert result.shape == (m, n) and result.dtype == torch.bfloat16


def test_settings_of_a_shape_are_ones_that_its_runs_take() -> None:
    model = "qwen3_1_7b"
    for shape in shapes.SHAPES.values():
        for entry in shape.entries(model, shapes.WAYS[2:]):
            settings = [*shape.settings(65_536), *entry.overrides]
            loaded = load_recipe(MODELS[model].recipe, settings)
            assert with_precision(loaded, {}).precision == entry.precision
            assert "vocab_size" in loaded.model.config


@pytest.mark.parametrize(
    ("file", "row", "cell"),
    [
        ("h200_shapes", "GPT-2 124M", "1.02 x"),
        ("h200_peers_30_november", "ours", "68,089"),
        ("h200_throughput", "**ours, block**", "58.6 %"),
    ],
)
def test_the_report_of_a_file_has_the_table_of_its_kind(file: str, row: str, cell: str) -> None:
    rows = rows_of(without_padding(tables([ROOT / f"benchmarks/results/speed/{file}.json"])))
    assert cell in rows[row][0]
