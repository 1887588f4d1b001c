"""The ways in which low precision is known to fail without a word; the audit has one for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from foundation.errors import InputError
from pretrain.model import huggingface as model
from pretrain.model.gradients import attach_main_gradients
from pretrain.precision.scope import check_scope
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import ModelSettings
from pretrain.verify import audit
from tests.pretrain.verify.small_runs import ARCHITECTURES, LLAMA, SmallRun, build_run

QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]
Small = Callable[..., SmallRun]


@pytest.fixture
def small(accelerator: Accelerator) -> Small:
    """Builds a small model whose linears and head multiply in an emulated precision, ready to be audited."""

    def build(precision: str = "current", kind: str = "qwen3", **options: Any) -> SmallRun:
        return build_run(accelerator, precision, kind, weights=torch.bfloat16, **({"scope": "linear+head"} | options))

    return build


def refusal(run: SmallRun) -> str:
    with pytest.raises(InputError) as error:
        run.audit()
    return str(error.value)


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize(("kind", "linears"), [("qwen3", 15), ("gpt2", 9)])
def test_a_model_that_keeps_its_promise_passes(precision: str, kind: str, linears: int, small: Small) -> None:
    entries = small(precision, kind).audit()
    assert len(entries) == linears
    assert {(each["requested"], each["effective"], each["backend"]) for each in entries} == {(precision, precision, "emulation")}
    assert all(entry["products"].keys() == {"forward", "dgrad", "wgrad"} for entry in entries)


def test_a_sibling_that_was_skipped_is_found(small: Small) -> None:
    run = small()
    skipped = run.layers[1].mlp.up_proj
    plain = nn.Linear(*reversed(skipped.weight.shape), bias=False, device="meta")
    plain.weight = skipped.weight
    run.packed.hf.set_submodule("model.layers.1.mlp.up_proj", plain)
    assert "1 of 15 modules did not run in it as they should: model.layers.1.mlp.up_proj (forward bf" in refusal(run)


@pytest.mark.parametrize("main_gradients", [torch.float32, torch.bfloat16])
def test_a_parameter_that_nothing_computes_with_is_found(main_gradients: torch.dtype, small: Small) -> None:
    run = small()
    attach_main_gradients(run.packed, main_gradients)
    run.layers[0].input_layernorm.forward = lambda hidden: hidden
    assert "1 parameters get no gradient, model.layers.0.input_layernorm.weight" in refusal(run)


def test_a_backward_in_bf16_is_found(small: Small) -> None:
    """Straight-through fake quantization: forward is right, and both gradients are products of BF16 operands."""
    run = small()
    module = run.layers[0].mlp.down_proj
    quantize = module.product

    def forward_only(x: torch.Tensor, weight: torch.Tensor, bias: None, **options: Any) -> torch.Tensor:
        plain = F.linear(x, weight)
        return plain + (quantize(x, weight, bias, **options) - plain).detach()

    module.products[run.packed.context.backend] = forward_only
    message = refusal(run)
    assert "1 of 15" in message and "layers.0.mlp.down_proj (forward bfloat16 x bfloat16, dgrad not run, wgrad not run" in message


# ── What is decided ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reasons(run: SmallRun) -> dict[str, str]:
    return {name: decision.reason for name, decision in run.decisions.items() if decision.reason}


def by_name(run: SmallRun) -> dict[str, audit.Entry]:
    return {entry["name"]: entry for entry in run.audit()}


def test_scope_linear_leaves_the_head_out_and_nothing_else(small: Small) -> None:
    run = small(scope="linear")
    assert reasons(run) == {"lm_head": "scope linear leaves the LM head out"}
    head = by_name(run)["lm_head"]
    assert (head["requested"], head["effective"], head["backend"]) == ("bf16", "bf16", "torch")


@pytest.mark.parametrize(("end", "layer"), [("first", 0), ("last", 1)])
def test_layers_at_either_end_can_be_kept(end: str, layer: int, small: Small) -> None:
    kept = reasons(small(keep_bf16_layers={end: 1}))
    assert len(kept) == 7 and all(name.startswith(f"model.layers.{layer}.") for name in kept)
    assert set(kept.values()) == {"keep_bf16_layers"}


def test_matrices_that_are_no_linear_s_are_listed_as_what_they_are(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacked experts of a mixture hold most of its weights, and no recipe converts them."""
    sizes = {key: value for key, value in LLAMA.items() if key != "head_dim"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", sizes | experts)
    entries = by_name(small(kind="qwen3_moe"))
    expert, query = (entries[f"model.layers.1.{name}"] for name in ("mlp.experts", "self_attn.q_proj"))
    assert (expert["effective"], expert["backend"], expert["stored"]) == ("bf16", "torch", "bfloat16")
    assert expert["module"] == "Qwen3MoeExperts" and "no linear" in expert["reason"]
    assert query["effective"] == "current" and entries["model.layers.1.mlp.gate"]["effective"] == "bf16"


def test_shapes_that_a_recipe_cannot_take_are_kept_one_by_one(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "qwen3", LLAMA | {"intermediate_size": 200})
    run = small("mxfp8")
    names = [f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ("gate_proj", "up_proj", "down_proj")]
    assert reasons(run) == dict.fromkeys(names, "200 is not a multiple of 32")
    effective = {name: entry["effective"] for name, entry in by_name(run).items()}
    assert effective["model.layers.0.mlp.up_proj"] == "bf16" and effective["model.layers.0.self_attn.q_proj"] == "mxfp8"


@pytest.mark.parametrize(("scope", "refused"), [("linear", True), ("linear+head", False)])
def test_a_model_of_which_a_recipe_can_take_no_linear_is_refused(scope: str, refused: bool) -> None:
    """It would train in BF16 from beginning to end, under the name of a low precision."""
    odd = {"hidden_size": 128, "intermediate_size": 100, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 36}
    settings = ModelSettings(config={"model_type": "qwen3", "vocab_size": 128, "num_hidden_layers": 1, **odd})
    shapes = model.build_on_meta(model.load_config(settings))
    active = ActivePrecision("block", PRECISIONS["block"], "emulation", LowPrecisionSettings(scope=scope).resolved("block"))
    with pytest.raises(InputError, match="is left no linear of Qwen3ForCausalLM") if refused else nullcontext():
        check_scope(shapes, list(model.decoder_layers(shapes).values()), active)
