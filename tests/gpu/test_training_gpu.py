"""Training on CUDA: the memory search, and runs by the launcher in every precision and through changes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from packing.arrow import Pack
from packing.batch import Microbatch, build_microbatch
from pretrain.model import attention
from pretrain.model import huggingface as model
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import wrap_layers
from pretrain.precision.settings import PLAIN_FORWARD, PRECISIONS
from pretrain.run.startup import largest_that_fits
from pretrain.settings.recipe import LossSettings, ModelSettings

LENGTH, VOCABULARY = 256, 503
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SETTINGS = ModelSettings(config=QWEN3 | HEADS)
DEVICE = torch.device("cuda")


@pytest.fixture
def packed() -> PackedLanguageModel:
    """FP32 weights under BF16 working copies, attention by torch's variable-length kernel."""
    config = model.load_config(SETTINGS)
    hf = model.build(
        SETTINGS, config, weights=torch.float32, seed=1, device=DEVICE, backend="packed_varlen"
    )
    packed = PackedLanguageModel(hf, "packed_varlen", LossSettings(chunk=512))
    wrap_layers(packed, SETTINGS, cast_to=torch.bfloat16, compile_layers=False)
    return packed


def pack_of(documents: int, seed: int) -> Pack:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), documents - 1, replace=False))
    lengths = np.diff([0, *cuts, LENGTH]).astype(np.int32)
    return Pack(rng.integers(VOCABULARY, size=LENGTH).astype(np.uint32), lengths)


@pytest.fixture
def memory_for() -> Iterator[Callable[[int], None]]:
    """Let this process have as many bytes as it holds now and so many more."""

    def limit(further: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + further) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def trial(packs: int) -> Microbatch:
    return build_microbatch([pack_of(4, seed) for seed in range(packs)], mask_boundaries=True)


def largest(
    packed: PackedLanguageModel, accelerator: Accelerator, sizes: list[int], further: int = 2**33
) -> int:
    """Of `sizes`, in so many bytes beside those that this process holds."""
    options = {
        "usable": torch.cuda.memory_reserved() + further,
        "most_reserved": torch.cuda.max_memory_reserved,
    }
    return largest_that_fits(packed, accelerator, sizes, trial, multiple_of=1, **options)


def test_the_largest_microbatch_is_found_in_the_memory_that_there_is(
    packed: PackedLanguageModel, accelerator: Accelerator, memory_for: Callable
) -> None:
    assert largest(packed, accelerator, [1, 4]) == 4
    memory_for(256 * 2**20)
    # 1,024 packs hold 0.5 GiB in each norm's input alone
    assert largest(packed, accelerator, [1, 4, 512, 1024], 256 * 2**20) == 4
    assert all(not parameter.grad.any() for parameter in packed.parameters())
    # what was found runs, with nothing left over from what failed
    packed(**inputs_of(trial(4), DEVICE)).backward()
    memory_for(32 * 2**20)
    assert largest(packed, accelerator, [1024], 32 * 2**20) == 0


@pytest.fixture
def small_recipe(small_recipe: dict[str, Any]) -> dict[str, Any]:
    """Of two layers: fused ones hand each other their values."""
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
    assert summary["steps"] == 12 and summary["recompiles"] == 0
    assert summary["held_out_loss"] < finished.losses()[0]
    audit = finished.audit()
    kind = attention.choose("auto", "cuda", 64, torch.bfloat16).name
    assert (audit["precision"], audit["attention"]["kind"], audit["compiled"]) == (
        "bf16",
        kind,
        "nothing",
    )
    assert audit["fused"].startswith("2 of 2 layers")
    assert {(each["stored"], each["effective"]) for each in audit["products"]} == {
        ("float32", "bf16")
    }


@pytest.mark.parametrize(
    "precision", [name for name, recipe in PRECISIONS.items() if recipe.quantized]
)
def test_the_launcher_trains_in_low_precision(
    precision: str, train: Callable, low_precision_recipe: dict[str, Any]
) -> None:
    """On Transformer Engine where the GPU has the recipe, else emulated; in pieces, layers recomputed, and the head."""
    low_precision_recipe["model"]["gradient_checkpointing"] = 2
    recipe = low_precision_recipe | {"parity": "on", "precision": precision}
    everywhere = ("fp8_config.scope=linear+head", "fp8_config.keep_bf16_layers.last=0")
    finished = train(
        *everywhere, recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"]
    )
    assert finished.status == 0, finished.output
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["recompiles"] == 0 and summary["held_out_loss"] < finished.losses()[0]
    audit = finished.audit()
    assert (
        audit["backend"] in ("transformer_engine", "emulation") and not audit["parity"]["failures"]
    )
    assert audit["parity"]["products_compared"] >= 3 * 2 * 4, (
        "every product of every layer, stacked or not"
    )
    assert {each["effective"] for each in audit["products"]} == {precision}


@pytest.mark.parametrize(
    ("before", "after", "keep"),
    [
        ("delayed", "bf16", "[]"),
        ("bf16", "delayed", "[down_proj]"),
        ("current", "delayed", "[]"),
        ("delayed", "delayed, forward: bf16", "[down_proj]"),
    ],
)
def test_the_launcher_changes_its_precision_on_the_way(
    before: str,
    after: str,
    keep: str,
    train: Callable,
    low_precision_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Fused on Transformer Engine; the whole run and one that is resumed at the switch agree as far as a GPU repeats itself."""
    schedule = f"precision=[{{until: 0.5, use: {before}}}, {{use: {after}}}]"
    recipe = low_precision_recipe | {
        "parity": "on",
        "weights": "bf16_exact",
        "checkpoint": {"every": 6, "keep": 3},
    }
    launch = ["--config_file", "accelerate_configs/bf16.yaml"]
    options = (schedule, f"fp8_config.keep_bf16={keep}")
    whole = train(*options, recipe=recipe, launch=launch)
    assert whole.status == 0, whole.output
    after = after.replace(", forward: bf16", PLAIN_FORWARD)
    assert [step["precision"] for step in whole.steps()] == [before] * 6 + [after] * 6
    assert whole.losses()[-1] < 0.5 * whole.losses()[0]
    audit = whole.audit()
    assert audit["fused"] == "2 of 2 layers" and audit["effective"] == after
    for name, precision in audit["precisions"].items():
        assert (
            precision["backend"] == ("torch" if name == "bf16" else "transformer_engine")
            and not precision["parity"]["failures"]
        )
        low = {
            each["name"].rpartition(".")[2]
            for each in precision["products"]
            if each["effective"] == name != "bf16"
        }
        assert ("down_proj" in low) == (name != "bf16" and keep == "[]"), name
    checkpoint = whole.run_dir / "checkpoints" / "step-00000006"
    again = train(
        *options,
        f"run_dir={tmp_path / 'again'}",
        "--resume",
        str(checkpoint),
        recipe=recipe,
        launch=launch,
    )
    assert again.status == 0, again.output
    assert again.losses() == pytest.approx(whole.losses()[6:], rel=2e-2)
