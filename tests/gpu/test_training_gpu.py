"""Test runs of the launcher on CUDA, in and across all precisions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretrain.model import attention_backends
from tests.conftest import Finished
from tests.pretrain.conftest import QUANTIZED


@pytest.fixture
def small_recipe(small_recipe: dict[str, Any]) -> dict[str, Any]:
    """Recipe with two layers, because a fused layer passes values to the next one."""
    small_recipe["model"]["config"]["num_hidden_layers"] = 2
    return small_recipe


Train = Callable[..., Finished]


@pytest.fixture
def train(train: Train) -> Train:
    """Function that trains on one GPU, and checks that the training ends well."""

    def train_on_a_gpu(recipe: dict[str, Any], *settings: str) -> Finished:
        launch = ["--config_file", "accelerate_configs/bf16.yaml"]
        finished = train(*settings, recipe=recipe, launch=launch)
        assert finished.status == 0, finished.output
        return finished

    return train_on_a_gpu


def check_summary(finished: Finished) -> None:
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["recompiles"] == 0
    assert summary["held_out_loss"] < finished.losses()[0]


def test_the_launcher_trains_on_a_gpu_in_bf16_without_recompiling(
    train: Train, small_recipe: dict[str, Any]
) -> None:
    recipe = small_recipe | {"batch": {"tokens": 256, "microbatch": "auto"}}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    recipe["model"]["config"] |= sizes | {"head_dim": 64}
    finished = train(recipe)
    check_summary(finished)
    audit = finished.audit()
    case = attention_backends.Case("cuda", 64, torch.bfloat16)
    assert audit["precision"] == "bf16"
    assert audit["attention"]["kind"] == attention_backends.choose("auto", case, 100.0).name
    assert audit["compiled"] == "nothing"
    assert audit["fused"].startswith("2 of 2 layers")
    dtypes = {(product["stored"], product["effective"]) for product in audit["products"]}
    assert dtypes == {("bfloat16", "bf16")}


@pytest.mark.parametrize("precision", QUANTIZED)
def test_the_launcher_trains_in_low_precision(
    precision: str, train: Train, low_precision_recipe: dict[str, Any]
) -> None:
    """Covers partly recomputed layers and the head.

    Precisions that this GPU does not have in Transformer Engine are emulated.
    """
    low_precision_recipe["model"]["gradient_checkpointing"] = 2
    recipe = low_precision_recipe | {"parity": "on", "precision": precision}
    everywhere = ("fp8_config.scope=linear+head", "fp8_config.keep_bf16_layers.last=0")
    finished = train(recipe, *everywhere)
    check_summary(finished)
    audit = finished.audit()
    assert audit["backend"] in ("transformer_engine", "emulation")
    assert not audit["parity"]["failures"]
    assert audit["parity"]["products_compared"] >= 3 * 2 * 4, (
        "all GEMMs of both layers are compared, stacked or not"
    )
    assert {product["effective"] for product in audit["products"]} == {precision}


@pytest.mark.parametrize(
    ("before", "after", "keep"),
    [
        ("delayed", "bf16", "[]"),
        ("bf16", "delayed", "[down_proj]"),
        ("current", "delayed", "[]"),
    ],
)
def test_the_launcher_switches_the_precision_during_a_run(
    before: str, after: str, keep: str, train: Train, low_precision_recipe: dict[str, Any]
) -> None:
    schedule = f"precision=[{{until: 0.5, use: {before}}}, {{use: {after}}}]"
    recipe = low_precision_recipe | {"parity": "on", "weights": "bf16_exact"}
    run = train(recipe, schedule, f"fp8_config.keep_bf16={keep}")
    assert [step["precision"] for step in run.steps()] == [before] * 6 + [after] * 6
    assert run.losses()[-1] < 0.5 * run.losses()[0]
    audit = run.audit()
    assert audit["fused"] == "2 of 2 layers"
    assert audit["effective"] == after
    for name, precision in audit["precisions"].items():
        assert precision["backend"] == ("torch" if name == "bf16" else "transformer_engine")
        assert not precision["parity"]["failures"]
        low = {
            product["name"].rpartition(".")[2]
            for product in precision["products"]
            if product["effective"] == name != "bf16"
        }
        assert ("down_proj" in low) == (name != "bf16" and keep == "[]"), name
