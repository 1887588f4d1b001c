"""The memory estimate against measured peaks, and its monotony where no measurement exists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.memory import MemoryEstimate, divisors_of, largest_expected_to_fit, microbatch_candidates
from pretrain.metrics.flops import ModelFlops
from pretrain.settings import Recipe

GIB = 2**30
IN_WEIGHTS_DTYPE = {"fp32": "fp32", "bf16": "bf16", "bf16_exact": "bf16"}  # gradients, when the peaks below were measured


@pytest.fixture(scope="module")
def qwen3() -> ModelFlops:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        return ModelFlops.of(
            AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", tie_word_embeddings=True, **sizes, **heads))
        )


def estimate(
    flops: ModelFlops, *, world_size: int = 1, sharded: bool = False, precision: str = "bf16", **changes: object
) -> MemoryEstimate:
    values = {"name": "r", "model": {"source": "m"}, "data": {"packs": "p"}, "train": {"steps": 1}, **changes}
    return MemoryEstimate.of(Recipe.model_validate(values), flops, precision, world_size, sharded)


@pytest.mark.parametrize(
    ("weights", "loss", "gib"),
    [("bf16", "chunked", 77.0), ("bf16_exact", "chunked", 86.6), ("fp32", "chunked", 93.0), ("bf16", "cce", 78.1)],
)
def test_peaks_measured_on_an_h200_are_met_within_two_percent(qwen3: ModelFlops, weights: str, loss: str, gib: float) -> None:
    found = estimate(qwen3, weights=weights, loss={"kind": loss}, optimizer={"gradients": IN_WEIGHTS_DTYPE[weights]})
    assert found.total(8) / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("precision", "gib"), [("delayed", 98.0), ("current", 98.0), ("block", 98.5), ("nvfp4", 99.7), ("mxfp8", 102.4)]
)
def test_peaks_in_low_precision_are_met_within_five_percent(qwen3: ModelFlops, precision: str, gib: float) -> None:
    found = estimate(qwen3, precision=precision, weights="bf16_exact", optimizer={"gradients": "bf16"})
    assert found.total(8) / GIB == pytest.approx(gib, rel=0.05)
    assert found.parts(8)["quantized weights"] == 2 * 1_409_286_144


def test_weights_gradients_and_moments_are_exact(qwen3: ModelFlops) -> None:
    for weights, size in (("fp32", 4), ("bf16", 2)):
        parts = estimate(qwen3, weights=weights).parts(1)
        assert parts["parameters"] == parts["gradients"] == parts["optimizer moments"] // 2 == size * 1_720_574_976


def test_moments_are_as_many_bytes_as_the_recipe_says(qwen3: ModelFlops) -> None:
    for weights in ("fp32", "bf16", "bf16_exact"):
        for moments, size in (("fp32", 4), ("bf16", 2)):
            parts = estimate(qwen3, weights=weights, optimizer={"moments": moments}).parts(1)
            assert parts["optimizer moments"] == 2 * size * 1_720_574_976


@pytest.mark.parametrize(
    ("weights", "gradients", "world_size", "size"),
    [
        ("fp32", None, 1, 4),
        ("bf16_exact", None, 1, 4),
        ("bf16", None, 1, 2),
        ("fp32", "bf16", 1, 2),
        ("bf16", "fp32", 1, 4),
        ("bf16_exact", None, 2, 2),  # what processes exchange has the parameters' dtype
        ("fp32", None, 2, 4),
    ],
)
def test_gradients_are_as_many_bytes_as_what_they_add_up_in(
    qwen3: ModelFlops, weights: str, gradients: str | None, world_size: int, size: int
) -> None:
    found = estimate(qwen3, world_size=world_size, weights=weights, optimizer={"gradients": gradients})
    assert found.parts(1)["gradients"] == size * 1_720_574_976


def test_working_copies_exist_only_beside_fp32_weights_in_bf16_compute(qwen3: ModelFlops) -> None:
    assert "BF16 working copies" in estimate(qwen3, weights="fp32").parts(1)
    assert "BF16 working copies" not in estimate(qwen3, weights="bf16").parts(1)
    assert "BF16 working copies" not in estimate(qwen3, weights="fp32", precision="fp32").parts(1)


def test_fp32_compute_doubles_activations(qwen3: ModelFlops) -> None:
    half, whole = estimate(qwen3), estimate(qwen3, precision="fp32")
    assert whole.parts(1)["activations"] == 2 * half.parts(1)["activations"]


def test_checkpointing_more_layers_takes_less(qwen3: ModelFlops) -> None:
    settings = ["none", {"every": 4}, {"every": 2}, "full"]
    totals = [estimate(qwen3, model={"source": "m", "gradient_checkpointing": setting}).total(8) for setting in settings]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_full_checkpointing_keeps_layer_inputs_and_one_whole_layer(qwen3: ModelFlops) -> None:
    parts = estimate(qwen3, model={"source": "m", "gradient_checkpointing": "full"}).parts(1)
    inputs, one_layer, final_norm = 28 * 2048 * 2, 71_680, 2 * 2048 * 2
    assert parts["activations"] == 4096 * (inputs + one_layer + final_norm)


def test_unchunked_logits_grow_with_the_microbatch_and_chunked_ones_do_not(qwen3: ModelFlops) -> None:
    whole = estimate(qwen3, loss={"kind": "reference"})
    assert whole.parts(8)["loss or backward workspace"] == 8 * 4096 * 151936 * 10
    chunked = estimate(qwen3, loss={"kind": "chunked", "chunk": 32_768})
    assert (
        chunked.parts(8)["loss or backward workspace"] == chunked.parts(16)["loss or backward workspace"] == 32_768 * 151936 * 2
    )


def test_sharding_spreads_weights_gradients_and_moments(qwen3: ModelFlops) -> None:
    whole, shard = estimate(qwen3, world_size=4).parts(1), estimate(qwen3, world_size=4, sharded=True).parts(1)
    for name in ("parameters", "gradients", "optimizer moments"):
        assert shard[name] == whole[name] // 4
    assert shard["activations"] == whole["activations"]


def test_candidates_are_divisors_from_an_optimistic_start_down_to_one(qwen3: ModelFlops) -> None:
    memory = estimate(qwen3, weights="bf16")
    assert microbatch_candidates(32, memory, None) == [32, 16, 8, 4, 2, 1]
    assert microbatch_candidates(32, memory, 76 * GIB) == [8, 4, 2, 1]  # 8 is estimated at 77.7 GiB: worth a try
    assert largest_expected_to_fit([8, 4, 2, 1], memory, 76 * GIB) == 4
    assert microbatch_candidates(32, memory, 1 * GIB) == [1]
    assert largest_expected_to_fit([1], memory, 1 * GIB) is None


@given(st.integers(1, 20_000))
def test_divisors_are_all_of_them_in_order(number: int) -> None:
    assert divisors_of(number) == [d for d in range(1, number + 1) if number % d == 0]
