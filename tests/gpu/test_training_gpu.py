"""Test training on CUDA: the search for the microbatch, and runs in and across all precisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from packing.batch import Microbatch, build_microbatch
from pretrain.model import attention
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import wrap_layers
from pretrain.precision.settings import PRECISIONS
from pretrain.run.startup import largest_that_fits
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.gpu.assembled import LENGTH, larger, pack_of
from tests.pretrain.model.fused.fused_models import build

DEVICE = torch.device("cuda")


@pytest.fixture
def packed() -> PackedLanguageModel:
    """Model with FP32 weights, BF16 working copies and torch's variable-length attention."""
    hf = build(larger("qwen3"), torch.float32, DEVICE, "packed_varlen")
    packed = PackedLanguageModel(hf, "packed_varlen", LossSettings(chunk=512))
    settings = ModelSettings(config=larger("qwen3"))
    wrap_layers(packed, settings, cast_to=torch.bfloat16, compile_layers=False)
    return packed


@pytest.fixture
def memory_for() -> Iterator[Callable[[int], None]]:
    """Function that limits this process to the memory it has reserved plus a number of bytes."""

    def limit(extra: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def trial(packs: int) -> Microbatch:
    draw = np.random.default_rng(0)
    return build_microbatch([pack_of(4, LENGTH, draw) for _ in range(packs)], mask_boundaries=True)


def largest(
    packed: PackedLanguageModel, accelerator: Accelerator, sizes: list[int], extra: int = 2**33
) -> int:
    """Return the largest of `sizes` that fits into the reserved memory plus `extra` bytes."""
    options = {
        "usable": torch.cuda.memory_reserved() + extra,
        "most_reserved": torch.cuda.max_memory_reserved,
    }
    return largest_that_fits(packed, accelerator, sizes, trial, multiple_of=1, **options)


def test_the_largest_microbatch_that_fits_the_memory_is_chosen(
    packed: PackedLanguageModel, accelerator: Accelerator, memory_for: Callable
) -> None:
    assert largest(packed, accelerator, [1, 4]) == 4
    memory_for(256 * 2**20)
    # With 1,024 packs, the input of one norm takes 0.5 GiB.
    assert largest(packed, accelerator, [1, 4, 512, 1024], 256 * 2**20) == 4
    assert all(not parameter.grad.any() for parameter in packed.parameters())
    # The chosen microbatch runs. The failed trials have left no memory allocated.
    packed(**inputs_of(trial(4), DEVICE)).backward()
    memory_for(32 * 2**20)
    assert largest(packed, accelerator, [1024], 32 * 2**20) == 0


@pytest.fixture
def small_recipe(small_recipe: dict[str, Any]) -> dict[str, Any]:
    """Recipe with two layers, because a fused layer passes values to the next one."""
    small_recipe["model"]["config"]["num_hidden_layers"] = 2
    return small_recipe


def test_the_launcher_trains_on_a_gpu_in_bf16_without_recompiling(
    train: Callable, small_recipe: dict[str, Any]
) -> None:
    recipe = small_recipe | {"batch": {"tokens": 256, "microbatch": "auto"}}
    recipe["model"]["config"] |= {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    finished = train(recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"])
    assert finished.status == 0, finished.output
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["recompiles"] == 0
    assert summary["held_out_loss"] < finished.losses()[0]
    audit = finished.audit()
    expected_attention = attention.choose(
        "auto", attention.Case("cuda", 64, torch.bfloat16), 100.0
    ).name
    assert audit["precision"] == "bf16"
    assert audit["attention"]["kind"] == expected_attention
    assert audit["compiled"] == "nothing"
    assert audit["fused"].startswith("2 of 2 layers")
    dtypes = {(product["stored"], product["effective"]) for product in audit["products"]}
    assert dtypes == {("bfloat16", "bf16")}


@pytest.mark.parametrize(
    "precision", [name for name, recipe in PRECISIONS.items() if recipe.quantized]
)
def test_the_launcher_trains_in_low_precision(
    precision: str, train: Callable, low_precision_recipe: dict[str, Any]
) -> None:
    """Covers partly recomputed layers and the head.

    Precisions that this GPU does not have in Transformer Engine are emulated.
    """
    low_precision_recipe["model"]["gradient_checkpointing"] = 2
    recipe = low_precision_recipe | {"parity": "on", "precision": precision}
    everywhere = ("fp8_config.scope=linear+head", "fp8_config.keep_bf16_layers.last=0")
    finished = train(
        *everywhere, recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"]
    )
    assert finished.status == 0, finished.output
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["recompiles"] == 0
    assert summary["held_out_loss"] < finished.losses()[0]
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
    before: str,
    after: str,
    keep: str,
    train: Callable,
    low_precision_recipe: dict[str, Any],
) -> None:
    schedule = f"precision=[{{until: 0.5, use: {before}}}, {{use: {after}}}]"
    recipe = low_precision_recipe | {"parity": "on", "weights": "bf16_exact"}
    launch = ["--config_file", "accelerate_configs/bf16.yaml"]
    options = (schedule, f"fp8_config.keep_bf16={keep}")
    run = train(*options, recipe=recipe, launch=launch)
    assert run.status == 0, run.output
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
