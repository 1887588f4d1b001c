"""Patterns of `fp8_config.keep_bf16`: the linears that they match, and invalid patterns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from foundation.errors import InputError
from pretrain.model import huggingface as model
from pretrain.model.configuration import load_config
from pretrain.precision.scope import check_scope, decide, is_called
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.conftest import active_in

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "vocab_size": 256,
}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def hf() -> PreTrainedModel:
    return model.build_on_meta(load_config(ModelSettings(config=QWEN3)))


def active(*patterns: str, precision: str = "delayed", **fp8_config: Any) -> ActivePrecision:
    return active_in(precision, "transformer_engine", keep_bf16=patterns, **fp8_config)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("layers.1.*", {"model.layers.1.mlp.down_proj"}),
        ("down_proj", {"model.layers.1.mlp.down_proj", "model.layers.11.mlp.down_proj"}),
        ("*", {"model.layers.1.mlp.down_proj", "model.layers.11.mlp.down_proj", "lm_head"}),
        ("layers.1?.*", {"model.layers.11.mlp.down_proj"}),
        ("lm_head", {"lm_head"}),
        ("own_proj", set()),
        ("Down_Proj", set()),
    ],
)
def test_a_pattern_matches_the_end_of_a_name_after_a_dot(pattern: str, matches: set[str]) -> None:
    names = ("model.layers.1.mlp.down_proj", "model.layers.11.mlp.down_proj", "lm_head")
    assert {name for name in names if is_called(name, pattern)} == matches


def test_a_kept_linear_names_its_pattern(hf: PreTrainedModel) -> None:
    layers = list(model.decoder_layers(hf).values())
    settings = active("down_proj", "layers.0.*", scope="linear+head", keep_bf16_layers={"last": 1})
    decisions = decide(hf, layers, settings)
    reasons = {
        name.removeprefix("model.layers."): decision.reason
        for name, decision in decisions.items()
        if decision.reason
    }
    assert len(reasons) == 7 + 7 + 10  # two layers and down_proj of the remaining ten
    assert reasons["0.mlp.down_proj"] == reasons["5.mlp.down_proj"] == "keep_bf16: down_proj"
    assert (
        reasons["0.self_attn.q_proj"] == "keep_bf16: layers.0.*"
        and reasons["11.mlp.up_proj"] == "keep_bf16_layers"
    )
    assert {decision.requested for decision in decisions.values() if decision.reason is None} == {
        "delayed"
    }


def test_nvfp4_keeps_its_last_layers_by_default(hf: PreTrainedModel) -> None:
    layers = list(model.decoder_layers(hf).values())
    kept = {
        name: decision.reason
        for name, decision in decide(hf, layers, active(precision="nvfp4")).items()
        if name != "lm_head"
    }
    last_layers = {
        name for name in kept if name.startswith(("model.layers.10.", "model.layers.11."))
    }
    assert {name for name, reason in kept.items() if reason} == last_layers, (
        "15 % of 12, rounded up"
    )
    assert {kept[name] for name in last_layers} == {"keep_bf16_layers"}
    decisions = decide(hf, layers, active(precision="nvfp4", keep_bf16_layers={"first": 1}))
    assert decisions["model.layers.0.mlp.up_proj"].reason == "keep_bf16_layers", "set by the user"
    assert decisions["model.layers.11.mlp.up_proj"].reason == kept["model.layers.11.mlp.up_proj"]


@pytest.mark.parametrize(
    ("kind", "sizes", "routers"),
    [
        (
            "phimoe",
            {"num_local_experts": 16, "num_experts_per_tok": 2},
            {"mlp.router"},
        ),  # a subclass of Linear with another forward
        # The router contains a linear.
        ("hunyuan_v1_moe", {"num_experts": 16, "moe_topk": 2}, {"mlp.gate.wg"}),
        (
            "jetmoe",
            {"num_local_experts": 16, "kv_channels": 32},
            {"mlp.router.layer", "self_attention.experts.router.layer"},
        ),
        # The block that records the logits has other linears, which are no routers.
        (
            "doge",
            {
                "is_moe": True,
                "num_experts": 64,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
            },
            {"mlp.router_gate"},
        ),
    ],
)
def test_only_the_router_stays_unquantized(
    kind: str, sizes: dict[str, int], routers: set[str]
) -> None:
    config = {**QWEN3, "model_type": kind, "num_hidden_layers": 1, **sizes}
    if kind == "jetmoe":  # jetmoe calls this key kv_channels.
        del config["head_dim"]
    hf = model.build_on_meta(load_config(ModelSettings(config=config)))
    decisions = decide(hf, list(model.decoder_layers(hf).values()), active())
    kept = {
        name
        for name, decision in decisions.items()
        if decision.reason and not name.endswith((".gate_up_proj", ".down_proj"))
    }
    assert kept == {"lm_head", *(f"model.layers.0.{name}" for name in routers)}


@given(layers=st.integers(1, 200), first=st.integers(0, 3))
def test_nvfp4_keeps_15_percent_rounded_up_but_not_all_layers(layers: int, first: int) -> None:
    kept = active(precision="nvfp4", keep_bf16_layers={"first": first}).kept_layers(layers)
    assert kept == (first, max(0, min(-(-15 * layers // 100), layers - first - 1)))
    assert active(keep_bf16_layers={"first": first}).kept_layers(layers) == (first, 0), (
        "other precisions keep none"
    )
    assert active(precision="nvfp4", keep_bf16_layers={"last": first}).kept_layers(layers) == (
        0,
        first,
    )


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.12.*"], "'layers.12.*' matches no linear layer of Qwen3ForCausalLM"),
        (["down_proj", "dwon_proj"], "'dwon_proj' matches no linear layer of Qwen3ForCausalLM"),
        (
            ["layers.*"],
            "`precision: delayed`: no linear layer of Qwen3ForCausalLM can compute in this "
            "precision (keep_bf16: layers.*; scope linear",
        ),
    ],
)
def test_patterns_that_match_no_or_all_linears_are_rejected(
    hf: PreTrainedModel, patterns: list[str], message: str
) -> None:
    layers = list(model.decoder_layers(hf).values())
    with pytest.raises(InputError) as error:
        check_scope(hf, layers, active(*patterns))
    assert message in str(error.value) and "`fp8_config" in str(error.value)
    check_scope(hf, layers, active("down_proj"))


@pytest.mark.parametrize(
    ("precision", "vocabulary", "patterns", "reason"),
    [
        ("delayed", 50257, (), "50257 is not a multiple of 16"),
        ("mxfp8", 272, (), "272 is not a multiple of 32"),
        ("delayed", 272, ("lm_head",), "keep_bf16: lm_head"),
        ("delayed", 272, (), None),
    ],
)
def test_a_head_that_would_stay_in_bf16_is_refused_if_it_is_requested(
    precision: str, vocabulary: int, patterns: tuple[str, ...], reason: str | None
) -> None:
    config = QWEN3 | {"vocab_size": vocabulary}
    hf = model.build_on_meta(load_config(ModelSettings(config=config)))
    layers = list(model.decoder_layers(hf).values())
    check_scope(hf, layers, active(*patterns, precision=precision))
    requested = active(*patterns, precision=precision, scope="linear+head")
    if reason is None:
        check_scope(hf, layers, requested)
        return
    with pytest.raises(
        InputError, match=r"`fp8_config\.scope: linear\+head`: the LM head"
    ) as error:
        check_scope(hf, layers, requested)
    assert f"would stay in BF16 in {precision} ({reason})" in str(error.value)
