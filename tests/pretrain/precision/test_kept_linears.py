"""Patterns of `fp8_config.keep_bf16`: the linears that they match, and invalid patterns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from pretrain.model import huggingface as model
from pretrain.model.configuration import load_config
from pretrain.precision.scope import check_scope, decide, is_called
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.conftest import active_in

QWEN3 = {"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256}
QWEN3 |= {"num_hidden_layers": 12, "vocab_size": 256}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def built(config: dict[str, Any]) -> tuple[PreTrainedModel, list[nn.Module]]:
    """Return a model without weights, and its layers."""
    hf = model.build_on_meta(load_config(ModelSettings(config=config)))
    return hf, list(model.decoder_layers(hf).values())


@pytest.fixture(scope="module")
def qwen3() -> tuple[PreTrainedModel, list[nn.Module]]:
    return built(QWEN3)


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


def test_a_kept_linear_names_its_pattern(qwen3: Any) -> None:
    settings = active("down_proj", "layers.0.*", scope="linear+head", keep_bf16_layers={"last": 1})
    decisions = decide(*qwen3, settings)
    reasons = {name: decision.reason for name, decision in decisions.items() if decision.reason}
    assert len(reasons) == 7 + 7 + 10  # two layers and down_proj of the remaining ten
    for name, reason in {
        "0.mlp.down_proj": "keep_bf16: down_proj",
        "5.mlp.down_proj": "keep_bf16: down_proj",
        "0.self_attn.q_proj": "keep_bf16: layers.0.*",
        "11.mlp.up_proj": "keep_bf16_layers",
    }.items():
        assert reasons[f"model.layers.{name}"] == reason
    requested = {decision.requested for decision in decisions.values() if not decision.reason}
    assert requested == {"delayed"}


def test_nvfp4_keeps_its_last_layers_by_default(qwen3: Any) -> None:
    last = ("model.layers.10.", "model.layers.11.")  # 15 % of 12, rounded up
    decisions = decide(*qwen3, active(precision="nvfp4"))
    for name, decision in decisions.items():
        if name != "lm_head":
            assert decision.reason == ("keep_bf16_layers" if name.startswith(last) else None)
    decisions = decide(*qwen3, active(precision="nvfp4", keep_bf16_layers={"first": 1}))
    for layer in (0, 11):
        assert decisions[f"model.layers.{layer}.mlp.up_proj"].reason == "keep_bf16_layers"
    more_than_all = decide(*qwen3, active(keep_bf16_layers={"last": 13}))
    assert all(decision.reason for decision in more_than_all.values())


DOGE = {"is_moe": True, "num_experts": 64, "num_attention_heads": 16, "num_key_value_heads": 16}


@pytest.mark.parametrize(
    ("kind", "sizes", "routers"),
    [
        # A subclass of Linear with another forward.
        ("phimoe", {"num_local_experts": 16, "num_experts_per_tok": 2}, {"mlp.router"}),
        # The router contains a linear.
        ("hunyuan_v1_moe", {"num_experts": 16, "moe_topk": 2}, {"mlp.gate.wg"}),
        (
            "jetmoe",
            {"num_local_experts": 16, "kv_channels": 32},
            {"mlp.router.layer", "self_attention.experts.router.layer"},
        ),
        # The block that records the logits has other linears, which are no routers.
        ("doge", DOGE, {"mlp.router_gate"}),
    ],
)
def test_only_the_router_stays_unquantized(
    kind: str, sizes: dict[str, int], routers: set[str]
) -> None:
    config = {**QWEN3, "model_type": kind, "num_hidden_layers": 1, **sizes}
    if kind == "jetmoe":  # jetmoe calls this key kv_channels.
        del config["head_dim"]
    experts = (".gate_up_proj", ".down_proj")
    decisions = decide(*built(config), active())
    kept = {name for name, made in decisions.items() if made.reason and not name.endswith(experts)}
    assert kept == {"lm_head", *(f"model.layers.0.{name}" for name in routers)}


@given(layers=st.integers(1, 200), first=st.integers(0, 3))
def test_nvfp4_keeps_15_percent_rounded_up_but_not_all_layers(layers: int, first: int) -> None:
    kept = active(precision="nvfp4", keep_bf16_layers={"first": first}).kept_layers(layers)
    assert kept == (first, max(0, min(-(-15 * layers // 100), layers - first - 1)))
    other = active(keep_bf16_layers={"first": first})
    assert other.kept_layers(layers) == (first, 0), "other precisions keep none"
    last = active(precision="nvfp4", keep_bf16_layers={"last": first})
    assert last.kept_layers(layers) == (0, first)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.12.*"], "'layers.12.*' matches no linear layer"),
        (["down_proj", "dwon_proj"], "'dwon_proj' matches no linear layer"),
        (["layers.*"], "can compute in this precision (keep_bf16: layers.*; scope linear"),
    ],
)
def test_patterns_that_match_no_or_all_linears_are_rejected(
    qwen3: Any, patterns: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        check_scope(*qwen3, active(*patterns))
    assert "`fp8_config" in str(error.value)
    check_scope(*qwen3, active("down_proj"))


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
    model_and_layers = built(QWEN3 | {"vocab_size": vocabulary})
    check_scope(*model_and_layers, active(*patterns, precision=precision))
    requested = active(*patterns, precision=precision, scope="linear+head")
    if reason is None:
        check_scope(*model_and_layers, requested)
        return
    with pytest.raises(InputError, match=rf"`fp8_config\.scope: linear\+head`: .*\({reason}\)"):
        check_scope(*model_and_layers, requested)
